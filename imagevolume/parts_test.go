package imagevolume_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume"
)

const (
	volumeSub  = `[{"image": "reg/a:1", "subPath": "w", "mountPath": "/w"}]`
	volumeBoth = `[{"images": [{"image": "reg/a:1"}, {"image": "reg/b:1", "subPath": "w"}], "mountPath": "/m"}]`
)

// source returns the key of the mount that a container of the pod is given.
func (w *world) source(t *testing.T, p imagevolume.Pod) string {
	t.Helper()
	given, err := w.CreateContainer(p, container("c"))
	require.NoError(t, err)
	require.Len(t, given, 1)
	return w.mounts.Key(given[0].Mount.Source)
}

func TestSubPathSharesTheImage(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p, q := pod("p", volumeSub), pod("q", volumeA)
		w.RunPod(p)
		w.RunPod(q)
		w.wait()
		sub := w.source(t, p)
		assert.True(t, strings.HasPrefix(sub, id("a")[:16]+"~"))
		assert.Equal(t, id("a"), w.source(t, q))
		assert.Len(t, w.mounts.mounted, 2)
		assert.Equal(t, "w", w.Volumes()[0].SubPath)

		w.RemovePod("q")
		w.wait()
		assert.True(t, w.store.leases()[id("a")])
		// What the kernel shows of a part is the mount that it is of.
		w.mounts.set(func() { w.mounts.used = map[string]bool{id("a"): true} })
		w.RemovePod("p")
		w.wait()
		assert.False(t, w.mounts.Mounted(sub), "nobody can be given it")
		assert.True(t, w.store.leases()[id("a")], "a process has it")
		w.mounts.set(func() { w.mounts.used = nil })
		time.Sleep(time.Minute)
		assert.Empty(t, w.store.leases())
		assert.Empty(t, w.mounts.mounted)
	}))
}

func TestSeveralImagesAreHeldAndLetGoTogether(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeBoth)
		w.store.set(func() { w.store.block = make(chan struct{}) })
		w.RunPod(p)
		w.wait()
		_, err := w.CreateContainer(p, container("c"))
		require.EqualError(t, err, "image volume /m: pulling reg/a:1; will be tried again")
		close(w.store.block)
		w.wait()
		key := w.source(t, p)
		assert.Equal(t, []string{"pull reg/a:1", "lease a", "pull reg/b:1", "lease b"}, w.store.calls())
		status := w.Volumes()[0]
		assert.Empty(t, status.Image)
		assert.Equal(t, []imagevolume.VolumeImage{
			{Image: "reg/a:1", ImageID: id("a"), Digest: "sha256:" + id("a")},
			{Image: "reg/b:1", ImageID: id("b"), Digest: "sha256:" + id("b"), SubPath: "w"},
		}, status.Images)

		w.mounts.set(func() { w.mounts.used = map[string]bool{key: true} })
		w.RemovePod("p")
		time.Sleep(time.Hour)
		assert.Equal(t, map[string]bool{id("a"): true, id("b"): true}, w.store.leases(), "a process has both")
		assert.True(t, w.mounts.Mounted(key))
		users, err := w.Users(t.Context())
		require.NoError(t, err)
		assert.Equal(t, []string{"a process that has it as a volume"}, users(id("b")))
		assert.Empty(t, users(id("c")))

		w.store.set(func() { w.store.leased[id("b")] = false })
		time.Sleep(time.Minute)
		assert.True(t, w.store.leases()[id("b")], "mended")

		w.mounts.set(func() { w.mounts.used = nil })
		time.Sleep(time.Minute)
		assert.Empty(t, w.store.leases())
		assert.Empty(t, w.mounts.mounted)
	}))
}

func TestTheImageThatIsThereStaysWhileTheOtherIsPulled(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.store.set(func() {
			w.store.present["reg/b:1"] = id("b")
			w.store.leased[id("b")] = true
			w.store.present["reg/c"] = id("c")
			w.store.leased[id("c")] = true
			w.store.block = make(chan struct{})
		})
		w.RunPod(pod("p", volumeBoth))
		time.Sleep(time.Hour)
		assert.Equal(t, map[string]bool{id("b"): true}, w.store.leases(), "a pull holds up no release")
	}))
}

