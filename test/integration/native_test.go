package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// native asks for an image volume by Kubernetes' own field: CRI-O mounts it.
func native(ref, path, subPath string) *cri.Mount {
	return &cri.Mount{
		ContainerPath: path, Readonly: true, ImageSubPath: subPath,
		Image: &cri.ImageSpec{Image: ref, UserSpecifiedImage: ref},
	}
}

// runNative runs a pod with a container that has such volumes.
func runNative(t testing.TB, n *realnode.Node, mounts ...*cri.Mount) (*realnode.Pod, *realnode.Container) {
	t.Helper()
	pod := runPod(t, n, realnode.PodSpec{})
	return pod, run(t, pod, realnode.ContainerSpec{Mounts: mounts})
}

// checkLeased returns an error unless exactly the images of ids are held, and
// none of them is mounted by ocihold.
func checkLeased(n *realnode.Node, ids ...string) error {
	want := append([]string{}, ids...)
	slices.Sort(want)
	h, err := heldBy(n)
	if err != nil {
		return err
	}
	for what, got := range map[string][]string{"leases": h.Leases, "child layers": h.Children} {
		if !slices.Equal(got, want) {
			return fmt.Errorf("%s of %q, not %q", what, got, want)
		}
	}
	if len(h.Points) > 0 {
		return fmt.Errorf("mounts of %q", h.Points)
	}
	return nil
}

// settleNative waits until ocihold has compared what it holds with what is
// needed at least once from now on, and then exactly the images of ids must be
// held for native volumes.
func settleNative(t testing.TB, n *realnode.Node, ids ...string) {
	t.Helper()
	passing := push(t, n, "passing:1", []images.Entry{images.File("passing", "passing\n", 0o644)})
	pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: volumes(t, volume{Image: passing, MountPath: "/vol"})})
	require.NoError(t, err)
	create(t, pod, realnode.ContainerSpec{})
	require.Error(t, checkLeased(n, ids...), "the passing image is held, too")
	require.NoError(t, pod.Remove(t.Context()))
	await(t, func() error { return checkLeased(n, ids...) })
	_, err = command(t, n, "crictl", "rmi", passing)
	require.NoError(t, err)
}

