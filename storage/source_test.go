package storage

import (
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// indexAmong makes an index of the indexes, none with a platform.
func indexAmong(indexes ...v1.ImageIndex) v1.ImageIndex {
	top := v1.ImageIndex(empty.Index)
	for _, i := range indexes {
		top = mutate.AppendManifests(top, mutate.IndexAddendum{Add: i})
	}
	return top
}

func only(image v1.Image, platform *v1.Platform) v1.ImageIndex {
	return mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
}

func TestPullFromIndexOfIndexes(t *testing.T) {
	reg := newRegistry(t)
	amd, s390 := &v1.Platform{OS: "linux", Architecture: "amd64"}, &v1.Platform{OS: "linux", Architecture: "s390x"}
	app := imageOf(t, "one", "two")
	foreign := only(imageWith(t, "s390x", layerOf(t, "f", []byte("s390x"))), s390)
	placed := func(index v1.ImageIndex, p *v1.Platform) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: index, Descriptor: v1.Descriptor{Platform: p}}
	}
	for name, top := range map[string]v1.ImageIndex{
		"first":                 indexAmong(only(app, amd), foreign),
		"second":                indexAmong(foreign, only(app, amd)),
		"deeper":                indexAmong(foreign, indexAmong(foreign, only(app, amd))),
		"index with a platform": mutate.AppendManifests(empty.Index, placed(foreign, s390), placed(only(app, nil), amd)),
		"image beside":          mutate.AppendManifests(indexAmong(foreign), mutate.IndexAddendum{Add: app}),
	} {
		t.Run(name, func(t *testing.T) {
			root := open(t, testOptions(t))
			topDigest := reg.push(t, "lib/nested:1", top)
			appDigest, err := app.Digest()
			require.NoError(t, err)
			for _, ref := range []string{reg.host + "/lib/nested:1", reg.host + "/lib/nested@" + topDigest.String()} {
				got, err := root.Pull(t.Context(), ref, PullOptions{})
				require.NoError(t, err)
				assert.Equal(t, imageID(t, app), got.ID)
				assert.Contains(t, got.Names, ref)
				assert.Equal(t, digest.Digest(appDigest.String()), got.Digest)
				assert.Contains(t, got.Digests, digest.Digest(topDigest.String()))

				found, err := root.Resolve(t.Context(), ref)
				require.NoError(t, err)
				assertSame(t, got, found)
				reg.take()
				again, err := root.Pull(t.Context(), ref, PullOptions{Progress: func(Progress) { t.Error("it is there") }})
				require.NoError(t, err)
				assertSame(t, got, again)
				for _, request := range reg.take() {
					assert.Contains(t, request, "/manifests/")
				}
			}
		})
	}
}

func TestPullFromIndexOfIndexesRefused(t *testing.T) {
	reg := newRegistry(t)
	foreign := only(imageWith(t, "s390x", layerOf(t, "f", []byte("s390x"))), &v1.Platform{OS: "linux", Architecture: "s390x"})
	deep := only(imageOf(t, "one"), nil)
	for range maxNesting {
		deep = indexAmong(deep)
	}
	opt := testOptions(t)
	root := open(t, opt)
	for name, tc := range map[string]struct {
		index v1.ImageIndex
		is    error
		says  string
	}{
		"another platform": {indexAmong(foreign, foreign), ErrNotFound, "the index has it for linux/s390x"},
		"empty":            {indexAmong(), ErrNotFound, "no platform"},
		"too deep":         {deep, ErrUnsupported, "indexes in each other"},
	} {
		t.Run(name, func(t *testing.T) {
			reg.push(t, "lib/refused:1", tc.index)
			_, err := root.Pull(t.Context(), reg.host+"/lib/refused:1", PullOptions{})
			require.ErrorIs(t, err, tc.is)
			require.ErrorContains(t, err, tc.says)
		})
	}

	good := indexAmong(only(imageOf(t, "one"), nil))
	reg.push(t, "lib/refused:1", good)
	write(t, opt.SignaturePolicy, `{"default":[{"type":"reject"}]}`)
	_, err := root.Pull(t.Context(), reg.host+"/lib/refused:1", PullOptions{})
	require.ErrorIs(t, err, ErrSignature)
	images, _ := root.Images(t.Context())
	assert.Empty(t, images)
}

func TestPullForAPlatform(t *testing.T) {
	reg := newRegistry(t)
	wasm := imageOf(t, "wasm")
	config, err := wasm.ConfigFile()
	require.NoError(t, err)
	config = config.DeepCopy()
	config.OS, config.Architecture = "wasi", "wasm"
	wasm, err = mutate.ConfigFile(wasm, config)
	require.NoError(t, err)
	config = config.DeepCopy()
	config.OS, config.Architecture = "", ""
	silent, err := mutate.ConfigFile(wasm, config)
	require.NoError(t, err)
	reg.push(t, "wasm:1", wasm)
	reg.push(t, "linux:1", imageOf(t, "linux"))
	reg.push(t, "silent:1", silent)
	reg.push(t, "index:1", only(imageOf(t, "linux"), nil))

	opt := testOptions(t)
	opt.Platform = "wasi/wasm"
	root := open(t, opt)
	for _, ok := range []string{"/wasm:1", "/silent:1"} {
		_, err = root.Pull(t.Context(), reg.host+ok, PullOptions{})
		require.NoError(t, err, ok)
	}
	for _, bad := range []string{"/linux:1", "/index:1"} {
		_, err = root.Pull(t.Context(), reg.host+bad, PullOptions{})
		require.ErrorIs(t, err, ErrNotFound, bad)
		require.ErrorContains(t, err, "it is for linux/amd64, and this root has images for wasi/wasm")
	}
	reg.take()

	other := testOptions(t)
	_, err = open(t, other).Pull(t.Context(), reg.host+"/wasm:1", PullOptions{})
	require.NoError(t, err, "a root without a platform takes a single image as it is")
}

// assertSame compares images but for the order of their digests.
func assertSame(t *testing.T, want, got Image) {
	t.Helper()
	assert.ElementsMatch(t, want.Digests, got.Digests)
	got.Digests = want.Digests
	assert.Equal(t, want, got)
}
