package storage

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

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

func TestMarker(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	reg.push(t, "a:2", imageOf(t, "b"))
	base, opt := testOptions(t), testOptions(t)
	opt.Name, opt.Marker = "vm", true

	_, err := Open(opt)
	require.ErrorIs(t, err, ErrUnmounted)
	assert.NoDirExists(t, opt.GraphRoot)
	assert.NoDirExists(t, opt.RunRoot)

	disk := t.TempDir()
	mount := func() { require.NoError(t, unix.Mount(disk, opt.GraphRoot, "", unix.MS_BIND, "")) }
	unmount := func() { require.NoError(t, unix.Unmount(opt.GraphRoot, 0)) }
	require.NoError(t, os.Mkdir(opt.GraphRoot, 0o700))
	t.Cleanup(func() { _ = unix.Unmount(opt.GraphRoot, unix.MNT_DETACH) }) // where the test fails halfway
	mount()
	require.NoError(t, PrepareRoot(opt))
	require.NoError(t, PrepareRoot(opt), "idempotent")
	other := opt
	other.Name = "wasm"
	require.ErrorContains(t, PrepareRoot(other), `root of handler "vm"`)
	_, err = Open(other)
	require.ErrorIs(t, err, ErrUnmounted)
	unmount()

	roots := openRoots(t, base, []Options{opt})
	_, err = roots.Handler("vm")
	require.ErrorIs(t, err, ErrUnmounted)
	mount()
	root, err := roots.Handler("vm")
	require.NoError(t, err)
	image, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)

	unmount()
	_, err = roots.Handler("vm")
	require.ErrorIs(t, err, ErrUnmounted)
	require.ErrorContains(t, err, opt.GraphRoot)
	_, err = root.Pull(t.Context(), reg.host+"/a:2", PullOptions{})
	require.ErrorIs(t, err, ErrUnmounted)
	require.ErrorIs(t, root.Lease(t.Context(), image.ID), ErrUnmounted)
	require.ErrorIs(t, root.Release(t.Context(), image.ID), ErrUnmounted)
	_, err = root.Resolve(t.Context(), image.ID)
	require.ErrorIs(t, err, ErrUnmounted)
	_, err = root.LowerDirs(t.Context(), image.ID)
	require.ErrorIs(t, err, ErrUnmounted)
	_, err = root.Usage(t.Context())
	require.ErrorIs(t, err, ErrUnmounted)
	images, errs := roots.List(t.Context())
	assert.Empty(t, images)
	require.Len(t, errs, 1)
	require.ErrorIs(t, errs[0], ErrUnmounted)
	found, err := roots.Find(t.Context(), image.ID)
	require.NoError(t, err)
	assert.Empty(t, found)
	require.ErrorIs(t, roots.Remove(t.Context(), image.ID, nil), ErrNotFound)
	written, err := os.ReadDir(opt.GraphRoot)
	require.NoError(t, err)
	assert.Empty(t, written, "nothing is written where the disk should be")

	mount()
	defer unmount()
	images, errs = roots.List(t.Context())
	require.Empty(t, errs)
	require.Len(t, images, 1)
	assert.Equal(t, image.ID, images[0].ID)
}

func TestPrepareRootSparesOtherThings(t *testing.T) {
	for name, tc := range map[string]struct {
		entry string
		fine  bool
	}{
		"empty file system":  {"lost+found", true},
		"an image store":     {"overlay-images", true},
		"killed at the work": {".ocihold-root-123", true},
		"somebody's files":   {"home", false},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			require.NoError(t, os.MkdirAll(filepath.Join(opt.GraphRoot, tc.entry), 0o700))
			err := PrepareRoot(opt)
			if tc.fine {
				require.NoError(t, err)
				require.NoError(t, CheckRoot(opt))
				return
			}
			require.ErrorContains(t, err, tc.entry)
			require.ErrorIs(t, CheckRoot(opt), ErrUnmounted)
		})
	}
}

