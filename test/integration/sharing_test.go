package integration

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// An image is mounted and leased once, whoever uses it, and let go after the
// last.
func TestSharing(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})

	t.Run("pods and containers", func(t *testing.T) {
		before := layers(t, n)
		img := pushFiles(t, n, "shared:1", 3, 5)
		annotations := volumes(t, volume{Image: img.ref, MountPath: "/vol"})
		var pods []*realnode.Pod
		var containers []*realnode.Container
		var devices []string
		for i := range 2 {
			pod := runPod(t, n, realnode.PodSpec{Name: fmt.Sprintf("shared-%d", i), Annotations: annotations})
			pods = append(pods, pod)
			for _, name := range []string{"one", "two"} {
				c := run(t, pod, realnode.ContainerSpec{Name: name})
				containers = append(containers, c)
				devices = append(devices, sh(t, c, "stat -c %d /vol"))
			}
		}
		require.NoError(t, checkHeld(n, img.id))
		assert.Len(t, slices.Compact(devices), 1, "all have the same file system: %q", devices)
		require.Equal(t, []string{
			"shared-0 one /vol " + img.id, "shared-0 two /vol " + img.id,
			"shared-1 one /vol " + img.id, "shared-1 two /vol " + img.id,
		}, given(t, n))

		require.NoError(t, containers[0].Remove(t.Context()))
		require.NoError(t, pods[0].Remove(t.Context()))
		settle(t, n, img.id)
		require.Equal(t, []string{"shared-1 one /vol " + img.id, "shared-1 two /vol " + img.id}, given(t, n))
		img.assertRead(t, containers[2], "/vol")

		require.NoError(t, containers[2].Remove(t.Context()))
		settle(t, n, img.id)
		img.assertRead(t, containers[3], "/vol")
		require.NoError(t, containers[3].Remove(t.Context()))
		settle(t, n, img.id)
		require.Empty(t, given(t, n), "the pod that is left may still ask for it")

		require.NoError(t, pods[1].Remove(t.Context()))
		requireNothingHeld(t, n)
		_, err := command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
		require.NotContains(t, imageIDs(t, n), img.id)
		require.Equal(t, before, layers(t, n))
	})

	t.Run("one image by tag, digest and both", func(t *testing.T) {
		img := pushFiles(t, n, "named:1", 2, 3)
		repository, _, _ := strings.Cut(img.ref, ":1")
		refs := []string{img.ref, repository + "@" + img.digest, img.ref + "@" + img.digest}
		var pods []*realnode.Pod
		for i, ref := range refs {
			pods = append(pods, runPod(t, n, realnode.PodSpec{
				Name: fmt.Sprintf("named-%d", i), Annotations: volumes(t, volume{Image: ref, MountPath: "/vol"}),
			}))
		}
		var want []string
		for i, pod := range pods {
			img.assertRead(t, run(t, pod, realnode.ContainerSpec{}), "/vol")
			want = append(want, fmt.Sprintf("named-%d main /vol %s", i, img.id))
		}
		require.NoError(t, checkHeld(n, img.id))
		require.Equal(t, want, given(t, n))
		for _, pod := range pods[:2] {
			require.NoError(t, pod.Remove(t.Context()))
			settle(t, n, img.id)
		}
		require.NoError(t, pods[2].Remove(t.Context()))
		requireNothingHeld(t, n)
		_, err := command(t, n, "crictl", "rmi", img.id)
		require.NoError(t, err)
		require.NotContains(t, imageIDs(t, n), img.id)
	})

	t.Run("the image of the container's own rootfs", func(t *testing.T) {
		before := layers(t, n)
		base, err := images.Busybox()
		require.NoError(t, err)
		marked, err := images.Layer(images.File("marked", "marked\n", 0o644))
		require.NoError(t, err)
		content, err := mutate.AppendLayers(base, marked)
		require.NoError(t, err)
		img := pushImage(t, n, "rootfs:1", content)
		_, err = n.Pull(t.Context(), img.ref)
		require.NoError(t, err)

		pod := runPod(t, n, realnode.PodSpec{Name: "rootfs", Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
		c := run(t, pod, realnode.ContainerSpec{Image: img.ref})
		require.Equal(t, "marked\nmarked\n", sh(t, c, "cat /marked /vol/marked; echo mine >/marked"))
		require.Equal(t, "marked\n", sh(t, c, "cat /vol/marked"), "the rootfs is a copy of its own")
		require.NoError(t, checkHeld(n, img.id))

		plain := runPod(t, n, realnode.PodSpec{})
		user := run(t, plain, realnode.ContainerSpec{Image: img.ref})
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
		require.Equal(t, "marked\n", sh(t, user, "cat /marked"))
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.Error(t, err, "CRI-O itself refuses")

		again := runPod(t, n, realnode.PodSpec{Name: "rootfs", Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
		c = run(t, again, realnode.ContainerSpec{})
		require.NoError(t, plain.Remove(t.Context()))
		settle(t, n, img.id)
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.Error(t, err)
		require.Equal(t, "marked\n", sh(t, c, "cat /vol/marked"))

		require.NoError(t, again.Remove(t.Context()))
		requireNothingHeld(t, n)
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
		require.Equal(t, before, layers(t, n))
	})

	t.Run("pods removed while the pull runs", func(t *testing.T) {
		before := layers(t, n)
		content, err := images.Image(images.Config{}, []images.Entry{images.Big("big", 1<<20, 7)})
		require.NoError(t, err)
		blobs, err := content.Layers()
		require.NoError(t, err)
		digest, err := blobs[0].Digest()
		require.NoError(t, err)
		img := pushImage(t, n, "stalled:1", content)
		blob := "/v2/stalled/blobs/" + digest.String()
		after := int64(500_000)
		require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: digest.String(), Stall: &after}))
		require.NoError(t, n.Proxy().ResetCounts(t.Context()))
		asked := func() int {
			counts, err := n.Proxy().Counts(t.Context())
			require.NoError(t, err)
			return counts["GET "+blob]
		}
		annotations := volumes(t, volume{Image: img.ref, MountPath: "/vol"})
		pods := make([]*realnode.Pod, 3)
		for i := range pods {
			pods[i] = runPod(t, n, realnode.PodSpec{Annotations: annotations})
			_, err = pods[i].Create(t.Context(), realnode.ContainerSpec{})
			require.ErrorContains(t, err, "pulling "+img.ref)
		}
		await(t, func() error {
			if asked() != 1 {
				return errors.New("the pull has not begun")
			}
			return nil
		})

		// The pull goes on for whoever is left.
		require.NoError(t, pods[0].Remove(t.Context()))
		require.NoError(t, n.Proxy().Clear(t.Context()))
		c := run(t, pods[1], realnode.ContainerSpec{})
		require.Equal(t, "1048576\n", sh(t, c, "wc -c </vol/big"))
		require.Equal(t, 1, asked(), "all share one transfer")
		require.NoError(t, checkHeld(n, img.id))
		require.NoError(t, pods[1].Remove(t.Context()))
		require.NoError(t, pods[2].Remove(t.Context()))
		requireNothingHeld(t, n)
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)

		// It ends with the last.
		require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: digest.String(), Stall: &after}))
		for i := range pods {
			pods[i] = runPod(t, n, realnode.PodSpec{Annotations: annotations})
		}
		await(t, func() error {
			if asked() != 2 || len(pullFiles(t, n)) == 0 {
				return errors.New("the pull has not begun")
			}
			return nil
		})
		for _, pod := range pods {
			require.NoError(t, pod.Remove(t.Context()))
		}
		requireNothingHeld(t, n)
		await(t, func() error {
			if left := pullFiles(t, n); len(left) > 0 {
				return fmt.Errorf("downloads left: %q", left)
			}
			return nil
		})
		require.NoError(t, n.Proxy().Clear(t.Context()))
		require.NotContains(t, imageIDs(t, n), img.id)
		require.Equal(t, before, layers(t, n))
	})
	n.AssertClean(t)
}

