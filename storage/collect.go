package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/docker/go-units"
	"github.com/sirupsen/logrus"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/system"
	"golang.org/x/sys/unix"
)

// CollectOptions say how to collect.
type CollectOptions struct {
	GCPolicy

	// DryRun changes nothing and says what would be done.
	DryRun bool
	// Users, if not nil, is asked for what tells who uses an image; before anything is removed, and once at most.
	Users func(ctx context.Context) (func(imageID string) (users []string, err error), error)
}

// Collection is what a collection has done.
type Collection struct {
	Handler string `json:"handler"`
	Root    string `json:"root"`
	DryRun  bool   `json:"dry_run"`
	// Capacity is what Before and After, in bytes, are to be measured by: the file system's, or MaxBytes. 0 where no
	// marks are for the root.
	Capacity uint64 `json:"capacity"`
	Before   uint64 `json:"before"`
	After    uint64 `json:"after"`
	// Images are all images, those that went first, then the least recently used first.
	Images []GCImage `json:"images"`
	// Layers are those that went because no image has them.
	Layers []GCLayer `json:"layers"`
	// Blobs are the bytes of downloads that programs left which have ended.
	Blobs uint64 `json:"blobs"`
	// Freed are the bytes of the images and layers that went.
	Freed uint64 `json:"freed"`
	// Faults are what could not be read or removed, with its name. It did not stop the rest.
	Faults []string `json:"faults,omitempty"`
}

// GCLayer is a layer that no image has.
type GCLayer struct {
	ID    string `json:"id"`
	Bytes uint64 `json:"bytes"`
}

var (
	errKubelets      = errors.New("its images are kubelet's to collect")
	errUsedMeanwhile = errors.New("it was used meanwhile")
)

// Collect removes images that nobody uses from the root of a handler: as many as the policy's marks ask for, least
// recently used first, and those that are too old. With them go layers that no image has, and downloads that ended
// programs left. CRI-O's own root is not collected from; kubelet does that.
//
// An image that a container of any root is made from, that is leased, being pulled, pinned or young, or whose layers
// CRI-O's own root leans on, stays; that it is none of this is looked at once more, and the image removed, as
// Roots.Remove does, under CRI-O's locks. There is an error where it cannot be known who uses what; nothing is removed
// then. One collection of a root runs at a time.
func (r *Roots) Collect(ctx context.Context, handler string, opt CollectOptions) (Collection, error) {
	c, err := r.collect(ctx, handler, opt)
	if err != nil {
		return Collection{}, fmt.Errorf("collect in the root of handler %q: %w", handler, err)
	}
	return c, nil
}

func (r *Roots) collect(ctx context.Context, handler string, opt CollectOptions) (Collection, error) {
	root, err := r.Handler(handler)
	if err != nil {
		return Collection{}, err
	}
	if root == r.base {
		return Collection{}, errKubelets
	}
	select {
	case root.collecting <- struct{}{}:
		defer func() { <-root.collecting }()
	case <-ctx.Done():
		return Collection{}, ctx.Err()
	}
	if err := root.usable(ctx); err != nil {
		return Collection{}, err
	}
	crio, err := r.crioUses(root)
	if err == nil {
		err = r.markContainers(ctx, root, crio.containers)
	}
	if err != nil {
		return Collection{}, fmt.Errorf("note which images are used: %w", err)
	}
	c := &Collection{Handler: handler, Root: root.store.GraphRoot(), DryRun: opt.DryRun, Layers: []GCLayer{}}
	bytes, err := root.layerBytes(ctx, c)
	if err != nil {
		return Collection{}, err
	}
	if err := root.collectRests(ctx, bytes, c); err != nil {
		return Collection{}, err
	}
	if c.Capacity, c.Before, err = r.filled(ctx, root, opt.MaxBytes); err != nil {
		return Collection{}, err
	}
	need := toFree(opt.GCPolicy, c.Capacity, c.Before)
	if opt.DryRun { // the layers are still there
		need -= min(need, c.Freed)
	} else {
		c.Before += c.Freed
	}
	s, err := r.shelf(root, opt.GCPolicy, bytes, crio, c)
	if err == nil {
		err = r.collectImages(ctx, root, opt, s, need, c)
	}
	if err != nil {
		return Collection{}, err
	}
	if c.Freed > 0 && !c.DryRun {
		// It may free behind the scenes what it is told to.
		if err := system.Syncfs(root.imageHome()); err != nil {
			return Collection{}, fmt.Errorf("sync %s: %w", root.imageHome(), err)
		}
	}
	if _, c.After, err = r.filled(ctx, root, opt.MaxBytes); err != nil {
		return Collection{}, err
	}
	root.countCollection(c)
	root.logCollection(c, toFree(opt.GCPolicy, c.Capacity, c.After) > 0)
	return *c, nil
}

