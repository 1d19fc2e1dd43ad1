package imagevolume_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// writable is a pod with a writable volume at /a, by the key that ends so.
func writable(name, ending, scratch string) imagevolume.Pod {
	return imagevolume.Pod{ID: name, Namespace: "ns", Name: name, Annotations: map[string]string{
		request.Domain + ending: `[{"image": "reg/a:1", "mountPath": "/a", "readOnly": false, "scratch": "` + scratch + `"}]`,
	}}
}

// rooms are the keys of the mounts that have room.
func (w *world) rooms() []string {
	var found []string
	w.mounts.set(func() {
		for _, key := range slices.Sorted(maps.Keys(w.mounts.mounted)) {
			if strings.Contains(key, "-") {
				found = append(found, key)
			}
		}
	})
	return found
}

// given is the key of the one volume that a new container gets.
func (w *world) given(t *testing.T, p imagevolume.Pod, c imagevolume.Container) string {
	t.Helper()
	volumes, err := w.CreateContainer(p, c)
	require.NoError(t, err)
	require.Len(t, volumes, 1)
	assert.Equal(t, []string{"bind", "rprivate", "rw", "nosuid", "nodev", "noexec"}, volumes[0].Mount.Options)
	key := w.mounts.Key(volumes[0].Mount.Source)
	assert.Regexp(t, `^a{16}~[0-9a-f]{16}-[0-9a-f]{16}$`, key)
	assert.True(t, w.mounts.Mounted(key))
	return key
}

func another(name string) imagevolume.Container {
	return imagevolume.Container{ID: name + "-id-2", Name: name}
}

func TestRoomForContainersOfAList(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := writable("p", "/pod", "container")
		w.RunPod(p)
		w.wait()
		require.Len(t, w.rooms(), 1, "made beforehand")
		one := w.given(t, p, container("c"))
		w.wait() // without, it may be too early
		two := w.given(t, p, container("d"))
		w.wait()
		assert.NotEqual(t, one, two, "no room twice")
		require.Len(t, w.rooms(), 3, "two have some, and some for the next")

		w.EndContainer("p", "c-id")
		w.wait()
		assert.NotContains(t, w.rooms(), one)
		assert.Contains(t, w.rooms(), two)
		assert.NotEqual(t, one, w.given(t, p, another("c")))
		w.RemovePod("p")
		w.wait()
		assert.Empty(t, w.mounts.mounted)
		assert.Empty(t, w.store.leases())
	}))
}

func TestRoomForOneContainer(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := writable("p", "/container.c", "container")
		w.RunPod(p)
		w.wait()
		one := w.given(t, p, container("c"))
		w.wait()
		assert.Equal(t, []string{one}, w.rooms(), "the next has time until this one ends")
		w.mounts.set(func() { w.mounts.used = map[string]bool{one: true} })
		w.EndContainer("p", "c-id")
		w.wait()
		require.Len(t, w.rooms(), 2)
		assert.Contains(t, w.rooms(), one, "a process has it")
		two := w.given(t, p, another("c"))
		assert.NotEqual(t, one, two)
		w.mounts.set(func() { w.mounts.used = nil })

		// Nobody has told that it has ended.
		_, err := w.CreateContainer(p, container("c"))
		require.ErrorContains(t, err, "will be tried again")
		w.wait()
		three := w.given(t, p, container("c"))
		w.wait()
		assert.NotContains(t, []string{one, two}, three)
		assert.Equal(t, []string{three}, w.rooms())
	}))
}

func TestRoomForAPod(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p, q := writable("p", "/pod", "pod"), writable("q", "/pod", "pod")
		w.RunPod(p)
		w.RunPod(q)
		w.wait()
		one := w.given(t, p, container("c"))
		assert.Equal(t, one, w.given(t, p, container("d")), "shared")
		assert.NotEqual(t, one, w.given(t, q, container("c")), "of the pod's own")
		w.EndContainer("p", "c-id")
		w.EndContainer("p", "d-id")
		w.wait()
		assert.Equal(t, one, w.given(t, p, another("c")), "kept")
		w.RemovePod("p")
		w.wait()
		assert.NotContains(t, w.rooms(), one)
		assert.Len(t, w.rooms(), 1)
	}))
}

