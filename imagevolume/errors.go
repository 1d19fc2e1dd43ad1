package imagevolume

import "errors"

var (
	// ErrNotPresent is what a Store returns, wrapped, when it does not have
	// the image.
	ErrNotPresent = errors.New("image is not present on the node")

	// ErrPullPolicyNever is returned for a volume with pull policy Never
	// whose image is not there. The name is that of kubelet's reason
	// (KEP-4639).
	ErrPullPolicyNever = errors.New("ErrImageNeverPull")
)
