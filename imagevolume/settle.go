package imagevolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
)

const (
	// settleEvery is how often leases and mounts are compared with what is
	// needed when nothing has happened.
	settleEvery = time.Minute
	// settleSoon is how long after a settling that left something in use by
	// a process, or did not come to its end, the next one is. It doubles each
	// time, up to settleEvery.
	settleSoon = 250 * time.Millisecond
)

func (m *Manager) settleLoop(ctx context.Context) {
	delay := settleSoon
	timer := time.NewTimer(settleEvery)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.settles:
			delay = settleSoon
		case <-timer.C:
		}
		waiting, err := m.settle(ctx)
		if err != nil && ctx.Err() == nil {
			m.log.WithError(err).Warn("leases and mounts are not all as needed; they are looked at again")
		}
		next := settleEvery
		if waiting || err != nil {
			next = min(delay, settleEvery)
			delay = min(2*delay, settleEvery)
		}
		timer.Reset(next)
	}
}

// settle lets go what nobody needs, and leases again what is needed and not, or
// not wholly, leased. waiting says that there may soon be more to let go: a process
// still has something that no pod asks for, or it is not known yet what pods do
// ask for.
func (m *Manager) settle(ctx context.Context) (waiting bool, err error) {
	m.doing.Lock()
	defer m.doing.Unlock()

	// Memory comes before the kernel: a container passes from the first to
	// the second, never back.
	needed, native, ok := m.needed()
	if !ok {
		return true, nil
	}
	used, lowers, err := m.mounts.InUse(ctx)
	if err != nil {
		return false, fmt.Errorf("read which volumes are in use: %w", err)
	}
	leased, errs := m.leased(ctx)
	usedNative, err := m.usedNative(ctx, lowers, native, leased)
	if err != nil {
		return false, fmt.Errorf("find the images of volumes in use: %w", err)
	}
	mounted, err := m.mounts.Keys()
	if err != nil {
		return false, err
	}

	held := map[string]bool{}
	maps.Copy(held, leased)
	for _, k := range mounted {
		held[k] = true
	}
	for k := range held {
		_, isNeeded := needed[k]
		switch {
		case isNeeded:
		case used[k]:
			waiting = true
		case native[k], usedNative[k]: // leased without a mount of ours
			waiting = waiting || !native[k]
			errs = append(errs, m.mounts.Release(k))
		default:
			errs = append(errs, m.letGo(ctx, imageOf(k)))
		}
	}
	for k, has := range needed {
		if has {
			used[k] = true
		}
	}
	for k := range used {
		if !leased[k] {
			errs = append(errs, m.leaseAgain(ctx, imageOf(k)))
		}
	}
	maps.Copy(native, usedNative)
	for k := range native {
		if !leased[k] && !used[k] {
			_, was := leased[k]
			errs = append(errs, m.leaseNative(ctx, imageOf(k), was))
		}
	}
	return waiting, errors.Join(errs...)
}

// usedNative returns the keys of the images that processes have as native
// volumes, by what the kernel says. Where several images have the very layers
// that are mounted, those count that a container is known to have; else those
// that are leased; else all.
func (m *Manager) usedNative(ctx context.Context, lowers, native, leased map[string]bool) (map[string]bool, error) {
	store, err := m.stores.Store("")
	if err != nil {
		return nil, err
	}
	images, err := store.MountedAt(ctx, slices.Collect(maps.Keys(lowers)))
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, ids := range images {
		for _, id := range preferred(preferred(ids, native), leased) {
			used[key(Image{ID: id})] = true
		}
	}
	return used, nil
}

// preferred returns the IDs of CRI-O's root whose keys are in keys; all, where none is.
func preferred(ids []string, keys map[string]bool) []string {
	in := slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		_, ok := keys[key(Image{ID: id})]
		return !ok
	})
	if len(in) == 0 {
		return ids
	}
	return in
}

// leased returns what is leased in all roots, whole or not, by key. A root that
// is not there, or cannot be read, is an error and does not hide the others.
func (m *Manager) leased(ctx context.Context) (leased map[string]bool, errs []error) {
	leased = map[string]bool{}
	for _, root := range m.stores.Roots() {
		store, err := m.stores.Store(root)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		whole, err := store.Leases(ctx)
		if err != nil {
			errs = append(errs, fmt.Errorf("list leases: %w", err))
			continue
		}
		for id, isWhole := range whole {
			leased[key(Image{Root: root, ID: id})] = isWhole
		}
	}
	return leased, errs
}

// needed returns the keys of the images that pods need, as pod.need has them, those
// of native volumes, and whether the pods and these images are known.
func (m *Manager) needed() (needed, native map[string]bool, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	needed, native, known = map[string]bool{}, map[string]bool{}, m.synced
	for _, p := range m.pods {
		p.need(needed)
		p.needNative(native)
		for _, l := range p.looks {
			known = known && !l.unsure
		}
	}
	return needed, native, known
}

func (m *Manager) letGo(ctx context.Context, img Image) error {
	store, err := m.stores.Store(img.Root)
	if err != nil {
		return fmt.Errorf("release image %s: %w", img.ID, err) // when the root is back
	}
	if err := m.mounts.Release(key(img)); err != nil {
		return err // still mounted, so still leased
	}
	if err := store.Release(ctx, img.ID); err != nil {
		return fmt.Errorf("release image %s: %w", img.ID, err)
	}
	m.logOf(img).Info("image volume is let go")
	return nil
}

func (m *Manager) leaseAgain(ctx context.Context, img Image) error {
	store, err := m.stores.Store(img.Root)
	if err == nil {
		err = store.Lease(ctx, img.ID)
	}
	if err != nil {
		return fmt.Errorf("lease image %s, which is in use, again: %w", img.ID, err)
	}
	m.logOf(img).Warn("lease of an image in use was gone; it is taken again")
	return nil
}

// leaseNative leases the image of a native volume, for the first time where it was
// not leased before, in whatever part.
func (m *Manager) leaseNative(ctx context.Context, img Image, was bool) error {
	if was {
		return m.leaseAgain(ctx, img)
	}
	store, err := m.stores.Store(img.Root)
	if err == nil {
		err = store.Lease(ctx, img.ID)
	}
	switch {
	case errors.Is(err, ErrNotPresent):
		return nil // an artifact
	case err != nil:
		return fmt.Errorf("lease image %s of a native volume: %w", img.ID, err)
	}
	m.logOf(img).Info("image of a native volume is leased")
	return nil
}

func (m *Manager) logOf(img Image) logrus.FieldLogger {
	return m.log.WithFields(logrus.Fields{"root": img.Root, "image_id": img.ID})
}
