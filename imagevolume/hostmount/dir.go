package hostmount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume/scratch"
)

const (
	// dirSource is the source of the tmpfs that holds the overlays. Another
	// form of what is there would have another that begins with it.
	dirSource = "ocihold"
	// emptyDir, beside the directory, holds the empty layers that fill an
	// overlay up to the two that the kernel asks for. Layers cannot be on an
	// unbindable mount.
	emptyDir = "empty"
)

// MaxKey is the greatest length of a key, in bytes. With the path of the
// directory it is an overlay's source, of which the kernel takes 255 bytes.
const MaxKey = 192

var validKey = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._+~-]*$`)

func valid(key string) bool { return len(key) <= MaxKey && validKey.MatchString(key) }

// Dir is a directory of shared host mounts.
type Dir struct {
	path string
	api  API
	room *scratch.Dir // nil until OpenScratch
	// selinux says that the kernel has it, so that overlays get labels.
	selinux bool
}

// Open makes path an unbindable tmpfs, unless it is one already, and keeps
// what is mounted there. A directory "empty" beside path is made, too.
func Open(path string, api API) (*Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make mount directory: %w", err)
	}
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, fmt.Errorf("resolve mount directory: %w", err)
	}
	d := &Dir{path: filepath.Clean(path), api: api, selinux: selinux.GetEnabled()}
	here, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.Mountpoint != resolved || m.FSType != "tmpfs" || !strings.HasPrefix(m.Source, dirSource), false
	})
	if err != nil {
		return nil, fmt.Errorf("read mountinfo: %w", err)
	}
	if i := slices.IndexFunc(here, func(m *mountinfo.Info) bool { return m.Source != dirSource }); i >= 0 {
		return nil, fmt.Errorf("%w: %s has what is called %s", ErrNewer, path, here[i].Source)
	}
	if len(here) == 0 {
		const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
		if err := unix.Mount(dirSource, path, "tmpfs", flags, "mode=0700,size=1m"); err != nil {
			return nil, fmt.Errorf("mount tmpfs at %s: %w", path, err)
		}
	}
	if err := unix.Mount("", path, "", unix.MS_UNBINDABLE, ""); err != nil {
		return nil, fmt.Errorf("make %s unbindable: %w", path, err)
	}
	if err := d.clearStages(); err != nil {
		return nil, err
	}
	for _, empty := range d.empties() {
		if err := os.MkdirAll(empty, 0o755); err != nil {
			return nil, fmt.Errorf("make empty layer: %w", err)
		}
	}
	return d, nil
}

// clearStages removes what a crash left of mounts that are no key's.
func (d *Dir) clearStages() error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return fmt.Errorf("list mounts: %w", err)
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), stagePrefix) {
			err = errors.Join(err, unstage(d.Path(entry.Name())))
		}
	}
	return err
}

func (d *Dir) empties() []string {
	dir := filepath.Join(filepath.Dir(d.path), emptyDir)
	return []string{filepath.Join(dir, "0"), filepath.Join(dir, "1")}
}

// Path returns where the mount of key is, or would be.
func (d *Dir) Path(key string) string { return filepath.Join(d.path, key) }

// Key returns the key whose mount is at path, or "" when path is none of ours.
func (d *Dir) Key(path string) string { return keyIn(d.path, path) }

// Spec says what is mounted for a key: Layers, or Parts.
type Spec struct {
	// Layers are directories of the host, topmost first, none of which may be a
	// symbolic link. They become a read-only overlay.
	Layers []string
	// UserNS is where a user namespace is bound: in it the files of Layers have the
	// owners that they have on the host. "" leaves them to the host's.
	UserNS string
	// Parts are of other mounts of the Dir, topmost first. Several become a
	// read-only overlay; one is attached as it is, directory or file.
	Parts []Part
}

// Part is what another mount has at a path.
type Part struct {
	// Key is that of the mount, which has to be attached.
	Key string
	// Path is relative. Symbolic links in it are followed as if the mount were
	// the root of all: they do not lead out of it. An empty one is all of the mount.
	Path string
}

// Ensure mounts what spec says for key, unless it is mounted. On an error nothing
// is left mounted for key. The spec of one key is always the same.
func (d *Dir) Ensure(key string, spec Spec) error {
	if there, err := d.begin(key); err != nil || there {
		return err
	}
	if len(spec.Parts) == 1 {
		return d.attachPart(d.Path(key), spec.Parts[0])
	}
	return d.overlay(key, spec, nil)
}

// begin reports whether key is mounted; if not, nothing is left at its mount
// point.
func (d *Dir) begin(key string) (there bool, err error) {
	if !valid(key) {
		return false, fmt.Errorf("mount key %q is not valid", key)
	}
	if d.Mounted(key) {
		return true, nil
	}
	if err := os.Remove(d.Path(key)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("remove what is left of a mount point: %w", err)
	}
	return false, nil
}

// overlay attaches an overlay for key: read-only, or over room.
func (d *Dir) overlay(key string, spec Spec, room *scratch.Space) (err error) {
	lowers, err := d.openLowers(spec)
	if err != nil {
		return err
	}
	defer closeAll(lowers)
	if spec.UserNS != "" {
		done, err := d.mapLayers(key, lowers[:len(spec.Layers)], spec.UserNS)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, done()) }()
	}
	var upper []int
	if room != nil {
		if upper, err = openUpper(room, lowers[0]); err != nil {
			return err
		}
		defer closeAll(upper)
	}
	target := d.Path(key)
	if err := os.Mkdir(target, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := mountOverlay(d.api, target, lowers, overlayOptions(upper, d.selinux), upper == nil); err != nil {
		if spec.Parts != nil && errors.Is(err, unix.ELOOP) {
			err = ErrOverlap
		}
		return errors.Join(err, os.Remove(target))
	}
	return nil
}

// openLowers opens the directories of an overlay: at least two, as the kernel
// asks for.
func (d *Dir) openLowers(spec Spec) ([]int, error) {
	var fds []int
	for _, part := range spec.Parts {
		fd, err := d.openPart(part, unix.O_DIRECTORY)
		if err != nil {
			closeAll(fds)
			return nil, err
		}
		fds = append(fds, fd)
	}
	layers := spec.Layers
	if missing := 2 - len(fds) - len(layers); missing > 0 {
		layers = append(slices.Clone(layers), d.empties()[:missing]...)
	}
	for _, layer := range layers {
		fd, err := openLayer(layer)
		if err != nil {
			closeAll(fds)
			return nil, err
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// Mounted reports whether the mount of key is attached. It is one system
// call.
func (d *Dir) Mounted(key string) bool {
	var st unix.Statfs_t
	return unix.Statfs(d.Path(key), &st) == nil && st.Type == unix.OVERLAYFS_SUPER_MAGIC
}

// Release detaches the mount of key and removes its mount point. It is
// idempotent. Containers that have the volume keep it.
func (d *Dir) Release(key string) error {
	target := d.Path(key)
	for {
		err := unix.Unmount(target, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break // not, or no longer, a mount point
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove mount point: %w", err)
	}
	return nil
}

// Keys returns the keys that have a mount point here, mounted or left over.
func (d *Dir) Keys() ([]string, error) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	var keys []string
	for _, entry := range entries {
		if valid(entry.Name()) {
			keys = append(keys, entry.Name())
		}
	}
	return keys, nil
}

// Close detaches the directory when nothing is mounted in it; else it leaves
// all as it is for the next Open.
func (d *Dir) Close() error {
	keys, err := d.Keys()
	if err != nil || len(keys) > 0 {
		return err
	}
	if err := unix.Unmount(d.path, unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", d.path, err)
	}
	return nil
}

// InUse returns the keys that some process on the node has mounted elsewhere
// than in the directory itself: in a container, or bound by hand. lowers are the
// topmost lower directories, as they were named at the mount, of the overlays of
// others. It reads the
// mountinfo of every mount namespace and takes time in proportion to the
// node's processes. On an error the answer is incomplete, and nobody may
// conclude from it that a key is unused.
func (d *Dir) InUse(ctx context.Context) (keys, lowers map[string]bool, err error) {
	return d.inUse(ctx, "/proc")
}
