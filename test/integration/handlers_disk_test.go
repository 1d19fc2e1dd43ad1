package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestHandlerRootOnItsOwnDisk fills the disk of a handler's root, and takes it
// away.
func TestHandlerRootOnItsOwnDisk(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			d := newDisk(t, kind)
			n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true})
			t.Run("full", func(t *testing.T) { testFullDisk(t, n) })
			t.Run("not a block or inode left", func(t *testing.T) { testRemovalFromFullDisk(t, n) })
			t.Run("away", func(t *testing.T) { testDiskAway(t, n, d) })
			n.AssertClean(t)
		})
	}
}

func testFullDisk(t *testing.T, n *realnode.Node) {
	root := n.HandlerRoot("vm")
	app := push(t, n, "disk/app:1", busybox(t))
	id := pullFor(t, n, "vm", app)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: app})
	const finished, rest, slack = 6 << 20, 24 << 20, 1 << 20
	big := push(t, n, "disk/big:1", []images.Entry{images.Big("a", finished, 1)}, []images.Entry{images.Big("b", rest, 2)})

	for name, left := range map[string]int64{"part of it fits": 16 << 20, "to the brim": 0} {
		t.Run(name, func(t *testing.T) {
			empty := freeBytes(t, root)
			filler := fill(t, root, left)
			free := freeBytes(t, root)
			err := pullError(t, n, "vm", big)
			require.ErrorContains(t, err, "disk full")
			require.ErrorContains(t, err, "disk/big:1")
			assert.Equal(t, codes.ResourceExhausted, status.Code(err))
			assertAbsent(t, n, big)
			awaitFree(t, root, free-finished-slack) // the layer that was finished is kept

			// Everything else goes on.
			assert.Equal(t, "0\n", sh(t, c, "id -u"))
			assert.Equal(t, id, pullFor(t, n, "vm", app), "it is there")
			second := run(t, pod, realnode.ContainerSpec{Name: "second", Image: id, UserImage: app})
			assert.Equal(t, "0\n", sh(t, second, "id -u"))
			require.NoError(t, second.Remove(t.Context()))
			require.NoError(t, removeFrom(t, n, "", pullFor(t, n, "", big)))

			// With space the pull goes through, and removal gives it back.
			require.NoError(t, os.Remove(filler))
			awaitFree(t, root, empty-finished-slack)
			bigID := pullFor(t, n, "vm", big)
			filler = fill(t, root, 8<<20)
			free = freeBytes(t, root)
			require.NoError(t, removeFrom(t, n, "vm", bigID))
			awaitFree(t, root, free+finished+rest-slack)
			require.NoError(t, os.Remove(filler))
			awaitFree(t, root, empty-slack)
		})
	}
	// Where a disk has not one block left, containers/storage keeps a file open.
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
}

// testRemovalFromFullDisk removes what has to go where nothing can be written.
func testRemovalFromFullDisk(t *testing.T, n *realnode.Node) {
	root := n.HandlerRoot("vm")
	const size, slack = 24 << 20, 2 << 20
	big := push(t, n, "disk/to-go:1", []images.Entry{images.Big("a", size, 3)})
	free := freeBytes(t, root)
	for _, what := range []string{"blocks", "inodes"} {
		t.Run(what, func(t *testing.T) {
			id := pullFor(t, n, "vm", big)
			var filler string
			if what == "blocks" {
				filler = fill(t, root, 0)
			} else {
				filler = fillInodes(t, root)
			}
			err := os.WriteFile(filepath.Join(root, "more"), make([]byte, 1<<20), 0o600)
			require.ErrorIs(t, err, unix.ENOSPC)
			require.NoError(t, os.RemoveAll(filepath.Join(root, "more")))
			before := freeBytes(t, root)
			require.NoError(t, removeFrom(t, n, "vm", id))
			assertAbsent(t, n, big)
			if what == "blocks" {
				awaitFree(t, root, before+size-slack)
			}
			require.NoError(t, os.RemoveAll(filler))
			awaitFree(t, root, free-slack)
			// The next removal makes what is missing of it.
			require.NoError(t, removeFrom(t, n, "vm", pullFor(t, n, "vm", push(t, n, "disk/small:1", []images.Entry{images.Dir("d", 0o755)}))))
			kept, err := filepath.Glob(filepath.Join(root, ".ocihold-reserve", "*"))
			require.NoError(t, err)
			assert.Len(t, kept, 32, "there is a reserve again")
		})
	}
}

