package storage

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/docker/distribution/registry/api/errcode"
	"go.podman.io/image/v5/docker"
	cstorage "go.podman.io/storage"
)

// retrying calls try again, after a while each time, as long as it fails in a way that may pass. What an attempt has
// stored by then the next one finds.
func (r *Root) retrying(ctx context.Context, try func() (Image, error)) (Image, error) {
	for _, wait := range r.backoff {
		image, err := try()
		if err == nil || ctx.Err() != nil || !passes(err) {
			return image, err
		}
		r.log.WithError(steady{err}).WithField("wait", wait).Debug("pull is tried again")
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return Image{}, err
		}
	}
	return try()
}

// passes tells whether the next attempt may succeed: after 5xx, cut connections, and where a layer was removed that
// this attempt had found in the root. A registry that cannot be reached is the caller's to try again.
func passes(err error) bool {
	if errors.Is(err, errStalled) {
		return false
	}
	if unexpected, ok := errors.AsType[docker.UnexpectedHTTPStatusError](err); ok && unexpected.StatusCode >= http.StatusInternalServerError {
		return true
	}
	if hasCode(err, errcode.ErrorCodeUnavailable) {
		return true
	}
	for _, cause := range []error{
		io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE,
		cstorage.ErrLayerUnknown, cstorage.ErrParentUnknown,
	} {
		if errors.Is(err, cause) {
			return true
		}
	}
	// net/http does not export the types that say so.
	for _, text := range []string{"stream error: ", "http2: server sent GOAWAY", "server closed idle connection"} {
		if strings.Contains(err.Error(), text) {
			return true
		}
	}
	return false
}
