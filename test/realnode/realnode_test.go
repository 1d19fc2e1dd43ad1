package realnode_test

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plain boots a node without ocihold: these tests are about the node itself.
func plain(t *testing.T, o realnode.Options) *realnode.Node {
	t.Helper()
	o.WithoutOcihold = true
	return realnode.Boot(t, o)
}

// left lists what the kernel still shows of a node: processes by their command
// line, mounts, and cgroups.
func left(t *testing.T, n *realnode.Node, pids ...int) []string {
	t.Helper()
	var found []string
	for _, pid := range pids {
		// One that has ended may wait for the init process to reap it.
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			found = append(found, "process "+strconv.Itoa(pid))
		}
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, f := range commands {
		if c, err := os.ReadFile(f); err == nil && strings.Contains(string(c), n.Dir()) {
			found = append(found, f+": "+string(c))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, n.Dir()) {
			found = append(found, line)
		}
	}
	for _, e := range n.Env() {
		if parent, ok := strings.CutPrefix(e, "CGROUP_PARENT="); ok {
			for _, pattern := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
				groups, err := filepath.Glob(pattern + filepath.Dir(parent))
				require.NoError(t, err)
				found = append(found, groups...)
			}
		}
	}
	return found
}

func runPod(t *testing.T, n *realnode.Node, handler string) (*realnode.Pod, *realnode.Container) {
	t.Helper()
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{Handler: handler})
	require.NoError(t, err)
	c, err := pod.Run(t.Context(), realnode.ContainerSpec{})
	require.NoError(t, err)
	return pod, c
}

// runConfig runs a container in a pod of this very configuration, and returns
// its id and process.
func runConfig(t *testing.T, n *realnode.Node, config *cri.PodSandboxConfig) (string, int) {
	t.Helper()
	sandbox, err := n.Runtime().RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: config})
	require.NoError(t, err)
	created, err := n.Runtime().CreateContainer(t.Context(), &cri.CreateContainerRequest{
		PodSandboxId: sandbox.GetPodSandboxId(), SandboxConfig: config,
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: "main"},
			Image:    &cri.ImageSpec{Image: n.BaseImage(), UserSpecifiedImage: n.BaseImage()},
			Command:  []string{"/bin/sleep", "1000000"},
			LogPath:  "main.log",
			Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
				NamespaceOptions: config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
			}},
		},
	})
	require.NoError(t, err)
	id := created.GetContainerId()
	_, err = n.Runtime().StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: id})
	require.NoError(t, err)
	status, err := n.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	require.NoError(t, err)
	var info realnode.Info
	require.NoError(t, json.Unmarshal([]byte(status.GetInfo()["info"]), &info))
	require.Positive(t, info.PID)
	return id, info.PID
}

func pidOf(t *testing.T, c *realnode.Container) int {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	require.Positive(t, info.PID)
	return info.PID
}

func TestPodsOfEveryHandler(t *testing.T) {
	n := plain(t, realnode.Options{})
	for _, handler := range append([]string{""}, realnode.Handlers...) {
		pod, c := runPod(t, n, handler)
		out, err := c.Exec(t.Context(), "/bin/sh", "-c", "echo out; echo err >&2; exit 3")
		require.NoError(t, err)
		assert.Equal(t, realnode.Output{Stdout: "out\n", Stderr: "err\n", ExitCode: 3}, out, "handler %q", handler)
		require.NoError(t, pod.Remove(t.Context()))
	}
	n.AssertClean(t)
}

func TestDownLeavesNothing(t *testing.T) {
	n := plain(t, realnode.Options{})
	_, c := runPod(t, n, "")
	pid := pidOf(t, c)
	require.NotEmpty(t, left(t, n, pid), "the test must see a running node")
	require.NoError(t, n.Down(t.Context()))
	assert.Empty(t, left(t, n, pid))
	require.NoError(t, realnode.Down(t.Context(), n.Dir()), "down again")
}

