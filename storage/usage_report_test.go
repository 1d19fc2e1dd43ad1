package storage

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// reported returns the report by handler; it must be whole.
func reported(tb testing.TB, node *testNode) map[string]RootUsage {
	tb.Helper()
	report, errs := node.roots.Report(tb.Context())
	require.Empty(tb, errs)
	require.Len(tb, report, 1+len(node.handlers))
	by := make(map[string]RootUsage)
	for _, root := range report {
		by[root.Handler] = root
	}
	return by
}

func imageIn(tb testing.TB, root RootUsage, id string) ImageUsage {
	tb.Helper()
	for _, image := range root.Images {
		if image.ID == id {
			return image
		}
	}
	require.Fail(tb, "no such image", id)
	return ImageUsage{}
}

func TestReport(t *testing.T) {
	reg := newRegistry(t)
	common, own, third := noise(1<<20), noise(2<<20), noise(4<<20)
	a, b, c := imageOf(t, common, own), imageOf(t, common, third), imageOf(t, noise(8<<20))
	for ref, image := range map[string]v1.Image{"a:1": a, "b:1": b, "c:1": c} {
		reg.push(t, ref, image)
	}
	const slack = 300_000
	node := newNode(t, "vm")
	for _, ref := range []string{"/a:1", "/b:1", "/c:1"} {
		node.pull(t, "vm", reg.host+ref)
	}
	vm := reported(t, node)["vm"]
	assert.Equal(t, node.handlers[0].GraphRoot, vm.Root)
	assert.NotEmpty(t, vm.FileSystem.Type)
	assert.NotEmpty(t, vm.FileSystem.Device)
	assert.Greater(t, vm.FileSystem.Capacity, vm.FileSystem.Available)
	assert.Positive(t, vm.FileSystem.Available)
	require.Len(t, vm.Images, 3)
	assert.Equal(t, reg.host+"/a:1", vm.Images[0].Names[0], "by name")
	assert.InDelta(t, 15<<20, vm.Bytes, slack)
	assert.InDelta(t, 1<<20, vm.SharedBytes, slack)
	assert.InDelta(t, 15<<20, vm.ReclaimableBytes, slack)
	assert.InDelta(t, 3<<20, imageIn(t, vm, imageID(t, a)).Bytes, slack)
	assert.InDelta(t, 2<<20, imageIn(t, vm, imageID(t, a)).OwnBytes, slack)
	assert.Equal(t, patient(t, node.root(t, "vm")).Bytes, vm.Bytes)

	// A lease, a container of CRI-O and one in the root itself each hold their image.
	root := node.root(t, "vm")
	require.NoError(t, root.Lease(t.Context(), imageID(t, a)))
	vm = reported(t, node)["vm"]
	assert.InDelta(t, 12<<20, vm.ReclaimableBytes, slack)
	assert.True(t, imageIn(t, vm, imageID(t, a)).Leased)
	assert.False(t, imageIn(t, vm, imageID(t, a)).Used, "a lease is no container")
	require.NoError(t, node.crio("create", imageID(t, b), "one"))
	vm = reported(t, node)["vm"]
	assert.InDelta(t, 8<<20, vm.ReclaimableBytes, slack)
	assert.True(t, imageIn(t, vm, imageID(t, b)).Used)
	container, err := root.store.CreateContainer("", nil, imageID(t, c), "", "{}", nil)
	require.NoError(t, err)
	vm = reported(t, node)["vm"]
	assert.Zero(t, vm.ReclaimableBytes)
	assert.True(t, imageIn(t, vm, imageID(t, c)).Used)

	require.NoError(t, root.store.DeleteContainer(container.ID))
	record, err := root.store.Image(imageID(t, c))
	require.NoError(t, err)
	child, err := root.store.CreateLayer("", record.TopLayer, nil, "", false, hostMapped())
	require.NoError(t, err)
	assert.Zero(t, reported(t, node)["vm"].ReclaimableBytes, "a child keeps the layers below it")
	require.NoError(t, root.store.DeleteLayer(child.ID))
	before := reported(t, node)["vm"]
	require.NoError(t, node.roots.Remove(t.Context(), imageID(t, c), nil))
	after := reported(t, node)["vm"]
	assert.InDelta(t, before.ReclaimableBytes, before.Bytes-after.Bytes, 64<<10, "it goes, and the image's record")
	assert.Zero(t, after.ReclaimableBytes)
}

