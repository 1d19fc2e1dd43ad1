package imagevolume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"
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
	leased, err := m.store.Leases(ctx)
	if err != nil {
		return false, fmt.Errorf("list leases: %w", err)
	}
	mounted, err := m.mounts.Keys()
	if err != nil {
		return false, err
	}

	held := map[string]bool{}
	maps.Copy(held, leased)
	for _, id := range mounted {
		held[id] = true
	}
	var errs []error
	for id := range held {
		_, isNeeded := needed[id]
		switch {
		case isNeeded:
		case used[id]:
			waiting = true
		default:
			errs = append(errs, m.letGo(ctx, id))
		}
	}
	for id, has := range needed {
		if has {
			used[id] = true
		}
	}
	for id := range used {
		if !leased[id] {
			errs = append(errs, m.leaseAgain(ctx, id))
		}
	}
	return waiting, errors.Join(errs...)
}

// needed returns the IDs of the images that pods need, as pod.need has them, and
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

func (m *Manager) letGo(ctx context.Context, id string) error {
	if err := m.mounts.Release(id); err != nil {
		return err // still mounted, so still leased
	}
	if err := m.store.Release(ctx, id); err != nil {
		return fmt.Errorf("release image %s: %w", id, err)
	}
	m.log.WithField("image_id", id).Info("image volume is let go")
	return nil
}

func (m *Manager) leaseAgain(ctx context.Context, id string) error {
	if err := m.store.Lease(ctx, id); err != nil {
		return fmt.Errorf("lease image %s, which is in use, again: %w", id, err)
	}
	m.log.WithField("image_id", id).Warn("lease of an image in use was gone; it is taken again")
	return nil
}
