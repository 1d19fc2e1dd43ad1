package imagevolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/docker/go-units"
	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// want is what a pod asks to be looked for: the text of sources, and of what else
// makes a writable volume another than those of the same sources.
type want string

func wantOf(v request.Volume) want {
	if v.Scratch != "" {
		return want(fmt.Sprintf("%q %q %q", v.Sources, v.Key, v.MountPath))
	}
	return want(fmt.Sprintf("%q", v.Sources))
}

// look is one search for the images of a want: resolve, pull if need be, lease
// each, and mount them together. It can be made again, in rounds; what the last
// good round has found is kept meanwhile. Everything in it is under Manager.mu.
type look struct {
	sources   []request.Source
	root      string // whose the images are
	namespace string // of the pod
	userNS    string // of the pod
	scratch   request.Scratch
	size      int64 // of the room for what is written

	idMap   string // how userNS maps ids; "" until it is known
	room    string // for what is written, of this round or the last; "" for none
	spent   bool   // a container has the room that was made
	running bool
	unsure  bool   // it is not known yet which images the store has
	gone    bool   // its pod is
	adopt   string // this round takes the images of this key for those that are wanted
	cancel  context.CancelFunc

	mounts     []string // the keys of the last good result, that of the volume last
	images     []Image  // of the last good result, by source
	candidates []string // the keys that this round may hold
	err        error    // of the last result
	pulling    string   // the image
	progress   Progress
}

func (l *look) ready() bool  { return !l.running && l.err == nil }
func (l *look) failed() bool { return !l.running && l.err != nil }

// key is that of the volume's mount, once there is one.
func (l *look) key() string { return l.mounts[len(l.mounts)-1] }

// refs are the images as they were asked for.
func (l *look) refs() string {
	refs := make([]string, len(l.sources))
	for i, s := range l.sources {
		refs[i] = s.Image
	}
	return strings.Join(refs, ", ")
}

// answer returns nil when the volume is mounted. Its text is coarse, so that
// repeated events fold into one.
func (l *look) answer() error {
	switch {
	case l.ready():
		return nil
	case l.failed():
		return fmt.Errorf("%w; will be tried again", l.err)
	case l.progress.Total > 0:
		tenths := 10 * l.progress.Done / l.progress.Total
		return fmt.Errorf("pulling %s: %d%% of %s; will be tried again", l.pulling, 10*tenths, units.HumanSize(float64(l.progress.Total)))
	default:
		return fmt.Errorf("pulling %s; will be tried again", l.pulling)
	}
}

func (l *look) abandon() {
	l.gone = true
	if l.cancel != nil {
		l.cancel()
	}
}

// newLook adds a look for what a volume wants.
func (m *Manager) newLook(p *pod, v request.Volume) *look {
	l := &look{
		sources: v.Sources, root: m.stores.Root(p.Handler), namespace: p.Namespace, userNS: p.UserNS, scratch: v.Scratch, size: v.ScratchSize,
	}
	if v.Scratch == request.ScratchPod {
		l.room = podRoom(p.ID, v)
	}
	p.looks[wantOf(v)] = l
	return l
}

// look begins to look for what a volume wants.
func (m *Manager) look(p *pod, v request.Volume) *look {
	l := m.newLook(p, v)
	l.unsure = true
	if v.Scratch == request.ScratchContainer {
		l.room = newRoom()
	}
	m.again(l)
	return l
}

// again begins the next round, unless one runs.
func (m *Manager) again(l *look) {
	if l.running {
		return
	}
	l.running = true
	l.pulling, l.progress = l.sources[0].Image, Progress{}
	m.queue = append(m.queue, l)
	wake(m.starts)
}

// startLooks owns the goroutines of all looks.
func (m *Manager) startLooks(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.starts:
		}
		m.mu.Lock()
		queue := m.queue
		m.queue = nil
		m.mu.Unlock()
		for _, l := range queue {
			running.Go(func() { m.run(ctx, l) })
		}
	}
}

