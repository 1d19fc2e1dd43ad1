// Package storage opens one containers/storage root and resolves, pulls, lists and holds the images in it.
//
// # Terms
//
// A root is a graph root together with its run root, as CRI-O's root and runroot name them. Other programs (CRI-O,
// podman, buildah, skopeo) may work on the same root at the same time; containers/storage's file locks order their work
// and ours.
//
// A lease holds an image in its root against all of them. It is two things, both named after the image id, so that any
// process can find, complete or release it:
//
//   - a container record of the image: while it exists, deleting the image is refused in every program that shares the
//     root (containers/storage: "image is in use by a container");
//   - a child layer of the image's top layer: a forced removal takes the record away and then the image, but a layer
//     with children stays, and so does the content.
//
// # Guarantees
//
//   - A reference means the same image as it means to CRI-O and podman; [Root.Resolve] says where those two differ.
//   - There is one transfer per image at a time in a process; whoever asks for it meanwhile shares it and may leave it.
//   - An image whose pull failed or was cancelled is not visible, and its temporary files are gone. Layers that were
//     complete by then stay, unreferenced, and the next pull of the image takes up there.
//   - Taking a lease is atomic against the removal of the image: either it fails with [ErrNotFound] or the image stays.
//   - A root is never shut down, and nothing in it is unmounted.
//
// # Caveats
//
// Only the overlay driver is supported, without mount_program and without composefs. Additional image and layer stores
// that the options name are left out: every image is looked for in the root itself, and a pull writes all its layers
// there.
//
// Calls wait for file locks that other programs hold, in rare cases for seconds. None belongs in a place that has to
// answer at once.
//
// A program that uses this package calls reexec.Init (go.podman.io/storage/pkg/reexec) first in main: layers are
// unpacked by a child process.
package storage