func TestPartsAreTakenOver(t *testing.T) {
	for name, annotation := range map[string]string{"sub path": volumeSub, "two images": volumeBoth} {
		t.Run(name, func(t *testing.T) {
			var key string
			inWorld(t, synchronized(func(t *testing.T, w *world) {
				w.RunPod(pod("p", annotation))
				w.wait()
				key = w.source(t, pod("p", annotation))
			}))
			inWorld(t, func(t *testing.T, w *world) {
				// The tags have moved on since the container was created.
				w.store.set(func() {
					w.store.present = map[string]string{"old/a": id("a"), "old/b": id("b"), "reg/a:1": id("d"), "reg/b:1": id("d")}
					w.store.leased = map[string]bool{id("a"): true, id("b"): true}
				})
				w.mounts.set(func() { w.mounts.mounted[key], w.mounts.mounted[id("a")], w.mounts.mounted[id("b")] = true, true, true })
				p := pod("p", annotation)
				path := map[string]string{"sub path": "/w", "two images": "/m"}[name]
				running := imagevolume.Container{ID: "1", Name: "c", Mounts: map[string]string{path: "/mounts/" + key}}
				w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {running}})
				assert.Equal(t, "/mounts/"+key, w.Volumes()[0].HostPath)
				w.wait()
				assert.True(t, w.store.leases()[id("a")])
				assert.Equal(t, name == "two images", w.store.leases()[id("b")])
				status := w.Volumes()[0]
				images := append(slices.Clone(status.Images), status.VolumeImage)
				assert.Equal(t, "sha256:"+id("a"), images[0].Digest)
				given, err := w.CreateContainer(p, container("other"))
				require.NoError(t, err)
				assert.Equal(t, "/mounts/"+key, given[0].Mount.Source, "the pod keeps what it has")
				w.Synchronize(nil, nil)
				w.wait()
				assert.Empty(t, w.store.leases())
				assert.Empty(t, w.mounts.mounted)
			})
		})
	}
}

func TestWhatAnImageDoesNotHave(t *testing.T) {
	for annotation, want := range map[string]string{
		`[{"image": "reg/a:1", "subPath": "missing", "mountPath": "/a"}]`: `sub path "missing" of image reg/a:1: no such file or directory`,
		`[{"images": [{"image": "reg/a:1"}, {"image": "reg/b:1", "subPath": "missing"}], "mountPath": "/a"}]`: `sub path "missing" of image reg/b:1: ` +
			`no such file or directory`,
		`[{"image": "reg/a:1", "mediaTypes": ["none"], "mountPath": "/a"}]`: `mount image reg/a:1: it has no such layer: media types none; it has some`,
	} {
		inWorld(t, synchronized(func(t *testing.T, w *world) {
			p := pod("p", annotation)
			w.RunPod(p)
			for range 2 {
				w.wait()
				_, err := w.CreateContainer(p, container("c"))
				require.EqualError(t, err, "ImageVolumeMountFailed: image volume /a: "+want+"; will be tried again")
				require.ErrorIs(t, err, imagevolume.ErrMountFailed)
			}
			w.RemovePod("p")
			w.wait()
			assert.Empty(t, w.store.leases())
			assert.Empty(t, w.mounts.mounted)
		}))
	}
}

func TestMountOfAnotherVersionHoldsAll(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.store.set(func() { w.store.leased = map[string]bool{id("a"): true} })
		w.mounts.set(func() { w.mounts.mounted["v9:x"], w.mounts.used = true, map[string]bool{"v9:x": true} })
		w.Synchronize(nil, nil)
		time.Sleep(time.Hour)
		assert.Len(t, w.store.leases(), 1)
		w.mounts.set(func() { w.mounts.used = nil })
		time.Sleep(time.Minute)
		assert.Empty(t, slices.Collect(maps.Keys(w.store.leases())))
		assert.Empty(t, w.mounts.mounted)
	})
}
