// Package imagevolume gives containers OCI images, or parts of them, as
// directories, asked for by pod annotations (see package request for their form).
//
// A Manager is told what happens to pods and containers, and answers which
// mounts a new container gets. Its rules:
//
//   - Telling never waits for a disk, a registry or the store. All work is done
//     by goroutines that Run owns: an image is pulled, leased and mounted on the
//     host from the moment its pod's sandbox runs.
//   - A container is answered from memory. Its volume is there, complete, or the
//     answer is an error that says how far it is; nothing in between.
//   - An image is leased before it is mounted, and stays leased and mounted
//     while a sandbox asks for it or any process on the node has it in its mount
//     table. What nobody needs is let go.
//   - A volume is read-only, or has room for what is written, which is one
//     container's or one pod's and goes with it. Images are never written to.
//   - Each image, or choice of its layers, is mounted once. A sub path is a part
//     of that mount, several images are a mount over theirs. The key of a mount
//     names its images (see key.go): it is how they are held, and found again.
//   - An image that is on the node already is given only to pods of a namespace
//     for which the store knows, or now proves, that it may have it.
//   - The image of a native volume, which the container runtime mounts itself, is
//     leased from the creation of its container, in the background, as long as the
//     container runs or a process has the runtime's mount of it.
//   - There is no state on disk. What is leased is asked of the store, what is
//     used of the kernel, which pods there are of the container runtime, whose
//     list is given to Synchronize. Before that has happened once, and whenever
//     a reading is incomplete, nothing is let go.
//
// The interfaces Store and Mounts are what the Manager needs of the rest.
package imagevolume
