package integration

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// Whichever comes first, the container or the removal of its image: a container
// that there is has all its files, and a removal is done or says who uses it.
func TestCreateAgainstRemove(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	a := pushApp(t, n, "raced:1", appLayer("lower", busybox(t)...), appLayer("upper"))
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	refusals, removals := 0, 0
	for i := range count(100, 1000) {
		id := pullFor(t, n, "vm", a.ref)
		if i%2 == 1 { // CRI-O runs it from its own root, then
			require.Equal(t, id, pullFor(t, n, "", a.ref))
		}
		// It takes the removal longer to decide.
		ahead := time.Duration(random.IntN(int(30 * time.Millisecond)))
		removed := make(chan error, 1)
		go func() { removed <- removeFrom(t, n, "", id) }()
		time.Sleep(ahead)
		c, created := pod.Create(t.Context(), realnode.ContainerSpec{Image: id, UserImage: a.ref, Attempt: uint32(i)})
		err := <-removed
		if created != nil {
			require.NoError(t, err, "%d: nor is there a container: %v", i, created)
			removals++
			continue
		}
		require.NoError(t, c.Start(t.Context()))
		a.requireRead(t, c)
		for _, dir := range lowerDirs(t, n, c) {
			require.DirExists(t, dir)
		}
		if err == nil {
			require.Fail(t, "removed under a container", "%d: %s ahead", i, ahead)
		}
		require.ErrorContains(t, err, "in use by")
		name := fmt.Sprintf("k8s_main_%s_", pod.Config.GetMetadata().GetName())
		require.True(t, strings.Contains(err.Error(), c.ID) || strings.Contains(err.Error(), name), "%d: %v", i, err)
		refusals++
		require.NoError(t, c.Remove(t.Context()))
		require.NoError(t, removeFrom(t, n, "", id))
	}
	t.Log(refusals, "refused,", removals, "removed")
	require.NotZero(t, refusals)
	require.NotZero(t, removals)
	require.Empty(t, layersOf(t, n.HandlerRoot("vm")))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// CRI-O, killed while containers run from the roots of handlers, finds every
// pod, container and image again, whether it takes its end for a clean one or not.
func TestCRIOKilledOverHandlerRoots(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	a := pushApp(t, n, "vm/lasting:1", appLayer("lower", busybox(t)...), appLayer("upper"))
	wasm := pushApp(t, n, "wasm/lasting:1", appLayer("wasm", busybox(t)...))
	leaning := pushApp(t, n, "leaning:1", appLayer("lower", busybox(t)...), appLayer("own"))
	id := pullFor(t, n, "vm", a.ref)
	pullFor(t, n, "wasm", wasm.ref)
	_, err := n.Pull(t.Context(), leaning.ref)
	require.NoError(t, err)
	vm := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	first := run(t, vm, realnode.ContainerSpec{Image: id, UserImage: a.ref})
	exited := run(t, vm, realnode.ContainerSpec{Name: "exited", Image: id, UserImage: a.ref})
	require.NoError(t, exited.Stop(t.Context()))
	fromWasm := run(t, runPod(t, n, realnode.PodSpec{Handler: "wasm"}),
		realnode.ContainerSpec{Image: wasm.ids["wasm"], UserImage: wasm.ref})
	leans := run(t, runPod(t, n, realnode.PodSpec{}), realnode.ContainerSpec{Image: leaning.ref})
	for root, c := range map[string]*realnode.Container{"vm": first, "wasm": fromWasm} {
		for _, dir := range lowerDirs(t, n, c) {
			require.True(t, strings.HasPrefix(dir, n.HandlerRoot(root)+"/"), dir)
		}
	}
	before := whatCRIOKnows(t, n)
	require.Len(t, before.containers, 4)
	require.Len(t, before.pods, 3)
	require.Subset(t, before.images, []string{id, wasm.ids["wasm"], leaning.ids[""]})
	clean := filepath.Join(n.Dir(), "lib", "clean.shutdown")
	for i := range 10 {
		require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGKILL))
		require.NoFileExists(t, clean)
		if i%2 == 1 {
			require.NoError(t, os.WriteFile(clean, nil, 0o600))
		}
		require.NoError(t, n.Start(t.Context(), realnode.CRIO))
		require.Equal(t, before, whatCRIOKnows(t, n), "%d", i)
		a.requireRead(t, first)
		wasm.requireRead(t, fromWasm)
		leaning.requireRead(t, leans)
	}
	next := run(t, vm, realnode.ContainerSpec{Name: "next", Image: id, UserImage: a.ref})
	a.requireRead(t, next)
	require.ErrorContains(t, removeFrom(t, n, "", id), first.ID)
}