func TestDownAfterEverythingWasKilled(t *testing.T) {
	n := plain(t, realnode.Options{})
	pod, c := runPod(t, n, "")
	// A pod that is not in the node's cgroup.
	config := proto.CloneOf(pod.Config)
	config.Metadata.Name = "stray"
	config.Linux.CgroupParent = ""
	id, outside := runConfig(t, n, config)
	pids := []int{pidOf(t, c), outside}
	for _, name := range []string{realnode.CRIO, realnode.Registry, realnode.Proxy} {
		require.NoError(t, n.Kill(t.Context(), name, syscall.SIGKILL))
	}
	require.NoError(t, exec.Command("pkill", "-9", "-f", "conmon -b "+n.Dir()+"/").Run())
	require.NoError(t, os.Remove(filepath.Join(n.Dir(), "node.json")))
	require.NotEmpty(t, left(t, n, pids...))
	require.NoError(t, n.Down(t.Context()))
	assert.Empty(t, left(t, n, pids...))
	stray, err := filepath.Glob("/sys/fs/cgroup/*/crio*/*" + id + "*")
	require.NoError(t, err)
	assert.Empty(t, stray)
}

func TestDownOfStoppedPrograms(t *testing.T) {
	n := plain(t, realnode.Options{})
	_, c := runPod(t, n, "")
	pid := pidOf(t, c)
	for _, name := range []string{realnode.CRIO, realnode.Registry, realnode.Proxy} {
		require.NoError(t, n.Kill(t.Context(), name, syscall.SIGSTOP))
	}
	require.NoError(t, n.Down(t.Context()))
	assert.Empty(t, left(t, n, pid))
}

func TestNodesSideBySide(t *testing.T) {
	a, b := plain(t, realnode.Options{}), plain(t, realnode.Options{})
	_, inA := runPod(t, a, "")
	_, inB := runPod(t, b, "")
	pidA := pidOf(t, inA)
	require.NoError(t, a.Down(t.Context()))
	assert.Empty(t, left(t, a, pidA))
	out, err := inB.Exec(t.Context(), "/bin/echo", "alive")
	require.NoError(t, err)
	assert.Equal(t, "alive\n", out.Stdout)
}

func TestKilledProgramsStartAgain(t *testing.T) {
	n := plain(t, realnode.Options{})
	_, c := runPod(t, n, "")
	for _, name := range []string{realnode.CRIO, realnode.Registry, realnode.Proxy} {
		require.Error(t, n.Start(t.Context(), name), "%s is running", name)
		require.NoError(t, n.Kill(t.Context(), name, syscall.SIGKILL))
		require.NoError(t, n.Start(t.Context(), name))
	}
	out, err := c.Exec(t.Context(), "/bin/echo", "alive")
	require.NoError(t, err)
	assert.Equal(t, "alive\n", out.Stdout)
	_, err = n.Pull(t.Context(), n.BaseImage())
	require.NoError(t, err)
	require.ErrorContains(t, n.Kill(t.Context(), "kubelet", syscall.SIGKILL), "has no program")
}

func TestAttach(t *testing.T) {
	n := plain(t, realnode.Options{})
	again, err := realnode.Attach(n.Dir())
	require.NoError(t, err)
	t.Cleanup(again.Close)
	assert.Equal(t, n.Env(), again.Env())
	_, err = again.RunPod(t.Context(), realnode.PodSpec{})
	require.NoError(t, err)
	_, err = realnode.Attach(t.TempDir())
	require.ErrorContains(t, err, "attach to the node in")
}

