package imagevolume_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// world is a Manager in a bubble of fake time: after wait all that was begun is
// done.
type world struct {
	*imagevolume.Manager

	stores *fakeStores
	store  *fakeStore // CRI-O's
	mounts *fakeMounts
	stop   func()
}

func (w *world) wait() { synctest.Wait() }

// inWorld runs f with a Manager that has been synchronized with nothing.
func inWorld(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{
			stores: &fakeStores{crio: newFakeStore(), vm: newFakeStore()},
			mounts: &fakeMounts{mounted: map[string]bool{}, used: map[string]bool{}},
		}
		w.store = w.stores.crio
		w.start(t)
		f(t, w)
		w.stop()
	})
}

// start begins with a new Manager.
func (w *world) start(t *testing.T) {
	t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	w.Manager = imagevolume.New(w.stores, w.mounts, log)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	w.stop = func() {
		cancel()
		require.NoError(t, <-ended)
	}
}

func pod(name, annotation string) imagevolume.Pod {
	return imagevolume.Pod{
		ID: name, Namespace: "ns", Name: name,
		Annotations: map[string]string{request.Domain: annotation},
	}
}

func container(name string) imagevolume.Container {
	return imagevolume.Container{ID: name + "-id", Name: name}
}

func synchronized(f func(t *testing.T, w *world)) func(t *testing.T, w *world) {
	return func(t *testing.T, w *world) {
		w.Synchronize(nil, nil)
		w.wait()
		f(t, w)
	}
}

const volumeA = `[{"image": "reg/a:1", "mountPath": "/a"}]`

func TestVolumeFromSandboxToRelease(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		w.store.set(func() { w.store.block = make(chan struct{}) })
		w.store.set(func() {
			w.store.reports = []imagevolume.Progress{{Done: 45, Total: 100_000}, {Done: 45_678, Total: 100_000}}
		})
		w.RunPod(p)
		w.wait()
		_, err := w.CreateContainer(p, container("c"))
		require.EqualError(t, err, "image volume /a: pulling reg/a:1: 40% of 100kB; will be tried again")

		close(w.store.block)
		w.wait()
		given, err := w.CreateContainer(p, container("c"))
		require.NoError(t, err)
		require.Len(t, given, 1)
		assert.Equal(t, imagevolume.Mount{
			Source: "/mounts/" + id("a"), Destination: "/a",
			Options: []string{"bind", "rprivate", "ro", "nosuid", "nodev", "noexec"},
		}, given[0].Mount)
		assert.Equal(t, "sha256:"+id("a"), given[0].From[0].Digest)
		assert.Equal(t, []string{"pull reg/a:1", "lease a"}, w.store.calls())
		assert.Equal(t, "/a", w.Volumes()[0].MountPath)

		w.EndContainer("p", "c-id")
		w.wait()
		assert.Empty(t, w.Volumes())
		assert.True(t, w.mounts.Mounted(id("a")), "the sandbox may start another container")
		w.RemovePod("p")
		w.wait()
		assert.False(t, w.mounts.Mounted(id("a")))
		assert.Equal(t, []string{"release a"}, w.store.calls())
	}))
}

func TestOneHoldForAll(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		for _, name := range []string{"p", "q"} {
			w.RunPod(pod(name, volumeA))
			w.wait()
			for _, c := range []string{"c", "d"} {
				_, err := w.CreateContainer(pod(name, volumeA), container(c))
				require.NoError(t, err)
			}
		}
		assert.Equal(t, []string{"pull reg/a:1", "lease a"}, w.store.calls())
		w.RemovePod("p")
		w.wait()
		assert.Empty(t, w.store.calls())
		w.RemovePod("q")
		w.wait()
		assert.Equal(t, []string{"release a"}, w.store.calls())
	}))
}

