package storage

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cstorage "go.podman.io/storage"
)

// kept is what is kept of an image.
type kept struct {
	record cstorage.Image
	data   map[string]string
}

func keptOf(tb testing.TB, root *Root, id string) kept {
	tb.Helper()
	record, err := root.resolveID(id)
	require.NoError(tb, err)
	k := kept{*record, map[string]string{}}
	for _, key := range record.BigDataNames {
		data, err := root.store.ImageBigData(id, key)
		require.NoError(tb, err)
		k.data[key] = string(data)
	}
	slices.Sort(k.record.BigDataNames)
	slices.Sort(k.record.Digests)
	return k
}

func TestMend(t *testing.T) {
	reg := newRegistry(t)
	x := imageOf(t, "base", "x", "x2")
	y, z := imageOf(t, "base", "y"), imageOf(t, "base", "y", "z")
	same := userImage(t, "1", "base", "x", "x2")
	for ref, image := range map[string]v1.Image{"x:1": x, "y:1": y, "y:2": y, "z:1": z, "base:1": imageOf(t, "base"), "same:1": same} {
		reg.push(t, ref, image)
	}
	ref := func(name string) string { return reg.host + "/" + name }
	for name, tc := range map[string]struct {
		pulls  []string // by CRI-O
		images []v1.Image
		then   string // pulled by us into CRI-O's root
		freed  bool   // the image of vm, before
	}{
		"layers below":                  {pulls: []string{"y:1"}, images: []v1.Image{y}},
		"several names":                 {pulls: []string{"y:1", "y:2"}, images: []v1.Image{y}},
		"the record only":               {pulls: []string{"same:1"}, images: []v1.Image{same}},
		"the image itself":              {pulls: []string{"x:1"}, images: []v1.Image{x}},
		"by link only":                  {pulls: []string{"y:1"}, images: []v1.Image{y}, then: "base:1"},
		"two on one layer":              {pulls: []string{"z:1", "y:1"}, images: []v1.Image{y, z}},
		"what it leans on is only kept": {pulls: []string{"y:1"}, images: []v1.Image{y}, freed: true},
	} {
		t.Run(name, func(t *testing.T) {
			node := newNode(t, "vm")
			base, vm := node.root(t, ""), node.root(t, "vm")
			node.pull(t, "vm", ref("x:1"))
			for _, pull := range tc.pulls {
				require.NoError(t, node.crio("pull", ref(pull)))
			}
			if tc.then != "" {
				node.pull(t, "default", ref(tc.then))
			}
			if tc.freed {
				require.NoError(t, node.roots.Remove(t.Context(), imageID(t, x), nil))
			}
			var before []kept
			for _, image := range tc.images {
				require.NoError(t, base.KeepProof(t.Context(), imageID(t, image), "ns"))
				before = append(before, keptOf(t, base, imageID(t, image)))
			}
			leans, err := node.roots.Leaning(t.Context())
			require.NoError(t, err)
			require.Len(t, leans, len(tc.images))
			reg.take()

			id := imageID(t, tc.images[len(tc.images)-1])
			require.NoError(t, node.roots.Mend(t.Context(), id, nil))
			leans, err = node.roots.Leaning(t.Context())
			require.NoError(t, err)
			require.Empty(t, leans)
			for i, image := range tc.images {
				assert.Equal(t, before[i], keptOf(t, base, imageID(t, image)))
			}
			require.NoError(t, node.roots.Mend(t.Context(), id, nil), "nothing is to do")
			assert.Empty(t, reg.take(), "no registry is asked")

			require.NoError(t, node.roots.FreeKept(t.Context()))
			if !tc.freed && len(tc.pulls) > 0 && tc.pulls[0] != "x:1" {
				require.NoError(t, node.roots.Remove(t.Context(), imageID(t, x), nil))
			} else if !tc.freed {
				require.NoError(t, node.roots.RemoveFrom(t.Context(), "vm", imageID(t, x), nil))
			}
			assert.Empty(t, layerIDs(t, vm))
			require.NoError(t, node.crio("check"))
			for _, pull := range tc.pulls {
				require.NoError(t, node.crio("pull", ref(pull)))
				node.pull(t, "default", ref(pull))
			}
			require.NoError(t, node.crio("pull", ref("z:1")), "its layers are what a pull takes them for")
			require.NoError(t, node.crio("check"))
			for _, ref := range append(tc.pulls, "z:1", tc.then) {
				if err := node.roots.Remove(t.Context(), reg.host+"/"+ref, nil); err != nil && ref != "" {
					require.ErrorIs(t, err, ErrNotFound)
				}
			}
			assert.Empty(t, layerIDs(t, base), "no layer is left over")
		})
	}
}

