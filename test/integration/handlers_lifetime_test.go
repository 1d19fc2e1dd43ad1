package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// Whichever comes first, the container or the removal of its image: a container
// that there is has all its files, and a removal is done or says who uses it.
func TestCreateAgainstRemove(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	a := pushApp(t, n, "raced:1", appLayer("lower", busybox(t)...), appLayer("upper"))
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	random := seeded(t)
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