func TestPodsOfOneIDMapShareAMount(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		mountOf := map[string]string{}
		for name, userNS := range map[string]string{"host": "", "p": "/one", "q": "/one", "r": "/two"} {
			p := pod(name, volumeA)
			p.UserNS = userNS
			w.RunPod(p)
			w.wait()
			given, err := w.CreateContainer(p, container("c"))
			require.NoError(t, err)
			mountOf[name] = given[0].Mount.Source
		}
		assert.Equal(t, "/mounts/"+id("a"), mountOf["host"])
		assert.Equal(t, mountOf["p"], mountOf["q"])
		assert.NotEqual(t, mountOf["p"], mountOf["r"])
		assert.NotEqual(t, mountOf["host"], mountOf["p"])
		w.Synchronize(nil, nil)
		w.wait()
		assert.Empty(t, w.store.leases())

		gone := pod("gone", volumeA)
		gone.UserNS = "/gone"
		w.RunPod(gone)
		w.wait()
		_, err := w.CreateContainer(gone, container("c"))
		require.ErrorContains(t, err, "ImageVolumeMountFailed: image volume /a: ")
	}))
}

func TestEachHandlerHasItsRoot(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.stores.vm.registry["reg/a:1"] = id("b") // as for another platform
		onVM := pod("q", volumeA)
		onVM.Handler = "vm"
		w.RunPod(pod("p", volumeA))
		w.RunPod(onVM)
		w.wait()
		given, err := w.CreateContainer(pod("p", volumeA), container("c"))
		require.NoError(t, err)
		assert.Equal(t, "/mounts/"+id("a"), given[0].Mount.Source)
		given, err = w.CreateContainer(onVM, container("c"))
		require.NoError(t, err)
		assert.Equal(t, "/mounts/vm."+id("b"), given[0].Mount.Source)
		assert.Equal(t, map[string]bool{id("a"): true}, w.store.leases())
		assert.Equal(t, map[string]bool{id("b"): true}, w.stores.vm.leases())

		w.RemovePod("p")
		w.wait()
		assert.Empty(t, w.store.leases())
		assert.Equal(t, map[string]bool{id("b"): true}, w.stores.vm.leases())
		assert.Equal(t, "vm", w.Volumes()[0].Handler)
		w.RemovePod("q")
		w.wait()
		assert.Empty(t, w.stores.vm.leases())
		assert.Empty(t, w.mounts.mounted)
	}))
}

func TestRootThatIsAwayStopsOnlyItself(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		before, after := pod("before", volumeA), pod("after", volumeA)
		before.Handler, after.Handler = "vm", "vm"
		w.RunPod(before)
		w.wait()
		w.stores.vmAway.Store(true)
		w.RunPod(after)
		w.RunPod(pod("p", volumeA))
		w.wait()
		_, err := w.CreateContainer(after, container("c"))
		require.EqualError(t, err, "image volume /a: pull reg/a:1: the root of vm is not mounted; will be tried again")
		_, err = w.CreateContainer(pod("p", volumeA), container("c"))
		require.NoError(t, err)

		w.RemovePod("before")
		w.RemovePod("p")
		time.Sleep(time.Hour)
		assert.Empty(t, w.store.leases(), "of the root that is there")
		assert.NotEmpty(t, w.stores.vm.leases())
		assert.True(t, w.mounts.Mounted("vm."+id("a")))
		w.stores.vmAway.Store(false)
		w.RemovePod("after")
		time.Sleep(time.Hour)
		assert.Empty(t, w.stores.vm.leases())
		assert.False(t, w.mounts.Mounted("vm."+id("a")))
	}))
}

