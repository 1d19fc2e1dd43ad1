package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestRemoveUnwritten(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	node := newNode(t, "vm")
	var left []string
	for _, handler := range []string{"default", "vm"} {
		image := node.pull(t, handler, reg.host+"/a:1")
		root := node.root(t, handler).store.GraphRoot()
		for _, file := range []string{
			"overlay-layers/.tmp-layers.json123", "overlay-images/.tmp-images.json1", "overlay-containers/.tmp-containers.json1",
			"overlay-images/" + image.ID + "/.tmp-manifest9",
		} {
			left = append(left, filepath.Join(root, file))
		}
		runRoot := node.root(t, handler).store.RunRoot()
		left = append(left, filepath.Join(runRoot, "overlay-layers/.tmp-mountpoints.json1"))
	}
	for _, file := range left {
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte("[{"), 0o600))
	}
	require.NoError(t, node.roots.RemoveUnwritten(t.Context()))
	for _, file := range left {
		assert.NoFileExists(t, file)
	}
	images, errs := node.roots.List(t.Context())
	assert.Empty(t, errs)
	assert.Len(t, images, 1)
	require.NoError(t, node.roots.RemoveUnwritten(t.Context()), "with nothing to do")
}
