package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Roots are CRI-O's own root and those of the handlers. Their methods may be called from several goroutines.
//
// A handler root whose disk is not mounted is one of them all the same, and is opened when the disk is there. One whose disk
// does not answer (ErrHung) is passed over likewise: it holds up no other.
type Roots struct {
	base *Root
	crio *crioRoot

	mendMu sync.Mutex

	mu       sync.Mutex
	handlers []*handlerRoot
	closed   bool
	returned chan struct{}
}

// handlerRoot is a handler's root, nil as long as its disk was never there. fault is why it could not be used when last
// looked.
type handlerRoot struct {
	options Options
	root    *Root
	pulse   *pulse
	pulled  chan struct{}
	limits  atomic.Pointer[[]Limit]
	fault   error

	opening sync.Mutex // held while the root is opened
}

// ImageAt is an image and where it is.
type ImageAt struct {
	Image
	// Handlers are the names of the roots that have it.
	Handlers []string `json:"handlers"`
	// Pinned says that it is not for the node's garbage collection: it is leased in one of the roots, or none of them
	// is on the disk of CRI-O's own root, which that collection looks at.
	Pinned bool `json:"pinned"`
}

// OpenRoots opens CRI-O's own root and those of handlers, whose names all differ. The caller closes them.
func OpenRoots(base Options, handlers []Options) (_ *Roots, err error) {
	root, err := Open(base)
	if err != nil {
		return nil, err
	}
	r := &Roots{base: root, crio: &crioRoot{root: root}, returned: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	names, places := []string{base.Name}, []string{filepath.Clean(base.GraphRoot)}
	for _, options := range handlers {
		if slices.Contains(names, options.Name) {
			return nil, fmt.Errorf("open the root of handler %q at %s: there are two handlers of that name", options.Name, options.GraphRoot)
		}
		if slices.Contains(places, filepath.Clean(options.GraphRoot)) {
			return nil, fmt.Errorf("open the root of handler %q at %s: another handler has that root: give each handler a root of its own", options.Name, options.GraphRoot)
		}
		names, places = append(names, options.Name), append(places, filepath.Clean(options.GraphRoot))
		h := &handlerRoot{options: options, pulse: newPulse(options), pulled: make(chan struct{}, 1)}
		r.handlers = append(r.handlers, h)
		if _, err := r.opened(h); err != nil && !IsAway(err) {
			return nil, err
		}
	}
	root.lenders = func() []*Root {
		lenders, _ := r.mounted()
		return lenders
	}
	return r, nil
}

// open opens the handler's root.
func (r *Roots) open(h *handlerRoot) (*Root, error) {
	if err := h.pulse.ask(nil); errors.Is(err, ErrHung) {
		return nil, err
	}
	if CheckRoot(h.options) == nil { // else opening says so
		if err := r.checkRunRoot(h.options, r.inMemory()[1:]); err != nil {
			return nil, fmt.Errorf("open the root of handler %q at %s: %w", h.options.Name, h.options.GraphRoot, err)
		}
	}
	root, err := Open(h.options)
	if err != nil {
		return nil, err
	}
	if h.options.Marker {
		if err := recordRunRoot(h.options); err != nil {
			root.log.WithError(err).Warn("the run root is not kept with the root: a change of it may go unnoticed")
		}
	}
	root.leans, root.pulled, root.pulse, root.limits = r.crio, h.pulled, h.pulse, &h.limits
	return root, nil
}

// Close closes every root.
func (r *Roots) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	roots := r.inMemory()
	errs := make([]error, len(roots))
	var closing sync.WaitGroup
	for i, root := range roots {
		closing.Go(func() { errs[i] = root.Close() })
	}
	closing.Wait()
	return errors.Join(errs...)
}

// Names are the handlers' names, that of CRI-O's own root first.
func (r *Roots) Names() []string {
	names := []string{r.base.name}
	for _, h := range r.handlers {
		names = append(names, h.options.Name)
	}
	return names
}

// Handler returns the root of that name; "" is CRI-O's own. It returns ErrUnknownHandler, ErrUnmounted or ErrHung.
func (r *Roots) Handler(name string) (*Root, error) {
	if name == "" || name == r.base.name {
		return r.base, r.base.pulse.hung()
	}
	for _, h := range r.handlers {
		if h.options.Name == name {
			return r.opened(h)
		}
	}
	return nil, fmt.Errorf("%w %q: there are %s", ErrUnknownHandler, name, strings.Join(r.Names(), ", "))
}

