package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestUsersOfRootWithoutItsDisk(t *testing.T) {
	reg := newRegistry(t)
	x := imageOf(t, "base", "x")
	reg.push(t, "x:1", x)
	node := newNode(t, "vm", "wasm")
	node.pull(t, "vm", reg.host+"/x:1")
	require.NoError(t, node.crio("create", imageID(t, x), "c"))

	dir, gone := node.handlers[0].GraphRoot, filepath.Join(t.TempDir(), "gone")
	require.NoError(t, os.Rename(dir, gone))
	users, err := node.roots.Users(t.Context(), dir)
	require.NoError(t, os.Rename(gone, dir))
	require.NoError(t, err)
	assert.Equal(t, []string{"container k8s_c of CRI-O"}, users)

	empty := t.TempDir()
	users, err = node.roots.Users(t.Context(), empty)
	require.NoError(t, err)
	assert.Empty(t, users, "its layers are in another root")
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
