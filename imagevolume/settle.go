package imagevolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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
	told := "" // what the log has of the last one
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
		m.mu.Lock()
		m.settledAt, m.settleErr = time.Now(), err
		m.mu.Unlock()
		text := ""
		if err != nil && ctx.Err() == nil {
			if text = err.Error(); text != told {
				m.log.WithError(err).Warn("leases and mounts are not all as needed; they are looked at again")
			}
		}
		told = text
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
	needed, natives, ok := m.needed()
	if !ok {
		return true, nil
	}
	inUse, lowers, err := m.mounts.InUse(ctx)
	if err != nil {
		return false, fmt.Errorf("read which volumes are in use: %w", err)
	}
	leased, errs := m.leased(ctx)
	usedNatives, err := m.usedNatives(ctx, lowers, natives, leased)
	if err != nil {
		return false, fmt.Errorf("find the images of volumes in use: %w", err)
	}
	mounted, err := m.mounts.Keys()
	if err != nil {
		return false, err
	}

	used := keys{}
	for k := range inUse {
		used.add(k)
	}
	for _, k := range mounted {
		switch {
		case needed.key(k):
		case inUse[k]:
			waiting = true
		default:
			if err := m.unmount(k); err != nil {
				errs = append(errs, err)
				used.add(k) // still mounted, so still leased
			}
		}
	}
	for img := range leased {
		switch {
		case needed.image(img), natives[img]:
		case used.have(img), usedNatives[img]:
			waiting = true
		default:
			errs = append(errs, m.release(ctx, img))
		}
	}
	maps.Copy(used, needed.has)
	missing, err := unleased(used, needed.images, leased)
	errs = append(errs, err)
	for img := range missing {
		errs = append(errs, m.leaseAgain(ctx, img))
	}
	maps.Copy(natives, usedNatives)
	for img := range natives {
		if !leased[img] && !missing[img] {
			_, was := leased[img]
			errs = append(errs, m.leaseNative(ctx, img, was))
		}
	}
	return waiting, errors.Join(errs...)
}

// unleased returns the images of keys that are not, or not wholly, leased. An
// error names keys whose images are neither among the known nor the leased ones.
func unleased(used keys, known, leased map[Image]bool) (map[Image]bool, error) {
	missing := map[Image]bool{}
	var errs []error
	for key, k := range used {
		if k.unknown {
			errs = append(errs, fmt.Errorf("mount %s, which is in use, is of another version of Ocihold; no image is let go", key))
		}
		for _, id := range k.ids {
			found := 0
			add := func(img Image) {
				if img.Root == k.root && strings.HasPrefix(img.ID, id) {
					found++
					if !leased[img] {
						missing[img] = true
					}
				}
			}
			for img := range known {
				add(img)
			}
			for img := range leased {
				add(img)
			}
			switch {
			case found > 0:
			case len(id) == fullID:
				add(Image{Root: k.root, ID: id})
			default:
				errs = append(errs, fmt.Errorf("image %s... of mount %s, which is in use, is not leased and not known", id, key))
			}
		}
	}
	return missing, errors.Join(errs...)
}

// usedNatives returns the images that processes have as native volumes, by what
// the kernel says. Where several images have the very layers that are mounted,
// those count that a container is known to have; else those that are leased;
// else all.
func (m *Manager) usedNatives(ctx context.Context, lowers map[string]bool, natives, leased map[Image]bool) (map[Image]bool, error) {
	store, err := m.stores.Store("")
	if err != nil {
		return nil, err
	}
	images, err := store.MountedAt(ctx, slices.Collect(maps.Keys(lowers)))
	if err != nil {
		return nil, err
	}
	used := map[Image]bool{}
	for _, ids := range images {
		for _, id := range preferred(preferred(ids, natives), leased) {
			used[Image{ID: id}] = true
		}
	}
	return used, nil
}

// preferred returns the IDs of CRI-O's root that are in images; all, where none is.
func preferred(ids []string, images map[Image]bool) []string {
	in := slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		_, ok := images[Image{ID: id}]
		return !ok
	})
	if len(in) == 0 {
		return ids
	}
	return in
}

// leased returns what is leased in all roots, whole or not. A root that is not
// there, or cannot be read, is an error and does not hide the others.
func (m *Manager) leased(ctx context.Context) (leased map[Image]bool, errs []error) {
	leased = map[Image]bool{}
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
			leased[Image{Root: root, ID: id}] = isWhole
		}
	}
	return leased, errs
}

// needed returns what pods need, the images of native volumes, and whether the
// pods and their images are known.
func (m *Manager) needed() (needed needs, natives map[Image]bool, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	needed, natives, known = newNeeds(), map[Image]bool{}, m.synced
	for _, p := range m.pods {
		p.need(needed)
		p.needNative(natives)
		for _, l := range p.looks {
			known = known && !l.unsure
		}
	}
	return needed, natives, known
}

// unmount detaches the host's mount of a key, unless its root is away: then when
// it is back.
func (m *Manager) unmount(key string) error {
	if _, err := m.stores.Store(parseKey(key).root); err != nil {
		return fmt.Errorf("detach mount %s: %w", key, err)
	}
	return m.mounts.Release(key)
}

func (m *Manager) release(ctx context.Context, img Image) error {
	store, err := m.stores.Store(img.Root)
	if err == nil {
		err = store.Release(ctx, img.ID)
	}
	if err != nil {
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
