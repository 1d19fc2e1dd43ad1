package hostmount_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/imagevolume/scratch"
)

const room = 16 << 20

// openWritable is open with a directory for what is written.
func openWritable(t *testing.T, api hostmount.API) (dir *hostmount.Dir, path, files string) {
	t.Helper()
	dir, path = open(t, api)
	files = t.TempDir()
	require.NoError(t, dir.OpenScratch(files))
	t.Cleanup(func() {
		for _, key := range must(dir.Keys()) {
			assert.NoError(t, dir.Release(key))
		}
		assert.Eventually(t, func() bool { return !anyDevice(files) }, 20*time.Second, 10*time.Millisecond, "loop devices")
	})
	return dir, path, files
}

// anyDevice reports whether a loop device has its file in dir.
func anyDevice(dir string) bool {
	for _, name := range must(filepath.Glob("/sys/block/loop*/loop/backing_file")) {
		if file, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(file), dir+"/") {
			return true
		}
	}
	return false
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestEnsureWritable(t *testing.T) {
	for _, api := range []hostmount.API{hostmount.Fsconfig, hostmount.Mount} {
		t.Run(string(api), func(t *testing.T) {
			dir, path, files := openWritable(t, api)
			a, b := layers(t, 3), layers(t, 2)
			sub := filepath.Join(a[0], "sub")
			require.NoError(t, os.Mkdir(sub, 0o700))
			require.NoError(t, os.WriteFile(filepath.Join(sub, "file"), []byte("of the layer"), 0o600))
			require.NoError(t, os.Chown(sub, 7, 8))
			require.NoError(t, unix.Chmod(sub, 0o2750))
			require.NoError(t, dir.Ensure("a", hostmount.Spec{Layers: a}))
			require.NoError(t, dir.Ensure("b", hostmount.Spec{Layers: b}))
			for key, parts := range map[string][]hostmount.Part{
				"one":  {{Key: "a", Path: "sub"}},
				"both": {{Key: "a", Path: "sub"}, {Key: "b"}},
			} {
				require.NoError(t, dir.EnsureWritable(t.Context(), key, parts, room))
				require.NoError(t, dir.EnsureWritable(t.Context(), key, parts, room), "again")
				var stat unix.Stat_t
				require.NoError(t, unix.Stat(dir.Path(key), &stat))
				assert.Equal(t, []uint32{unix.S_IFDIR | 0o2750, 7, 8}, []uint32{stat.Mode, stat.Uid, stat.Gid})
				file := filepath.Join(dir.Path(key), "file")
				assert.Equal(t, "of the layer", string(must(os.ReadFile(file))))
				require.NoError(t, os.WriteFile(file, []byte("written"), 0o600))
				assert.Equal(t, "written", string(must(os.ReadFile(file))))
				require.NoError(t, os.Remove(file))
				require.ErrorIs(t, os.WriteFile(file, make([]byte, room), 0o600), unix.ENOSPC)
				require.NoError(t, unix.Mknod(filepath.Join(dir.Path(key), "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
				_, err := os.Open(filepath.Join(dir.Path(key), "null"))
				require.ErrorIs(t, err, unix.EACCES, "nodev")
			}
			assert.FileExists(t, filepath.Join(dir.Path("both"), "own1"))
			assert.Equal(t, "of the layer", string(must(os.ReadFile(filepath.Join(sub, "file")))))
			assert.Len(t, must(os.ReadDir(sub)), 1)
			assert.Empty(t, must(os.ReadDir(files)))
			assert.Len(t, must(os.ReadDir(path)), 4, "the mount points of the keys")

			use := must(hostmount.ScratchIn(path))
			assert.Equal(t, 2, use.Volumes)
			assert.Less(t, use.PromisedBytes, uint64(2*room))
			assert.Greater(t, use.Bytes, uint64(2*room*8/10))
			assert.LessOrEqual(t, use.Bytes, use.PromisedBytes)
			for _, key := range []string{"one", "both"} {
				require.NoError(t, dir.Release(key))
			}
			assert.Zero(t, must(hostmount.ScratchIn(path)))
		})
	}
	assert.Zero(t, must(hostmount.ScratchIn("/nowhere")))
}

// A container that has what was released keeps it, and the key says so.
func TestReleasedWritableStaysForWhoHasIt(t *testing.T) {
	dir, _, files := openWritable(t, hostmount.Auto)
	require.NoError(t, dir.Ensure("a", hostmount.Spec{Layers: layers(t, 1)}))
	require.NoError(t, dir.EnsureWritable(t.Context(), "k", []hostmount.Part{{Key: "a"}}, room))
	target := t.TempDir()
	require.NoError(t, unix.Mount(dir.Path("k"), target, "", unix.MS_BIND, ""))
	require.NoError(t, dir.Release("k"))
	require.NoError(t, dir.Release("a"))
	require.NoError(t, os.WriteFile(filepath.Join(target, "all"), []byte("written"), 0o600))
	used, _, err := dir.InUse(t.Context())
	require.NoError(t, err)
	assert.True(t, used["k"])
	assert.True(t, anyDevice(files))
	require.NoError(t, unix.Unmount(target, 0))
}

func TestEnsureWritableLeavesNothingOnError(t *testing.T) {
	dir, path, files := openWritable(t, hostmount.Auto)
	layers := layers(t, 1)
	require.NoError(t, dir.Ensure("a", hostmount.Spec{Layers: layers}))
	for name, parts := range map[string][]hostmount.Part{
		"a file": {{Key: "a", Path: "own0"}}, "missing": {{Key: "a", Path: "no"}}, "no mount": {{Key: "b"}},
	} {
		require.Error(t, dir.EnsureWritable(t.Context(), "k", parts, room), name)
	}
	require.ErrorIs(t, dir.EnsureWritable(t.Context(), "k", []hostmount.Part{{Key: "a"}}, 1<<60), scratch.ErrNoRoom)
	assert.Len(t, must(os.ReadDir(path)), 1)
	assert.Empty(t, must(os.ReadDir(files)))
	require.NoError(t, dir.EnsureWritable(t.Context(), "k", []hostmount.Part{{Key: "a"}}, room))
}
