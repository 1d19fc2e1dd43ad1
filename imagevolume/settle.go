package imagevolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	needed, ok := m.needed()
	if !ok {
		return true, nil
	}
	used, err := m.mounts.InUse(ctx)
	if err != nil {
		return false, fmt.Errorf("read which volumes are in use: %w", err)
	}
	leased, errs := m.leased(ctx)
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
	return waiting, errors.Join(errs...)
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

// needed returns the keys of the images that pods need, as pod.need has them, and
// whether the pods and these images are known.
func (m *Manager) needed() (map[string]bool, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	needed, known := map[string]bool{}, m.synced
	for _, p := range m.pods {
		p.need(needed)
		for _, l := range p.looks {
			known = known && !l.unsure
		}
	}
	return needed, known
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

func (m *Manager) logOf(img Image) logrus.FieldLogger {
	return m.log.WithFields(logrus.Fields{"root": img.Root, "image_id": img.ID})
}
