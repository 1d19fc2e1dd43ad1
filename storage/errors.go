package storage

import "errors"

var (
	// ErrNotFound is returned when the root has no such image, or the registry no such manifest.
	ErrNotFound = errors.New("image not found")

	// ErrAmbiguous is returned when an id prefix fits several images and no image has that text as its name.
	ErrAmbiguous = errors.New("image id prefix is ambiguous")

	// ErrInvalidReference is returned for text that is neither an image reference nor an image id.
	ErrInvalidReference = errors.New("invalid image reference")

	// ErrBadRecord is returned for an image whose record in the root is damaged: a name without a tag or digest, no
	// manifest, or a layer that is not there.
	ErrBadRecord = errors.New("bad image record")

	// ErrUnsupported is returned for what the package does not do: another driver than overlay, mount_program,
	// composefs, Docker's schema 1 manifests, encrypted OCI artifacts.
	ErrUnsupported = errors.New("not supported")

	// ErrInvalidArtifact is returned for an OCI artifact whose blobs cannot become files. The text names the blob.
	ErrInvalidArtifact = errors.New("invalid OCI artifact")

	// ErrTooLarge is returned for an image that is larger than a Limit; the text has its setting.
	ErrTooLarge = errors.New("image is too large")

	// ErrNoSuchLayer is returned where no layer of an image is of a media type that was asked for. The text lists the
	// types that there are.
	ErrNoSuchLayer = errors.New("it has no such layer")

	// ErrLeans is returned for a pull into CRI-O's own root that needs a layer there which lies on layers of a handler's
	// root: CRI-O has pulled it. [Roots.Mend] of the images that lean helps.
	ErrLeans = errors.New("layers in CRI-O's root lean on a handler's root")

	// ErrUnauthorized is returned when the registry refuses the pull with the credentials at hand.
	ErrUnauthorized = errors.New("registry refused access")

	// ErrRegistryUnavailable is returned when the registry cannot be reached, breaks off, or answers that it cannot
	// serve now.
	ErrRegistryUnavailable = errors.New("registry unavailable")

	// ErrDigestMismatch is returned when the registry sends other content than the digest asks for.
	ErrDigestMismatch = errors.New("digest mismatch")

	// ErrSignature is returned when the node's signature policy rejects the image.
	ErrSignature = errors.New("signature policy rejects the image")

	// ErrEncrypted is returned for an image with layers that no decryption key of the node opens.
	ErrEncrypted = errors.New("image is encrypted")

	// ErrDiskFull is returned when the root's or the temporary directory's file system is full, or would be: for pulls, and
	// for removals too, as containers/storage writes before it removes.
	ErrDiskFull = errors.New("disk full")

	// ErrUnproven is returned where nothing proves that an image in the root may be had with the node's credentials. The
	// text says why.
	ErrUnproven = errors.New("access is not proven")

	// ErrInUse is returned when something holds or runs an image that was to be removed. The text says what.
	ErrInUse = errors.New("image in use")

	// ErrUnmounted is returned for a root without its marker file: the disk that it is on is not mounted.
	ErrUnmounted = errors.New("root is not there")

	// ErrNewer is returned for what a newer version has left, in a form that this one does not know. It is left as it is.
	ErrNewer = errors.New("it was made by a newer ocihold: run that again")

	// ErrReadOnly is returned for a root whose disk became read-only, as ext4's does after an error: not even lists can
	// be read there, as containers/storage opens its lock files to write.
	ErrReadOnly = errors.New("its disk is read-only")

	// ErrEmptyList is returned for a root of which a list of containers/storage was cut to nothing, as some file systems
	// leave it after a loss of power. The text names the file.
	ErrEmptyList = errors.New("the list has no content, not even that it is of nothing")

	// ErrHung is returned for a root whose disk does not answer. When it does again, all goes on.
	ErrHung = errors.New("its disk does not answer")

	// ErrRunRoot is returned for a root that is in use with another run root than it is to be opened with. The text says
	// what uses it.
	ErrRunRoot = errors.New("root is in use with another run root")

	// ErrUnknownHandler is returned for a handler's name that no root has. The text lists those that there are.
	ErrUnknownHandler = errors.New("unknown handler")

	// ErrClosed is returned from calls on a closed [Root], and from pulls that its closing cut short.
	ErrClosed = errors.New("root is closed")
)

// IsAway tells whether err says that a root cannot be used now for its disk, which is not mounted or does not answer
// (ErrUnmounted, ErrHung): what is in other roots can.
func IsAway(err error) bool { return errors.Is(err, ErrUnmounted) || errors.Is(err, ErrHung) }
