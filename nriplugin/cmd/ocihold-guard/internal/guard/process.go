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
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// checkProcess compares the volumes with what the process pid has mounted in
// the container's root file system. With createRuntime that process has left
// the host's mount namespace and not yet changed its root. Its mounts are read, all
// those of the host's among them, only where a volume is not there.
func (b *bundle) checkProcess(pid int, volumes []volume) error {
	if pid <= 0 {
		return nil
	}
	proc := "/proc/" + strconv.Itoa(pid)
	rootfs := b.rootfs()
	fault := b.mounted(proc+"/root", rootfs, volumes)
	if fault == nil {
		return nil
	}
	under, err := mountsUnder(proc+"/mountinfo", rootfs)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH):
		return nil
	case err != nil:
		return fmt.Errorf("read the mounts of container %s of pod %s: %w", b.container(), b.pod(), err)
	case under:
		return fault
	}
	return nil
}

// mounted returns why a volume is not in the container whose root file system is
// at rootfs below root.
func (b *bundle) mounted(root, rootfs string, volumes []volume) error {
	var roots [2]int
	for i, dir := range []string{root, root + rootfs} {
		fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open the root of container %s of pod %s: %w", b.container(), b.pod(), err)
		}
		defer unix.Close(fd)
		roots[i] = fd
	}
	for _, v := range volumes {
		if err := v.mounted(roots[0], roots[1]); err != nil {
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

// file tells a file, or directory, from others.
type file struct {
	major, minor uint32
	ino          uint64
}

// fileAt finds what a path leads to, and what is mounted there. Symbolic links in
// the path are followed as if dir were the root of all.
func fileAt(dir int, p string) (found file, mount unix.Statfs_t, err error) {
	fd, err := unix.Openat2(dir, p, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return file{}, mount, err
	}
	defer unix.Close(fd)
	var stat unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO, &stat); err != nil {
		return file{}, mount, err
	}
	err = unix.Fstatfs(fd, &mount)
	return file{stat.Dev_major, stat.Dev_minor, stat.Ino}, mount, err
}

// mounted compares what the volume's path leads to in the container with what the
// daemon has mounted for it on the host, a directory or file: it has to be the very
// same, in an overlay. Both are directories that this is looked for in.
func (v volume) mounted(host, container int) error {
	there, mount, err := fileAt(container, v.MountPath)
	if err != nil {
		return fmt.Errorf("not mounted: open it in the container: %w", err)
	}
	wanted, _, err := fileAt(host, v.source)
	if err != nil {
		return fmt.Errorf("not mounted: open %s: %w", v.source, err)
	}
	if mount.Type != unix.OVERLAYFS_SUPER_MAGIC || there != wanted {
		return fmt.Errorf("not mounted: something else is there, not %q: %s", v.source, restart)
	}
	for _, option := range required(v.Volume) {
		if !has(mount, option) {
			return fmt.Errorf("mounted without %s: it needs a runtime that keeps the options of bind mounts", option)
		}
	}
	return nil
}

// has reports whether the mount has an option of those that required lists. The
// flags of statfs(2) have the values of those of mount(2).
func has(mount unix.Statfs_t, option string) bool {
	switch option {
	case "ro":
		return mount.Flags&unix.MS_RDONLY != 0
	case "rw":
		return mount.Flags&unix.MS_RDONLY == 0
	case "nosuid":
		return mount.Flags&unix.MS_NOSUID != 0
	case "nodev":
		return mount.Flags&unix.MS_NODEV != 0
	default:
		return mount.Flags&unix.MS_NOEXEC != 0
	}
}

// maxLine is far above any line of mountinfo, in bytes; that of an overlay names
// all of its layers.
const maxLine = 1 << 20

// mountsUnder reports whether the process has mounts below rootfs.
func mountsUnder(file, rootfs string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer f.Close()
	return anyUnder(f, rootfs)
}

// anyUnder reports whether lines of mountinfo (proc_pid_mountinfo(5)) have a mount
// below rootfs. Lines of others are passed over unparsed. What is not needed of a
// line, its last field, can be longer than the library takes.
func anyUnder(r io.Reader, rootfs string) (bool, error) {
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
		return false, err
	}
	lines, err := mountinfo.GetMountsFromReader(&ours, func(m *mountinfo.Info) (skip, stop bool) {
		return m.Mountpoint == rootfs || !covers(rootfs, m.Mountpoint), false
	})
	return len(lines) > 0, err
}

// octal is how mountinfo has what would break its fields.
var octal = strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`)
