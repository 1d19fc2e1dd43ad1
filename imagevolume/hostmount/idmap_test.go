package hostmount_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
)

// userNS binds a user namespace that has no process, and returns where.
func userNS(t *testing.T, uids, gids []syscall.SysProcIDMap) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: uids, GidMappings: gids}
	require.NoError(t, cmd.Start())
	path := filepath.Join(t.TempDir(), "user")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, unix.Mount(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid), path, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(path, unix.MNT_DETACH)) })
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	return path
}

func ids(container, host, size int) []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: container, HostID: host, Size: size}}
}

func TestIDMap(t *testing.T) {
	dir, _ := open(t, hostmount.Auto)
	for range 3 {
		got, err := dir.IDMap(userNS(t, append(ids(0, 200000, 1000), ids(2000, 300000, 7)...), ids(0, 400000, 65536)))
		require.NoError(t, err)
		assert.Equal(t, "uid 0 200000 1000; uid 2000 300000 7; gid 0 400000 65536", got)
	}
	_, err := dir.IDMap("/nowhere")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = dir.IDMap("/proc/self/ns/net")
	require.ErrorIs(t, err, unix.EINVAL)
	_, err = unix.Wait4(-1, nil, unix.WNOHANG, nil)
	require.ErrorIs(t, err, unix.ECHILD, "no child is left")
}

func TestLayersInAUserNamespace(t *testing.T) {
	for _, api := range []hostmount.API{hostmount.Fsconfig, hostmount.Mount} {
		for _, n := range []int{0, 1, 2, 120} {
			t.Run(fmt.Sprintf("%s/%d", api, n), func(t *testing.T) {
				dir, path := open(t, api)
				lowers := layers(t, n)
				for _, layer := range lowers {
					require.NoError(t, os.Chown(filepath.Join(layer, "all"), 1000, 2000))
				}
				namespace := userNS(t, ids(0, 200000, 65536), ids(0, 400000, 65536))
				require.NoError(t, dir.Ensure("k", hostmount.Spec{Layers: lowers, UserNS: namespace}))
				entries, err := os.ReadDir(dir.Path("k"))
				require.NoError(t, err)
				assert.Len(t, entries, n+min(n, 1))
				if n > 0 {
					assert.Equal(t, [2]uint32{200000, 400000}, owner(t, dir.Path("k")))
					assert.Equal(t, [2]uint32{200000, 400000}, owner(t, filepath.Join(dir.Path("k"), "own0")))
					assert.Equal(t, [2]uint32{201000, 402000}, owner(t, filepath.Join(dir.Path("k"), "all")))
					assert.Equal(t, [2]uint32{1000, 2000}, owner(t, filepath.Join(lowers[0], "all")), "on the host as ever")
					require.NoError(t, dir.Ensure("p", hostmount.Spec{Parts: []hostmount.Part{{Key: "k", Path: "all"}}}))
					assert.Equal(t, [2]uint32{201000, 402000}, owner(t, dir.Path("p")))
				}
				left, err := filepath.Glob(filepath.Join(path, ".*"))
				require.NoError(t, err)
				assert.Empty(t, left)
			})
		}
	}
}

func owner(t *testing.T, path string) [2]uint32 {
	t.Helper()
	var stat unix.Stat_t
	require.NoError(t, unix.Stat(path, &stat))
	return [2]uint32{stat.Uid, stat.Gid}
}

func TestLayersThatCannotBeMapped(t *testing.T) {
	dir, path := open(t, hostmount.Auto)
	namespace := userNS(t, ids(0, 200000, 65536), ids(0, 200000, 65536))
	err := dir.Ensure("k", hostmount.Spec{Layers: []string{"/proc/self/fdinfo", "/proc/self/map_files"}, UserNS: namespace})
	require.ErrorIs(t, err, hostmount.ErrNoIDMap)
	err = dir.Ensure("k", hostmount.Spec{Layers: layers(t, 2), UserNS: "/nowhere"})
	require.ErrorIs(t, err, os.ErrNotExist)
	entries, err := os.ReadDir(path)
	require.NoError(t, err)
	assert.Empty(t, entries)
}

func TestOpenClearsWhatIsNoKeys(t *testing.T) {
	_, path := open(t, hostmount.Auto)
	stage := filepath.Join(path, ".k")
	require.NoError(t, os.Mkdir(stage, 0o700))
	require.NoError(t, unix.Mount("x", stage, "tmpfs", 0, ""))
	require.NoError(t, os.Mkdir(filepath.Join(stage, "0"), 0o700))
	require.NoError(t, unix.Mount("y", filepath.Join(stage, "0"), "tmpfs", 0, ""))
	_, err := hostmount.Open(path, hostmount.Auto)
	require.NoError(t, err)
	assert.NoDirExists(t, stage)
}