func TestRegistryWithTLSAndPassword(t *testing.T) {
	n := plain(t, realnode.Options{TLS: true, Auth: "user:secret"})
	small, err := images.Image(images.Config{}, images.Stack(2)...)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "small:1", small))
	_, err = n.Pull(t.Context(), n.Ref("small:1"))
	require.NoError(t, err, "CRI-O knows the password")
	inspect := exec.Command("sh", "-c", ". "+n.EnvFile()+" && skopeo inspect docker://$REGISTRY/small:1")
	out, err := inspect.CombinedOutput()
	require.NoError(t, err, "the exports hold certificate and password: %s", out)

	_, err = http.Get("https://" + n.Registry() + "/v2/")
	require.ErrorContains(t, err, "certificate")

	require.NoError(t, os.WriteFile(n.AuthFile(), []byte("{}"), 0o600))
	_, err = n.Pull(t.Context(), n.Ref("small:1"))
	require.ErrorContains(t, err, "authentication required")
}

func TestProxySpoilsPulls(t *testing.T) {
	n := plain(t, realnode.Options{})
	img, err := images.Image(images.Config{}, []images.Entry{images.Big("big", 1<<20, 1)})
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "big:1", img))
	layers, err := img.Layers()
	require.NoError(t, err)
	layer, err := layers[0].Digest()
	require.NoError(t, err)
	blob := layer.String()
	offset := int64(500_000)

	for name, rule := range map[string]proxy.Rule{
		"altered": {Path: blob, Flip: &offset},
		"status":  {Path: "/manifests/", Status: http.StatusNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, n.Proxy().Add(t.Context(), rule))
			_, err := n.Pull(t.Context(), n.Ref("big:1"))
			require.Error(t, err)
			require.NoError(t, n.Proxy().Clear(t.Context()))
		})
	}
	t.Run("stalled", func(t *testing.T) {
		require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: blob, Stall: &offset}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := n.Pull(ctx, n.Ref("big:1"))
		require.ErrorContains(t, err, "DeadlineExceeded")
		require.NoError(t, n.Proxy().Clear(t.Context()))
	})
}

func TestProxyCountsPulls(t *testing.T) {
	n := plain(t, realnode.Options{})
	counts, err := n.Proxy().Counts(t.Context())
	require.NoError(t, err)
	assert.Empty(t, counts, "the node's own pulls do not count")
	img, err := images.Image(images.Config{}, images.Stack(1)...)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "small:1", img))
	counts, err = n.Proxy().Counts(t.Context())
	require.NoError(t, err)
	assert.Empty(t, counts, "pushes go past the proxy")
	_, err = n.Pull(t.Context(), n.Ref("small:1"))
	require.NoError(t, err)
	counts, err = n.Proxy().Counts(t.Context())
	require.NoError(t, err)
	layers, err := img.Layers()
	require.NoError(t, err)
	layer, err := layers[0].Digest()
	require.NoError(t, err)
	assert.Equal(t, 1, counts["GET /v2/small/blobs/"+layer.String()])
}

// What the makers of package images put into layers is what a container sees.
func TestStackInAContainer(t *testing.T) {
	n := plain(t, realnode.Options{})
	img, err := images.Image(images.Config{}, images.Stack(5)...)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "stack:1", img))
	ref := n.Ref("stack:1")
	id, err := n.Pull(t.Context(), ref)
	require.NoError(t, err)
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{})
	require.NoError(t, err)
	c, err := pod.Run(t.Context(), realnode.ContainerSpec{Mounts: []*cri.Mount{{
		ContainerPath: "/vol", Image: &cri.ImageSpec{Image: id, UserSpecifiedImage: ref}, Readonly: true,
	}}})
	require.NoError(t, err)
	out, err := c.Exec(t.Context(), "/bin/sh", "-c", "cd /vol && find . -exec stat -c '%n %F %a %u:%g' {} + | sort && cat tree/replaced tree/to-lower tree/link")
	require.NoError(t, err)
	assert.Equal(t, `. directory 555 0:0
./layer-000 regular file 644 0:0
./layer-001 regular file 644 0:0
./layer-002 regular file 644 0:0
./layer-003 regular file 644 0:0
./layer-004 regular file 644 0:0
./tree directory 755 0:0
./tree/absolute symbolic link 777 0:0
./tree/attributes regular file 644 0:0
./tree/becomes-dir directory 711 0:0
./tree/becomes-dir/inside regular file 644 0:0
./tree/becomes-file regular file 644 0:0
./tree/dangling symbolic link 777 0:0
./tree/empty directory 700 0:0
./tree/kept regular file 600 1000:1001
./tree/link regular file 640 3:4
./tree/linked regular file 640 3:4
./tree/opaque directory 700 9:9
./tree/opaque/new regular file 644 0:0
./tree/relative symbolic link 777 0:0
./tree/replaced regular file 755 5:6
./tree/setuid regular file 4755 0:0
./tree/spaces and ü regular file 644 0:0
./tree/sticky directory 1777 7:8
./tree/to-lower symbolic link 777 0:0
new
content of layer 0
linked
`, out.Stdout+out.Stderr)
}

