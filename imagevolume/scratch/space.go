package scratch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// blockSize is that of the file system and of its device, in bytes: that of any
// disk divides it, which direct I/O asks for.
const blockSize = 4096

// mkfs is the program that makes the file system.
const mkfs = "mkfs.ext4"

// features are those of the file system: the same with every release of
// e2fsprogs, and no journal. With checksums the kernel need not find the tables
// of inodes written.
const features = "none,dir_index,dir_nlink,ext_attr,extent,extra_isize,filetype,flex_bg,huge_file,large_file,metadata_csum,sparse_super"

// mountOptions: blocks that are freed are freed in the file; the tables of inodes
// are written as they are used; after an error of the disk nothing more is
// written.
const mountOptions = "discard,noinit_itable,errors=remount-ro"

// Space is bounded room that is mounted. An overlay that is mounted over Upper
// and Work keeps it when it is closed.
type Space struct {
	// Upper and Work are two empty directories of the file system.
	Upper, Work string

	point string
}

// Make makes a Space of size bytes, of which its file system takes some percent.
// The caller closes it, whatever came of it; then what has no other mount is gone.
func (d *Dir) Make(ctx context.Context, size int64) (_ *Space, err error) {
	if err := d.room(size); err != nil {
		return nil, err
	}
	file, err := d.newFile(size)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := format(ctx, file); err != nil {
		return nil, err
	}
	device, err := attach(file)
	if err != nil {
		return nil, err
	}
	defer device.Close()
	point, err := os.MkdirTemp(d.mounts, prefix)
	if err != nil {
		return nil, fmt.Errorf("make mount point for scratch: %w", err)
	}
	if err := unix.Mount(device.Name(), point, "ext4", unix.MS_NOSUID|unix.MS_NODEV, mountOptions); err != nil {
		return nil, errors.Join(fmt.Errorf("mount scratch: %w", err), os.Remove(point))
	}
	s := &Space{Upper: filepath.Join(point, "upper"), Work: filepath.Join(point, "work"), point: point}
	for _, dir := range []string{s.Upper, s.Work} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, errors.Join(fmt.Errorf("make directory in scratch: %w", err), s.Close())
		}
	}
	return s, nil
}

// Close detaches the Space. It is to be called once.
func (s *Space) Close() error { return detach(s.point) }

// room refuses what the disk could not hold now.
func (d *Dir) room(size int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(d.files, &st); err != nil {
		return fmt.Errorf("ask for the room in %s: %w", d.files, err)
	}
	if available := st.Bavail * uint64(st.Bsize); available < uint64(size) { //nolint:gosec // neither is negative
		return fmt.Errorf("%w: %s of scratch is asked for and %s has %s; free some, or ask for less by scratchSize",
			ErrNoRoom, units.BytesSize(float64(size)), d.files, units.BytesSize(float64(available)))
	}
	return nil
}

// newFile makes a sparse file that has no name.
func (d *Dir) newFile(size int64) (*os.File, error) {
	file, err := os.OpenFile(d.files, unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make file for scratch in %s: %w", d.files, err)
	}
	if err := file.Truncate(size); err != nil {
		file.Close()
		return nil, fmt.Errorf("size file for scratch in %s: %w", d.files, err)
	}
	return file, nil
}

// format makes the file system: no blocks in reserve, an inode for each two
// blocks, nothing written that need not be.
func format(ctx context.Context, file *os.File) error {
	cmd := exec.CommandContext(ctx, mkfs, "-q", "-F", "-m", "0", "-i", fmt.Sprint(2*blockSize), "-b", fmt.Sprint(blockSize),
		"-O", features, "-E", "lazy_itable_init=1,nodiscard", "/proc/self/fd/3")
	cmd.Env = append(os.Environ(), "MKE2FS_CONFIG=/dev/null")
	cmd.ExtraFiles = []*os.File{file}
	var said bytes.Buffer
	cmd.Stderr = &said
	err := cmd.Run()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return errNoMkfs
	case err != nil:
		return fmt.Errorf("make file system of scratch: %w: %s", err, strings.Join(strings.Fields(said.String()), " "))
	}
	return nil
}