// fillInodes takes every inode of the file system of dir, and returns the
// directory of the files that have them.
func fillInodes(t *testing.T, dir string) string {
	t.Helper()
	filler := filepath.Join(dir, "filler")
	require.NoError(t, os.Mkdir(filler, 0o700))
	for i := 0; ; i++ {
		f, err := os.Create(filepath.Join(filler, fmt.Sprint(i)))
		if errors.Is(err, unix.ENOSPC) {
			t.Log(i, "files")
			return filler
		}
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
}

func testDiskAway(t *testing.T, n *realnode.Node, d *disk) {
	root := n.HandlerRoot("vm")
	app := push(t, n, "disk/app:1", busybox(t))
	later := push(t, n, "disk/later:1", []images.Entry{images.File("f", "x", 0o644)})
	id := pullFor(t, n, "vm", app)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	d.unmount(t)

	away := func(t *testing.T) {
		t.Helper()
		for _, ref := range []string{app, later} {
			err := pullError(t, n, "vm", ref)
			require.ErrorContains(t, err, "root is not there")
			require.ErrorContains(t, err, root)
			require.ErrorContains(t, err, `"vm"`)
			assert.Equal(t, codes.FailedPrecondition, status.Code(err))
		}
		_, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: app, RuntimeHandler: "vm"}})
		require.ErrorContains(t, err, "root is not there")
		_, err = n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
		require.NoError(t, err)
		_, err = n.OciholdImages().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
		require.NoError(t, err)
		require.NoError(t, removeFrom(t, n, "", pullFor(t, n, "", later)), "the default goes on")
		pullFor(t, n, "wasm", wasmImage(t, n))
		assertOnlyLocks(t, root)
	}
	away(t)
	// Nor does a start without the disk hold anything up.
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	away(t)
	// CRI-O, started without it, makes directories of an image store there.
	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	awaitRegistered(t, n)
	require.DirExists(t, filepath.Join(root, "overlay-images"))
	away(t)
	_, err := ociholdCommand(t, n, "config", "crio", "--write")
	require.ErrorContains(t, err, "mount the disk of this root")
	dropIn := filepath.Join(n.Dir(), "etc", "crio", "crio.conf.d", "90-ocihold.conf")
	content, err := os.ReadFile(dropIn)
	require.NoError(t, err)
	require.NoError(t, os.Remove(dropIn)) // so that it takes the root for a new one
	_, err = ociholdCommand(t, n, "config", "crio", "--write")
	require.ErrorContains(t, err, "as CRI-O leaves it where a disk is not mounted")
	require.NoError(t, os.WriteFile(dropIn, content, 0o600))
	assertOnlyLocks(t, root)

	half := d.addHalfImage(t)
	d.mount(t)
	assert.Equal(t, id, pullFor(t, n, "vm", app))
	await(t, func() error {
		if _, there := topLayers(t, root)[half]; there {
			return errors.New("half an image is left")
		}
		return nil
	})
	pullFor(t, n, "vm", later)
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: app})
	assert.Equal(t, "0\n", sh(t, c, "id -u"))
	require.NoError(t, pod.Remove(t.Context()))
}

// assertOnlyLocks holds that nothing is written where the disk should be.
// CRI-O's look-ups make lock files there, which are empty.
func assertOnlyLocks(t *testing.T, root string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			assert.Contains(t, []string{"overlay-images/images.lock", "overlay-layers/layers.lock"}, strings.TrimPrefix(path, root+"/"))
		}
		return err
	}))
}

