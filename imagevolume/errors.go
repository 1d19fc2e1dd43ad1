package imagevolume

import "errors"

var (
	// ErrNotPresent is what a Store returns, wrapped, when it does not have
	// the image.
	ErrNotPresent = errors.New("image is not present on the node")

	// ErrNotPermitted is what a Store returns, wrapped, for an image that is
	// present and not proven to be for the pod's namespace.
	ErrNotPermitted = errors.New("access to it is not proven")

	// ErrNotAllowed is what a Store returns, wrapped, for an image or a namespace
	// that the node's settings do not allow volumes of. The text names the setting.
	ErrNotAllowed = errors.New("not allowed on this node")

	// ErrPullPolicyNever is returned for a volume with pull policy Never
	// whose image is not there. The name is that of kubelet's reason
	// (KEP-4639).
	ErrPullPolicyNever = errors.New("ErrImageNeverPull")

	// ErrMountFailed is returned for a volume whose images are there and do not
	// have what it asks for, or cannot be mounted. The text that a container is
	// refused with begins with this name, which is CRI's for such a failure.
	ErrMountFailed = errors.New("ImageVolumeMountFailed")
)

// mountFailure is an ErrMountFailed without the name, which is put before the
// whole text.
type mountFailure struct{ error }

func (f mountFailure) Is(target error) bool { return target == ErrMountFailed }
func (f mountFailure) Unwrap() error        { return f.error }
