package integration

import (
	"bytes"
	"crypto/sha256"
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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// stack are the layers of images.Stack, with more of what a layer can hold and
// do to those below it.
func stack(n int) [][]images.Entry {
	layers := images.Stack(n)
	twoNames := images.File("more/old-link", "of two names", 0o644)
	layers[0] = append([]images.Entry{images.Dir(".", 0o755)}, layers[0]...)
	layers[0] = append(layers[0],
		images.Dir("more", 0o2775).Owned(2_147_483_653, 3_000_000_000).WithXattr("user.dir", "of a directory"),
		images.File("more/capability", "x", 0o755).WithXattr("security.capability", capDACOverride),
		images.File("more/binary", "x", 0).WithXattr("user.binary", "\x00\x01\xff").WithXattr("user.empty", ""),
		images.CharDevice("more/device", 1, 3).Owned(1, 2),
		images.FIFO("more/pipe"),
		twoNames,
		images.Hardlink("more/older-link", twoNames),
		images.Dir("again", 0o700),
		images.File("again/old", "old", 0o644),
		images.Dir("again/deep", 0o700),
		images.Symlink("turns", "tree"),
		images.Big("big", 1<<20, 1),
	)
	if n >= 10 {
		layers[2] = append(layers[2], images.Whiteout("again"), images.Whiteout("turns"), images.Whiteout("never-was"))
		layers[3] = append(layers[3], images.Dir("turns", 0o711), images.File("turns/file", "not in tree", 0o644))
		layers[4] = append(layers[4], images.Dir("again", 0o711), images.File("again/new", "new", 0o644))
		// The mark comes last, and hides only what is below its layer.
		layers[n-1] = append(layers[n-1],
			images.Dir("tree/opaque", 0o755), images.File("tree/opaque/last", "last", 0o644), images.Opaque("tree/opaque"))
	}
	return layers
}

// TestContent compares a volume, as the container has it, with what podman and
// GNU tar make of the same image, for both ways to mount it.
func TestContent(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	type content struct {
		layers int
		ref    string
		want   map[string]string
	}
	var contents []content
	for _, layers := range []int{1, 10, 60, 127} {
		stack := stack(layers)
		contents = append(contents, content{
			layers: layers,
			ref:    push(t, n, fmt.Sprintf("content/stack-%d:1", layers), stack...),
			want:   tree(t, unpack(t, stack)),
		})
	}
	for i, api := range []string{"fsconfig", "mount"} {
		setMountAPI(t, n, api)
		for _, content := range contents {
			t.Run(fmt.Sprintf("%s %d layers", api, content.layers), func(t *testing.T) {
				asked := realnode.PodSpec{Annotations: volumes(t, volume{Image: content.ref, MountPath: "/volume"})}
				var pod *realnode.Pod
				if i == 0 {
					pod = podWithAbsentImage(t, n, content.ref, asked)
				} else {
					pod = runPod(t, n, asked)
				}
				c := run(t, pod, realnode.ContainerSpec{})
				assert.Equal(t, content.want, tree(t, rootOf(t, c)+"/volume"), "container and tar")
				assert.Equal(t, podmanTree(t, n, content.ref), tree(t, rootOf(t, c)+"/volume"), "container and podman")
				assertMountAPI(t, n, api)

				require.NoError(t, pod.Remove(t.Context()))
				n.AssertClean(t)
			})
		}
	}
}

// podWithAbsentImage runs a pod with a volume at /volume, and lets the image
// come only after a first container was refused.
func podWithAbsentImage(t *testing.T, n *realnode.Node, ref string, spec realnode.PodSpec) *realnode.Pod {
	t.Helper()
	stallBlobs(t, n, ref)
	pod := runPod(t, n, spec)
	_, err := pod.Create(t.Context(), realnode.ContainerSpec{})
	require.Error(t, err)
	assert.Regexp(t, `image volume /volume: pulling `+ref+`(: 0% of [0-9.]+[kM]B)?; will be tried again`, err.Error())
	require.NoError(t, n.Proxy().Clear(t.Context()))
	return pod
}

// stallBlobs lets no blob of the image come until the proxy's rules are cleared.
func stallBlobs(t *testing.T, n *realnode.Node, ref string) {
	t.Helper()
	repository, _, _ := strings.Cut(strings.TrimPrefix(ref, n.Registry()+"/"), ":")
	require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: repository + "/blobs/", Stall: new(int64)}))
}

