package hostmount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Follower is a Dir in the mount namespace of another process, the container
// runtime, which may be this process' own or not, and may be another one after
// the runtime's restart. Until Follow was called it is nowhere: nothing is mounted,
// and nothing can be.
type Follower struct {
	path    string
	api     API
	scratch string

	following sync.Mutex
	at        atomic.Pointer[place] // nil for nowhere
}

// place is a Dir and the mount namespace that it is in; nil is this process' own.
type place struct {
	dir       *Dir
	namespace *os.File
	id        string
}

// NewFollower returns a Follower of the directory at path. What is written to its
// writable mounts is on the disk of the directory scratch.
func NewFollower(path string, api API, scratch string) *Follower {
	return &Follower{path: filepath.Clean(path), api: api, scratch: scratch}
}

// Follow goes to the mount namespace of a process, and makes the directory there
// as Open does. What is mounted in the namespace before is detached: containers
// keep what they have. It does nothing where it is there already.
func (f *Follower) Follow(pid int) error {
	f.following.Lock()
	defer f.following.Unlock()
	link := fmt.Sprintf("/proc/%d/ns/mnt", pid)
	id, err := os.Readlink(link)
	if err != nil {
		return fmt.Errorf("find the mount namespace of process %d: %w", pid, err)
	}
	old := f.at.Load()
	if old != nil && old.id == id {
		return nil
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return fmt.Errorf("find the own mount namespace: %w", err)
	}
	next := &place{id: id}
	if id != own {
		if next.namespace, err = os.Open(link); err != nil {
			return fmt.Errorf("open the mount namespace of process %d: %w", pid, err)
		}
	}
	// First the old: where its parent is shared with the new, the end of its mount
	// would end that of the new.
	if old != nil {
		f.at.Store(nil)
		if err := old.leave(); err != nil {
			return fmt.Errorf("leave a mount namespace: %w", err)
		}
	}
	err = next.do(func() (err error) {
		if next.dir, err = Open(f.path, f.api); err != nil {
			return err
		}
		return next.dir.OpenScratch(f.scratch)
	})
	if err != nil {
		return err
	}
	f.at.Store(next)
	return nil
}

// leave detaches everything.
func (p *place) leave() error {
	return p.do(func() error {
		keys, err := p.dir.Keys()
		if err != nil {
			return err
		}
		for _, key := range keys {
			err = errors.Join(err, p.dir.Release(key))
		}
		return errors.Join(err, p.dir.Close())
	})
}

// do calls fn in the place's mount namespace: on a thread of its own, which ends
// with it.
func (p *place) do(fn func() error) error {
	if p.namespace == nil {
		return fn()
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked
		// A thread that shares its root and working directory with others cannot go.
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Setns(int(p.namespace.Fd()), unix.CLONE_NEWNS)
		}
		if err != nil {
			done <- fmt.Errorf("go to the mount namespace of the container runtime: %w", err)
			return
		}
		done <- fn()
	}()
	return <-done
}

// Path is that of Dir.
func (f *Follower) Path(key string) string { return filepath.Join(f.path, key) }

// Key is that of Dir.
func (f *Follower) Key(path string) string { return keyIn(f.path, path) }

// errNowhere is returned before Follow was called.
var errNowhere = errors.New("the container runtime was not there yet")

// Ensure is that of Dir.
func (f *Follower) Ensure(key string, spec Spec) error {
	at := f.at.Load()
	if at == nil {
		return errNowhere
	}
	return at.do(func() error { return at.dir.Ensure(key, spec) })
}

// IDMap is that of Dir.
func (f *Follower) IDMap(path string) (idMap string, err error) {
	at := f.at.Load()
	if at == nil {
		return "", errNowhere
	}
	err = at.do(func() (err error) { idMap, err = at.dir.IDMap(path); return err })
	return idMap, err
}

// EnsureWritable is that of Dir.
func (f *Follower) EnsureWritable(ctx context.Context, key string, parts []Part, size int64) error {
	at := f.at.Load()
	if at == nil {
		return errNowhere
	}
	return at.do(func() error { return at.dir.EnsureWritable(ctx, key, parts, size) })
}

// Mounted is that of Dir.
func (f *Follower) Mounted(key string) bool {
	mounted := false
	at := f.at.Load()
	return at != nil && at.do(func() error { mounted = at.dir.Mounted(key); return nil }) == nil && mounted
}

// Release is that of Dir.
func (f *Follower) Release(key string) error {
	at := f.at.Load()
	if at == nil {
		return nil
	}
	return at.do(func() error { return at.dir.Release(key) })
}

// Keys is that of Dir.
func (f *Follower) Keys() (keys []string, err error) {
	at := f.at.Load()
	if at == nil {
		return nil, nil
	}
	err = at.do(func() (err error) { keys, err = at.dir.Keys(); return err })
	return keys, err
}

// InUse is that of Dir. It looks into every mount namespace anyway.
func (f *Follower) InUse(ctx context.Context) (keys, lowers map[string]bool, err error) {
	return (&Dir{path: f.path}).InUse(ctx)
}

// Close is that of Dir.
func (f *Follower) Close() error {
	at := f.at.Load()
	if at == nil {
		return nil
	}
	return at.do(at.dir.Close)
}

// keyIn returns the key whose mount is at path, where dir has the mounts.
func keyIn(dir, path string) string {
	key, ok := strings.CutPrefix(path, dir+"/")
	if !ok || !valid(key) {
		return ""
	}
	return key
}