func TestPullPolicies(t *testing.T) {
	volume := func(policy string) string {
		return fmt.Sprintf(`[{"image": "reg/a:1", "mountPath": "/a", "pullPolicy": %q}]`, policy)
	}
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		never := pod("never", volume("Never"))
		w.RunPod(never)
		w.wait()
		_, err := w.CreateContainer(never, container("c"))
		require.ErrorIs(t, err, imagevolume.ErrPullPolicyNever)
		assert.NotContains(t, w.store.calls(), "pull reg/a:1")
		w.wait()

		w.RunPod(pod("missing", volume("IfNotPresent")))
		w.wait()
		assert.Equal(t, []string{"pull reg/a:1", "lease a"}, w.store.calls())
		w.RunPod(pod("present", volume("IfNotPresent")))
		w.wait()
		assert.Empty(t, w.store.calls())

		_, err = w.CreateContainer(never, container("c"))
		require.ErrorIs(t, err, imagevolume.ErrPullPolicyNever, "the last answer; it is looked at again")
		w.wait()
		_, err = w.CreateContainer(never, container("c"))
		require.NoError(t, err, "present by now")

		always := pod("always", volume("Always"))
		w.RunPod(always)
		w.wait()
		assert.Equal(t, []string{"pull reg/a:1"}, w.store.calls())
		_, err = w.CreateContainer(always, container("c"))
		require.NoError(t, err)
	}))
}

func TestPresentImageNeedsProof(t *testing.T) {
	for _, tc := range []struct {
		policy  string
		proof   error // why the registry gives none
		proven  bool
		permits []string
		refusal []string
		pulled  bool
	}{
		{policy: "IfNotPresent", proven: true, permits: []string{"a for ns, ask true"}},
		{policy: "Never", proven: true, permits: []string{"a for ns, ask false"}},
		{policy: "Always", proof: errors.New("401"), pulled: true},
		{
			policy: "IfNotPresent", proof: errors.New("401"), permits: []string{"a for ns, ask true"},
			refusal: []string{"reg/a:1 is present", "namespace ns", "401", "trust_present", "will be tried again"},
		},
		{
			policy: "Never", proof: errors.New("401"), permits: []string{"a for ns, ask false"},
			refusal: []string{"ErrImageNeverPull", "reg/a:1 is present", "namespace ns", "trust_present", "will be tried again"},
		},
		{policy: "IfNotPresent", proof: imagevolume.ErrNotPresent, permits: []string{"a for ns, ask true"}, pulled: true},
		{
			policy: "Never", proof: imagevolume.ErrNotPresent, permits: []string{"a for ns, ask false"},
			refusal: []string{"is not present on the node and pullPolicy is Never"},
		},
	} {
		t.Run(fmt.Sprintf("%s, proven %t: %v", tc.policy, tc.proven, tc.proof), func(t *testing.T) {
			inWorld(t, synchronized(func(t *testing.T, w *world) {
				w.store.set(func() {
					w.store.present["reg/a:1"] = id("a")
					if !tc.proven {
						w.store.unproven = map[string]error{id("a"): tc.proof}
					}
				})
				p := pod("p", fmt.Sprintf(`[{"image": "reg/a:1", "mountPath": "/a", "pullPolicy": %q}]`, tc.policy))
				w.RunPod(p)
				w.wait()
				assert.Equal(t, tc.permits, w.store.permits)
				_, err := w.CreateContainer(p, container("c"))
				if tc.refusal == nil {
					require.NoError(t, err)
				}
				for _, text := range tc.refusal {
					require.ErrorContains(t, err, text)
				}
				w.wait()
				assert.Equal(t, tc.refusal == nil, w.store.leases()[id("a")])
				assert.Equal(t, tc.refusal == nil, w.mounts.Mounted(id("a")))
				assert.Equal(t, tc.pulled, slices.Contains(w.store.calls(), "pull reg/a:1"))

				if tc.refusal == nil {
					return
				}
				w.store.set(func() { w.store.present["reg/a:1"], w.store.unproven = id("a"), nil })
				_, err = w.CreateContainer(p, container("c"))
				require.Error(t, err, "the last answer; it is looked at again")
				w.wait()
				_, err = w.CreateContainer(p, container("c"))
				require.NoError(t, err, "proven by now")
			}))
		})
	}
}