// An image that CRI-O pulled itself leans on layers in the root of vm. Removing
// the image that these came with leaves it whole, and frees the rest.
func TestLeaningImageOutlivesTheOther(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	shared := [][]images.Entry{appLayer("bottom", busybox(t)...), appLayer("shared")}
	x := pushApp(t, n, "vm/x:1", append(slices.Clone(shared), appLayer("only-x"))...)
	y := pushApp(t, n, "y:1", append(slices.Clone(shared), appLayer("only-y"))...)
	other := pushApp(t, n, "vm/other:1", appLayer("other"))
	before := layersOf(t, n.CRIORoot())
	for _, free := range []struct {
		name string
		do   func(t *testing.T)
	}{
		{"the next removal frees", func(t *testing.T) {
			require.NoError(t, removeFrom(t, n, "", pullFor(t, n, "vm", other.ref)))
		}},
		{"the sweep frees", func(t *testing.T) {
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
			require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		}},
		{"its own removal through ocihold frees", nil},
	} {
		t.Run(free.name, func(t *testing.T) {
			id := pullFor(t, n, "vm", x.ref)
			_, err := n.Pull(t.Context(), y.ref)
			require.NoError(t, err)
			require.Len(t, layersOf(t, n.CRIORoot()), len(before)+1, "it leans")
			require.Len(t, layersOf(t, n.HandlerRoot("vm")), 3)
			require.NoError(t, removeFrom(t, n, "", id))

			require.Empty(t, find(t, n.HandlerRoot("vm"), "only-x"), "its own are freed")
			require.Len(t, find(t, n.HandlerRoot("vm"), "shared"), 1)
			require.Contains(t, imageIDs(t, n), y.ids[""])
			require.NotContains(t, imageIDs(t, n), id)
			requireAllMount(t, n, x, y)
			pod := runPod(t, n, realnode.PodSpec{})
			c := run(t, pod, realnode.ContainerSpec{Image: y.ref})
			y.requireRead(t, c)
			require.NoError(t, pod.Remove(t.Context()))

			if free.do == nil {
				require.NoError(t, removeFrom(t, n, "", y.ref))
			} else {
				_, err = command(t, n, "crictl", "rmi", y.ref)
				require.NoError(t, err)
				free.do(t)
			}
			await(t, func() error {
				if left := layersOf(t, n.HandlerRoot("vm")); len(left) > 0 {
					return fmt.Errorf("layers are left: %q", left)
				}
				return nil
			})
			require.Equal(t, before, layersOf(t, n.CRIORoot()))
		})
	}
	n.AssertClean(t)
}

