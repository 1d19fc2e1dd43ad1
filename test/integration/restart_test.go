package integration

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// restarts is how often each program is ended.
const restarts = 10

// Running containers, their volumes and what holds them do not notice that the
// programs around them end and start again.
func TestRestarts(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	a, b := pushFiles(t, n, "a:1", 3, 20), pushFiles(t, n, "b:1", 1, 20)
	both := []volume{{Image: a.ref, MountPath: "/a"}, {Image: b.ref, MountPath: "/b", Exec: true}}
	one := runPod(t, n, realnode.PodSpec{Name: "one", Annotations: volumes(t, both...)})
	two := runPod(t, n, realnode.PodSpec{Name: "two", Annotations: volumes(t, both[0])})
	containers := []*realnode.Container{
		run(t, one, realnode.ContainerSpec{Name: "first"}),
		run(t, one, realnode.ContainerSpec{Name: "second"}),
		run(t, two, realnode.ContainerSpec{}),
		run(t, runPod(t, n, realnode.PodSpec{Name: "plain"}), realnode.ContainerSpec{}),
	}
	require.NoError(t, checkHeld(n, a.id, b.id))
	before := snapshotOf(t, n, containers)
	require.Len(t, before.Given, 5)
	require.Len(t, before.Containers, len(containers))

	kill := func(t *testing.T, sig syscall.Signal, names ...string) {
		t.Helper()
		for _, name := range names {
			require.NoError(t, n.Kill(t.Context(), name, sig))
		}
	}
	start := func(t *testing.T, names ...string) {
		t.Helper()
		for _, name := range names {
			require.NoError(t, n.Start(t.Context(), name))
		}
	}
	for _, restart := range []struct {
		name string
		do   func(t *testing.T, i int)
	}{
		{"CRI-O ends", func(t *testing.T, _ int) {
			kill(t, syscall.SIGTERM, realnode.CRIO)
			start(t, realnode.CRIO)
		}},
		{"CRI-O is killed", func(t *testing.T, _ int) {
			kill(t, syscall.SIGKILL, realnode.CRIO)
			start(t, realnode.CRIO)
		}},
		{"ocihold ends", func(t *testing.T, _ int) {
			kill(t, syscall.SIGTERM, realnode.Ocihold)
			h, err := heldBy(n)
			require.NoError(t, err)
			require.Equal(t, before.Held, h, "while it is away")
			start(t, realnode.Ocihold)
		}},
		{"ocihold is killed", func(t *testing.T, _ int) {
			kill(t, syscall.SIGKILL, realnode.Ocihold)
			start(t, realnode.Ocihold)
		}},
		{"both are killed", func(t *testing.T, i int) {
			kill(t, syscall.SIGKILL, realnode.CRIO, realnode.Ocihold)
			if i%2 == 0 {
				start(t, realnode.CRIO, realnode.Ocihold)
				return
			}
			// ocihold answers, but says so only once CRI-O is there.
			started := make(chan error, 1)
			go func() { started <- n.Start(t.Context(), realnode.Ocihold) }()
			start(t, realnode.CRIO)
			require.NoError(t, <-started)
		}},
	} {
		t.Run(restart.name, func(t *testing.T) {
			for i := range restarts {
				restart.do(t, i)
				awaitRegistered(t, n)
				requireSnapshot(t, n, before, containers)
			}
			settle(t, n, a.id, b.id)
			requireSnapshot(t, n, before, containers)
			for _, c := range containers[:3] {
				a.assertRead(t, c, "/a")
			}
			b.assertRead(t, containers[0], "/b")
		})
	}

	t.Run("the next pod shares what there is", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, both...)})
		b.assertRead(t, run(t, pod, realnode.ContainerSpec{}), "/b")
		require.NoError(t, checkHeld(n, a.id, b.id))
		require.NoError(t, pod.Remove(t.Context()))
		settle(t, n, a.id, b.id)
	})
	require.NoError(t, one.Remove(t.Context()))
	await(t, func() error { return checkHeld(n, a.id) })
	require.NoError(t, two.Remove(t.Context()))
	requireNothingHeld(t, n)
	_, err := command(t, n, "crictl", "rmi", a.ref, b.ref)
	require.NoError(t, err)
}

