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
