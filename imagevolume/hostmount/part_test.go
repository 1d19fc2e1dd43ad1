package hostmount_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
)

var apis = []hostmount.API{hostmount.Fsconfig, hostmount.Mount}

// tree makes a layer with links of every kind, and mounts it as base.
func tree(t *testing.T, dir *hostmount.Dir) {
	t.Helper()
	layer := t.TempDir()
	outside := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(outside, "f"), []byte("of the host"), 0o644))
	require.NoError(t, os.MkdirAll(filepath.Join(layer, "a/b"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(layer, "a/b/f"), []byte("in it"), 0o644))
	require.NoError(t, unix.Mkfifo(filepath.Join(layer, "pipe"), 0o644))
	for name, target := range map[string]string{
		"absolute": "/a/b", "relative": "a/b", "a/up": "../a/b", "far": "../../../../../../a/b", "twice": "/absolute",
		"loop": "loop", "gone": "/nowhere", "out": outside, "climb": "../../../../../../../.." + outside, "magic": "/proc/self/root",
	} {
		require.NoError(t, os.Symlink(target, filepath.Join(layer, name)))
	}
	require.NoError(t, dir.Ensure("base", hostmount.Spec{Layers: []string{layer}}))
}

func TestPart(t *testing.T) {
	for _, api := range apis {
		t.Run(string(api), func(t *testing.T) {
			dir, _ := open(t, api)
			tree(t, dir)
			for path, file := range map[string]string{
				"a/b": "f", "a": "b/f", "absolute": "f", "relative": "f", "a/up": "f", "far": "f", "twice": "f", "a/b/f": "", "twice/f": "",
				"a/../a/b": "f", "": "a/b/f", "../..": "a/b/f",
			} {
				spec := hostmount.Spec{Parts: []hostmount.Part{{Key: "base", Path: path}}}
				require.NoError(t, dir.Ensure("part", spec), path)
				require.NoError(t, dir.Ensure("part", spec), "again")
				assert.True(t, dir.Mounted("part"))
				content, err := os.ReadFile(filepath.Join(dir.Path("part"), file))
				require.NoError(t, err, path)
				assert.Equal(t, "in it", string(content))
				require.ErrorIs(t, os.WriteFile(filepath.Join(dir.Path("part"), file), nil, 0o644), unix.EROFS)
				var stat unix.Statfs_t
				require.NoError(t, unix.Statfs(dir.Path("part"), &stat))
				assert.Equal(t, int64(unix.ST_RDONLY|unix.ST_NOSUID|unix.ST_NODEV), stat.Flags&(unix.ST_RDONLY|unix.ST_NOSUID|unix.ST_NODEV))
				require.NoError(t, dir.Release("part"))
				assert.NoFileExists(t, dir.Path("part"))
			}
			for path, want := range map[string]error{
				"nowhere": unix.ENOENT, "loop": unix.ELOOP, "gone": unix.ENOENT, "out": unix.ENOENT, "climb": unix.ENOENT, "out/f": unix.ENOENT,
				"a/b/f/g": unix.ENOTDIR, "magic": unix.ENOENT, "pipe": nil,
			} {
				err := dir.Ensure("part", hostmount.Spec{Parts: []hostmount.Part{{Key: "base", Path: path}}})
				part, ok := errors.AsType[*hostmount.PartError](err)
				require.True(t, ok, "%s: %v", path, err)
				assert.Equal(t, hostmount.Part{Key: "base", Path: path}, part.Part)
				if want != nil {
					require.ErrorIs(t, err, want, path)
				}
				assert.NoFileExists(t, dir.Path("part"))
			}
			require.Error(t, dir.Ensure("part", hostmount.Spec{Parts: []hostmount.Part{{Key: "none"}}}))
		})
	}
}

