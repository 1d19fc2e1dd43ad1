package storage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"go.podman.io/storage/pkg/lockfile"
)

// RemoveUnwritten removes what a process leaves that is killed as it writes one of a root's lists, also that of the mounts
// in its run root, or data of an image:
// the new file, whose name is not its own yet. Who writes such a file holds the lock of the list. It looks at those roots
// only whose disk is mounted.
func (r *Roots) RemoveUnwritten(ctx context.Context) error {
	roots, _ := r.all()
	var errs []error
	for _, root := range roots {
		lists := []string{filepath.Join(root.store.RunRoot(), "overlay-layers/mountpoints")}
		for _, home := range root.homes() {
			for _, list := range []string{"overlay-layers/layers", "overlay-images/images", "overlay-containers/containers"} {
				lists = append(lists, filepath.Join(filepath.Dir(home), list))
			}
		}
		for _, list := range lists {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := removeUnwritten(list + ".lock"); err != nil {
				errs = append(errs, fmt.Errorf("remove what was half written in the root of handler %q: %w", root.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// removeUnwritten removes such files beside the lock, and in the directories there. It takes the lock only where there
// are any.
func removeUnwritten(path string) error {
	if found, err := unwritten(path); len(found) == 0 {
		return err
	}
	lock, err := lockfile.GetLockFile(path)
	if err != nil {
		return err
	}
	lock.Lock()
	defer lock.Unlock()
	found, err := unwritten(path)
	for _, file := range found {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

func unwritten(lock string) (found []string, err error) {
	for _, pattern := range []string{".tmp-*", "*/.tmp-*"} {
		files, err := filepath.Glob(filepath.Join(filepath.Dir(lock), pattern))
		if err != nil {
			return nil, err
		}
		found = append(found, files...)
	}
	return found, nil
}
