package imagevolume_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/imagevolume/request"
)

var seed = flag.Uint64("seed", 0, "of TestRandomEvents; 0 draws one")

// TestRandomEvents has a node live through events of every kind, in a random
// order: told, told twice or too late, or not told at all, to a Manager that is
// restarted and cut off, over a store and a kernel that fail. The node is the
// truth; what the Manager does to leases and mounts, and what it answers, is
// checked against it.
func TestRandomEvents(t *testing.T) {
	const events, between = 10_000, 200
	seed := *seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Log("seed", seed)
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, rand.New(rand.NewPCG(seed, 0)))
		defer func() { n.stop() }()
		for i := range events {
			n.event()
			if n.rng.IntN(2) == 0 {
				synctest.Wait()
			}
			if i%between == between-1 {
				n.settle()
			}
		}
		for id := range n.pods {
			n.removePod(id)
		}
		n.endOrphans()
		n.settle()
		require.Empty(t, n.leases(), "left in the end")
		require.Empty(t, n.mounts.mounted, "left in the end")
		require.Empty(t, n.Volumes())
		t.Log(n.counts)
		for _, kind := range []string{"given", "refused", "adopted", "restart", "release"} {
			require.Greater(t, n.counts[kind], 50, kind)
		}
	})
}

// node is what really is: sandboxes, containers, and which of them have what.
type node struct {
	*imagevolume.Manager

	t       *testing.T
	rng     *rand.Rand
	stop    func()
	away    bool // the runtime does not tell, nor ask
	stores  *fakeStores
	mounts  *watchedMounts
	block   chan struct{}
	pods    map[string]*nodePod
	orphans []*nodeContainer // running, and nobody's any more
	gone    []func()         // what may be told again
	made    int              // names given

	mu     sync.Mutex
	held   map[string]int // by "mount" or "lease" and key, of those that containers have
	counts map[string]int
}

type nodePod struct {
	imagevolume.Pod

	containers map[string]*nodeContainer // by name
}

type nodeContainer struct {
	imagevolume.Container

	started bool
	missed  bool     // a Synchronize went by without it, before it started
	sources []string // of its mounts, which the guard looks at
	keys    []string // that the kernel knows it by, once it has started
	leases  []string
}

// watchedMounts and watchedStore see what is let go.
type watchedMounts struct {
	*fakeMounts

	node *node
}

func (m *watchedMounts) Ensure(key string, spec hostmount.Spec) error {
	yield()
	return m.fakeMounts.Ensure(key, spec)
}

// InUse returns with an error nothing at all, the least complete answer.
func (m *watchedMounts) InUse(ctx context.Context) (keys, lowers map[string]bool, err error) {
	keys, lowers, err = m.fakeMounts.InUse(ctx)
	if err != nil {
		return map[string]bool{}, map[string]bool{}, err
	}
	return keys, lowers, nil
}

// yield lets others go first, or not.
func yield() {
	for range rand.IntN(4) {
		runtime.Gosched()
	}
}

func (m *watchedMounts) Release(key string) error {
	m.node.released("mount", key)
	return m.fakeMounts.Release(key)
}

type watchedStore struct {
	*fakeStore

	node *node
	root string
}

// Pull keeps the image by its ID too, as a store does when its name moves on.
func (s *watchedStore) Pull(ctx context.Context, ref, namespace string, progress func(imagevolume.Progress)) (imagevolume.Image, error) {
	image, err := s.fakeStore.Pull(ctx, ref, namespace, progress)
	if err == nil {
		s.set(func() { s.present[image.ID] = image.ID })
	}
	return image, err
}

func (s *watchedStore) Lease(ctx context.Context, imageID string) error {
	err := s.fakeStore.Lease(ctx, imageID)
	yield()
	return err
}

func (s *watchedStore) Release(ctx context.Context, imageID string) error {
	s.node.released("lease", keyIn(s.root, imageID))
	return s.fakeStore.Release(ctx, imageID)
}

type watchedStores struct {
	*fakeStores

	node *node
}

func (s *watchedStores) Store(root string) (imagevolume.Store, error) {
	if _, err := s.fakeStores.Store(root); err != nil {
		return nil, err
	}
	return &watchedStore{s.node.store(root), s.node, root}, nil
}

