package integration

import (
	"fmt"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// pushMixed pushes an image whose layers, lowest first, are a gzip, a zstd and a
// plain tar, each with a file of its own and one that all have.
func pushMixed(t *testing.T, n *realnode.Node, ref string) string {
	t.Helper()
	var whole v1.Image
	for i, packing := range []images.Packing{images.Gzip, images.Zstd, images.Plain} {
		content := []images.Entry{images.File(string(packing), "", 0o644), images.File("all", string(packing), 0o644)}
		image, err := images.Image(images.Config{Packing: packing}, content)
		require.NoError(t, err)
		if i == 0 {
			whole = image
			continue
		}
		layers, err := image.Layers()
		require.NoError(t, err)
		kind, err := layers[0].MediaType()
		require.NoError(t, err)
		whole, err = mutate.Append(whole, mutate.Addendum{Layer: layers[0], MediaType: kind})
		require.NoError(t, err)
	}
	require.NoError(t, n.Push(t.Context(), ref, whole))
	return n.Ref(ref)
}

// TestLayersOfMediaTypes mounts some of an image's layers, by their media types.
func TestLayersOfMediaTypes(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := pushMixed(t, n, "mixed:1")
	const script = "cd /m; ls | tr '\\n' ' '; cat all"
	for patterns, want := range map[string]string{
		"'*'":                "all gzip plain zstd plain",
		"'*gzip'":            "all gzip gzip",
		"'*zstd', '*+gzip'":  "all gzip zstd zstd",
		"'*.tar'":            "all plain plain",
		"'*layer.v1.tar+?*'": "all gzip zstd zstd",
		"application/vnd.oci.image.layer.v1.tar+zstd": "all zstd zstd",
		"'*image.[a-l]*gzip'":                         "all gzip gzip",
	} {
		t.Run(patterns, func(t *testing.T) {
			pod := runPod(t, n, realnode.PodSpec{Annotations: ask("- {image: %s, mediaTypes: [%s], mountPath: /m}", ref, patterns)})
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, want, sh(t, c, script))
			require.NoError(t, pod.Remove(t.Context()))
			requireNothingHeld(t, n)
		})
	}
	t.Run("none", func(t *testing.T) {
		mountFails(t, n, ask("- {image: %s, mediaTypes: ['*model*'], mountPath: /m}", ref),
			fmt.Sprintf("mount image %s: ", ref), `it has no such layer: media types "*model*"; it has "application/vnd.oci.image.layer.v1.tar", `+
				`"application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.oci.image.layer.v1.tar+zstd"`)
	})
	t.Run("beside each other, over a restart", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: ask(
			"- {image: %[1]s, mountPath: /m, mediaTypes: ['*gzip']}\n- {image: %[1]s, mountPath: /f, subPath: all, mediaTypes: ['*zstd', '*gzip']}\n"+
				"- mountPath: /s\n  images: [{image: %[1]s, mediaTypes: ['*tar']}, {image: %[1]s, mediaTypes: ['*gzip']}]", ref)})
		c := run(t, pod, realnode.ContainerSpec{})
		const script = "cat /m/all /f /s/all; ls /s | tr '\\n' ' '"
		assert.Equal(t, "gzipzstdgzipall gzip plain ", sh(t, c, script))
		overRestart(t, n, pod, c, script)
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
	})
	n.AssertClean(t)
}
