package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// tempPrefix begins the name of each tempDir.
const tempPrefix = "downloads-"

// tempDir is a directory for downloads that is locked as long as its process lives. One that is not locked belongs to
// no one any more.
type tempDir struct {
	parent, path string
	lock         *os.File
}

// claimTempDir makes a tempDir in parent, which it makes too, and removes those that belong to no one.
func claimTempDir(parent string) (_ *tempDir, err error) {
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, fmt.Errorf("create the directory for downloads: %w", err)
	}
	if err := deadTempDirs(parent, os.RemoveAll); err != nil {
		return nil, fmt.Errorf("clear the directory for downloads: %w", err)
	}
	// Until the new one is locked, no one may take it for one that is not.
	guard, err := lockDir(parent, unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("create a directory for downloads: %w", err)
	}
	defer guard.Close()
	path, err := os.MkdirTemp(parent, tempPrefix)
	if err != nil {
		return nil, fmt.Errorf("create a directory for downloads: %w", err)
	}
	lock, err := lockDir(path, unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("create a directory for downloads: %w", errors.Join(err, os.Remove(path)))
	}
	return &tempDir{parent, path, lock}, nil
}

// release is idempotent.
func (t *tempDir) release() error {
	err := t.lock.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return errors.Join(err, os.RemoveAll(t.path))
}

// deadTempDirs calls do with each tempDir in parent that belongs to no one.
func deadTempDirs(parent string, do func(dir string) error) error {
	guard, err := lockDir(parent, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer guard.Close()
	entries, err := os.ReadDir(parent)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		dir := filepath.Join(parent, e.Name())
		lock, err := lockDir(dir, unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, os.ErrNotExist) {
			continue // it is in use, or gone since
		}
		if err == nil {
			err = errors.Join(do(dir), lock.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// lockDir locks a directory until the file is closed, which the end of the process does too.
func lockDir(dir string, how int) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), how); err != nil {
		return nil, &os.PathError{Op: "lock", Path: dir, Err: errors.Join(err, f.Close())}
	}
	return f, nil
}
