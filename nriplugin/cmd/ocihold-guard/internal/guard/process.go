package guard

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// checkProcess compares the volumes with what the process pid has mounted in
// the container's root file system. With createRuntime that process has left
// the host's mount namespace and not yet changed its root.
func (b *bundle) checkProcess(pid int, volumes []volume) error {
	if pid <= 0 {
		return nil
	}
	proc := "/proc/" + strconv.Itoa(pid)
	text, err := os.ReadFile(proc + "/mountinfo")
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH):
		return nil
	case err != nil:
		return fmt.Errorf("read the mounts of container %s of pod %s: %w", b.container(), b.pod(), err)
	}
	table, err := parseMountinfo(text)
	if err != nil {
		return fmt.Errorf("read %s/mountinfo: %w", proc, err)
	}
	rootfs := b.rootfs()
	if !table.under(rootfs) {
		return nil
	}
	root, err := unix.Open(proc+"/root"+rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the root of container %s of pod %s: %w", b.container(), b.pod(), err)
	}
	defer unix.Close(root)
	for _, v := range volumes {
		id, err := mountAt(root, v.MountPath)
		if err == nil {
			err = table[id].check(v)
		}
		if err != nil {
			return b.refuse(v.Volume, err)
		}
	}
	return nil
}

// rootfs is the path of the root file system with symbolic links resolved, as
// mountinfo shows it.
func (b *bundle) rootfs() string {
	rootfs := b.Root.Path
	if !filepath.IsAbs(rootfs) {
		rootfs = filepath.Join(b.dir, rootfs)
	}
	if resolved, err := filepath.EvalSymlinks(rootfs); err == nil {
		return resolved
	}
	return filepath.Clean(rootfs)
}

// mountAt returns the id of the mount that the path leads to, with symbolic
// links followed inside the root.
func mountAt(root int, p string) (uint64, error) {
	fd, err := unix.Openat2(root, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return 0, fmt.Errorf("not mounted: open it in the container: %w", err)
	}
	defer unix.Close(fd)
	var stat unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &stat); err != nil {
		return 0, fmt.Errorf("not mounted: find its mount: %w", err)
	}
	if stat.Mask&unix.STATX_MNT_ID == 0 {
		return 0, errors.New("its mount cannot be told: Linux 5.8 or later is needed")
	}
	return stat.Mnt_id, nil
}

// mount is a line of mountinfo (proc_pid_mountinfo(5)).
type mount struct {
	root, point, fstype, source string
	options                     []string
}

// mounts are the mounts of a process by id.
type mounts map[uint64]mount

func parseMountinfo(text []byte) (mounts, error) {
	lines, err := mountinfo.GetMountsFromReader(bytes.NewReader(text), nil)
	if err != nil {
		return nil, err
	}
	table := mounts{}
	for _, line := range lines {
		table[uint64(line.ID)] = mount{ //nolint:gosec // the kernel's ids are not negative
			root:    line.Root,
			point:   line.Mountpoint,
			options: strings.Split(line.Options, ","),
			fstype:  line.FSType,
			source:  line.Source,
		}
	}
	return table, nil
}

// under reports whether anything is mounted below dir.
func (m mounts) under(dir string) bool {
	for _, mount := range m {
		if mount.point != dir && covers(dir, mount.point) {
			return true
		}
	}
	return false
}

// check compares the mount that the volume's path leads to with what it should
// be; a path without mount leads to the root file system, or to nothing known.
func (m mount) check(v volume) error {
	if m.fstype != "overlay" || m.source != v.source || m.root != "/" {
		return fmt.Errorf("not mounted: %q of type %q is there, not %q: %s", m.source, m.fstype, v.source, restart)
	}
	for _, option := range required(v.Exec) {
		if !slices.Contains(m.options, option) {
			return fmt.Errorf("mounted without %s: it needs a runtime that keeps the options of bind mounts", option)
		}
	}
	return nil
}
