package integration

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// No program removes an image that is mounted as a volume, and the volume stays
// whole.
func TestRemovalOfAMountedImage(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	img := pushFiles(t, n, "big:1", 6, 60)
	unused := pushFiles(t, n, "unused:1", 2, 2)
	pod, c := mountedIn(t, n, img)
	one := "cat /vol/layer-3/file-7 | sha256sum | cut -d' ' -f1"
	require.Equal(t, img.sums["layer-3/file-7"]+"\n", sh(t, c, one), "the only file that is opened before")
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	before := mountsOf(t, info.PID)

	names := strings.NewReplacer("REF", img.ref, "ID", img.id, "SHORT", img.id[:12], "DIR", t.TempDir())
	for _, removal := range []struct {
		command string
		refused bool // and not just left alone
		unused  bool // removes images that nobody uses
	}{
		{command: "crictl rmi REF", refused: true},
		{command: "crictl rmi ID", refused: true},
		{command: "crictl rmi SHORT", refused: true},
		{command: "crictl rmi --prune", unused: true},
		{command: "crictl rmi --all", refused: true, unused: true},
		{command: "podman rmi REF", refused: true},
		{command: "podman rmi ID", refused: true},
		{command: "podman rmi --all", refused: true, unused: true},
		{command: "podman image prune --all --force", unused: true},
		{command: "podman --network-config-dir DIR system prune --all --force", unused: true},
		{command: "podman container prune --force"},
		{command: "buildah rmi REF", refused: true},
		{command: "buildah rmi ID", refused: true},
		{command: "buildah rmi --all", refused: true, unused: true},
		{command: "buildah rmi --prune"},
		{command: "skopeo delete containers-storage:REF", refused: true},
	} {
		t.Run(removal.command, func(t *testing.T) {
			_, err := n.Pull(t.Context(), unused.ref)
			require.NoError(t, err)
			args := strings.Fields(names.Replace(removal.command))
			out, err := command(t, n, args[0], args[1:]...)
			t.Log(out)
			if removal.refused {
				require.ErrorContains(t, err, "in use")
			} else {
				require.NoError(t, err)
			}
			require.NoError(t, checkHeld(n, img.id))
			status, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: img.ref}})
			require.NoError(t, err)
			require.Equal(t, img.id, status.GetImage().GetId())
			require.Equal(t, []string{img.ref}, status.GetImage().GetRepoTags())
			require.Equal(t, []string{"main"}, containersOf(t, n, pod))
			if removal.unused {
				require.NotContains(t, imageIDs(t, n), unused.id)
			} else {
				require.Contains(t, imageIDs(t, n), unused.id)
			}
		})
	}
	// podman does not see CRI-O's own containers, and takes their images.
	_, err = n.Pull(t.Context(), n.BaseImage())
	require.NoError(t, err)
	settle(t, n, img.id)
	require.Equal(t, before, mountsOf(t, info.PID))
	img.assertRead(t, c, "/vol")

	require.NoError(t, pod.Remove(t.Context()))
	requireNothingHeld(t, n)
	_, err = command(t, n, "podman", "rmi", img.ref)
	require.NoError(t, err, "nobody uses it any more")
	n.AssertClean(t)
}