// setMountAPI restarts ocihold with the setting.
func setMountAPI(t *testing.T, n *realnode.Node, api string) {
	t.Helper()
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	dir := n.OciholdConf() + ".d"
	require.NoError(t, os.MkdirAll(dir, 0o755))
	setting := fmt.Sprintf("[volumes]\nmount_api = %q\n", api)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "60-mount-api.toml"), []byte(setting), 0o644))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
}

// assertMountAPI tells how the one volume was mounted from how the kernel lists
// its layers.
func assertMountAPI(t *testing.T, n *realnode.Node, api string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	var found []string
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " "+n.RunDir()+"/mounts/") {
			found = append(found, line)
		}
	}
	require.Len(t, found, 1)
	if api == "fsconfig" {
		assert.Contains(t, found[0], "lowerdir+=")
	} else {
		assert.Contains(t, found[0], ",lowerdir=")
	}
}

// TestProgress reads how far a pull is from the refusals, in coarse steps.
func TestProgress(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	layers := [][]images.Entry{{images.Dir(".", 0o755), images.Big("first", 3_250_000, 1)}, {images.Big("second", 1_750_000, 2)}}
	ref := push(t, n, "content/slow:1", layers...)
	// The registry asks to come again for the first layer, which so ends some
	// time after the pull began; the second stops on its way.
	blob := func(layer []images.Entry) string {
		l, err := images.Layer(layer...)
		require.NoError(t, err)
		digest, err := l.Digest()
		require.NoError(t, err)
		return "/blobs/" + digest.String()
	}
	half := int64(800_000)
	for _, rule := range []proxy.Rule{
		{Method: "GET", Path: blob(layers[0]), Status: 429, Times: 1},
		{Method: "GET", Path: blob(layers[1]), Stall: &half},
	} {
		require.NoError(t, n.Proxy().Add(t.Context(), rule))
	}
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
	refusal := func() string {
		_, err := pod.Create(t.Context(), realnode.ContainerSpec{})
		require.Error(t, err)
		return err.Error()
	}
	assert.Regexp(t, `image volume /volume: pulling `+ref+`(: 0% of 5.00\dMB)?; will be tried again`, refusal())
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		assert.Contains(t, refusal(), "image volume /volume: pulling "+ref+": 80% of 5.00")
	}, 20*time.Second, 100*time.Millisecond)
	text := refusal()
	assert.Equal(t, text, refusal(), "a pull that stands still gives one text")

	require.NoError(t, n.Proxy().Clear(t.Context()))
	c := run(t, pod, realnode.ContainerSpec{})
	assert.Equal(t, tree(t, unpack(t, layers)), tree(t, rootOf(t, c)+"/volume"))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// rootOf is the container's root directory, as seen from the host.
func rootOf(t testing.TB, c *realnode.Container) string {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	require.Positive(t, info.PID)
	return fmt.Sprintf("/proc/%d/root", info.PID)
}

// podmanTree is what podman mounts of an image.
func podmanTree(t *testing.T, n *realnode.Node, ref string) map[string]string {
	t.Helper()
	podman := func(args ...string) string {
		out, err := command(t, n, "podman", append([]string{
			"--root", n.CRIORoot(), "--runroot", n.CRIORunRoot(), "--tmpdir", filepath.Join(n.Dir(), "tmp", "libpod"), "--storage-driver", "overlay",
		}, args...)...)
		require.NoError(t, err)
		return strings.TrimSpace(out)
	}
	dir := podman("image", "mount", ref)
	defer podman("image", "unmount", ref)
	return tree(t, dir)
}