// A container of one root's image may run from another root's copy of the same
// layers. These stay as long as it needs them.
func TestContainerOnLayersOfAnotherRoot(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	a := pushApp(t, n, "both:1", appLayer("lower", busybox(t)...), appLayer("upper"))
	ids := map[string]string{"vm": pullFor(t, n, "vm", a.ref), "wasm": pullFor(t, n, "wasm", a.ref)}
	require.NotEqual(t, ids["vm"], ids["wasm"])
	require.Equal(t, layersOf(t, n.HandlerRoot("vm")), layersOf(t, n.HandlerRoot("wasm")))
	handlers := []string{"vm", "wasm"}
	for i, handler := range handlers {
		other := handlers[1-i]
		t.Run(handler, func(t *testing.T) {
			pod := runPod(t, n, realnode.PodSpec{Handler: handler})
			c := run(t, pod, realnode.ContainerSpec{Image: ids[handler], UserImage: a.ref})
			require.ErrorContains(t, removeFrom(t, n, "", ids[handler]), c.ID)
			require.NoError(t, removeFrom(t, n, "", ids[other]), "nobody uses it")
			for _, dir := range lowerDirs(t, n, c) {
				require.DirExists(t, dir)
			}
			a.requireRead(t, c)
			requireAllMount(t, n, a)
			next := run(t, pod, realnode.ContainerSpec{Name: "next", Image: ids[handler], UserImage: a.ref})
			a.requireRead(t, next)
			require.NoError(t, pod.Remove(t.Context()))
			require.Equal(t, ids[other], pullFor(t, n, other, a.ref))
		})
	}
	for _, handler := range handlers {
		require.NoError(t, removeFrom(t, n, "", ids[handler]))
	}
	for _, handler := range handlers {
		require.Empty(t, layersOf(t, n.HandlerRoot(handler)), handler)
	}
	n.AssertClean(t)
}

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
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
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

// app is a pushed image, for linux and for wasi/wasm, whose layers are the same.
type app struct {
	ref   string
	ids   map[string]string // by handler
	files map[string]string // hashes of contents by path
}

// appLayer is a layer with a file of this name and more.
func appLayer(name string, more ...images.Entry) []images.Entry {
	return append([]images.Entry{
		images.File(name, strings.Repeat(name, 100), 0o644), images.File("dir-"+name+"/file", name, 0o600),
	}, more...)
}

func pushApp(t testing.TB, n *realnode.Node, ref string, layers ...[]images.Entry) app {
	t.Helper()
	linux, err := images.Image(images.Config{}, layers...)
	require.NoError(t, err)
	wasm, err := images.Image(images.Config{Platform: "wasi/wasm"}, layers...)
	require.NoError(t, err)
	index, err := images.Index(linux, wasm)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), ref, index))
	a := app{
		ref:   n.Ref(ref),
		ids:   map[string]string{"": configID(t, linux), "vm": configID(t, linux), "wasm": configID(t, wasm)},
		files: map[string]string{},
	}
	for _, e := range slices.Concat(layers...) {
		if e.Content != nil {
			a.files[e.Path] = hashOf(t, e.Content())
		}
	}
	return a
}

// requireRead reads every file of a container's root file system: as the
// container has it, and as a program sees it that is started in it now.
func (a app) requireRead(t testing.TB, c *realnode.Container) {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	a.requireFiles(t, fmt.Sprintf("/proc/%d/root", info.PID))
	var paths []string
	for path := range maps.Keys(a.files) {
		paths = append(paths, "/"+path)
	}
	sh(t, c, "cat "+strings.Join(paths, " ")+" > /dev/null")
}

// requireFiles reads every file of a file system, and requires the image's.
func (a app) requireFiles(t testing.TB, root string) {
	t.Helper()
	var own syscall.Stat_t
	require.NoError(t, syscall.Stat(root, &own))
	got := map[string]string{} // without what the runtime adds
	require.NoError(t, filepath.WalkDir(root+"/", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && entry.IsDir() && stat.Dev != own.Dev {
			return fs.SkipDir // /proc, /dev and the like
		}
		if !info.Mode().IsRegular() {
			return nil
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		hash := hashOf(t, file)
		name := strings.TrimPrefix(path, root+"/")
		if _, ours := a.files[name]; ours {
			got[name] = hash
		}
		return nil
	}))
	require.Equal(t, a.files, got, a.ref)
}

