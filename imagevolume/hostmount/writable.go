package hostmount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/scratch"
)

// OpenScratch has EnsureWritable take room from the disk of the directory files; it
// comes before.
func (d *Dir) OpenScratch(files string) (err error) {
	d.room, err = scratch.Open(files, d.path)
	return err
}

// EnsureWritable mounts for key, unless it is mounted, parts that are directories,
// topmost first, with room for size bytes over them: what is written goes there,
// and the parts stay as they are. With the mount, and all binds of it, the room
// goes. On an error nothing is left mounted for key.
func (d *Dir) EnsureWritable(ctx context.Context, key string, parts []Part, size int64) (err error) {
	if there, err := d.begin(key); err != nil || there {
		return err
	}
	room, err := d.room.Make(ctx, size)
	if err != nil {
		return err
	}
	defer func() {
		if e := room.Close(); e != nil {
			err = errors.Join(err, e, d.Release(key))
		}
	}()
	return d.overlay(key, Spec{Parts: parts}, room)
}

// openUpper opens the directories of room. The first becomes the root of what is
// seen; so it gets owner and permissions of the directory below it.
func openUpper(room *scratch.Space, below int) ([]int, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(below, &stat); err != nil {
		return nil, fmt.Errorf("look at the directory below: %w", err)
	}
	if err := os.Chown(room.Upper, int(stat.Uid), int(stat.Gid)); err != nil {
		return nil, fmt.Errorf("give room to its owner: %w", err)
	}
	if err := unix.Chmod(room.Upper, stat.Mode&0o7777); err != nil {
		return nil, fmt.Errorf("set permissions of room: %w", err)
	}
	upper, err := openLayer(room.Upper)
	if err != nil {
		return nil, err
	}
	work, err := openLayer(room.Work)
	if err != nil {
		unix.Close(upper)
		return nil, err
	}
	return []int{upper, work}, nil
}

// Scratch is what all writable mounts take of the disk.
type Scratch struct {
	// Volumes is how many there are.
	Volumes int `json:"volumes"`
	// Bytes is what is written to them now, PromisedBytes what can be.
	Bytes         uint64 `json:"bytes"`
	PromisedBytes uint64 `json:"promised_bytes"`
}

// ScratchIn sums up the writable mounts of the Dir at path. It needs no Dir: where
// there is none, there are no mounts.
func ScratchIn(path string) (Scratch, error) {
	var sum Scratch
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return sum, fmt.Errorf("list mounts: %w", err)
	}
	for _, entry := range entries {
		var st unix.Statfs_t
		if unix.Statfs(filepath.Join(path, entry.Name()), &st) != nil || !valid(entry.Name()) {
			continue // gone by now, or being made
		}
		if st.Type == unix.OVERLAYFS_SUPER_MAGIC && st.Flags&unix.ST_RDONLY == 0 {
			sum.Volumes++
			sum.Bytes += (st.Blocks - st.Bfree) * uint64(st.Bsize) //nolint:gosec // none is negative
			sum.PromisedBytes += st.Blocks * uint64(st.Bsize)      //nolint:gosec // none is negative
		}
	}
	return sum, nil
}
