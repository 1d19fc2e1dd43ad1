package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	cstorage "go.podman.io/storage"
)

// Remove removes the images that ref means from every root that has them, with all their names. What else runs or
// holds one of them is asked of inUse, if that is not nil: it returns who uses the image of that id. It is called
// before anything is locked.
//
// It returns ErrNotFound where no root has such an image, and ErrInUse, saying who uses it, where the image is leased
// or being pulled in any root, or any container is made from it; then nothing is removed. It returns ErrDiskFull where a
// root's file system is too full to write down what is to be removed; handlers' roots keep a reserve for that. Only where
// another program makes a container between the removal from CRI-O's own root and that from the others has CRI-O's lost
// a copy that nothing used by then.
//
// Layers that CRI-O's own root leans on stay until it does so no longer; those of the image that CRI-O left in its own
// root, and that nothing uses, go. Roots whose disk is not mounted are passed over.
func (r *Roots) Remove(ctx context.Context, ref string, inUse func(imageID string) (users []string, err error)) error {
	return r.RemoveFrom(ctx, "", ref, inUse)
}

// RemoveFrom is Remove of what ref means in the root of one handler, and from that root only; "" stands for all. An image
// that is in use in another root is refused, too.
func (r *Roots) RemoveFrom(ctx context.Context, handler, ref string, inUse func(imageID string) (users []string, err error)) error {
	ids, err := r.removable(ctx, handler, ref, inUse)
	for i := 0; err == nil && i < len(ids); i++ {
		if err = r.remove(ctx, handler, ids[i]); err != nil {
			err = fmt.Errorf("image %s: %w", ids[i], err)
		}
	}
	if errors.Is(err, ErrInUse) {
		r.countRefused(ctx, handler, ref)
	}
	if err != nil {
		return fmt.Errorf("remove %q: %w", ref, err)
	}
	return nil
}

// FreeKept removes the layers of handler roots that are only there because CRI-O's own root leaned on them when their
// images were removed, and no longer does.
func (r *Roots) FreeKept(ctx context.Context) error {
	handlers, _ := r.answering(ctx)
	var errs []error
	for _, root := range handlers {
		err := root.Bounded(func() error {
			return withRoom([]*Root{root}, func() error { return root.guarded(root.freeKept) })
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("free layers that nothing leans on in the root of handler %q: %w", root.name, err))
		}
	}
	return errors.Join(errs...)
}

// removable returns the ids of the images that ref means, unless one is in use.
func (r *Roots) removable(ctx context.Context, handler, ref string, inUse func(string) ([]string, error)) ([]string, error) {
	found, err := r.Find(ctx, ref)
	if err != nil {
		return nil, err
	}
	if handler != "" {
		if _, err := r.Handler(handler); err != nil {
			return nil, err
		}
		found = slices.DeleteFunc(found, func(image ImageAt) bool { return image.Handlers[0] != handler })
	}
	if len(found) == 0 {
		return nil, ErrNotFound
	}
	var ids, users []string
	for _, image := range found {
		ids = union(ids, []string{image.ID})
	}
	for _, id := range ids {
		copies, err := r.Find(ctx, id)
		if err != nil {
			return nil, err
		}
		for _, image := range copies {
			if image.Leased {
				users = append(users, fmt.Sprintf("a lease in the root of handler %q", image.Handlers[0]))
			}
			users = append(users, r.pullsOf(image.Names)...)
		}
		if inUse != nil {
			others, err := inUse(id)
			if err != nil {
				return nil, fmt.Errorf("ask who uses image %s: %w", id, err)
			}
			users = append(users, others...)
		}
	}
	if len(users) > 0 {
		return nil, inUseBy(users)
	}
	handlers, _ := r.answering(ctx)
	return ids, r.crio.locked(func(state *crioState) error {
		for _, id := range ids {
			if err := state.unused(id, handlers); err != nil {
				return err
			}
		}
		return nil
	})
}

func inUseBy(users []string) error {
	slices.Sort(users)
	return fmt.Errorf("%w by %s", ErrInUse, strings.Join(slices.Compact(users), ", "))
}

// inMemory are the roots that are open, whether or not their disks answer.
func (r *Roots) inMemory() []*Root {
	r.mu.Lock()
	defer r.mu.Unlock()
	roots := []*Root{r.base}
	for _, h := range r.handlers {
		if h.root != nil {
			roots = append(roots, h.root)
		}
	}
	return roots
}

// pullsOf names the pulls under way of what has one of these names.
func (r *Roots) pullsOf(names []string) (users []string) {
	for _, root := range r.inMemory() {
		for _, name := range names {
			if root.pulls.transferring(name) {
				users = append(users, fmt.Sprintf("a pull of %s into the root of handler %q", name, root.name))
			}
		}
	}
	return users
}

// containersOf names the containers of CRI-O's root that are made from the image, whichever root has that, and leases.
func (s *crioState) containersOf(imageID string) (users []string) {
	for _, c := range s.containers {
		if c.ImageID == imageID {
			users = append(users, describe(c.Names, c.ID))
		}
	}
	return users
}

// describe says what a container record is.
func describe(names []string, id string) string {
	if _, ok := heldBy(names, recordNamePrefix); ok {
		return "a lease"
	}
	return "container " + nameOr(names, id)
}

