package integration

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realkubelet"
	"github.com/ocihold/ocihold/test/realnode"
)

// collection is a node on a disk of its own, full of images: the roots of CRI-O
// and of vm are on one disk, that of wasm is elsewhere.
type collection struct {
	node *realnode.Node
	// app and vmApp are run by pods; volume and vmVolume are their volumes; those
	// of vm are in its root only. native is one of Kubernetes' own volumes.
	// elsewhere is not used, and its bytes are on another disk.
	app, vmApp, volume, vmVolume, native, elsewhere string
	// unused are the ids of the others.
	unused []string
}

func newCollection(t *testing.T) *collection {
	t.Helper()
	d := newDiskAt(t, "ext4", "lib")
	wasm := filepath.Join(d.point, "handlers", "wasm")
	require.NoError(t, os.MkdirAll(wasm, 0o755))
	require.NoError(t, unix.Mount("wasm", wasm, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(wasm, 0) }) // the node's end does, if it came so far
	n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true})
	content := func(name string) []images.Entry {
		return []images.Entry{images.Big(name, 12<<20, uint64(len(name))), images.File(name+".txt", name, 0o644)}
	}
	c := &collection{
		node:     n,
		app:      push(t, n, "kubelet/app:1", busybox(t)),
		vmApp:    push(t, n, "kubelet/vm-app:1", busybox(t), []images.Entry{images.File("vm", "x", 0o644)}),
		volume:   push(t, n, "kubelet/volume:1", content("model"), content("more of the model")),
		vmVolume: push(t, n, "kubelet/vm-volume:1", content("model in vm")),
		native:   push(t, n, "kubelet/native:1", []images.Entry{images.File("content", "it is here", 0o644)}),
	}
	for _, ref := range []string{c.app, c.volume, c.native} {
		pullFor(t, n, "", ref)
	}
	pullFor(t, n, "vm", c.vmApp)
	pullFor(t, n, "vm", c.vmVolume)
	c.elsewhere = wasmImage(t, n)
	pullFor(t, n, "wasm", c.elsewhere)

	app := push(t, n, "kubelet/unused-app:1", busybox(t), content("app"))
	inVM := push(t, n, "kubelet/unused-in-vm:1", busybox(t), content("app in vm"))
	was := push(t, n, "kubelet/was-volume:1", content("was a volume"))
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: was, MountPath: "/v"})})
	run(t, pod, realnode.ContainerSpec{})
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
	c.unused = []string{
		pullFor(t, n, "", app), pullFor(t, n, "vm", inVM), pullFor(t, n, "", was), pullFor(t, n, "", n.BaseImage()),
	}
	return c
}

// TestKubeletCollection has kubelet collect images above the high mark: only
// those go that nobody uses and whose bytes are on the disk that is full.
func TestKubeletCollection(t *testing.T) {
	needKubelet(t)
	c := newCollection(t)
	n := c.node
	gates := map[string]bool{"ImageVolume": true, "RuntimeClassInImageCriApi": true}
	k := realkubelet.Start(t, n, realkubelet.Options{Gates: gates})
	pods := []realkubelet.Pod{
		{Name: "volume", Image: c.app, Annotations: volumes(t, volume{Image: c.volume, MountPath: "/v"})},
		{Name: "in-vm", Image: c.vmApp, Annotations: volumes(t, volume{Image: c.vmVolume, MountPath: "/v"}), RuntimeClass: "vm"},
		{Name: "native", Image: c.app, Volume: c.native},
	}
	for _, pod := range pods {
		pod.PullPolicy = "Never"
		k.Run(t, pod)
		assertRuns(t, n, pod, k.AwaitContainer(t, pod.Name, 0))
	}
	before, up := c.files(t), len(k.Calls())
	require.Len(t, before, 6)
	collecting := realkubelet.Options{Gates: gates, GCHigh: 10, GCLow: 1}
	assert.ElementsMatch(t, c.unused, collect(t, k, collecting), "kubelet asks to remove what is not used, and nothing else")
	c.assertCollected(t, before)

	compareRecording(t, n, "collection", collectionCalls(k.Calls()[up:]))

	// What is let go can be collected. kubelet removes a pod's last traces once a
	// minute.
	id := pullFor(t, n, "", c.volume)
	k.Remove(t, "volume")
	require.EventuallyWithT(t, func(check *assert.CollectT) {
		answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: c.volume}})
		assert.NoError(check, err)
		assert.False(check, answer.GetImage().GetPinned())
	}, 3*time.Minute, 200*time.Millisecond)
	assert.Equal(t, []string{id}, collect(t, k, collecting))
}