// TestPullsThatEndMidway ends pulls while each layer in turn is under way: the
// image is nowhere, and the next pull transfers what is missing.
func TestPullsThatEndMidway(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	const layers, half = 4, int64(256 << 10)
	for seed, how := range []string{"killed", "cut"} {
		for at := range layers {
			if how == "cut" && at%2 == 0 && os.Getenv("OCIHOLD_SOAK") == "" {
				continue // each takes as long as the retries do
			}
			t.Run(fmt.Sprintf("%s at layer %d", how, at), func(t *testing.T) {
				var entries [][]images.Entry
				for i := range layers {
					entries = append(entries, []images.Entry{images.Big(fmt.Sprint("f", i), 2*half, uint64(1000*seed+100*at+i))})
				}
				image, err := images.Image(images.Config{}, entries...)
				require.NoError(t, err)
				repository := fmt.Sprintf("midway/%s-%d", how, at)
				require.NoError(t, n.Push(t.Context(), repository+":1", image))
				ref, blobs := n.Ref(repository+":1"), layerBlobs(t, image)
				rule := proxy.Rule{Path: blobs[at]}
				if how == "killed" {
					rule.Stall = new(half)
					require.NoError(t, n.Proxy().Add(t.Context(), rule))
					err := killPull(t, n, ref, func() {
						require.Eventually(t, func() bool { return finishedLayers(t, n, blobs) == at }, 30*time.Second, 10*time.Millisecond)
					})
					require.Error(t, err)
				} else {
					rule.Cut = new(half)
					require.NoError(t, n.Proxy().Add(t.Context(), rule))
					err := pullError(t, n, "vm", ref)
					require.ErrorContains(t, err, "RegistryUnavailable: ")
					assert.Equal(t, codes.Unknown, status.Code(err))
				}
				assertAbsent(t, n, ref)
				assertNoDownloads(t, n)
				counts := requests(t, n)
				for _, blob := range blobs[:at] {
					assert.Equal(t, 1, counts["GET /v2/"+repository+"/blobs/"+blob], "retries do not repeat what was finished")
				}

				require.NoError(t, n.Proxy().Clear(t.Context()))
				require.NoError(t, n.Proxy().ResetCounts(t.Context()))
				assert.Equal(t, configID(t, image), pullFor(t, n, "vm", ref))
				counts = requests(t, n)
				for i, blob := range blobs {
					got := counts["GET /v2/"+repository+"/blobs/"+blob]
					if i < at {
						assert.Zero(t, got, "layer %d was finished", i)
					} else if i == at {
						assert.Equal(t, 1, got, "layer %d was not", i)
					}
				}
			})
		}
	}
	n.AssertClean(t)
}

