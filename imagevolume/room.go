package imagevolume

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// A writable volume has room over its images for what is written, which its key
// names beside them. Whose room it is depends on its lifetime:
//
//   - Room for a pod is that of an entry of the pod's annotations. Its name
//     follows from these, so that it is found again by whoever looks; as long as
//     it is there, the volume keeps the images that lie below it.
//   - Room for a container is made beforehand, under a name that was never used,
//     and handed out once. The next is made when the one before was handed out,
//     or, where the entry is for one container, when that has ended.

// newRoom names room that nobody has had.
func newRoom() string {
	name := make([]byte, shortID/2)
	_, _ = rand.Read(name) // never fails
	return hex.EncodeToString(name)
}

// podRoom names the room of a volume in all containers of the pod that have it.
func podRoom(podID string, v request.Volume) string {
	hash := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", podID, v.Key, v.MountPath))
	return hex.EncodeToString(hash[:])[:shortID]
}

// handOut forgets room that a container got.
func (l *look) handOut() {
	if l.scratch == request.ScratchContainer {
		l.mounts, l.room, l.spent = l.mounts[:len(l.mounts)-1], "", true
	}
}

// refill begins to make room for the next container.
func (m *Manager) refill(l *look) {
	if l.room == "" {
		l.room = newRoom()
	}
	m.again(l)
}

// roomOf returns the key of the mount that has the room of the pod; "" where there
// is none.
func (m *Manager) roomOf(l *look) (string, error) {
	if l.scratch != request.ScratchPod {
		return "", nil
	}
	mounted, err := m.mounts.Keys()
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(mounted, func(k string) bool { return parseKey(k).room == l.room && m.mounts.Mounted(k) })
	if i < 0 {
		return "", nil
	}
	return mounted[i], nil
}
