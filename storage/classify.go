package storage

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/docker/distribution/registry/api/errcode"
	v2 "github.com/docker/distribution/registry/api/v2"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/signature"
	istorage "go.podman.io/image/v5/storage"
)

// classify wraps an error of a pull from registry with the sentinel that says what kind it is, and says what to look at.
// What it does not know it returns as it is.
func classify(registry string, err error) error {
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrUnsupported), errors.Is(err, ErrSignature), errors.Is(err, ErrEncrypted),
		errors.Is(err, ErrInvalidArtifact), errors.Is(err, ErrTooLarge), errors.Is(err, ErrDiskFull):
		return err
	case errors.Is(err, errStalled):
		return fmt.Errorf("%w: registry %s: %w", ErrRegistryUnavailable, registry, err)
	case isSignature(err):
		return fmt.Errorf("%w: %w: see policy.json", ErrSignature, err)
	case isDiskFull(err):
		return fmt.Errorf("%w: %w", ErrDiskFull, err)
	case isLeaning(err):
		return fmt.Errorf("%w: %w", ErrLeans, err)
	case isDigestMismatch(err):
		return fmt.Errorf("%w: registry %s, or a proxy before it, sends other content than it promises: %w", ErrDigestMismatch, registry, err)
	case isUnauthorized(err):
		return fmt.Errorf("%w: registry %s: %w: check the credentials in the auth file, or whether the image exists", ErrUnauthorized, registry, err)
	case isNotFound(err):
		return fmt.Errorf("%w: registry %s: %w", ErrNotFound, registry, err)
	case isUnavailable(err):
		return fmt.Errorf("%w: registry %s: %w", ErrRegistryUnavailable, registry, err)
	default:
		return err
	}
}

func isSignature(err error) bool {
	_, requirement := errors.AsType[signature.PolicyRequirementError](err)
	_, invalid := errors.AsType[signature.InvalidSignatureError](err)
	return requirement || invalid
}

// isDiskFull looks at the text too: layers are unpacked by a child process, whose errors arrive as text.
func isDiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) ||
		strings.Contains(err.Error(), syscall.ENOSPC.Error()) || strings.Contains(err.Error(), syscall.EDQUOT.Error())
}

// isWriteFailure tells whether err may be of a file system that does not take what is written to it.
func isWriteFailure(err error) bool {
	if err == nil {
		return false
	}
	text := err.Error() // containers/image does not wrap all of them
	return isDiskFull(err) || strings.Contains(text, syscall.EIO.Error()) || strings.Contains(text, syscall.EROFS.Error())
}

// isLeaning tells whether the overlay driver missed the short link of a layer (containers/storage, overlay.go, getLower):
// it is in another root.
func isLeaning(err error) bool {
	missing, ok := errors.AsType[*fs.PathError](err)
	return ok && missing.Op == "readlink" && errors.Is(missing, fs.ErrNotExist) && filepath.Base(filepath.Dir(missing.Path)) == "l"
}

// isDigestMismatch looks at texts of containers/image 5.42, which has types for few of these errors.
func isDigestMismatch(err error) bool {
	if errors.Is(err, istorage.ErrBlobDigestMismatch) || errors.Is(err, istorage.ErrBlobSizeMismatch) {
		return true
	}
	for _, text := range []string{
		"Digest did not match",                             // copy/digesting_reader.go
		"Manifest does not match provided manifest digest", // internal/image/unparsed.go
		"config validation failed",                         // internal/image/oci.go, docker_schema2.go
		"does not match config's DiffID",                   // storage/storage_dest.go
	} {
		if strings.Contains(err.Error(), text) {
			return true
		}
	}
	return false
}

func isUnauthorized(err error) bool {
	if _, ok := errors.AsType[docker.ErrUnauthorizedForCredentials](err); ok {
		return true
	}
	return hasCode(err, errcode.ErrorCodeUnauthorized, errcode.ErrorCodeDenied) ||
		hasStatus(err, http.StatusUnauthorized, http.StatusForbidden)
}

func isNotFound(err error) bool {
	// Harbor and registry.redhat.io answer so.
	if coded, ok := errors.AsType[errcode.Error](err); ok && coded.Code == errcode.ErrorCodeUnknown &&
		strings.Contains(strings.ToLower(coded.Message), "not found") {
		return true
	}
	return hasCode(err, v2.ErrorCodeManifestUnknown, v2.ErrorCodeNameUnknown, v2.ErrorCodeBlobUnknown) || hasStatus(err, http.StatusNotFound)
}

func isUnavailable(err error) bool {
	if unexpected, ok := errors.AsType[docker.UnexpectedHTTPStatusError](err); ok && unexpected.StatusCode >= http.StatusInternalServerError {
		return true
	}
	_, isURL := errors.AsType[*url.Error](err)
	return isURL || isNet(err) ||
		errors.Is(err, docker.ErrTooManyRequests) ||
		errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) ||
		hasCode(err, errcode.ErrorCodeUnavailable, errcode.ErrorCodeTooManyRequests)
}

// isNet leaves out what a disk may answer too: an errno by itself calls itself a net.Error.
func isNet(err error) bool {
	found, ok := errors.AsType[net.Error](err)
	_, isErrno := found.(syscall.Errno)
	return ok && !isErrno
}

func hasCode(err error, codes ...errcode.ErrorCode) bool {
	var coded errcode.ErrorCoder // not an error itself, which errors.AsType asks for
	if !errors.As(err, &coded) {
		return false
	}
	for _, c := range codes {
		if coded.ErrorCode() == c {
			return true
		}
	}
	return false
}

// hasStatus reads the status of answers whose body is no registry error. Their type in containers/image is not exported;
// "StatusCode: %d" is how docker/errors.go words them.
func hasStatus(err error, statuses ...int) bool {
	for _, s := range statuses {
		if strings.Contains(err.Error(), fmt.Sprintf("StatusCode: %d,", s)) {
			return true
		}
	}
	return false
}
