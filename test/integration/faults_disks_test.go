package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// badDisk is a file system on a loop device, whose file the program baddisk
// shows and can make slow or failing.
type badDisk struct {
	backing, shown string // the file, and as the program shows it
	point          string // where the file system is mounted
}

// newBadDisks makes a disk for each place in the node's directory, mounted
// there.
func newBadDisks(t *testing.T, node string, places map[string]string) map[string]*badDisk {
	t.Helper()
	program := filepath.Join(t.TempDir(), "baddisk")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../baddisk").CombinedOutput()
	require.NoError(t, err, "%s", out)
	const size = 384 << 20
	backing, shown := t.TempDir(), t.TempDir()
	// In memory: a disk is as slow as it is made here, whatever else the machine writes.
	require.NoError(t, unix.Mount("tmpfs", backing, "tmpfs", 0, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(backing, unix.MNT_DETACH)) })
	disks := map[string]*badDisk{}
	for name, place := range places {
		d := &badDisk{filepath.Join(backing, name), filepath.Join(shown, name), filepath.Join(node, place)}
		require.NoError(t, os.WriteFile(d.backing, nil, 0o600))
		require.NoError(t, os.Truncate(d.backing, size))
		out, err := exec.CommandContext(t.Context(), "mkfs.ext4", "-q", "-m0", "-Elazy_itable_init=1", d.backing).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.NoError(t, os.MkdirAll(d.point, 0o755))
		disks[name] = d
	}
	server := exec.Command(program, backing, shown)
	server.Stderr = os.Stderr
	require.NoError(t, server.Start())
	t.Cleanup(func() {
		// After the node, whose end unmounts all below its directory.
		for _, d := range disks {
			if err := unix.Unmount(d.point, 0); err != nil {
				require.ErrorIs(t, err, unix.EINVAL)
			}
			d.awaitDetached(t)
		}
		require.NoError(t, server.Process.Signal(syscall.SIGTERM))
		require.NoError(t, server.Wait())
	})
	for _, d := range disks {
		await(t, func() error { _, err := os.Stat(d.shown); return err })
		d.mount(t)
	}
	return disks
}

func (d *badDisk) mount(t *testing.T) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "mount", "-o", "loop", d.shown, d.point).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// awaitDetached waits until the loop device is gone: whoever has a file of it
// open, or a mount, keeps it.
func (d *badDisk) awaitDetached(t *testing.T) {
	t.Helper()
	await(t, func() error {
		devices, err := loopDevices(d.shown)
		if err == nil && len(devices) > 0 {
			err = fmt.Errorf("%s is still on %q", d.shown, devices)
		}
		return err
	})
}

// set makes the disk slow or failing, or good again.
func (d *badDisk) set(t *testing.T, kind string, bad bool) {
	t.Helper()
	flag := d.backing + "." + kind
	if bad {
		require.NoError(t, os.WriteFile(flag, nil, 0o600))
		return
	}
	require.NoError(t, os.RemoveAll(flag))
}

// setReadOnly makes the place of the mount read-only, or writable again. It
// waits for files that are open for writing to be closed.
func (d *badDisk) setReadOnly(t *testing.T, readOnly bool) {
	t.Helper()
	flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT)
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	require.Eventually(t, func() bool {
		err := unix.Mount("", d.point, "", flags, "")
		if !errors.Is(err, unix.EBUSY) {
			require.NoError(t, err)
		}
		return err == nil
	}, 30*time.Second, time.Millisecond)
}

// loopDevices lists the loop devices whose files begin with prefix.
func loopDevices(prefix string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var devices []string
	for _, f := range files {
		name, err := os.ReadFile(f)
		if err == nil && strings.HasPrefix(string(name), prefix) {
			devices = append(devices, strings.Split(f, "/")[3])
		}
	}
	return devices, nil
}