func TestRestartedContainerNeedsProof(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.store.set(func() {
			w.store.present["reg/a:1"] = id("a")
			w.store.leased[id("a")] = true
			w.store.unproven = map[string]error{id("a"): errors.New("401")}
		})
		w.mounts.set(func() { w.mounts.mounted[id("a")], w.mounts.used[id("a")] = true, true })
		p := pod("p", volumeA)
		running := imagevolume.Container{ID: "1", Name: "c", Mounts: map[string]string{"/a": "/mounts/" + id("a")}}
		w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {running}})
		time.Sleep(2 * time.Minute)
		assert.True(t, w.store.leases()[id("a")], "what runs keeps it")
		assert.True(t, w.mounts.Mounted(id("a")))
		_, err := w.CreateContainer(p, container("other"))
		require.ErrorIs(t, err, imagevolume.ErrNotPermitted)
	})
}

func TestAlwaysLooksAgainWhenAContainerEnds(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", `[{"image": "reg/c", "mountPath": "/c"}]`) // no tag: Always
		w.RunPod(p)
		w.wait()
		given, err := w.CreateContainer(p, imagevolume.Container{ID: "1", Name: "c"})
		require.NoError(t, err)
		assert.Equal(t, id("c"), given[0].From[0].ID)
		w.store.calls()
		w.mounts.set(func() { w.mounts.used[id("c")] = true })

		w.store.set(func() { w.store.registry["reg/c"] = id("d") })
		w.EndContainer("p", "1")
		w.EndContainer("p", "1") // told when stopped and when exited
		w.wait()
		assert.Equal(t, []string{"pull reg/c", "lease d"}, w.store.calls())
		assert.True(t, w.store.leases()[id("c")], "in use")
		given, err = w.CreateContainer(p, imagevolume.Container{ID: "2", Name: "c"})
		require.NoError(t, err)
		assert.Equal(t, id("d"), given[0].From[0].ID)

		w.mounts.set(func() { w.mounts.used = map[string]bool{} })
		time.Sleep(2 * time.Minute)
		assert.False(t, w.store.leases()[id("c")], "the old one is let go")
		w.store.calls()

		_, err = w.CreateContainer(p, imagevolume.Container{ID: "3", Name: "c"})
		require.ErrorContains(t, err, "pulling reg/c", "the end of the one before was not told")
		w.wait()
		assert.Equal(t, []string{"pull reg/c"}, w.store.calls())
		_, err = w.CreateContainer(p, imagevolume.Container{ID: "4", Name: "c"})
		require.NoError(t, err)
	}))
}

func TestFailureIsToldAndTriedAgain(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		w.store.set(func() { w.store.err = errors.New("registry is down") })
		w.RunPod(p)
		for range 3 {
			w.wait()
			_, err := w.CreateContainer(p, container("c"))
			require.EqualError(t, err, "image volume /a: registry is down; will be tried again")
		}
		w.wait()
		assert.Len(t, w.store.calls(), 4, "one attempt for the sandbox and one for each container")
		w.store.set(func() { w.store.err = nil })
		_, err := w.CreateContainer(p, container("c"))
		require.Error(t, err)
		w.wait()
		_, err = w.CreateContainer(p, container("c"))
		require.NoError(t, err)
	}))
}

func TestBadVolumesConcernTheirContainerOnly(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		p.Annotations[request.Domain+"/container.bad"] = "nonsense"
		w.RunPod(p)
		w.wait()
		_, err := w.CreateContainer(p, container("bad"))
		require.ErrorContains(t, err, "container bad of pod ns/p")
		_, err = w.CreateContainer(p, container("good"))
		require.NoError(t, err)
		_, err = w.CreateContainer(p, imagevolume.Container{ID: "x", Name: "x", Mounts: map[string]string{"/a/": "/srv"}})
		require.ErrorContains(t, err, "something else is mounted there")
		none, err := w.CreateContainer(imagevolume.Pod{ID: "z"}, container("c"))
		require.NoError(t, err)
		assert.Empty(t, none)
	}))
}

