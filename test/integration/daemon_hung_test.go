package integration

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// freezeDisk has every write to the disk wait until thaw is called, at the
// latest when the test ends.
func (d *disk) freezeDisk(t *testing.T) (thaw func()) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "fsfreeze", "-f", d.point).CombinedOutput()
	require.NoError(t, err, "%s", out)
	thaw = sync.OnceFunc(func() {
		out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "fsfreeze", "-u", d.point).CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
	t.Cleanup(thaw)
	return thaw
}

// A handler's root whose disk does not answer stops nothing but itself.
func TestHungRoot(t *testing.T) {
	d := newDisk(t, "ext4")
	n := realnode.Boot(t, realnode.Options{Dir: d.node, HandlerRoots: true})
	app := pushApp(t, n, "hung/app:1", appLayer("app", busybox(t)...))
	there, absent := pushFiles(t, n, "hung/there:1", 1, 3), pushFiles(t, n, "hung/absent:1", 1, 3)
	plain := pushFiles(t, n, "hung/plain:1", 1, 3)
	pullFor(t, n, "vm", app.ref)
	vm := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: there.ref, MountPath: "/vol"})})
	reader := run(t, vm, realnode.ContainerSpec{})

	thaw := d.freezeDisk(t)
	const hung = "its disk does not answer"
	list, err := n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	assert.NotEmpty(t, list.GetImages())

	t.Run("its own calls end", func(t *testing.T) {
		err := pullError(t, n, "vm", app.ref)
		require.ErrorContains(t, err, hung)
		require.ErrorContains(t, err, `"vm"`)
		assert.Equal(t, codes.Unavailable, status.Code(err))
		_, err = n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: app.ref, RuntimeHandler: "vm"}})
		require.ErrorContains(t, err, hung)
		// Kubelet would take an absent image for one that runs as root.
		_, err = n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: app.ref}})
		require.ErrorContains(t, err, hung)
		out, err := ociholdCommand(t, n, "images")
		require.NoError(t, err)
		assert.Contains(t, out, hung)
		out, err = ociholdCommand(t, n, "df")
		require.NoError(t, err)
		assert.Contains(t, out, hung)
		assert.Contains(t, logOf(t, n, realnode.Ocihold), `root of handler \"vm\" at `+n.HandlerRoot("vm")+": "+hung)
	})
	t.Run("other roots go on", func(t *testing.T) {
		pullFor(t, n, "wasm", wasmImage(t, n))
		resp, err := n.OciholdImages().ImageFsInfo(t.Context(), &cri.ImageFsInfoRequest{})
		require.NoError(t, err)
		assert.NotEmpty(t, resp.GetImageFilesystems())
		pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: plain.ref, MountPath: "/vol"})})
		plain.assertRead(t, run(t, pod, realnode.ContainerSpec{}), "/vol")
		leases, err := n.Leases()
		require.NoError(t, err)
		assert.Equal(t, []string{plain.id}, leases)
		require.NoError(t, pod.Remove(t.Context()))
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			leases, err := n.Leases()
			require.NoError(c, err)
			assert.Empty(c, leases)
		}, time.Minute, 50*time.Millisecond)
		require.NoError(t, removeFrom(t, n, "", plain.id))
	})
	t.Run("containers are answered", func(t *testing.T) {
		there.assertRead(t, reader, "/vol")
		there.assertRead(t, run(t, vm, realnode.ContainerSpec{Name: "second"}), "/vol")
		pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: absent.ref, MountPath: "/vol"})})
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			_, err := pod.Create(t.Context(), realnode.ContainerSpec{})
			assert.ErrorContains(c, err, hung)
			assert.ErrorContains(c, err, "will be tried again")
		}, time.Minute, 100*time.Millisecond)
		require.NoError(t, pod.Remove(t.Context()))
	})

	thaw()
	await(t, func() error {
		resp, err := n.OciholdImages().ListImages(t.Context(), &cri.ListImagesRequest{})
		if err != nil {
			return err
		}
		for _, image := range resp.GetImages() {
			if strings.Join(image.GetRepoTags(), " ") == app.ref {
				return nil
			}
		}
		return errors.New("the root has not come back")
	})
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: absent.ref, MountPath: "/vol"})})
	absent.assertRead(t, run(t, pod, realnode.ContainerSpec{}), "/vol")
	require.NoError(t, removeFrom(t, n, "vm", app.ref))
	require.NoError(t, vm.Remove(t.Context()))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
