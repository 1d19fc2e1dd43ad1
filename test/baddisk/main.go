// Command baddisk shows the files of a directory at a mount point, as disks for
// loop devices, and lets them go bad while they are used:
//
//	baddisk DIR MOUNTPOINT
//
// While DIR/NAME.slow is there, each read and write of NAME takes a while, and
// while DIR/NAME.eio is there each fails with EIO. It ends with SIGTERM, or when
// the mount point is unmounted.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// slowness is what each read and write of a slow disk takes besides.
const slowness = 50 * time.Millisecond

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "baddisk: give DIR and MOUNTPOINT")
		os.Exit(2)
	}
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "baddisk:", err)
		os.Exit(1)
	}
}

func serve(dir, point string) error {
	server, err := fs.Mount(point, &directory{path: dir}, &fs.Options{
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "baddisk"},
	})
	if err != nil {
		return fmt.Errorf("mount at %s: %w", point, err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, func() { _ = server.Unmount() })
	server.Wait()
	return nil
}

// directory has a disk for each file that is there at the start.
type directory struct {
	fs.Inode

	path string
}

// OnAdd makes the disks.
func (d *directory) OnAdd(ctx context.Context) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		fmt.Fprintln(os.Stderr, "baddisk:", err)
		return
	}
	for _, e := range entries {
		file, err := os.OpenFile(filepath.Join(d.path, e.Name()), os.O_RDWR, 0)
		if err != nil {
			fmt.Fprintln(os.Stderr, "baddisk:", err)
			continue
		}
		d.AddChild(e.Name(), d.NewPersistentInode(ctx, &disk{file: file}, fs.StableAttr{Mode: fuse.S_IFREG}), false)
	}
}

type disk struct {
	fs.Inode

	file *os.File
}

var (
	_ fs.NodeOpener    = (*disk)(nil)
	_ fs.NodeGetattrer = (*disk)(nil)
	_ fs.NodeReader    = (*disk)(nil)
	_ fs.NodeWriter    = (*disk)(nil)
	_ fs.NodeFsyncer   = (*disk)(nil)
)

// is tells whether the disk is as the suffix says.
func (d *disk) is(suffix string) bool {
	_, err := os.Stat(d.file.Name() + suffix)
	return err == nil
}

// bad is what goes before each access.
func (d *disk) bad(ctx context.Context) syscall.Errno {
	if d.is(".slow") {
		select {
		case <-ctx.Done():
		case <-time.After(slowness):
		}
	}
	if d.is(".eio") {
		return syscall.EIO
	}
	return fs.OK
}

// Open has the kernel ask for everything here.
func (d *disk) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, fuse.FOPEN_DIRECT_IO, fs.OK
}

// Getattr gives size and mode of the file.
func (d *disk) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	var st syscall.Stat_t
	if err := syscall.Fstat(int(d.file.Fd()), &st); err != nil {
		return fs.ToErrno(err)
	}
	out.FromStat(&st)
	return fs.OK
}

// Read reads as a disk does.
func (d *disk) Read(ctx context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	if errno := d.bad(ctx); errno != fs.OK {
		return nil, errno
	}
	n, err := d.file.ReadAt(dest, off)
	if n == 0 && err != nil {
		return nil, fs.ToErrno(err)
	}
	return fuse.ReadResultData(dest[:n]), fs.OK
}

// Write writes as a disk does.
func (d *disk) Write(ctx context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	if errno := d.bad(ctx); errno != fs.OK {
		return 0, errno
	}
	n, err := d.file.WriteAt(data, off)
	return uint32(n), fs.ToErrno(err)
}

// Fsync has nothing to do: no power is lost here.
func (d *disk) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	if d.is(".eio") {
		return syscall.EIO
	}
	return fs.OK
}
