package storage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.podman.io/storage/pkg/lockfile"
	"go.podman.io/storage/pkg/system"
	"golang.org/x/sys/unix"
)

const (
	// reserveName is in every handler root and keeps room free on its file system: containers/storage has to write before
	// it removes anything.
	reserveName = ownPrefix + "reserve"
	// reserveBytes is room for two or three times the lists of a root with some thousand layers.
	reserveBytes = 4 << 20
	// reserveInodes is room for the new lists and the directories that a removal moves layers into.
	reserveInodes = 32
)

// reserve is what is known of a root's reserve: how many removals have the use of it.
type reserve struct {
	mu    sync.Mutex
	users int
}

// withRoom runs fn, which removes something from the roots. Where the file system of a handler's root is full, fn has
// what was kept in reserve. It returns ErrDiskFull where that is not enough; for CRI-O's own root nothing is in reserve.
// As it may have to wait for the file system, no lock of a root is held before.
func withRoom(roots []*Root, fn func() error) error {
	for _, r := range roots {
		if r.marker == "" {
			continue
		}
		if err := r.takeReserve(); err != nil {
			return err
		}
		defer r.leaveReserve()
	}
	err := fn()
	for _, r := range roots {
		r.suspect(err)
	}
	if err == nil || !isDiskFull(err) {
		return err
	}
	errs := []error{full(err)}
	for _, r := range roots {
		errs = append(errs, r.reload())
	}
	return errors.Join(errs...)
}

func (r *Root) takeReserve() error {
	r.reserve.mu.Lock()
	defer r.reserve.mu.Unlock()
	now, err := r.room()
	if err != nil {
		return err
	}
	if now.scarce() {
		if err := r.giveUpReserve(now); err != nil {
			return fmt.Errorf("give up the reserve: %w", err)
		}
	}
	r.reserve.users++
	return nil
}

// giveUpReserve removes the reserve, and returns when the file system has its room for others, or soon.
func (r *Root) giveUpReserve(before room) error {
	if there, err := present(r.reserveDir()); !there {
		return err
	}
	if err := os.RemoveAll(r.reserveDir()); err != nil {
		return err
	}
	// ext4 does not give blocks again before it has written that they are free, xfs frees inodes behind the scenes.
	if err := system.Syncfs(filepath.Dir(r.marker)); err != nil {
		return err
	}
	for range 100 {
		now, err := r.room()
		if err != nil || now.free >= before.free+reserveBytes/2 && now.inodes >= reserveInodes/2 {
			return err
		}
		<-time.After(10 * time.Millisecond)
	}
	return nil
}

func (r *Root) leaveReserve() {
	r.reserve.mu.Lock()
	defer r.reserve.mu.Unlock()
	if r.reserve.users--; r.reserve.users == 0 {
		r.keepReserve()
	}
}

func (r *Root) reserveDir() string { return filepath.Join(filepath.Dir(r.marker), reserveName) }

// room is what is free on a file system. Of the free bytes some may be for nobody: ext4 keeps blocks to itself.
type room struct{ free, available, inodes uint64 }

// scarce tells whether there may be less than the reserve has.
func (r room) scarce() bool { return r.available < reserveBytes || r.inodes < reserveInodes }

func (r *Root) room() (room, error) { return roomIn(filepath.Dir(r.marker)) }

func roomIn(dir string) (room, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return room{}, fmt.Errorf("look for free space: %w", err)
	}
	size := uint64(s.Bsize) //nolint:gosec // never negative
	now := room{free: s.Bfree * size, available: s.Bavail * size, inodes: s.Ffree}
	if s.Files == 0 { // their number is not fixed
		now.inodes = reserveInodes
	}
	return now, nil
}

// keepReserve makes what is missing of the reserve. Where there is no room the next removal may have made some.
func (r *Root) keepReserve() {
	if err := makeReserve(r.reserveDir()); err != nil && !isDiskFull(err) {
		r.log.WithError(err).Warn("no space is kept in reserve for removals")
	}
}

func makeReserve(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	for i := range reserveInodes {
		f, err := os.OpenFile(filepath.Join(dir, fmt.Sprint(i)), os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		if i == 0 {
			err = unix.Fallocate(int(f.Fd()), 0, 0, reserveBytes)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// reload makes containers/storage read the root's lists again: after a write that failed it has in memory what it was
// about to write.
func (r *Root) reload() error {
	for _, home := range r.homes() {
		for _, name := range []string{"overlay-layers/layers", "overlay-images/images", "overlay-containers/containers"} {
			path := filepath.Join(filepath.Dir(home), name+".lock")
			if there, err := present(path); !there {
				if err != nil {
					return err
				}
				continue
			}
			lock, err := lockfile.GetLockFile(path)
			if err != nil {
				return err
			}
			lock.Lock()
			_, err = lock.RecordWrite()
			lock.Unlock()
			if err != nil {
				return fmt.Errorf("have the lists of the root read again: %w", err)
			}
		}
	}
	return nil
}

// suspect has the root's lists read again before the next call, where err may be that of a write: containers/storage may
// have layers in memory then whose content it could not write, and they would fail every pull that comes upon them.
func (r *Root) suspect(err error) {
	if isWriteFailure(err) {
		r.suspected.Store(true)
	}
}

// reassure reads the lists again, if they are suspected. Where that is not possible yet, as the disk is as it was, the
// next call tries it.
func (r *Root) reassure() {
	if !r.suspected.CompareAndSwap(true, false) {
		return
	}
	if err := r.reload(); err != nil {
		r.suspected.Store(true)
		r.log.WithError(err).Debug("the lists of the root are not read again yet")
	}
}

// full makes an error that says so ErrDiskFull.
func full(err error) error {
	if isDiskFull(err) {
		return fmt.Errorf("%w: %w", ErrDiskFull, err)
	}
	return err
}