// TestPullsKilledAtAnyMoment kills ocihold at random moments of a pull.
func TestPullsKilledAtAnyMoment(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	random := seeded(t)
	const size = 2 << 20
	image := func(i int) string {
		layers := [][]images.Entry{busybox(t)}
		for l := range 4 {
			layers = append(layers, []images.Entry{images.Big(fmt.Sprint("f", l), size, random.Uint64())})
		}
		return push(t, n, fmt.Sprintf("killed/app:%d", i), layers...)
	}
	first := image(0)
	begin := time.Now()
	pullFor(t, n, "vm", first)
	whole := time.Since(begin)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})

	seen := 0
	for i := range count(8, 100) {
		ref := image(i + 1)
		wait := time.Duration(random.Int64N(int64(whole)))
		t.Logf("pull %d is killed after %s", i, wait)
		_ = killPull(t, n, ref, func() { time.Sleep(wait) })
		assertNoDownloads(t, n)
		answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: "vm"}})
		require.NoError(t, err)
		id := answer.GetImage().GetId()
		if id == "" {
			assertAbsent(t, n, ref)
			id = pullFor(t, n, "vm", ref)
		} else {
			seen++ // so it must be whole
		}
		c := run(t, pod, realnode.ContainerSpec{Name: fmt.Sprint("c", i), Image: id, UserImage: ref})
		assert.Equal(t, fmt.Sprint(4*size), strings.TrimSpace(sh(t, c, "cat /f0 /f1 /f2 /f3 | wc -c")))
		require.NoError(t, c.Remove(t.Context()))
		require.NoError(t, removeFrom(t, n, "vm", id))
	}
	t.Logf("%d pulls had ended before", seen)
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// killPull begins a pull for vm, kills ocihold when until returns, starts it
// again, and returns how the pull ended.
func killPull(t *testing.T, n *realnode.Node, ref string, until func()) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		_, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: "vm"}})
		ended <- err
	}()
	until()
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
	err := <-ended
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		_, err := n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
		assert.NoError(c, err)
	}, 30*time.Second, 20*time.Millisecond)
	assert.Equal(t, listed(t, n.Images(), ref), listed(t, n.OciholdImages(), ref), "both lists agree")
	return err
}

func pullError(t *testing.T, n *realnode.Node, handler, ref string) error {
	t.Helper()
	_, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: handler}})
	require.Error(t, err)
	return err
}

// listed tells whether an image service lists the name.
func listed(t *testing.T, service cri.ImageServiceClient, ref string) bool {
	t.Helper()
	list, err := service.ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	for _, image := range list.GetImages() {
		if slices.Contains(image.GetRepoTags(), ref) {
			return true
		}
	}
	return false
}

// assertAbsent holds that neither CRI-O nor ocihold has the image.
func assertAbsent(t *testing.T, n *realnode.Node, ref string) {
	t.Helper()
	for name, service := range map[string]cri.ImageServiceClient{"CRI-O": n.Images(), "ocihold": n.OciholdImages()} {
		assert.False(t, listed(t, service, ref), "%s lists it", name)
		answer, err := service.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
		require.NoError(t, err)
		assert.Nil(t, answer.GetImage(), "%s has it", name)
	}
}

// assertNoDownloads holds that no pull has left a file of its download.
func assertNoDownloads(t *testing.T, n *realnode.Node) {
	t.Helper()
	for _, dir := range []string{filepath.Join(n.Dir(), "tmp"), filepath.Join(n.Dir(), "lib", "ocihold")} {
		require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			assert.NotContains(t, path, "container_images_")
			return err
		}))
	}
}

// layerBlobs are the digests of an image's layers, lowest first.
func layerBlobs(t *testing.T, image v1.Image) []string {
	t.Helper()
	layers, err := image.Layers()
	require.NoError(t, err)
	var blobs []string
	for _, layer := range layers {
		digest, err := layer.Digest()
		require.NoError(t, err)
		blobs = append(blobs, digest.String())
	}
	return blobs
}

// finishedLayers counts which of the blobs the root of vm has whole, as its own
// file says.
func finishedLayers(t *testing.T, n *realnode.Node, blobs []string) int {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(n.HandlerRoot("vm"), "overlay-layers", "layers.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0
	}
	require.NoError(t, err)
	var records []struct {
		Digest string          `json:"compressed-diff-digest"`
		Flags  map[string]bool `json:"flags"`
	}
	require.NoError(t, json.Unmarshal(content, &records))
	finished := 0
	for _, r := range records {
		if slices.Contains(blobs, r.Digest) && !r.Flags["incomplete"] {
			finished++
		}
	}
	return finished
}

// wasmImage pushes an image for the platform of wasm.
func wasmImage(t *testing.T, n *realnode.Node) string {
	t.Helper()
	image, err := images.Image(images.Config{Platform: "wasi/wasm"}, []images.Entry{images.File("app.wasm", "x", 0o644)})
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "disk/wasm:1", image))
	return n.Ref("disk/wasm:1")
}

