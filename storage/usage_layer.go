package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"
)

// layerUse is what a layer takes of the disk; with err, as much of it as could be read.
type layerUse struct {
	treeUse
	err error
}

// all is what the layer takes, with the files that have names elsewhere.
func (u layerUse) all() uint64 {
	bytes := u.bytes
	for _, l := range u.linked {
		bytes += l.bytes
	}
	return bytes
}

// meter measures layers, one after the other and each once: layers do not change.
type meter struct {
	mu     sync.Mutex
	layers map[string]layerUse
	// running is closed when the measuring under way ends, and nil where there is none. cancel ends it early.
	running chan struct{}
	cancel  context.CancelFunc
	closed  bool
}

// close ends the measuring under way and waits for that.
func (m *meter) close() {
	m.mu.Lock()
	m.closed = true
	running := m.running
	if running != nil {
		m.cancel()
	}
	m.mu.Unlock()
	if running != nil {
		<-running
	}
}

// measured returns what the layers take by id. It measures those that are not known, and returns without them when ctx
// ends; the measuring goes on.
func (r *Root) measured(ctx context.Context, layers []cstorage.Layer) map[string]layerUse {
	ids := make([]string, len(layers))
	for i := range layers {
		ids[i] = layers[i].ID
	}
	for {
		running, ours := r.measure(ctx, ids)
		if running == nil {
			break
		}
		select {
		case <-running:
		case <-ctx.Done():
		}
		if ours || ctx.Err() != nil {
			break
		}
	}
	r.meter.mu.Lock()
	defer r.meter.mu.Unlock()
	found := make(map[string]layerUse, len(ids))
	for _, id := range ids {
		if use, ok := r.meter.layers[id]; ok {
			found[id] = use
		}
	}
	r.meter.layers = maps.Clone(found) // the others are gone
	return found
}

// measure begins to measure those of the layers that are not known, or not as a whole, unless it is at work already:
// then it returns that and not ours. It returns nil where there is nothing to do.
func (r *Root) measure(ctx context.Context, ids []string) (running <-chan struct{}, ours bool) {
	m := &r.meter
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || m.running != nil {
		return m.running, false
	}
	var unknown []string
	for _, id := range ids {
		if use, ok := m.layers[id]; !ok || use.err != nil {
			unknown = append(unknown, id)
		}
	}
	if len(unknown) == 0 {
		return nil, true
	}
	ctx, m.cancel = context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	m.running = done
	go func() {
		defer close(done)
		r.measureAll(ctx, unknown)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.cancel()
		m.running = nil
	}()
	return done, true
}

// measurePulled begins to measure the layers of a new image.
func (r *Root) measurePulled(ctx context.Context, record *cstorage.Image) {
	var ids []string
	for id := record.TopLayer; id != ""; {
		layer, err := r.store.Layer(id)
		if err != nil {
			break // gone already
		}
		ids = append(ids, id)
		id = layer.Parent
	}
	r.measure(ctx, ids)
}

// measureAll measures the layers. Where one has files that have names elsewhere, too, those may be names in layers that
// were measured when they were the only ones: then all layers of the root are measured anew.
func (r *Root) measureAll(ctx context.Context, ids []string) {
	walked := make(map[string]bool)
	linked := false
	measure := func(id string, anew bool) {
		use, ok := r.measureLayer(ctx, id, anew)
		if !ok {
			return
		}
		walked[id] = true
		linked = linked || len(use.linked) > 0
		r.meter.mu.Lock()
		defer r.meter.mu.Unlock()
		if r.meter.layers == nil {
			r.meter.layers = make(map[string]layerUse)
		}
		r.meter.layers[id] = use
	}
	for _, id := range ids {
		measure(id, false)
	}
	if !linked || r.usable(ctx) != nil {
		return
	}
	layers, err := r.imageLayers()
	if err != nil {
		return // whoever asks next finds that, too
	}
	for i := range layers {
		if !walked[layers[i].ID] {
			measure(layers[i].ID, true)
		}
	}
}

