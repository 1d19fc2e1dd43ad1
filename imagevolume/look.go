package imagevolume

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/docker/go-units"
	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// want is what a pod asks to be looked for.
type want struct {
	ref    string
	policy request.PullPolicy
}

func wantOf(v request.Volume) want { return want{ref: v.Image, policy: v.PullPolicy} }

// look is one search for the image of a want: resolve, pull if need be, lease,
// mount. It can be made again, in rounds; the image of the last good round is
// kept meanwhile. Everything in it is under Manager.mu.
type look struct {
	want

	root      string // whose it is
	namespace string // of the pod

	running bool
	unsure  bool // it is not known yet which image the store has for it
	gone    bool // its pod is
	adopt   bool // this round takes image.ID for what want names
	cancel  context.CancelFunc

	image     Image // of the last good result
	candidate Image // that this round may hold
	err       error // of the last result
	progress  Progress
}

func (l *look) ready() bool  { return !l.running && l.err == nil }
func (l *look) failed() bool { return !l.running && l.err != nil }

// answer returns nil when the image is mounted. Its text is coarse, so that
// repeated events fold into one.
func (l *look) answer() error {
	switch {
	case l.ready():
		return nil
	case l.failed():
		return fmt.Errorf("%w; will be tried again", l.err)
	case l.progress.Total > 0:
		tenths := 10 * l.progress.Done / l.progress.Total
		return fmt.Errorf("pulling %s: %d%% of %s; will be tried again", l.ref, 10*tenths, units.HumanSize(float64(l.progress.Total)))
	default:
		return fmt.Errorf("pulling %s; will be tried again", l.ref)
	}
}

func (l *look) abandon() {
	l.gone = true
	if l.cancel != nil {
		l.cancel()
	}
}

// look begins to look for w.
func (m *Manager) look(p *pod, w want) *look {
	l := &look{want: w, root: m.stores.Root(p.Handler), namespace: p.Namespace, unsure: true}
	p.looks[w] = l
	m.again(l)
	return l
}

// again begins the next round, unless one runs.
func (m *Manager) again(l *look) {
	if l.running {
		return
	}
	l.running = true
	l.progress = Progress{}
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

	img, err := m.find(ctx, l)

	m.mu.Lock()
	defer m.mu.Unlock()
	l.running, l.unsure, l.cancel, l.candidate, l.adopt = false, false, nil, Image{}, false
	l.err = err
	changed := err == nil && key(l.image) != key(img)
	if err == nil {
		l.image = img
	}
	if changed || l.gone || err != nil {
		wake(m.settles)
	}
	log := m.log.WithField("image", l.ref)
	switch {
	case l.gone:
	case err != nil:
		log.WithError(err).Warn("image volume is not to be had")
	default:
		log.WithFields(logrus.Fields{"root": img.Root, "image_id": img.ID, "digest": img.Digest}).Info("image volume is ready")
	}
}

// find makes the image present and holds it. Between the two another program
// may delete it; then it is sought again, a few times.
func (m *Manager) find(ctx context.Context, l *look) (Image, error) {
	store, err := m.stores.Store(l.root)
	if err != nil {
		return Image{}, fmt.Errorf("pull %s: %w", l.ref, err)
	}
	var img Image
	for range 3 {
		if img, err = m.obtain(ctx, l, store); err != nil {
			return Image{}, err
		}
		img.Root = l.root
		if err = m.hold(ctx, l, store, img); !errors.Is(err, ErrNotPresent) {
			break
		}
	}
	return img, err
}

func (m *Manager) obtain(ctx context.Context, l *look, store Store) (Image, error) {
	m.mu.Lock()
	adopt, id := l.adopt, l.image.ID
	l.adopt = false
	m.mu.Unlock()
	if adopt {
		img, err := store.Resolve(ctx, id)
		if err == nil {
			err = m.permit(ctx, l, store, img)
		}
		if !errors.Is(err, ErrNotPresent) {
			return img, err
		}
	}
	img, err := store.Resolve(ctx, l.ref)
	m.mu.Lock()
	l.unsure, l.candidate = false, Image{Root: l.root, ID: img.ID}
	m.mu.Unlock()
	if err == nil && l.policy != request.Always {
		err = m.permit(ctx, l, store, img)
	}
	if l.policy != request.Always && !errors.Is(err, ErrNotPresent) {
		return img, err
	}
	if l.policy == request.Never {
		return Image{}, fmt.Errorf("%w: image %s is not present on the node and pullPolicy is Never; "+
			"pull it to the node or choose IfNotPresent", ErrPullPolicyNever, l.ref)
	}
	return store.Pull(ctx, l.ref, func(p Progress) {
		m.mu.Lock()
		defer m.mu.Unlock()
		l.progress = p
	})
}

// permit refuses an image that is there unless access to it was proven for the
// pod's namespace: with pull policy Never before, else now at the latest.
func (m *Manager) permit(ctx context.Context, l *look, store Store, img Image) error {
	err := store.Permit(ctx, img.ID, l.namespace, l.policy != request.Never)
	switch {
	case !errors.Is(err, ErrNotPermitted):
		return err
	case l.policy == request.Never:
		return fmt.Errorf("%w: image %s is present on the node, but for namespace %s %w, and pullPolicy is Never; "+
			"run 'ocihold pull' for it, choose IfNotPresent, or set trust_present = true in [volumes]", ErrPullPolicyNever, l.ref, l.namespace, err)
	default:
		return fmt.Errorf("image %s is present on the node, but for namespace %s %w; "+
			"give the node credentials for it or set trust_present = true in [volumes]", l.ref, l.namespace, err)
	}
}

// hold leases the image and mounts it. It counts as needed from the first
// moment, so that a settling under way cannot take it back.
func (m *Manager) hold(ctx context.Context, l *look, store Store, img Image) error {
	m.mu.Lock()
	l.candidate = img
	m.mu.Unlock()

	m.doing.Lock()
	defer m.doing.Unlock()
	if err := store.Lease(ctx, img.ID); err != nil {
		return fmt.Errorf("lease image %s: %w", l.ref, err)
	}
	if m.mounts.Mounted(key(img)) {
		return nil
	}
	lowers, err := store.LowerDirs(ctx, img.ID)
	if err != nil {
		return fmt.Errorf("find layers of image %s: %w", l.ref, err)
	}
	if err := m.mounts.Ensure(key(img), lowers); err != nil {
		return fmt.Errorf("mount image %s: %w", l.ref, err)
	}
	return nil
}
