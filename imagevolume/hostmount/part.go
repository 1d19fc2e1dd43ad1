package hostmount

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// PartError is what is wrong with one part of several.
type PartError struct {
	Part
	Err error
}

func (e *PartError) Error() string {
	return fmt.Sprintf("find %q in mount %s: %v", e.Path, e.Key, e.Err)
}

// Unwrap returns what is wrong.
func (e *PartError) Unwrap() error { return e.Err }

// openPart opens what a mount has at a path, to be referred to and not to be
// read.
func (d *Dir) openPart(part Part, flags int) (int, error) {
	root, err := unix.Open(d.Path(part.Key), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open mount %s: %w", part.Key, err)
	}
	defer unix.Close(root)
	if !d.Mounted(part.Key) {
		return -1, fmt.Errorf("open mount %s: it is not mounted", part.Key)
	}
	path := part.Path
	if path == "" {
		path = "."
	}
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags:   uint64(unix.O_PATH | unix.O_CLOEXEC | flags), //nolint:gosec // flags are not negative
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return -1, &PartError{part, err}
	}
	return fd, nil
}

// attachPart binds a directory or a file at target, which it makes. The bind has
// the flags of the mount that it is of.
func (d *Dir) attachPart(target string, part Part) error {
	fd, err := d.openPart(part, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return fmt.Errorf("look at %q: %w", part.Path, err)
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		err = os.Mkdir(target, 0o755)
	case unix.S_IFREG:
		err = os.WriteFile(target, nil, 0o644)
	default:
		return &PartError{part, errors.New("neither a directory nor a file")}
	}
	if err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount(fdPath(fd), target, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("bind %q: %w", part.Path, err), os.Remove(target))
	}
	return nil
}