// Whatever ocihold is about when it is killed, nothing of it stays once the pod
// is gone. CRI-O is not killed here: killed while it creates a container, it can
// leave a process that it does not know any more, which has the volume as the
// kernel rightly says, and a root that it cannot load.
func TestKilledAtWork(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	img := pushFiles(t, n, "work:1", 10, 20)
	stays := pushFiles(t, n, "stays:1", 2, 2)
	kept := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: stays.ref, MountPath: "/vol"})})
	reader := run(t, kept, realnode.ContainerSpec{})
	spec := realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})}
	random := seeded(t)
	for range count(6, 100) {
		delay := time.Duration(random.IntN(int(600 * time.Millisecond)))
		killed := killAfter(t, n, delay)
		pod, err := n.RunPod(t.Context(), spec)
		attempt := uint32(0)
		var made []*realnode.Container
		for ; err == nil && len(killed) == 0; attempt++ {
			c, refused := pod.Run(t.Context(), realnode.ContainerSpec{Attempt: attempt})
			if refused == nil {
				made = append(made, c)
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Logf("killed after %s: %d containers, %v", delay, len(made), err)
		require.NoError(t, <-killed)

		// kubelet tries again.
		awaitRegistered(t, n)
		if pod == nil {
			pod, err = n.RunPod(t.Context(), spec)
			require.NoError(t, err)
		}
		for _, c := range append(made, run(t, pod, realnode.ContainerSpec{Attempt: attempt})) {
			img.assertRead(t, c, "/vol")
		}
		await(t, func() error { return checkHeld(n, img.id, stays.id) })
		removeOtherPods(t, n, kept)
		await(t, func() error { return checkHeld(n, stays.id) })
		stays.assertRead(t, reader, "/vol")
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
	}
	require.NoError(t, kept.Remove(t.Context()))
	n.AssertClean(t)
}

// What happens while nobody looks is seen afterwards.
func TestWhileOciholdIsAway(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	img := pushFiles(t, n, "away:1", 2, 5)
	annotations := volumes(t, volume{Image: img.ref, MountPath: "/vol"})
	mounted := func(t *testing.T) (*realnode.Pod, *realnode.Container) {
		t.Helper()
		pod := runPod(t, n, realnode.PodSpec{Name: "away", Annotations: annotations})
		c := run(t, pod, realnode.ContainerSpec{})
		require.NoError(t, checkHeld(n, img.id))
		return pod, c
	}
	kill := func(t *testing.T, sig syscall.Signal, names ...string) {
		t.Helper()
		for _, name := range names {
			require.NoError(t, n.Kill(t.Context(), name, sig))
		}
	}
	start := func(t *testing.T, names ...string) {
		t.Helper()
		for _, name := range names {
			require.NoError(t, n.Start(t.Context(), name))
		}
		awaitRegistered(t, n)
	}
	// exit ends the container without CRI-O's help.
	exit := func(t *testing.T, pid int) {
		t.Helper()
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		await(t, func() error {
			if syscall.Kill(pid, 0) == nil {
				return errors.New("the container has not exited")
			}
			return nil
		})
	}
	pid := func(t *testing.T, c *realnode.Container) int {
		t.Helper()
		info, err := c.Info(t.Context())
		require.NoError(t, err)
		require.Positive(t, info.PID)
		return info.PID
	}
	// again is what kubelet does after a container has exited.
	again := func(t *testing.T, pod *realnode.Pod, c *realnode.Container, told int) {
		t.Helper()
		require.NoError(t, checkHeld(n, img.id), "the pod still asks for it")
		status, err := c.Status(t.Context())
		require.NoError(t, err)
		require.Equal(t, cri.ContainerState_CONTAINER_EXITED, status.GetState())
		next := run(t, pod, realnode.ContainerSpec{Attempt: 1})
		require.NoError(t, c.Remove(t.Context()))
		img.assertRead(t, next, "/vol")
		require.NoError(t, checkHeld(n, img.id))
		require.Equal(t, []string{"away main /vol " + img.id}, given(t, n))
		require.NotContains(t, logOf(t, n, realnode.Ocihold)[told:], "is let go", "not even for a moment")
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
	}

	t.Run("a pod is removed", func(t *testing.T) {
		pod, _ := mounted(t)
		kill(t, syscall.SIGKILL, realnode.Ocihold)
		require.NoError(t, pod.Remove(t.Context()))
		require.NoError(t, checkHeld(n, img.id), "there is nobody to let go")
		start(t, realnode.Ocihold)
		requireNothingHeld(t, n)
	})
	t.Run("a pod is removed after SIGTERM", func(t *testing.T) {
		pod, c := mounted(t)
		kill(t, syscall.SIGTERM, realnode.Ocihold)
		require.NoError(t, checkHeld(n, img.id), "running containers need it")
		img.assertRead(t, c, "/vol")
		require.NoError(t, pod.Remove(t.Context()))
		start(t, realnode.Ocihold)
		requireNothingHeld(t, n)
	})
	for name, away := range map[string][]string{
		"a container exits":                     {realnode.Ocihold},
		"a container exits while CRI-O is away": {realnode.CRIO},
		"a container exits while all is away":   {realnode.CRIO, realnode.Ocihold},
	} {
		t.Run(name, func(t *testing.T) {
			pod, c := mounted(t)
			first := pid(t, c)
			kill(t, syscall.SIGKILL, away...)
			exit(t, first)
			told := len(logOf(t, n, realnode.Ocihold))
			start(t, away...)
			require.Eventually(t, func() bool { return len(given(t, n)) == 0 }, 10*time.Second, 50*time.Millisecond, "what has exited has nothing")
			again(t, pod, c, told)
		})
	}
	_, err := command(t, n, "crictl", "rmi", img.ref)
	require.NoError(t, err)
	n.AssertClean(t)
}

// CRI-O and the node's podman, whose libraries are older, go on working on what
// ocihold wrote to their root, and ocihold on what they wrote.
func TestOlderProgramsOnTheRoot(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	before := layers(t, n)
	base, err := images.Busybox()
	require.NoError(t, err)
	var stack []v1.Layer
	for _, entries := range images.Stack(10) {
		layer, err := images.Layer(entries...)
		require.NoError(t, err)
		stack = append(stack, layer)
	}
	content, err := mutate.AppendLayers(base, stack...)
	require.NoError(t, err)
	img := pushImage(t, n, "old:1", content)
	const script = "cd %s; find tree layer-* -exec stat -c '%%n %%F %%a %%u:%%g' {} + | sort; cat tree/replaced layer-009"
	runs := func(args ...string) string {
		t.Helper()
		out, err := command(t, n, args[0], args[1:]...)
		require.NoError(t, err)
		return strings.TrimSpace(out)
	}
	var seen []string
	use := func() {
		t.Helper()
		require.Contains(t, runs("crictl", "images", "--quiet", "--no-trunc"), img.id)
		require.Contains(t, runs("crictl", "images", "--digests"), strings.TrimPrefix(img.digest, "sha256:")[:13])
		require.Contains(t, runs("crictl", "inspecti", img.ref), img.id)
		pod, err := n.RunPod(t.Context(), realnode.PodSpec{})
		require.NoError(t, err)
		c := run(t, pod, realnode.ContainerSpec{Image: img.ref})
		seen = append(seen, sh(t, c, fmt.Sprintf(script, "/")))
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.ErrorContains(t, err, "in use")
		require.NoError(t, pod.Remove(t.Context()))

		require.Contains(t, runs("podman", "images", "--no-trunc"), img.id)
		require.Equal(t, img.id+" "+img.digest, runs("podman", "image", "inspect", "--format", "{{.Id}} {{.Digest}}", img.ref))
		dir := runs("podman", "image", "mount", img.ref)
		seen = append(seen, runs("/bin/busybox", "sh", "-ec", fmt.Sprintf(script, dir))+"\n")
		runs("podman", "image", "unmount", img.ref)
		require.Contains(t, runs("buildah", "images", "--no-trunc"), img.id)

		pod, err = n.RunPod(t.Context(), realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol", PullPolicy: "IfNotPresent"})})
		require.NoError(t, err)
		seen = append(seen, sh(t, run(t, pod, realnode.ContainerSpec{}), fmt.Sprintf(script, "/vol")))
		require.Contains(t, runs("podman", "images", "--no-trunc"), img.id)
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
	}
	ocihold := []string{"ocihold", "--config", n.OciholdConf(), "pull", img.ref}
	for _, order := range []struct {
		pull    []string
		removal string
	}{
		{ocihold, "crictl"},
		{ocihold, "podman"},
		{ocihold, "buildah"},
		{[]string{"crictl", "pull", img.ref}, "podman"},
		{[]string{"podman", "pull", img.ref}, "crictl"},
	} {
		runs(order.pull...)
		use()
		runs(order.removal, "rmi", img.ref)
		require.NotContains(t, imageIDs(t, n), img.id)
		require.Equal(t, before, layers(t, n), "pulled by %s, removed by %s", order.pull[0], order.removal)
	}
	require.Len(t, slices.Compact(seen), 1, "all see the same, every time")
	n.AssertClean(t)
}

// awaitRegistered waits until CRI-O tells ocihold what happens.
func awaitRegistered(t testing.TB, n *realnode.Node) {
	t.Helper()
	await(t, func() error {
		_, err := ociholdCommand(t, n, "status")
		return err
	})
}

// removeOtherPods removes all pods but one, also those that CRI-O has told
// nobody of, without grace.
func removeOtherPods(t testing.TB, n *realnode.Node, kept *realnode.Pod) {
	t.Helper()
	rt := n.Runtime()
	containers, err := rt.ListContainers(t.Context(), &cri.ListContainersRequest{})
	require.NoError(t, err)
	for _, c := range containers.GetContainers() {
		if c.GetPodSandboxId() != kept.ID {
			_, err := rt.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: c.GetId()})
			require.NoError(t, err)
		}
	}
	pods, err := rt.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	require.NoError(t, err)
	for _, pod := range pods.GetItems() {
		if id := pod.GetId(); id != kept.ID {
			_, err := rt.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: id})
			require.NoError(t, err)
			_, err = rt.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: id})
			require.NoError(t, err)
		}
	}
}

