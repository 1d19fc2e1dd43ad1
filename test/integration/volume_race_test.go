package integration

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// Whichever comes first, a pod with an image volume or the removal of the image,
// by ocihold or by CRI-O: a container has its whole volume, and the image is
// held then; or it is refused with a reason, to be tried again.
func TestVolumeAgainstRemove(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	img := pushFiles(t, n, "raced/volume:1", 4, 10)
	random := seeded(t)
	removers := []cri.ImageServiceClient{n.OciholdImages(), n.Images()}
	refused, removed, without := 0, 0, 0
	took := 50 * time.Millisecond // the pod before
	for i := range count(100, 1000) {
		pullFor(t, n, "", img.ref)
		never := random.IntN(2) == 0
		asked := volume{Image: img.ref, MountPath: "/vol", PullPolicy: "IfNotPresent"}
		if never {
			asked.PullPolicy = "Never"
		}
		remover := removers[random.IntN(len(removers))]
		behind := time.Duration(random.Int64N(int64(2 * took))) // about when the pod is there
		outcome := make(chan error, 1)
		go func() {
			time.Sleep(behind)
			_, err := remover.RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: img.ref}})
			outcome <- err
		}()
		began := time.Now()
		pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: volumes(t, asked)})
		require.NoError(t, err)
		took = time.Since(began)
		c, created := pod.Create(t.Context(), realnode.ContainerSpec{})
		err = <-outcome
		if created != nil {
			require.ErrorContains(t, created, "image volume /vol: ", "%d", i)
			if !never {
				c = create(t, pod, realnode.ContainerSpec{Attempt: 1})
				created = nil
			}
		}
		switch {
		case err != nil:
			require.ErrorContains(t, err, "in use", "%d", i)
			refused++
		default:
			removed++
		}
		if created == nil {
			require.NoError(t, c.Start(t.Context()))
			img.assertRead(t, c, "/vol")
			require.NoError(t, checkHeld(n, img.id), "%d: removed: %v", i, err)
		} else {
			without++
		}
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
	}
	t.Log(refused, "removals were refused,", removed, "done;", without, "containers never had the image")
	require.NotZero(t, refused)
	require.NotZero(t, removed)
	require.NotZero(t, without)
	n.AssertClean(t)
}
