package integration

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// TestMediaTypesOfArtifacts has some of an artifact's blobs as a volume, by
// their media types in the artifact's own manifest.
func TestMediaTypesOfArtifacts(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	model := artifacts(t, n)["ModelPack model"]
	volume := func(mediaTypes string) map[string]string {
		return map[string]string{"image-volume.ocihold.dev": "[{image: " + model.ref + ", mountPath: /volume, mediaTypes: [" + mediaTypes + "]}]"}
	}
	for patterns, want := range map[string][]string{
		`"application/vnd.cncf.model.weight.v1.raw"`: {"weights/model-1.safetensors"},
		`"*.raw"`:                   {"weights/model-1.safetensors", "config.json"},
		`"*.config.*", "*tar+gzip"`: {"config.json", "app/Chart.yaml", "app/templates/pod.yaml"},
	} {
		files := map[string]string{}
		for _, name := range want {
			files[name] = model.files[name]
		}
		pod := runPod(t, n, realnode.PodSpec{Annotations: volume(patterns)})
		assertFiles(t, run(t, pod, realnode.ContainerSpec{}), "volume", files)
		require.NoError(t, pod.Remove(t.Context()))
	}
	pod := runPod(t, n, realnode.PodSpec{Annotations: volume(`"application/vnd.oci.image.layer.*"`)})
	refused(t, pod, realnode.ContainerSpec{}, `"application/vnd.cncf.model.weight.v1.raw"`)
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