// disk is a file system in a file, mounted in a node's directory.
type disk struct{ node, file, point string }

// newDisk makes a disk for the root of vm.
func newDisk(t *testing.T, kind string) *disk {
	t.Helper()
	return newDiskAt(t, kind, filepath.Join("lib", "handlers", "vm"))
}

func newDiskAt(t *testing.T, kind, point string) *disk {
	t.Helper()
	node, err := os.MkdirTemp("", "node")
	require.NoError(t, err)
	d := &disk{node: node, file: filepath.Join(t.TempDir(), "disk"), point: filepath.Join(node, point)}
	const size = 320 << 20 // mkfs.xfs wants 300 MiB
	fewInodes := map[string]string{"ext4": "-N8192", "xfs": "-imaxpct=1"}
	require.NoError(t, os.WriteFile(d.file, nil, 0o600))
	require.NoError(t, os.Truncate(d.file, size))
	require.NoError(t, os.MkdirAll(d.point, 0o755))
	out, err := exec.CommandContext(t.Context(), "mkfs."+kind, "-q", fewInodes[kind], d.file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Cleanup(func() {
		// After the node, whose end unmounts all below its directory.
		if err := unix.Unmount(d.point, 0); err != nil {
			require.ErrorIs(t, err, unix.EINVAL)
		}
		require.NoError(t, os.RemoveAll(node))
	})
	d.mount(t)
	return d
}

func (d *disk) mount(t *testing.T) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "mount", "-o", "loop", d.file, d.point).CombinedOutput()
	if err != nil && strings.Contains(string(out), "unknown filesystem type") {
		t.Skip("the kernel lacks this file system")
	}
	require.NoError(t, err, "%s", out)
}

// addHalfImage puts a record of half an image, as a pull leaves it that is
// killed, onto the disk, which is not mounted, and returns its id.
func (d *disk) addHalfImage(t *testing.T) (id string) {
	t.Helper()
	other := disk{file: d.file, point: t.TempDir()}
	other.mount(t)
	defer other.unmount(t)
	file := filepath.Join(other.point, "overlay-images", "images.json")
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	var records []any
	require.NoError(t, json.Unmarshal(content, &records))
	id = strings.Repeat("5", 64)
	content, err = json.Marshal(append(records, map[string]string{"id": id, "created": "2026-01-01T00:00:00Z"}))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, content, 0o600))
	return id
}

// unmount takes the disk away; nothing may have it open for long.
func (d *disk) unmount(t *testing.T) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.NoError(c, unix.Unmount(d.point, 0))
	}, 10*time.Second, 50*time.Millisecond)
}

// fill leaves that many bytes free on the file system of dir, and returns the
// file that takes the others.
func fill(t *testing.T, dir string, left int64) string {
	t.Helper()
	file := filepath.Join(dir, "filler")
	f, err := os.Create(file)
	require.NoError(t, err)
	var taken int64
	for chunk := int64(64 << 20); chunk >= 4096; {
		if freeBytes(t, dir)-chunk < left {
			chunk /= 2
			continue
		}
		err := unix.Fallocate(int(f.Fd()), 0, taken, chunk)
		if errors.Is(err, unix.ENOSPC) {
			chunk /= 2
			continue
		}
		require.NoError(t, err)
		taken += chunk
	}
	require.NoError(t, f.Sync())
	require.NoError(t, f.Close())
	return file
}

// awaitFree waits until as many bytes are free: xfs frees behind the scenes.
func awaitFree(t *testing.T, dir string, want int64) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.GreaterOrEqual(c, freeBytes(t, dir), want)
	}, 30*time.Second, 50*time.Millisecond)
}

func freeBytes(t *testing.T, dir string) int64 {
	t.Helper()
	var s unix.Statfs_t
	unix.Sync()
	require.NoError(t, unix.Statfs(dir, &s))
	return int64(s.Bfree) * s.Bsize
}
