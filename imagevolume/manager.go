package imagevolume

import (
	"context"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// Pod is a pod sandbox, as the container runtime tells of it.
type Pod struct {
	ID, Namespace, Name string
	// Handler is the runtime handler; "" is the default.
	Handler     string
	Annotations map[string]string
	// UserNS is where its user namespace is bound; "" is the host's.
	UserNS string
}

// Container is a container of a pod.
type Container struct {
	ID, Name string
	// Mounts are those it has already, source by destination.
	Mounts map[string]string
	// Natives are its image volumes by Kubernetes' own field, which the
	// container runtime mounts itself.
	Natives []Native
}

// Native is an image volume that the container runtime mounts itself, from its
// own root.
type Native struct {
	// MountPath is where the container has it, HostPath where the host had it
	// when the container was created.
	MountPath, HostPath string
	// ImageID has 64 hexadecimal digits. No image has it where the volume is
	// an artifact: that is left alone.
	ImageID string
}

// Given is a volume that a container was given.
type Given struct {
	request.Volume

	// From are the images that were mounted, by source. It is nil while it is not
	// known which a container has that was taken over.
	From []Image
	// Mount is how the container got it.
	Mount Mount

	key string // of the mount
}

// Manager tracks pods, and the images that their volumes hold. Its methods may
// be called at the same time; those that take no context answer at once.
type Manager struct {
	stores Stores
	mounts Mounts
	log    logrus.FieldLogger

	// starts and settles wake the two goroutines of Run.
	starts, settles chan struct{}

	// doing is held while leases and mounts are changed: a look that begins
	// to hold an image and a settling that lets it go keep apart by it. It is
	// never held by or waited for by one who owes an answer.
	doing sync.Mutex

	mu     sync.Mutex // guards what follows; held for memory only
	pods   map[string]*pod
	queue  []*look // to be started
	synced bool    // the runtime has told which pods there are

	settledAt time.Time // zero for never
	settleErr error     // of that time
}

// pod is what is known of one sandbox.
type pod struct {
	Pod

	looks map[want]*look
	given map[string]*given // by container name, the newest

	unlisted bool // the runtime's last list did not have it
}

// given is what a container has.
type given struct {
	containerID string
	volumes     []Given
	natives     []Native
}

func (g *given) empty() bool { return len(g.volumes)+len(g.natives) == 0 }

func newPod(info Pod) *pod {
	return &pod{Pod: info, looks: map[want]*look{}, given: map[string]*given{}}
}

// needs are the keys of the mounts that pods need.
type needs struct {
	has   keys // those that they have
	maybe keys // those that they may be about to have
	// images are those that are known to be in the former.
	images map[Image]bool
}

func newNeeds() needs { return needs{keys{}, keys{}, map[Image]bool{}} }

// key reports whether the mount of the key is needed.
func (n needs) key(key string) bool {
	_, has := n.has[key]
	_, maybe := n.maybe[key]
	return has || maybe
}

// image reports whether the image is.
func (n needs) image(img Image) bool { return n.has.have(img) || n.maybe.have(img) }

// need adds what the pod needs.
func (p *pod) need(n needs) {
	for _, l := range p.looks {
		for _, k := range l.candidates {
			n.maybe.add(k)
		}
		for _, k := range l.mounts {
			n.has.add(k)
		}
		for _, img := range l.images {
			n.images[img.plain()] = true
		}
	}
	for _, g := range p.given {
		for _, v := range g.volumes {
			n.has.add(v.key)
		}
	}
}

// needNative adds the image of each native volume that the pod has.
func (p *pod) needNative(images map[Image]bool) {
	for _, g := range p.given {
		for _, v := range g.natives {
			images[Image{ID: v.ImageID}] = true
		}
	}
}

// New returns a Manager, which does nothing of its own before Run.
func New(stores Stores, mounts Mounts, log logrus.FieldLogger) *Manager {
	return &Manager{
		stores:  stores,
		mounts:  mounts,
		log:     log,
		starts:  make(chan struct{}, 1),
		settles: make(chan struct{}, 1),
		pods:    map[string]*pod{},
	}
}

// Run does the Manager's work until ctx ends, and returns when all of it has
// stopped. Leases and mounts stay as they are: running containers need them.
func (m *Manager) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { m.startLooks(ctx); return nil })
	group.Go(func() error { m.settleLoop(ctx); return nil })
	return group.Wait()
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // is awake
	}
}