func keyIn(root, imageID string) string {
	if root == "" {
		return imageID
	}
	return root + "." + imageID
}

// imagesIn are the images, as keyIn has them, that a mount's key names by the
// beginnings of their IDs.
func imagesIn(key string) []string {
	root, names, ok := strings.Cut(key, ".")
	if !ok {
		root, names = "", key
	}
	names, _, _ = strings.Cut(names, "~")
	var all []string
	for name := range strings.SplitSeq(names, "+") {
		all = append(all, keyIn(root, id(name[:1])))
	}
	return all
}

func newNode(t *testing.T, rng *rand.Rand) *node {
	t.Helper()
	n := &node{
		t: t, rng: rng, pods: map[string]*nodePod{}, counts: map[string]int{}, held: map[string]int{},
		stores: &fakeStores{crio: newFakeStore(), vm: newFakeStore()},
	}
	n.mounts = &watchedMounts{&fakeMounts{mounted: map[string]bool{}, used: map[string]bool{}, lowers: map[string]bool{}}, n}
	for _, root := range n.stores.Roots() {
		n.store(root).reports = []imagevolume.Progress{{Done: 1, Total: 2}}
		n.store(root).layers = map[string][]string{}
		for _, id := range nativeImages {
			n.store(root).present[id] = id
			n.store(root).layers[nativeDir(id)] = []string{id}
		}
	}
	n.start()
	n.synchronize(false)
	return n
}

// nativeImages are those of native volumes; no other volume has them.
var nativeImages = []string{id("e"), id("f")}

func nativeDir(id string) string { return "/layers/" + id[:1] + "/merged" }

func (n *node) store(root string) *fakeStore {
	if root == "vm" {
		return n.stores.vm
	}
	return n.stores.crio
}

// start starts a Manager, which knows nothing.
func (n *node) start() {
	log := logrus.New()
	log.SetOutput(io.Discard)
	n.Manager = imagevolume.New(&watchedStores{n.stores, n}, n.mounts, log)
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan error)
	go func(m *imagevolume.Manager) { ended <- m.Run(ctx) }(n.Manager)
	n.stop = func() {
		cancel()
		require.NoError(n.t, <-ended)
	}
	n.away, n.gone = true, nil
}

// released checks that nothing is let go that a container has, or is about to.
func (n *node) released(what, key string) {
	n.count("release", 1)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.held[what+key] > 0 {
		n.t.Errorf("%s of %s is let go, which a container has", what, key)
	}
}

func (n *node) count(kind string, by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.counts[kind] += by
}

// event is one of everything that can happen.
func (n *node) event() {
	switch p := n.anyPod(); n.rng.IntN(25) {
	case 0, 1:
		if len(n.pods) < 16 {
			n.runPod()
		}
	case 2, 3, 4, 5, 6, 7, 8, 9:
		if p != nil {
			n.create(p, n.anyName())
		}
	case 10, 11:
		n.eachContainer(p, func(c *nodeContainer) { n.startContainer(p, c) })
	case 12, 13:
		n.eachContainer(p, func(c *nodeContainer) { n.endContainer(p, c) })
	case 14, 15:
		if p != nil {
			n.removePod(p.ID)
		}
	case 16:
		if len(n.gone) > 0 && !n.away {
			n.gone[n.rng.IntN(len(n.gone))]()
		}
	case 17:
		n.away = true
		if n.rng.IntN(2) == 0 {
			n.stop()
			n.start()
			n.count("restart", 1)
		}
	case 18, 19:
		n.synchronize(n.rng.IntN(4) == 0)
	case 20:
		n.endOrphans()
	case 21:
		time.Sleep(time.Duration(n.rng.Int64N(int64(3 * time.Minute))))
	default:
		n.fault()
	}
}

func (n *node) anyPod() *nodePod {
	ids := slices.Sorted(maps.Keys(n.pods))
	if len(ids) == 0 {
		return nil
	}
	return n.pods[ids[n.rng.IntN(len(ids))]]
}

func (n *node) anyName() string { return []string{"c", "d"}[n.rng.IntN(2)] }

