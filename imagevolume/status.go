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

// Users says who has each image as a volume, in any root, by image ID: the
// containers that were given it, pods that are about to have it, and processes
// that the kernel knows to have it and the Manager knows nothing of. Native
// volumes are not among them: the container runtime tells of these.
func (m *Manager) Users(ctx context.Context) (map[string][]string, error) {
	users := m.knownUsers() // before the kernel is asked, as in settle
	used, _, err := m.mounts.InUse(ctx)
	if err != nil {
		return nil, fmt.Errorf("read which volumes are in use: %w", err)
	}
	for k := range used {
		if id := imageOf(k).ID; users[id] == nil {
			users[id] = []string{"a process that has it as a volume"}
		}
	}
	return users, nil
}

// knownUsers are the users that the Manager knows.
func (m *Manager) knownUsers() map[string][]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	users := map[string][]string{}
	for _, p := range m.pods {
		needed := map[string]bool{}
		p.need(needed)
		for name, g := range p.given {
			for _, v := range g.volumes {
				users[v.From.ID] = append(users[v.From.ID], fmt.Sprintf("volume %s (%s/%s/%s)", v.MountPath, p.Namespace, p.Name, name))
				delete(needed, key(v.From))
			}
		}
		for k := range needed {
			id := imageOf(k).ID
			users[id] = append(users[id], fmt.Sprintf("pod %s/%s, which asks for it as a volume", p.Namespace, p.Name))
		}
	}
	return users
}

// Synchronized reports whether the container runtime has told which pods there
// are.
func (m *Manager) Synchronized() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.synced
}