// opened returns the handler's root, ready for use at this moment.
func (r *Roots) opened(h *handlerRoot) (*Root, error) {
	root, err := bounded(h.pulse, func() (*Root, error) {
		root, err := r.openedOnce(h)
		if err == nil {
			if err = root.ready(); err != nil {
				err = fmt.Errorf("use the root of handler %q at %s: %w", h.options.Name, h.options.GraphRoot, err)
			}
		}
		return root, err
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	away := IsAway(h.fault)
	h.fault = err
	if err != nil {
		return nil, err
	}
	if away {
		select {
		case r.returned <- struct{}{}:
		default: // one is there that no one has looked at
		}
	}
	return root, nil
}

// openedOnce returns the handler's root, opened now if it was not before.
func (r *Roots) openedOnce(h *handlerRoot) (*Root, error) {
	// Not under r.mu: a disk that does not answer holds up no other root.
	h.opening.Lock()
	defer h.opening.Unlock()
	r.mu.Lock()
	closed, root := r.closed, h.root
	r.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	if root != nil {
		return root, nil
	}
	root, err := r.open(h)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errors.Join(ErrClosed, root.Close())
	}
	h.root = root
	return root, nil
}

// Returned receives when the disk of a handler's root was found mounted after it was not, or answers again: what a process left in that
// root that was killed, or lost the disk, can be cleared away now.
func (r *Roots) Returned() <-chan struct{} { return r.returned }

// mounted returns the handler roots that can be used, and for each other one why not.
func (r *Roots) mounted() (roots []*Root, errs []error) {
	for _, h := range r.handlers {
		root, err := r.opened(h)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		roots = append(roots, root)
	}
	return roots, errs
}

// answering is mounted of roots that have just been asked whether their disks answer: for what locks CRI-O's root and then
// works in theirs.
func (r *Roots) answering(ctx context.Context) (roots []*Root, errs []error) {
	var asking sync.WaitGroup
	for _, h := range r.handlers {
		asking.Go(func() { _ = h.pulse.ask(ctx.Done()) }) // is kept
	}
	asking.Wait()
	return r.mounted()
}

// all returns the roots that can be used, CRI-O's own first, and for each other one why not.
func (r *Roots) all() ([]*Root, []error) {
	handlers, errs := r.mounted()
	return append([]*Root{r.base}, handlers...), errs
}

// List lists the images of all roots by id, each id once: with the names, digests and handlers of all roots that have
// it. There is an error for each image with a bad record (ErrBadRecord), for each root whose disk is not mounted
// (ErrUnmounted), and for each that could not be read; the images are whole for the others.
func (r *Roots) List(ctx context.Context) ([]ImageAt, []error) {
	roots, errs := r.all()
	at := make(map[string]*ImageAt)
	for _, root := range roots {
		found, err := Bounded(root, func() (imagesOf, error) {
			images, bad := root.Images(ctx)
			return imagesOf{images, bad, r.counted(root)}, nil
		})
		if err != nil {
			errs = append(errs, err)
		}
		errs = append(errs, found.bad...)
		for _, image := range found.images {
			known, ok := at[image.ID]
			if !ok {
				known = &ImageAt{Image: image, Pinned: true}
				at[image.ID] = known
			}
			known.add(root.name, image, found.counted)
		}
	}
	images := make([]ImageAt, 0, len(at))
	for _, image := range at {
		image.Pinned = image.Pinned || image.Leased
		images = append(images, *image)
	}
	slices.SortFunc(images, func(a, b ImageAt) int { return cmp.Compare(a.ID, b.ID) })
	return images, errs
}

// imagesOf are the images of a root.
type imagesOf struct {
	images  []Image
	bad     []error
	counted bool // by the node's garbage collection
}

// add merges in what a root has of the image.
func (i *ImageAt) add(handler string, image Image, counted bool) {
	i.Handlers = append(i.Handlers, handler)
	i.Names = union(i.Names, image.Names)
	i.Digests = union(i.Digests, image.Digests)
	i.Leased = i.Leased || image.Leased
	i.Pinned = i.Pinned && !counted
}

// union returns a with what only b has after it.
func union[T comparable](a, b []T) []T {
	out := slices.Clone(a)
	for _, e := range b {
		if !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	return out
}

// counted tells whether the node's garbage collection counts the root's bytes: whether it is on the disk of CRI-O's
// own root. Where that cannot be told they do not count.
func (r *Roots) counted(root *Root) bool {
	if root == r.base {
		return true
	}
	_, own, err := fileSystemOf(r.base.imageHome())
	if err != nil {
		return false
	}
	_, other, err := fileSystemOf(root.imageHome())
	return err == nil && own == other
}

// Find resolves ref in each root, as Root.Resolve does, and returns one image for each root that has it: a name may
// mean another image in each. Roots whose disk is not mounted have nothing; one whose disk does not answer is an error only
// where no other has the image. With an error, which is about the roots that could not be read or have several images that
// fit, what the others have is returned too.
func (r *Roots) Find(ctx context.Context, ref string) ([]ImageAt, error) {
	roots, unmounted := r.all()
	var found []ImageAt
	var errs []error
	for _, err := range unmounted {
		if !errors.Is(err, ErrUnmounted) {
			errs = append(errs, err)
		}
	}
	for _, root := range roots {
		image, err := Bounded(root, func() (ImageAt, error) {
			image, err := root.Resolve(ctx, ref)
			if err != nil {
				return ImageAt{}, err
			}
			return ImageAt{Image: image, Handlers: []string{root.name}, Pinned: image.Leased || !r.counted(root)}, nil
		})
		switch {
		case err == nil:
			found = append(found, image)
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrUnmounted):
		case errors.Is(err, ErrInvalidReference):
			return nil, err
		default:
			errs = append(errs, err)
		}
	}
	if len(found) > 0 {
		errs = slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, ErrHung) })
	}
	return found, errors.Join(errs...)
}
