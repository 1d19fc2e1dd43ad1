package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realkubelet"
	"github.com/ocihold/ocihold/test/realnode"
)

// pinSettings is a file that has images in use pinned.
func pinSettings(t testing.TB) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pin.toml")
	require.NoError(t, os.WriteFile(file, []byte("[volumes]\npin = true\n"), 0o600))
	return file
}

// checkPinned returns an error unless CRI-O, asked itself, reports exactly the
// images of ids and its pause image as pinned.
func checkPinned(t testing.TB, n *realnode.Node, ids ...string) error {
	t.Helper()
	list, err := n.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	want := append([]string{}, ids...)
	var got []string
	for _, image := range list.GetImages() {
		pin := "in-use.ocihold.dev/pin:" + image.GetId()
		if slices.Contains(image.GetRepoTags(), n.Ref("pause:1")) {
			continue
		}
		if image.GetPinned() {
			got = append(got, image.GetId())
		}
		if has := slices.Contains(image.GetRepoTags(), pin); has != image.GetPinned() {
			return fmt.Errorf("image %q is pinned: %t", image.GetRepoTags(), image.GetPinned())
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("pinned are %q, not %q", got, want)
	}
	return nil
}

// A kubelet that asks CRI-O for images is told which are in use, by a name that
// nobody else sees.
func TestPins(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{OciholdConf: pinSettings(t)})
	kubelet := filepath.Join(t.TempDir(), "kubelet.yaml")
	require.NoError(t, os.WriteFile(kubelet, []byte("kind: KubeletConfiguration\n"), 0o600))
	out, err := ociholdCommand(t, n, "check", "--kubelet-config", kubelet)
	require.NoError(t, err)
	require.Contains(t, out, "it asks CRI-O for images: "+kubelet+" has no imageServiceEndpoint, which has what is in use pinned")
	img, theirs := pushFiles(t, n, "pinned:1", 3, 5), pushFiles(t, n, "native:1", 2, 5)
	unused := pushFiles(t, n, "unused:1", 1, 5)
	pull := func(ref string) {
		t.Helper()
		_, err := n.Pull(t.Context(), ref)
		require.NoError(t, err)
	}
	pinned := func(ids ...string) {
		t.Helper()
		await(t, func() error { return checkPinned(t, n, ids...) })
	}
	// prune is what an operator asks of CRI-O, past ocihold.
	prune := func() {
		t.Helper()
		_, err := command(t, n, "crictl", "--image-endpoint", crioEndpoint(t, n), "rmi", "--prune")
		require.NoError(t, err)
	}
	pull(theirs.ref)
	pull(unused.ref)
	require.NoError(t, checkPinned(t, n))
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
	c := run(t, pod, realnode.ContainerSpec{Mounts: []*cri.Mount{native(theirs.ref, "/theirs", "")}})
	pinned(img.id, theirs.id)
	out, err = ociholdCommand(t, n, "check")
	assert.NotContains(t, out, "pinned_images", err)

	prune()
	ids := imageIDs(t, n)
	assert.NotContains(t, ids, unused.id)
	assert.Subset(t, ids, []string{img.id, theirs.id})
	require.NoError(t, checkPinned(t, n, img.id, theirs.id))

	for _, ref := range []string{img.ref, theirs.ref} {
		status, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
		require.NoError(t, err)
		assert.Equal(t, []string{ref}, status.GetImage().GetRepoTags())
	}
	out, err = ociholdCommand(t, n, "images", "-o", "json")
	require.NoError(t, err)
	assert.NotContains(t, out, "in-use.ocihold.dev")

	_, err = command(t, n, "podman", "untag", img.id, "in-use.ocihold.dev/pin:"+img.id)
	require.NoError(t, err)
	require.NoError(t, checkPinned(t, n, theirs.id))
	wakeSettling(t, n)
	pinned(img.id, theirs.id)

	_, err = command(t, n, "podman", "rmi", "--force", theirs.id)
	require.NoError(t, err)
	wakeSettling(t, n)
	pinned(img.id, theirs.id)
	img.assertRead(t, c, "/vol")
	theirs.assertRead(t, c, "/theirs")

	// Switched off, the names go; and come again.
	for _, pin := range []bool{false, true} {
		restartWith(t, n, fmt.Sprintf("[volumes]\npin = %t\n", pin))
		if pin {
			pinned(img.id, theirs.id)
		} else {
			pinned()
		}
	}

	require.NoError(t, pod.Remove(t.Context()))
	pinned()
	await(t, func() error { return checkHeld(n) })
	prune()
	assert.NotContains(t, imageIDs(t, n), img.id)
	assert.NotContains(t, imageIDs(t, n), theirs.id)
	n.AssertClean(t)
}

