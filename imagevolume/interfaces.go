package imagevolume

import (
	"context"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
)

// Image is an image in a root.
type Image struct {
	// Root names the root: a handler's name, or "" for CRI-O's own. A Store
	// leaves it empty; the Manager knows which it asked.
	Root string
	// ID is the image ID: 64 hexadecimal digits.
	ID string
	// Digest is the digest of the manifest.
	Digest string
}

// plain is the image by what tells it from others.
func (img Image) plain() Image { return Image{Root: img.Root, ID: img.ID} }

// Progress says how far a pull is. Total is 0 while it is not known. Both are
// in bytes.
type Progress struct{ Done, Total int64 }

// Stores are the roots of the node's runtime handlers, and what the node allows.
type Stores interface {
	// Root names the root for pods of the runtime handler: "" is CRI-O's own,
	// which every handler without a root of its own shares. It answers from
	// memory.
	Root(handler string) string
	// Roots lists the names of all roots.
	Roots() []string
	// AllowScratch returns ErrNotAllowed where no pod may have that much room to
	// write to. It answers from memory.
	AllowScratch(bytes int64) error
	// Store opens a root. It returns an error when the root is not there, as
	// when its disk is not mounted; later it may be.
	Store(root string) (Store, error)
}

// Store is a root of images. Every method may wait for disks, locks of other
// programs and, for Pull, a registry; none is called by a Manager while
// somebody waits for an answer.
type Store interface {
	// Resolve finds the image that a reference or ID names. It returns
	// ErrNotPresent when there is none.
	Resolve(ctx context.Context, ref string) (Image, error)
	// Pull makes the image that the registry has under ref present, for pods of
	// the namespace. Pulls of one reference at a time share one transfer. It
	// returns ErrNotAllowed before a layer is transferred.
	Pull(ctx context.Context, ref, namespace string, progress func(Progress)) (Image, error)
	// Permit returns nil where pods of the namespace may have the image, which is
	// present and which they call ref: that is allowed, and it was proven. Where
	// it was not, it asks the registry, if ask is set, and keeps a proof. It returns
	// ErrNotAllowed, ErrNotPermitted or ErrNotPresent. What Pull returns needs no
	// other proof.
	Permit(ctx context.Context, imageID, ref, namespace string, ask bool) error
	// Lease keeps the image from being deleted, by any program. It is
	// idempotent, and atomic against a deletion: ErrNotPresent or held.
	Lease(ctx context.Context, imageID string) error
	// Release ends the lease. It is idempotent.
	Release(ctx context.Context, imageID string) error
	// Leases returns the IDs of all images leased. One that is false here is
	// not whole: somebody has removed the image or a part of its lease. Lease
	// mends it where the image is there, Release clears it away.
	Leases(ctx context.Context) (map[string]bool, error)
	// MountedAt finds the images whose layers the container runtime mounts
	// together at one of dirs: their IDs by directory. Leased ones that were
	// removed by force are among them; several images can have the same layers.
	MountedAt(ctx context.Context, dirs []string) (map[string][]string, error)
	// LowerDirs returns the directories of the image's layers, topmost first: of
	// all, or of those whose media type one of the patterns matches (see
	// request.Source). It returns an error that lists the types there are where no
	// layer has any of them.
	LowerDirs(ctx context.Context, imageID string, mediaTypes []string) ([]string, error)
}

// Mounts is where volumes are mounted on the host, each under a key. See
// package hostmount, whose Dir it is.
type Mounts interface {
	Path(key string) string
	// Key is the inverse of Path; "" for a path that is not a mount's.
	Key(path string) string
	// IDMap describes how the user namespace that is bound at a path maps ids. It is
	// not empty.
	IDMap(userNS string) (string, error)
	// Ensure mounts what spec says for key, once.
	Ensure(key string, spec hostmount.Spec) error
	// EnsureWritable mounts parts for key, once, with room for size bytes over
	// them, which goes with the mount.
	EnsureWritable(ctx context.Context, key string, parts []hostmount.Part, size int64) error
	// Mounted is fast: memory or a system call.
	Mounted(key string) bool
	// Release detaches the mount of key; it is idempotent.
	Release(key string) error
	// Keys lists what is mounted, and what a crash left half made.
	Keys() ([]string, error)
	// InUse returns the keys that processes have mounted, and the topmost lower
	// directories of all other overlays that they have. With an error the
	// answer is incomplete.
	InUse(ctx context.Context) (keys, lowers map[string]bool, err error)
}