// A removal that is refused names who has the image as a volume: containers, in
// CRI-O's root or a handler's, by annotation or natively, and a pod that may be
// about to.
func TestRefusedRemovalNamesVolumes(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	img := pushFiles(t, n, "named:1", 1, 2)
	name := func(pod *realnode.Pod) string {
		return pod.Config.GetMetadata().GetNamespace() + "/" + pod.Config.GetMetadata().GetName()
	}
	refused := func(by string) {
		t.Helper()
		for _, what := range []string{img.ref, img.id} {
			require.ErrorContains(t, removeFrom(t, n, "", what), by)
			_, err := ociholdCommand(t, n, "rmi", what)
			require.ErrorContains(t, err, by)
		}
	}
	ready := 0
	for _, handler := range []string{"runc", "vm"} {
		pod := runPod(t, n, realnode.PodSpec{Handler: handler, Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
		asks := "pod " + name(pod) + ", which asks for it as a volume"
		ready++
		await(t, func() error {
			if strings.Count(logOf(t, n, realnode.Ocihold), "image volume is ready") < ready {
				return errors.New("the volume is not ready")
			}
			return nil
		})
		refused(asks)
		run(t, pod, realnode.ContainerSpec{})
		refused("volume /vol (" + name(pod) + "/main)")
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
		require.NoError(t, removeFrom(t, n, "", img.ref), "nobody uses it any more")
	}
	pullFor(t, n, "", img.ref)
	pod, c := runNative(t, n, native(img.ref, "/vol", ""))
	refused("container " + c.ID + " (" + name(pod) + "/main)")
	require.NoError(t, pod.Remove(t.Context()))
	requireNothingHeld(t, n)
	require.NoError(t, removeFrom(t, n, "", img.ref), "nobody uses it any more")
	n.AssertClean(t)
}

// An image removed by force, and a lease removed by hand, cost no container its
// volume; the image is held again as soon as it is there.
func TestForcedRemovalOfAMountedImage(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	before := layers(t, n)
	img := pushFiles(t, n, "forced:1", 6, 60)
	force := func() {
		_, err := command(t, n, "podman", "rmi", "--force", img.ref)
		require.NoError(t, err)
	}
	// end ends the pods, after which the image can go, and with it all that was
	// kept for them.
	end := func(t *testing.T, pods ...*realnode.Pod) {
		t.Helper()
		for _, pod := range pods {
			require.NoError(t, pod.Remove(t.Context()))
		}
		requireNothingHeld(t, n)
		_, err := command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
		require.Equal(t, before, layers(t, n))
	}
	requireRefused := func() {
		_, err := command(t, n, "crictl", "rmi", img.ref)
		require.ErrorContains(t, err, "in use")
		require.NoError(t, checkHeld(n, img.id))
	}

	t.Run("made again without a registry", func(t *testing.T) {
		pod, c := mountedIn(t, n, img)
		require.NoError(t, n.Kill(t.Context(), realnode.Registry, syscall.SIGKILL))
		force()
		wakeSettling(t, n)
		await(t, func() error { return checkHeld(n, img.id) })
		require.Contains(t, logOf(t, n, realnode.Ocihold), "image in use was removed by force; its record is made again")
		status, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: img.ref}})
		require.NoError(t, err)
		require.Equal(t, img.id, status.GetImage().GetId(), "by CRI-O, under its name")
		requireRefused()
		img.assertRead(t, c, "/vol")
		require.NoError(t, n.Start(t.Context(), realnode.Registry))
		end(t, pod)
	})

	t.Run("held again by the next pod", func(t *testing.T) {
		pod, c := mountedIn(t, n, img)
		force()
		next, other := mountedIn(t, n, img)
		requireRefused()
		img.assertRead(t, c, "/vol")
		img.assertRead(t, other, "/vol")
		end(t, pod, next)
	})

	t.Run("let go at once", func(t *testing.T) {
		pod, c := mountedIn(t, n, img)
		force()
		img.assertRead(t, c, "/vol")
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
		// It may have been made again before the pod ended.
		_, err := n.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: img.id}})
		require.NoError(t, err)
		await(t, func() error {
			if len(layers(t, n)) > len(before) {
				return errors.New("layers are left")
			}
			return nil
		})
		require.Equal(t, before, layers(t, n))
	})

	t.Run("the lease alone", func(t *testing.T) {
		pod, c := mountedIn(t, n, img)
		_, err := command(t, n, "podman", "rm", "--force", "ocihold-lease-"+img.id)
		require.NoError(t, err)
		wakeSettling(t, n)
		await(t, func() error { return checkHeld(n, img.id) })
		require.Contains(t, logOf(t, n, realnode.Ocihold), "lease of an image in use was gone; it is taken again")
		requireRefused()
		img.assertRead(t, c, "/vol")
		end(t, pod)
	})
	n.AssertClean(t)
}

// CRI-O's own repair, after it was killed, removes layers that no image or
// container has and that are older than a day: that of a lease among them. It is
// made again, and the volume stays whole.
func TestRepairByCRIO(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	img := pushFiles(t, n, "repaired:1", 3, 20)
	pod, c := mountedIn(t, n, img)
	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGKILL))
	ageLayers(t, n, 48*time.Hour)
	repair := filepath.Join(n.Dir(), "etc", "crio", "crio.conf.d", "99-repair.conf")
	require.NoError(t, os.WriteFile(repair, []byte("[crio]\ninternal_repair = true\n"), 0o644))
	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	require.Contains(t, logOf(t, n, realnode.CRIO), "Attempting to repair storage directory")

	await(t, func() error {
		if !strings.Contains(logOf(t, n, realnode.Ocihold), "lease of an image in use was gone; it is taken again") {
			return errors.New("nothing was mended")
		}
		return checkHeld(n, img.id)
	})
	img.assertRead(t, c, "/vol")
	require.NoError(t, pod.Remove(t.Context()))
	requireNothingHeld(t, n)
	n.AssertClean(t)
}

// ageLayers has the layers of CRI-O's root be so old, while CRI-O does not run and
// ocihold has nothing to do.
func ageLayers(t testing.TB, n *realnode.Node, age time.Duration) {
	t.Helper()
	file := filepath.Join(n.CRIORoot(), "overlay-layers", "layers.json")
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	var records []map[string]any
	require.NoError(t, json.Unmarshal(content, &records))
	for _, r := range records {
		r["created"] = time.Now().Add(-age)
	}
	content, err = json.Marshal(records)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file+".aged", content, 0o600))
	require.NoError(t, os.Rename(file+".aged", file))
}

// mountedIn runs a pod with a container that has the image at /vol.
func mountedIn(t testing.TB, n *realnode.Node, img pushed) (*realnode.Pod, *realnode.Container) {
	t.Helper()
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
	c := run(t, pod, realnode.ContainerSpec{})
	require.NoError(t, checkHeld(n, img.id))
	return pod, c
}

// mountsOf is what a process has mounted.
func mountsOf(t testing.TB, pid int) string {
	t.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/mountinfo")
	require.NoError(t, err)
	return string(text)
}

// containersOf are the names of a pod's running containers.
func containersOf(t testing.TB, n *realnode.Node, pod *realnode.Pod) []string {
	t.Helper()
	list, err := n.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
		PodSandboxId: pod.ID, State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING},
	}})
	require.NoError(t, err)
	var names []string
	for _, c := range list.GetContainers() {
		names = append(names, c.GetMetadata().GetName())
	}
	return names
}

func logOf(t testing.TB, n *realnode.Node, name string) string {
	t.Helper()
	text, err := os.ReadFile(n.LogFile(name))
	require.NoError(t, err)
	return string(text)
}

// wakeSettling makes ocihold compare what it holds with what is needed.
func wakeSettling(t testing.TB, n *realnode.Node) {
	t.Helper()
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{})
	require.NoError(t, err)
	require.NoError(t, pod.Remove(t.Context()))
}
