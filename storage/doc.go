// Package storage opens containers/storage roots, CRI-O's own and those of handlers, and resolves, pulls, imports, lists, holds
// and removes the images in them.
//
// # Terms
//
// A root is a graph root together with its run root, as CRI-O's root and runroot name them. Other programs (CRI-O,
// podman, buildah, skopeo) may work on the same root at the same time; containers/storage's file locks order their work
// and ours.
//
// Handler roots are separate from each other and from CRI-O's own, and CRI-O reads them as additional image stores.
// [Roots] are all of them. Each handler root carries a marker file, so that it is not written to while its disk is not
// mounted.
//
// An image of CRI-O's own root leans on a handler root when it needs layers that are there: CRI-O, when it pulls by
// itself, stores only the layers that no additional store has. Pulls by this package never make one, and [Roots.Mend]
// gives CRI-O's root what such an image lacks.
//
// An OCI artifact becomes an image when it is pulled or imported: each of its blobs is a layer, the files of an archive or
// one file, and the image has a config and a manifest that say so. The artifact's manifest is kept with it, and its digest
// is the image's. From then on there is no difference.
//
// A lease holds an image in its root against all of them. It is two things, both named after the image id, so that any
// process can find, complete or release it:
//
//   - a container record of the image: while it exists, deleting the image is refused in every program that shares the
//     root (containers/storage: "image is in use by a container");
//   - a child layer of the image's top layer: a forced removal takes the record away and then the image, but a layer
//     with children stays, and so does the content.
//
// With [Options.Pin] there is a name of the image besides, for a kubelet that asks CRI-O for images.
//
// # Guarantees
//
//   - A reference means the same image as it means to CRI-O and podman; [Root.Resolve] says where those two differ.
//   - There is one transfer per image and credentials at a time in a process; whoever asks for it meanwhile shares it and may leave it.
//   - An image whose pull failed or was cancelled is not visible, and its temporary files are gone. Layers that were
//     complete by then stay, unreferenced, and the next pull of the image takes up there; but for an image that is too large,
//     unpacked, or for which the disk has no room: what nothing else has of that is gone.
//   - Taking a lease is atomic against the removal of the image: either it fails with [ErrNotFound] or the image stays.
//   - An image that anything in any root uses is not removed, nor is a layer of a handler root that CRI-O's own root
//     leans on; looking and removing are one under CRI-O's locks.
//   - A caller gets an image only if the registry answers its own credentials and, where the image is encrypted, the node
//     has the keys at that moment. For whom a pull has proven access is kept
//     on the image; see [Root.Proven].
//   - An image or layer that cannot be read is named, and does not stop the listing and the accounting of the others.
//   - What an artifact or an image has in its archives reaches no file outside its layers. A blob of an artifact is not
//     taken for whole before its size and digest are right, nor is it written to disk anywhere but in its layer.
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
