package imagevolume_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// fakeStore is a store and a registry in memory.
type fakeStore struct {
	mu       sync.Mutex
	registry map[string]string // image ID by reference
	present  map[string]string // the same, of what was pulled
	leased   map[string]bool   // false is a lease that is not whole
	err      error             // of every pull
	block    chan struct{}     // closed when pulls may go on
	unready  chan struct{}     // closed when images may be resolved
	log      []string          // calls that change something
	onLease  func(id string)   // called before a lease is taken, unlocked
	reports  []imagevolume.Progress
	unproven map[string]error    // by image ID: why the registry gives no proof
	refused  map[string]error    // why nothing is allowed, by namespace
	layers   map[string][]string // image IDs by where their layers are mounted together
	permits  []string            // what was to be permitted, and whether by asking
}

var _ imagevolume.Store = (*fakeStore)(nil)

func newFakeStore() *fakeStore {
	return &fakeStore{
		registry: map[string]string{"reg/a:1": id("a"), "reg/b:1": id("b"), "reg/c": id("c")},
		present:  map[string]string{},
		leased:   map[string]bool{},
	}
}

// fakeStores has CRI-O's root and that of the handler vm, which can be away.
type fakeStores struct {
	crio, vm *fakeStore
	vmAway   atomic.Bool
	scratch  atomic.Int64 // that is allowed; 0 for any
}

var _ imagevolume.Stores = (*fakeStores)(nil)

func (s *fakeStores) Root(handler string) string {
	if handler == "vm" {
		return "vm"
	}
	return ""
}

func (s *fakeStores) AllowScratch(bytes int64) error {
	if most := s.scratch.Load(); most > 0 && bytes > most {
		return fmt.Errorf("%w: max_scratch_bytes", imagevolume.ErrNotAllowed)
	}
	return nil
}

func (s *fakeStores) Roots() []string { return []string{"", "vm"} }

func (s *fakeStores) Store(root string) (imagevolume.Store, error) {
	switch {
	case root == "":
		return s.crio, nil
	case s.vmAway.Load():
		return nil, errors.New("the root of vm is not mounted")
	default:
		return s.vm, nil
	}
}

// id makes an image ID of a letter.
func id(letter string) string { return strings.Repeat(letter, 64) }

func (s *fakeStore) Resolve(_ context.Context, ref string) (imagevolume.Image, error) {
	s.mu.Lock()
	unready := s.unready
	s.mu.Unlock()
	if unready != nil {
		<-unready
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	imageID, ok := s.present[ref]
	if !ok && slices.Contains(slices.Collect(maps.Values(s.present)), ref) {
		imageID, ok = ref, true
	}
	if !ok {
		return imagevolume.Image{}, fmt.Errorf("resolve %s: %w", ref, imagevolume.ErrNotPresent)
	}
	return imagevolume.Image{ID: imageID, Digest: "sha256:" + imageID}, nil
}

func (s *fakeStore) Pull(ctx context.Context, ref, namespace string, progress func(imagevolume.Progress)) (imagevolume.Image, error) {
	s.mu.Lock()
	block := s.block
	for _, p := range s.reports {
		progress(p)
	}
	s.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			s.mu.Lock()
			defer s.mu.Unlock()
			s.log = append(s.log, "cancelled "+ref)
			return imagevolume.Image{}, ctx.Err()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused[namespace]; err != nil {
		return imagevolume.Image{}, err
	}
	s.log = append(s.log, "pull "+ref)
	if s.err != nil {
		return imagevolume.Image{}, s.err
	}
	imageID, ok := s.registry[ref]
	if !ok {
		return imagevolume.Image{}, fmt.Errorf("pull %s: manifest unknown", ref)
	}
	s.present[ref] = imageID
	return imagevolume.Image{ID: imageID, Digest: "sha256:" + imageID}, nil
}

func (s *fakeStore) Permit(_ context.Context, imageID, ref, namespace string, ask bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.refused[namespace]; err != nil {
		return fmt.Errorf("image %s: %w", ref, err)
	}
	s.permits = append(s.permits, fmt.Sprintf("%s for %s, ask %t", imageID[:1], namespace, ask))
	err, unproven := s.unproven[imageID]
	switch {
	case !unproven:
		return nil
	case errors.Is(err, imagevolume.ErrNotPresent):
		delete(s.present, "reg/a:1")
		return err
	case !ask:
		return imagevolume.ErrNotPermitted
	default:
		return fmt.Errorf("%w: %w", imagevolume.ErrNotPermitted, err)
	}
}

func (s *fakeStore) Lease(_ context.Context, imageID string) error {
	s.mu.Lock()
	hook := s.onLease
	s.mu.Unlock()
	if hook != nil {
		hook(imageID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(slices.Collect(maps.Values(s.present)), imageID) {
		return fmt.Errorf("lease: %w", imagevolume.ErrNotPresent)
	}
	if !s.leased[imageID] {
		s.leased[imageID] = true
		s.log = append(s.log, "lease "+imageID[:1])
	}
	return nil
}

func (s *fakeStore) Release(_ context.Context, imageID string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leased, imageID)
	s.log = append(s.log, "release "+imageID[:1])
	return nil
}

func (s *fakeStore) Leases(context.Context) (map[string]bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.leased), nil
}

func (s *fakeStore) MountedAt(_ context.Context, dirs []string) (map[string][]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := map[string][]string{}
	for _, dir := range dirs {
		if ids := s.layers[dir]; ids != nil {
			found[dir] = ids
		}
	}
	return found, nil
}

func (s *fakeStore) LowerDirs(_ context.Context, imageID string, mediaTypes []string) ([]string, error) {
	if slices.Contains(mediaTypes, "none") {
		return nil, errors.New("it has no such layer: media types none; it has some")
	}
	return []string{"/layers/" + imageID}, nil
}

// set changes the store.
func (s *fakeStore) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// leases returns what is leased.
func (s *fakeStore) leases() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.leased)
}

