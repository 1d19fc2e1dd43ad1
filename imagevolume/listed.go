package imagevolume

import (
	"context"
	"fmt"
	"maps"
)

// CompareListed forgets sandboxes that the runtime has no more and of whose end it
// told nothing: CRI-O keeps for a while what was made for a caller who did not wait,
// in no list, and then removes it silently. list answers the IDs of all sandboxes.
//
// One that is being made is told of before it is listed: forgotten is what two calls
// in a row do not find. Nothing is lost by that where a process still has a volume, or
// a container is created there after all.
func (m *Manager) CompareListed(ctx context.Context, list func(context.Context) (map[string]bool, error)) error {
	m.mu.Lock()
	known := maps.Clone(m.pods)
	m.mu.Unlock()
	listed, err := list(ctx)
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, p := range known {
		switch {
		case listed[id]:
			p.unlisted = false
		case !p.unlisted:
			p.unlisted = true
		case m.pods[id] == p:
			m.log.WithField("pod", p.Namespace+"/"+p.Name).Info("sandbox is gone, which the runtime did not tell")
			m.forget(p)
			wake(m.settles)
		}
	}
	return nil
}
