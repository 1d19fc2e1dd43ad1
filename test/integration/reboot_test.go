package integration

import (
	"testing"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// TestReboot cuts the power while pods run with volumes of both kinds, and from
// a handler's root. What was held for them is let go, no image is lost, and the
// next pods get the same.
func TestReboot(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	img := pushFiles(t, n, "reboot/volume:1", 6, 60)
	_, err := n.Pull(t.Context(), img.ref)
	require.NoError(t, err)
	ofVM := sizedApp(t, n, "reboot/vm:1", 4<<20)
	native := []*cri.Mount{{ContainerPath: "/native", Readonly: true, Image: &cri.ImageSpec{Image: img.ref, UserSpecifiedImage: img.ref}}}
	for range 2 {
		// Without a clean-up by the test: the second time nobody knows them.
		pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
		require.NoError(t, err)
		c := run(t, pod, realnode.ContainerSpec{Mounts: native})
		img.assertRead(t, c, "/vol")
		img.assertRead(t, c, "/native")
		vm, err := n.RunPod(t.Context(), realnode.PodSpec{
			Handler: "vm", Annotations: volumes(t, volume{Image: ofVM.ref, MountPath: "/vol"}),
		})
		require.NoError(t, err)
		ofVM.requireRead(t, run(t, vm, realnode.ContainerSpec{Image: pullFor(t, n, "vm", ofVM.ref), UserImage: ofVM.ref}))
		assertHeld(t, n, img.id)
		before := imagesOf(t, n)

		require.NoError(t, n.Reboot(t.Context()))
		requireNothingHeld(t, n)
		require.Equal(t, before, imagesOf(t, n))
		requireAllMount(t, n, ofVM)
	}
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
	img.assertRead(t, run(t, pod, realnode.ContainerSpec{}), "/vol")
	require.NoError(t, pod.Remove(t.Context()))
	requireNothingHeld(t, n)
	require.NoError(t, removeFrom(t, n, "", img.ref))
	require.NoError(t, removeFrom(t, n, "", ofVM.ref))
	require.Empty(t, layersOf(t, n.HandlerRoot("vm")))
	n.AssertClean(t)
}
