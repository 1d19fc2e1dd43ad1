package storage

import (
	"context"
	"fmt"

	"github.com/docker/go-units"
	"go.podman.io/image/v5/types"
)

// CheckSize returns ErrTooLarge for an image in the root whose layers have more than limit bytes in all, as its manifest
// lists them: as they were transferred, not as they are on disk. 0 is no limit. It returns ErrNotFound or ErrBadRecord.
func (r *Root) CheckSize(ctx context.Context, imageID string, limit int64) error {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("check the size of image %s: %w", imageID, err)
	}
	return r.checkSize(imageID, limit)
}

func (r *Root) checkSize(imageID string, limit int64) error {
	if limit == 0 {
		return nil
	}
	record, err := r.resolveID(imageID)
	if err != nil {
		return err
	}
	kept, err := r.keptLayers(record)
	if err != nil {
		return err
	}
	layers := make([]types.BlobInfo, len(kept))
	for i, l := range kept {
		layers[i] = l.BlobInfo
	}
	return checkSize(layers, limit)
}

// checkSize returns ErrTooLarge where the layers have more than limit bytes in all, or do not say.
func checkSize(layers []types.BlobInfo, limit int64) error {
	if limit == 0 {
		return nil
	}
	left := limit
	for _, l := range layers {
		if l.Size < 0 {
			return fmt.Errorf("%w: the manifest does not say how large layer %s is, and %s are allowed", ErrTooLarge, l.Digest, units.HumanSize(float64(limit)))
		}
		if l.Size > left {
			return fmt.Errorf("%w: its layers have more than %s in all", ErrTooLarge, units.HumanSize(float64(limit)))
		}
		left -= l.Size
	}
	return nil
}
