package integration

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestUsageOfDisks compares ImageFsInfo with what du and df find, for a
// handler's root on CRI-O's disk and on a disk of its own.
func TestUsageOfDisks(t *testing.T) {
	t.Run("CRI-O's", func(t *testing.T) {
		n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
		testUsage(t, n, false, 0)
	})
	for kind, inodeSize := range map[string]uint64{
		"ext4": 0,   // all inodes are there from the start
		"xfs":  512, // no file's, as far as du is concerned
	} {
		t.Run(kind, func(t *testing.T) {
			d := newDisk(t, kind)
			n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true})
			testUsage(t, n, true, inodeSize)
		})
	}
}

// testUsage compares, with inodes of a size that df counts as used as they are
// made.
func testUsage(t *testing.T, n *realnode.Node, ownDisk bool, inodeSize uint64) {
	vm, wasm := n.HandlerRoot("vm"), n.HandlerRoot("wasm")
	before := filesystemOf(t, vm)
	refs := pushOddLayers(t, n)
	for _, ref := range refs {
		pullFor(t, n, "vm", ref)
		pullFor(t, n, "", ref)
	}
	pullFor(t, n, "wasm", wasmImage(t, n))
	// Others write to the roots, too.
	theirs := push(t, n, "usage/theirs:1", []images.Entry{images.Big("f", 2<<20, 5)}, manyFiles(500))
	_, err := n.Pull(t.Context(), theirs)
	require.NoError(t, err)
	podmanPull(t, n, vm, push(t, n, "usage/podman:1", []images.Entry{images.Big("f", 3<<20, 6)}, manyFiles(700)))

	check := func(t *testing.T) {
		t.Helper()
		disks := fsInfo(t, n)
		if !ownDisk {
			require.Len(t, disks, 1)
			assertAsDu(t, disks[0], n.CRIORoot(), vm, wasm)
			return
		}
		require.Len(t, disks, 2)
		assertAsDu(t, disks[0], n.CRIORoot(), wasm)
		assertAsDu(t, disks[1], vm)
		assert.Equal(t, vm, disks[1].GetFsId().GetMountpoint())
		now := filesystemOf(t, vm)
		assertNear(t, now.used-before.used-(now.inodes-before.inodes)*inodeSize, disks[1].GetUsedBytes().GetValue(), "df of bytes")
		assertNear(t, now.inodes-before.inodes, disks[1].GetInodesUsed().GetValue(), "df of inodes")
	}
	check(t)
	// A new process has it from the layers.
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, unix.SIGKILL))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	check(t)
	require.NoError(t, removeFrom(t, n, "", refs[1]))
	check(t)

	// What a container writes is no image.
	images := fsInfo(t, n)[0].GetUsedBytes().GetValue()
	pod := runPod(t, n, realnode.PodSpec{})
	c := run(t, pod, realnode.ContainerSpec{})
	sh(t, c, "dd if=/dev/zero of=/big bs=1048576 count=64 2>/dev/null")
	with := fsInfo(t, n)[0].GetUsedBytes().GetValue()
	assert.InDelta(t, images, with, 8<<20, "the container's image came, not the 64 MiB that it wrote")
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// pushOddLayers pushes images of which sizes are easily got wrong, that share
// layers.
func pushOddLayers(t *testing.T, n *realnode.Node) []string {
	t.Helper()
	shared := []images.Entry{images.Big("shared", 24<<20, 1), images.Dir("d", 0o755), images.File("d/gone", strings.Repeat("x", 100_000), 0o644)}
	file := images.Big("linked", 8<<20, 2)
	zeros := images.File("zeros", "", 0o644)
	zeros.Size, zeros.Content = 16<<20, func() io.Reader { return io.LimitReader(zeroes{}, 16<<20) }
	odd := []images.Entry{
		file, images.Hardlink("link1", file), images.Hardlink("link2", file),
		zeros,
		images.Whiteout("shared"), images.Opaque("d"),
		images.File("attributes", "x", 0o644).WithXattr("user.long", strings.Repeat("v", 800)),
		images.Symlink("symlink", strings.Repeat("far/", 50)), images.FIFO("fifo"), images.CharDevice("null", 1, 3),
	}
	// The file that a layer below has, once more, with a link to it.
	again := images.Big("shared", 24<<20, 1)
	return []string{
		push(t, n, "usage/odd:1", shared, odd),
		push(t, n, "usage/odd:2", shared, []images.Entry{again, images.Hardlink("d/again", again)}, manyFiles(2000)),
		push(t, n, "usage/odd:3", shared, []images.Entry{images.File("tiny", "x", 0o644)}),
	}
}

