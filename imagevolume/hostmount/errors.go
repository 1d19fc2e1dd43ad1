package hostmount

import "errors"

var (
	// ErrTooManyLayers is returned when an image has more layers than the
	// way of mounting in force can take. Nothing was mounted.
	ErrTooManyLayers = errors.New("too many layers for one overlay mount")

	// errUnsupported says that the kernel lacks what the mount API in
	// question needs.
	errUnsupported = errors.New("not supported by this kernel")
)
