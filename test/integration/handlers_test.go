package integration

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestHandlerRoots pulls through ocihold's ImageService into the roots of
// handlers, and runs containers from there on a CRI-O that was not restarted.
func TestHandlerRoots(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	started := startTime(t, n)
	t.Run("run from the root of vm", func(t *testing.T) { testRunFromHandlerRoot(t, n) })
	t.Run("platform of wasm", func(t *testing.T) { testPlatformOfHandler(t, n) })
	t.Run("user of an image only in vm", func(t *testing.T) { testUserOfHandlerImage(t, n) })
	t.Run("volume from the root of vm", func(t *testing.T) { testVolumeFromHandlerRoot(t, n) })
	t.Run("remove in use", func(t *testing.T) { testRemoveInUse(t, n) })
	t.Run("kubelet's client", func(t *testing.T) { testKubeletsClient(t, n) })
	t.Run("commands", func(t *testing.T) { testHandlerCommands(t, n) })
	assert.Equal(t, started, startTime(t, n), "CRI-O was not restarted")
	n.AssertClean(t)
}

// TestHandlerRootsWhileCRIOIsAway holds that handlers' images are there while
// CRI-O is not, and that nothing is removed then.
func TestHandlerRootsWhileCRIOIsAway(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	ref := push(t, n, "vm/app:1", busybox(t))
	later := push(t, n, "vm/later:1", []images.Entry{images.File("f", "x", 0o644)})
	id := pullFor(t, n, "vm", ref)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: ref})

	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGKILL))
	laterID := pullFor(t, n, "vm", later)
	list, err := n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	var ids []string
	for _, image := range list.GetImages() {
		ids = append(ids, image.GetId())
	}
	assert.Subset(t, ids, []string{id, laterID})
	socket := filepath.Join(n.Dir(), "run", "crio.sock")
	err = removeFrom(t, n, "", laterID)
	require.ErrorContains(t, err, socket)
	assert.Equal(t, codes.Unavailable, status.Code(err))
	assert.Equal(t, laterID, pullFor(t, n, "vm", later), "it is still there")
	_, err = n.OciholdRuntime().Version(t.Context(), &cri.VersionRequest{})
	require.ErrorContains(t, err, socket)
	assert.Equal(t, codes.Unavailable, status.Code(err))

	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		_, err := n.OciholdRuntime().Version(t.Context(), &cri.VersionRequest{})
		assert.NoError(c, err)
	}, 10*time.Second, 50*time.Millisecond, "forwarding is back when CRI-O is")
	assert.Equal(t, "0\n", sh(t, c, "id -u"), "the container ran on")
	require.ErrorContains(t, removeFrom(t, n, "", id), c.ID)
	require.NoError(t, removeFrom(t, n, "", laterID))
	require.NoError(t, c.Remove(t.Context()))
	require.NoError(t, removeFrom(t, n, "", id))

	// A setting that endangers containers from handlers' roots stops new ones.
	override := filepath.Join(n.Dir(), "etc", "crio", "crio.conf.d", "99-repair.conf")
	require.NoError(t, os.WriteFile(override, []byte("[crio]\ninternal_repair = true\n"), 0o644))
	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	_, err = n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: "vm"}})
	require.ErrorContains(t, err, "internal_repair")
	pullFor(t, n, "", ref)
}

func testRunFromHandlerRoot(t *testing.T, n *realnode.Node) {
	const size = 4 << 20
	ref := push(t, n, "vm/app:1", busybox(t), []images.Entry{images.Big("model", size, 1)})
	before := diskUse(t, n.CRIORoot())
	out, err := command(t, n, "crictl", "-i", "unix://"+n.ImageSocket(), "pull", "--annotation", "runtime-handler.ocihold.dev=vm", ref)
	require.NoError(t, err, out)
	id := pullFor(t, n, "vm", ref)
	assert.Contains(t, out, id)
	assert.Greater(t, diskUse(t, n.HandlerRoot("vm")), int64(size))
	assert.Less(t, diskUse(t, n.CRIORoot()), before+size/8, "none of it is in CRI-O's root")

	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: ref})
	assert.Equal(t, fmt.Sprint(size), strings.TrimSpace(sh(t, c, "wc -c < /model")))
	lowers := lowerDirs(t, n, c)
	require.Len(t, lowers, 2, "as many as layers")
	for _, dir := range lowers {
		assert.True(t, strings.HasPrefix(dir, n.HandlerRoot("vm")+"/"), dir)
	}
	assert.NoFileExists(t, filepath.Join(n.HandlerRoot("vm"), "overlay-containers", "containers.json"))

	answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: "vm"}})
	require.NoError(t, err)
	assert.Equal(t, id, answer.GetImage().GetId(), "PullImage and ImageStatus agree")
	elsewhere, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: "runc"}})
	require.NoError(t, err)
	assert.Nil(t, elsewhere.GetImage(), "another handler's copy")
}