// collectImages removes images of the shelf until as many bytes are freed as needed.
func (r *Roots) collectImages(ctx context.Context, root *Root, opt CollectOptions, s *shelf, need uint64, c *Collection) error {
	asked := opt.Users == nil
	var gone []GCImage
	for {
		now := root.now()
		chosen := s.choose(opt.GCPolicy, need, now, r.pullingSince(now, opt.MinAge))
		next := slices.IndexFunc(chosen, func(i GCImage) bool { return i.Goes })
		if !asked && next >= 0 {
			asked = true
			if err := s.ask(ctx, opt.Users); err != nil {
				return err
			}
			continue
		}
		if next < 0 {
			c.Images = append(gone, chosen...)
			return nil
		}
		image := chosen[next]
		at := s.index(image.ID)
		var err error
		if !opt.DryRun {
			err = r.collectImage(ctx, root, s.images[at])
		}
		switch {
		case err == nil:
			gone = append(gone, image)
			c.Freed += image.Frees
			need -= min(need, image.Frees)
			s.take(s.images[at].layers)
			s.images = slices.Delete(s.images, at, at+1)
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrInUse), errors.Is(err, errUsedMeanwhile):
			s.images[at].stays = err.Error()
		default:
			s.images[at].stays = "it cannot be removed: " + err.Error()
			c.Faults = append(c.Faults, fmt.Sprintf("remove image %s, names %q: %v", image.ID, image.Names, err))
		}
	}
}

// collectImage removes an image if nothing has begun to use it since it was chosen.
func (r *Roots) collectImage(ctx context.Context, root *Root, image shelved) error {
	if err := root.usable(ctx); err != nil {
		return err
	}
	if users := r.pullsOf(image.Names); len(users) > 0 {
		return inUseBy(users)
	}
	layers, err := root.chain(image.ID)
	if err != nil {
		return err
	}
	err = withRoom([]*Root{root}, func() error {
		return r.crio.locked(func(state *crioState) error {
			if err := state.unused(image.ID, []*Root{root}); err != nil {
				return err
			}
			lock, err := root.usedLock()
			if err != nil {
				return err
			}
			lock.Lock()
			defer lock.Unlock()
			switch used, err := root.lastUsed(image.ID); {
			case errors.Is(err, ErrNotFound):
				return nil
			case err != nil:
				return err
			case used.After(image.LastUsed):
				return errUsedMeanwhile
			}
			return root.removeUnleaned(state, image.ID)
		})
	})
	if err == nil {
		r.base.deleteLeft(layers)
	}
	return err
}

// crioUse is what CRI-O's own root has of a handler's.
type crioUse struct {
	crioState
	leaned map[string]bool
}

func (r *Roots) crioUses(root *Root) (use crioUse, err error) {
	err = r.crio.locked(func(state *crioState) (err error) {
		use.crioState = *state
		use.leaned, err = state.leanedOn(root)
		return err
	})
	return use, err
}

// markContainers notes the use of the images that containers of the root and of CRI-O's own are made from, leases among
// them.
func (r *Roots) markContainers(ctx context.Context, root *Root, crios []containerRecord) error {
	containers, err := root.store.Containers()
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for i := range containers {
		used[containers[i].ImageID] = true
	}
	for _, c := range crios {
		used[c.ImageID] = true
	}
	for id := range used {
		if _, err := root.resolveID(id); err != nil {
			continue // another root's
		}
		if err := root.markUsed(id); err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
	}
	return ctx.Err()
}

// shelf reads the images of the root, and what keeps each from being collected.
func (r *Roots) shelf(root *Root, policy GCPolicy, bytes map[string]uint64, crio crioUse, c *Collection) (*shelf, error) {
	all, err := root.store.MultiList(cstorage.MultiListOptions{Images: true, Layers: true, Containers: true})
	if err != nil {
		return nil, err
	}
	own := make(map[string][]string)
	for i := range all.Containers {
		if _, isLease := heldBy(all.Containers[i].Names, recordNamePrefix); !isLease {
			own[all.Containers[i].ImageID] = append(own[all.Containers[i].ImageID], "container "+nameOr(all.Containers[i].Names, all.Containers[i].ID)+" of the root")
		}
	}
	t := treeOf(all)
	s := &shelf{bytes: bytes, uses: t.uses(crio.leaned)}
	images, bad := root.readImages(all)
	for _, err := range bad {
		if !errors.Is(err, ErrBadRecord) {
			return nil, err
		}
		c.Faults = append(c.Faults, err.Error())
	}
	for _, image := range images {
		used, err := root.lastUsed(image.ID)
		if err != nil {
			c.Faults = append(c.Faults, fmt.Sprintf("read when image %s, names %q, was last used: %v", image.ID, image.Names, err))
			continue
		}
		layers := t.images[image.ID]
		on := shelved{GCImage: GCImage{ID: image.ID, Names: image.Names, LastUsed: used}, layers: layers}
		for _, layer := range layers {
			on.Bytes += bytes[layer]
		}
		users := slices.Concat(own[image.ID], crio.containersOf(image.ID), r.pullsOf(image.Names))
		switch {
		case image.Leased:
			on.stays = "leased for a volume"
		case len(users) > 0:
			on.stays = inUseBy(users).Error()
		case slices.ContainsFunc(t.tops[image.ID], func(layer string) bool { return crio.leaned[layer] }):
			on.stays = "CRI-O's root needs its layers"
		case policy.Pinned != nil && policy.Pinned(image):
			on.stays = "pinned"
		}
		s.images = append(s.images, on)
	}
	return s, nil
}

