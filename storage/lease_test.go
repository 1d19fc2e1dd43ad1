package storage

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cstorage "go.podman.io/storage"
)

// pulled returns a root with one image of two layers, and the ids of its layers.
func pulled(tb testing.TB) (*Root, Options, Image, []string) {
	tb.Helper()
	reg := newRegistry(tb)
	reg.push(tb, "a:1", imageOf(tb, "one", "two"))
	opt := testOptions(tb)
	root := open(tb, opt)
	image, err := root.Pull(tb.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(tb, err)
	return root, opt, image, layerIDs(tb, root)
}

func leases(tb testing.TB, root *Root) []Lease {
	tb.Helper()
	got, err := root.Leases(tb.Context())
	require.NoError(tb, err)
	return got
}

func containers(tb testing.TB, root *Root) []cstorage.Container {
	tb.Helper()
	got, err := root.store.Containers()
	require.NoError(tb, err)
	return got
}

func TestLease(t *testing.T) {
	root, opt, image, before := pulled(t)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	require.NoError(t, root.Lease(t.Context(), image.ID), "idempotent")

	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root))
	got, err := root.Resolve(t.Context(), image.ID)
	require.NoError(t, err)
	assert.True(t, got.Leased)
	images, errs := root.Images(t.Context())
	require.Empty(t, errs)
	assert.Equal(t, []Image{got}, images)
	assert.Len(t, layerIDs(t, root), len(before)+2)

	records := containers(t, root)
	require.Len(t, records, 1)
	assert.Equal(t, []string{"ocihold-lease-" + image.ID}, records[0].Names)
	assert.Equal(t, "{}", records[0].Metadata)

	require.ErrorContains(t, deleteImage(opt, image.ID), cstorage.ErrImageUsedByContainer.Error())
	require.ErrorContains(t, deleteImage(opt, image.Names[0]), cstorage.ErrImageUsedByContainer.Error())

	require.NoError(t, root.Release(t.Context(), image.ID))
	require.NoError(t, root.Release(t.Context(), image.ID), "idempotent")
	assert.Empty(t, leases(t, root))
	assert.Empty(t, containers(t, root))
	assert.ElementsMatch(t, before, layerIDs(t, root))
	got, err = root.Resolve(t.Context(), image.ID)
	require.NoError(t, err)
	assert.False(t, got.Leased)

	require.NoError(t, deleteImage(opt, image.ID))
	assert.Empty(t, layerIDs(t, root))
	assertNoLayerDirs(t, opt)
}

// assertNoLayerDirs checks that no layer's files are left.
func assertNoLayerDirs(tb testing.TB, opt Options) {
	tb.Helper()
	left, err := filepath.Glob(filepath.Join(opt.GraphRoot, "overlay", strings.Repeat("?", 64)))
	require.NoError(tb, err)
	assert.Empty(tb, left)
}

func TestPin(t *testing.T) {
	root, opt, image, before := pulled(t)
	names := func() []string {
		t.Helper()
		record, err := root.store.Image(image.ID)
		require.NoError(t, err)
		return record.Names
	}
	whole := func(complete bool) {
		t.Helper()
		hasPin := slices.Contains(names(), "in-use.ocihold.dev/pin:"+image.ID)
		assert.Equal(t, []Lease{{ImageID: image.ID, Complete: complete, Pinned: hasPin}}, leases(t, root))
	}
	reopen := func(pin bool) {
		t.Helper()
		require.NoError(t, root.Close())
		opt.Pin = pin
		root = open(t, opt)
	}
	pin := "in-use.ocihold.dev/pin:" + image.ID
	named, pinned := image.Names, append(slices.Clone(image.Names), pin)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.Equal(t, named, names())

	reopen(true)
	whole(false)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.ElementsMatch(t, pinned, names())
	whole(true)
	got, err := root.Resolve(t.Context(), image.ID)
	require.NoError(t, err)
	assert.Equal(t, named, got.Names)
	images, errs := root.Images(t.Context())
	require.Empty(t, errs)
	assert.Equal(t, []Image{got}, images)

	require.NoError(t, root.store.RemoveNames(image.ID, []string{pin}))
	whole(false)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.ElementsMatch(t, pinned, names())

	reopen(false)
	whole(false)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.Equal(t, named, names())
	whole(true)

	reopen(true)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Equal(t, named, names())
	assert.Empty(t, leases(t, root))
	assert.ElementsMatch(t, before, layerIDs(t, root))

	require.NoError(t, root.store.AddNames(image.ID, []string{pin}))
	whole(false)
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Equal(t, named, names())
	assert.Empty(t, leases(t, root))
}

