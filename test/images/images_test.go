package images_test

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"io"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
)

// headers reads a layer back.
func headers(t *testing.T, layer v1.Layer) map[string]*tar.Header {
	t.Helper()
	r, err := layer.Uncompressed()
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	found := map[string]*tar.Header{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		require.NoError(t, err)
		found[h.Name] = h
	}
}

func TestLayerHoldsEveryKindOfEntry(t *testing.T) {
	setuid := images.File("d/setuid", "x", 0o4755).Owned(3, 4).WithXattr("user.a", "1").WithXattr("user.b", "2")
	layer, err := images.Layer(
		images.Dir("d", 0o1777),
		setuid,
		images.Hardlink("d/hard", setuid),
		images.Symlink("d/soft", "../x"),
		images.CharDevice("d/null", 1, 3),
		images.FIFO("d/pipe"),
		images.Whiteout("d/gone"),
		images.Opaque("e"),
		images.Big("big", 100_000, 7),
	)
	require.NoError(t, err)
	h := headers(t, layer)
	assert.Equal(t, int64(0o1777), h["d/"].Mode)
	assert.Equal(t, int64(0o4755), h["d/setuid"].Mode)
	assert.Equal(t, []int{3, 4}, []int{h["d/setuid"].Uid, h["d/setuid"].Gid})
	assert.Equal(t, map[string]string{"SCHILY.xattr.user.a": "1", "SCHILY.xattr.user.b": "2"}, h["d/setuid"].PAXRecords)
	assert.Equal(t, "d/setuid", h["d/hard"].Linkname)
	assert.Equal(t, []int64{0o4755, 0}, []int64{h["d/hard"].Mode, h["d/hard"].Size})
	assert.Equal(t, "../x", h["d/soft"].Linkname)
	assert.Equal(t, []int64{1, 3}, []int64{h["d/null"].Devmajor, h["d/null"].Devminor})
	assert.Equal(t, byte(tar.TypeFifo), h["d/pipe"].Typeflag)
	assert.Contains(t, h, "d/.wh.gone")
	assert.Contains(t, h, "e/.wh..wh..opq")
	assert.Equal(t, int64(100_000), h["big"].Size)
}

func TestImagesAreValidAndTheSameEachTime(t *testing.T) {
	digest := func() v1.Hash {
		img, err := images.Image(images.Config{}, append(images.Stack(5), []images.Entry{images.Big("big", 1<<20, 1)})...)
		require.NoError(t, err)
		layers, err := img.Layers()
		require.NoError(t, err)
		require.Len(t, layers, 6)
		for _, l := range layers {
			require.NoError(t, validate.Layer(l))
		}
		d, err := img.Digest()
		require.NoError(t, err)
		return d
	}
	first := digest()
	assert.Equal(t, first, digest())
}

func TestIndexNamesThePlatforms(t *testing.T) {
	var imgs []v1.Image
	for _, platform := range []string{"linux/amd64", "linux/arm/v7", "wasi/wasm"} {
		img, err := images.Image(images.Config{Platform: platform}, images.Stack(1)...)
		require.NoError(t, err)
		imgs = append(imgs, img)
	}
	index, err := images.Index(imgs...)
	require.NoError(t, err)
	manifest, err := index.IndexManifest()
	require.NoError(t, err)
	var platforms []string
	for _, m := range manifest.Manifests {
		platforms = append(platforms, m.Platform.String())
	}
	assert.Equal(t, []string{"linux/amd64", "linux/arm/v7", "wasi/wasm"}, platforms)
}

func TestArtifact(t *testing.T) {
	a, err := images.Artifact("application/vnd.example.model",
		images.Blob{MediaType: "application/vnd.example.weights", Title: "weights.bin", Content: []byte("weights")},
		images.Blob{MediaType: "text/plain", Content: []byte("untitled")})
	require.NoError(t, err)
	raw, err := a.RawManifest()
	require.NoError(t, err)
	var m struct {
		ArtifactType string
		Config       struct{ MediaType, Digest string }
		Layers       []struct {
			MediaType   string
			Size        int
			Annotations map[string]string
		}
	}
	require.NoError(t, json.Unmarshal(raw, &m))
	assert.Equal(t, "application/vnd.example.model", m.ArtifactType)
	assert.Equal(t, "application/vnd.oci.empty.v1+json", m.Config.MediaType)
	assert.Equal(t, "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", m.Config.Digest)
	require.Len(t, m.Layers, 2)
	assert.Equal(t, "weights.bin", m.Layers[0].Annotations["org.opencontainers.image.title"])
	assert.Equal(t, 7, m.Layers[0].Size)
	assert.Empty(t, m.Layers[1].Annotations)
}