// TestPullOnLeaningLayers pulls an image into CRI-O's root that is on layers which CRI-O put on a handler's.
func TestPullOnLeaningLayers(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "x:1", imageOf(t, "base", "x"))
	y := imageOf(t, "base", "y")
	reg.push(t, "y:1", y)
	reg.push(t, "z:1", imageOf(t, "base", "y", "z"))
	node := newNode(t, "vm")
	base := node.root(t, "")
	node.pull(t, "vm", reg.host+"/x:1")
	require.NoError(t, node.crio("pull", reg.host+"/y:1"))
	// CRI-O 1.34 does not write it.
	require.NoError(t, os.Remove(filepath.Join(base.imageHome(), "overlay", layerIDs(t, base)[0], "lower-layers")))
	_, err := base.Pull(t.Context(), reg.host+"/z:1", PullOptions{})
	require.ErrorIs(t, err, ErrLeans)
	require.NotErrorIs(t, err, ErrRegistryUnavailable)
	require.NoError(t, node.crio("check"))
	require.NoError(t, node.roots.Mend(t.Context(), imageID(t, y), nil))
	node.pull(t, "default", reg.host+"/z:1")
	require.NoError(t, node.crio("check"))
}

// TestMendRefuses is about leaning images that stay as they are.
func TestMendRefuses(t *testing.T) {
	reg := newRegistry(t)
	x, y := imageOf(t, "base", "x"), imageOf(t, "base", "y")
	reg.push(t, "x:1", x)
	reg.push(t, "y:1", y)
	reg.push(t, "z:1", imageOf(t, "base", "y", "z"))
	reg.push(t, "base:1", imageOf(t, "base"))
	node := newNode(t, "vm")
	base := node.root(t, "")
	id := imageID(t, y)
	node.pull(t, "vm", reg.host+"/x:1")
	require.NoError(t, node.crio("pull", reg.host+"/y:1"))
	require.NoError(t, node.crio("pull", reg.host+"/z:1"))
	other, err := base.Resolve(t.Context(), reg.host+"/z:1")
	require.NoError(t, err)
	node.pull(t, "default", reg.host+"/base:1") // without it no lease can be taken
	refused := func(t *testing.T, by error, text string, inUse func(string) ([]string, error)) {
		t.Helper()
		before, layers := keptOf(t, base, id), layerIDs(t, base)
		err := node.roots.Mend(t.Context(), id, inUse)
		require.ErrorIs(t, err, by)
		require.ErrorContains(t, err, text)
		assert.Equal(t, before, keptOf(t, base, id))
		assert.ElementsMatch(t, layers, layerIDs(t, base))
		leans, err := node.roots.Leaning(t.Context())
		require.NoError(t, err)
		assert.Len(t, leans, 2)
		require.NoError(t, node.crio("check"))
	}

	require.ErrorIs(t, node.roots.Mend(t.Context(), strings.Repeat("0", 64), nil), ErrNotFound)
	for name, image := range map[string]string{"leased": id, "another on its layers is leased": other.ID} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, base.Lease(t.Context(), image))
			refused(t, ErrInUse, "by a lease", nil)
			require.NoError(t, base.Release(t.Context(), image))
		})
	}
	t.Run("run", func(t *testing.T) {
		require.NoError(t, node.crio("create", id, "c"))
		refused(t, ErrInUse, "container k8s_c", nil)
		require.NoError(t, node.crio("delete", "c"))
	})
	t.Run("others say so", func(t *testing.T) {
		refused(t, ErrInUse, "volume of a pod", func(string) ([]string, error) { return []string{"volume of a pod"}, nil })
		refused(t, assert.AnError, "ask who uses", func(string) ([]string, error) { return nil, assert.AnError })
	})
	t.Run("used once its content is copied", func(t *testing.T) {
		asked := 0
		refused(t, ErrInUse, "volume of a pod", func(string) ([]string, error) {
			if asked++; asked <= 2 {
				return nil, nil
			}
			return []string{"volume of a pod"}, nil
		})
	})
	t.Run("its content is not what it was", func(t *testing.T) {
		dir := filepath.Join(node.base.GraphRoot, "overlay", keptOf(t, base, id).record.TopLayer, "diff")
		file := filepath.Join(dir, "file-1")
		write(t, file, "Y")
		before, layers := keptOf(t, base, id), layerIDs(t, base)
		require.ErrorContains(t, node.roots.Mend(t.Context(), id, nil), `checksum failed for "file-1"`)
		assert.Equal(t, before, keptOf(t, base, id))
		assert.ElementsMatch(t, layers, layerIDs(t, base))
		write(t, file, "y")
	})
	require.NoError(t, node.roots.Mend(t.Context(), id, nil))

	t.Run("what is read has another digest", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		before := keptOf(t, node.root(t, ""), id)
		layers := filepath.Join(node.handlers[0].GraphRoot, "overlay-layers", "layers.json")
		content, err := os.ReadFile(layers)
		require.NoError(t, err)
		diffID := regexp.MustCompile(`"diff-digest":"sha256:[0-9a-f]+"`)
		write(t, layers, diffID.ReplaceAllString(string(content), `"diff-digest":"sha256:`+strings.Repeat("0", 64)+`"`))
		require.ErrorIs(t, node.roots.Mend(t.Context(), id, nil), ErrDigestMismatch)
		assert.Equal(t, before, keptOf(t, node.root(t, ""), id))
		assert.Len(t, layerIDs(t, node.root(t, "")), 1)
		write(t, layers, string(content))
		ctx, cancel := context.WithCancel(t.Context())
		require.ErrorIs(t, node.roots.Mend(ctx, id, func(string) ([]string, error) { cancel(); return nil, nil }), context.Canceled)
		assert.Equal(t, before, keptOf(t, node.root(t, ""), id))
		assert.Len(t, layerIDs(t, node.root(t, "")), 1)
	})
	t.Run("a layer is in no root", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		before := keptOf(t, node.root(t, ""), id)
		require.NoError(t, deleteImage(node.handlers[0], imageID(t, x)))
		require.ErrorIs(t, node.roots.Mend(t.Context(), id, nil), ErrBadRecord)
		assert.Equal(t, before, keptOf(t, node.root(t, ""), id))
	})
}