func TestMountedAt(t *testing.T) {
	root, opt, image, _ := pulled(t)
	record, err := root.store.Image(image.ID)
	require.NoError(t, err)
	layer, err := root.store.Layer(record.TopLayer)
	require.NoError(t, err)
	place := func(home, layer string) string { return filepath.Join(home, "overlay", layer, "merged") }
	at := place(opt.GraphRoot, record.TopLayer)
	inRunRoot := place(opt.RunRoot, record.TopLayer)
	mounted := func() map[string][]string {
		t.Helper()
		got, err := root.MountedAt(t.Context(), []string{
			at, place(opt.GraphRoot, layer.Parent), place("/elsewhere", record.TopLayer), place(opt.GraphRoot, id("1")),
			filepath.Join(filepath.Dir(at), "diff"), "l/ABC", "",
		})
		require.NoError(t, err)
		return got
	}
	assert.Equal(t, map[string][]string{at: {image.ID}}, mounted())
	got, err := root.MountedAt(t.Context(), []string{inRunRoot})
	require.NoError(t, err)
	assert.Equal(t, map[string][]string{inRunRoot: {image.ID}}, got)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.Equal(t, map[string][]string{at: {image.ID}}, mounted())

	require.NoError(t, root.store.DeleteContainer(leaseIDs(image.ID).record))
	require.NoError(t, deleteImage(opt, image.ID))
	assert.Equal(t, map[string][]string{at: {image.ID}}, mounted(), "removed by force")
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Empty(t, mounted())

	// The driver tells the mount itself where it is.
	require.NoError(t, root.Close())
	root = open(t, opt)
	_, err = root.store.CreateLayer(record.TopLayer, "", nil, "", false, nil)
	require.NoError(t, err)
	dir, err := root.store.Mount(record.TopLayer, "")
	require.NoError(t, err)
	assert.Equal(t, at, dir)
	_, err = root.store.Unmount(record.TopLayer, true)
	require.NoError(t, err)
}

func TestLeaseOfWhatIsNotThere(t *testing.T) {
	root, opt, image, _ := pulled(t)
	require.ErrorIs(t, root.Lease(t.Context(), id("1")), ErrNotFound)
	require.ErrorIs(t, root.Lease(t.Context(), image.Names[0]), ErrInvalidReference)
	require.ErrorIs(t, root.Lease(t.Context(), image.ID[:12]), ErrInvalidReference)
	require.NoError(t, root.Release(t.Context(), id("1")))
	require.NoError(t, deleteImage(opt, image.ID))
	require.ErrorIs(t, root.Lease(t.Context(), image.ID), ErrNotFound)
	assert.Empty(t, leases(t, root))
	assert.Empty(t, containers(t, root))
	assert.Empty(t, layerIDs(t, root))
}

func TestLeaseOfImageWithoutLayers(t *testing.T) {
	root := open(t, testOptions(t))
	record(t, root, id("1"), "registry.example/a:1")
	require.NoError(t, root.Lease(t.Context(), id("1")))
	assert.Equal(t, []Lease{{ImageID: id("1"), Complete: true}}, leases(t, root))
	dirs, err := root.LowerDirs(t.Context(), id("1"), nil)
	require.NoError(t, err)
	assert.Empty(t, dirs)
	require.NoError(t, root.Release(t.Context(), id("1")))
	assert.Empty(t, layerIDs(t, root))
}

func TestLeasesOfImagesThatShareLayers(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	reg.push(t, "a:1", imageOf(t, "base"))
	reg.push(t, "b:1", imageOf(t, "base", "top"))
	a, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	b, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
	require.NoError(t, err)
	before := layerIDs(t, root)
	require.Len(t, before, 2)
	for _, image := range []Image{a, b} {
		require.NoError(t, root.Lease(t.Context(), image.ID))
	}
	require.NoError(t, root.Release(t.Context(), b.ID))
	require.NoError(t, deleteImage(opt, b.ID))
	require.ErrorContains(t, deleteImage(opt, a.ID), cstorage.ErrImageUsedByContainer.Error())
	dirs, err := root.LowerDirs(t.Context(), a.ID, nil)
	require.NoError(t, err)
	assert.FileExists(t, filepath.Join(dirs[0], "file-0"))
	require.NoError(t, root.Release(t.Context(), a.ID))
	require.NoError(t, deleteImage(opt, a.ID))
	assert.Empty(t, layerIDs(t, root))
}