func (n *node) eachContainer(p *nodePod, do func(*nodeContainer)) {
	if p == nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(p.containers)) {
		if n.rng.IntN(2) == 0 {
			do(p.containers[name])
		}
	}
}

// tell tells once, or twice, or not at all, and perhaps again later.
func (n *node) tell(f func()) {
	if n.away {
		return
	}
	for range n.rng.IntN(4) {
		f()
	}
	if n.rng.IntN(10) == 0 {
		n.gone = append(n.gone, f)
	}
}

func (n *node) name(of string) string {
	n.made++
	return fmt.Sprint(of, n.made)
}

var annotationsOfPods = []string{
	volumeA,
	`[{"image": "reg/c", "mountPath": "/c"}]`,
	`[{"image": "reg/a:1", "mountPath": "/a"}, {"image": "reg/b:1", "mountPath": "/b", "exec": true}]`,
	`[{"image": "reg/b:1", "mountPath": "/b", "pullPolicy": "Never"}]`,
	`[{"image": "reg/b:1", "mountPath": "/b", "pullPolicy": "Always"}, {"image": "reg/none", "mountPath": "/n"}]`,
	`[{"image": "reg/b:1", "mountPath": "/b", "subPath": "some/dir"}, {"image": "reg/a:1", "mountPath": "/a", "mediaTypes": ["*tar*"]}]`,
	`[{"images": [{"image": "reg/a:1"}, {"image": "reg/c", "subPath": "dir"}, {"image": "reg/b:1", "mediaTypes": ["*"]}], "mountPath": "/abc"}]`,
	`[]`,
	`nonsense`,
}

func (n *node) runPod() {
	p := pod(n.name("p"), annotationsOfPods[n.rng.IntN(len(annotationsOfPods))])
	if n.rng.IntN(3) == 0 {
		p.Annotations[request.Domain+"/container.d"] = annotationsOfPods[n.rng.IntN(len(annotationsOfPods))]
	}
	if n.rng.IntN(3) == 0 {
		p.Handler = "vm"
	}
	n.pods[p.ID] = &nodePod{Pod: p, containers: map[string]*nodeContainer{}}
	n.tell(func() { n.RunPod(p) })
}

// create asks for a container, as the runtime does, after that of the same name
// is gone. What is answered is whole, or an error.
func (n *node) create(p *nodePod, name string) {
	if old := p.containers[name]; old != nil {
		n.endContainer(p, old)
	}
	c := &nodeContainer{Container: imagevolume.Container{ID: n.name("id"), Name: name, Mounts: map[string]string{"/etc/hosts": "/hosts"}}}
	if n.rng.IntN(4) == 0 && p.Handler == "" {
		id := nativeImages[n.rng.IntN(len(nativeImages))]
		c.Natives = []imagevolume.Native{{MountPath: "/native", HostPath: nativeDir(id), ImageID: id}}
	}
	wanted, wantedErr := request.ForContainer(request.Pod{Namespace: p.Namespace, Name: p.Name}, p.Annotations, name)
	if n.away {
		if wantedErr == nil && len(wanted) == 0 {
			c.missed = true
			p.containers[name] = c
		}
		return // else the guard refuses
	}
	given, err := n.CreateContainer(p.Pod, c.Container)
	if err != nil {
		n.count("refused", 1)
		require.Empty(n.t, given)
		require.NotContains(n.t, err.Error(), "\n")
		return
	}
	require.NoError(n.t, wantedErr)
	require.Len(n.t, given, len(wanted))
	for i, g := range given {
		require.Equal(n.t, wanted[i], g.Volume)
		require.Equal(n.t, wanted[i].MountPath, g.Mount.Destination)
		key := n.mounts.Key(g.Mount.Source)
		require.True(n.t, n.mounts.Mounted(key), "%s is given and not mounted", key)
		require.Len(n.t, g.From, len(g.Sources))
		for _, image := range g.From {
			require.Equal(n.t, p.Handler, image.Root)
			require.Contains(n.t, n.store(p.Handler).leases(), image.ID, "given and not leased")
			c.leases = append(c.leases, keyIn(image.Root, image.ID))
		}
		c.sources = append(c.sources, key)
		if len(g.Sources) == 1 && g.Sources[0].SubPath != "" {
			key = keyIn(g.From[0].Root, g.From[0].ID) // a tree of that mount
		}
		c.keys = append(c.keys, key)
		c.Mounts[g.MountPath] = g.Mount.Source
	}
	n.count("given", len(given))
	if n.rng.IntN(10) == 0 {
		return // the OCI runtime fails, and nobody tells
	}
	p.containers[name] = c
	n.hold(c, 1)
}

