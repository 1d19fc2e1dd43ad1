// Package imageservice is CRI's ImageService (runtime.v1) over the handler roots, with CRI-O behind it for the rest.
//
// # Terms
//
// A handler is a runtime handler, as RuntimeClass names it. A handler has a root of its own, or its images are in the
// default root, which is CRI-O's. (image, handler) is the identity of an image: one name may be another image, of
// another platform, in each root.
//
// # Which handler a call is for
//
// The first of these that says something:
//
//  1. ImageSpec.runtime_handler.
//  2. The pod's annotation [HandlerAnnotation], or containerd's [ContainerdHandlerAnnotation]. kubelet copies a pod's
//     annotations into ImageSpec. A pod may choose only a handler with AllowAnnotation; to name the one that it would
//     get anyway is no choice, and allowed.
//  3. The first route whose pattern fits the image's name.
//  4. The default root.
//
// A handler that is not known is refused, with a list of those that are.
//
// # Guarantees
//
//   - A call that carries a handler or annotations never sees another root's copy.
//   - ImageStatus with neither is kubelet asking for the image's user before it creates a container, and an absent image
//     there means root. It is answered from any root, and is an error where the roots' images have different users.
//   - An image id is listed once, with all names and digests that the roots have for it. A bad record is left out and
//     logged; it never breaks a list.
//   - PullImage answers with the image id, which is what every other call has as Image.id.
//   - RemoveImage removes from every root, or, with a handler or annotations, from that handler's root; it removes
//     nothing while the image is in use in any root, or while CRI-O, which knows who uses it, does not answer.
//   - Credentials that come with a call are used for that call alone and are not written anywhere.
//   - What no root has, CRI-O is asked for, unless the question is for a handler with a root of its own: OCI artifacts
//     that CRI-O has pulled, images in additional stores of the administrator's.
//   - Every other service and method goes to CRI-O with its deadline and metadata, and comes back with headers,
//     trailers and errors as CRI-O gave them.
//
// # Caveats
//
// kubelet's and crictl's clients take messages up to 16 MiB; a longer list needs StreamImages.
package imageservice
