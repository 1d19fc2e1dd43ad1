package storage

import (
	"fmt"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	cstorage "go.podman.io/storage"
)

// layerTypes returns the media types of an image's layers, lowest first: of one that was made of an artifact, those of
// the artifact's blobs.
func (r *Root) layerTypes(record *cstorage.Image) ([]string, error) {
	key := cstorage.ImageDigestBigDataKey
	if isOfArtifact(record) {
		key = artifactKey
	}
	content, err := r.store.ImageBigData(record.ID, key)
	if err != nil {
		return nil, fmt.Errorf("%w: manifest: %w", ErrBadRecord, err)
	}
	mime := manifest.GuessMIMEType(content)
	if key == artifactKey {
		mime = ispec.MediaTypeImageManifest
	}
	m, err := manifest.FromBlob(content, mime)
	if err != nil {
		return nil, fmt.Errorf("%w: manifest: %w", ErrBadRecord, err)
	}
	var types []string
	for _, l := range m.LayerInfos() {
		if !l.EmptyLayer {
			types = append(types, l.MediaType)
		}
	}
	return types, nil
}
