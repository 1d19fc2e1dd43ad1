package imagevolume_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume"
)

func TestNativeVolume(t *testing.T) {
	// p has images a and b, by one name and by none, as native volumes.
	p := imagevolume.Pod{ID: "p", Namespace: "ns", Name: "p"}
	c := imagevolume.Container{ID: "1", Name: "c", Natives: []imagevolume.Native{
		{MountPath: "/n", HostPath: "/layers/a/merged", ImageID: id("a")},
		{MountPath: "/artifact", HostPath: "/artifacts/f", ImageID: id("f")},
	}}
	present := func(w *world) {
		w.store.set(func() {
			w.store.present = map[string]string{"reg/a:1": id("a"), "reg/b:1": id("b"), "reg/twin": id("d")}
			w.store.layers = map[string][]string{"/layers/a/merged": {id("a"), id("d")}, "/layers/b/merged": {id("b")}}
		})
	}
	create := func(t *testing.T, w *world) {
		t.Helper()
		present(w)
		given, err := w.CreateContainer(p, c)
		require.NoError(t, err)
		assert.Empty(t, given)
		w.wait()
		require.Equal(t, []string{"lease a"}, w.store.calls())
	}
	sees := func(w *world, lowers ...string) {
		w.mounts.set(func() {
			w.mounts.lowers = map[string]bool{"/elsewhere/a/merged": true}
			for _, l := range lowers {
				w.mounts.lowers[l] = true
			}
		})
	}
	listed := func(w *world) {
		w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {c}})
		w.wait()
	}
	for name, f := range map[string]func(t *testing.T, w *world){
		"from creation to end": func(t *testing.T, w *world) {
			create(t, w)
			listed := w.Volumes()
			require.Len(t, listed, 2)
			assert.Equal(t, imagevolume.Status{
				Namespace: "ns", Pod: "p", Container: "c", MountPath: "/n",
				VolumeImage: imagevolume.VolumeImage{Image: id("a"), ImageID: id("a")}, HostPath: "/layers/a/merged", Native: true,
			}, listed[1])
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
			w.EndContainer("p", "1")
			w.wait()
			assert.Equal(t, []string{"release a"}, w.store.calls())
		},
		"a process has it after the pod is gone": func(t *testing.T, w *world) {
			create(t, w)
			sees(w, "/layers/a/merged")
			w.RemovePod("p")
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls(), "neither released, nor its twin leased")
			sees(w)
			time.Sleep(2 * time.Minute)
			assert.Equal(t, []string{"release a"}, w.store.calls())
		},
		"a lease that is gone is taken again": func(t *testing.T, w *world) {
			create(t, w)
			for range 2 {
				w.store.set(func() { w.store.leased[id("a")] = false })
				time.Sleep(2 * time.Minute)
				assert.Equal(t, []string{"lease a"}, w.store.calls())
				sees(w, "/layers/a/merged") // and then memory does not know
				w.RemovePod("p")
				w.wait()
			}
		},
		"one that nobody told of": func(t *testing.T, w *world) {
			present(w)
			sees(w, "/layers/b/merged")
			time.Sleep(2 * time.Minute)
			assert.Equal(t, []string{"lease b"}, w.store.calls())
		},
		"one of images with the same layers": func(t *testing.T, w *world) {
			present(w)
			sees(w, "/layers/a/merged")
			time.Sleep(2 * time.Minute)
			assert.ElementsMatch(t, []string{"lease a", "lease d"}, w.store.calls(), "it is not known which")
			listed(w)
			assert.Equal(t, []string{"release d"}, w.store.calls())
		},
		"taken over and ended unseen": func(t *testing.T, w *world) {
			present(w)
			for range 2 {
				listed(w)
			}
			assert.Equal(t, []string{"lease a"}, w.store.calls())
			w.Synchronize([]imagevolume.Pod{p}, nil)
			w.wait()
			assert.Equal(t, []string{"release a"}, w.store.calls())
		},
		"beside a volume by annotation": func(t *testing.T, w *world) {
			create(t, w)
			w.RunPod(pod("q", volumeA))
			w.wait()
			assert.True(t, w.mounts.Mounted(id("a")))
			w.RemovePod("q")
			w.wait()
			assert.False(t, w.mounts.Mounted(id("a")), "nobody has our mount")
			assert.Equal(t, map[string]bool{id("a"): true}, w.store.leases())
		},
		"in a pod with faulty annotations": func(t *testing.T, w *world) {
			present(w)
			p := pod("p", "[{")
			w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {c}})
			w.wait()
			assert.Equal(t, []string{"lease a"}, w.store.calls(), "its container is older than Ocihold")
		},
		"on an incomplete reading": func(t *testing.T, w *world) {
			create(t, w)
			w.mounts.set(func() { w.mounts.err = errors.New("no /proc") })
			w.RemovePod("p")
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
		},
	} {
		t.Run(name, func(t *testing.T) { inWorld(t, synchronized(f)) })
	}
}