// forceRemove does what podman rmi --force does to a leased image: first the container, then the image.
func forceRemove(tb testing.TB, root *Root, opt Options, imageID string) {
	tb.Helper()
	require.NoError(tb, root.store.DeleteContainer(leaseIDs(imageID).record))
	require.NoError(tb, deleteImage(opt, imageID))
}

func TestLeaseKeepsContentThroughForcedRemoval(t *testing.T) {
	root, opt, image, before := pulled(t)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
	require.NoError(t, err)
	forceRemove(t, root, opt, image.ID)

	_, err = root.Resolve(t.Context(), image.ID)
	require.ErrorIs(t, err, ErrNotFound)
	assert.Subset(t, layerIDs(t, root), before)
	for i, file := range []string{"file-1", "file-0"} {
		assert.FileExists(t, filepath.Join(dirs[i], file))
	}
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: false}}, leases(t, root))

	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Empty(t, leases(t, root))
	assert.Empty(t, layerIDs(t, root))
	assertNoLayerDirs(t, opt)
}

// TestLeaseAfterForcedRemoval makes the image again without its registry, all of it but for names that others have.
func TestLeaseAfterForcedRemoval(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	app := imageOf(t, "base", "app")
	reg.push(t, "app:1", indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x")))))
	reg.push(t, "app:2", app)
	reg.push(t, "other:1", imageOf(t, "base", "other"))
	image, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{})
	require.NoError(t, err)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	image, err = root.Pull(t.Context(), reg.host+"/app:1", PullOptions{})
	require.NoError(t, err)
	record, err := root.store.Image(image.ID)
	require.NoError(t, err)

	reg.setFault(func(w http.ResponseWriter, _ *http.Request, _ http.Handler) { w.WriteHeader(http.StatusNotFound) })
	for range 2 {
		forceRemove(t, root, opt, image.ID)
		require.NoError(t, root.Lease(t.Context(), image.ID))
		again, err := root.Resolve(t.Context(), reg.host+"/app:1")
		require.NoError(t, err)
		assert.Equal(t, image, again)
		assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root))
		assertProven(t, root, image.ID, "team", true)
		restored, err := root.store.Image(image.ID)
		require.NoError(t, err)
		assert.ElementsMatch(t, record.BigDataNames, restored.BigDataNames)
		assert.Equal(t, record.BigDataDigests, restored.BigDataDigests)
		assert.Equal(t, record.Digests, restored.Digests)
		assert.Equal(t, record.Created, restored.Created)
		require.ErrorContains(t, deleteImage(opt, image.ID), cstorage.ErrImageUsedByContainer.Error())
	}

	// Only the image's record has gone, its name was given to another meanwhile.
	require.NoError(t, root.store.DeleteContainer(leaseIDs(image.ID).record))
	require.NoError(t, deleteImage(opt, image.ID))
	reg.setFault(nil)
	reg.push(t, "app:1", imageOf(t, "base", "other"))
	moved, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{})
	require.NoError(t, err)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	again, err := root.Resolve(t.Context(), reg.host+"/app:1")
	require.NoError(t, err)
	assert.Equal(t, moved.ID, again.ID)
	again, err = root.Resolve(t.Context(), image.ID)
	require.NoError(t, err)
	assert.Empty(t, again.Names)

	// What cannot be read is as good as nothing.
	forceRemove(t, root, opt, image.ID)
	require.NoError(t, root.store.SetLayerBigData(leaseIDs(image.ID).child, keptKey, strings.NewReader(`{"version":2}`)))
	require.ErrorIs(t, root.Lease(t.Context(), image.ID), ErrNotFound)
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: false}}, leases(t, root), "a lease that cannot be taken takes nothing away")
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Empty(t, leases(t, root))
}

func TestReleaseAfterForcedRemovalLeavesSharedLayers(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	reg.push(t, "a:1", imageOf(t, "base", "a"))
	reg.push(t, "b:1", imageOf(t, "base", "b"))
	a, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	b, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
	require.NoError(t, err)
	require.NoError(t, root.Lease(t.Context(), a.ID))
	forceRemove(t, root, opt, a.ID)
	require.NoError(t, root.Release(t.Context(), a.ID))
	assert.Len(t, layerIDs(t, root), 2)
	dirs, err := root.LowerDirs(t.Context(), b.ID, nil)
	require.NoError(t, err)
	assert.FileExists(t, filepath.Join(dirs[1], "file-0"))
}

