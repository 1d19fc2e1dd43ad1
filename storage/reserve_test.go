package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// fillUp leaves neither a block nor an inode free, and returns what takes them.
func fillUp(tb testing.TB, dir string) (blocks, inodes string) {
	tb.Helper()
	blocks, inodes = filepath.Join(dir, "blocks"), filepath.Join(dir, "inodes")
	require.NoError(tb, os.Mkdir(inodes, 0o700))
	f, err := os.Create(blocks)
	require.NoError(tb, err)
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	require.ErrorIs(tb, err, unix.ENOSPC)
	require.NoError(tb, f.Close())
	for i := 0; ; i++ {
		f, err := os.Create(filepath.Join(inodes, fmt.Sprint(i)))
		if errors.Is(err, unix.ENOSPC) {
			return blocks, inodes
		}
		require.NoError(tb, err)
		require.NoError(tb, f.Close())
	}
}

func TestRemoveFromFullRoots(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a", noise(1<<20)))
	base, vm := testOptions(t), testOptions(t)
	vm.Name, vm.Marker = "vm", true
	for _, opt := range []Options{base, vm} {
		require.NoError(t, os.Mkdir(opt.GraphRoot, 0o700))
		require.NoError(t, unix.Mount("full", opt.GraphRoot, "tmpfs", 0, "size=24m,nr_inodes=2000"))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(opt.GraphRoot, unix.MNT_DETACH)) })
	}
	require.NoError(t, PrepareRoot(vm))
	roots := openRoots(t, base, []Options{vm})
	node := &testNode{base: base, handlers: []Options{vm}, roots: roots}

	t.Run("a handler's", func(t *testing.T) {
		id := node.pull(t, "vm", reg.host+"/a:1").ID
		require.NoError(t, node.root(t, "vm").Lease(t.Context(), id))
		blocks, inodes := fillUp(t, vm.GraphRoot)
		require.NoError(t, node.root(t, "vm").Release(t.Context(), id))
		require.NoError(t, roots.Remove(t.Context(), id, nil))
		assertNoLayerDirs(t, vm)
		require.NoError(t, os.Remove(blocks))
		require.NoError(t, os.RemoveAll(inodes))

		reserve := filepath.Join(vm.GraphRoot, ".ocihold-reserve")
		var use treeUse
		require.NoError(t, use.addTree(t.Context(), reserve))
		assert.GreaterOrEqual(t, use.bytes, uint64(reserveBytes), "there is one again")
		assert.Equal(t, uint64(reserveInodes)+1, use.inodes)
		require.NoError(t, node.crio("check"))
	})
	t.Run("CRI-O's", func(t *testing.T) {
		id := node.pull(t, "default", reg.host+"/a:1").ID
		blocks, inodes := fillUp(t, base.GraphRoot)
		require.ErrorIs(t, roots.Remove(t.Context(), id, nil), ErrDiskFull)
		images, errs := roots.List(t.Context())
		require.Empty(t, errs)
		require.Len(t, images, 1, "what was not removed is listed")
		require.NoError(t, os.Remove(blocks))
		require.NoError(t, os.RemoveAll(inodes))
		require.NoError(t, node.crio("check"))
		require.NoError(t, roots.Remove(t.Context(), id, nil))
		assertNoLayerDirs(t, base)
	})
}

// What a pull could not write is not taken for written once there is room again.
func TestPullIntoRootThatWasFull(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	require.NoError(t, os.Mkdir(opt.GraphRoot, 0o700))
	require.NoError(t, unix.Mount("full", opt.GraphRoot, "tmpfs", 0, "size=24m,nr_inodes=2000"))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(opt.GraphRoot, unix.MNT_DETACH)) })
	root := open(t, opt)
	for i := range 12 {
		ref := fmt.Sprintf("a:%d", i)
		reg.push(t, ref, imageOf(t, ref, noise(1<<16), noise(1<<16)))
		blocks, inodes := fillUp(t, opt.GraphRoot)
		// The pull comes further each time before it fails.
		for j := range i {
			require.NoError(t, os.Remove(filepath.Join(inodes, fmt.Sprint(j))))
		}
		require.NoError(t, os.Truncate(blocks, fileSize(t, blocks)-int64(i)<<13))
		_, err := root.Pull(t.Context(), reg.host+"/"+ref, PullOptions{})
		require.NoError(t, os.Remove(blocks))
		require.NoError(t, os.RemoveAll(inodes))
		if err != nil {
			require.ErrorIs(t, err, ErrDiskFull)
		}
		_, err = root.Pull(t.Context(), reg.host+"/"+ref, PullOptions{})
		require.NoError(t, err, "with %d inodes", i)
	}
}

func fileSize(t *testing.T, file string) int64 {
	t.Helper()
	info, err := os.Stat(file)
	require.NoError(t, err)
	return info.Size()
}