// unpack is an implementation of image layers of its own: GNU tar unpacks them
// one over the other, and what a layer's whiteouts name goes before it comes.
func unpack(t *testing.T, layers [][]images.Entry) string {
	t.Helper()
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	require.NoError(t, os.Mkdir(root, 0o755))
	for i, entries := range layers {
		layer, err := images.Layer(entries...)
		require.NoError(t, err)
		r, err := layer.Uncompressed()
		require.NoError(t, err)
		var archive bytes.Buffer
		_, err = archive.ReadFrom(r)
		require.NoError(t, err)
		require.NoError(t, r.Close())

		alone := filepath.Join(dir, fmt.Sprint(i))
		require.NoError(t, os.Mkdir(alone, 0o755))
		untar(t, archive.Bytes(), alone)
		makeWay(t, alone, root)
		untar(t, archive.Bytes(), root, "--exclude=.wh.*")
	}
	return root
}

func untar(t *testing.T, archive []byte, dir string, options ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "tar", append([]string{
		"--extract", "--directory", dir, "--numeric-owner", "--same-owner", "--same-permissions", "--xattrs", "--xattrs-include=*",
	}, options...)...)
	cmd.Stdin = bytes.NewReader(archive)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// makeWay removes from root what a layer, unpacked alone, removes or puts
// something of another kind in the place of.
func makeWay(t *testing.T, layer, root string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(layer, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(layer, file)
		if err != nil {
			return err
		}
		at := filepath.Join(root, name)
		removed, whiteout := strings.CutPrefix(entry.Name(), ".wh.")
		switch {
		case removed == ".wh..opq":
			below, err := os.ReadDir(filepath.Dir(at))
			if err != nil {
				return err
			}
			for _, b := range below {
				if err := os.RemoveAll(filepath.Join(filepath.Dir(at), b.Name())); err != nil {
					return err
				}
			}
			return nil
		case whiteout:
			return os.RemoveAll(filepath.Join(filepath.Dir(at), removed))
		}
		if there, err := os.Lstat(at); err == nil && there.IsDir() != entry.IsDir() {
			return os.RemoveAll(at)
		}
		return nil
	}))
}

// tree says of each path below dir what it is, to the last attribute. What
// belongs to a mount rather than to an image is left out: times of directories,
// which change with what is unpacked into them, and SELinux labels.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	paths := map[string]string{}
	firstName := map[uint64]string{}
	require.NoError(t, filepath.WalkDir(dir, func(file string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, file)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(file, &st); err != nil {
			return err
		}
		text := fmt.Sprintf("%06o %d:%d", st.Mode, st.Uid, st.Gid)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			text += fmt.Sprintf(" at %d", st.Mtim.Sec)
			if first, ok := firstName[st.Ino]; ok {
				text += " same as " + first
			} else {
				firstName[st.Ino] = name
			}
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			content, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if len(content) < 100 {
				text += fmt.Sprintf(" %q", content)
			} else {
				text += fmt.Sprintf(" %d bytes %x", len(content), sha256.Sum256(content))
			}
		case unix.S_IFLNK:
			target, err := os.Readlink(file)
			if err != nil {
				return err
			}
			text += " -> " + target
		case unix.S_IFCHR, unix.S_IFBLK:
			text += fmt.Sprintf(" device %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		attributes, err := xattrs(file)
		paths[name] = text + attributes
		return err
	}))
	return paths
}

func xattrs(file string) (string, error) {
	list := make([]byte, 64<<10)
	size, err := unix.Llistxattr(file, list)
	if err != nil {
		return "", fmt.Errorf("list attributes of %s: %w", file, err)
	}
	names := strings.FieldsFunc(string(list[:size]), func(r rune) bool { return r == 0 })
	slices.Sort(names)
	var text string
	for _, name := range names {
		if name == "security.selinux" {
			continue
		}
		value := make([]byte, 64<<10)
		size, err := unix.Lgetxattr(file, name, value)
		if err != nil {
			return "", fmt.Errorf("read attribute %s of %s: %w", name, file, err)
		}
		text += fmt.Sprintf(" %s=%q", name, value[:size])
	}
	return text, nil
}