// pushed is an image in the registry.
type pushed struct {
	ref, id, digest string
	sums            map[string]string // SHA-256 of each file
}

func pushImage(t testing.TB, n *realnode.Node, ref string, content v1.Image) pushed {
	t.Helper()
	require.NoError(t, n.Push(t.Context(), ref, content))
	id, err := content.ConfigName()
	require.NoError(t, err)
	digest, err := content.Digest()
	require.NoError(t, err)
	return pushed{ref: n.Ref(ref), id: id.Hex, digest: digest.String()}
}

// pushFiles pushes an image of files that no other image has, so many in each
// layer. Every layer replaces one of the layer below.
func pushFiles(t testing.TB, n *realnode.Node, ref string, layers, files int) pushed {
	t.Helper()
	seed := fnv.New64a()
	seed.Write([]byte(n.Ref(ref)))
	next := seed.Sum64()
	sums := map[string]string{}
	stack := make([][]images.Entry, layers)
	for i := range stack {
		for j := range files + 1 {
			name := fmt.Sprintf("layer-%d/file-%d", i, j)
			if j == files {
				name = fmt.Sprintf("layer-%d/file-0", max(0, i-1))
				if i == 0 {
					continue
				}
			}
			next++
			file := images.Big(name, int64(1000+100*j), next)
			sum := sha256.New()
			_, err := io.Copy(sum, file.Content())
			require.NoError(t, err)
			sums[name] = hex.EncodeToString(sum.Sum(nil))
			stack[i] = append(stack[i], file)
		}
	}
	content, err := images.Image(images.Config{}, stack...)
	require.NoError(t, err)
	img := pushImage(t, n, ref, content)
	img.sums = sums
	return img
}

// assertRead fails the test unless the container reads every file of the image
// at path, and no other, with what was pushed.
func (p pushed) assertRead(t testing.TB, c *realnode.Container, path string) {
	t.Helper()
	got := map[string]string{}
	for line := range strings.Lines(sh(t, c, "cd "+path+"; find . -type f -exec sha256sum {} +")) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ./")
		got[name] = sum
	}
	require.Equal(t, p.sums, got)
}

