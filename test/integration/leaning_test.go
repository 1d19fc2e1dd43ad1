package integration

import (
	"errors"
	"fmt"
	"io/fs"
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

// An image on layers that CRI-O put on those in the root of vm is pulled all the
// same: into CRI-O's root when what leans can be mended, else by CRI-O.
func TestPullOnLeaningLayers(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	shared := [][]images.Entry{appLayer("bottom", busybox(t)...), appLayer("shared")}
	x := pushApp(t, n, "vm/x:1", shared[0], appLayer("only-x"))
	y := pushApp(t, n, "y:1", shared...)
	z := pushApp(t, n, "z:1", append(slices.Clone(shared), appLayer("only-z"))...)
	for _, used := range []bool{false, true} {
		t.Run(fmt.Sprintf("used %t", used), func(t *testing.T) {
			pullFor(t, n, "vm", x.ref)
			_, err := n.Pull(t.Context(), y.ref)
			require.NoError(t, err)
			pod := runPod(t, n, realnode.PodSpec{})
			if used {
				run(t, pod, realnode.ContainerSpec{Name: "y", Image: y.ref})
			}
			require.Equal(t, z.ids[""], pullFor(t, n, "", z.ref))
			require.Equal(t, used, strings.Contains(logOf(t, n, realnode.Ocihold), "CRI-O pulls the image"))
			z.requireRead(t, run(t, pod, realnode.ContainerSpec{Name: "z", Image: z.ref}))
			requireAllMount(t, n, x, y, z)
			require.NoError(t, pod.Remove(t.Context()))
			for _, a := range []app{x, y, z} {
				require.NoError(t, removeFrom(t, n, "", a.ref))
			}
		})
	}
	n.AssertClean(t)
}

// An image that CRI-O pulled itself, and that leans on layers in the root of vm,
// is mended as soon as no container runs from it. No registry is there to ask.
func TestLeaningImageIsMended(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	shared := [][]images.Entry{appLayer("bottom", busybox(t)...), appLayer("shared")}
	x := pushApp(t, n, "vm/x:1", append(slices.Clone(shared), appLayer("only-x"))...)
	y := pushApp(t, n, "y:1", append(slices.Clone(shared), appLayer("only-y"))...)
	same := pushApp(t, n, "same:1", append(slices.Clone(shared), appLayer("only-x"))...)
	require.NoError(t, n.Push(t.Context(), "y:2", y.index))
	before := layersOf(t, n.CRIORoot())
	id := pullFor(t, n, "vm", x.ref)
	for _, ref := range []string{y.ref, n.Ref("y:2"), same.ref} {
		_, err := n.Pull(t.Context(), ref)
		require.NoError(t, err)
	}
	leans := layersOf(t, n.CRIORoot())
	require.Len(t, leans, len(before)+1)
	status := func(ref string) string {
		status, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}, Verbose: true})
		require.NoError(t, err)
		return status.String()
	}
	of := status(y.ref)
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{})
	require.NoError(t, err)
	c := run(t, pod, realnode.ContainerSpec{Image: y.ref})
	require.NoError(t, n.Kill(t.Context(), realnode.Registry, syscall.SIGKILL))
	sweep := func(says string) {
		t.Helper()
		told := len(logOf(t, n, realnode.Ocihold))
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		await(t, func() error {
			for line := range strings.Lines(logOf(t, n, realnode.Ocihold)[told:]) {
				if strings.Contains(line, says) && strings.Contains(line, y.ids[""]) {
					return nil
				}
			}
			return errors.New("ocihold does not say: " + says)
		})
	}

	sweep("it is mended when nobody uses it")
	require.Equal(t, of, status(y.ref))
	y.requireRead(t, c)
	require.Subset(t, layersOf(t, n.CRIORoot()), leans)
	require.Len(t, find(t, n.CRIORoot(), "only-y"), 1)
	require.NoError(t, pod.Remove(t.Context()))

	sweep("has all its layers now")
	await(t, func() error { return leaningIn(t, n.CRIORoot()) }) // the other image too
	require.Equal(t, of, status(y.ref))
	require.Equal(t, of, status(n.Ref("y:2")))
	require.Subset(t, imageIDs(t, n), []string{y.ids[""], x.ids[""]})
	require.NoError(t, removeFrom(t, n, "vm", id))
	require.Empty(t, layersOf(t, n.HandlerRoot("vm")))
	require.Empty(t, find(t, n.HandlerRoot("vm"), "*"))
	requireAllMount(t, n, x, y)
	pod = runPod(t, n, realnode.PodSpec{})
	y.requireRead(t, run(t, pod, realnode.ContainerSpec{Image: y.ref}))
	require.NoError(t, pod.Remove(t.Context()))
	for _, ref := range []string{y.ref, same.ref} {
		_, err := command(t, n, "crictl", "rmi", ref)
		require.NoError(t, err)
	}
	require.Equal(t, before, layersOf(t, n.CRIORoot()))
	require.NoError(t, n.Start(t.Context(), realnode.Registry))
	n.AssertClean(t)
}

