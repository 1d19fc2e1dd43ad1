package hostmount_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/moby/sys/mountinfo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
)

// open returns a mount directory that is gone after the test.
func open(t *testing.T, api hostmount.API) (dir *hostmount.Dir, path string) {
	t.Helper()
	require.Zero(t, os.Getuid(), "mounting needs root")
	path = filepath.Join(t.TempDir(), "run # it", "mounts")
	dir, err := hostmount.Open(path, api)
	require.NoError(t, err)
	t.Cleanup(func() {
		keys, err := dir.Keys()
		assert.NoError(t, err)
		for _, key := range keys {
			assert.NoError(t, dir.Release(key))
		}
		assert.NoError(t, dir.Close())
		left, err := os.ReadFile("/proc/self/mountinfo")
		assert.NoError(t, err)
		assert.NotContains(t, string(left), path)
	})
	return dir, path
}

// layers makes n layers, the topmost first, each with a file of its own and one
// that all have.
func layers(t *testing.T, n int) []string {
	t.Helper()
	base := t.TempDir()
	dirs := make([]string, n)
	for i := range dirs {
		dirs[i] = filepath.Join(base, strconv.Itoa(i))
		require.NoError(t, os.Mkdir(dirs[i], 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dirs[i], "own"+strconv.Itoa(i)), []byte(strconv.Itoa(i)), 0o644))
		require.NoError(t, os.WriteFile(filepath.Join(dirs[i], "all"), []byte(strconv.Itoa(i)), 0o644))
	}
	return dirs
}

func TestEnsureMountsEveryLayer(t *testing.T) {
	for _, api := range []hostmount.API{hostmount.Auto, hostmount.Fsconfig, hostmount.Mount} {
		for _, n := range []int{0, 1, 2, 60, 127, 200} {
			t.Run(fmt.Sprintf("%s/%d", api, n), func(t *testing.T) {
				dir, _ := open(t, api)
				lowers := layers(t, n)
				require.NoError(t, dir.Ensure("k", hostmount.Spec{Layers: lowers}))
				require.NoError(t, dir.Ensure("k", hostmount.Spec{Layers: lowers}), "again")
				assert.True(t, dir.Mounted("k"))

				entries, err := os.ReadDir(dir.Path("k"))
				require.NoError(t, err)
				assert.Len(t, entries, n+min(n, 1), "every layer's own file, and the one they share")
				if n > 0 {
					top, err := os.ReadFile(filepath.Join(dir.Path("k"), "all"))
					require.NoError(t, err)
					assert.Equal(t, "0", string(top), "the topmost layer wins")
				}
				require.ErrorIs(t, os.WriteFile(filepath.Join(dir.Path("k"), "new"), nil, 0o644), unix.EROFS)

				require.NoError(t, dir.Release("k"))
				assert.False(t, dir.Mounted("k"))
				assert.NoDirExists(t, dir.Path("k"))
				require.NoError(t, dir.Release("k"), "again")
			})
		}
	}
}

func TestEnsureRefusesWhatDoesNotFit(t *testing.T) {
	for api, n := range map[hostmount.API]int{hostmount.Fsconfig: 501, hostmount.Mount: 300, hostmount.Auto: 501} {
		t.Run(string(api), func(t *testing.T) {
			dir, _ := open(t, api)
			err := dir.Ensure("k", hostmount.Spec{Layers: layers(t, n)})
			require.ErrorIs(t, err, hostmount.ErrTooManyLayers)
			assert.False(t, dir.Mounted("k"))
			assert.NoDirExists(t, dir.Path("k"))
		})
	}
}

func TestEnsureLeavesNothingOnError(t *testing.T) {
	dir, _ := open(t, hostmount.Auto)
	lowers := layers(t, 2)
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(lowers[0], link))
	for name, bad := range map[string][]string{
		"missing layer": {lowers[0], "/nowhere"},
		"linked layer":  {lowers[0], link},
		"layer twice":   {lowers[0], lowers[0]},
	} {
		t.Run(name, func(t *testing.T) {
			require.Error(t, dir.Ensure("k", hostmount.Spec{Layers: bad}))
			assert.NoDirExists(t, dir.Path("k"))
		})
	}
	for _, key := range []string{"", ".", "..", "a/b", ".empty"} {
		require.Error(t, dir.Ensure(key, hostmount.Spec{Layers: lowers}), "key %q", key)
		assert.Empty(t, dir.Key(dir.Path(key)))
	}
}

// run runs a shell script in a mount namespace of its own, where it says "ready"
// and then waits; the test goes on meanwhile.
func run(t *testing.T, script string) (stop func()) {
	t.Helper()
	cmd := exec.Command("unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", script+"; echo ready; read wait")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	buf := make([]byte, 6)
	n, err := out.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "ready\n", string(buf[:n]))
	return func() {
		_ = in.Close()
		_ = cmd.Wait()
	}
}