func hashOf(t testing.TB, r io.Reader) string {
	t.Helper()
	hash := sha256.New()
	_, err := io.Copy(hash, r)
	require.NoError(t, err)
	return hex.EncodeToString(hash.Sum(nil))
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

// rootOfHandler is where the images of a handler are, "" for CRI-O's own.
func rootOfHandler(n *realnode.Node, handler string) string {
	if handler == "" {
		return n.CRIORoot()
	}
	return n.HandlerRoot(handler)
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

// topLayers are the top layers of a root's images, by image id.
func topLayers(t testing.TB, root string) map[string]string {
	t.Helper()
	var records []struct{ ID, Layer string }
	readRecords(t, filepath.Join(root, "overlay-images", "images.json"), &records)
	tops := map[string]string{}
	for _, image := range records {
		tops[image.ID] = image.Layer
	}
	return tops
}

// layersOf are the ids of a root's layers, without those of running containers.
func layersOf(t testing.TB, root string) []string {
	t.Helper()
	var records []struct{ ID string }
	readRecords(t, filepath.Join(root, "overlay-layers", "layers.json"), &records)
	ids := []string{}
	for _, layer := range records {
		ids = append(ids, layer.ID)
	}
	slices.Sort(ids)
	return ids
}

func readRecords(t testing.TB, file string, records any) {
	t.Helper()
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(content, records))
}

// find returns the layers of a root that have this file.
func find(t testing.TB, root, file string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, "overlay", "*", "diff", file))
	require.NoError(t, err)
	return found
}

// requireAllMount mounts those of the images that are there, as the overlay
// driver would in each root, and reads them.
func requireAllMount(t testing.TB, n *realnode.Node, apps ...app) {
	t.Helper()
	for _, handler := range handlersOfRoots {
		tops := topLayers(t, rootOfHandler(n, handler))
		for _, a := range apps {
			for _, id := range []string{a.ids[""], a.ids["wasm"]} {
				if top, ok := tops[id]; ok {
					dirs := append(stackOf(t, n, handler, top), t.TempDir()) // one alone is refused
					at := t.TempDir()
					require.NoError(t, syscall.Mount("overlay", at, "overlay", syscall.MS_RDONLY, "lowerdir="+strings.Join(dirs, ":")), "%q", dirs)
					a.requireFiles(t, at)
					require.NoError(t, syscall.Unmount(at, 0))
				}
			}
		}
	}
}

// stackOf are the directories, topmost first, that the overlay driver of a
// handler's root mounts for a layer. CRI-O's own root may use those of others.
func stackOf(t testing.TB, n *realnode.Node, handler, top string) []string {
	t.Helper()
	homes := []string{filepath.Join(rootOfHandler(n, handler), "overlay")}
	if handler == "" {
		homes = append(homes, filepath.Join(n.HandlerRoot("vm"), "overlay"), filepath.Join(n.HandlerRoot("wasm"), "overlay"))
	}
	in := func(path string) string {
		for _, home := range homes {
			if dir, err := filepath.EvalSymlinks(filepath.Join(home, path)); err == nil {
				return dir
			}
		}
		require.Fail(t, "a layer is gone", "%s in %q", path, homes)
		return ""
	}
	dirs := []string{in(filepath.Join(top, "diff"))}
	lower, err := os.ReadFile(filepath.Join(filepath.Dir(dirs[0]), "lower"))
	if errors.Is(err, fs.ErrNotExist) {
		return dirs
	}
	require.NoError(t, err)
	for link := range strings.SplitSeq(strings.TrimSpace(string(lower)), ":") {
		dirs = append(dirs, in(link))
	}
	return dirs
}

// crioKnows is what CRI-O lists.
type crioKnows struct{ pods, containers, images []string }

func whatCRIOKnows(t testing.TB, n *realnode.Node) crioKnows {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	knows := crioKnows{images: imageIDs(t, n)}
	pods, err := n.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	require.NoError(t, err)
	for _, pod := range pods.GetItems() {
		knows.pods = append(knows.pods, pod.GetId()+" "+pod.GetState().String())
	}
	containers, err := n.Runtime().ListContainers(ctx, &cri.ListContainersRequest{})
	require.NoError(t, err)
	for _, c := range containers.GetContainers() {
		knows.containers = append(knows.containers, c.GetId()+" "+c.GetState().String())
	}
	slices.Sort(knows.pods)
	slices.Sort(knows.containers)
	return knows
}