func TestImageDeletedBetweenPullAndLease(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		deletions := 2
		w.store.onLease = func(string) {
			w.store.mu.Lock()
			defer w.store.mu.Unlock()
			if deletions > 0 {
				deletions--
				clear(w.store.present)
			}
		}
		p := pod("p", volumeA)
		w.RunPod(p)
		w.wait()
		_, err := w.CreateContainer(p, container("c"))
		require.NoError(t, err)
		assert.Equal(t, []string{"pull reg/a:1", "pull reg/a:1", "pull reg/a:1", "lease a"}, w.store.calls())
	}))
}

func TestMountThatIsGoneIsMadeAgain(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		w.RunPod(p)
		w.wait()
		require.NoError(t, w.mounts.Release(id("a")))
		_, err := w.CreateContainer(p, container("c"))
		require.ErrorContains(t, err, "will be tried again")
		w.wait()
		_, err = w.CreateContainer(p, container("c"))
		require.NoError(t, err)
		assert.True(t, w.mounts.Mounted(id("a")))
	}))
}

func TestLeaseThatIsGoneIsTakenAgain(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.RunPod(pod("p", volumeA))
		w.wait()
		require.NoError(t, w.store.Release(t.Context(), id("a")))
		time.Sleep(2 * time.Minute)
		assert.True(t, w.store.leases()[id("a")])
		w.store.set(func() { w.store.leased[id("a")] = false })
		time.Sleep(2 * time.Minute)
		assert.True(t, w.store.leases()[id("a")], "not whole")

		require.NoError(t, w.store.Release(t.Context(), id("a")))
		w.RunPod(pod("next", volumeA))
		w.wait()
		assert.True(t, w.store.leases()[id("a")], "memory does not say what is leased")
		w.store.set(func() { w.store.leased[id("a")] = false })
		w.RemovePod("p")
		w.RemovePod("next")
		w.wait()
		assert.Empty(t, slices.Collect(maps.Keys(w.store.leases())), "what is left of a lease is cleared away")
	}))
}

func TestWhatMayBeReplacedIsNotLeased(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.store.set(func() {
			w.store.present["reg/a:1"] = id("d")
			w.store.block = make(chan struct{})
		})
		w.RunPod(pod("p", `[{"image": "reg/a:1", "mountPath": "/a", "pullPolicy": "Always"}]`))
		time.Sleep(time.Hour)
		assert.Empty(t, w.store.leases())
		close(w.store.block)
		w.wait()
		assert.Equal(t, map[string]bool{id("a"): true}, w.store.leases())
	}))
}

func TestPullEndsWithItsPod(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.store.set(func() { w.store.block = make(chan struct{}) })
		w.RunPod(pod("p", volumeA))
		w.wait()
		w.RemovePod("p")
		w.wait()
		assert.Equal(t, []string{"cancelled reg/a:1"}, w.store.calls())
		assert.Empty(t, w.store.leases())
	}))
}

