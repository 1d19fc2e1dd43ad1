package imagevolume

import (
	"cmp"
	"context"
	"fmt"
	"slices"
)

// Status is a volume as somebody who looks on sees it.
type Status struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	MountPath string `json:"mountPath"`
	Image     string `json:"image"`
	ImageID   string `json:"imageID"`
	Digest    string `json:"digest"`
	HostPath  string `json:"hostPath"`
	// Native says that the container runtime mounted it itself. Then Image is
	// the ID, and Digest is not known.
	Native bool `json:"native,omitempty"`
	// Handler is that of the root the image is in; "" is CRI-O's own.
	Handler string `json:"handler,omitempty"`
}

// Volumes lists the volumes given to containers, in the order of their names.
func (m *Manager) Volumes() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []Status{}
	for _, p := range m.pods {
		for name, g := range p.given {
			for _, v := range g.volumes {
				if l := p.looks[wantOf(v.Volume)]; l != nil && key(l.image) == key(v.From) {
					v.From = l.image // knows the digest of one taken over, too
				}
				all = append(all, Status{
					Namespace: p.Namespace, Pod: p.Name, Container: name, MountPath: v.MountPath,
					Image: v.Image, ImageID: v.From.ID, Digest: v.From.Digest, HostPath: v.Mount.Source,
					Handler: v.From.Root,
				})
			}
			for _, v := range g.natives {
				all = append(all, Status{
					Namespace: p.Namespace, Pod: p.Name, Container: name, MountPath: v.MountPath,
					Image: v.ImageID, ImageID: v.ImageID, HostPath: v.HostPath, Native: true,
				})
			}
		}
	}
	slices.SortFunc(all, func(a, b Status) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Container, b.Container), cmp.Compare(a.MountPath, b.MountPath))
	})
	return all
}

// InUse returns the IDs of the images that pods have as volumes or are about to
// have, in any root: as the Manager knows, and as the kernel says of processes.
// Those of native volumes are not among them.
func (m *Manager) InUse(ctx context.Context) (map[string]bool, error) {
	needed, _, _ := m.needed() // before the kernel is asked, as in settle
	used, _, err := m.mounts.InUse(ctx)
	if err != nil {
		return nil, fmt.Errorf("read which volumes are in use: %w", err)
	}
	ids := map[string]bool{}
	for k := range needed {
		ids[imageOf(k).ID] = true
	}
	for k := range used {
		ids[imageOf(k).ID] = true
	}
	return ids, nil
}

// Synchronized reports whether the container runtime has told which pods there
// are.
func (m *Manager) Synchronized() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.synced
}
