package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// gcResult is what 'ocihold gc -o json' prints of one root.
type gcResult struct {
	Capacity, Before, After, Freed uint64
	Images                         []gcImage
	Layers                         []struct{ ID string }
	Faults                         []string
}

type gcImage struct {
	ID    string
	Bytes uint64
	Goes  bool
	Why   string
}

// of returns what is said of an image.
func (r gcResult) of(t testing.TB, id string) gcImage {
	t.Helper()
	for _, image := range r.Images {
		if image.ID == id {
			return image
		}
	}
	require.Fail(t, "gc says nothing of image", id)
	return gcImage{}
}

// gc runs 'ocihold gc' for vm.
func gc(t testing.TB, n *realnode.Node, flags ...string) gcResult {
	t.Helper()
	result, err := tryGC(t, n, flags...)
	require.NoError(t, err)
	return result
}

// tryGC is gc for goroutines.
func tryGC(t testing.TB, n *realnode.Node, flags ...string) (gcResult, error) {
	t.Helper()
	out, err := ociholdCommand(t, n, append([]string{"gc", "--handler", "vm", "-o", "json"}, flags...)...)
	if err != nil {
		return gcResult{}, err
	}
	var result struct{ Collections []gcResult }
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		return gcResult{}, err
	}
	if len(result.Collections) != 1 {
		return gcResult{}, fmt.Errorf("want one collection: %s", out)
	}
	return result.Collections[0], nil
}

// settings writes a file of settings for ocihold.
func settings(t testing.TB, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "gc.toml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

// shift makes images of vm that much longer unused, as if the clock had gone on.
// Without ids, all.
func shift(t testing.TB, n *realnode.Node, by time.Duration, ids ...string) {
	t.Helper()
	if len(ids) == 0 {
		ids = imagesOf(t, n)["vm"]
	}
	for _, id := range ids {
		dir := filepath.Join(n.HandlerRoot("vm"), "overlay-images", id)
		info, err := os.Stat(dir)
		require.NoError(t, err)
		require.NoError(t, os.Chtimes(dir, time.Time{}, info.ModTime().Add(-by)))
	}
}

// taken is how full the file system is, in percent, as the collector counts.
func taken(t testing.TB, dir string) float64 {
	t.Helper()
	var s unix.Statfs_t
	unix.Sync()
	require.NoError(t, unix.Statfs(dir, &s))
	return 100 * float64(s.Blocks-s.Bavail) / float64(s.Blocks)
}

// sizedApp pushes an image that runs, with a file of that many bytes.
func sizedApp(t testing.TB, n *realnode.Node, ref string, size int64) app {
	t.Helper()
	hash := fnv.New64()
	_, _ = hash.Write([]byte(ref))
	return pushApp(t, n, ref, appLayer("lower", busybox(t)...), []images.Entry{images.Big("big", size, hash.Sum64())})
}

// Pulls fill the disk of vm's root: what goes is unused, the least recently used
// first, until the low mark and no further.
func TestCollectorKeepsBetweenMarks(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			d := newDisk(t, kind)
			n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true, OciholdConf: settings(t, `
[handlers.vm]
gc_high = 70
gc_low = 50
gc_min_age = "1s"
gc_interval = "24h"
pinned_images = ["*pinned*"]
`)})
			testMarks(t, n)
			n.AssertClean(t)
		})
	}
}