func TestNothingIsLetGoUnsure(t *testing.T) {
	leftover := func(w *world) {
		w.store.set(func() { w.store.present["reg/a:1"] = id("a") })
		w.store.set(func() { w.store.leased[id("a")] = true })
		w.mounts.set(func() { w.mounts.mounted[id("a")] = true })
	}
	t.Run("before the runtime has told its pods", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			leftover(w)
			w.RemovePod("other")
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
			w.Synchronize(nil, nil)
			w.wait()
			assert.Equal(t, []string{"release a"}, w.store.calls())
			assert.False(t, w.mounts.Mounted(id("a")))
		})
	})
	t.Run("before the store has told what a listed pod's image is", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			leftover(w)
			w.store.set(func() { w.store.unready = make(chan struct{}) })
			w.Synchronize([]imagevolume.Pod{pod("p", volumeA)}, nil)
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
			close(w.store.unready)
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls(), "the pod asks for it")
			w.RemovePod("p")
			w.wait()
			assert.Equal(t, []string{"release a"}, w.store.calls())
		})
	})
	t.Run("while the registry is asked whether it is the newest", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			leftover(w)
			w.store.set(func() { w.store.block = make(chan struct{}) })
			w.Synchronize([]imagevolume.Pod{pod("p", `[{"image": "reg/a:1", "mountPath": "/a", "pullPolicy": "Always"}]`)}, nil)
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
			close(w.store.block)
			w.wait()
			assert.Equal(t, []string{"pull reg/a:1"}, w.store.calls())
		})
	})
	t.Run("on an incomplete reading", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			leftover(w)
			w.mounts.set(func() { w.mounts.err = errors.New("no /proc") })
			w.Synchronize(nil, nil)
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
			w.mounts.set(func() { w.mounts.err = nil })
			time.Sleep(time.Minute)
			assert.Equal(t, []string{"release a"}, w.store.calls())
		})
	})
	t.Run("while a process has it", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			leftover(w)
			w.mounts.set(func() { w.mounts.used[id("a")] = true })
			w.Synchronize(nil, nil)
			time.Sleep(time.Hour)
			assert.Empty(t, w.store.calls())
			w.mounts.set(func() { w.mounts.used = map[string]bool{} })
			time.Sleep(time.Minute)
			assert.Equal(t, []string{"release a"}, w.store.calls())
		})
	})
}

func TestRestartTakesOver(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		// The tag has moved on since the container was created.
		w.store.set(func() { w.store.present = map[string]string{"reg/old": id("c"), "reg/c": id("d")} })
		w.store.set(func() { w.store.registry["reg/c"] = id("d") })
		w.store.set(func() { w.store.leased[id("c")] = true })
		w.mounts.set(func() {
			w.mounts.mounted[id("c")] = true
			w.mounts.used[id("c")] = true
		})
		p := pod("p", `[{"image": "reg/c", "mountPath": "/c"}]`)
		running := imagevolume.Container{ID: "1", Name: "c", Mounts: map[string]string{"/c": "/mounts/" + id("c"), "/etc/x": "/y"}}
		for range 2 {
			w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{"p": {running}})
			w.wait()
			assert.NotContains(t, w.store.calls(), "pull reg/c", "a running container needs none")
			require.Len(t, w.Volumes(), 1)
			assert.Equal(t, "sha256:"+id("c"), w.Volumes()[0].Digest)
		}
		// It has exited, and nobody has told.
		w.Synchronize([]imagevolume.Pod{p}, nil)
		assert.Empty(t, w.Volumes())
		w.wait()
		given, err := w.CreateContainer(p, imagevolume.Container{ID: "2", Name: "c"})
		require.NoError(t, err)
		assert.Equal(t, id("d"), given[0].From[0].ID)

		w.Synchronize(nil, nil)
		w.mounts.set(func() { w.mounts.used = map[string]bool{} })
		time.Sleep(time.Minute)
		assert.Empty(t, slices.Collect(maps.Keys(w.store.leases())), "the runtime does not know the pod any more")
		assert.Empty(t, w.Volumes())
	})
}

func TestForgedReportOrMountGivesNothing(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		p.Annotations["ocihold.dev/volumes"] = `[{"mountPath":"/a","imageID":"` + id("b") + `"}]`
		w.Synchronize([]imagevolume.Pod{p}, map[string][]imagevolume.Container{
			"p": {{ID: "1", Name: "c", Mounts: map[string]string{"/a": "/srv/elsewhere"}}},
		})
		w.wait()
		assert.Empty(t, w.Volumes())
		assert.NotContains(t, w.store.leases(), id("b"))
	})
}