// A volume's image goes into the root of the pod's handler, and is held there.
func testVolumeFromHandlerRoot(t *testing.T, n *realnode.Node) {
	ref := push(t, n, "vm/volume:1", []images.Entry{images.File("only-in-vm", "it is here", 0o644)})
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: ref, MountPath: "/v"})})
	c := run(t, pod, realnode.ContainerSpec{})
	assert.Equal(t, "it is here", sh(t, c, "cat /v/only-in-vm"))
	for root, want := range map[string]int{n.CRIORoot(): 0, n.HandlerRoot("vm"): 1} {
		layers, err := filepath.Glob(filepath.Join(root, "overlay", "*", "diff", "only-in-vm"))
		require.NoError(t, err)
		assert.Len(t, layers, want, root)
	}
	id := pullFor(t, n, "vm", ref)
	assert.FileExists(t, filepath.Join(n.RunDir(), "mounts", "vm."+id, "only-in-vm"))
	require.ErrorContains(t, removeFrom(t, n, "", id), "use")
	out, err := ociholdCommand(t, n, "volumes", "-o", "json")
	require.NoError(t, err)
	assert.Contains(t, out, `"handler": "vm"`)

	require.NoError(t, pod.Remove(t.Context()))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.NoError(c, removeFrom(t, n, "", id))
	}, 10*time.Second, 50*time.Millisecond, "let go with the pod")
	assert.NoDirExists(t, filepath.Join(n.RunDir(), "mounts", "vm."+id))
}

func testPlatformOfHandler(t *testing.T, n *realnode.Node) {
	linux, err := images.Image(images.Config{}, []images.Entry{images.File("linux", "x", 0o644)})
	require.NoError(t, err)
	wasm, err := images.Image(images.Config{Platform: "wasi/wasm"}, []images.Entry{images.File("app.wasm", "x", 0o644)})
	require.NoError(t, err)
	index, err := images.Index(linux, wasm)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "both:1", index))
	ref := n.Ref("both:1")

	assert.Equal(t, configID(t, linux), pullFor(t, n, "", ref))
	assert.Equal(t, configID(t, wasm), pullFor(t, n, "wasm", ref))
	assert.Equal(t, configID(t, linux), pullFor(t, n, "vm", ref))
	list, err := n.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	tagged := make(map[string]bool)
	for _, image := range list.GetImages() {
		for _, tag := range image.GetRepoTags() {
			tagged[image.GetId()] = tagged[image.GetId()] || tag == ref
		}
	}
	assert.True(t, tagged[configID(t, linux)], "CRI-O's own tag has not moved")
	answer, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
	require.NoError(t, err)
	assert.Equal(t, configID(t, linux), answer.GetImage().GetId(), "nor what CRI-O takes it for")

	only, err := images.Index(linux)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "linux-only:1", only))
	_, err = n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: n.Ref("linux-only:1"), RuntimeHandler: "wasm"}})
	require.ErrorContains(t, err, `OS "wasi"`)
}

func testUserOfHandlerImage(t *testing.T, n *realnode.Node) {
	image, err := images.Image(images.Config{User: "1000"}, busybox(t))
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "user:1", image))
	ref := n.Ref("user:1")
	id := pullFor(t, n, "vm", ref)

	// So kubelet asks for the user, and this is what it does with the answer.
	answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
	require.NoError(t, err)
	require.Equal(t, int64(1000), answer.GetImage().GetUid().GetValue())
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: ref, User: answer.GetImage().GetUid()})
	assert.Equal(t, "1000\n", sh(t, c, "id -u"))
	other := run(t, pod, realnode.ContainerSpec{Name: "other", Image: id, UserImage: ref})
	assert.Equal(t, "1000\n", sh(t, other, "id -u"), "the image says so, too")
}

func testRemoveInUse(t *testing.T, n *realnode.Node) {
	ref := push(t, n, "vm/used:1", busybox(t), []images.Entry{images.File("only-here", "content", 0o644)})
	id := pullFor(t, n, "vm", ref)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: ref})
	for _, name := range []string{ref, id} {
		err := removeFrom(t, n, "", name)
		require.ErrorContains(t, err, "in use by")
		require.ErrorContains(t, err, c.ID)
	}
	require.ErrorContains(t, removeFrom(t, n, "vm", ref), "in use by")
	assert.Equal(t, "content", sh(t, c, "cat /only-here"))

	require.NoError(t, c.Remove(t.Context()))
	require.NoError(t, removeFrom(t, n, "", id))
	require.NoError(t, removeFrom(t, n, "", id), "again")
	answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: "vm"}})
	require.NoError(t, err)
	assert.Nil(t, answer.GetImage())
}