// hold counts what a container has, from the answer to its end.
func (n *node) hold(c *nodeContainer, by int) {
	n.mu.Lock()
	for _, k := range c.keys {
		if slices.Contains(c.sources, k) { // a tree of a mount outlives that
			n.held["mount"+k] += by
		}
	}
	for _, k := range c.leases {
		n.held["lease"+k] += by
	}
	n.mu.Unlock()
	n.kernel()
}

// containers are those that hold something: of pods, and orphans.
func (n *node) containers() []*nodeContainer {
	all := slices.Clone(n.orphans)
	for _, p := range n.pods {
		all = slices.AppendSeq(all, maps.Values(p.containers))
	}
	return all
}

// kernel is what the kernel says of the containers that have started.
func (n *node) kernel() {
	used, lowers := map[string]bool{}, map[string]bool{}
	for _, c := range n.containers() {
		if !c.started {
			continue
		}
		for _, k := range c.keys {
			used[k] = true
		}
		for _, v := range c.Natives {
			lowers[v.HostPath] = true
		}
	}
	n.mounts.set(func() { n.mounts.used, n.mounts.lowers = used, lowers })
}

// startContainer starts it, unless the guard finds that its volumes are gone,
// which happens to one that nobody told a new Manager of. The images of native
// volumes are leased in the background: they count from here on.
func (n *node) startContainer(p *nodePod, c *nodeContainer) {
	if c.started {
		return
	}
	synctest.Wait()
	for _, k := range c.sources {
		if !n.mounts.Mounted(k) {
			delete(p.containers, c.Name)
			n.forget(c)
			return
		}
	}
	if c.missed {
		n.hold(c, 1)
	}
	c.started, c.missed = true, false
	n.holdNatives(c, 1)
	n.kernel()
}

// holdNatives counts the native volumes that a container has.
func (n *node) holdNatives(c *nodeContainer, by int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, v := range c.Natives {
		n.held["lease"+v.ImageID] += by
	}
}

func (n *node) forget(c *nodeContainer) {
	if !c.missed {
		n.hold(c, -1)
	}
	if c.started {
		n.holdNatives(c, -1)
	}
	n.kernel()
}

// endContainer ends it, or the runtime only says or believes so, and it runs on
// as an orphan.
func (n *node) endContainer(p *nodePod, c *nodeContainer) {
	delete(p.containers, c.Name)
	if c.started && n.rng.IntN(3) == 0 {
		n.orphans = append(n.orphans, c)
	} else {
		n.forget(c)
	}
	n.tell(func() { n.EndContainer(p.ID, c.ID) })
}

func (n *node) endOrphans() {
	for _, c := range n.orphans {
		n.forget(c)
	}
	n.orphans = nil
	n.kernel()
}

func (n *node) removePod(id string) {
	p := n.pods[id]
	for _, name := range slices.Sorted(maps.Keys(p.containers)) {
		n.endContainer(p, p.containers[name])
	}
	delete(n.pods, id)
	n.tell(func() { n.RemovePod(id) })
}

// synchronize is a registration. It can miss a container that is being created,
// which has started by the next, or is refused.
func (n *node) synchronize(misses bool) {
	n.away = false
	for _, p := range n.pods {
		for _, c := range p.containers {
			if c.missed {
				n.startContainer(p, c)
			}
		}
	}
	var pods []imagevolume.Pod
	containers := map[string][]imagevolume.Container{}
	for _, id := range slices.Sorted(maps.Keys(n.pods)) {
		p := n.pods[id]
		pods = append(pods, p.Pod)
		for _, name := range slices.Sorted(maps.Keys(p.containers)) {
			c := p.containers[name]
			if misses && !c.started && n.rng.IntN(2) == 0 {
				if !c.missed {
					n.hold(c, -1)
					c.missed = true
				}
				continue
			}
			containers[id] = append(containers[id], c.Container)
			if len(c.keys) > 0 {
				n.count("adopted", 1)
			}
		}
	}
	n.Synchronize(pods, containers)
}