// await waits until check returns nil.
func await(t testing.TB, check func() error) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			require.NoError(t, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// checkHeld returns an error unless exactly the images of ids are held: each
// by one host mount, one lease record and one child layer.
func checkHeld(n *realnode.Node, ids ...string) error {
	want := append([]string{}, ids...)
	slices.Sort(want)
	h, err := heldBy(n)
	if err != nil {
		return err
	}
	for what, got := range map[string][]string{"mounts": h.mounts(n), "mount points": h.Points, "leases": h.Leases, "child layers": h.Children} {
		if !slices.Equal(got, want) {
			return fmt.Errorf("%s of %q, not %q", what, got, want)
		}
	}
	return nil
}

// held is what a node holds for volumes, as the kernel and the files of CRI-O's
// root say.
type held struct {
	// Mounts are the lines of mountinfo below ocihold's directory, and Points
	// the names in it.
	Mounts, Points []string
	// Leases and Children are image ids by lease records and child layers.
	Leases, Children []string
	// Layers are the ids of all layers.
	Layers []string
}

// mounts are the names of the mount points below ocihold's directory.
func (h held) mounts(n *realnode.Node) []string {
	var names []string
	for _, line := range h.Mounts {
		if name, ok := strings.CutPrefix(strings.Fields(line)[4], mountsDir(n)+"/"); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func mountsDir(n *realnode.Node) string { return filepath.Join(n.RunDir(), "mounts") }

func heldBy(n *realnode.Node) (held, error) {
	var h held
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return h, err
	}
	for line := range strings.Lines(string(mountinfo)) {
		if point := strings.Fields(line)[4]; strings.HasPrefix(point+"/", mountsDir(n)+"/") {
			h.Mounts = append(h.Mounts, line)
		}
	}
	entries, err := os.ReadDir(mountsDir(n))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return h, err
	}
	for _, e := range entries {
		h.Points = append(h.Points, e.Name())
	}
	if h.Leases, err = n.Leases(); err != nil {
		return h, err
	}
	slices.Sort(h.Leases)
	for _, file := range []string{"layers.json", "volatile-layers.json"} {
		content, err := os.ReadFile(filepath.Join(n.CRIORoot(), "overlay-layers", file))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return h, err
		}
		var records []struct {
			ID    string   `json:"id"`
			Names []string `json:"names"`
		}
		if err := json.Unmarshal(content, &records); err != nil {
			return h, fmt.Errorf("read %s: %w", file, err)
		}
		for _, r := range records {
			h.Layers = append(h.Layers, r.ID)
			for _, name := range r.Names {
				if id, ok := strings.CutPrefix(name, "ocihold-hold-"); ok {
					h.Children = append(h.Children, id)
				}
			}
		}
	}
	slices.Sort(h.Layers)
	slices.Sort(h.Children)
	return h, nil
}

func layers(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	h, err := heldBy(n)
	require.NoError(t, err)
	return h.Layers
}

// given are the volumes that containers have, as ocihold says: pod, container,
// path and image id.
func given(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	out, err := ociholdCommand(t, n, "volumes", "-o", "json")
	require.NoError(t, err)
	var list []struct{ Pod, Container, MountPath, ImageID, HostPath string }
	require.NoError(t, json.Unmarshal([]byte(out), &list))
	all := make([]string, len(list))
	for i, v := range list {
		require.Equal(t, filepath.Join(mountsDir(n), v.ImageID), v.HostPath)
		all[i] = strings.Join([]string{v.Pod, v.Container, v.MountPath, v.ImageID}, " ")
	}
	return all
}

// requireNothingHeld waits until nothing is held for volumes, and checks
// that nothing is remembered.
func requireNothingHeld(t testing.TB, n *realnode.Node) {
	t.Helper()
	await(t, func() error { return checkHeld(n) })
	require.Empty(t, given(t, n))
}

// settle waits until ocihold has compared what it holds with what is needed at
// least once from now on, and then exactly the images of ids must be held.
func settle(t testing.TB, n *realnode.Node, ids ...string) {
	t.Helper()
	passing := push(t, n, "passing:1", []images.Entry{images.File("passing", "passing\n", 0o644)})
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: volumes(t, volume{Image: passing, MountPath: "/vol"})})
	require.NoError(t, err)
	create(t, pod, realnode.ContainerSpec{})
	require.Error(t, checkHeld(n, ids...), "the passing image is held, too")
	require.NoError(t, pod.Remove(context.WithoutCancel(t.Context())))
	await(t, func() error { return checkHeld(n, ids...) })
	_, err = command(t, n, "crictl", "rmi", passing)
	require.NoError(t, err)
}

// imageIDs are the ids of the images that CRI-O lists.
func imageIDs(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	list, err := n.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	var ids []string
	for _, image := range list.GetImages() {
		ids = append(ids, image.GetId())
	}
	slices.Sort(ids)
	return ids
}
