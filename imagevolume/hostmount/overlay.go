package hostmount

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// API selects the system calls that build an overlay.
type API string

const (
	// Auto is Fsconfig where the kernel has it, else Mount.
	Auto API = "auto"
	// Fsconfig is the new mount API with one lowerdir+ for each layer
	// (Linux 6.8), which takes any number of layers the kernel does: 500.
	Fsconfig API = "fsconfig"
	// Mount is mount(2), whose options are cut at a page: some 240 layers.
	Mount API = "mount"
)

const (
	maxLowers    = 500  // OVL_MAX_STACK
	maxMountData = 4095 // mount(2) silently cuts what is longer
	mountFlags   = unix.MS_NOSUID | unix.MS_NODEV
	mountAttrs   = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
)

// SELinux labels of all files of an overlay, by which containers of every pod may
// read them, and write what is not read-only: pods share overlays, and their own
// labels differ.
const (
	labelReadOnly = "system_u:object_r:container_ro_file_t:s0"
	labelWritable = "system_u:object_r:container_file_t:s0"
)

// overlayOptions are those of an overlay. It is read-only, or upper are its
// directories for what is written and for the kernel's work on it. It is not
// volatile, though it does not outlive the node: only who syncs learns that the
// disk below is full.
func overlayOptions(upper []int, selinux bool) [][2]string {
	// An image's layers come from strangers: what their extended attributes say of
	// redirects and metadata-only copies is not followed.
	options := [][2]string{{"redirect_dir", "nofollow"}, {"metacopy", "off"}, {"index", "off"}}
	label := labelReadOnly
	if upper != nil {
		options = append(options, [2]string{"upperdir", fdPath(upper[0])}, [2]string{"workdir", fdPath(upper[1])})
		label = labelWritable
	}
	if selinux {
		options = append(options, [2]string{"context", label})
	}
	return options
}

// mountOverlay attaches an overlay of lowers, topmost first, at target, which is
// its source, too.
func mountOverlay(api API, target string, lowers []int, options [][2]string, readOnly bool) error {
	if len(lowers) > maxLowers {
		return fmt.Errorf("%w: %d layers, the kernel takes %d", ErrTooManyLayers, len(lowers), maxLowers)
	}
	switch api {
	case Mount:
		return mountOld(target, lowers, options, readOnly)
	case Fsconfig:
		return mountNew(target, lowers, options, readOnly)
	case Auto:
		err := mountNew(target, lowers, options, readOnly)
		if errors.Is(err, errUnsupported) {
			return mountOld(target, lowers, options, readOnly)
		}
		return err
	default:
		return fmt.Errorf("unknown mount API %q: use auto, fsconfig or mount", api)
	}
}

// openLayer opens a directory without following a link at its end, so that what
// is mounted is what was looked up.
func openLayer(dir string) (int, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open layer directory %s: %w", dir, err)
	}
	return fd, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

func mountNew(target string, lowers []int, options [][2]string, readOnly bool) error {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		if errors.Is(err, unix.ENOSYS) {
			return fmt.Errorf("open overlay context: %w (%w)", errUnsupported, err)
		}
		return fmt.Errorf("open overlay context: %w", err)
	}
	defer unix.Close(fs)

	if err := unix.FsconfigSetString(fs, "source", target); err != nil {
		return fmt.Errorf("set overlay source: %w%s", err, contextLog(fs))
	}
	attrs := mountAttrs
	if readOnly {
		attrs |= unix.MOUNT_ATTR_RDONLY
	}
	for _, option := range options {
		if err := unix.FsconfigSetString(fs, option[0], option[1]); err != nil {
			return fmt.Errorf("set overlay option %s: %w%s", option[0], err, contextLog(fs))
		}
	}
	for i, fd := range lowers {
		if err := addLower(fs, fd); err != nil {
			if i == 0 && errors.Is(err, unix.EINVAL) {
				return fmt.Errorf("add overlay layer: %w (lowerdir+ is missing)", errUnsupported)
			}
			return fmt.Errorf("add overlay layer %d: %w%s", i, err, contextLog(fs))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("create overlay: %w%s", err, contextLog(fs))
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return fmt.Errorf("mount overlay: %w%s", err, contextLog(fs))
	}
	defer unix.Close(mnt)
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach overlay at %s: %w", target, err)
	}
	return nil
}

// addLower passes the layer by descriptor, or by the descriptor's path where
// the kernel's lowerdir+ takes only strings (before Linux 6.13).
func addLower(fs, fd int) error {
	err := unix.FsconfigSetFd(fs, "lowerdir+", fd)
	if errors.Is(err, unix.EINVAL) {
		return unix.FsconfigSetString(fs, "lowerdir+", fdPath(fd))
	}
	return err
}

// contextLog drains what the kernel wrote about a failed mount.
func contextLog(fs int) string {
	var out strings.Builder
	buf := make([]byte, 1024)
	for {
		n, err := unix.Read(fs, buf)
		if err != nil || n == 0 {
			return out.String()
		}
		out.WriteString("; kernel: " + strings.TrimSpace(string(buf[:n])))
	}
}

func mountOld(target string, lowers []int, options [][2]string, readOnly bool) error {
	paths := make([]string, len(lowers))
	for i, fd := range lowers {
		paths[i] = fdPath(fd)
	}
	all := []string{"lowerdir=" + strings.Join(paths, ":")}
	for _, option := range options {
		all = append(all, option[0]+"="+option[1])
	}
	var flags uintptr = mountFlags
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	data := strings.Join(all, ",")
	if len(data) > maxMountData {
		return fmt.Errorf("%w: %d layers do not fit into the options of mount(2); a kernel of 6.8 or newer takes %d",
			ErrTooManyLayers, len(lowers), maxLowers)
	}
	if err := unix.Mount(target, target, "overlay", flags, data); err != nil {
		return fmt.Errorf("mount overlay at %s: %w", target, err)
	}
	return nil
}