func TestUsers(t *testing.T) {
	reg := newRegistry(t)
	x, y := imageOf(t, "base", "x"), imageOf(t, "base", "y")
	reg.push(t, "x:1", x)
	reg.push(t, "y:1", y)
	node := newNode(t, "vm", "wasm")
	users := func(handler int) []string {
		t.Helper()
		got, err := node.roots.Users(t.Context(), node.handlers[handler].GraphRoot)
		require.NoError(t, err)
		return got
	}
	node.pull(t, "vm", reg.host+"/x:1")
	assert.Empty(t, users(0))
	require.NoError(t, node.crio("create", imageID(t, x), "c"))
	assert.Equal(t, []string{"container k8s_c of CRI-O"}, users(0))
	require.NoError(t, node.crio("delete", "c"))
	require.NoError(t, node.crio("pull", reg.host+"/y:1"))
	assert.Equal(t, []string{"image " + reg.host + "/y:1 in CRI-O's root"}, users(0))
	require.NoError(t, node.roots.Remove(t.Context(), imageID(t, y), nil))
	require.NoError(t, node.root(t, "vm").Lease(t.Context(), imageID(t, x)))
	require.Len(t, users(0), 1)
	assert.Contains(t, users(0)[0], imageID(t, x))
	assert.Empty(t, users(1))
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

func TestRemove(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "one", "two")
	digest := reg.push(t, "a:1", img)
	reg.push(t, "a:2", img)
	node := newNode(t, "vm", "wasm")
	pull := func(t *testing.T) Image {
		t.Helper()
		node.pull(t, "vm", reg.host+"/a:1")
		node.pull(t, "vm", reg.host+"/a:2")
		return node.pull(t, "default", reg.host+"/a:1")
	}
	assertThere := func(t *testing.T) {
		t.Helper()
		images, errs := node.roots.List(t.Context())
		assert.Empty(t, errs)
		require.Len(t, images, 1)
		assert.Equal(t, []string{"default", "vm"}, images[0].Handlers)
		require.NoError(t, node.crio("check"))
	}
	refused := func(t *testing.T, ref, by string) {
		t.Helper()
		err := node.roots.Remove(t.Context(), ref, nil)
		require.ErrorIs(t, err, ErrInUse)
		require.ErrorContains(t, err, by)
		assertThere(t)
	}
	id := pull(t).ID

	t.Run("not there", func(t *testing.T) {
		require.ErrorIs(t, node.roots.Remove(t.Context(), reg.host+"/b:1", nil), ErrNotFound)
	})
	t.Run("leased", func(t *testing.T) {
		require.NoError(t, node.root(t, "vm").Lease(t.Context(), id))
		refused(t, id, `lease in the root of handler "vm"`)
		require.NoError(t, node.root(t, "vm").Release(t.Context(), id))
		require.NoError(t, node.root(t, "").Lease(t.Context(), id))
		refused(t, reg.host+"/a:2", `lease in the root of handler "default"`)
		require.NoError(t, node.root(t, "").Release(t.Context(), id))
	})
	t.Run("container in CRI-O's root", func(t *testing.T) {
		require.NoError(t, node.crio("create", id, "c1"))
		refused(t, id, "container k8s_c1")
		require.NoError(t, node.crio("delete", "c1"))
	})
	t.Run("container in a handler root", func(t *testing.T) {
		vm := node.root(t, "vm").store
		c, err := vm.CreateContainer("", nil, id, "", "{}", nil)
		require.NoError(t, err)
		refused(t, id, "container "+c.ID)
		require.NoError(t, vm.DeleteContainer(c.ID))
	})
	t.Run("others say so", func(t *testing.T) {
		err := node.roots.Remove(t.Context(), reg.host+"/a:1", func(asked string) ([]string, error) {
			assert.Equal(t, id, asked)
			return []string{"volume of pod x"}, nil
		})
		require.ErrorIs(t, err, ErrInUse)
		require.ErrorContains(t, err, "volume of pod x")
		assertThere(t)
		err = node.roots.Remove(t.Context(), reg.host+"/a:1", func(string) ([]string, error) { return nil, assert.AnError })
		require.ErrorIs(t, err, assert.AnError)
		assertThere(t)
	})
	t.Run("being pulled", func(t *testing.T) {
		arrived, answer := make(chan struct{}), make(chan struct{})
		reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if strings.Contains(r.URL.Path, "/manifests/") {
				arrived <- struct{}{}
				<-answer
			}
			next.ServeHTTP(w, r)
		})
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := node.root(t, "wasm").Pull(t.Context(), reg.host+"/a:2", PullOptions{})
			assert.NoError(t, err)
		})
		<-arrived
		refused(t, id, `pull of `+reg.host+`/a:2 into the root of handler "wasm"`)
		reg.setFault(nil)
		close(answer)
		wg.Wait()
	})
	for name, ref := range map[string]string{
		"by id": id, "by name": reg.host + "/a:1", "by digest": reg.host + "/a@" + digest.String(), "by a name of one root": reg.host + "/a:2",
	} {
		t.Run(name, func(t *testing.T) {
			pull(t)
			require.NoError(t, node.roots.Remove(t.Context(), ref, func(string) ([]string, error) { return nil, nil }))
			images, errs := node.roots.List(t.Context())
			assert.Empty(t, images)
			assert.Empty(t, errs)
			for _, opt := range append(node.handlers, node.base) {
				assertNoLayerDirs(t, opt)
			}
		})
	}
}