// calls returns and forgets what was called.
func (s *fakeStore) calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.log
	s.log = nil
	return log
}

// fakeMounts is a kernel in memory.
type fakeMounts struct {
	mu      sync.Mutex
	mounted map[string]bool
	used    map[string]bool
	lowers  map[string]bool
	err     error // of InUse
	noRoom  error // of EnsureWritable
	// onEnsure is called before a mount is made that is not writable, unlocked.
	onEnsure func()
}

var _ imagevolume.Mounts = (*fakeMounts)(nil)

func (m *fakeMounts) Path(key string) string { return "/mounts/" + key }

func (m *fakeMounts) Key(path string) string {
	key, ok := strings.CutPrefix(path, "/mounts/")
	if !ok {
		return ""
	}
	return key
}

func (m *fakeMounts) IDMap(userNS string) (string, error) {
	if userNS == "/gone" {
		return "", os.ErrNotExist
	}
	return "uid of " + userNS, nil
}

func (m *fakeMounts) Ensure(key string, spec hostmount.Spec) error {
	m.mu.Lock()
	hook := m.onEnsure
	m.mu.Unlock()
	if hook != nil {
		hook()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(spec.Layers)+len(spec.Parts) == 0 {
		return errors.New("no layers")
	}
	for _, part := range spec.Parts {
		switch {
		case !m.mounted[part.Key]:
			return fmt.Errorf("%s is not mounted", part.Key)
		case part.Path == "missing":
			return &hostmount.PartError{Part: part, Err: unix.ENOENT}
		}
	}
	m.mounted[key] = true
	return nil
}

func (m *fakeMounts) EnsureWritable(_ context.Context, key string, parts []hostmount.Part, size int64) error {
	m.mu.Lock()
	noRoom, mounted := m.noRoom, m.mounted[parts[0].Key]
	m.mu.Unlock()
	switch {
	case !mounted:
		return errors.New("the part is not mounted")
	case size != request.DefaultScratchSize:
		return fmt.Errorf("size %d", size)
	case noRoom != nil:
		return noRoom
	}
	m.set(func() { m.mounted[key] = true })
	return nil
}

func (m *fakeMounts) Mounted(key string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mounted[key]
}

func (m *fakeMounts) Release(key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.mounted, key)
	return nil
}

func (m *fakeMounts) Keys() ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.mounted)), nil
}

func (m *fakeMounts) InUse(context.Context) (keys, lowers map[string]bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.used), maps.Clone(m.lowers), m.err
}

func (m *fakeMounts) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}
