package storage

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// forgetLayers makes the root measure these layers again; all where none is named.
func forgetLayers(tb testing.TB, root *Root, ids ...string) {
	tb.Helper()
	settleMeter(tb, root)
	if len(ids) == 0 {
		ids = layerIDs(tb, root)
	}
	root.meter.mu.Lock()
	defer root.meter.mu.Unlock()
	for _, id := range ids {
		if err := unix.Lremovexattr(filepath.Join(root.homes()[0], id), useAttribute); err != nil {
			require.ErrorIs(tb, err, unix.ENODATA)
		}
		delete(root.meter.layers, id)
	}
}

// settleMeter waits for the measuring under way.
func settleMeter(tb testing.TB, root *Root) {
	tb.Helper()
	root.meter.mu.Lock()
	running := root.meter.running
	root.meter.mu.Unlock()
	if running != nil {
		<-running
	}
}

// patient returns the root's usage when all is measured.
func patient(tb testing.TB, root *Root) Usage {
	tb.Helper()
	root.patience = time.Hour
	usage, err := root.Usage(tb.Context())
	require.NoError(tb, err)
	require.Zero(tb, usage.Unmeasured)
	return usage
}

// du is what the du program finds in the root, containers aside.
func du(tb testing.TB, root *Root, option string) float64 {
	tb.Helper()
	unix.Sync()
	args := []string{"--summarize", "--total", option}
	for _, dir := range []string{"overlay", "overlay-images", "overlay-layers"} {
		args = append(args, filepath.Join(root.imageHome(), dir))
	}
	out, err := exec.Command("du", args...).Output()
	require.NoError(tb, err)
	lines := strings.Fields(string(out))
	n, err := strconv.ParseFloat(lines[len(lines)-2], 64) // N total
	require.NoError(tb, err)
	return n
}

// assertAsDu holds that a usage is what du finds, but for the few files that the driver has for itself.
func assertAsDu(tb testing.TB, root *Root, usage Usage) {
	tb.Helper()
	assert.InDelta(tb, du(tb, root, "--block-size=1"), usage.Bytes, 8<<10)
	assert.InDelta(tb, du(tb, root, "--inodes"), usage.Inodes, 3)
}

func TestUsage(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, noise(1<<20), noise(100_000)))
	reg.push(t, "b:1", imageOf(t, noise(1<<20), noise(200_000)))
	node := newNode(t, "vm")
	root := node.root(t, "vm")
	none := patient(t, root)
	a := node.pull(t, "vm", reg.host+"/a:1")
	one := patient(t, root)
	assert.InDelta(t, 1<<20+100_000, one.Bytes-none.Bytes, 150_000, "with what each layer and image has of its own")
	assertAsDu(t, root, one)
	node.pull(t, "vm", reg.host+"/b:1")
	two := patient(t, root)
	assert.InDelta(t, 200_000, two.Bytes-one.Bytes, 60_000, "the shared layer counts once")
	assertAsDu(t, root, two)

	dirs, err := root.LowerDirs(t.Context(), a.ID, nil)
	require.NoError(t, err)
	require.NoError(t, os.Link(filepath.Join(dirs[0], "file-1"), filepath.Join(dirs[0], "linked")))
	forgetLayers(t, root)
	assert.Equal(t, two, patient(t, root), "a hard link is the same inode")
	sparse := filepath.Join(dirs[0], "sparse")
	write(t, sparse, "x")
	require.NoError(t, os.Truncate(sparse, 1<<30))
	forgetLayers(t, root)
	assertAsDu(t, root, patient(t, root))
	require.NoError(t, os.Remove(sparse))
	forgetLayers(t, root)

	container, err := root.store.CreateContainer("", nil, a.ID, "", "{}", nil)
	require.NoError(t, err)
	with := patient(t, root)
	assert.InDelta(t, two.Bytes, with.Bytes, 20_000, "containers' own layers do not count")
	require.NoError(t, root.store.DeleteContainer(container.ID))

	require.NoError(t, node.roots.Remove(t.Context(), reg.host+"/b:1", nil))
	assert.InDelta(t, one.Bytes, patient(t, root).Bytes, 20_000)
}

func TestUsageIsKeptWithTheLayers(t *testing.T) {
	root, opt, image, _ := pulled(t)
	settleMeter(t, root)
	usage := patient(t, root)
	dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
	require.NoError(t, err)
	write(t, filepath.Join(dirs[0], "more"), noise(1<<20))
	again, err := Open(opt)
	require.NoError(t, err)
	defer func() { require.NoError(t, again.Close()) }()
	assert.Equal(t, usage, patient(t, again), "nothing is walked")

	// A copy of a layer is another layer.
	top := filepath.Dir(dirs[0])
	text := make([]byte, 64)
	n, err := unix.Lgetxattr(top, useAttribute, text)
	require.NoError(t, err)
	forgetLayers(t, again)
	for name, kept := range map[string]string{"another inode": "1" + string(text[:n]), "no numbers": "x", "nothing": ""} {
		require.NoError(t, unix.Lsetxattr(top, useAttribute, []byte(kept), 0))
		delete(again.meter.layers, filepath.Base(top))
		assert.InDelta(t, usage.Bytes+1<<20, patient(t, again).Bytes, 8<<10, name)
	}
}