func TestInUse(t *testing.T) {
	dir, path := open(t, hostmount.Auto)
	require.NoError(t, dir.Ensure("k", hostmount.Spec{Layers: layers(t, 2)}))
	target := t.TempDir()
	inUse := func() map[string]bool {
		t.Helper()
		used, _, err := dir.InUse(t.Context())
		require.NoError(t, err)
		return map[string]bool{"k": used["k"]}
	}
	no, yes := map[string]bool{"k": false}, map[string]bool{"k": true}

	assert.Equal(t, no, inUse(), "mounted here only")
	for name, c := range map[string]struct {
		script string
		want   map[string]bool
	}{
		"a copy of the mount tree is no use":     {"true", no},
		"a bind is":                              {fmt.Sprintf("mount --bind '%s/k' %s", path, target), yes},
		"a recursive bind of what is around not": {fmt.Sprintf("mount --rbind '%s' %s", filepath.Dir(path), target), no},
		"nor a shared one of everything": {
			fmt.Sprintf("mount --rbind / %[1]s; mount --make-rshared %[1]s", target), no,
		},
		"a bind under a changed root is": {
			fmt.Sprintf("mount --rbind / %[1]s; mount --bind '%[2]s/k' %[1]s/mnt; exec chroot %[1]s sh -c 'echo ready; read wait'",
				target, path), yes,
		},
		"a bind outlives its origin": {fmt.Sprintf("mount --bind '%[1]s/k' %[2]s; umount -l '%[1]s/k'", path, target), yes},
	} {
		t.Run(name, func(t *testing.T) {
			stop := run(t, c.script)
			defer stop()
			assert.Equal(t, c.want, inUse())
		})
		assert.Equal(t, no, inUse(), "after: "+name)
	}
}

func TestRecursiveBindSkipsTheDirectory(t *testing.T) {
	dir, path := open(t, hostmount.Auto)
	require.NoError(t, dir.Ensure("k", hostmount.Spec{Layers: layers(t, 2)}))
	target := t.TempDir()
	require.NoError(t, unix.Mount(filepath.Dir(path), target, "", unix.MS_BIND|unix.MS_REC, ""))
	defer func() { require.NoError(t, unix.Unmount(target, unix.MNT_DETACH)) }()
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Source != dir.Path("k"), false
	})
	require.NoError(t, err)
	assert.Len(t, mounts, 1)
}

func TestOpenKeepsWhatIsMounted(t *testing.T) {
	dir, path := open(t, hostmount.Auto)
	require.NoError(t, dir.Ensure("k", hostmount.Spec{Layers: layers(t, 2)}))
	again, err := hostmount.Open(path, hostmount.Auto)
	require.NoError(t, err)
	assert.True(t, again.Mounted("k"))
	keys, err := again.Keys()
	require.NoError(t, err)
	assert.Equal(t, []string{"k"}, keys)
	assert.Equal(t, "k", again.Key(again.Path("k")))

	require.NoError(t, again.Close(), "in use: stays")
	assert.True(t, dir.Mounted("k"))
}

func TestOpenRefusesWhatANewerOneMade(t *testing.T) {
	dir, path := open(t, hostmount.Auto)
	require.NoError(t, dir.Close())
	require.NoError(t, unix.Mount("ocihold-2", path, "tmpfs", 0, ""))
	_, err := hostmount.Open(path, hostmount.Auto)
	require.NoError(t, unix.Unmount(path, 0))
	require.ErrorIs(t, err, hostmount.ErrNewer)
	_, err = hostmount.Open(path, hostmount.Auto) // which the end of the test closes
	require.NoError(t, err)
}

func TestReleaseOfWhatACrashLeft(t *testing.T) {
	dir, _ := open(t, hostmount.Auto)
	require.NoError(t, os.Mkdir(dir.Path("half"), 0o755))
	keys, err := dir.Keys()
	require.NoError(t, err)
	assert.Equal(t, []string{"half"}, keys)
	assert.False(t, dir.Mounted("half"))
	require.NoError(t, dir.Release("half"))
	assert.NoDirExists(t, dir.Path("half"))
}

func BenchmarkEnsure(b *testing.B) {
	for _, api := range []hostmount.API{hostmount.Fsconfig, hostmount.Mount} {
		for _, n := range []int{1, 10, 60, 120} {
			b.Run(fmt.Sprintf("%s/layers=%d", api, n), func(b *testing.B) {
				path := filepath.Join(b.TempDir(), "mounts")
				dir, err := hostmount.Open(path, api)
				require.NoError(b, err)
				base := b.TempDir()
				lowers := make([]string, n)
				for i := range lowers {
					lowers[i] = filepath.Join(base, strconv.Itoa(i))
					require.NoError(b, os.Mkdir(lowers[i], 0o755))
				}
				for b.Loop() {
					require.NoError(b, dir.Ensure("k", hostmount.Spec{Layers: lowers}))
					b.StopTimer()
					require.NoError(b, dir.Release("k"))
					b.StartTimer()
				}
				require.NoError(b, dir.Close())
			})
		}
	}
}
