package images

import (
	"bytes"
	"fmt"
	"io"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Packing is how an image's layers are compressed, and which kind of manifest
// lists them.
type Packing string

// The ways to pack an image.
const (
	// Gzip is an OCI manifest with gzipped layers. It is what "" means.
	Gzip Packing = "gzip"
	// Plain is an OCI manifest with tars as they are.
	Plain Packing = "plain"
	// Zstd is an OCI manifest with layers compressed by zstd.
	Zstd Packing = "zstd"
	// EStargz is an OCI manifest with gzipped layers that have a table of
	// contents, as files of their own, for clients that fetch files one by one.
	EStargz Packing = "estargz"
	// Docker is Docker's manifest, schema 2, with gzipped layers.
	Docker Packing = "docker"
)

func (p Packing) manifest() (manifest, config types.MediaType) {
	if p == Docker {
		return types.DockerManifestSchema2, types.DockerConfigJSON
	}
	return types.OCIManifestSchema1, types.OCIConfigJSON
}

// layer makes a layer of entries.
func (p Packing) layer(entries []Entry) (mutate.Addendum, error) {
	var layer v1.Layer
	annotations := map[string]string{}
	var err error
	switch p {
	case Plain:
		var content []byte
		if content, err = tarOf(entries); err == nil {
			layer = static.NewLayer(content, types.OCIUncompressedLayer)
		}
	case EStargz:
		layer, err = stargz(entries, annotations)
	case Zstd:
		layer, err = tarball.LayerFromOpener(piped(entries), tarball.WithCompression(compression.ZStd), tarball.WithMediaType(types.OCILayerZStd))
	case Docker:
		layer, err = tarball.LayerFromOpener(piped(entries), tarball.WithMediaType(types.DockerLayer))
	default:
		layer, err = Layer(entries...)
	}
	if err != nil {
		return mutate.Addendum{}, fmt.Errorf("make %s layer: %w", p, err)
	}
	return mutate.Addendum{Layer: layer, Annotations: annotations, History: v1.History{Created: v1.Time{Time: epoch}}}, nil
}

// stargz makes an eStargz layer and sets the annotations that go with it.
func stargz(entries []Entry, annotations map[string]string) (v1.Layer, error) {
	content, err := tarOf(entries)
	if err != nil {
		return nil, err
	}
	blob, err := estargz.Build(io.NewSectionReader(bytes.NewReader(content), 0, int64(len(content))))
	if err != nil {
		return nil, err
	}
	compressed, err := io.ReadAll(blob)
	if err != nil {
		return nil, err
	}
	if err := blob.Close(); err != nil {
		return nil, err
	}
	annotations[estargz.TOCJSONDigestAnnotation] = blob.TOCDigest().String()
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(compressed)), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

func tarOf(entries []Entry) ([]byte, error) {
	var content bytes.Buffer
	err := write(&content, entries)
	return content.Bytes(), err
}

// piped opens the tar of entries. A layer is read several times; a pipe keeps
// big files out of memory.
func piped(entries []Entry) tarball.Opener {
	return func() (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() { w.CloseWithError(write(w, entries)) }()
		return r, nil
	}
}