// TestRemoveSparesContainers makes containers of an image in a handler root while that is being removed.
func TestRemoveSparesContainers(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "one", "two")
	reg.push(t, "a:1", img)
	node := newNode(t, "vm")
	id := imageID(t, img)
	for range 10 {
		node.pull(t, "vm", reg.host+"/a:1")
		var created, removed error
		var wg sync.WaitGroup
		wg.Go(func() { created = node.crio("create", id, "c") })
		wg.Go(func() { removed = node.roots.Remove(t.Context(), id, nil) })
		wg.Wait()
		require.NoError(t, node.crio("check"))
		if created == nil {
			require.ErrorIs(t, removed, ErrInUse)
			require.NoError(t, node.crio("delete", "c"))
		} else {
			require.ErrorContains(t, created, "not known")
			require.NoError(t, removed)
		}
	}
}

// TestRemoveLooksAgain is about a container that comes into being after Remove has asked who uses the image.
func TestRemoveLooksAgain(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "one")
	reg.push(t, "a:1", img)
	node := newNode(t, "vm")
	node.pull(t, "vm", reg.host+"/a:1")
	require.NoError(t, node.crio("create", imageID(t, img), "c"))
	err := node.roots.remove(t.Context(), "", imageID(t, img))
	require.ErrorIs(t, err, ErrInUse)
	require.ErrorContains(t, err, "k8s_c")
	require.NoError(t, node.crio("check"))
}

func TestWantedLayers(t *testing.T) {
	state := &crioState{
		layers: map[string]string{"own": "parent", "top": "own", "bottom": ""},
		images: []imageRecord{
			{ID: "1", TopLayer: "top", MappedTopLayers: []string{"mapped", "bottom"}},
			{ID: "2", TopLayer: "other"},
			{ID: "3"},
		},
		containers: []containerRecord{{ID: "4", LayerID: "container's"}, {ID: "5", LayerID: "bottom"}},
	}
	assert.Equal(t, map[string]bool{"parent": true, "mapped": true, "other": true, "container's": true}, state.wanted())
}

// TestRemoveHoldsLocks is what TestRemoveSparesContainers may not hit: no container can come into being while the locks
// are held.
func TestRemoveHoldsLocks(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "one")
	reg.push(t, "a:1", img)
	reg.push(t, "b:1", imageOf(t, "one", "two"))
	for name, operation := range map[string][]string{
		"create a container": {"create", imageID(t, img), "c"},
		"pull":               {"pull", reg.host + "/b:1"},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t, "vm")
			node.pull(t, "vm", reg.host+"/a:1")
			require.NoError(t, node.crio("check"))
			call := node.runningCRIO(t, operation...)
			done := make(chan error, 1)
			require.NoError(t, node.roots.crio.locked(func(*crioState) error {
				go func() { done <- call() }()
				select {
				case err := <-done:
					return fmt.Errorf("it was not held up: %w", err)
				case <-t.Context().Done():
				case <-time.After(500 * time.Millisecond):
				}
				layers, err := readRecords[layerRecord](filepath.Join(node.base.GraphRoot, "overlay-layers", "layers.json"))
				assert.Empty(t, layers, "no layer either")
				return err
			}))
			require.NoError(t, <-done)
		})
	}
}

