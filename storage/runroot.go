package storage

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
)

// runRootFile is in every handler root and has the path of the run root that it was last opened with.
const runRootFile = ownPrefix + "runroot"

// checkRunRoot returns ErrRunRoot where the root is in use with another run root than opt has. Where that is gone, as
// after a boot, nothing uses it any more. others are the handler roots that are open.
func (r *Roots) checkRunRoot(opt Options, others []*Root) error {
	last, err := readText(filepath.Join(opt.GraphRoot, runRootFile))
	if errors.Is(err, fs.ErrNotExist) || err == nil && filepath.Clean(last) == filepath.Clean(opt.RunRoot) {
		return nil
	}
	if err != nil {
		return err
	}
	if there, err := present(last); !there {
		return err
	}
	use, err := r.users(opt.GraphRoot, others)
	if err != nil {
		return err
	}
	mounts, err := readRecords[mountRecord](filepath.Join(last, "overlay-layers", "mountpoints.json"))
	if err != nil {
		return err
	}
	users := use.containers
	for _, m := range mounts {
		if m.Path != "" {
			users = append(users, "a mount at "+m.Path)
		}
	}
	if len(users) == 0 {
		return nil
	}
	slices.Sort(users)
	return fmt.Errorf("%w, not with %s: set runroot = %q for handler %q again, or end these first: %s",
		ErrRunRoot, opt.RunRoot, last, opt.Name, strings.Join(users, ", "))
}

// mountRecord is a mount as containers/storage keeps it in its JSON file.
type mountRecord struct {
	Path string `json:"path"`
}

// recordRunRoot keeps in the root with which run root it is open.
func recordRunRoot(opt Options) error {
	path := filepath.Join(opt.GraphRoot, runRootFile)
	if last, err := readText(path); err == nil && last == filepath.Clean(opt.RunRoot) {
		return nil
	}
	return writeMarker(path, filepath.Clean(opt.RunRoot))
}
