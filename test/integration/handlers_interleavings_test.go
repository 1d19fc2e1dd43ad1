package integration

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// Whatever is pulled into and removed from three roots in whatever order, by
// ocihold and by CRI-O: what is left can be mounted and read, a container that
// runs is not touched, and CRI-O lists all.
func TestPullsAndRemovalsOverRoots(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	bottom, middle := appLayer("bottom", busybox(t)...), appLayer("middle")
	apps := []app{
		pushApp(t, n, "one:1", bottom),
		pushApp(t, n, "two:1", bottom, middle),
		pushApp(t, n, "three:1", bottom, middle, appLayer("three")),
		pushApp(t, n, "four:1", bottom, middle, appLayer("four")),
	}
	before := layersOf(t, n.CRIORoot())
	pod := runPod(t, n, realnode.PodSpec{})
	random := seeded(t)
	attempt := uint32(0)
	start := func(a app, id string) *realnode.Container {
		attempt++
		return run(t, pod, realnode.ContainerSpec{Image: id, UserImage: a.ref, Attempt: attempt})
	}
	for range count(20, 200) {
		var running *realnode.Container
		var of app
		var ofID string
		for step := range 6 {
			was := imagesOf(t, n)
			a := apps[random.IntN(len(apps))]
			handler := handlersOfRoots[random.IntN(len(handlersOfRoots))]
			op := random.IntN(10)
			if there := present(was, apps); op < 5 && len(there) > 0 {
				one := there[random.IntN(len(there))]
				a, handler = one.app, one.handler
			} else {
				op = 5 + op%5
			}
			switch {
			case op > 6:
				t.Logf("pull %s for %q", a.ref, handler)
				require.Equal(t, a.ids[handler], pullFor(t, n, handler, a.ref))
				require.Equal(t, was.with(handler, a.ids[handler]), imagesOf(t, n))
			case op > 4:
				t.Log("CRI-O pulls", a.ref)
				_, err := n.Pull(t.Context(), a.ref)
				require.NoError(t, err)
				require.Equal(t, was.with("", a.ids[""]), imagesOf(t, n))
			case op > 1:
				t.Logf("remove %s of %q", a.ref, handler)
				from := handler
				if from == "" {
					from = "runc" // none stands for all
				}
				want := was.without(handler, a.ids[handler])
				if err := removeFrom(t, n, from, a.ref); ofID == a.ids[handler] && slices.Contains(was[handler], ofID) {
					require.ErrorContains(t, err, running.ID)
					want = was
				} else {
					require.NoError(t, err)
				}
				require.Equal(t, want, imagesOf(t, n))
			case op > 0:
				t.Log("remove", a.ref)
				want := was
				if err := removeFrom(t, n, "", a.ref); of.ref == a.ref && was.has(ofID) {
					require.ErrorContains(t, err, running.ID)
				} else {
					require.NoError(t, err)
					for _, handler := range handlersOfRoots {
						want = want.without(handler, a.ids[""]).without(handler, a.ids["wasm"])
					}
				}
				require.Equal(t, want, imagesOf(t, n))
			default:
				// It refuses where only other roots have the image.
				_, err := n.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: a.ref}})
				t.Log("CRI-O removes", a.ref, err)
				now := imagesOf(t, n)
				require.Equal(t, was["vm"], now["vm"])
				require.Equal(t, was["wasm"], now["wasm"])
			}

			listed := imageIDs(t, n)
			for _, ids := range imagesOf(t, n) {
				require.Subset(t, listed, ids)
			}
			requireAllMount(t, n, apps...)
			if id := a.ids[handler]; slices.Contains(listed, id) {
				c := start(a, id)
				a.requireRead(t, c)
				if running == nil && step > 2 {
					running, of, ofID = c, a, id
				} else {
					require.NoError(t, c.Remove(t.Context()))
				}
			}
			if running != nil {
				of.requireRead(t, running)
			}
		}
		if running != nil {
			require.NoError(t, running.Remove(t.Context()))
		}
		t.Log("remove all")
		pullFor(t, n, "vm", apps[0].ref) // so that ocihold looks, also after CRI-O has removed what leaned last
		for _, a := range apps {
			require.NoError(t, removeFrom(t, n, "", a.ref))
		}
		require.Equal(t, before, layersOf(t, n.CRIORoot()))
		require.Empty(t, layersOf(t, n.HandlerRoot("vm")))
		require.Empty(t, layersOf(t, n.HandlerRoot("wasm")))
	}
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// handlersOfRoots are those that have a root, "" for CRI-O's own.
var handlersOfRoots = []string{"", "vm", "wasm"}

// inRoots are the ids of images by handler.
type inRoots map[string][]string

func (r inRoots) with(handler, id string) inRoots {
	next := maps.Clone(r)
	next[handler] = append(slices.Clone(r[handler]), id)
	slices.Sort(next[handler])
	next[handler] = slices.Compact(next[handler])
	return next
}

func (r inRoots) has(id string) bool {
	for _, ids := range r {
		if slices.Contains(ids, id) {
			return true
		}
	}
	return false
}

func (r inRoots) without(handler, id string) inRoots {
	next := maps.Clone(r)
	next[handler] = slices.DeleteFunc(slices.Clone(r[handler]), func(other string) bool { return other == id })
	return next
}

// placed is an image in the root of a handler.
type placed struct {
	app     app
	handler string
}

func present(in inRoots, apps []app) (all []placed) {
	for _, handler := range handlersOfRoots {
		for _, a := range apps {
			if slices.Contains(in[handler], a.ids[handler]) {
				all = append(all, placed{a, handler})
			}
		}
	}
	return all
}

// imagesOf are the images that the roots' own files say are there.
func imagesOf(t testing.TB, n *realnode.Node) inRoots {
	t.Helper()
	all := inRoots{}
	for _, handler := range handlersOfRoots {
		all[handler] = []string{}
		for id := range topLayers(t, rootOfHandler(n, handler)) {
			all[handler] = append(all[handler], id)
		}
		slices.Sort(all[handler])
	}
	return all
}