func TestUsageDoesNotWaitForLong(t *testing.T) {
	root, _, _, _ := pulled(t)
	exact := patient(t, root)
	forgetLayers(t, root)
	busy := make(chan struct{}) // with other layers
	root.meter.running = busy
	root.patience = 0
	usage, err := root.Usage(t.Context())
	require.NoError(t, err)
	assert.Equal(t, 2, usage.Unmeasured)
	assert.Less(t, usage.Inodes, exact.Inodes)
	const recorded = 2 * 2048 // two tar files
	records, err := root.recordsUse(t.Context())
	require.NoError(t, err)
	assert.Equal(t, records.bytes+recorded, usage.Bytes)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	root.patience = time.Hour
	_, err = root.Usage(ctx)
	require.ErrorIs(t, err, context.Canceled)
	root.meter.running = nil
	close(busy)
	assert.Equal(t, exact, patient(t, root))
}

// TestUsageOfLinkedLayers holds that files which several layers share, as containers/storage can do it, count once,
// whenever the links come.
func TestUsageOfLinkedLayers(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, noise(1<<20)))
	reg.push(t, "b:1", imageOf(t, "b", "c"))
	root := open(t, testOptions(t))
	for _, ref := range []string{"/a:1", "/b:1"} {
		_, err := root.Pull(t.Context(), reg.host+ref, PullOptions{})
		require.NoError(t, err)
	}
	assertAsDu(t, root, patient(t, root))
	a, err := root.Resolve(t.Context(), reg.host+"/a:1")
	require.NoError(t, err)
	b, err := root.Resolve(t.Context(), reg.host+"/b:1")
	require.NoError(t, err)
	from, err := root.LowerDirs(t.Context(), a.ID, nil)
	require.NoError(t, err)
	to, err := root.LowerDirs(t.Context(), b.ID, nil)
	require.NoError(t, err)
	for _, dir := range to {
		require.NoError(t, os.Link(filepath.Join(from[0], "file-0"), filepath.Join(dir, "linked")))
		forgetLayers(t, root, filepath.Base(filepath.Dir(dir)))
		assertAsDu(t, root, patient(t, root))
	}
	root.meter.layers = nil
	assertAsDu(t, root, patient(t, root))
}

func TestUsageNamesWhatIsBad(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, noise(1<<20)))
	reg.push(t, "b:1", imageOf(t, "b"))
	for name, spoil := range map[string]func(t *testing.T, dir string){
		"no files": func(t *testing.T, dir string) { require.NoError(t, os.RemoveAll(dir)) },
		"no directory": func(t *testing.T, dir string) {
			require.NoError(t, os.RemoveAll(dir))
			write(t, dir, "")
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := open(t, testOptions(t))
			a, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.NoError(t, err)
			dirs, err := root.LowerDirs(t.Context(), a.ID, nil)
			require.NoError(t, err)
			b, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
			require.NoError(t, err)
			whole := patient(t, root)
			bad, err := root.LowerDirs(t.Context(), b.ID, nil)
			require.NoError(t, err)
			layer := filepath.Dir(bad[0])
			forgetLayers(t, root)
			spoil(t, layer)
			for range 2 {
				usage := patient(t, root)
				require.Len(t, usage.Bad, 1)
				assert.ErrorContains(t, usage.Bad[0], filepath.Base(layer))
				assert.InDelta(t, whole.Bytes, usage.Bytes, 64<<10, "the others count")
			}
			require.NoError(t, os.RemoveAll(layer))
			require.NoError(t, os.Rename(filepath.Dir(dirs[0]), layer))
			forgetLayers(t, root, filepath.Base(layer))
			require.NoError(t, os.Mkdir(filepath.Dir(dirs[0]), 0o700))
			assert.Empty(t, patient(t, root).Bad, "as soon as it can be read")
		})
	}
}

func TestCloseEndsMeasuring(t *testing.T) {
	root, opt, _, _ := pulled(t)
	forgetLayers(t, root)
	again, err := Open(opt)
	require.NoError(t, err)
	again.patience = 0
	_, err = again.Usage(t.Context())
	require.NoError(t, err)
	require.NoError(t, again.Close()) // and TestMain sees no goroutine
	_, err = again.Usage(t.Context())
	require.ErrorIs(t, err, ErrClosed)
}
