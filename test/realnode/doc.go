// Package realnode boots a complete node for tests and demonstrations in one
// directory: a registry with a proxy before it, CRI-O with NRI and several
// runtime handlers, and ocihold.
//
// Guarantees:
//
//   - Everything a node writes lies in its directory, except two things: built
//     binaries, which are cached by version under $XDG_CACHE_HOME/ocihold-test,
//     and CRI-O's cache of blob locations, whose place CRI-O does not let one
//     choose. An installed CRI-O is not touched.
//   - The programs of a node outlive the process that started them, until
//     [Node.Down].
//   - Down needs nothing but the directory. It finds what belongs to the node by
//     what the kernel shows (environment, root mounts, mount points, cgroups), so
//     it also cleans up after everything was killed.
//   - Nodes in different directories do not disturb each other.
//
// Caveats: root is needed. Pods get the host's network and a process namespace
// of their own, so that CRI-O makes no infra container, which needs
// CAP_SYS_RESOURCE. Nothing is pulled from outside: the base image is made from
// Debian's busybox-static and the pause image is built here.
package realnode
