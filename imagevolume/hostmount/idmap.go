package hostmount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// IDMap describes how the user namespace that is bound at path maps user and group
// ids: the lines of its uid_map and gid_map. Namespaces that map alike have equal
// descriptions.
func (d *Dir) IDMap(path string) (string, error) {
	namespace, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("open user namespace: %w", err)
	}
	defer namespace.Close()
	// Only a process in the namespace shows what it maps, and there may be none yet.
	// The child ends with the thread that has made it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, err := stoppedIn(namespace)
	if err != nil {
		return "", fmt.Errorf("enter user namespace %s: %w", path, err)
	}
	defer func() {
		_ = unix.Kill(pid, unix.SIGKILL)
		_, _ = wait(pid)
	}()
	var maps []string
	for _, name := range []string{"uid_map", "gid_map"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			return "", fmt.Errorf("read what user namespace %s maps: %w", path, err)
		}
		for line := range strings.Lines(string(text)) {
			maps = append(maps, name[:3]+" "+strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(maps, "; "), nil
}

// stoppedIn makes a child that goes into the user namespace and stops.
func stoppedIn(namespace *os.File) (int, error) {
	// No handler of this program's may run in the child.
	var all, before unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &before); err != nil {
		return 0, err
	}
	pid, errno := forkStopped(namespace.Fd())
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil); err != nil {
		return 0, err
	}
	if errno != 0 {
		return 0, errno
	}
	status, err := wait(pid)
	switch {
	case err != nil:
		return 0, err
	case !status.Stopped():
		return 0, syscall.Errno(status.ExitStatus())
	}
	return pid, nil
}

func wait(pid int) (status unix.WaitStatus, err error) {
	for {
		if _, err = unix.Wait4(pid, &status, unix.WUNTRACED, nil); !errors.Is(err, unix.EINTR) {
			return status, err
		}
	}
}

// cloneArgs is struct clone_args of clone3(2), in its first version.
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls uint64
}

// forkStopped forks. The child is a copy of one thread of this process, in which
// nothing of Go works any more: it makes system calls, and ends with the error of
// one as its status.
//
//go:noinline
//go:norace
func forkStopped(namespace uintptr) (pid int, errno syscall.Errno) {
	args := &cloneArgs{exitSignal: uint64(unix.SIGCHLD)}
	child, _, errno := syscall.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(args)), unsafe.Sizeof(*args), 0) //nolint:gosec // as the kernel has it
	if errno != 0 || child != 0 {
		return int(child), errno
	}
	_, _, errno = syscall.RawSyscall(unix.SYS_SETNS, namespace, unix.CLONE_NEWUSER, 0)
	if errno == 0 {
		_, _, errno = syscall.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0, 0)
	}
	if errno == 0 {
		self, _, _ := syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
		_, _, errno = syscall.RawSyscall(unix.SYS_KILL, self, uintptr(unix.SIGSTOP), 0)
	}
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0)
	}
}

// mapLayers replaces directories by clones of theirs whose owners are those that
// the user namespace, bound at path, has for them. They can be lower directories
// until done is called; an overlay that was made of them keeps them.
//
// Clones that are attached nowhere are taken only by Linux 6.15 and later. So they
// are, meanwhile, on a mount of their own that Keys does not have.
func (d *Dir) mapLayers(key string, layers []int, path string) (done func() error, err error) {
	namespace, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open user namespace: %w", err)
	}
	defer namespace.Close()
	stage := filepath.Join(d.path, stagePrefix+key)
	if err := os.Mkdir(stage, 0o700); err != nil {
		return nil, fmt.Errorf("make mount point: %w", err)
	}
	done = func() error { return unstage(stage) }
	if err := unix.Mount(dirSource, stage, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=1m"); err != nil {
		return nil, errors.Join(fmt.Errorf("mount tmpfs at %s: %w", stage, err), done())
	}
	for i, layer := range layers {
		mapped, err := mapLayer(layer, namespace, filepath.Join(stage, fmt.Sprint(i)))
		if err != nil {
			return nil, errors.Join(err, done())
		}
		unix.Close(layer)
		layers[i] = mapped
	}
	return done, nil
}

func mapLayer(layer int, namespace *os.File, at string) (int, error) {
	fd, err := unix.OpenTree(layer, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return -1, fmt.Errorf("clone layer: %w", err)
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_IDMAP, Propagation: unix.MS_PRIVATE, Userns_fd: uint64(namespace.Fd()),
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("%w: the pod has a user namespace, for which Linux 5.19 or later is needed, and a file system of the image's root "+
			"that can have its ids mapped (%w)", ErrNoIDMap, err)
	}
	if err == nil {
		err = os.Mkdir(at, 0o700)
	}
	if err == nil {
		err = unix.MoveMount(fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("map the ids of a layer: %w", err)
	}
	return fd, nil
}

// stagePrefix begins the names of mount points that are no key's.
const stagePrefix = "."

// unstage detaches a stage with all that is on it.
func unstage(stage string) error {
	if err := unix.Unmount(stage, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s: %w", stage, err)
	}
	if err := os.Remove(stage); err != nil {
		return fmt.Errorf("remove mount point: %w", err)
	}
	return nil
}