// TestResumeMending ends a Mend at each of its steps, as a kill would.
func TestResumeMending(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "x:1", imageOf(t, "base", "x"))
	y, z := imageOf(t, "base", "y"), imageOf(t, "base", "y", "z")
	reg.push(t, "y:1", y)
	reg.push(t, "z:1", z)
	w := imageOf(t, "base", "y", "w")
	reg.push(t, "w:1", w)
	reg.push(t, "other:1", imageOf(t, "other"))
	ids := []string{imageID(t, y), imageID(t, z)}
	remove := func(t *testing.T, node *testNode) {
		t.Helper()
		for _, id := range ids {
			require.NoError(t, node.root(t, "").deleteImage(id))
		}
	}
	for _, tc := range []struct {
		name    string
		do      func(t *testing.T, node *testNode, spares []string)
		leaning int
	}{
		{"the second records are there", func(*testing.T, *testNode, []string) {}, 2},
		{"the images are gone", func(t *testing.T, node *testNode, _ []string) { remove(t, node) }, 0},
		{"one image is gone", func(t *testing.T, node *testNode, _ []string) {
			require.NoError(t, node.root(t, "").deleteImage(ids[0]))
		}, 2},
		{"the images are gone and not all layers", func(t *testing.T, node *testNode, _ []string) {
			restore := saveLayer(t, node.base, keptOf(t, node.root(t, ""), ids[0]).record.TopLayer)
			remove(t, node)
			restore()
		}, 0},
		{"one image is back", func(t *testing.T, node *testNode, spares []string) {
			remove(t, node)
			require.NoError(t, node.roots.replaceBySpare(t.Context(), spares[0]))
		}, 0},
		{"half an image is back", func(t *testing.T, node *testNode, _ []string) {
			remove(t, node)
			_, err := node.root(t, "").store.CreateImage(ids[0], []string{reg.host + "/y:1"}, "", "", nil)
			require.NoError(t, err)
		}, 0},
		{"pulled meanwhile", func(t *testing.T, node *testNode, _ []string) {
			remove(t, node)
			node.pull(t, "default", reg.host+"/y:1")
		}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			node := newNode(t, "vm")
			base, vm := node.root(t, ""), node.root(t, "vm")
			node.pull(t, "vm", reg.host+"/x:1")
			require.NoError(t, node.crio("pull", reg.host+"/y:1"))
			require.NoError(t, node.crio("pull", reg.host+"/z:1"))
			before := []kept{keptOf(t, base, ids[0]), keptOf(t, base, ids[1])}
			var todo mending
			require.NoError(t, node.roots.crio.locked(func(state *crioState) (err error) {
				todo, err = state.planMending(ids[0], []*Root{vm})
				return err
			}))
			for _, l := range todo.lent {
				require.NoError(t, base.copyLayer(t.Context(), l.root, l.id, l.id, l.parent))
			}
			spares, err := node.roots.spare(t.Context(), todo)
			require.NoError(t, err)
			tc.do(t, node, spares)

			require.NoError(t, node.roots.Close())
			node.roots = openRoots(t, node.base, node.handlers)
			base = node.root(t, "")
			require.NoError(t, node.roots.ResumeMending(t.Context()))
			for i, id := range ids {
				now := keptOf(t, base, id)
				delete(now.data, accessKey) // by the pull
				assert.Equal(t, before[i].record.Names, now.record.Names)
				assert.Equal(t, before[i].record.TopLayer, now.record.TopLayer)
				assert.Equal(t, before[i].data, now.data)
			}
			images, err := base.store.Images()
			require.NoError(t, err)
			assert.Len(t, images, 2)
			assert.Len(t, layerIDs(t, base), 3)
			leans, err := node.roots.Leaning(t.Context())
			require.NoError(t, err)
			assert.Len(t, leans, tc.leaning)
			require.NoError(t, node.crio("check"))
			require.NoError(t, node.roots.Mend(t.Context(), ids[1], nil))
			leans, err = node.roots.Leaning(t.Context())
			require.NoError(t, err)
			assert.Empty(t, leans)
		})
	}

	t.Run("another image is used by now", func(t *testing.T) {
		node := newNode(t, "vm")
		base, vm := node.root(t, ""), node.root(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		for _, ref := range []string{"/z:1", "/w:1"} {
			require.NoError(t, node.crio("pull", reg.host+ref))
		}
		before := keptOf(t, base, ids[1])
		require.NoError(t, node.crio("check"))
		asked := 0
		err := node.roots.Mend(t.Context(), ids[1], func(string) ([]string, error) {
			if asked++; asked == 4 { // the last time
				return nil, node.crio("create", imageID(t, w), "c")
			}
			return nil, nil
		})
		require.ErrorIs(t, err, ErrInUse)
		assert.Equal(t, before, keptOf(t, base, ids[1]))
		require.NoError(t, node.crio("delete", "c"))

		// It begins between the last look and the removal.
		var todo mending
		require.NoError(t, node.roots.crio.locked(func(state *crioState) (err error) {
			todo, err = state.planMending(ids[1], []*Root{vm})
			return err
		}))
		require.Empty(t, todo.lent)
		spares, err := node.roots.spare(t.Context(), todo)
		require.NoError(t, err)
		require.NoError(t, node.crio("create", imageID(t, w), "c"))
		require.NoError(t, base.deleteImage(ids[1]))
		require.ErrorIs(t, base.deleteImage(imageID(t, w)), ErrInUse)
		require.NoError(t, node.roots.ResumeMending(t.Context()))
		assert.Len(t, spares, 2)
		now := keptOf(t, base, ids[1])
		assert.Equal(t, before.data, now.data)
		assert.Equal(t, before.record.Names, now.record.Names)
		require.NoError(t, node.crio("check"))
		images, err := base.store.Images()
		require.NoError(t, err)
		assert.Len(t, images, 2)
	})
	t.Run("its name is another's by now", func(t *testing.T) {
		node := newNode(t, "vm")
		base := node.root(t, "")
		node.pull(t, "default", reg.host+"/other:1")
		node.pull(t, "default", reg.host+"/y:1")
		_, err := node.roots.spare(t.Context(), mending{images: ids[:1]})
		require.NoError(t, err)
		require.NoError(t, base.deleteImage(ids[0]))
		other, err := base.Resolve(t.Context(), reg.host+"/other:1")
		require.NoError(t, err)
		require.NoError(t, base.store.AddNames(other.ID, []string{reg.host + "/y:1"}))
		require.NoError(t, node.roots.ResumeMending(t.Context()))
		assert.Empty(t, keptOf(t, base, ids[0]).record.Names)
	})
}

