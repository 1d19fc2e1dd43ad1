package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestChangedRunRoot(t *testing.T) {
	reg := newRegistry(t)
	image := imageOf(t, "a")
	reg.push(t, "a:1", image)
	node := newNode(t, "vm")
	vm := node.root(t, "vm")
	id := node.pull(t, "vm", reg.host+"/a:1").ID
	moved := node.handlers[0]
	moved.RunRoot = filepath.Join(t.TempDir(), "run")
	refused := func(t *testing.T, users ...string) {
		t.Helper()
		_, err := OpenRoots(node.base, []Options{moved})
		require.ErrorIs(t, err, ErrRunRoot)
		for _, text := range append(users, `runroot = "`+node.handlers[0].RunRoot+`"`, `handler "vm"`) {
			require.ErrorContains(t, err, text)
		}
		openRoots(t, node.base, node.handlers)
	}

	t.Run("leased", func(t *testing.T) {
		require.NoError(t, vm.Lease(t.Context(), id))
		refused(t, id)
		require.NoError(t, vm.Release(t.Context(), id))
	})
	t.Run("run by CRI-O", func(t *testing.T) {
		require.NoError(t, node.crio("create", id, "c"))
		refused(t, "container k8s_c of CRI-O")
		require.NoError(t, node.crio("delete", "c"))
	})
	t.Run("mounted", func(t *testing.T) {
		dir, err := vm.store.MountImage(id, nil, "")
		require.NoError(t, err)
		refused(t, "a mount at "+dir)
		_, err = vm.store.UnmountImage(id, true)
		require.NoError(t, err)
	})
	t.Run("a boot later", func(t *testing.T) {
		require.NoError(t, vm.Lease(t.Context(), id))
		gone := node.handlers[0].RunRoot + "-gone"
		require.NoError(t, os.Rename(node.handlers[0].RunRoot, gone))
		roots := openRoots(t, node.base, []Options{moved})
		root, err := roots.Handler("vm")
		require.NoError(t, err)
		require.NoError(t, root.Release(t.Context(), id))
		require.NoError(t, os.Rename(gone, node.handlers[0].RunRoot))
	})
	openRoots(t, node.base, node.handlers)
	last, err := readText(filepath.Join(moved.GraphRoot, runRootFile))
	require.NoError(t, err)
	assert.Equal(t, node.handlers[0].RunRoot, last, "nobody uses it")
}