// What a pod has written lies over the image that it was written over.
func TestRoomForAPodKeepsItsImage(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := writable("p", "/pod", "pod")
		w.RunPod(p)
		w.wait()
		one := w.given(t, p, container("c"))
		w.store.set(func() { w.store.registry["reg/a:1"], w.store.present["reg/moved"] = id("b"), id("a") })
		w.store.set(func() { w.store.present["reg/a:1"] = id("b") })
		w.EndContainer("p", "c-id")
		w.wait()

		// A new process, as no container runs.
		w.stop()
		w.start(t)
		w.Synchronize([]imagevolume.Pod{p}, nil)
		w.wait()
		given, err := w.CreateContainer(p, another("c"))
		require.NoError(t, err)
		assert.Equal(t, "/mounts/"+one, given[0].Mount.Source)
		assert.Equal(t, id("a"), given[0].From[0].ID)
		assert.Equal(t, []string{one}, w.rooms())
		assert.Equal(t, map[string]bool{id("a"): true}, w.store.leases())
	}))
}

func TestRoomIsTakenOver(t *testing.T) {
	for _, tc := range []struct {
		ending, scratch string
		spare           int // what there is room for beside the container
		same            bool
	}{
		{"/container.c", "container", 0, false},
		{"/pod", "container", 1, false},
		{"/container.c", "pod", 0, true},
	} {
		t.Run(tc.ending+" "+tc.scratch, func(t *testing.T) {
			inWorld(t, synchronized(func(t *testing.T, w *world) {
				p := writable("p", tc.ending, tc.scratch)
				w.RunPod(p)
				w.wait()
				one := w.given(t, p, container("c"))
				w.wait()
				spare := w.rooms()

				w.stop()
				w.start(t)
				c := container("c")
				c.Mounts = map[string]string{"/a": "/mounts/" + one}
				w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {c}})
				w.wait()
				assert.Contains(t, w.rooms(), one)
				assert.Len(t, w.rooms(), 1+tc.spare)
				if tc.spare > 0 {
					assert.NotEqual(t, spare, w.rooms(), "nobody knows whether it was handed out")
				}
				status := w.Volumes()
				require.Len(t, status, 1)
				assert.Equal(t, id("a"), status[0].ImageID)
				assert.Equal(t, request.Scratch(tc.scratch), status[0].Scratch)
				assert.Equal(t, int64(request.DefaultScratchSize), status[0].ScratchSize)

				w.EndContainer("p", "c-id")
				w.wait()
				given, err := w.CreateContainer(p, another("c"))
				require.NoError(t, err)
				assert.Equal(t, tc.same, given[0].Mount.Source == "/mounts/"+one)
				w.RemovePod("p")
				w.wait()
				assert.Empty(t, w.mounts.mounted)
				assert.Empty(t, w.store.leases())
			}))
		})
	}
}

func TestNoRoom(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.mounts.set(func() { w.mounts.noRoom = errors.New("the disk is full") })
		p := writable("p", "/pod", "container")
		w.RunPod(p)
		w.wait()
		_, err := w.CreateContainer(p, container("c"))
		require.EqualError(t, err, "ImageVolumeMountFailed: image volume /a: mount image reg/a:1: the disk is full; will be tried again")
		w.wait()
		w.mounts.set(func() { w.mounts.noRoom = nil })
		_, err = w.CreateContainer(p, container("c"))
		require.Error(t, err, "the answer of the round before")
		w.wait()
		w.given(t, p, container("c"))
	}))
}

// One that is refused for another volume has not used up the room of this one.
func TestRefusedContainerTakesNoRoom(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := writable("p", "/container.c", "container")
		key := request.Domain + "/container.c"
		p.Annotations[key] = strings.TrimSuffix(p.Annotations[key], "]") + `, {"image": "reg/b:1", "mountPath": "/b"}]`
		w.store.set(func() { delete(w.store.registry, "reg/b:1") })
		w.RunPod(p)
		w.wait()
		before := w.rooms()
		require.Len(t, before, 1)
		_, err := w.CreateContainer(p, container("c"))
		require.ErrorContains(t, err, "manifest unknown")
		w.wait()
		assert.Equal(t, before, w.rooms())
	}))
}

// The container ends while what it has is being taken over.
func TestRoomIsNotMistaken(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := writable("p", "/container.c", "container")
		w.RunPod(p)
		w.wait()
		one := w.given(t, p, container("c"))
		w.stop()
		w.mounts.set(func() {
			delete(w.mounts.mounted, id("a"))
			w.mounts.onEnsure = func() { w.EndContainer("p", "c-id") }
		})
		w.start(t)
		c := container("c")
		c.Mounts = map[string]string{"/a": "/mounts/" + one}
		w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {c}})
		w.wait()
		_, err := w.CreateContainer(p, another("c"))
		require.ErrorContains(t, err, "will be tried again")
		w.wait()
		assert.NotEqual(t, one, w.given(t, p, another("c")))
	}))
}
