package integration

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// inSharedMounts reports whether the test may go on. It goes on in a process
// with a mount namespace where every mount is shared, as systemd makes them on
// a node's host; the first call runs the test there.
func inSharedMounts(t *testing.T) bool {
	t.Helper()
	const mark = "OCIHOLD_TEST_SHARED_MOUNTS"
	if os.Getenv(mark) != "" {
		return true
	}
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "shared",
		program, "-test.run", "^"+t.Name()+"$", "-test.v", "-test.count", "1", "-test.timeout", "5m")
	cmd.Env = append(os.Environ(), mark+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || testing.Verbose() {
		t.Logf("%s", out)
	}
	require.NoError(t, err)
	return false
}

// isHeld reports whether ocihold has a lease on an image, and whether it has it
// mounted on the host.
func isHeld(t *testing.T, n *realnode.Node, id string) (leased, mounted bool) {
	t.Helper()
	leases, err := n.Leases()
	require.NoError(t, err)
	for _, lease := range leases {
		leased = leased || lease == id
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	require.NoError(t, err)
	return leased, strings.Contains(string(mounts), " "+mountOf(n, id)+" ")
}

func mountOf(n *realnode.Node, id string) string { return filepath.Join(n.RunDir(), "mounts", id) }

func assertHeld(t *testing.T, n *realnode.Node, id string) {
	t.Helper()
	leased, mounted := isHeld(t, n, id)
	assert.True(t, leased, "leased")
	assert.True(t, mounted, "mounted")
}

// requireLetGo waits until nothing holds the image any more, and removes it.
func requireLetGo(t *testing.T, n *realnode.Node, id string) {
	t.Helper()
	require.Eventually(t, func() bool {
		leased, mounted := isHeld(t, n, id)
		return !leased && !mounted
	}, 15*time.Second, 50*time.Millisecond, "image is still leased or mounted")
	_, err := command(t, n, "crictl", "rmi", id)
	require.NoError(t, err)
}

// imageID is the id of a volume's image.
func imageID(t *testing.T, c *realnode.Container) string {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	var given []struct{ ImageID string }
	require.NoError(t, json.Unmarshal([]byte(info.RuntimeSpec.Annotations["ocihold.dev/volumes"]), &given))
	require.Len(t, given, 1)
	return given[0].ImageID
}

// TestPodsWithHostDirectories binds what holds the host mounts into other pods,
// in every way a pod can, before and after the volume is there: it keeps no
// image busy.
func TestPodsWithHostDirectories(t *testing.T) {
	if !inSharedMounts(t) {
		return
	}
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "isolation/volume:1", version("one"))
	mounts := filepath.Join(n.RunDir(), "mounts")
	for _, dir := range []string{"/", filepath.Dir(n.RunDir()), n.RunDir(), mounts} {
		for _, propagation := range []cri.MountPropagation{
			cri.MountPropagation_PROPAGATION_PRIVATE, cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, cri.MountPropagation_PROPAGATION_BIDIRECTIONAL,
		} {
			relative := strings.TrimPrefix(dir, n.Dir())
			t.Run(relative+" "+strings.TrimPrefix(propagation.String(), "PROPAGATION_"), func(t *testing.T) {
				var others []*realnode.Container
				bind := func() {
					c, err := runPod(t, n, realnode.PodSpec{}).Run(t.Context(), realnode.ContainerSpec{
						Mounts: []*cri.Mount{{HostPath: dir, ContainerPath: "/host", Propagation: propagation}},
					})
					if err != nil && dir == mounts {
						return // unbindable: refused by CRI-O, or by the kernel
					}
					require.NoError(t, err)
					others = append(others, c)
				}
				bind()
				pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
				c := run(t, pod, realnode.ContainerSpec{})
				require.Equal(t, "one", sh(t, c, "cat /volume/version"))
				id := imageID(t, c)
				bind()
				assertHeld(t, n, id)

				require.NoError(t, pod.Remove(t.Context()))
				requireLetGo(t, n, id)
				for _, other := range others {
					sh(t, other, "ls /host >/dev/null") // still runs, with its mount
				}
			})
		}
	}
	n.AssertClean(t)
}

// TestHostDirectoriesOverRestarts begins with a pod that has the host's / with
// what comes to be mounted there, and starts ocihold anew under it: so the pod
// gets the very directory of the mounts when that is made.
func TestHostDirectoriesOverRestarts(t *testing.T) {
	if !inSharedMounts(t) {
		return
	}
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "isolation/volume:1", version("one"))
	var others []*realnode.Pod
	for _, propagation := range []cri.MountPropagation{
		cri.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, cri.MountPropagation_PROPAGATION_BIDIRECTIONAL,
	} {
		other := runPod(t, n, realnode.PodSpec{})
		run(t, other, realnode.ContainerSpec{
			Mounts: []*cri.Mount{{HostPath: "/", ContainerPath: "/host", Propagation: propagation}},
		})
		others = append(others, other)
	}
	restart := func(signal syscall.Signal) {
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, signal))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	}
	restart(syscall.SIGTERM) // with no volume: the directory goes and comes
	for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
		c := run(t, pod, realnode.ContainerSpec{})
		id := imageID(t, c)
		restart(signal)
		assertHeld(t, n, id)
		require.Equal(t, "one", sh(t, c, "cat /volume/version"))

		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, signal))
		require.NoError(t, pod.Remove(t.Context()))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		requireLetGo(t, n, id)
	}
	for _, other := range others {
		require.NoError(t, other.Remove(t.Context()))
	}
	n.AssertClean(t)
}

