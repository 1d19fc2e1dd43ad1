package scratch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// prefix begins the names of mount points.
const prefix = ".scratch-"

// Dir is where Spaces are made.
type Dir struct{ files, mounts string }

// Open returns a Dir whose files are on the disk of the directory files, which
// is made. Its Spaces are mounted in the directory mounts, under names that begin
// with ".scratch-", until they are closed; what a killed process left of these
// goes.
func Open(files, mounts string) (*Dir, error) {
	if err := os.MkdirAll(files, 0o700); err != nil {
		return nil, fmt.Errorf("make directory for scratch: %w", err)
	}
	left, err := os.ReadDir(mounts)
	if err != nil {
		return nil, fmt.Errorf("list what was left of scratch: %w", err)
	}
	for _, entry := range left {
		if strings.HasPrefix(entry.Name(), prefix) {
			if err := detach(filepath.Join(mounts, entry.Name())); err != nil {
				return nil, err
			}
		}
	}
	return &Dir{files: files, mounts: mounts}, nil
}

// Supported returns ErrUnsupported, with the fix, when this node cannot make Spaces.
func Supported() error {
	if _, err := exec.LookPath(mkfs); err != nil {
		return errNoMkfs
	}
	control, err := openControl()
	if err != nil {
		return err
	}
	return control.Close()
}

// detach unmounts what is at the mount point, if anything, and removes it.
func detach(point string) error {
	err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount scratch at %s: %w", point, err)
	}
	if err := os.Remove(point); err != nil {
		return fmt.Errorf("remove mount point of scratch: %w", err)
	}
	return nil
}
