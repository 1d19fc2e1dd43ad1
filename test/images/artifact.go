package images

import (
	"encoding/json"
	"fmt"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Blob is one blob of an artifact.
type Blob struct {
	MediaType string
	// Title names the file; "" for a blob without a name.
	Title   string
	Content []byte
}

// emptyConfig is the config of artifacts that have none (OCI image spec 1.1).
const (
	emptyConfig          = "{}"
	emptyConfigMediaType = "application/vnd.oci.empty.v1+json"
)

// Artifact makes an OCI artifact as the OCI image spec 1.1 wants it: a manifest
// with an artifactType, the empty config, and the blobs as its layers.
func Artifact(artifactType string, blobs ...Blob) (v1.Image, error) {
	core := artifact{blobs: map[v1.Hash]v1.Layer{}}
	var layers []v1.Descriptor
	for _, b := range blobs {
		layer := static.NewLayer(b.Content, types.MediaType(b.MediaType))
		desc, err := partial.Descriptor(layer)
		if err != nil {
			return nil, fmt.Errorf("describe blob %q: %w", b.Title, err)
		}
		if b.Title != "" {
			desc.Annotations = map[string]string{"org.opencontainers.image.title": b.Title}
		}
		core.blobs[desc.Digest] = layer
		layers = append(layers, *desc)
	}
	config, err := partial.Descriptor(static.NewLayer([]byte(emptyConfig), emptyConfigMediaType))
	if err != nil {
		return nil, err
	}
	core.manifest, err = json.Marshal(v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1, ArtifactType: artifactType, Config: *config, Layers: layers,
	})
	if err != nil {
		return nil, err
	}
	return partial.CompressedToImage(core)
}

// artifact is the core that go-containerregistry makes an image of.
type artifact struct {
	manifest []byte
	blobs    map[v1.Hash]v1.Layer
}

var _ partial.CompressedImageCore = artifact{}

func (a artifact) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }
func (a artifact) RawManifest() ([]byte, error)        { return a.manifest, nil }
func (a artifact) RawConfigFile() ([]byte, error)      { return []byte(emptyConfig), nil }

func (a artifact) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	layer, ok := a.blobs[h]
	if !ok {
		return nil, fmt.Errorf("artifact has no blob %s", h)
	}
	return layer, nil
}