// snapshot is all of a node that must not change.
type snapshot struct {
	Held       held
	Given      []string
	Images     []string
	Containers []string
	Mounts     map[string]string // what each container has
}

func snapshotOf(t testing.TB, n *realnode.Node, containers []*realnode.Container) snapshot {
	t.Helper()
	h, err := heldBy(n)
	require.NoError(t, err)
	s := snapshot{Held: h, Given: given(t, n), Images: imageIDs(t, n), Mounts: map[string]string{}}
	list, err := n.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{})
	require.NoError(t, err)
	for _, c := range list.GetContainers() {
		s.Containers = append(s.Containers, fmt.Sprint(c.GetId(), " ", c.GetMetadata().GetName(), " ", c.GetState()))
	}
	slices.Sort(s.Containers)
	for _, c := range containers {
		info, err := c.Info(t.Context())
		require.NoError(t, err)
		s.Mounts[c.ID] = mountsOf(t, info.PID)
	}
	return s
}

// requireSnapshot waits until the node is as it was.
func requireSnapshot(t testing.TB, n *realnode.Node, want snapshot, containers []*realnode.Container) {
	t.Helper()
	await(t, func() error {
		if got := given(t, n); len(got) != len(want.Given) {
			return fmt.Errorf("ocihold knows of %q, not %q", got, want.Given)
		}
		return nil
	})
	require.Equal(t, want, snapshotOf(t, n, containers))
}

// restartWith starts ocihold again with settings over those that it has.
func restartWith(t testing.TB, n *realnode.Node, settings string) {
	t.Helper()
	file := filepath.Join(n.OciholdConf()+".d", "60-over.toml")
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(settings), 0o644))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	awaitRegistered(t, n)
}

// killAfter kills ocihold in a moment, starts it again, and then says how that
// went.
func killAfter(t testing.TB, n *realnode.Node, delay time.Duration) <-chan error {
	t.Helper()
	killed := make(chan error, 1)
	go func() {
		time.Sleep(delay)
		err := n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL)
		killed <- errors.Join(err, n.Start(t.Context(), realnode.Ocihold))
	}()
	return killed
}