// A pod with a volume by annotation, on a node with ocihold.
func TestNodeWithOcihold(t *testing.T) {
	settings := filepath.Join(t.TempDir(), "debug.toml")
	require.NoError(t, os.WriteFile(settings, []byte("log_level = \"debug\"\n"), 0o600))
	n := realnode.Boot(t, realnode.Options{OciholdConf: settings})
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: map[string]string{
		"image-volume.ocihold.dev": "- image: " + n.BaseImage() + "\n  mountPath: /vol\n",
	}})
	require.NoError(t, err)
	var c *realnode.Container
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		c, err = pod.Run(context.Background(), realnode.ContainerSpec{})
		require.NoError(t, err)
	}, 30*time.Second, 100*time.Millisecond)
	out, err := c.Exec(t.Context(), "/bin/cat", "/vol/etc/group")
	require.NoError(t, err)
	assert.Equal(t, "root:x:0:\nnogroup:x:65534:\n", out.Stdout)
	leases, err := n.Leases()
	require.NoError(t, err)
	assert.Len(t, leases, 1)

	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, sig))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	}
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

func TestSettingsReachCRIO(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "pinned.conf")
	require.NoError(t, os.WriteFile(conf, []byte("[crio.image]\npinned_images = [\"*base*\"]\n"), 0o600))
	n := plain(t, realnode.Options{CRIOConf: []string{conf}})
	resp, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: n.BaseImage()}})
	require.NoError(t, err)
	assert.True(t, resp.GetImage().GetPinned())
}

func TestEnvFileServesCrictl(t *testing.T) {
	n := plain(t, realnode.Options{})
	out, err := exec.Command("sh", "-c", ". "+n.EnvFile()+` && crictl images -o json | jq -r '.images[].repoTags[]'`).CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Contains(t, string(out), n.BaseImage())
}

func TestLongestDirectory(t *testing.T) {
	parent, err := os.MkdirTemp("", "n")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(parent)) })

	const limit = 74
	long := func(n int) string { return filepath.Join(parent, strings.Repeat("x", n-len(parent)-1)) }
	_, err = realnode.Up(t.Context(), realnode.Options{Dir: long(limit + 1)})
	require.ErrorContains(t, err, "choose a shorter one")

	n := plain(t, realnode.Options{Dir: long(limit)})
	_, c := runPod(t, n, "")
	out, err := c.Exec(t.Context(), "/bin/echo", "alive")
	require.NoError(t, err)
	assert.Equal(t, "alive\n", out.Stdout)
}

func TestFailedUpShowsTheLogAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	conf := filepath.Join(dir, "broken.conf")
	require.NoError(t, os.WriteFile(conf, []byte("[crio.runtime]\ndefault_runtime = \"absent\"\n"), 0o600))
	node := filepath.Join(dir, "n")
	_, err := realnode.Up(t.Context(), realnode.Options{Dir: node, CRIOConf: []string{conf}, WithoutOcihold: true})
	require.ErrorContains(t, err, "crio ended at once")
	require.ErrorContains(t, err, "absent")
	commands, err := exec.Command("ps", "-eo", "args").Output()
	require.NoError(t, err)
	assert.NotContains(t, string(commands), node)
}