// zeroes reads as zeroes without end.
type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// manyFiles are as many small files in some directories.
func manyFiles(n int) []images.Entry {
	var entries []images.Entry
	for i := range n {
		if i%100 == 0 {
			entries = append(entries, images.Dir(fmt.Sprintf("many%d", i/100), 0o755))
		}
		entries = append(entries, images.File(fmt.Sprintf("many%d/%d", i/100, i), strings.Repeat("x", i%5000), 0o644))
	}
	return entries
}

func podmanPull(t testing.TB, n *realnode.Node, root, ref string) {
	t.Helper()
	out, err := command(t, n, "podman", "--root", root, "--runroot", filepath.Join(n.Dir(), "run", "handlers", filepath.Base(root)),
		"--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none",
		"--tmpdir", filepath.Join(n.Dir(), "run", "libpod"), "pull", "--quiet", "--tls-verify=false", ref)
	require.NoError(t, err, out)
	// podman binds the driver's directory onto itself and leaves it so.
	if err := unix.Unmount(filepath.Join(root, "overlay"), unix.MNT_DETACH); err != nil {
		require.ErrorIs(t, err, unix.EINVAL)
	}
}

// fsInfo asks ocihold for ImageFsInfo when all layers are measured, which ocihold
// df waits for.
func fsInfo(t testing.TB, n *realnode.Node) []*cri.FilesystemUsage {
	t.Helper()
	out, err := ociholdCommand(t, n, "df")
	require.NoError(t, err, out)
	resp, err := n.OciholdImages().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
	require.NoError(t, err)
	disks := resp.GetImageFilesystems()
	require.Len(t, resp.GetContainerFilesystems(), 1)
	assert.Equal(t, disks[0].GetFsId(), resp.GetContainerFilesystems()[0].GetFsId(), "kubelet takes it for one disk")
	return disks
}

// assertAsDu holds that a disk's usage is that of du in the roots, within 1 %.
func assertAsDu(t *testing.T, disk *cri.FilesystemUsage, roots ...string) {
	t.Helper()
	assertNear(t, du(t, "--block-size=1", roots...), disk.GetUsedBytes().GetValue(), "du of bytes")
	assertNear(t, du(t, "--inodes", roots...), disk.GetInodesUsed().GetValue(), "du of inodes")
}

func assertNear(t *testing.T, want, got uint64, what string) {
	t.Helper()
	t.Logf("%s: %d, ImageFsInfo: %d, %+.3f %%", what, want, got, (float64(got)/float64(want)-1)*100)
	assert.InEpsilon(t, want, got, 0.01, what)
}

// du adds up what roots have for images.
func du(t testing.TB, option string, roots ...string) uint64 {
	t.Helper()
	unix.Sync()
	args := []string{"--summarize", "--total", "--one-file-system", option}
	for _, root := range roots {
		for _, dir := range []string{"overlay", "overlay-images", "overlay-layers"} {
			args = append(args, filepath.Join(root, dir))
		}
	}
	out, err := exec.CommandContext(t.Context(), "du", args...).Output()
	require.NoError(t, err)
	fields := strings.Fields(string(out))
	total, err := strconv.ParseUint(fields[len(fields)-2], 10, 64) // "N total"
	require.NoError(t, err)
	return total
}

type filesystem struct{ used, inodes uint64 }

// filesystemOf is what df says of the file system that has dir.
func filesystemOf(t testing.TB, dir string) filesystem {
	t.Helper()
	var s unix.Statfs_t
	unix.Sync()
	require.NoError(t, unix.Statfs(dir, &s))
	return filesystem{(s.Blocks - s.Bfree) * uint64(s.Bsize), s.Files - s.Ffree}
}

// diskUseOf is what ocihold df says by handler, and of what it is not whole.
func diskUseOf(t testing.TB, n *realnode.Node) (roots map[string]usedRoot, faults []string) {
	t.Helper()
	out, err := ociholdCommand(t, n, "df", "-o", "json")
	require.NoError(t, err, out)
	var answer struct {
		Roots  []usedRoot `json:"roots"`
		Faults []string   `json:"faults"`
	}
	require.NoError(t, json.Unmarshal([]byte(out), &answer), out)
	roots = make(map[string]usedRoot)
	for _, root := range answer.Roots {
		roots[root.Handler] = root
	}
	return roots, answer.Faults
}