func TestReportOfTwoRoots(t *testing.T) {
	reg := newRegistry(t)
	base, x, y := noise(1<<20), noise(2<<20), noise(4<<20)
	reg.push(t, "x:1", imageOf(t, base, x))
	reg.push(t, "y:1", imageOf(t, base, y))
	reg.push(t, "z:1", imageOf(t, noise(8<<20)))
	const slack = 300_000
	node := newNode(t, "vm", "wasm")
	image := node.pull(t, "vm", reg.host+"/x:1")
	require.NoError(t, node.crio("pull", reg.host+"/y:1"))
	z := node.pull(t, "vm", reg.host+"/z:1")
	node.pull(t, "default", reg.host+"/z:1")
	node.pull(t, "wasm", reg.host+"/x:1")

	roots := reported(t, node)
	assert.Equal(t, []string{reg.host + "/y:1"}, roots["vm"].Leaning)
	assert.Empty(t, roots["default"].Leaning)
	leaning := imageIn(t, roots["default"], imageID(t, imageOf(t, base, y)))
	assert.Contains(t, leaning.LeansOn, "vm")
	assert.InDelta(t, 4<<20, leaning.Bytes, slack, "its base is in another root")
	assert.InDelta(t, (2+8)<<20, roots["vm"].ReclaimableBytes, slack, "the base stays")
	for handler, root := range roots {
		for _, image := range root.Images {
			assert.Equal(t, image.ID == z.ID, image.InTwoRoots, "%s in %s", image.Names, handler)
		}
	}

	require.NoError(t, node.crio("create", z.ID, "c")) // from CRI-O's own copy
	roots = reported(t, node)
	for _, handler := range []string{"default", "vm"} {
		assert.True(t, imageIn(t, roots[handler], z.ID).Used, handler)
	}
	assert.InDelta(t, 2<<20, roots["vm"].ReclaimableBytes, slack, "no copy of an image in use is removed")
	require.NoError(t, node.crio("delete", "c"))
	require.NoError(t, node.roots.RemoveFrom(t.Context(), "vm", z.ID, nil))

	require.NoError(t, node.roots.RemoveFrom(t.Context(), "vm", image.ID, nil))
	vm := reported(t, node)["vm"]
	assert.InDelta(t, 1<<20, vm.Bytes, slack, "what is leaned on")
	assert.InDelta(t, 0, vm.ReclaimableBytes, slack)
	assert.Len(t, vm.Leaning, 1)
}

// TestReportNamesWhatIsBad spoils one thing of each kind, and holds that all else is reported.
func TestReportNamesWhatIsBad(t *testing.T) {
	reg := newRegistry(t)
	for _, name := range []string{"good", "files", "manifest", "layer"} {
		reg.push(t, name+":1", imageOf(t, name, noise(1<<20)))
	}
	node := newNode(t, "vm", "wasm")
	good := node.pull(t, "wasm", reg.host+"/good:1")
	var want []string
	for _, handler := range []string{"default", "vm"} {
		root := node.root(t, handler)
		node.pull(t, handler, reg.host+"/good:1")
		top := func(name string) (image, layer string) {
			image = node.pull(t, handler, reg.host+"/"+name+":1").ID
			record, err := root.store.Image(image)
			require.NoError(t, err)
			return image, record.TopLayer
		}
		_, layer := top("files")
		require.NoError(t, os.RemoveAll(filepath.Join(root.homes()[0], layer)))
		want = append(want, "layer "+layer+" of handler \""+handler+`": bad image record: it has no files`)

		image, _ := top("manifest")
		manifest := filepath.Join(root.imageHome(), "overlay-images", image, "manifest")
		require.NoError(t, os.Truncate(manifest, 10))
		want = append(want, image)

		image, layer = top("layer")
		records := filepath.Join(root.imageHome(), "overlay-layers", "layers.json")
		content, err := os.ReadFile(records)
		require.NoError(t, err)
		write(t, records, strings.ReplaceAll(string(content), `"`+layer+`"`, `"`+id("dead")+`"`))
		want = append(want, image, id("dead")+" of handler")

		record(t, root, id("1"), "docker.io/library/no-tag")
	}
	want = append(want, "no-tag", "no-tag")
	require.NoError(t, node.roots.Close())
	require.NoError(t, os.Remove(filepath.Join(node.handlers[1].GraphRoot, markerFile)))
	node.roots = openRoots(t, node.base, node.handlers)
	report, errs := node.roots.Report(t.Context())
	assert.Len(t, errs, len(want)+1)
	for _, text := range want {
		assert.True(t, slices.ContainsFunc(errs, func(err error) bool { return errors.Is(err, ErrBadRecord) && strings.Contains(err.Error(), text) }), text)
	}
	assert.ErrorIs(t, errors.Join(errs...), ErrUnmounted)
	require.Len(t, report, 2)
	for _, root := range report {
		assert.InDelta(t, 2<<20, root.Bytes, 500_000, "what is there counts")
		assert.InDelta(t, 1<<20, imageIn(t, root, good.ID).OwnBytes, 100_000)
	}
}
