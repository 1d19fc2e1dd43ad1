package hostmount

import "errors"

var (
	// ErrTooManyLayers is returned when an image has more layers than the
	// way of mounting in force can take. Nothing was mounted.
	ErrTooManyLayers = errors.New("too many layers for one overlay mount")

	// ErrNewer is returned for a directory whose mounts a newer version has
	// made in a form that this one does not know. It is left as it is.
	ErrNewer = errors.New("mounts were made by a newer ocihold: run that again")

	// ErrOverlap is returned for parts of one mount that are the same, or of which
	// one is inside the other. Nothing was mounted.
	ErrOverlap = errors.New("two parts of one image are the same or one is inside the other; choose parts that lie apart")

	// ErrNoIDMap is returned when the layers' owners cannot be mapped for a user
	// namespace: by this kernel, or on their file system. Nothing was mounted.
	ErrNoIDMap = errors.New("the owners of the image's files cannot be mapped")

	// errUnsupported says that the kernel lacks what the mount API in
	// question needs.
	errUnsupported = errors.New("not supported by this kernel")
)