// The images of Kubernetes' own image volumes are held as those of volumes by
// annotation are, without a mount.
func TestNativeVolumes(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	before := layers(t, n)
	img := pushFiles(t, n, "native:1", 3, 10)
	pull := func(t *testing.T) {
		t.Helper()
		_, err := n.Pull(t.Context(), img.ref)
		require.NoError(t, err)
	}
	held := func(t *testing.T) {
		t.Helper()
		await(t, func() error { return checkLeased(n, img.id) })
	}
	released := func(t *testing.T) {
		t.Helper()
		await(t, func() error { return checkLeased(n) })
		require.Empty(t, natives(t, n))
		_, err := command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
		require.Equal(t, before, layers(t, n))
	}
	kill := func(t *testing.T, names ...string) {
		t.Helper()
		for _, name := range names {
			require.NoError(t, n.Kill(t.Context(), name, syscall.SIGKILL))
		}
	}
	start := func(t *testing.T, names ...string) {
		t.Helper()
		for _, name := range names {
			require.NoError(t, n.Start(t.Context(), name))
		}
		awaitRegistered(t, n)
	}

	t.Run("removals", func(t *testing.T) {
		pull(t)
		pod, c := runNative(t, n, native(img.ref, "/vol", ""))
		held(t)
		require.Equal(t, []string{"main /vol " + img.id}, natives(t, n))
		list, err := n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{Filter: &cri.ImageFilter{Image: &cri.ImageSpec{Image: img.ref}}})
		require.NoError(t, err)
		require.Len(t, list.GetImages(), 1)
		require.True(t, list.GetImages()[0].GetPinned())
		for _, removal := range []string{
			"crictl rmi " + img.ref, "podman rmi " + img.ref, "podman rmi " + img.id, "buildah rmi " + img.ref,
		} {
			args := strings.Fields(removal)
			_, err := command(t, n, args[0], args[1:]...)
			require.ErrorContains(t, err, "in use")
			require.NoError(t, checkLeased(n, img.id))
		}
		_, err = n.Images().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: img.id}})
		require.Error(t, err)
		_, err = command(t, n, "crictl", "rmi", "--prune")
		require.NoError(t, err)
		require.NoError(t, checkLeased(n, img.id))
		img.assertRead(t, c, "/vol")

		_, err = command(t, n, "podman", "rmi", "--force", img.ref)
		require.NoError(t, err)
		wakeSettling(t, n)
		held(t)
		require.Contains(t, logOf(t, n, realnode.Ocihold), "image in use was removed by force; its record is made again")
		status, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: img.ref}})
		require.NoError(t, err)
		require.Equal(t, img.id, status.GetImage().GetId(), "by CRI-O, under its name")
		img.assertRead(t, c, "/vol")
		require.NoError(t, pod.Remove(t.Context()))
		released(t)
	})

	t.Run("containers that fail", func(t *testing.T) {
		pull(t)
		pod := runPod(t, n, realnode.PodSpec{})
		c, err := pod.Create(t.Context(), realnode.ContainerSpec{Command: []string{"/none"}, Mounts: []*cri.Mount{native(img.ref, "/vol", "")}})
		if err == nil {
			err = c.Start(t.Context())
		}
		require.Error(t, err)
		require.NoError(t, pod.Remove(t.Context()))
		released(t)
	})

	t.Run("a container that exits", func(t *testing.T) {
		pull(t)
		pod, c := runNative(t, n, native(img.ref, "/vol", ""))
		held(t)
		require.NoError(t, c.Stop(t.Context()))
		await(t, func() error { return checkLeased(n) })
		require.NoError(t, pod.Remove(t.Context()))
		released(t)
	})

	t.Run("created and not started", func(t *testing.T) {
		pull(t)
		pod := runPod(t, n, realnode.PodSpec{})
		c := create(t, pod, realnode.ContainerSpec{Mounts: []*cri.Mount{native(img.ref, "/vol", "")}})
		held(t)
		kill(t, realnode.Ocihold)
		start(t, realnode.Ocihold)
		settleNative(t, n, img.id)
		require.NoError(t, c.Start(t.Context()))
		img.assertRead(t, c, "/vol")
		require.NoError(t, pod.Remove(t.Context()))
		released(t)
	})

	for _, subPath := range []string{"", "layer-1"} {
		for name, away := range map[string][]string{
			"ocihold is killed": {realnode.Ocihold},
			"CRI-O is killed":   {realnode.CRIO},
			"both are killed":   {realnode.CRIO, realnode.Ocihold},
		} {
			t.Run(strings.TrimSpace(name+" "+subPath), func(t *testing.T) {
				pull(t)
				pod, c := runNative(t, n, native(img.ref, "/vol", subPath))
				held(t)
				read := func() {
					t.Helper()
					if subPath == "" {
						img.assertRead(t, c, "/vol")
						return
					}
					require.Contains(t, sh(t, c, "sha256sum /vol/file-7"), img.sums[subPath+"/file-7"])
				}
				kill(t, away...)
				require.NoError(t, checkLeased(n, img.id))
				start(t, away...)
				settleNative(t, n, img.id)
				await(t, func() error {
					if got := natives(t, n); !slices.Equal(got, []string{"main /vol " + img.id}) {
						return fmt.Errorf("ocihold knows of %q", got)
					}
					return nil
				})
				read()
				if slices.Contains(away, realnode.Ocihold) { // and nobody is told of the end
					kill(t, realnode.Ocihold)
					require.NoError(t, pod.Remove(t.Context()))
					require.NoError(t, checkLeased(n, img.id))
					start(t, realnode.Ocihold)
				} else {
					require.NoError(t, pod.Remove(t.Context()))
				}
				released(t)
			})
		}
	}

	t.Run("artifact", func(t *testing.T) {
		artifact, err := images.Artifact("application/vnd.test.model", images.Blob{MediaType: "text/plain", Title: "model", Content: []byte("weights\n")})
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), "artifact:1", artifact))
		_, err = n.Pull(t.Context(), n.Ref("artifact:1"))
		require.NoError(t, err)
		pod, c := runNative(t, n, native(n.Ref("artifact:1"), "/vol", ""))
		require.Equal(t, "weights\n", sh(t, c, "cat /vol/model"))
		told := len(logOf(t, n, realnode.Ocihold))
		settleNative(t, n)
		require.NotContains(t, logOf(t, n, realnode.Ocihold)[told:], "leases and mounts are not all as needed")
		require.NoError(t, pod.Remove(t.Context()))
	})

	t.Run("forgotten by CRI-O", func(t *testing.T) {
		pull(t)
		pod, c := runNative(t, n, native(img.ref, "/vol", ""))
		held(t)
		info, err := c.Info(t.Context())
		require.NoError(t, err)
		require.Positive(t, info.PID)
		kill(t, realnode.CRIO, realnode.Ocihold)
		disown(t, n, c)
		_, err = command(t, n, "podman", "rm", "--force", "ocihold-lease-"+img.id)
		require.NoError(t, err)
		start(t, realnode.CRIO, realnode.Ocihold)
		list, err := n.Runtime().ListContainers(t.Context(), &cri.ListContainersRequest{})
		require.NoError(t, err)
		require.Empty(t, list.GetContainers())
		require.NoError(t, syscall.Kill(info.PID, 0), "its process runs")
		settleNative(t, n, img.id)
		require.NoError(t, pod.Remove(t.Context()))
		settleNative(t, n, img.id)
		require.NoError(t, syscall.Kill(info.PID, syscall.SIGKILL))
		await(t, func() error {
			if syscall.Kill(info.PID, 0) == nil {
				return errors.New("the process has not ended")
			}
			return nil
		})
		wakeSettling(t, n)
		await(t, func() error { return checkLeased(n) })
		_, err = command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
	})
	n.AssertClean(t)
}

// disown takes from the container's record that it is CRI-O's. CRI-O is to be
// down.
func disown(t testing.TB, n *realnode.Node, c *realnode.Container) {
	t.Helper()
	changed := 0
	for _, name := range []string{"containers.json", "volatile-containers.json"} {
		file := filepath.Join(n.CRIORoot(), "overlay-containers", name)
		content, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		require.NoError(t, err)
		var records []map[string]any
		require.NoError(t, json.Unmarshal(content, &records))
		for _, r := range records {
			if r["id"] == c.ID {
				r["metadata"] = "{}"
				changed++
			}
		}
		content, err = json.Marshal(records)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, content, 0o600))
	}
	require.Equal(t, 1, changed)
}

// natives are the volumes by Kubernetes' own field that containers have, as
// ocihold says: container, path and image id.
func natives(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	out, err := ociholdCommand(t, n, "volumes", "-o", "json")
	require.NoError(t, err)
	var list []struct {
		Container, MountPath, ImageID string
		Native                        bool
	}
	require.NoError(t, json.Unmarshal([]byte(out), &list))
	var all []string
	for _, v := range list {
		if v.Native {
			all = append(all, strings.Join([]string{v.Container, v.MountPath, v.ImageID}, " "))
		}
	}
	return all
}