// fault breaks something, or mends it.
func (n *node) fault() {
	store := n.store([]string{"", "vm"}[n.rng.IntN(2)])
	ref := []string{"reg/a:1", "reg/b:1", "reg/c"}[n.rng.IntN(3)]
	switch n.rng.IntN(10) {
	case 0:
		store.set(func() { store.err = errors.New("registry is down") })
	case 1:
		n.stores.vmAway.Store(!n.stores.vmAway.Load())
	case 2:
		n.mounts.set(func() { n.mounts.err = errors.New("no /proc") })
	case 3:
		store.set(func() { store.registry[ref] = id([]string{"a", "b", "c", "d"}[n.rng.IntN(4)]) })
	case 4: // somebody removes what is not held
		store.set(func() {
			imageID := store.present[ref]
			if _, held := store.leased[imageID]; !held {
				maps.DeleteFunc(store.present, func(_, has string) bool { return has == imageID })
			}
		})
	case 5: // or breaks a lease
		store.set(func() {
			for imageID := range store.leased {
				store.leased[imageID] = false
				break
			}
		})
	case 6:
		if n.block == nil {
			n.block = make(chan struct{})
			n.stores.crio.set(func() { n.stores.crio.block = n.block })
		}
	case 7: // somebody unmounts
		n.mounts.set(func() {
			for key := range n.mounts.mounted {
				delete(n.mounts.mounted, key)
				break
			}
		})
	default:
		n.mend()
	}
}

func (n *node) mend() {
	n.stores.vmAway.Store(false)
	n.mounts.set(func() { n.mounts.err = nil })
	for _, root := range n.stores.Roots() {
		n.store(root).set(func() { n.store(root).err, n.store(root).block = nil, nil })
	}
	if n.block != nil {
		close(n.block)
		n.block = nil
	}
}

// settle mends all, tells all, lets time pass, and compares: what containers
// have is leased, and nothing is that nobody asks for.
func (n *node) settle() {
	n.mend()
	n.synchronize(false)
	time.Sleep(10 * time.Minute)
	synctest.Wait()

	wanted, needed := map[string]bool{}, map[string]bool{}
	listed := 0
	for _, p := range n.pods {
		for _, v := range request.All(p.Annotations) {
			for _, source := range v.Sources {
				wanted[p.Handler+" "+source.Image] = true
			}
		}
		for _, c := range p.containers {
			listed += len(c.keys) + len(c.Natives)
		}
	}
	for _, c := range n.containers() {
		for _, k := range c.leases {
			needed[k] = true
		}
		for _, v := range c.Natives {
			needed[v.ImageID] = true
		}
	}
	leases := n.leases()
	for key := range needed {
		require.True(n.t, leases[key], "%s is in use and not leased", key)
	}
	asked := map[string]bool{} // any image that has had a name that is asked for
	for want := range wanted {
		root, _, _ := strings.Cut(want, " ")
		for _, letter := range []string{"a", "b", "c", "d"} {
			asked[keyIn(root, id(letter))] = true
		}
	}
	for key := range leases {
		require.True(n.t, needed[key] || asked[key], "%s is leased for nobody", key)
	}
	for key := range n.mounts.mounted {
		for _, image := range imagesIn(key) {
			require.True(n.t, needed[image] || asked[image], "%s is mounted for nobody", key)
			require.Contains(n.t, leases, image, "mounted and not leased")
		}
	}
	require.Len(n.t, n.Volumes(), listed)
	n.count("settled", 1)
}

// leases are those of all roots, by key.
func (n *node) leases() map[string]bool {
	all := map[string]bool{}
	for _, root := range n.stores.Roots() {
		for imageID, whole := range n.store(root).leases() {
			all[keyIn(root, imageID)] = whole
		}
	}
	return all
}