// TestKubeletCollectionAtCRIO has a kubelet that asks CRI-O for images collect
// them: those go that nobody uses.
func TestKubeletCollectionAtCRIO(t *testing.T) {
	needKubelet(t)
	d := newDiskAt(t, "ext4", "lib")
	n := realnode.Boot(t, realnode.Options{Dir: d.node, OciholdConf: pinSettings(t)})
	content := func(name string) []images.Entry { return []images.Entry{images.Big(name, 12<<20, uint64(len(name)))} }
	app := push(t, n, "kubelet/app:1", busybox(t))
	unused := push(t, n, "kubelet/unused:1", content("not used"))
	img, theirs := pushFiles(t, n, "kubelet/volume:1", 2, 5), push(t, n, "kubelet/native:1", content("native"), []images.Entry{images.File("content", "it is here", 0o644)})
	ids := map[string]string{}
	for _, ref := range []string{app, unused, img.ref, theirs, n.BaseImage()} {
		_, err := n.Pull(t.Context(), ref)
		require.NoError(t, err)
		status, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
		require.NoError(t, err)
		ids[ref] = status.GetImage().GetId()
	}
	o := realkubelet.Options{Gates: map[string]bool{"ImageVolume": true}, CRIOImages: true}
	k := realkubelet.Start(t, n, o)
	for _, pod := range []realkubelet.Pod{
		{Name: "volume", Image: app, PullPolicy: "Never", Annotations: volumes(t, volume{Image: img.ref, MountPath: "/v"})},
		{Name: "native", Image: app, PullPolicy: "Never", Volume: theirs},
	} {
		k.Run(t, pod)
		assertRuns(t, n, pod, k.AwaitContainer(t, pod.Name, 0))
	}
	await(t, func() error { return checkPinned(t, n, img.id, ids[theirs]) })
	o.GCHigh, o.GCLow = 10, 1
	assert.ElementsMatch(t, []string{ids[unused], ids[n.BaseImage()]}, collect(t, k, o),
		"kubelet asks to remove what is not used, and nothing else")
	assert.Subset(t, imageIDs(t, n), []string{img.id, ids[theirs], ids[app]})
	require.NoError(t, checkPinned(t, n, img.id, ids[theirs]))

	// What is let go can be collected. kubelet removes a pod's last traces once a
	// minute.
	k.Remove(t, "volume")
	require.EventuallyWithT(t, func(check *assert.CollectT) {
		assert.NoError(check, checkPinned(t, n, ids[theirs]))
	}, 3*time.Minute, 200*time.Millisecond)
	assert.Equal(t, []string{img.id}, collect(t, k, o))
}

// crioEndpoint is CRI-O's own socket, as crictl takes it.
func crioEndpoint(t testing.TB, n *realnode.Node) string {
	t.Helper()
	for _, variable := range n.Env() {
		if endpoint, ok := strings.CutPrefix(variable, "CONTAINER_RUNTIME_ENDPOINT="); ok {
			return endpoint
		}
	}
	require.Fail(t, "the node has no such socket")
	return ""
}
