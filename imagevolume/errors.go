package imagevolume

import "errors"

var (
	// ErrNotPresent is what a Store returns, wrapped, when it does not have
	// the image.
	ErrNotPresent = errors.New("image is not present on the node")

	// ErrNotPermitted is what a Store returns, wrapped, for an image that is
	// present and not proven to be for the pod's namespace.
	ErrNotPermitted = errors.New("access to it is not proven")

	// ErrPullPolicyNever is returned for a volume with pull policy Never
	// whose image is not there. The name is that of kubelet's reason
	// (KEP-4639).
	ErrPullPolicyNever = errors.New("ErrImageNeverPull")
)
