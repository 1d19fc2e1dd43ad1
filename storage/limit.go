package storage

import (
	"context"
	"errors"
	"fmt"

	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// CheckSize returns ErrTooLarge for an image in the root whose layers have more bytes in all than the limit, as its
// manifest lists them or unpacked. It returns ErrNotFound or ErrBadRecord.
func (r *Root) CheckSize(ctx context.Context, imageID string, limit Limit) error {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("check the size of image %s: %w", imageID, err)
	}
	return r.checkSize(imageID, limit)
}

func (r *Root) checkSize(imageID string, limit Limit) error {
	if limit.Bytes == 0 {
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
	if err := checkSize(layers, limit); err != nil || isOfArtifact(record) { // whose files are as large as its blobs, or were unpacked
		return err
	}
	unpacked := budget{limits: []Limit{limit}}
	for id := record.TopLayer; id != ""; {
		layer, err := r.store.Layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			layer, err = r.lent(id)
		}
		if err != nil {
			return fmt.Errorf("look for layer %s: %w", id, err)
		}
		unpacked.start(layer.CompressedDigest, unpacked.spent)
		if err := unpacked.spend(max(0, layer.UncompressedSize)); err != nil {
			return err
		}
		id = layer.Parent
	}
	return nil
}

// checkSize returns ErrTooLarge where the layers have more bytes in all, or do not say.
func checkSize(layers []types.BlobInfo, limit Limit) error {
	if limit.Bytes == 0 {
		return nil
	}
	left := limit.Bytes
	for _, l := range layers {
		if l.Size < 0 {
			return fmt.Errorf("%s: %w: the manifest does not say how large layer %s is, and %s are allowed", limit.Setting, ErrTooLarge, l.Digest, limit)
		}
		if l.Size > left {
			return fmt.Errorf("%s: %w: its layers have more than %s in all", limit.Setting, ErrTooLarge, limit)
		}
		left -= l.Size
	}
	return nil
}