// TestPodThatBindsAMount shows the limit of that: who binds the mount of one
// image by its path has it, and holds the image, until that pod is gone.
func TestPodThatBindsAMount(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "isolation/volume:1", version("one"))
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
	id := imageID(t, run(t, pod, realnode.ContainerSpec{}))
	other := runPod(t, n, realnode.PodSpec{})
	c := run(t, other, realnode.ContainerSpec{Mounts: []*cri.Mount{{HostPath: mountOf(n, id), ContainerPath: "/host"}}})

	require.NoError(t, pod.Remove(t.Context()))
	// That the pod is gone is known at the latest when another image is let go.
	second := push(t, n, "isolation/volume:2", version("two"))
	next := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: second, MountPath: "/volume"})})
	secondID := imageID(t, run(t, next, realnode.ContainerSpec{}))
	require.NoError(t, next.Remove(t.Context()))
	requireLetGo(t, n, secondID)

	assertHeld(t, n, id)
	_, err := command(t, n, "crictl", "rmi", id)
	require.Error(t, err)
	assert.Equal(t, "one", sh(t, c, "cat /host/version"))
	out, err := c.Exec(t.Context(), "/bin/sh", "-c", "echo two >/host/version")
	require.NoError(t, err)
	assert.Contains(t, out.Stderr, "Read-only file system")

	require.NoError(t, other.Remove(t.Context()))
	requireLetGo(t, n, id)
	n.AssertClean(t)
}

// TestForgedReports lets pods write the annotation in which ocihold reports
// what it gave.
func TestForgedReports(t *testing.T) {
	const report = "ocihold.dev/volumes"
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "isolation/victim:1", version("one"))
	_, err := n.Pull(t.Context(), ref)
	require.NoError(t, err)
	image, err := images.Image(images.Config{}, version("one"))
	require.NoError(t, err)
	config, err := image.ConfigName()
	require.NoError(t, err)
	victim := config.Hex
	forged, err := json.Marshal([]map[string]string{{
		"mountPath": "/volume", "image": ref, "imageID": victim, "digest": "sha256:" + strings.Repeat("0", 64),
	}})
	require.NoError(t, err)
	lie := map[string]string{report: string(forged), "example.com/other": "stays"}

	annotations := func(t *testing.T, c *realnode.Container) map[string]string {
		t.Helper()
		info, err := c.Info(t.Context())
		require.NoError(t, err)
		return info.RuntimeSpec.Annotations
	}
	assertGainsNothing := func(t *testing.T) {
		t.Helper()
		leased, mounted := isHeld(t, n, victim)
		assert.False(t, leased, "leased")
		assert.False(t, mounted, "mounted")
		out, err := ociholdCommand(t, n, "volumes", "-o", "json")
		require.NoError(t, err)
		assert.JSONEq(t, "[]", out)
	}
	for name, at := range map[string]struct{ pod, container map[string]string }{
		"pod":       {pod: lie},
		"container": {container: lie},
		"both":      {pod: lie, container: lie},
	} {
		t.Run(name, func(t *testing.T) {
			pod := runPod(t, n, realnode.PodSpec{Annotations: at.pod})
			c := run(t, pod, realnode.ContainerSpec{Annotations: at.container})
			got := annotations(t, c)
			assert.Equal(t, "stays", got["example.com/other"], "annotations come through")
			assert.NotContains(t, got, report)
			out, err := c.Exec(t.Context(), "/bin/ls", "/volume")
			require.NoError(t, err)
			assert.NotZero(t, out.ExitCode)
			assertGainsNothing(t)
			// Nor by what is taken over at a start.
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
			require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
			assertGainsNothing(t)
			// Nor by a container that nobody asked about: ocihold was away.
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
			c = run(t, pod, realnode.ContainerSpec{Name: "unseen", Annotations: at.container})
			require.Contains(t, annotations(t, c), report, "the forgery is on it")
			require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
			assertGainsNothing(t)
		})
		_, err := command(t, n, "crictl", "inspecti", victim)
		require.NoError(t, err, "the image is there, for the next to try")
	}

	t.Run("beside a volume", func(t *testing.T) {
		genuine := push(t, n, "isolation/real:1", version("real"))
		asked := volumes(t, volume{Image: genuine, MountPath: "/volume"})
		asked[report] = string(forged)
		pod := runPod(t, n, realnode.PodSpec{Annotations: asked})
		c := run(t, pod, realnode.ContainerSpec{Annotations: lie})
		assert.Equal(t, "real", sh(t, c, "cat /volume/version"))
		var got []map[string]string
		require.NoError(t, json.Unmarshal([]byte(annotations(t, c)[report]), &got))
		require.Len(t, got, 1)
		assert.Equal(t, genuine, got[0]["image"])
		assert.NotEqual(t, victim, got[0]["imageID"])
		assertHeld(t, n, got[0]["imageID"])
		leases, err := n.Leases()
		require.NoError(t, err)
		assert.Equal(t, []string{got[0]["imageID"]}, leases)
	})

	t.Run("request of a container", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{})
		_, err := pod.Create(t.Context(), realnode.ContainerSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
		require.ErrorContains(t, err, "annotate the pod")
		leases, err := n.Leases()
		require.NoError(t, err)
		assert.NotContains(t, leases, victim)

		// The same where the pod asks for another image.
		genuine := push(t, n, "isolation/real:1", version("real"))
		pod = runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: genuine, MountPath: "/volume"})})
		run(t, pod, realnode.ContainerSpec{})
		_, err = pod.Create(t.Context(), realnode.ContainerSpec{
			Name: "forged", Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"}),
		})
		require.ErrorContains(t, err, "annotate the pod")
		leased, mounted := isHeld(t, n, victim)
		assert.False(t, leased, "leased")
		assert.False(t, mounted, "mounted")
	})
	n.AssertClean(t)
}
