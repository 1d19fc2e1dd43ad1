package storage

import (
	"context"
	"fmt"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/shortnames"
)

// PullNames returns the full names by which ref may be pulled, with a tag or a digest each: one, or for a short name all
// that registries.conf gives. It returns ErrInvalidReference, also for an image id.
func (r *Root) PullNames(ref string) ([]string, error) {
	candidates, err := r.pullCandidates(ref)
	if err != nil {
		return nil, fmt.Errorf("find what %q may be pulled by: %w", ref, err)
	}
	return textOf(candidates), nil
}

func textOf(names []reference.Named) []string {
	texts := make([]string, len(names))
	for i, n := range names {
		texts[i] = n.String()
	}
	return texts
}

// PresentNames returns the full names by which an image in the root may be what ref means: its own, where ref is an image
// id, the beginning of one, or a short name; else that which ref is.
func (r *Root) PresentNames(ctx context.Context, ref, imageID string) ([]string, error) {
	if names, err := r.PullNames(ref); err == nil && !shortnames.IsShortName(ref) {
		return names, nil
	}
	image, err := r.Resolve(ctx, imageID)
	return image.Names, err
}
