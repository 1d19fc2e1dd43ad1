package storage

import (
	"maps"
	"os"
	"slices"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func userImage(tb testing.TB, user string, contents ...string) v1.Image {
	tb.Helper()
	img := imageOf(tb, contents...)
	config, err := img.ConfigFile()
	require.NoError(tb, err)
	config = config.DeepCopy()
	config.Config.User = user
	img, err = mutate.ConfigFile(img, config)
	require.NoError(tb, err)
	return img
}

func TestRoots(t *testing.T) {
	reg := newRegistry(t)
	native, wasm := imageOf(t, "native"), imageOf(t, "wasm")
	reg.push(t, "a:1", mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: native, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}},
		mutate.IndexAddendum{Add: wasm, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "wasi", Architecture: "wasm"}}}))
	reg.push(t, "native:1", indexOf(native, imageWith(t, "s390x", layerOf(t, "f", []byte("x")))))
	reg.push(t, "b:1", userImage(t, "1000:1000", "b"))
	reg.push(t, "b:2", userImage(t, "1000:1000", "b"))

	node := newNode(t, "vm", "wasm")
	require.NoError(t, node.roots.Close())
	node.handlers[1].Platform = "wasi/wasm"
	node.roots = openRoots(t, node.base, node.handlers)
	assert.Equal(t, []string{"default", "vm", "wasm"}, node.roots.Names())
	_, err := node.roots.Handler("gvisor")
	require.ErrorIs(t, err, ErrUnknownHandler)
	assert.Contains(t, err.Error(), "default, vm, wasm")
	assert.Same(t, node.root(t, ""), node.root(t, "default"))

	assert.Equal(t, imageID(t, native), node.pull(t, "default", reg.host+"/a:1").ID)
	assert.Equal(t, imageID(t, wasm), node.pull(t, "wasm", reg.host+"/a:1").ID)
	_, err = node.root(t, "wasm").Pull(t.Context(), reg.host+"/native:1", PullOptions{})
	require.ErrorIs(t, err, ErrNotFound)
	for _, text := range []string{"wasi", "linux/amd64", "linux/s390x"} {
		assert.Contains(t, err.Error(), text)
	}
	b := node.pull(t, "vm", reg.host+"/b:1")
	node.pull(t, "default", reg.host+"/b:2")
	require.NoError(t, node.root(t, "vm").Lease(t.Context(), b.ID))

	images, errs := node.roots.List(t.Context())
	require.Empty(t, errs)
	got := make(map[string]ImageAt)
	for _, image := range images {
		got[image.ID] = image
	}
	assert.Len(t, images, len(got), "each id once")
	assert.ElementsMatch(t, []string{imageID(t, native), imageID(t, wasm), b.ID}, slices.Collect(maps.Keys(got)))
	assert.Equal(t, []string{"default"}, got[imageID(t, native)].Handlers)
	assert.Equal(t, []string{"wasm"}, got[imageID(t, wasm)].Handlers)
	assert.Equal(t, []string{"default", "vm"}, got[b.ID].Handlers)
	assert.ElementsMatch(t, []string{reg.host + "/b:1", reg.host + "/b:2"}, got[b.ID].Names)
	assert.True(t, got[b.ID].Pinned)
	assert.True(t, got[b.ID].Leased)
	assert.False(t, got[imageID(t, wasm)].Pinned, "on CRI-O's disk")

	found, err := node.roots.Find(t.Context(), reg.host+"/a:1")
	require.NoError(t, err)
	require.Len(t, found, 2)
	assert.Equal(t, []string{imageID(t, native), imageID(t, wasm)}, []string{found[0].ID, found[1].ID})
	assert.Equal(t, [][]string{{"default"}, {"wasm"}}, [][]string{found[0].Handlers, found[1].Handlers})
	found, err = node.roots.Find(t.Context(), reg.host+"/none:1")
	require.NoError(t, err)
	assert.Empty(t, found)
	_, err = node.roots.Find(t.Context(), "A")
	require.ErrorIs(t, err, ErrInvalidReference)

	user, err := node.root(t, "vm").User(t.Context(), b.ID)
	require.NoError(t, err)
	assert.Equal(t, "1000:1000", user)
	user, err = node.root(t, "wasm").User(t.Context(), imageID(t, wasm))
	require.NoError(t, err)
	assert.Empty(t, user)
	_, err = node.root(t, "wasm").User(t.Context(), b.ID)
	require.ErrorIs(t, err, ErrNotFound)
}

func TestOpenRootsRefuses(t *testing.T) {
	base, vm := testOptions(t), testOptions(t)
	vm.Name = "vm"
	for name, tc := range map[string]struct {
		handlers []Options
		text     string
	}{
		"name twice":    {[]Options{vm, vm}, "two handlers of that name"},
		"CRI-O's name":  {[]Options{func() Options { o := vm; o.Name = "default"; return o }()}, "two handlers of that name"},
		"CRI-O's root":  {[]Options{func() Options { o := vm; o.GraphRoot = base.GraphRoot + "/"; return o }()}, "a root of its own"},
		"bad platform":  {[]Options{func() Options { o := vm; o.Platform = "amd64"; return o }()}, "want os/arch"},
		"empty variant": {[]Options{func() Options { o := vm; o.Platform = "linux/arm/"; return o }()}, "want os/arch"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := OpenRoots(base, tc.handlers)
			require.ErrorContains(t, err, tc.text)
		})
	}
}

func TestImagesOnOtherDisksArePinned(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	base, opt := testOptions(t), testOptions(t)
	opt.Name, opt.Marker = "vm", true
	require.NoError(t, os.Mkdir(opt.GraphRoot, 0o700))
	require.NoError(t, unix.Mount("vm", opt.GraphRoot, "tmpfs", 0, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(opt.GraphRoot, unix.MNT_DETACH)) })
	require.NoError(t, PrepareRoot(opt))
	node := &testNode{base: base, handlers: []Options{opt}, roots: openRoots(t, base, []Options{opt})}
	image := node.pull(t, "vm", reg.host+"/a:1")
	images, errs := node.roots.List(t.Context())
	require.Empty(t, errs)
	assert.True(t, images[0].Pinned)
	found, err := node.roots.Find(t.Context(), image.ID)
	require.NoError(t, err)
	assert.True(t, found[0].Pinned)
	usage, err := node.root(t, "vm").Usage(t.Context())
	require.NoError(t, err)
	assert.Equal(t, opt.GraphRoot, usage.Mountpoint)

	node.pull(t, "default", reg.host+"/a:1")
	images, errs = node.roots.List(t.Context())
	require.Empty(t, errs)
	assert.False(t, images[0].Pinned, "a copy is on CRI-O's disk")
	other, err := node.root(t, "").Usage(t.Context())
	require.NoError(t, err)
	assert.NotEqual(t, usage.Device, other.Device)
}
