package integration

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestArtifactPullsKilledAtAnyMoment kills ocihold at random moments of a pull
// of an artifact.
func TestArtifactPullsKilledAtAnyMoment(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	random := seeded(t)
	pushed := func(i int) artifact {
		a := artifact{ref: n.Ref(fmt.Sprintf("killed/artifact:%d", i)), files: map[string]string{}}
		var blobs []images.Blob
		for l := range 4 {
			content := strings.Repeat(fmt.Sprintf("%016x", random.Uint64()), 1<<17)
			name := fmt.Sprintf("dir/f%d", l)
			a.files[name] = content
			blobs = append(blobs, images.Blob{MediaType: "application/octet-stream", Title: name, Content: []byte(content)})
		}
		content, err := images.Artifact("application/vnd.test", blobs...)
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), fmt.Sprintf("killed/artifact:%d", i), content))
		return a
	}
	first := pushed(0)
	began := time.Now()
	require.NoError(t, removeFrom(t, n, "vm", pullFor(t, n, "vm", first.ref)))
	whole := time.Since(began)

	seen := 0
	for i := range count(8, 100) {
		a := pushed(i + 1)
		wait := time.Duration(random.Int64N(int64(whole)))
		t.Logf("pull %d is killed after %s", i, wait)
		_ = killPull(t, n, a.ref, func() { <-time.After(wait) })
		assertNoDownloads(t, n)
		answer, err := n.OciholdImages().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: a.ref, RuntimeHandler: "vm"}})
		require.NoError(t, err)
		if answer.GetImage() == nil {
			assertAbsent(t, n, a.ref)
		} else {
			seen++ // so it must be whole
		}
		pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: a.ref, MountPath: "/volume"})})
		assertFiles(t, run(t, pod, realnode.ContainerSpec{}), "volume", a.files)
		require.NoError(t, pod.Remove(t.Context()))
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			assert.NoError(c, removeFrom(t, n, "vm", a.ref))
		}, 30*time.Second, 50*time.Millisecond)
	}
	t.Logf("%d pulls had ended before", seen)
	for _, pattern := range []string{"overlay/tempdirs/temp-dir-*", "overlay-layers/tmp/temp-dir-*", "overlay/staging/*"} {
		left, err := filepath.Glob(filepath.Join(n.HandlerRoot("vm"), pattern))
		require.NoError(t, err)
		assert.Empty(t, left, "half a layer")
	}
	n.AssertClean(t)
}
