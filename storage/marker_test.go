package storage

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestMarker(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	reg.push(t, "a:2", imageOf(t, "b"))
	base, opt := testOptions(t), testOptions(t)
	opt.Name, opt.Marker = "vm", true

	_, err := Open(opt)
	require.ErrorIs(t, err, ErrUnmounted)
	assert.NoDirExists(t, opt.GraphRoot)
	assert.NoDirExists(t, opt.RunRoot)

	disk := t.TempDir()
	mount := func() { require.NoError(t, unix.Mount(disk, opt.GraphRoot, "", unix.MS_BIND, "")) }
	unmount := func() { require.NoError(t, unix.Unmount(opt.GraphRoot, 0)) }
	require.NoError(t, os.Mkdir(opt.GraphRoot, 0o700))
	t.Cleanup(func() { _ = unix.Unmount(opt.GraphRoot, unix.MNT_DETACH) }) // where the test fails halfway
	mount()
	require.NoError(t, PrepareRoot(opt))
	require.NoError(t, PrepareRoot(opt), "idempotent")
	other := opt
	other.Name = "wasm"
	require.ErrorContains(t, PrepareRoot(other), `root of handler "vm"`)
	_, err = Open(other)
	require.ErrorIs(t, err, ErrUnmounted)
	unmount()

	roots := openRoots(t, base, []Options{opt})
	_, err = roots.Handler("vm")
	require.ErrorIs(t, err, ErrUnmounted)
	mount()
	root, err := roots.Handler("vm")
	require.NoError(t, err)
	assert.Len(t, roots.Returned(), 1)
	<-roots.Returned()
	_, err = root.store.CreateImage("", nil, "", "", nil) // half an image
	require.NoError(t, err)
	image, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)

	unmount()
	_, err = roots.Handler("vm")
	require.ErrorIs(t, err, ErrUnmounted)
	require.ErrorContains(t, err, opt.GraphRoot)
	_, err = root.Pull(t.Context(), reg.host+"/a:2", PullOptions{})
	require.ErrorIs(t, err, ErrUnmounted)
	require.ErrorIs(t, root.Lease(t.Context(), image.ID), ErrUnmounted)
	require.ErrorIs(t, root.Release(t.Context(), image.ID), ErrUnmounted)
	_, err = root.Resolve(t.Context(), image.ID)
	require.ErrorIs(t, err, ErrUnmounted)
	_, err = root.LowerDirs(t.Context(), image.ID, nil)
	require.ErrorIs(t, err, ErrUnmounted)
	_, err = root.Usage(t.Context())
	require.ErrorIs(t, err, ErrUnmounted)
	images, errs := roots.List(t.Context())
	assert.Empty(t, images)
	require.Len(t, errs, 1)
	require.ErrorIs(t, errs[0], ErrUnmounted)
	found, err := roots.Find(t.Context(), image.ID)
	require.NoError(t, err)
	assert.Empty(t, found)
	require.ErrorIs(t, roots.Remove(t.Context(), image.ID, nil), ErrNotFound)
	written, err := os.ReadDir(opt.GraphRoot)
	require.NoError(t, err)
	assert.Empty(t, written, "nothing is written where the disk should be")

	mount()
	defer unmount()
	_, errs = roots.List(t.Context())
	require.Len(t, errs, 1)
	require.ErrorIs(t, errs[0], ErrBadRecord)
	<-roots.Returned()
	require.NoError(t, roots.RemoveHalf(t.Context()))
	images, errs = roots.List(t.Context())
	require.Empty(t, errs)
	assert.Empty(t, roots.Returned(), "it was there before")
	require.Len(t, images, 1)
	assert.Equal(t, image.ID, images[0].ID)
}

func TestPrepareRootSparesOtherThings(t *testing.T) {
	for name, tc := range map[string]struct {
		entry, refused string
	}{
		"empty file system":           {"lost+found/", ""},
		"an image store":              {"overlay-images/images.json", ""},
		"killed at the work":          {".ocihold-root-123", ""},
		"somebody's files":            {"home/", "no image store"},
		"CRI-O found no disk, images": {"overlay-images/images.lock", "mount the disk"},
		"CRI-O found no disk, layers": {"overlay-layers/layers.lock", "mount the disk"},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			dir, file := filepath.Split(opt.GraphRoot + "/" + tc.entry)
			require.NoError(t, os.MkdirAll(dir, 0o700))
			if file != "" {
				write(t, filepath.Join(dir, file), "[]")
			}
			err := PrepareRoot(opt)
			if tc.refused == "" {
				require.NoError(t, err)
				require.NoError(t, CheckRoot(opt))
				return
			}
			require.ErrorContains(t, err, tc.refused)
			require.ErrorIs(t, CheckRoot(opt), ErrUnmounted)
		})
	}
}

// A root whose disk becomes read-only is refused, and comes back when the disk
// can be written again.
func TestReadOnlyDisk(t *testing.T) {
	for name, marked := range map[string]bool{"handler's": true, "CRI-O's": false} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			reg.push(t, "a:1", imageOf(t, "a"))
			reg.push(t, "a:2", imageOf(t, "b"))
			opt := testOptions(t)
			require.NoError(t, os.MkdirAll(opt.GraphRoot, 0o700))
			require.NoError(t, unix.Mount("disk", opt.GraphRoot, "tmpfs", 0, ""))
			t.Cleanup(func() { require.NoError(t, unix.Unmount(opt.GraphRoot, unix.MNT_DETACH)) })
			if opt.Marker = marked; marked {
				require.NoError(t, PrepareRoot(opt))
			}
			root, err := Open(opt)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, root.Close()) })
			image, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.NoError(t, err)

			remount := func(flags uintptr) {
				require.NoError(t, unix.Mount("", opt.GraphRoot, "", unix.MS_REMOUNT|flags, ""))
			}
			remount(unix.MS_RDONLY)
			_, err = root.Pull(t.Context(), reg.host+"/a:2", PullOptions{})
			require.ErrorIs(t, err, ErrReadOnly)
			require.ErrorContains(t, err, opt.GraphRoot)
			assert.Equal(t, marked, errors.Is(err, ErrUnmounted))
			_, err = root.Resolve(t.Context(), reg.host+"/a:1")
			require.ErrorIs(t, err, ErrReadOnly)
			_, errs := root.Images(t.Context())
			require.ErrorIs(t, errors.Join(errs...), ErrReadOnly)
			require.ErrorIs(t, root.Lease(t.Context(), image.ID), ErrReadOnly)
			remount(0)
			_, err = root.Pull(t.Context(), reg.host+"/a:2", PullOptions{})
			require.NoError(t, err)
		})
	}
}
