package imagevolume

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// Status is a volume as somebody who looks on sees it.
type Status struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	MountPath string `json:"mountPath"`
	VolumeImage
	// Images are those of a volume of several; then VolumeImage is empty.
	Images   []VolumeImage `json:"images,omitempty"`
	HostPath string        `json:"hostPath"`
	// Scratch says how long what is written stays, ScratchSize how much that can
	// be, in bytes; both are empty for a volume that is read-only.
	Scratch     request.Scratch `json:"scratch,omitempty"`
	ScratchSize int64           `json:"scratchSize,omitempty"`
	// Native says that the container runtime mounted it itself. The Manager
	// knows of its image no more than the ID, which is Image then, too.
	Native bool `json:"native,omitempty"`
	// Handler is that of the root the images are in; "" is CRI-O's own.
	Handler string `json:"handler,omitempty"`
}

// VolumeImage is an image, or part of one, in a volume.
type VolumeImage struct {
	Image      string   `json:"image,omitempty"`
	ImageID    string   `json:"imageID,omitempty"`
	Digest     string   `json:"digest,omitempty"`
	MediaTypes []string `json:"mediaTypes,omitempty"`
	SubPath    string   `json:"subPath,omitempty"`
}

// Shown are the images of the volume, as far as it is known which they are: the
// first alone where it is one, else all.
func (g Given) Shown() (VolumeImage, []VolumeImage) {
	images := make([]VolumeImage, len(g.Sources))
	for i, s := range g.Sources {
		images[i] = VolumeImage{Image: s.Image, MediaTypes: s.MediaTypes, SubPath: s.SubPath}
		if g.From != nil {
			images[i].ImageID, images[i].Digest = g.From[i].ID, g.From[i].Digest
		}
	}
	if len(images) == 1 {
		return images[0], nil
	}
	return VolumeImage{}, images
}

// fits reports whether the key is of the images that the look has.
func (l *look) fits(key string) bool {
	ids := make([]string, len(l.images))
	for i, img := range l.images {
		ids[i] = img.ID
	}
	return slices.Equal(identify(key, l.idMap, l.sources, ids), ids) && len(ids) > 0
}

// Volumes lists the volumes given to containers, in the order of their names.
func (m *Manager) Volumes() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []Status{}
	for _, p := range m.pods {
		for name, g := range p.given {
			for _, v := range g.volumes {
				if l := p.looks[wantOf(v.Volume)]; l != nil && l.fits(v.key) {
					v.From = l.images // knows those of one taken over, too
				}
				one, several := v.Shown()
				all = append(all, Status{
					Namespace: p.Namespace, Pod: p.Name, Container: name, MountPath: v.MountPath,
					VolumeImage: one, Images: several, HostPath: v.Mount.Source, Handler: parseKey(v.key).root,
					Scratch: v.Scratch, ScratchSize: v.ScratchSize,
				})
			}
			for _, v := range g.natives {
				all = append(all, Status{
					Namespace: p.Namespace, Pod: p.Name, Container: name, MountPath: v.MountPath,
					VolumeImage: VolumeImage{Image: v.ImageID, ImageID: v.ImageID}, HostPath: v.HostPath, Native: true,
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
func (m *Manager) Users(ctx context.Context) (func(imageID string) []string, error) {
	pods := m.podUsers() // before the kernel is asked, as in settle
	inUse, _, err := m.mounts.InUse(ctx)
	if err != nil {
		return nil, fmt.Errorf("read which volumes are in use: %w", err)
	}
	used := keys{}
	for k := range inUse {
		used.add(k)
	}
	return func(imageID string) []string {
		var users []string
		for _, p := range pods {
			users = append(users, p.of(imageID)...)
		}
		if users == nil && used.haveID(imageID) {
			users = []string{"a process that has it as a volume"}
		}
		return users
	}, nil
}

// podUser is a pod that has volumes or is about to have them.
type podUser struct {
	name  string
	given map[string]keyed // by what a container was given
	needs keys
}

// of says how the pod uses an image.
func (p podUser) of(imageID string) []string {
	var users []string
	for text, k := range p.given {
		if k.hasID(imageID) {
			users = append(users, text)
		}
	}
	if users == nil && p.needs.haveID(imageID) {
		users = []string{"pod " + p.name + ", which asks for it as a volume"}
	}
	slices.Sort(users)
	return users
}

func (m *Manager) podUsers() []podUser {
	m.mu.Lock()
	defer m.mu.Unlock()
	var users []podUser
	for _, p := range m.pods {
		needed := newNeeds()
		p.need(needed)
		maps.Copy(needed.has, needed.maybe)
		user := podUser{name: p.Namespace + "/" + p.Name, given: map[string]keyed{}, needs: needed.has}
		for name, g := range p.given {
			for _, v := range g.volumes {
				user.given[fmt.Sprintf("volume %s (%s/%s)", v.MountPath, user.name, name)] = parseKey(v.key)
			}
		}
		users = append(users, user)
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

// Settled tells when leases and mounts were last compared with what is needed,
// zero for never, and what could not be done then.
func (m *Manager) Settled() (time.Time, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.settledAt, m.settleErr
}
