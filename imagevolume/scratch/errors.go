package scratch

import (
	"errors"
	"fmt"
)

var (
	// ErrNoRoom is returned when the disk has less available than the Space
	// is to promise. Nothing was made.
	ErrNoRoom = errors.New("not enough room on the disk")

	// ErrUnsupported is returned, with the fix, when the node lacks what a
	// Space is made with: mkfs.ext4, loop devices.
	ErrUnsupported = errors.New("writable volumes need what this node lacks")

	errNoMkfs = fmt.Errorf("%w: %s is not there; install e2fsprogs", ErrUnsupported, mkfs)
)