func TestLeaning(t *testing.T) {
	reg := newRegistry(t)
	x, y, same := imageOf(t, "base", "x", "x2"), imageOf(t, "base", "y"), userImage(t, "1", "base", "x", "x2")
	reg.push(t, "x:1", x)
	reg.push(t, "y:1", y)
	reg.push(t, "base:1", imageOf(t, "base"))
	reg.push(t, "same:1", same)
	leaning := func(t *testing.T, node *testNode) []Lean {
		t.Helper()
		leans, err := node.roots.Leaning(t.Context())
		require.NoError(t, err)
		return leans
	}

	t.Run("layers below", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		assert.Empty(t, leaning(t, node))
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		require.Len(t, layerIDs(t, node.root(t, "")), 1, "CRI-O leans")
		assert.Equal(t, []Lean{{ImageID: imageID(t, y), Names: []string{reg.host + "/y:1"}, Handlers: []string{"vm"}}}, leaning(t, node))
		images, errs := node.roots.List(t.Context())
		assert.Empty(t, errs, "a leaning image is a sound one")
		assert.Len(t, images, 2)

		require.NoError(t, node.roots.Remove(t.Context(), reg.host+"/x:1", nil))
		require.NoError(t, node.crio("check"))
		assert.Len(t, layerIDs(t, node.root(t, "vm")), 2, "the shared layer and its child are left")
		require.NoError(t, node.roots.FreeKept(t.Context()))
		require.NoError(t, node.crio("check"))

		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, y), nil))
		assert.Empty(t, layerIDs(t, node.root(t, "vm")), "the shared layer goes with the last that needs it")
		assert.Empty(t, layerIDs(t, node.root(t, "")))
	})

	t.Run("CRI-O removes it", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		require.NoError(t, node.roots.Remove(t.Context(), reg.host+"/x:1", nil))
		_ = node.crio("rmi", imageID(t, y)) // fails after it has removed the image: not its layer
		require.NoError(t, node.roots.FreeKept(t.Context()))
		assert.Empty(t, layerIDs(t, node.root(t, "vm")))
	})

	t.Run("the record only", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/same:1"))
		require.Empty(t, layerIDs(t, node.root(t, "")), "CRI-O leans")
		assert.Len(t, leaning(t, node), 1)
		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, x), nil))
		require.NoError(t, node.crio("check"))
		require.NoError(t, node.crio("create", imageID(t, same), "c"))
		require.ErrorIs(t, node.roots.Remove(t.Context(), imageID(t, same), nil), ErrInUse)
		require.NoError(t, node.crio("delete", "c"))
		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, same), nil))
		assert.Empty(t, layerIDs(t, node.root(t, "vm")))
	})

	t.Run("the image itself", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/x:1"))
		assert.Len(t, leaning(t, node), 1)
		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, x), nil))
		assert.Empty(t, layerIDs(t, node.root(t, "vm")))
		images, errs := node.roots.List(t.Context())
		assert.Empty(t, images)
		assert.Empty(t, errs)
	})

	t.Run("mended by a pull", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, y), nil))
		node.pull(t, "default", reg.host+"/y:1")
		assert.Empty(t, leaning(t, node))
		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, x), nil))
		assert.Empty(t, layerIDs(t, node.root(t, "vm")))
		require.NoError(t, node.crio("check"))
	})

	t.Run("by link only", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		node.pull(t, "default", reg.host+"/base:1") // now layers.json has y's parent in CRI-O's root
		assert.Len(t, leaning(t, node), 1)
		require.NoError(t, node.roots.Remove(t.Context(), imageID(t, x), nil))
		assert.Len(t, layerIDs(t, node.root(t, "vm")), 2)
		require.NoError(t, node.crio("check"))
	})

	t.Run("removed by force under a lease", func(t *testing.T) {
		node := newNode(t, "vm")
		vm := node.root(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		require.NoError(t, vm.Lease(t.Context(), imageID(t, x)))
		require.NoError(t, vm.store.DeleteContainer(leaseIDs(imageID(t, x)).record))
		require.NoError(t, deleteImage(node.handlers[0], imageID(t, x)))
		require.NoError(t, vm.Release(t.Context(), imageID(t, x)))
		require.NoError(t, node.crio("check"))
		assert.Len(t, layerIDs(t, vm), 2)
	})

	t.Run("what it leaned on is gone", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		require.NoError(t, deleteImage(node.handlers[0], imageID(t, x)))
		leans := leaning(t, node)
		require.Len(t, leans, 1)
		assert.True(t, leans[0].Missing)
		_, errs := node.roots.List(t.Context())
		require.Len(t, errs, 1)
		require.ErrorIs(t, errs[0], ErrBadRecord)
	})
}

// TestInterleavings pulls and removes images that share layers, by us and by CRI-O, in random order.
func TestInterleavings(t *testing.T) {
	reg := newRegistry(t)
	var refs []string
	for i, contents := range [][]string{{"a"}, {"a", "b"}, {"a", "b", "c"}, {"a", "d"}, {"e"}} {
		ref := fmt.Sprintf("img%d:1", i)
		reg.push(t, ref, imageOf(t, contents...))
		refs = append(refs, reg.host+"/"+ref)
	}
	for range 3 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			node := newNode(t, "vm", "wasm")
			for range 15 {
				ref := refs[random.IntN(len(refs))]
				switch random.IntN(5) {
				case 0:
					node.pull(t, "default", ref)
					t.Log("pulled to default", ref)
				case 1:
					handler := node.handlers[random.IntN(2)].Name
					node.pull(t, handler, ref)
					t.Log("pulled to", handler, ref)
				case 2:
					require.NoError(t, node.crio("pull", ref))
					t.Log("pulled by CRI-O", ref)
				default:
					if err := node.roots.Remove(t.Context(), ref, nil); err != nil {
						require.ErrorIs(t, err, ErrNotFound)
					}
					t.Log("removed", ref)
				}
				require.NoError(t, node.crio("check"))
			}
			for _, ref := range refs {
				if err := node.roots.Remove(t.Context(), ref, nil); err != nil {
					require.ErrorIs(t, err, ErrNotFound)
				}
			}
			require.NoError(t, node.roots.FreeKept(t.Context()))
			for _, name := range node.roots.Names() {
				assert.Empty(t, layerIDs(t, node.root(t, name)), name)
			}
		})
	}
}
