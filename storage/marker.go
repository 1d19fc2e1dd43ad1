package storage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// ownPrefix begins the name of whatever is ours in a handler root beside what containers/storage has there.
	ownPrefix = ".ocihold-"
	// markerFile is in every handler root and has the handler's name as its content.
	markerFile = ownPrefix + "root"
)

// PrepareRoot makes the directories of a handler's root and the marker file that Options.Marker asks for. It is
// idempotent. It fails where the root is marked as another handler's.
//
// It belongs where an operator sets a node up, with the root's disk mounted, and nowhere else: a directory without a
// marker it takes for a new root if it is empty or a root of containers/storage with images, and refuses otherwise.
func PrepareRoot(opt Options) error {
	if err := prepareRoot(opt); err != nil {
		return fmt.Errorf("prepare the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	return nil
}

func prepareRoot(opt Options) error {
	for _, dir := range []string{opt.GraphRoot, opt.RunRoot} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	marker := filepath.Join(opt.GraphRoot, markerFile)
	switch owner, err := readOwner(marker); {
	case err == nil && owner == opt.Name:
		return nil
	case err == nil:
		return fmt.Errorf("%s says that it is the root of handler %q: give each handler a root of its own", marker, owner)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := checkNew(opt.GraphRoot); err != nil {
		return err
	}
	return writeMarker(marker, opt.Name)
}

// checkNew refuses a directory that has other things than images.
func checkNew(dir string) error {
	// Where a disk is not mounted, CRI-O makes directories of an image store, with lock files.
	switch isStore, err := present(filepath.Join(dir, "overlay-images", "images.json")); {
	case err != nil:
		return err
	case isStore:
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == "lost+found", strings.HasPrefix(name, ownPrefix):
		case name == "overlay-images", name == "overlay-layers":
			return fmt.Errorf("%s is there and has no images, as CRI-O leaves it where a disk is not mounted: mount the disk of this root; "+
				"for a new root, empty the directory", filepath.Join(dir, name))
		default:
			return fmt.Errorf("%s is there and no image store: give the root an empty directory", filepath.Join(dir, name))
		}
	}
	return nil
}

// writeMarker leaves either the whole marker or none, whenever the node stops.
func writeMarker(path, handler string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), markerFile+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = f.WriteString(handler + "\n")
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// readText returns what a file like those of writeMarker says.
func readText(path string) (string, error) {
	content, err := os.ReadFile(path)
	return strings.TrimSpace(string(content)), err
}

// readOwner returns the handler that a marker file names.
func readOwner(path string) (handler string, err error) {
	content, err := readText(path)
	if err != nil {
		return "", err
	}
	handler, err = parseMarker(content)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	return handler, nil
}

// checkMarker returns ErrUnmounted unless the marker is there, has the handler's name, and is on a disk that can be
// written; where that is what is wrong, ErrReadOnly too.
func checkMarker(path, handler string) error {
	switch owner, err := readOwner(path); {
	case errors.Is(err, ErrNewer):
		return err
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s is missing: mount the disk of this root; for a new root, run `ocihold config crio --write`", ErrUnmounted, path)
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUnmounted, err)
	case owner != handler:
		return fmt.Errorf("%w: %s says that it is the root of handler %q: mount the disk of handler %q there", ErrUnmounted, path, owner, handler)
	}
	if err := checkWritable(path); err != nil {
		return fmt.Errorf("%w: %w", ErrUnmounted, err)
	}
	return nil
}

// checkWritable returns ErrReadOnly for what is on a read-only disk. It asks only the kernel.
func checkWritable(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err == nil && st.Flags&unix.ST_RDONLY != 0 {
		return fmt.Errorf("%s: %w: see the kernel's log for why, and mount it to be written again", path, ErrReadOnly)
	}
	return nil
}
