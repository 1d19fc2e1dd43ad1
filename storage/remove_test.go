package storage

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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
// TestRemoveTakesWhatCRIOLeft has CRI-O run a container from a handler's root on a layer of its own root, which then loses
// its images.
func TestRemoveTakesWhatCRIOLeft(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "one:1", imageOf(t, "bottom"))
	reg.push(t, "two:1", imageOf(t, "bottom", "top"))
	node := newNode(t, "vm")
	base := node.root(t, "")
	remove := map[string]func(id string) error{
		"removed": func(id string) error { return node.roots.Remove(t.Context(), id, nil) },
		"collected": func(id string) error {
			image := shelved{GCImage: GCImage{ID: id, LastUsed: time.Now().Add(time.Hour)}}
			return node.roots.collectImage(t.Context(), node.root(t, "vm"), image)
		},
	}
	for name, remove := range remove {
		t.Run(name, func(t *testing.T) {
			one := node.pull(t, "vm", reg.host+"/one:1")
			two := node.pull(t, "default", reg.host+"/two:1")
			layers, err := node.root(t, "vm").chain(one.ID)
			require.NoError(t, err)
			require.Len(t, layers, 1)
			require.NoError(t, node.crio("create", one.ID, "c"))
			require.NoError(t, node.roots.RemoveFrom(t.Context(), "default", two.ID, nil))
			require.Contains(t, layerIDs(t, base), layers[0], "the container's layer is on it")
			require.ErrorIs(t, node.roots.Remove(t.Context(), one.ID, nil), ErrInUse)
			require.NoError(t, node.crio("delete", "c"))
			require.NoError(t, remove(one.ID))
			assert.Empty(t, layerIDs(t, base))
			assert.Empty(t, layerIDs(t, node.root(t, "vm")))

			// What is used stays.
			node.pull(t, "vm", reg.host+"/one:1")
			node.pull(t, "default", reg.host+"/two:1")
			require.NoError(t, remove(one.ID))
			assert.Len(t, layerIDs(t, base), 2)
			require.NoError(t, node.crio("check"))
			require.NoError(t, node.roots.Remove(t.Context(), two.ID, nil))
		})
	}
}

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

// TestRemoveIsWhole is about what comes into being after Remove has asked who uses the image: the copies of all roots
// stay.
func TestRemoveIsWhole(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "one")
	reg.push(t, "a:1", img)
	node := newNode(t, "vm", "wasm")
	id := imageID(t, img)
	for _, handler := range []string{"default", "vm", "wasm"} {
		node.pull(t, handler, reg.host+"/a:1")
	}
	for name, use := range map[string]struct{ begin, end func() error }{
		"a lease in the last root": {
			func() error { return node.root(t, "wasm").Lease(t.Context(), id) },
			func() error { return node.root(t, "wasm").Release(t.Context(), id) },
		},
		"a lease in CRI-O's root": {
			func() error { return node.root(t, "").Lease(t.Context(), id) },
			func() error { return node.root(t, "").Release(t.Context(), id) },
		},
		"container k8s_c": {
			func() error { return node.crio("create", id, "c") },
			func() error { return node.crio("delete", "c") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, use.begin())
			require.ErrorIs(t, node.roots.remove(t.Context(), "", id), ErrInUse)
			found, err := node.roots.Find(t.Context(), id)
			require.NoError(t, err)
			assert.Len(t, found, 3)
			require.NoError(t, node.crio("check"))
			require.NoError(t, use.end())
		})
	}
	require.NoError(t, node.roots.remove(t.Context(), "", id))
	found, err := node.roots.Find(t.Context(), id)
	require.NoError(t, err)
	assert.Empty(t, found)
}
