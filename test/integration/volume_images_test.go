package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestImages stacks several images into one directory.
func TestImages(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	file := images.File
	base := push(t, n, "stack/base:1",
		[]images.Entry{file("own-base", "base", 0o644), file("shared", "base", 0o644), file("dir/base", "base", 0o644), file("kept", "kept", 0o644)})
	top := push(t, n, "stack/top:1",
		[]images.Entry{file("kept", "of its own", 0o644), file("shared", "top", 0o644), images.Dir("dir", 0o755)},
		[]images.Entry{images.Whiteout("kept"), images.Opaque("dir"), file("dir/top", "top", 0o644), file("sub/deep", "deep", 0o644)})
	const list = "cd /m; find . | sort; cat shared kept"

	t.Run("later wins", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: ask("- {images: [{image: %s}, {image: %s}], mountPath: /m}", base, top)})
		c := run(t, pod, realnode.ContainerSpec{})
		got := sh(t, c, list)
		for _, want := range []string{"./own-base\n", "./dir/base\n", "./dir/top\n", "./sub/deep\n", "./kept\n"} {
			assert.Contains(t, got, want)
		}
		assert.True(t, strings.HasSuffix(got, "topkept"), got)
		assert.Equal(t, "no\n", sh(t, c, "(echo x >/m/new) 2>/dev/null && echo yes || echo no"), "written to")

		out, err := ociholdCommand(t, n, "volumes", "-o", "json")
		require.NoError(t, err)
		var listed []imagevolume.Status
		require.NoError(t, json.Unmarshal([]byte(out), &listed))
		require.Len(t, listed, 1)
		require.Len(t, listed[0].Images, 2)
		for i, ref := range []string{base, top} {
			image := listed[0].Images[i]
			assert.Equal(t, ref, image.Image)
			assert.Contains(t, filepath.Base(listed[0].HostPath), image.ImageID[:16])
			assert.True(t, strings.HasPrefix(image.Digest, "sha256:"))
			_, err := command(t, n, "crictl", "rmi", ref)
			require.Error(t, err, "in use")
		}
		table, err := ociholdCommand(t, n, "volumes")
		require.NoError(t, err)
		assert.Equal(t, 2, strings.Count(table, " /m "))

		overRestart(t, n, pod, c, list)
		require.NoError(t, pod.Remove(t.Context()))
	})
	requireNothingHeld(t, n)

	t.Run("parts", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: ask(
			"- mountPath: /m\n  images: [{image: %[1]s}, {image: %[2]s, subPath: sub}, {image: %[1]s, subPath: ''}]", base, top)})
		refused(t, pod, realnode.ContainerSpec{}, "[0].images[2].subPath: is empty")

		pod = runPod(t, n, realnode.PodSpec{Annotations: ask(
			"- {mountPath: /m, images: [{image: %[2]s, subPath: dir}, {image: %[1]s}, {image: %[2]s, subPath: sub}]}\n"+
				"- {mountPath: /twice, images: [{image: %[1]s}, {image: %[1]s}]}", base, top)})
		c := run(t, pod, realnode.ContainerSpec{})
		assert.Equal(t, "./deep ./dir ./dir/base ./kept ./own-base ./shared ./top ", sh(t, c, "cd /m; find . -mindepth 1 | sort | tr '\\n' ' '"))
		assert.Equal(t, "base", sh(t, c, "cat /twice/shared"))
		overRestart(t, n, pod, c, "cat /m/top /m/dir/base /twice/kept")
		require.NoError(t, pod.Remove(t.Context()))
	})
	requireNothingHeld(t, n)

	t.Run("refused", func(t *testing.T) {
		mountFails(t, n, ask("- {images: [{image: %s}, {image: %s, subPath: shared}], mountPath: /m}", base, top),
			`sub path "shared" of image `+top+": not a directory")
		mountFails(t, n, ask("- {images: [{image: %s}, {image: %s, subPath: nowhere}], mountPath: /m}", base, top),
			`sub path "nowhere" of image `+top+": no such file or directory")
		mountFails(t, n, ask("- {images: [{image: %[1]s}, {image: %[1]s, subPath: dir}], mountPath: /m}", base), "choose parts that lie apart")
	})
	mounted, err := os.ReadDir(mountsDir(n))
	require.NoError(t, err)
	assert.Empty(t, mounted)
	n.AssertClean(t)
}