// saveLayer returns what brings a layer back after it was removed.
func saveLayer(tb testing.TB, opt Options, id string) (restore func()) {
	tb.Helper()
	home, list := filepath.Join(opt.GraphRoot, "overlay"), filepath.Join(opt.GraphRoot, "overlay-layers", "layers.json")
	find := func() (records []json.RawMessage, at int) {
		content, err := os.ReadFile(list)
		require.NoError(tb, err)
		require.NoError(tb, json.Unmarshal(content, &records))
		return records, slices.IndexFunc(records, func(r json.RawMessage) bool { return strings.Contains(string(r), `"id":"`+id+`"`) })
	}
	records, at := find()
	require.GreaterOrEqual(tb, at, 0)
	record := records[at]
	saved := filepath.Join(tb.TempDir(), "layer")
	require.NoError(tb, exec.Command("cp", "-a", filepath.Join(home, id), saved).Run())
	link, err := os.ReadFile(filepath.Join(saved, "link"))
	require.NoError(tb, err)
	return func() {
		now, at := find()
		require.Negative(tb, at)
		require.NoError(tb, exec.Command("cp", "-a", saved, filepath.Join(home, id)).Run())
		require.NoError(tb, os.Symlink("../"+id+"/diff", filepath.Join(home, "l", string(link))))
		content, err := json.Marshal(append(now, record))
		require.NoError(tb, err)
		write(tb, list, string(content))
	}
}