func TestReleaseSparesImagesOnTheChild(t *testing.T) {
	root, _, image, _ := pulled(t)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	_, err := root.store.CreateImage(id("1"), []string{"registry.example/b:1"}, leaseIDs(image.ID).child, "{}", nil)
	require.NoError(t, err)
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Contains(t, layerIDs(t, root), leaseIDs(image.ID).child)
}

// TestLeaseInSecondImageStore is about an image from before CRI-O's imagestore was set: DeleteLayer does not know that
// it uses its layers.
func TestLeaseInSecondImageStore(t *testing.T) {
	root, opt, image, before := pulled(t)
	require.NoError(t, root.Close())
	opt.ImageStore = filepath.Join(t.TempDir(), "images")
	root = open(t, opt)
	got, err := root.Resolve(t.Context(), image.Names[0])
	require.NoError(t, err)
	assert.Equal(t, image, got)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root))
	dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
	require.NoError(t, err)
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.ElementsMatch(t, before, layerIDs(t, root))
	assert.FileExists(t, filepath.Join(dirs[0], "file-1"))
}

// TestLeaseIsCompleted cuts a lease at each point where a process may have been killed.
func TestLeaseIsCompleted(t *testing.T) {
	for name, cut := range map[string]func(t *testing.T, root *Root, ids leaseID){
		"record's layer only": func(t *testing.T, root *Root, ids leaseID) {
			layer, err := root.store.Layer(ids.child)
			require.NoError(t, err)
			require.NoError(t, root.store.DeleteContainer(ids.record))
			require.NoError(t, root.store.DeleteLayer(ids.child))
			_, err = root.store.CreateLayer(ids.recordLayer, layer.Parent, nil, "", true, nil)
			require.NoError(t, err)
		},
		"record only": func(t *testing.T, root *Root, ids leaseID) {
			require.NoError(t, root.store.DeleteLayer(ids.child))
		},
		"child only": func(t *testing.T, root *Root, ids leaseID) {
			require.NoError(t, root.store.DeleteContainer(ids.record))
		},
		"child of another layer": func(t *testing.T, root *Root, ids leaseID) {
			layer, err := root.store.Layer(ids.child)
			require.NoError(t, err)
			parent, err := root.store.Layer(layer.Parent)
			require.NoError(t, err)
			require.NoError(t, root.store.DeleteLayer(ids.child))
			_, err = root.store.CreateLayer(ids.child, parent.Parent, layer.Names, "", false, nil)
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, _, image, before := pulled(t)
			for _, then := range []string{"lease", "release"} {
				require.NoError(t, root.Lease(t.Context(), image.ID))
				cut(t, root, leaseIDs(image.ID))
				for _, l := range leases(t, root) {
					assert.False(t, l.Complete)
				}
				if then == "lease" {
					require.NoError(t, root.Lease(t.Context(), image.ID))
					assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root))
				}
				require.NoError(t, root.Release(t.Context(), image.ID))
				assert.Empty(t, leases(t, root))
				assert.ElementsMatch(t, before, layerIDs(t, root), then)
			}
		})
	}
}

func TestLeaseRaces(t *testing.T) {
	for round := range 10 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			root, opt, image, before := pulled(t)
			var wg sync.WaitGroup
			leaseErrs := make([]error, 4)
			for i := range leaseErrs {
				wg.Go(func() {
					<-time.After(time.Duration(rand.IntN(100)) * time.Millisecond) // about as long as the other process takes
					leaseErrs[i] = root.Lease(t.Context(), image.ID)
				})
			}
			deleteErr := deleteImage(opt, image.ID)
			wg.Wait()
			held := 0
			for _, err := range leaseErrs {
				if err == nil {
					held++
				} else {
					require.ErrorIs(t, err, ErrNotFound)
				}
			}
			t.Log("removed: ", deleteErr == nil)
			if deleteErr == nil {
				assert.Zero(t, held, "removed although leased")
				assert.Empty(t, layerIDs(t, root))
				return
			}
			require.ErrorContains(t, deleteErr, cstorage.ErrImageUsedByContainer.Error())
			assert.Positive(t, held)
			require.NoError(t, root.Release(t.Context(), image.ID))
			assert.ElementsMatch(t, before, layerIDs(t, root))
		})
	}
}

