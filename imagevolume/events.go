package imagevolume

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// RunPod tells that a sandbox runs: the images that its containers may ask for
// are looked for from now on.
func (m *Manager) RunPod(p Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.addPod(p)
}

// addPod returns the pod, made and looked for if it was not known.
func (m *Manager) addPod(info Pod) *pod {
	if p, ok := m.pods[info.ID]; ok {
		return p
	}
	p := newPod(info)
	m.pods[info.ID] = p
	m.lookAll(p)
	return p
}

// lookAll starts what the pod's annotations ask for and is not looked for yet.
// Faulty ones are told of when their container is created.
func (m *Manager) lookAll(p *pod) {
	for _, v := range request.All(p.Annotations) {
		if p.looks[wantOf(v)] == nil {
			m.look(p, v)
		}
	}
}

// CreateContainer answers the volumes of a container that is being created:
// all of them, or an error in one line, which says what is missing and whether
// to try again. It waits for nothing.
func (m *Manager) CreateContainer(info Pod, c Container) ([]Given, error) {
	volumes, err := request.ForContainer(request.Pod{Namespace: info.Namespace, Name: info.Name}, info.Annotations, c.Name)
	g := &given{containerID: c.ID, natives: c.Natives}
	if err != nil || len(volumes) == 0 && g.empty() {
		return nil, err
	}
	for _, v := range volumes {
		for destination := range c.Mounts {
			if path.Clean(destination) == v.MountPath {
				return nil, fmt.Errorf("image volume %s of container %s of pod %s/%s: something else is mounted there already; "+
					"choose another mountPath", v.MountPath, c.Name, info.Namespace, info.Name)
			}
		}
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.addPod(info)
	m.end(p, c.Name) // that the one before has ended may not have been told
	var missing error
	for _, v := range volumes {
		l := p.looks[wantOf(v)]
		switch {
		case l == nil:
			l = m.look(p, v)
		case l.spent:
			m.refill(l)
		case l.ready() && !m.mounts.Mounted(l.key()):
			m.log.WithField("image", l.refs()).Warn("mount of an image volume is gone; it is made again")
			m.again(l)
		}
		if err := l.answer(); err != nil {
			if l.failed() {
				m.again(l)
			}
			if missing == nil {
				missing = refusal(p.Pod, c.Name, v, err)
			}
			continue
		}
		g.volumes = append(g.volumes, Given{Volume: v, From: l.images, Mount: planMount(v, m.mounts.Path(l.key())), key: l.key()})
	}
	if missing != nil {
		return nil, missing
	}
	p.given[c.Name] = g
	for _, v := range volumes {
		l := p.looks[wantOf(v)]
		l.handOut()
		if l.spent && !v.OfOne() {
			m.refill(l)
		}
	}
	if len(g.natives) > 0 {
		wake(m.settles) // to lease their images
	}
	return g.volumes, nil
}

// refusal is why a container does not get a volume.
func refusal(p Pod, container string, v request.Volume, err error) error {
	text := fmt.Errorf("image volume %s: %w", v.MountPath, err)
	switch {
	case errors.Is(err, ErrMountFailed):
		return fmt.Errorf("%w: %w", ErrMountFailed, text)
	case errors.Is(err, ErrNotAllowed):
		return fmt.Errorf("image volume %s of container %s of pod %s/%s: annotation %s: %w", v.MountPath, container, p.Namespace, p.Name, v.Key, err)
	default:
		return text
	}
}

// EndContainer tells that a container is being stopped, has exited, or is gone;
// it may be told more than once. What its successor would be given is looked at
// now (pull policy Always). As long as a process has the volume it stays held.
func (m *Manager) EndContainer(podID, containerID string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[podID]
	if p == nil {
		return
	}
	for name, g := range p.given {
		if g.containerID == containerID {
			m.end(p, name)
		}
	}
}

// end forgets what the container of that name was given, if anything, looks again
// at what it had with pull policy Always, and has room made for the next.
func (m *Manager) end(p *pod, name string) {
	g, ok := p.given[name]
	if !ok {
		return
	}
	delete(p.given, name)
	wake(m.settles)
	for _, v := range g.volumes {
		always := slices.ContainsFunc(v.Sources, func(s request.Source) bool { return s.PullPolicy == request.Always })
		switch l := p.looks[wantOf(v.Volume)]; {
		case l == nil:
		case l.spent:
			m.refill(l)
		case always:
			m.again(l)
		}
	}
}

// RemovePod tells that a sandbox is gone, with all that was in it.
func (m *Manager) RemovePod(podID string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.pods[podID]; p != nil {
		m.forget(p)
	}
	wake(m.settles)
}

func (m *Manager) forget(p *pod) {
	for _, l := range p.looks {
		l.abandon()
	}
	delete(m.pods, p.ID)
}

// Synchronize tells which sandboxes there are, and which of their containers
// have not exited. What is not listed is forgotten; a volume that a listed
// container has is taken over with the very image it has.
func (m *Manager) Synchronize(pods []Pod, containers map[string][]Container) {
	m.mu.Lock()
	defer m.mu.Unlock()
	listed := map[string]bool{}
	for _, info := range pods {
		listed[info.ID] = true
		p := m.pods[info.ID]
		if p == nil {
			p = newPod(info)
			m.pods[info.ID] = p
		}
		running := map[string]bool{}
		for _, c := range containers[info.ID] {
			running[c.ID] = true
			m.adopt(p, c)
		}
		for name, g := range p.given {
			if !running[g.containerID] {
				m.end(p, name)
			}
		}
		m.lookAll(p)
	}
	for id, p := range m.pods {
		if !listed[id] {
			m.forget(p)
		}
	}
	m.synced = true
	wake(m.settles)
}

// adopt takes over the volumes of a container that was created before this
// process knew of it. Only a mount of our directory says what it has: whatever
// annotations say of that, a pod may have written them. Native volumes are as the
// container runtime says.
func (m *Manager) adopt(p *pod, c Container) {
	if g := p.given[c.Name]; g != nil && g.containerID == c.ID {
		return
	}
	g := &given{containerID: c.ID, natives: c.Natives}
	volumes, err := request.ForContainer(request.Pod{Namespace: p.Namespace, Name: p.Name}, p.Annotations, c.Name)
	if err != nil {
		volumes = nil // it got none
	}
	for _, v := range volumes {
		source := c.Mounts[v.MountPath]
		key := m.mounts.Key(source)
		if key == "" {
			continue
		}
		var from []Image
		for _, id := range identify(key, "", v.Sources, nil) {
			from = append(from, Image{Root: parseKey(key).root, ID: id})
		}
		if p.looks[wantOf(v)] == nil {
			l := m.newLook(p, v)
			l.images, l.adopt = from, key
			switch {
			case v.Scratch != request.ScratchContainer:
				l.mounts = []string{key}
			case !v.OfOne():
				l.room = newRoom()
			}
			m.again(l)
		}
		g.volumes = append(g.volumes, Given{Volume: v, From: from, Mount: planMount(v, source), key: key})
	}
	if !g.empty() {
		p.given[c.Name] = g
	}
}
