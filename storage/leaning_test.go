package storage

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

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

	t.Run("removed from CRI-O's root alone", func(t *testing.T) {
		node := newNode(t, "vm")
		node.pull(t, "vm", reg.host+"/x:1")
		require.NoError(t, node.crio("pull", reg.host+"/y:1"))
		require.NoError(t, node.roots.Remove(t.Context(), reg.host+"/x:1", nil))
		require.NoError(t, node.roots.RemoveFrom(t.Context(), "default", imageID(t, y), nil))
		assert.Empty(t, layerIDs(t, node.root(t, "vm")))
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