func TestLeaseOutlivesTheRoot(t *testing.T) {
	root, opt, image, _ := pulled(t)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	require.NoError(t, root.Close())
	again := open(t, opt)
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, again))
	require.ErrorContains(t, deleteImage(opt, image.ID), cstorage.ErrImageUsedByContainer.Error())
	require.NoError(t, again.Release(t.Context(), image.ID))
	require.NoError(t, deleteImage(opt, image.ID))
}

func TestLeasesIgnoresForeignNames(t *testing.T) {
	root, _, image, _ := pulled(t)
	_, err := root.store.CreateContainer("", []string{"ocihold-lease-mine", "other"}, image.ID, "", "{}", nil)
	require.NoError(t, err)
	assert.Empty(t, leases(t, root))
}

func TestLowerDirs(t *testing.T) {
	reg := newRegistry(t)
	contents := make([]string, 127)
	for i := range contents {
		contents[i] = fmt.Sprint("layer ", i)
	}
	img := imageOf(t, contents...)
	reg.push(t, "deep:1", img)
	opt := testOptions(t)
	root := open(t, opt)
	image, err := root.Pull(t.Context(), reg.host+"/deep:1", PullOptions{})
	require.NoError(t, err)
	dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
	require.NoError(t, err)
	require.Len(t, dirs, 127)
	for i, dir := range dirs {
		content, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("file-%d", 126-i)))
		require.NoError(t, err)
		assert.Equal(t, contents[126-i], string(content))
		assert.Equal(t, filepath.Join(opt.GraphRoot, "overlay"), filepath.Dir(filepath.Dir(dir)))
	}
	require.NoError(t, root.Lease(t.Context(), image.ID))
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Len(t, layerIDs(t, root), 127)
}

func TestLowerDirsInImageStore(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a", "b"))
	opt := testOptions(t)
	opt.ImageStore = filepath.Join(t.TempDir(), "images")
	root := open(t, opt)
	image, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	before := layerIDs(t, root)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root))
	dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
	require.NoError(t, err)
	require.Len(t, dirs, 2)
	for _, dir := range dirs {
		assert.Equal(t, filepath.Join(opt.ImageStore, "overlay"), filepath.Dir(filepath.Dir(dir)))
	}
	assert.FileExists(t, filepath.Join(dirs[0], "file-1"))
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.ElementsMatch(t, before, layerIDs(t, root))
}

func TestLowerDirsRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(t *testing.T, home, layer string)
		is     error
	}{
		"composefs": {func(t *testing.T, home, layer string) {
			require.NoError(t, os.Mkdir(filepath.Join(home, layer, "composefs-data"), 0o700))
		}, ErrUnsupported},
		"several diff directories": {func(t *testing.T, home, layer string) {
			require.NoError(t, os.Mkdir(filepath.Join(home, layer, "diff1"), 0o700))
		}, ErrUnsupported},
		"diff is a link": {func(t *testing.T, home, layer string) {
			diff := filepath.Join(home, layer, "diff")
			require.NoError(t, os.Rename(diff, diff+"-moved"))
			require.NoError(t, os.Symlink(diff+"-moved", diff))
		}, ErrUnsupported},
		"mount_program": {func(t *testing.T, home, _ string) {
			write(t, filepath.Join(home, ".has-mount-program"), "true")
		}, ErrUnsupported},
		"no files": {func(t *testing.T, home, layer string) {
			require.NoError(t, os.RemoveAll(filepath.Join(home, layer, "diff")))
		}, ErrBadRecord},
	} {
		t.Run(name, func(t *testing.T) {
			root, opt, image, layers := pulled(t)
			_, err := root.LowerDirs(t.Context(), image.ID, nil)
			require.NoError(t, err)
			tc.change(t, filepath.Join(opt.GraphRoot, "overlay"), layers[0])
			_, err = root.LowerDirs(t.Context(), image.ID, nil)
			require.ErrorIs(t, err, tc.is)
			assert.Contains(t, err.Error(), image.ID)
		})
	}
	root, _, image, _ := pulled(t)
	_, err := root.LowerDirs(t.Context(), id("1"), nil)
	require.ErrorIs(t, err, ErrNotFound)
	_, err = root.LowerDirs(t.Context(), image.Names[0], nil)
	require.ErrorIs(t, err, ErrInvalidReference)
}