func testMarks(t *testing.T, n *realnode.Node) {
	root := n.HandlerRoot("vm")
	const size = 16 << 20
	volumed := sizedApp(t, n, "marks/volume:1", 4<<20)
	running := sizedApp(t, n, "marks/running:1", 4<<20)
	pinned := sizedApp(t, n, "marks/pinned:1", 4<<20)
	lending := sizedApp(t, n, "marks/lending:1", 4<<20)

	pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: volumed.ref, MountPath: "/vol"})})
	c := run(t, pod, realnode.ContainerSpec{Image: pullFor(t, n, "vm", running.ref), UserImage: running.ref})
	kept := []string{volumed.ids["vm"], running.ids["vm"], pullFor(t, n, "vm", pinned.ref), pullFor(t, n, "vm", lending.ref)}
	_, err := n.Pull(t.Context(), lending.ref) // by CRI-O, which stores no layer
	require.NoError(t, err)
	shift(t, n, time.Hour, kept...)

	var unused []string
	for i := 0; taken(t, root) <= 70; i++ {
		require.Less(t, i, 20, "the disk does not fill")
		before := taken(t, root)
		id := pullFor(t, n, "vm", sizedApp(t, n, fmt.Sprintf("marks/unused:%d", i), size).ref)
		unused = append(unused, id)
		shift(t, n, time.Duration(30-i)*time.Minute, id)
		if taken(t, root) < before {
			break // collected after the pull
		}
	}
	var s unix.Statfs_t
	require.NoError(t, unix.Statfs(root, &s))
	one := 100 * float64(size+2<<20) / (float64(s.Blocks) * float64(s.Bsize))
	slack := 0.0
	if s.Type == unix.XFS_SUPER_MAGIC {
		slack = one // it allocates ahead, which is measured with a layer, and takes that back
	}
	var left []string
	await(t, func() error {
		left = nil
		has := imagesOf(t, n)["vm"]
		for _, id := range unused {
			if slices.Contains(has, id) {
				left = append(left, id)
			}
		}
		if len(left) == len(unused) || taken(t, root) > 50.5+slack {
			return fmt.Errorf("%d of %d unused images are there, %.0f%% taken", len(left), len(unused), taken(t, root))
		}
		return nil
	})
	t.Logf("%d of %d unused images went, %.1f%% are taken", len(unused)-len(left), len(unused), taken(t, root))
	assert.Equal(t, unused[len(unused)-len(left):], left, "the least recently used went")
	assert.Greater(t, taken(t, root), 50-one, "one less would not have done")

	result := gc(t, n, "--dry-run")
	for id, why := range map[string]string{
		volumed.ids["vm"]: "leased for a volume", running.ids["vm"]: "in use by container k8s_main_" + pod.Config.GetMetadata().GetName(),
		pinned.ids["vm"]: "pinned", lending.ids["vm"]: "CRI-O's root needs its layers",
	} {
		assert.False(t, result.of(t, id).Goes)
		assert.Contains(t, result.of(t, id).Why, why)
	}
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	volumed.requireFiles(t, fmt.Sprintf("/proc/%d/root/vol", info.PID))
	running.requireRead(t, c)
	other := runPod(t, n, realnode.PodSpec{})
	lending.requireRead(t, run(t, other, realnode.ContainerSpec{Image: lending.ref}))
	require.NoError(t, other.Remove(t.Context()))
	require.NoError(t, pod.Remove(t.Context()))
}

// A pod's second pull takes long, and the disk is full: its first image stays.
func TestCollectorDuringLongPull(t *testing.T) {
	d := newDisk(t, "ext4")
	n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true, OciholdConf: settings(t, `
[handlers.vm]
gc_min_age = "8s"
gc_interval = "1s"
`)})
	root := n.HandlerRoot("vm")
	first := sizedApp(t, n, "long/first:1", 4<<20)
	second := sizedApp(t, n, "long/second:1", 4<<20)
	old := pullFor(t, n, "vm", sizedApp(t, n, "long/old:1", 8<<20).ref)
	shift(t, n, time.Hour, old)

	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	id := pullFor(t, n, "vm", first.ref)
	require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: "long/second/blobs", Stall: new(int64(1 << 10))}))
	pulled := make(chan error, 1)
	go func() {
		_, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: second.ref, RuntimeHandler: "vm"}})
		pulled <- err
	}()
	await(t, func() error {
		if requests(t, n)["GET /v2/long/second/manifests/1"] == 0 {
			return errors.New("the pull has not begun")
		}
		return nil
	})
	filler := fill(t, root, 24<<20)
	await(t, func() error {
		if slices.Contains(imagesOf(t, n)["vm"], old) {
			return errors.New("the old image is still there")
		}
		return nil
	})
	await(t, func() error {
		if why := gc(t, n).of(t, id).Why; why != "its pod may wait for a pull, or just have done so" {
			return fmt.Errorf("the first image: %s", why)
		}
		return nil
	})
	require.NoError(t, n.Proxy().Clear(t.Context()))
	require.NoError(t, <-pulled)
	a := run(t, pod, realnode.ContainerSpec{Name: "a", Image: id, UserImage: first.ref})
	b := run(t, pod, realnode.ContainerSpec{Name: "b", Image: second.ids["vm"], UserImage: second.ref})
	first.requireRead(t, a)
	second.requireRead(t, b)
	require.NoError(t, pod.Remove(t.Context()))
	await(t, func() error {
		if left := layersOf(t, root); len(left) > 0 {
			return fmt.Errorf("layers are left: %q", left)
		}
		return nil
	})
	require.NoError(t, os.Remove(filler))
	n.AssertClean(t)
}

// A disk that is full to the last block is collected from all the same.
func TestCollectorOnFullDisk(t *testing.T) {
	d := newDisk(t, "ext4")
	n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true, OciholdConf: settings(t, "[handlers.vm]\ngc_interval = \"24h\"\n")})
	root := n.HandlerRoot("vm")
	used := sizedApp(t, n, "full/used:1", 4<<20)
	unused := pullFor(t, n, "vm", sizedApp(t, n, "full/unused:1", 8<<20).ref)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	c := run(t, pod, realnode.ContainerSpec{Image: pullFor(t, n, "vm", used.ref), UserImage: used.ref})
	shift(t, n, time.Hour)
	filler := fill(t, root, 0)
	result := gc(t, n)
	assert.True(t, result.of(t, unused).Goes, result.of(t, unused).Why)
	assert.GreaterOrEqual(t, freeBytes(t, root), int64(8<<20))
	assert.NotContains(t, imagesOf(t, n)["vm"], unused)
	used.requireRead(t, c)
	require.NoError(t, os.Remove(filler))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