func TestUsers(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		p := pod("p", volumeA)
		w.RunPod(p)
		w.wait()
		w.mounts.set(func() { w.mounts.used = map[string]bool{"vm." + id("b"): true} })
		users := func() map[string][]string {
			t.Helper()
			users, err := w.Users(t.Context())
			require.NoError(t, err)
			return map[string][]string{"a": users(id("a")), "b": users(id("b")), "c": users(id("c"))}
		}
		assert.Equal(t, map[string][]string{
			"a": {"pod ns/p, which asks for it as a volume"},
			"b": {"a process that has it as a volume"},
			"c": nil,
		}, users())

		_, err := w.CreateContainer(p, imagevolume.Container{ID: "1", Name: "c"})
		require.NoError(t, err)
		w.mounts.set(func() { w.mounts.used = map[string]bool{id("a"): true} })
		assert.Equal(t, map[string][]string{"a": {"volume /a (ns/p/c)"}, "b": nil, "c": nil}, users())

		w.mounts.set(func() { w.mounts.err = errors.New("no /proc") })
		_, err = w.Users(t.Context())
		require.ErrorIs(t, err, w.mounts.err)
	}))
}

func TestNotAllowed(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.RunPod(pod("p", volumeA))
		w.wait()
		given, err := w.CreateContainer(pod("p", volumeA), container("c"))
		require.NoError(t, err)
		mounts := map[string]string{given[0].Mount.Destination: given[0].Mount.Source}
		w.store.set(func() {
			w.store.refused = map[string]error{"ns": fmt.Errorf("%w: allowed_namespaces", imagevolume.ErrNotAllowed)}
		})
		const refusal = "image volume /a of container c of pod ns/q: annotation image-volume.ocihold.dev: " +
			"image reg/a:1: not allowed on this node: allowed_namespaces; will be tried again"
		w.RunPod(pod("q", volumeA)) // present
		w.wait()
		_, err = w.CreateContainer(pod("q", volumeA), container("c"))
		require.EqualError(t, err, refusal)
		w.RunPod(pod("r", `[{"image": "reg/b:1", "mountPath": "/b"}]`))
		w.wait()
		assert.NotContains(t, w.store.calls(), "pull reg/b:1")

		// As after a restart: what runs keeps its volume, and no other gets it.
		c := container("c")
		c.Mounts = mounts
		running := pod("old", volumeA)
		w.Synchronize([]imagevolume.Pod{running}, map[string][]imagevolume.Container{"old": {c}})
		w.wait()
		assert.True(t, w.mounts.Mounted(id("a")))
		assert.Equal(t, map[string]bool{id("a"): true}, w.store.leases())
		_, err = w.CreateContainer(running, container("d"))
		require.ErrorContains(t, err, "allowed_namespaces")
	}))
}

func TestScratchNotAllowed(t *testing.T) {
	inWorld(t, synchronized(func(t *testing.T, w *world) {
		w.stores.scratch.Store(request.DefaultScratchSize - 1)
		p := pod("p", `[{"image": "reg/b:1", "mountPath": "/b", "readOnly": false}]`)
		w.RunPod(p)
		w.wait()
		_, err := w.CreateContainer(p, container("c"))
		require.EqualError(t, err, "image volume /b of container c of pod ns/p: annotation image-volume.ocihold.dev: "+
			"not allowed on this node: max_scratch_bytes; will be tried again")
		assert.NotContains(t, w.store.calls(), "pull reg/b:1")
		assert.Empty(t, w.store.leases())
		w.wait() // it is tried again, in vain
		w.stores.scratch.Store(request.DefaultScratchSize)
		_, err = w.CreateContainer(p, container("c"))
		require.ErrorContains(t, err, "max_scratch_bytes; will be tried again")
		w.wait()
		_, err = w.CreateContainer(p, container("c"))
		require.NoError(t, err)
	}))
}