// ask has images stay that are used as others know.
func (s *shelf) ask(ctx context.Context, users func(context.Context) (func(string) ([]string, error), error)) error {
	of, err := users(ctx)
	if err != nil {
		return err
	}
	for i := range s.images {
		found, err := of(s.images[i].ID)
		if err != nil {
			return fmt.Errorf("ask who uses image %s: %w", s.images[i].ID, err)
		}
		if len(found) > 0 && s.images[i].stays == "" {
			s.images[i].stays = inUseBy(found).Error()
		}
	}
	return nil
}

// pullingSince returns when the oldest pull has begun that is under way, or has ended within grace, so that the pod that
// waited for it may still be about to use what it pulled before; now where there is none.
func (r *Roots) pullingSince(now time.Time, grace time.Duration) time.Time {
	since := now
	for _, root := range r.inMemory() {
		if began, ok := root.pulls.oldest(now, grace); ok && began.Before(since) {
			since = began
		}
	}
	return since
}

// filled returns how large the file system is that has the root, or how large the images may be together, and how much
// of that is taken. For a root without marks both are 0.
func (r *Roots) filled(ctx context.Context, root *Root, maxBytes int64) (capacity, used uint64, err error) {
	if maxBytes > 0 {
		usage, _, err := root.addUp(ctx, ctx)
		return uint64(maxBytes), usage.Bytes, err
	}
	if r.counted(root) {
		return 0, 0, nil
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(root.imageHome(), &fs); err != nil {
		return 0, 0, fmt.Errorf("look how full %s is: %w", root.imageHome(), err)
	}
	block := uint64(fs.Bsize) //nolint:gosec // never negative
	// As kubelet counts: what is kept for root counts as taken.
	return fs.Blocks * block, (fs.Blocks - min(fs.Blocks, fs.Bavail)) * block, nil
}

// toFree returns how many bytes have to go.
func toFree(policy GCPolicy, capacity, used uint64) uint64 {
	if capacity == 0 || float64(used) <= float64(capacity)*float64(policy.High)/100 {
		return 0
	}
	return used - uint64(float64(capacity)*float64(policy.Low)/100)
}

// layerBytes returns what each layer takes on disk, except those of containers and those being written.
func (r *Root) layerBytes(ctx context.Context, c *Collection) (map[string]uint64, error) {
	usage, measured, err := r.addUp(ctx, ctx)
	if err != nil {
		return nil, err
	}
	for _, bad := range usage.Bad {
		c.Faults = append(c.Faults, bad.Error())
	}
	bytes := make(map[string]uint64, len(measured))
	for id, use := range measured {
		bytes[id] = use.bytes
	}
	return bytes, nil
}

// logCollection writes one line, for those who look closely where it is as it was the last time. above says that the
// root is still above the high mark.
func (r *Root) logCollection(c *Collection, above bool) {
	if c.DryRun {
		return
	}
	gone := 0
	for _, image := range c.Images {
		if image.Goes {
			gone++
		}
	}
	log := r.log.WithFields(logrus.Fields{
		"images": len(c.Images), "images_removed": gone, "layers_removed": len(c.Layers), "freed": units.HumanSize(float64(c.Freed)),
		"capacity": units.HumanSize(float64(c.Capacity)), "before": units.HumanSize(float64(c.Before)), "after": units.HumanSize(float64(c.After)),
	})
	if len(c.Faults) > 0 {
		log = log.WithField("faults", c.Faults)
	}
	trouble := fmt.Sprint(c.Faults, above)
	news := trouble != r.toldTrouble
	r.toldTrouble = trouble
	switch {
	case above && news:
		log.Warn("images collected, and the root is still above gc_high: what is left must stay")
	case len(c.Faults) > 0 && news:
		log.Warn("images collected, except what could not be read or removed")
	case c.Freed > 0 || gone > 0:
		log.Info("images collected")
	default:
		log.Debug("images collected")
	}
}

// Pulled receives when a pull into the root of a handler, or an import, is over, whether or not it went well; several may
// be told of as one. It returns ErrUnknownHandler.
func (r *Roots) Pulled(handler string) (<-chan struct{}, error) {
	for _, h := range r.handlers {
		if h.options.Name == handler {
			return h.pulled, nil
		}
	}
	return nil, fmt.Errorf("%w %q", ErrUnknownHandler, handler)
}

func (r *Root) tellPulled() {
	select {
	case r.pulled <- struct{}{}:
	default:
	}
}
