package hostmount

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// use is what processes have mounted: keys of ours, and the topmost lower
// directories of other overlays.
type use struct{ keys, lowers map[string]bool }

// view tells apart what two processes can see: one mount namespace shows other
// mounts to a process whose root directory is another.
type view struct {
	namespace string
	dev, ino  uint64
}

func (d *Dir) inUse(ctx context.Context, proc string) (keys, lowers map[string]bool, err error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, nil, fmt.Errorf("list processes: %w", err)
	}
	u := use{map[string]bool{}, map[string]bool{}}
	seen := map[view]bool{}
	for _, entry := range entries {
		if _, err := strconv.Atoi(entry.Name()); err != nil {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		if err := d.inUseBy(filepath.Join(proc, entry.Name()), seen, u); err != nil && !ended(err) {
			return nil, nil, fmt.Errorf("read mounts of process %s: %w", entry.Name(), err)
		}
	}
	return u.keys, u.lowers, nil
}

// ended reports whether err says that the process is gone, or is a zombie,
// which has no mounts any more.
func ended(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL)
}

func (d *Dir) inUseBy(process string, seen map[view]bool, u use) error {
	v, known := viewOf(process)
	if known && seen[v] {
		return nil
	}
	data, err := os.ReadFile(filepath.Join(process, "mountinfo"))
	if err != nil {
		return err
	}
	if known {
		seen[v] = true
	}
	return d.used(data, u)
}

// viewOf is false for a process that this one may not inspect so far; its
// mountinfo can be read all the same.
func viewOf(process string) (view, bool) {
	namespace, err := os.Readlink(filepath.Join(process, "ns", "mnt"))
	if err != nil {
		return view{}, false
	}
	var root unix.Stat_t
	if err := unix.Stat(filepath.Join(process, "root"), &root); err != nil {
		return view{}, false
	}
	return view{namespace: namespace, dev: root.Dev, ino: root.Ino}, true
}

// used adds the keys that a mountinfo text shows outside of our own directory,
// and the lower directories of the overlays of others. A copy of the host's
// mount tree, as every new mount namespace begins with, shows the directory too:
// there the overlay's parent is our tmpfs, and that is no use.
func (d *Dir) used(data []byte, u use) error {
	type mount struct {
		parent int
		key    string
	}
	var mounts []mount
	ours := map[int]bool{}
	lines, err := mountinfo.GetMountsFromReader(bytes.NewReader(data), nil)
	if err != nil {
		return fmt.Errorf("parse mountinfo: %w", err)
	}
	for _, line := range lines {
		switch line.FSType {
		case "tmpfs":
			ours[line.ID] = line.Source == dirSource
		case "overlay":
			if key := d.Key(line.Source); key != "" {
				mounts = append(mounts, mount{line.Parent, key})
			} else if lower := topLower(line.VFSOptions); lower != "" {
				u.lowers[lower] = true
			}
		}
	}
	for _, m := range mounts {
		if !ours[m.parent] {
			u.keys[m.key] = true
		}
	}
	return nil
}

// unescape undoes what the kernel does to a name in the options of mountinfo. A
// comma or a colon in a name stays as it is written: no path of a container
// runtime's storage, given to an overlay as an option, can have them.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// topLower returns the topmost of an overlay's lower directories, which are one
// option or, as newer programs mount, one each.
func topLower(options string) string {
	for option := range strings.SplitSeq(options, ",") {
		name, value, _ := strings.Cut(option, "=")
		if name == "lowerdir" || name == "lowerdir+" {
			lower, _, _ := strings.Cut(value, ":")
			return unescape.Replace(lower)
		}
	}
	return ""
}
