package storage

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"
)

// hostileSource is a registry that answers with whatever there is: top for the
// reference, and leaf for the digest of leaf.
type hostileSource struct {
	types.ImageSource

	ref       types.ImageReference
	top, leaf []byte
	mime      string
	config    []byte
}

func (s hostileSource) Reference() types.ImageReference { return s.ref }

func (s hostileSource) GetManifest(_ context.Context, instance *digest.Digest) ([]byte, string, error) {
	if instance == nil {
		return s.top, s.mime, nil
	}
	return s.leaf, manifest.GuessMIMEType(s.leaf), nil
}

func (s hostileSource) GetBlob(context.Context, types.BlobInfo, types.BlobInfoCache) (io.ReadCloser, int64, error) {
	return io.NopCloser(bytes.NewReader(s.config)), int64(len(s.config)), nil
}

func (s hostileSource) LayerInfosForCopy(context.Context, *digest.Digest) ([]types.BlobInfo, error) {
	return nil, nil
}

func (s hostileSource) Close() error { return nil }

// Whatever manifests a registry has, they are refused, or what comes out of them
// has digests that are digests, and sizes.
func FuzzManifest(f *testing.F) {
	sum := func(text string) string { return digest.FromString(text).String() }
	const docker2 = "application/vnd.docker.distribution.manifest.v2+json"
	config := `{"architecture":"wasm","os":"wasi","rootfs":{"type":"layers","diff_ids":["` + sum("layer") + `"]}}`
	image := `{"schemaVersion":2,"mediaType":"` + ispec.MediaTypeImageManifest + `","config":{"mediaType":"` + ispec.MediaTypeImageConfig +
		`","digest":"` + sum(config) + `","size":7},"layers":[{"mediaType":"` + ispec.MediaTypeImageLayerGzip + `","digest":"` + sum("layer") + `","size":3}]}`
	index := `{"schemaVersion":2,"mediaType":"` + ispec.MediaTypeImageIndex + `","manifests":[{"mediaType":"` + ispec.MediaTypeImageManifest +
		`","digest":"LEAF","size":5,"platform":{"os":"wasi","architecture":"wasm"}}]}`
	nested := strings.Replace(index, ispec.MediaTypeImageManifest, ispec.MediaTypeImageIndex, 1)
	f.Add(image, "", config, ispec.MediaTypeImageManifest)
	f.Add(index, image, config, ispec.MediaTypeImageIndex)
	f.Add(nested, index, config, ispec.MediaTypeImageIndex)
	f.Add(strings.ReplaceAll(image, "application/vnd.oci.image.manifest.v1+json", docker2), "", config, docker2)
	f.Add(strings.Replace(image, sum("layer"), "sha256:../../../etc/passwd", 1), "", config, ispec.MediaTypeImageManifest)
	f.Add(strings.Replace(image, `"size":3`, `"size":-3`, 1), "", config, ispec.MediaTypeImageManifest)
	f.Add(strings.Replace(image, ispec.MediaTypeImageConfig, "application/vnd.model+json", 1), "", config, ispec.MediaTypeImageManifest)
	f.Add(`{"schemaVersion":1}`, "", "", "application/vnd.docker.distribution.manifest.v1+json")

	named, err := reference.ParseNormalizedNamed("registry.example/a:1")
	require.NoError(f, err)
	ref, err := docker.NewReference(named)
	require.NoError(f, err)
	none := func(digest.Digest, digest.Digest) bool { return false }
	f.Fuzz(func(t *testing.T, top, leaf, config, mime string) {
		top = strings.ReplaceAll(top, "LEAF", digest.FromString(leaf).String())
		for _, sys := range []*types.SystemContext{{}, {OSChoice: "wasi", ArchitectureChoice: "wasm"}} {
			hostile := hostileSource{ref: ref, top: []byte(top), leaf: []byte(leaf), mime: mime, config: []byte(config)}
			s, err := readSource(t.Context(), &source{ImageSource: hostile}, sys, none)
			if err != nil {
				continue
			}
			require.NotEmpty(t, s.digests)
			for _, d := range s.digests {
				require.NoError(t, d.Validate())
			}
			if s.artifact != nil {
				blobs, err := planBlobs(s.artifact, nil)
				for _, b := range blobs {
					require.True(t, b.name == "" || filepath.IsLocal(b.name), b.name)
					require.NoError(t, b.Digest.Validate())
					require.GreaterOrEqual(t, b.Size, int64(0))
				}
				require.True(t, err == nil || errors.Is(err, ErrInvalidArtifact) || errors.Is(err, ErrUnsupported), err)
				continue
			}
			require.NoError(t, s.config.Validate())
			for _, l := range s.layers {
				require.NoError(t, l.Digest.Validate())
				require.GreaterOrEqual(t, l.Size, int64(-1))
			}
		}
	})
}
