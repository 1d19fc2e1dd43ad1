package guard

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
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
	rootfs := b.rootfs()
	table, err := readMountinfo(proc+"/mountinfo", rootfs)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH):
		return nil
	case err != nil:
		return fmt.Errorf("read the mounts of container %s of pod %s: %w", b.container(), b.pod(), err)
	}
	if !table.under(rootfs) {
		return nil
	}
	var roots [2]int
	for i, dir := range []string{"/root", "/root" + rootfs} {
		fd, err := unix.Open(proc+dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open the root of container %s of pod %s: %w", b.container(), b.pod(), err)
		}
		defer unix.Close(fd)
		roots[i] = fd
	}
	for _, v := range volumes {
		if err := table.check(roots[0], roots[1], v); err != nil {
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

// place is what a path leads to.
type place struct {
	mount      uint64 // its id
	dev1, dev2 uint32 // with ino, tell files apart
	ino        uint64
}

// placeAt finds what a path leads to. Symbolic links in it are followed as if dir
// were the root of all.
func placeAt(dir int, p string) (place, error) {
	fd, err := unix.Openat2(dir, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return place{}, err
	}
	defer unix.Close(fd)
	var stat unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_MNT_ID, &stat); err != nil {
		return place{}, err
	}
	if stat.Mask&unix.STATX_MNT_ID == 0 {
		return place{}, errors.New("its mount cannot be told: Linux 5.8 or later is needed")
	}
	return place{stat.Mnt_id, stat.Dev_major, stat.Dev_minor, stat.Ino}, nil
}

// mount is a line of mountinfo (proc_pid_mountinfo(5)).
type mount struct {
	point, fstype, source string
	options               []string
}

// mounts are the mounts of a process by id.
type mounts map[uint64]mount

func readMountinfo(file, rootfs string) (mounts, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMountinfo(f, rootfs)
}

// maxLine is far above any line of mountinfo, in bytes; that of an overlay names
// all of its layers.
const maxLine = 1 << 20

// parseMountinfo reads the mounts at and below rootfs. The process has those of
// the whole host as well, thousands maybe: they are passed over unparsed. What
// is not needed of a line, its last field, can be longer than the library takes.
func parseMountinfo(r io.Reader, rootfs string) (mounts, error) {
	var ours bytes.Buffer
	at := []byte(" " + octal.Replace(rootfs))
	scanner := bufio.NewScanner(r)
	for scanner.Buffer(nil, maxLine); scanner.Scan(); {
		if line := scanner.Bytes(); bytes.Contains(line, at) {
			ours.Write(line[:bytes.LastIndexByte(line, ' ')+1])
			ours.WriteString("-\n")
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, err
	}
	lines, err := mountinfo.GetMountsFromReader(&ours, func(m *mountinfo.Info) (skip, stop bool) {
		return m.Mountpoint != rootfs && !covers(rootfs, m.Mountpoint), false
	})
	if err != nil {
		return nil, err
	}
	table := mounts{}
	for _, line := range lines {
		table[uint64(line.ID)] = mount{ //nolint:gosec // the kernel's ids are not negative
			point:   line.Mountpoint,
			options: strings.Split(line.Options, ","),
			fstype:  line.FSType,
			source:  line.Source,
		}
	}
	return table, nil
}

// octal is how mountinfo has what would break its fields.
var octal = strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`)

// under reports whether anything is mounted below dir.
func (m mounts) under(dir string) bool {
	for _, mount := range m {
		if mount.point != dir && covers(dir, mount.point) {
			return true
		}
	}
	return false
}

// check compares what the volume's path leads to in the container with what the
// daemon has mounted for it on the host, a directory or file: it has to be the very
// same, in an overlay. Both are directories that this is looked for in.
func (m mounts) check(host, container int, v volume) error {
	there, err := placeAt(container, v.MountPath)
	if err != nil {
		return fmt.Errorf("not mounted: open it in the container: %w", err)
	}
	wanted, err := placeAt(host, v.source)
	if err != nil {
		return fmt.Errorf("not mounted: open %s: %w", v.source, err)
	}
	mount := m[there.mount]
	there.mount, wanted.mount = 0, 0
	return mount.check(v, there == wanted)
}

// check compares the mount that the volume's path leads to with what it should
// be. same says that the file there is.
func (m mount) check(v volume, same bool) error {
	if m.fstype != "overlay" || !same {
		return fmt.Errorf("not mounted: %q of type %q is there, not %q: %s", m.source, m.fstype, v.source, restart)
	}
	for _, option := range required(v.Volume) {
		if !slices.Contains(m.options, option) {
			return fmt.Errorf("mounted without %s: it needs a runtime that keeps the options of bind mounts", option)
		}
	}
	return nil
}