// remove removes the image from CRI-O's own root and then, in one hold of the locks of that, from the handler roots.
// CRI-O's comes first: its copy may lean on theirs. Nothing is removed before all roots were asked who uses it.
func (r *Roots) remove(ctx context.Context, handler, id string) error {
	if err := r.base.usable(ctx); err != nil {
		return err
	}
	handlers, _ := r.answering(ctx)
	chosen := slices.Clone(handlers)
	// None of ours is leased meanwhile.
	for _, root := range append([]*Root{r.base}, handlers...) {
		root.leaseMu.Lock()
		defer root.leaseMu.Unlock()
	}
	if handler == "" || handler == r.base.name {
		if err := r.crio.locked(func(state *crioState) error { return state.unused(id, handlers) }); err != nil {
			return err
		}
		// It looks itself for containers of CRI-O's root, under the locks of that.
		if err := withRoom([]*Root{r.base}, func() error { return r.base.deleteImage(id) }); err != nil {
			return fmt.Errorf("root of handler %q: %w", r.base.name, err)
		}
	}
	if handler != "" {
		chosen = slices.DeleteFunc(chosen, func(root *Root) bool { return root.name != handler })
	}
	if len(chosen) == 0 { // only from CRI-O's own, which may have leaned on others until now
		if err := r.FreeKept(ctx); err != nil {
			r.base.log.WithField("id", id).WithError(err).Warn("layers that nothing needs are not freed yet")
		}
		return nil
	}
	var layers []string
	for _, root := range chosen {
		chain, err := root.chain(id)
		if err != nil {
			return fmt.Errorf("root of handler %q: %w", root.name, err)
		}
		layers = union(layers, chain)
	}
	err := withRoom(chosen, func() error {
		return r.crio.locked(func(state *crioState) error {
			if err := state.unused(id, handlers); err != nil {
				return err
			}
			for _, root := range chosen {
				if err := root.removeUnleaned(state, id); err != nil {
					return fmt.Errorf("root of handler %q: %w", root.name, err)
				}
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	r.base.deleteLeft(layers)
	return nil
}

// chain lists the layers of the image in the root, topmost first: none where the image is not there, and not those below
// one that is missing, of a bad record, which may go.
func (r *Root) chain(imageID string) (ids []string, err error) {
	record, err := r.resolveID(imageID)
	if errors.Is(err, ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for id := record.TopLayer; id != ""; {
		layer, err := r.store.Layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			break
		}
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
		id = layer.Parent
	}
	return ids, nil
}

// deleteLeft removes those of the layers, children before parents, that nothing in CRI-O's own root uses. While a
// container ran from a handler's root on a copy of a layer that CRI-O's root has too, CRI-O took its own as the parent,
// and left it behind when the last of its own images on it went.
func (r *Root) deleteLeft(layers []string) {
	if !r.pulls.idle() {
		return // it may count on one
	}
	for _, id := range layers {
		if _, err := r.store.Layer(id); errors.Is(err, cstorage.ErrLayerUnknown) {
			continue
		}
		if _, err := r.deleteUnused(id); err != nil {
			r.log.WithField("layer", id).WithError(err).Warn("a layer that nothing uses is left in CRI-O's root")
		}
	}
}

// removeUnleaned removes the image from a handler's root, and all layers but those that CRI-O's root leans on.
func (r *Root) removeUnleaned(state *crioState, imageID string) error {
	leaned, err := state.leanedOn(r)
	if err != nil {
		return err
	}
	if err := r.keepLeaned(imageID, leaned); err != nil {
		return err
	}
	if err := r.deleteImage(imageID); err != nil {
		return err
	}
	return r.freeKept(leaned)
}

// unused returns ErrInUse where CRI-O's root or one of handlers has a container of the image, or a lease of it.
func (s *crioState) unused(imageID string, handlers []*Root) error {
	users := s.containersOf(imageID)
	for _, root := range handlers {
		containers, err := root.store.Containers()
		if err != nil {
			return fmt.Errorf("list the containers in the root of handler %q: %w", root.name, err)
		}
		for i := range containers {
			if containers[i].ImageID == imageID {
				users = append(users, fmt.Sprintf("%s in the root of handler %q", describe(containers[i].Names, containers[i].ID), root.name))
			}
		}
	}
	if len(users) > 0 {
		return inUseBy(users)
	}
	return nil
}

// keepLeaned keeps those of the image's layers that are leaned on.
func (r *Root) keepLeaned(imageID string, leaned map[string]bool) error {
	layers, err := r.chain(imageID)
	if err != nil {
		return err
	}
	for _, id := range layers {
		if leaned[id] {
			return r.keep(id) // and with it all below
		}
	}
	return nil
}

// deleteImage removes the image, if it is there, and those of its layers that nothing else in the root uses.
func (r *Root) deleteImage(id string) error {
	if _, err := r.resolveID(id); errors.Is(err, ErrNotFound) {
		return nil
	}
	_, err := r.store.DeleteImage(id, true)
	switch {
	case errors.Is(err, cstorage.ErrNotAnImage):
		return nil
	case errors.Is(err, cstorage.ErrImageUsedByContainer):
		return fmt.Errorf("%w: %w", ErrInUse, err)
	case errors.Is(err, cstorage.ErrLayerUnknown):
		// The image leaned on layers that are not in this root.
		if _, lookErr := r.resolveID(id); errors.Is(lookErr, ErrNotFound) {
			return nil
		}
	}
	return err
}
