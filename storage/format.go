package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// format is the newest form of marker files and leases that this version knows. What says nothing of its form has the
// first, which is all that there was so far.
const format = 1

// parseMarker returns the handler that a marker file names on its first line. A second line, "format N", says its form.
func parseMarker(content string) (handler string, err error) {
	handler, rest, _ := strings.Cut(strings.TrimSpace(content), "\n")
	if number, ok := strings.CutPrefix(strings.TrimSpace(rest), "format "); ok {
		if n, err := strconv.Atoi(number); err != nil || n > format {
			return "", fmt.Errorf("%w: it has format %s, and this one knows %d", ErrNewer, number, format)
		}
		return handler, nil
	}
	return strings.TrimSpace(content), nil
}

// checkLease returns ErrNewer for the metadata of a lease's record that is of a newer form.
func checkLease(metadata string) error {
	var form struct {
		Format int `json:"ocihold_format"`
	}
	if err := json.Unmarshal([]byte(metadata), &form); err == nil && form.Format > format {
		return fmt.Errorf("%w: a lease has format %d, and this one knows %d", ErrNewer, form.Format, format)
	}
	return nil
}

// CheckFormat returns ErrNewer where a newer version has left leases in a root that this one does not understand. Roots
// that cannot be read are passed over.
func (r *Roots) CheckFormat(ctx context.Context) error {
	roots, _ := r.all()
	for _, root := range roots {
		if _, err := Bounded(root, func() ([]Lease, error) { return root.Leases(ctx) }); errors.Is(err, ErrNewer) {
			return err
		}
	}
	return nil
}