func testKubeletsClient(t *testing.T, n *realnode.Node) {
	ref := push(t, n, "kubelet/app:1", []images.Entry{images.File("f", "x", 0o644)})
	for _, streaming := range []bool{false, true} {
		client, err := criclient.NewRemoteImageServiceBuilder().WithEndpoint("unix://" + n.ImageSocket()).
			WithConnectionTimeout(time.Minute).WithUseStreaming(streaming).Build(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, client.Close(context.WithoutCancel(t.Context()))) })
		for _, handler := range []string{"", "vm"} {
			spec := &cri.ImageSpec{Image: ref, RuntimeHandler: handler, Annotations: map[string]string{"kubernetes.io/config.source": "api"}}
			id, err := client.PullImage(t.Context(), spec, nil, &cri.PodSandboxConfig{})
			require.NoError(t, err)
			answer, err := client.ImageStatus(t.Context(), spec, false)
			require.NoError(t, err)
			assert.Equal(t, id, answer.GetImage().GetId())
			all, err := client.ListImages(t.Context(), nil)
			require.NoError(t, err)
			listed := 0
			for _, image := range all {
				if image.GetId() == id {
					listed++
				}
			}
			assert.Equal(t, 1, listed)
			require.NoError(t, client.RemoveImage(t.Context(), &cri.ImageSpec{Image: id}))
			answer, err = client.ImageStatus(t.Context(), spec, false)
			require.NoError(t, err)
			assert.Nil(t, answer.GetImage())
		}
		disks, err := client.ImageFsInfo(t.Context())
		require.NoError(t, err)
		require.NotEmpty(t, disks.GetImageFilesystems())
		require.NotEmpty(t, disks.GetContainerFilesystems())
		assert.DirExists(t, disks.GetImageFilesystems()[0].GetFsId().GetMountpoint())
		assert.NotZero(t, disks.GetImageFilesystems()[0].GetUsedBytes().GetValue())
	}
}

func testHandlerCommands(t *testing.T, n *realnode.Node) {
	ref := push(t, n, "command/app:1", []images.Entry{images.File("g", "x", 0o644)})
	_, err := ociholdCommand(t, n, "pull", "--handler", "vm", ref)
	require.NoError(t, err)
	line := func() string {
		out, err := ociholdCommand(t, n, "images")
		require.NoError(t, err)
		for l := range strings.Lines(out) {
			if strings.HasPrefix(l, ref+" ") {
				return strings.Join(strings.Fields(l)[2:3], "")
			}
		}
		return ""
	}
	assert.Equal(t, "vm", line())
	out, err := ociholdCommand(t, n, "rmi", "--handler", "wasm", ref)
	require.Error(t, err, out)
	out, err = ociholdCommand(t, n, "pull", "--handler", "kata", ref)
	require.ErrorContains(t, err, "there are crun, default, runc, vm, wasm", out)
	out, err = ociholdCommand(t, n, "rmi", "--handler", "vm", ref)
	require.NoError(t, err, out)
	assert.Empty(t, line())
}

// pullFor pulls through ocihold and returns the id.
func pullFor(t testing.TB, n *realnode.Node, handler, ref string) string {
	t.Helper()
	resp, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: handler}})
	require.NoError(t, err)
	return resp.GetImageRef()
}

func removeFrom(t testing.TB, n *realnode.Node, handler, ref string) error {
	t.Helper()
	_, err := n.OciholdImages().RemoveImage(context.WithoutCancel(t.Context()),
		&cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: handler}})
	return err
}

// busybox are the entries that let a container run a shell.
func busybox(t testing.TB) []images.Entry {
	t.Helper()
	content, err := os.ReadFile("/bin/busybox")
	require.NoError(t, err)
	entries := []images.Entry{images.Dir("bin", 0o755), images.File("bin/busybox", string(content), 0o755)}
	for _, applet := range []string{"sh", "cat", "id", "sleep", "wc"} {
		entries = append(entries, images.Symlink("bin/"+applet, "busybox"))
	}
	return entries
}

func configID(t testing.TB, image v1.Image) string {
	t.Helper()
	id, err := image.ConfigName()
	require.NoError(t, err)
	return id.Hex
}

// lowerDirs returns the layers that a container's root file system is made of,
// as the kernel has them, the init layer of containers/storage aside.
func lowerDirs(t testing.TB, n *realnode.Node, c *realnode.Container) []string {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", info.PID))
	require.NoError(t, err)
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if fields[4] != "/" {
			continue
		}
		var dirs []string
		for option := range strings.SplitSeq(fields[len(fields)-1], ",") {
			list, ok := strings.CutPrefix(option, "lowerdir=")
			if !ok {
				continue
			}
			for dir := range strings.SplitSeq(list, ":") {
				if !filepath.IsAbs(dir) {
					dir = filepath.Join(n.CRIORoot(), "overlay", dir)
				}
				resolved, err := filepath.EvalSymlinks(dir)
				require.NoError(t, err)
				dirs = append(dirs, resolved)
			}
		}
		return dirs
	}
	require.Fail(t, "the container has no root file system")
	return nil
}

// diskUse adds up the files below dir, in bytes.
func diskUse(t testing.TB, dir string) int64 {
	t.Helper()
	var sum int64
	require.NoError(t, filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if info, err := entry.Info(); err == nil && info.Mode().IsRegular() {
			sum += info.Size()
		}
		return nil
	}))
	return sum
}

// startTime is when the node's CRI-O was started, as its pid file shows.
func startTime(t testing.TB, n *realnode.Node) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(n.Dir(), "run", "crio.pid"))
	require.NoError(t, err)
	return string(content)
}