func (m *Manager) run(ctx context.Context, l *look) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m.mu.Lock()
	if l.gone {
		m.mu.Unlock()
		return
	}
	l.cancel = cancel
	m.mu.Unlock()

	images, mounts, err := m.find(ctx, l)

	m.mu.Lock()
	defer m.mu.Unlock()
	changed := err == nil && !slices.Equal(l.mounts, mounts)
	l.running, l.unsure, l.cancel, l.candidates, l.adopt = false, false, nil, nil, ""
	l.err = err
	if err == nil {
		l.images, l.mounts = images, mounts
		l.spent = l.size > 0 && parseKey(l.key()).room == ""
	}
	if changed || l.gone || err != nil {
		wake(m.settles)
	}
	switch {
	case l.gone:
	case err != nil:
		m.log.WithError(err).WithField("image", l.refs()).Warn("image volume is not to be had")
	default:
		for i, img := range images {
			m.logOf(img).WithFields(logrus.Fields{"image": l.sources[i].Image, "digest": img.Digest}).Info("image volume is ready")
		}
	}
}

// find makes the images present, holds them, and mounts what is wanted of them.
// It returns the keys of the mounts, too.
func (m *Manager) find(ctx context.Context, l *look) ([]Image, []string, error) {
	store, err := m.stores.Store(l.root)
	if err != nil {
		return nil, nil, fmt.Errorf("pull %s: %w", l.sources[0].Image, err)
	}
	if key, err := m.roomOf(l); err != nil {
		return nil, nil, err
	} else if key != "" {
		m.mu.Lock()
		l.adopt = key
		m.mu.Unlock()
	} else if l.size > 0 {
		if err := m.stores.AllowScratch(l.size); err != nil {
			return nil, nil, err
		}
	}
	if l.userNS != "" && l.idMap == "" { // which never changes
		idMap, err := m.mounts.IDMap(l.userNS)
		if err != nil {
			return nil, nil, mountFailure{err}
		}
		m.mu.Lock()
		l.idMap = idMap
		m.mu.Unlock()
	}
	images, err := m.takeOver(ctx, l, store)
	if errors.Is(err, ErrNotPresent) {
		images, err = m.obtainAll(ctx, l, store)
	}
	if err != nil {
		return nil, nil, err
	}
	mounts, err := m.mount(ctx, l, store, images)
	return images, mounts, err
}

// takeOver holds the images that a running container has, of which only the key
// of its mount is known. It returns ErrNotPresent where they cannot be told.
func (m *Manager) takeOver(ctx context.Context, l *look, store Store) ([]Image, error) {
	m.mu.Lock()
	key, idMap := l.adopt, l.idMap
	l.adopt = ""
	m.mu.Unlock()
	if key == "" || parseKey(key).root != l.root {
		return nil, ErrNotPresent
	}
	leased, err := store.Leases(ctx)
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}
	ids := identify(key, idMap, l.sources, slices.Sorted(maps.Keys(leased)))
	if ids == nil {
		return nil, ErrNotPresent
	}
	images := make([]Image, len(ids))
	for i, s := range l.sources {
		img, err := store.Resolve(ctx, ids[i])
		if err == nil {
			err = m.permit(ctx, l, s, store, img)
		}
		if err == nil {
			err = m.lease(ctx, l, s, store, img)
		}
		if err != nil {
			return nil, err
		}
		img.Root = l.root
		images[i] = img
	}
	return images, nil
}

