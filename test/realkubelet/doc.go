// Package realkubelet runs a real kubelet against a node of package realnode and
// records what it says over CRI.
//
// kubelet runs static pods. Its RuntimeService is CRI-O's and its ImageService
// is ocihold's, both through a [Recorder]. Its API server is a small one of this
// package, which has the RuntimeClasses and keeps what kubelet writes.
//
// Guarantees:
//
//   - kubelet is built from its own module, unchanged, and cached by version.
//   - Nothing is written outside of the node's directory: what kubelet insists to
//     have below /var is in a mount namespace of its own.
//   - The pods of a test are gone with it, and so is kubelet.
//
// Caveats: pods have the host's network and are of the BestEffort class. As the
// socket is not named crio.sock, kubelet takes the usage of file systems from
// CRI alone, not from what cAdvisor knows of an installed CRI-O.
package realkubelet