type usedRoot struct {
	Handler     string `json:"handler"`
	Bytes       uint64 `json:"bytes"`
	Reclaimable uint64 `json:"reclaimable_bytes"`
	Images      []struct {
		ID    string   `json:"id"`
		Names []string `json:"names"`
	} `json:"images"`
}

// TestSpoiledRoots spoils an image of each kind in CRI-O's root and in one of a
// handler, and holds that all others are listed and accounted for.
func TestSpoiledRoots(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	kinds := []string{"manifest", "files", "layer", "name"}
	refs := make(map[string]string)
	for i, kind := range append(kinds, "good") {
		refs[kind] = push(t, n, "spoiled/"+kind+":1", []images.Entry{images.Big("f", 4<<20, uint64(i))})
	}
	ids := make(map[string]string)
	for _, handler := range []string{"", "vm"} {
		for kind, ref := range refs {
			ids[kind] = pullFor(t, n, handler, ref)
		}
	}
	whole, faults := diskUseOf(t, n)
	require.Empty(t, faults)
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, unix.SIGKILL))
	var layers []string
	for _, handler := range []string{"", "vm"} {
		layers = append(layers, spoil(t, rootOfHandler(n, handler), ids)...)
	}
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))

	resp, err := n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	var listed []string
	for _, image := range resp.GetImages() {
		listed = append(listed, image.GetId())
	}
	assert.Contains(t, listed, ids["good"])
	for _, kind := range []string{"manifest", "layer", "name"} {
		assert.NotContains(t, listed, ids[kind], "%s: CRI-O's list would fail over it", kind)
	}
	now, faults := diskUseOf(t, n)
	list, err := ociholdCommand(t, n, "images")
	require.NoError(t, err)
	for _, kind := range []string{"manifest", "layer", "name"} {
		assert.Equal(t, 2, countWith(faults, ids[kind]), "%s in each root: %q", kind, faults)
		assert.Contains(t, list, ids[kind]+`, names`, kind)
		assert.Contains(t, logOf(t, n, realnode.Ocihold), ids[kind], kind)
	}
	for _, layer := range layers {
		assert.Positive(t, countWith(faults, layer), "layer %s: %q", layer, faults)
	}
	for _, handler := range []string{"default", "vm"} {
		lost := whole[handler].Bytes - now[handler].Bytes
		assert.InDelta(t, 2*4<<20, lost, 1<<20, "%s: the layers without files and without a record", handler)
		var left []string
		for _, image := range now[handler].Images {
			left = append(left, image.ID)
		}
		assert.Contains(t, left, ids["good"])
	}
	disks := fsInfo(t, n)
	require.Len(t, disks, 1)
	assert.InDelta(t, now["default"].Bytes+now["vm"].Bytes+now["wasm"].Bytes, disks[0].GetUsedBytes().GetValue(), 1<<20)
	assert.Contains(t, logOf(t, n, realnode.Ocihold), "it has no files")
}

// spoil spoils images of a root that no one has open to write, and returns the
// layers that it has taken.
func spoil(t *testing.T, root string, ids map[string]string) []string {
	t.Helper()
	tops := topLayers(t, root)
	require.NoError(t, os.Truncate(filepath.Join(root, "overlay-images", ids["manifest"], "manifest"), 10))
	require.NoError(t, os.RemoveAll(filepath.Join(root, "overlay", tops[ids["files"]])))
	gone := strings.Repeat("d", 64)
	edit(t, filepath.Join(root, "overlay-layers", "layers.json"), `"`+tops[ids["layer"]]+`"`, `"`+gone+`"`)
	edit(t, filepath.Join(root, "overlay-images", "images.json"), `/spoiled/name:1"`, `/spoiled/name"`)
	return []string{tops[ids["files"]], gone}
}

func edit(t *testing.T, file, from, to string) {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(content), from)
	require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(string(content), from, to)), 0o600))
}

func countWith(texts []string, part string) (n int) {
	for _, text := range texts {
		if strings.Contains(text, part) {
			n++
		}
	}
	return n
}
