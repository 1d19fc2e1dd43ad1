// Package integration tests ocihold as a node runs it: a real CRI-O, a real
// registry, real overlay mounts. Every test ends with the invariant that
// nothing is left of its pods; see realnode.Node.AssertClean.
//
// OCIHOLD_SOAK=1 runs the full counts; a count in a test is written as
// count(scaled, full). It also runs the tests with a real kubelet, as
// OCIHOLD_KUBELET=1 does; OCIHOLD_RECORD=1 then records anew what kubelet says.
package integration