func (m *Manager) obtainAll(ctx context.Context, l *look, store Store) ([]Image, error) {
	m.noteCandidates(ctx, l, store)
	images := make([]Image, len(l.sources))
	for i, s := range l.sources {
		var err error
		// Between the two another program may delete it; then it is sought again, a
		// few times.
		for range 3 {
			if images[i], err = m.obtain(ctx, l, s, store); err != nil {
				return nil, err
			}
			images[i].Root = l.root
			if err = m.lease(ctx, l, s, store, images[i]); !errors.Is(err, ErrNotPresent) {
				break
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return images, nil
}

// noteCandidates has the images that the store has kept, while those that it has
// not are pulled.
func (m *Manager) noteCandidates(ctx context.Context, l *look, store Store) {
	var candidates []string
	for _, s := range l.sources {
		if img, err := store.Resolve(ctx, s.Image); err == nil {
			candidates = append(candidates, wholeKey(Image{Root: l.root, ID: img.ID}))
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l.unsure, l.candidates = false, append(l.candidates, candidates...)
}

func (m *Manager) obtain(ctx context.Context, l *look, s request.Source, store Store) (Image, error) {
	img, err := store.Resolve(ctx, s.Image)
	if err == nil && s.PullPolicy != request.Always {
		err = m.permit(ctx, l, s, store, img)
	}
	if s.PullPolicy != request.Always && !errors.Is(err, ErrNotPresent) {
		return img, err
	}
	if s.PullPolicy == request.Never {
		return Image{}, fmt.Errorf("%w: image %s is not present on the node and pullPolicy is Never; "+
			"pull it to the node or choose IfNotPresent", ErrPullPolicyNever, s.Image)
	}
	report := func(p Progress) {
		m.mu.Lock()
		defer m.mu.Unlock()
		l.pulling, l.progress = s.Image, p
	}
	report(Progress{})
	return store.Pull(ctx, s.Image, l.namespace, report)
}

// permit refuses an image that is there unless access to it was proven for the
// pod's namespace: with pull policy Never before, else now at the latest.
func (m *Manager) permit(ctx context.Context, l *look, s request.Source, store Store, img Image) error {
	err := store.Permit(ctx, img.ID, s.Image, l.namespace, s.PullPolicy != request.Never)
	switch {
	case !errors.Is(err, ErrNotPermitted):
		return err
	case s.PullPolicy == request.Never:
		return fmt.Errorf("%w: image %s is present on the node, but for namespace %s %w, and pullPolicy is Never; "+
			"run 'ocihold pull' for it, choose IfNotPresent, or set trust_present = true in [volumes]", ErrPullPolicyNever, s.Image, l.namespace, err)
	default:
		return fmt.Errorf("image %s is present on the node, but for namespace %s %w; "+
			"give the node credentials for it or set trust_present = true in [volumes]", s.Image, l.namespace, err)
	}
}

// lease holds the image. It counts as needed from the first moment, so that a
// settling under way cannot take it back.
func (m *Manager) lease(ctx context.Context, l *look, s request.Source, store Store, img Image) error {
	m.mu.Lock()
	l.candidates = append(l.candidates, wholeKey(Image{Root: l.root, ID: img.ID}))
	m.mu.Unlock()

	m.doing.Lock()
	defer m.doing.Unlock()
	if err := store.Lease(ctx, img.ID); err != nil {
		return fmt.Errorf("lease image %s: %w", s.Image, err)
	}
	return nil
}

// mount makes the mounts that are missing, and returns the keys of all. They count
// as needed as in lease.
func (m *Manager) mount(ctx context.Context, l *look, store Store, images []Image) ([]string, error) {
	ids := make([]string, len(images))
	for i, img := range images {
		ids[i] = img.ID
	}
	c := contentOf(l.root, l.sources, ids)
	m.mu.Lock()
	c.IDMap = l.idMap
	if l.room != "" {
		c.room, c.size = l.room, l.size
	}
	m.mu.Unlock()
	steps, err := c.plan()
	if err != nil {
		return nil, mountFailure{err}
	}
	mounts := make([]string, len(steps))
	for i, s := range steps {
		mounts[i] = s.key
	}
	m.mu.Lock()
	l.candidates = append(l.candidates, mounts...)
	m.mu.Unlock()

	for _, s := range steps {
		err := m.take(ctx, store, s, l.userNS)
		if part, ok := errors.AsType[*hostmount.PartError](err); ok {
			return nil, mountFailure{fmt.Errorf("sub path %q of image %s: %w", part.Path, l.refOf(part.Key, images), part.Err)}
		}
		if err != nil {
			return nil, mountFailure{fmt.Errorf("mount image %s: %w", l.refOf(s.key, images), err)}
		}
	}
	return mounts, nil
}

// refOf names the images of a mount as they were asked for.
func (l *look) refOf(key string, images []Image) string {
	var refs []string
	for i, s := range l.sources {
		if parseKey(key).has(images[i]) {
			refs = append(refs, s.Image)
		}
	}
	return strings.Join(slices.Compact(refs), ", ")
}

// take makes the mount of a step, unless it is there.
func (m *Manager) take(ctx context.Context, store Store, s step, userNS string) error {
	if s.size > 0 {
		// Room takes its time, and this look alone makes it. No settling that does
		// not know of it goes on any more: the step before has waited for such.
		return m.mounts.EnsureWritable(ctx, s.key, s.parts, s.size)
	}
	m.doing.Lock()
	defer m.doing.Unlock()
	if m.mounts.Mounted(s.key) {
		return nil
	}
	spec := hostmount.Spec{Parts: s.parts}
	if s.parts == nil {
		layers, err := store.LowerDirs(ctx, s.layers.ImageID, s.layers.MediaTypes)
		if err != nil {
			return err
		}
		spec.Layers, spec.UserNS = layers, userNS
	}
	return m.mounts.Ensure(s.key, spec)
}
