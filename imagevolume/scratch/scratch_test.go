package scratch_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/scratch"
)

const size = 16 << 20

func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loop devices and mounts")
	}
}

// dirs are a new Dir and its two directories.
func dirs(t *testing.T) (d *scratch.Dir, files, mounts string) {
	t.Helper()
	requireRoot(t)
	base := t.TempDir()
	files, mounts = filepath.Join(base, "files"), filepath.Join(base, "mounts")
	require.NoError(t, os.Mkdir(mounts, 0o700))
	d, err := scratch.Open(files, mounts)
	require.NoError(t, err)
	t.Cleanup(func() { // what a test that fails leaves
		_, err := scratch.Open(files, mounts)
		require.NoError(t, err)
	})
	return d, files, mounts
}

// devices lists the loop devices whose file is or was in dir.
func devices(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	require.NoError(t, err)
	var found []string
	for _, name := range names {
		if file, err := os.ReadFile(name); err == nil && strings.HasPrefix(string(file), dir+"/") {
			found = append(found, strings.TrimSpace(string(file)))
		}
	}
	return found
}

// requireNothing waits for the kernel, which lets go of a device a moment after
// its last mount.
func requireNothing(t *testing.T, files, mounts string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(devices(t, files)) == 0 }, 20*time.Second, 10*time.Millisecond, "loop devices")
	for _, dir := range []string{files, mounts} {
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, entries, dir)
	}
}

func TestSpaceIsBounded(t *testing.T) {
	d, files, mounts := dirs(t)
	s, err := d.Make(t.Context(), size)
	require.NoError(t, err)
	require.Len(t, devices(t, files), 1)

	var taken unix.Stat_t
	require.NoError(t, unix.Stat(s.Upper, &taken))
	require.Equal(t, uint32(unix.S_IFDIR|0o755), taken.Mode)
	err = os.WriteFile(filepath.Join(s.Upper, "all"), make([]byte, 2*size), 0o600)
	require.ErrorIs(t, err, unix.ENOSPC)
	info, err := os.Stat(filepath.Join(s.Upper, "all"))
	require.NoError(t, err)
	require.Greater(t, info.Size(), int64(size*9/10), "what the file system takes of it is little")
	require.Less(t, info.Size(), int64(size))

	require.NoError(t, s.Close())
	requireNothing(t, files, mounts)
}

func TestDeletedBytesAreGivenBack(t *testing.T) {
	d, files, _ := dirs(t)
	disk := func() uint64 { // bytes in use
		var st unix.Statfs_t
		unix.Sync()
		require.NoError(t, unix.Statfs(files, &st))
		return (st.Blocks - st.Bfree) * uint64(st.Bsize)
	}
	// A disk of its own, so that nobody else writes to it.
	outer, err := d.Make(t.Context(), 8*size)
	require.NoError(t, err)
	defer func() { require.NoError(t, outer.Close()) }()
	files = outer.Upper
	inner, err := scratch.Open(files, t.TempDir())
	require.NoError(t, err)
	s, err := inner.Make(t.Context(), size)
	require.NoError(t, err)
	empty := disk()
	name := filepath.Join(s.Upper, "file")
	require.NoError(t, os.WriteFile(name, bytes.Repeat([]byte("text"), 2<<20), 0o600))
	require.GreaterOrEqual(t, disk(), empty+8<<20)
	require.NoError(t, os.Remove(name))
	require.Eventually(t, func() bool { return disk() < empty+1<<20 }, 20*time.Second, 50*time.Millisecond)
	require.NoError(t, s.Close())
	require.Eventually(t, func() bool { return disk() < 1<<20 }, 20*time.Second, 50*time.Millisecond)
}

// Nothing has to be cleared where a process was killed but its mount point.
func TestOpenClearsWhatWasLeft(t *testing.T) {
	d, files, mounts := dirs(t)
	for range 3 {
		_, err := d.Make(t.Context(), size)
		require.NoError(t, err)
	}
	require.NoError(t, os.Mkdir(filepath.Join(mounts, ".scratch-not-yet-mounted"), 0o700))
	require.NoError(t, os.Mkdir(filepath.Join(mounts, "of-others"), 0o700))
	require.Len(t, devices(t, files), 3)
	_, err := scratch.Open(files, mounts)
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(mounts, "of-others")))
	requireNothing(t, files, mounts)
}

func TestManyAtOnce(t *testing.T) {
	d, files, mounts := dirs(t)
	var all sync.WaitGroup
	errs := make([]error, 20)
	for i := range errs {
		all.Go(func() {
			s, err := d.Make(t.Context(), size)
			if err == nil {
				err = errors.Join(os.WriteFile(filepath.Join(s.Upper, fmt.Sprint(i)), nil, 0o600), s.Close())
			}
			errs[i] = err
		})
	}
	all.Wait()
	require.NoError(t, errors.Join(errs...))
	requireNothing(t, files, mounts)
}

func TestRefusals(t *testing.T) {
	d, files, mounts := dirs(t)
	t.Run("the disk has less", func(t *testing.T) {
		_, err := d.Make(t.Context(), 1<<60)
		require.ErrorIs(t, err, scratch.ErrNoRoom)
		require.ErrorContains(t, err, "1EiB of scratch is asked for and "+files+" has ")
	})
	t.Run("no mkfs", func(t *testing.T) {
		require.NoError(t, scratch.Supported())
		t.Setenv("PATH", t.TempDir())
		require.ErrorIs(t, scratch.Supported(), scratch.ErrUnsupported)
		_, err := d.Make(t.Context(), size)
		require.ErrorIs(t, err, scratch.ErrUnsupported)
		require.ErrorContains(t, err, "install e2fsprogs")
	})
	t.Run("mkfs fails", func(t *testing.T) {
		bin := t.TempDir()
		script := "#!/bin/sh\necho mke2fs: no luck >&2\nexit 1\n"
		require.NoError(t, os.WriteFile(filepath.Join(bin, "mkfs.ext4"), []byte(script), 0o700))
		t.Setenv("PATH", bin)
		_, err := d.Make(t.Context(), size)
		require.ErrorContains(t, err, "make file system of scratch: exit status 1: mke2fs: no luck")
	})
	requireNothing(t, files, mounts)
}