// measureLayer measures one layer, or reads what was kept with it. It is not ok where ctx ended or the layer is gone.
func (r *Root) measureLayer(ctx context.Context, id string, anew bool) (use layerUse, ok bool) {
	dir, err := r.openLayer(id)
	if errors.Is(err, fs.ErrNotExist) {
		if r.usable(ctx) != nil || !r.store.Exists(id) {
			return layerUse{}, false
		}
		return layerUse{err: fmt.Errorf("%w: it has no files", ErrBadRecord)}, true
	}
	if err != nil {
		return layerUse{err: err}, ctx.Err() == nil
	}
	defer dir.Close()
	info, err := dir.Stat()
	if err != nil {
		return layerUse{err: err}, true
	}
	if kept, ok := keptUse(dir, info); ok && !anew {
		return layerUse{treeUse: kept}, true
	}
	use.err = use.addLayer(ctx, dir.Name())
	now, err := os.Lstat(dir.Name())
	if ctx.Err() != nil || err != nil || !os.SameFile(info, now) {
		return layerUse{}, false
	}
	if use.err == nil && len(use.linked) == 0 {
		keepUse(dir, info, use.treeUse)
	} else {
		forgetUse(dir)
	}
	return use, true
}

// openLayer opens the driver's directory of a layer.
func (r *Root) openLayer(id string) (dir *os.File, err error) {
	for _, home := range r.homes() {
		dir, err = os.OpenFile(filepath.Join(home, id), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return dir, err
}

// useAttribute keeps what a layer takes on the driver's directory of it, which containers do not see, and goes with it.
// It says "INODE BYTES INODES"; INODE is the directory's own, so that a copy of it is measured anew.
const useAttribute = "trusted.ocihold.usage"

const useFormat = "%d %d %d"

func keptUse(dir *os.File, info fs.FileInfo) (use treeUse, ok bool) {
	var text [64]byte
	n, err := unix.Fgetxattr(int(dir.Fd()), useAttribute, text[:])
	if err != nil {
		return treeUse{}, false
	}
	var inode uint64
	_, err = fmt.Sscanf(string(text[:n]), useFormat, &inode, &use.bytes, &use.inodes)
	return use, err == nil && inode == inodeOf(info)
}

// keepUse keeps what a layer takes. Where the file system has no such attributes, it is measured once in each process.
func keepUse(dir *os.File, info fs.FileInfo, use treeUse) {
	text := fmt.Sprintf(useFormat, inodeOf(info), use.bytes, use.inodes)
	_ = unix.Fsetxattr(int(dir.Fd()), useAttribute, []byte(text), 0)
}

func forgetUse(dir *os.File) { _ = unix.Fremovexattr(int(dir.Fd()), useAttribute) }

func inodeOf(info fs.FileInfo) uint64 {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0
	}
	return stat.Ino
}

// treeUse is what files take of the disk.
type treeUse struct {
	bytes, inodes uint64
	// linked are the files that have more names than were found, by inode. They are not among the others.
	linked map[uint64]link
}

type link struct{ bytes, found, names uint64 }

// addLayer adds all that belongs to the layer whose directory this is.
func (u *treeUse) addLayer(ctx context.Context, dir string) error {
	home, id := filepath.Split(dir)
	records := filepath.Join(home, "..", "overlay-layers", id)
	errs := []error{u.addTree(ctx, dir), u.addTree(ctx, records), u.addFile(records + ".tar-split.gz")}
	switch name, err := os.ReadFile(filepath.Join(dir, "link")); {
	case err == nil:
		errs = append(errs, u.addFile(filepath.Join(home, "l", strings.TrimSpace(string(name)))))
	case !errors.Is(err, fs.ErrNotExist):
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// addTree adds dir and what is below it. What vanishes meanwhile does not count, nor does a dir that is not there. It
// returns the first error, having passed over what could not be read.
func (u *treeUse) addTree(ctx context.Context, dir string) error {
	var unread error
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil {
			err = u.addFile(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && unread == nil {
			unread = err
		}
		return nil
	})
	if err == nil {
		err = unread
	}
	return err
}

// addFile adds the file itself, if it is there.
func (u *treeUse) addFile(path string) error {
	var stat unix.Stat_t
	switch err := unix.Lstat(path, &stat); {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	bytes := uint64(stat.Blocks) * 512 //nolint:gosec // never negative
	if stat.Mode&unix.S_IFMT != unix.S_IFDIR && stat.Nlink > 1 {
		l := link{bytes, u.linked[stat.Ino].found + 1, uint64(stat.Nlink)} //nolint:unconvert // not everywhere
		if l.found < l.names {
			if u.linked == nil {
				u.linked = make(map[uint64]link)
			}
			u.linked[stat.Ino] = l
			return nil
		}
		delete(u.linked, stat.Ino)
	}
	u.bytes += bytes
	u.inodes++
	return nil
}