// Whenever ocihold is killed while it mends an image, the next start has the
// image as it was.
func TestMendingKilledAtAnyMoment(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	const size = 2 << 20
	shared := [][]images.Entry{busybox(t), {images.Big("shared", size, 1)}}
	x := pushApp(t, n, "vm/x:1", shared...)
	y := pushApp(t, n, "y:1", append(slices.Clone(shared), []images.Entry{images.Big("a", size, 2)}, []images.Entry{images.Big("b", size, 3)})...)
	random := seeded(t)
	before, others := layersOf(t, n.CRIORoot()), len(topLayers(t, n.CRIORoot()))
	pullFor(t, n, "vm", x.ref)
	absent := 0
	for i := range count(8, 100) {
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
		_, err := n.Pull(t.Context(), y.ref)
		require.NoError(t, err)
		require.Len(t, layersOf(t, n.CRIORoot()), len(before)+2, "it leans")
		started := make(chan error, 1)
		go func() { started <- n.Start(t.Context(), realnode.Ocihold) }()
		await(t, func() error {
			if len(layersOf(t, n.CRIORoot())) > len(before)+2 {
				return nil
			}
			return errors.New("nothing is mended")
		})
		wait := time.Duration(random.Int64N(int64(300 * time.Millisecond)))
		time.Sleep(wait)
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
		t.Log(<-started) // it may have been killed before it was ready
		_, there := topLayers(t, n.CRIORoot())[y.ids[""]]
		if !there {
			absent++
		}
		t.Logf("%d is killed after %s: the image is there: %t, the layers: %d", i, wait, there, len(layersOf(t, n.CRIORoot()))-len(before))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		await(t, func() error {
			// CRI-O's own list fails where an image goes while it is made.
			if got := topLayers(t, n.CRIORoot()); got[y.ids[""]] == "" || len(got) != others+1 {
				return fmt.Errorf("the images are %v", got)
			}
			left := layersOf(t, n.CRIORoot())
			if len(left) != len(before)+4 {
				return fmt.Errorf("the layers are %q", left)
			}
			return leaningIn(t, n.CRIORoot())
		})
		requireAllMount(t, n, y)
		require.Contains(t, imageIDs(t, n), y.ids[""])
		_, err = command(t, n, "crictl", "rmi", y.ref)
		require.NoError(t, err)
		require.Equal(t, before, layersOf(t, n.CRIORoot()))
	}
	t.Log("it was absent", absent, "times")
	require.NoError(t, removeFrom(t, n, "", x.ref))
	n.AssertClean(t)
}

// leaningIn returns an error where a layer is missing that the images of a root
// need, by the files of containers/storage and of the overlay driver.
func leaningIn(t testing.TB, root string) error {
	t.Helper()
	layers := layersOf(t, root)
	for id, top := range topLayers(t, root) {
		if !slices.Contains(layers, top) {
			return fmt.Errorf("layer %s of image %s is missing", top, id)
		}
	}
	for _, id := range layers {
		lower, err := os.ReadFile(filepath.Join(root, "overlay", id, "lower"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		require.NoError(t, err)
		for link := range strings.SplitSeq(strings.TrimSpace(string(lower)), ":") {
			if _, err := os.Stat(filepath.Join(root, "overlay", link)); err != nil {
				return fmt.Errorf("layer %s is on one of another root: %w", id, err)
			}
		}
	}
	return nil
}
