package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestImageBombs pulls an image of some hundred KB that unpacks to 128 MiB, for a
// container and as a volume.
func TestImageBombs(t *testing.T) {
	conf := filepath.Join(t.TempDir(), "limits.toml")
	require.NoError(t, os.WriteFile(conf, []byte("[volumes]\nmax_image_bytes = \"16MB\"\n"+
		"[handlers.default]\nmax_image_bytes = \"32MB\"\n"+
		"[handlers.vm]\nmax_bytes = \"64MB\"\n"), 0o644))
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: conf})
	app := push(t, n, "bomb/app:1", busybox(t))
	bomb := push(t, n, "bomb/bomb:1", []images.Entry{images.File("first", "content\n", 0o644)},
		[]images.Entry{images.File("zeros", strings.Repeat("\x00", 128<<20), 0o644)})
	roots := map[string]string{"": filepath.Join(n.Dir(), "lib", "root"), "vm": n.HandlerRoot("vm")}
	nothingLeft := func(t *testing.T) {
		t.Helper()
		assert.Empty(t, filesOfBomb(t, roots))
		assertAbsent(t, n, bomb)
		assertNoDownloads(t, n)
	}

	for handler, setting := range map[string]string{
		"":   "max_image_bytes in [handlers.default]",
		"vm": "max_bytes in [handlers.vm]",
	} {
		t.Run("for a container of "+handler, func(t *testing.T) {
			err := pullError(t, n, handler, bomb)
			require.ErrorContains(t, err, bomb+`": `+setting+": image is too large: with layer sha256:")
			assert.Equal(t, codes.ResourceExhausted, status.Code(err))
			nothingLeft(t)
			_, err = ociholdCommand(t, n, "pull", "--handler", realHandler(handler), bomb)
			require.ErrorContains(t, err, setting)
			nothingLeft(t)
		})
	}
	t.Run("as a volume", func(t *testing.T) {
		for _, handler := range []string{"", "vm"} {
			id := pullFor(t, n, handler, app)
			pod, err := n.RunPod(t.Context(), realnode.PodSpec{Handler: handler, Annotations: volumes(t, volume{Image: bomb, MountPath: "/vol"})})
			require.NoError(t, err)
			refused(t, pod, realnode.ContainerSpec{Image: id, UserImage: app},
				"not allowed on this node: pull \""+bomb+"\": max_image_bytes in [volumes]: image is too large: with layer sha256:")
			// This cuts a pull short, whose finished layer the next one takes up.
			require.NoError(t, pod.Remove(t.Context()))
			require.Eventually(t, func() bool {
				_ = pullError(t, n, handler, bomb)
				return len(filesOfBomb(t, roots)) == 0
			}, time.Minute, 100*time.Millisecond)
			nothingLeft(t)
		}
	})
	t.Run("an image within the limits", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: app, MountPath: "/vol"})})
		c := run(t, pod, realnode.ContainerSpec{Image: pullFor(t, n, "vm", app), UserImage: app})
		assert.Equal(t, "0\n", sh(t, c, "cat /vol/bin/busybox >/dev/null; id -u"))
	})
	t.Run("on the node, but not as a volume", func(t *testing.T) {
		restartWith(t, n, "[handlers.vm]\nmax_bytes = \"1GB\"\nmax_image_bytes = \"500MB\"\n")
		pullFor(t, n, "vm", bomb)
		pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: bomb, MountPath: "/vol", PullPolicy: "Never"})})
		refused(t, pod, realnode.ContainerSpec{Image: pullFor(t, n, "vm", app), UserImage: app}, "max_image_bytes in [volumes]: image is too large")
	})
	n.AssertClean(t)
}

// realHandler is the name by which commands call the handler.
func realHandler(handler string) string {
	if handler == "" {
		return "default"
	}
	return handler
}

// filesOfBomb are those that a root has of it.
func filesOfBomb(t *testing.T, roots map[string]string) (found []string) {
	t.Helper()
	for _, root := range roots {
		for _, pattern := range []string{"overlay/*/diff/first", "overlay/*/diff/zeros", "overlay/tempdirs/temp-dir-*", "overlay-layers/tmp/temp-dir-*"} {
			files, err := filepath.Glob(filepath.Join(root, pattern))
			require.NoError(t, err)
			found = append(found, files...)
		}
	}
	return found
}
