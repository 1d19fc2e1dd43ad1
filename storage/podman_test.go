package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPodmanWorksOnTheRoot proves that Debian's podman, with its older containers/storage, goes on working on a root that
// this package wrote to.
func TestPodmanWorksOnTheRoot(t *testing.T) {
	root, opt, image, before := pulled(t)
	run := func(args ...string) string {
		out, err := podman(t, opt, args...)
		require.NoError(t, err)
		return out
	}
	check := func() {
		assert.Equal(t, image.ID+" "+image.Names[0], run("image", "ls", "--no-trunc", "--format", "{{.Id}} {{.Repository}}:{{.Tag}}"))
		assert.Equal(t, image.ID, run("image", "inspect", "--format", "{{.Id}}", image.Names[0]))
		dir := run("image", "mount", image.ID)
		for file, want := range map[string]string{"file-0": "one", "file-1": "two"} {
			content, err := os.ReadFile(filepath.Join(dir, file))
			require.NoError(t, err)
			assert.Equal(t, want, string(content))
		}
		run("image", "umount", image.ID)
		run("tag", image.ID, "localhost/other:1")
		got, err := root.Resolve(t.Context(), "other:1")
		require.NoError(t, err)
		assert.Equal(t, image.ID, got.ID)
		run("untag", image.ID, "localhost/other:1")
	}
	check()
	require.NoError(t, root.Lease(t.Context(), image.ID))
	check()

	for _, args := range [][]string{
		{"rmi", image.ID}, {"rmi", image.Names[0]}, {"image", "prune", "--all", "--force"}, {"container", "prune", "--force"},
	} {
		out, err := podman(t, opt, args...)
		if args[0] == "rmi" {
			require.ErrorContains(t, err, "in use", out)
		}
		assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root), "after podman %q", args)
	}

	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.ElementsMatch(t, before, layerIDs(t, root))
	check()
	run("rmi", image.ID)
	assert.Empty(t, layerIDs(t, root))
	assertNoLayerDirs(t, opt)
}

func TestPodmanForcedRemoval(t *testing.T) {
	root, opt, image, _ := pulled(t)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
	require.NoError(t, err)
	_, err = podman(t, opt, "rmi", "--force", image.ID)
	require.NoError(t, err)

	_, err = root.Resolve(t.Context(), image.ID)
	require.ErrorIs(t, err, ErrNotFound)
	for i, want := range []string{"two", "one"} {
		content, err := os.ReadFile(filepath.Join(dirs[i], []string{"file-1", "file-0"}[i]))
		require.NoError(t, err)
		assert.Equal(t, want, string(content))
	}
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: false}}, leases(t, root))

	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.Empty(t, layerIDs(t, root))
	assertNoLayerDirs(t, opt)
}

func TestPodmanForcedRepull(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "one", "two"))
	opt := testOptions(t)
	root := open(t, opt)
	image, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	before := layerIDs(t, root)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	_, err = podman(t, opt, "rmi", "--force", image.ID)
	require.NoError(t, err)

	again, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	assert.Equal(t, image.ID, again.ID)
	require.NoError(t, root.Lease(t.Context(), image.ID))
	assert.Equal(t, []Lease{{ImageID: image.ID, Complete: true}}, leases(t, root))
	require.NoError(t, root.Release(t.Context(), image.ID))
	assert.ElementsMatch(t, before, layerIDs(t, root))
}