func TestPartsLieOverEachOther(t *testing.T) {
	for _, api := range apis {
		t.Run(string(api), func(t *testing.T) {
			dir, _ := open(t, api)
			tree(t, dir)
			over := t.TempDir()
			require.NoError(t, os.MkdirAll(filepath.Join(over, "sub"), 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(over, "sub/f"), []byte("over it"), 0o644))
			require.NoError(t, unix.Mknod(filepath.Join(over, "sub/b"), unix.S_IFCHR, 0), "a whiteout")
			require.NoError(t, dir.Ensure("over", hostmount.Spec{Layers: []string{over}}))

			require.NoError(t, dir.Ensure("both", hostmount.Spec{Parts: []hostmount.Part{{Key: "over", Path: "sub"}, {Key: "base", Path: "a/b"}}}))
			content, err := os.ReadFile(filepath.Join(dir.Path("both"), "f"))
			require.NoError(t, err)
			assert.Equal(t, "over it", string(content))
			require.NoError(t, dir.Ensure("apart", hostmount.Spec{Parts: []hostmount.Part{{Key: "over", Path: "sub"}, {Key: "base", Path: "a"}}}))
			assert.FileExists(t, filepath.Join(dir.Path("apart"), "b/f"), "the whiteout is of the other's own layers")
			require.ErrorIs(t, os.WriteFile(filepath.Join(dir.Path("both"), "new"), nil, 0o644), unix.EROFS)

			// It stays whole without what it is made of.
			require.NoError(t, dir.Release("base"))
			require.NoError(t, dir.Release("over"))
			assert.FileExists(t, filepath.Join(dir.Path("apart"), "b/f"))

			tree(t, dir)
			for name, bad := range map[string]struct {
				parts []hostmount.Part
				want  error
			}{
				"a file":             {[]hostmount.Part{{Key: "base", Path: "a/b/f"}, {Key: "base", Path: "a"}}, unix.ENOTDIR},
				"one in the other":   {[]hostmount.Part{{Key: "base", Path: "a/b"}, {Key: "base"}}, hostmount.ErrOverlap},
				"the same by a link": {[]hostmount.Part{{Key: "base", Path: "a/b"}, {Key: "base", Path: "absolute"}}, hostmount.ErrOverlap},
				"missing":            {[]hostmount.Part{{Key: "base"}, {Key: "base", Path: "nowhere"}}, unix.ENOENT},
			} {
				require.ErrorIs(t, dir.Ensure("bad", hostmount.Spec{Parts: bad.parts}), bad.want, name)
				assert.NoDirExists(t, dir.Path("bad"))
			}
		})
	}
}

func TestUseOfAPartIsOfItsMount(t *testing.T) {
	dir, _ := open(t, hostmount.Auto)
	tree(t, dir)
	require.NoError(t, dir.Ensure("part", hostmount.Spec{Parts: []hostmount.Part{{Key: "base", Path: "a/b/f"}}}))
	used := func() map[string]bool {
		keys, _, err := dir.InUse(t.Context())
		require.NoError(t, err)
		return map[string]bool{"base": keys["base"], "part": keys["part"]}
	}
	assert.Equal(t, map[string]bool{"base": false, "part": false}, used())
	target := filepath.Join(t.TempDir(), "f")
	require.NoError(t, os.WriteFile(target, nil, 0o644))
	stop := run(t, "mount --bind '"+dir.Path("part")+"' "+target)
	assert.Equal(t, map[string]bool{"base": true, "part": false}, used())
	require.NoError(t, dir.Release("part"))
	assert.Equal(t, map[string]bool{"base": true, "part": false}, used())
	stop()
	assert.Equal(t, map[string]bool{"base": false, "part": false}, used())
}

func TestEnsureOverWhatACrashLeft(t *testing.T) {
	dir, _ := open(t, hostmount.Auto)
	tree(t, dir)
	for path, left := range map[string]func() error{
		"a":     func() error { return os.WriteFile(dir.Path("part"), nil, 0o644) },
		"a/b/f": func() error { return os.Mkdir(dir.Path("part"), 0o755) },
	} {
		require.NoError(t, left())
		require.NoError(t, dir.Ensure("part", hostmount.Spec{Parts: []hostmount.Part{{Key: "base", Path: path}}}))
		require.NoError(t, dir.Release("part"))
	}
}