// collect has kubelet collect images and returns those that it asks to remove.
// It does so as it starts, with what it finds running, but in vain where it has
// no statistics of the disk by then. The low mark is to be one that cannot be
// reached: so the outcome is in the log.
func collect(t *testing.T, k *realkubelet.Kubelet, o realkubelet.Options) []string {
	t.Helper()
	before := len(k.Calls())
	for tries := 0; ; tries++ {
		require.Less(t, tries, 20, "kubelet has no statistics of the disk")
		k.Restart(t, o)
		require.Eventually(t, func() bool {
			return k.HasLogged(t, "Image garbage collection failed")
		}, time.Minute, 50*time.Millisecond)
		if !k.HasLogged(t, "invalid capacity 0 on image filesystem") {
			break
		}
	}
	var removed []string
	for _, call := range k.Calls()[before:] {
		if call.Method == "ImageService/RemoveImage" {
			assert.Empty(t, call.Error)
			removed = append(removed, removedImage(call))
		}
	}
	return removed
}

// collectionCalls are the calls by which kubelet collects images, in an order
// that is always the same: a list of disks and one of images, and then the
// removals, by the images' names.
func collectionCalls(calls []realkubelet.Call) []realkubelet.Call {
	of := func(method string) []realkubelet.Call {
		return slices.DeleteFunc(slices.Clone(calls), func(c realkubelet.Call) bool { return c.Method != "ImageService/"+method })
	}
	disks, lists, removals := of("ImageFsInfo"), of("ListImages"), of("RemoveImage")
	names := make(map[string]string)
	for _, image := range lists[0].Answer.(map[string]any)["images"].([]any) {
		image := image.(map[string]any)
		names[image["id"].(string)] = fmt.Sprint(image["repoTags"])
	}
	slices.SortFunc(removals, func(a, b realkubelet.Call) int {
		return strings.Compare(names[removedImage(a)], names[removedImage(b)])
	})
	return slices.Concat(disks[:1], lists[:1], removals)
}

func removedImage(call realkubelet.Call) string {
	return call.Request.(map[string]any)["image"].(map[string]any)["image"].(string)
}

// TestKubeletCollectionCalls replays what kubelet says as it collects.
func TestKubeletCollectionCalls(t *testing.T) {
	c := newCollection(t)
	n := c.node
	for handler, image := range map[string][2]string{"": {c.app, c.volume}, "vm": {c.vmApp, c.vmVolume}} {
		pod := runPod(t, n, realnode.PodSpec{Handler: handler, Annotations: volumes(t, volume{Image: image[1], MountPath: "/v"})})
		run(t, pod, realnode.ContainerSpec{Image: image[0]})
	}
	pod := runPod(t, n, realnode.PodSpec{})
	run(t, pod, realnode.ContainerSpec{Image: c.app, Mounts: []*cri.Mount{native(c.native, "/v", "")}})
	await(t, func() error {
		answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: c.native}})
		if err == nil && !answer.GetImage().GetPinned() {
			err = errors.New("the image of the native volume is not held")
		}
		return err
	})
	before := c.files(t)
	replay(t, n, "collection")
	c.assertCollected(t, before)
}

// assertCollected holds that what is not used is gone and all else is whole.
func (c *collection) assertCollected(t *testing.T, before map[string][32]byte) {
	t.Helper()
	list, err := c.node.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	var names []string
	for _, image := range list.GetImages() {
		names = append(names, image.GetRepoTags()...)
	}
	want := []string{c.app, c.vmApp, c.volume, c.vmVolume, c.native, c.elsewhere, c.node.Ref("pause:1")}
	assert.ElementsMatch(t, want, names)
	assert.Equal(t, before, c.files(t), "every file of the volumes is there")
}

// files are the hashes of the files of the annotation volumes, as the layers on
// the disk have them.
func (c *collection) files(t *testing.T) map[string][32]byte {
	t.Helper()
	hashes := make(map[string][32]byte)
	for root, names := range map[string][]string{
		c.node.CRIORoot():        {"model", "more of the model"},
		c.node.HandlerRoot("vm"): {"model in vm"},
	} {
		for _, name := range names {
			for _, file := range []string{name, name + ".txt"} {
				found, err := filepath.Glob(filepath.Join(root, "overlay", "*", "diff", file))
				require.NoError(t, err)
				require.Len(t, found, 1, file)
				content, err := os.ReadFile(found[0])
				require.NoError(t, err)
				hashes[file] = sha256.Sum256(content)
			}
		}
	}
	return hashes
}
