package storage

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	cstorage "go.podman.io/storage"
)

// Config returns the image's config as its author wrote it, of a Docker image what OCI has too. It returns ErrNotFound
// or ErrBadRecord.
func (r *Root) Config(ctx context.Context, imageID string) (v1.Image, error) {
	if err := r.usable(ctx); err != nil {
		return v1.Image{}, fmt.Errorf("read the config of image %s: %w", imageID, err)
	}
	config, err := r.config(imageID)
	if err != nil {
		return v1.Image{}, fmt.Errorf("read the config of image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	return config, nil
}

func (r *Root) config(imageID string) (v1.Image, error) {
	record, err := r.resolveID(imageID)
	if err != nil {
		return v1.Image{}, err
	}
	blob, err := r.store.ImageBigData(record.ID, cstorage.ImageDigestBigDataKey)
	if err != nil {
		return v1.Image{}, fmt.Errorf("%w: manifest: %w", ErrBadRecord, err)
	}
	parsed, err := manifest.FromBlob(blob, manifest.GuessMIMEType(blob))
	if err != nil {
		return v1.Image{}, fmt.Errorf("%w: manifest: %w", ErrBadRecord, err)
	}
	if blob, err = r.store.ImageBigData(record.ID, parsed.ConfigInfo().Digest.String()); err != nil {
		return v1.Image{}, fmt.Errorf("%w: config: %w", ErrBadRecord, err)
	}
	var config v1.Image
	if err := json.Unmarshal(blob, &config); err != nil {
		return v1.Image{}, fmt.Errorf("%w: config: %w", ErrBadRecord, err)
	}
	return config, nil
}

// User returns whom the image's config wants its containers to run as: "", "uid", "uid:gid" or names in their place.
func (r *Root) User(ctx context.Context, imageID string) (string, error) {
	config, err := r.Config(ctx, imageID)
	return config.Config.User, err
}
