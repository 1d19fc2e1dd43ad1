package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// ask are the annotations of a pod whose containers all get the volumes of the
// text, in YAML.
func ask(format string, args ...any) map[string]string {
	return map[string]string{domain: fmt.Sprintf(format, args...)}
}

// mountFails asserts that a container is refused with a fault of its volume at
// /m, whose text has all of wants, and that this leaves nothing.
func mountFails(t *testing.T, n *realnode.Node, annotations map[string]string, wants ...string) {
	t.Helper()
	pod := runPod(t, n, realnode.PodSpec{Annotations: annotations})
	text := ""
	await(t, func() error {
		_, err := pod.Create(t.Context(), realnode.ContainerSpec{})
		require.Error(t, err, "a container without its volume")
		text = err.Error()
		if strings.Contains(text, "pulling ") {
			return err
		}
		return nil
	})
	for _, want := range append(wants, "ImageVolumeMountFailed: image volume /m: ", "; will be tried again") {
		assert.Contains(t, text, want)
	}
	require.NoError(t, pod.Remove(t.Context()))
	requireNothingHeld(t, n)
}

// overRestart ends ocihold by force and starts it again, which must not be
// noticed in the container that runs, nor by the next of its pod.
func overRestart(t *testing.T, n *realnode.Node, pod *realnode.Pod, running *realnode.Container, script string) {
	t.Helper()
	want := sh(t, running, script)
	listed, err := ociholdCommand(t, n, "volumes", "-o", "json")
	require.NoError(t, err)
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	awaitRegistered(t, n)
	assert.Equal(t, want, sh(t, running, script))
	await(t, func() error {
		again, err := ociholdCommand(t, n, "volumes", "-o", "json")
		if err == nil && again != listed {
			err = fmt.Errorf("volumes were %s and are %s", listed, again)
		}
		return err
	})
	next := run(t, pod, realnode.ContainerSpec{Name: "next"})
	assert.Equal(t, want, sh(t, next, script))
}

// TestSubPath mounts what an image has at a path.
func TestSubPath(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	secret := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, []byte("of the host"), 0o644))
	ref := push(t, n, "subpath:1",
		[]images.Entry{
			images.Dir("a", 0o755), images.Dir("a/b", 0o755), images.File("a/b/f", "in it", 0o644), images.File("a/gone", "x", 0o644),
			images.File("tool", "#!/bin/sh\necho ran", 0o755), images.FIFO("pipe"), images.CharDevice("device", 1, 3),
		},
		[]images.Entry{
			images.Whiteout("a/gone"),
			images.Symlink("absolute", "/a/b"), images.Symlink("relative", "a/b"), images.Symlink("a/up", "../a/b"),
			images.Symlink("far", "../../../../../a/b"), images.Symlink("twice", "/absolute"), images.Symlink("loop", "/loop"),
			images.Symlink("nowhere", "/no/where"), images.Symlink("out", secret), images.Symlink("climb", "../../../../../../../.."+secret),
			images.Symlink("shadow", "/etc/shadow"), images.Symlink("magic", "/proc/self/root/etc"),
		})

	t.Run("what is there", func(t *testing.T) {
		for path, file := range map[string]string{
			"a/b": "/f", "./a//b/": "/f", "absolute": "/f", "relative": "/f", "a/up": "/f", "far": "/f", "twice": "/f",
			"a/b/f": "", "twice/f": "", "a": "/b/f",
		} {
			t.Run(path, func(t *testing.T) {
				t.Parallel()
				pod := runPod(t, n, realnode.PodSpec{Annotations: ask("- {image: %s, subPath: %s, mountPath: /m}", ref, path)})
				c := run(t, pod, realnode.ContainerSpec{})
				assert.Equal(t, "in it", sh(t, c, "cat /m"+file))
				assert.Equal(t, "no\n", sh(t, c, "test -e /m/gone && echo yes || echo no"))
				assert.Equal(t, "no\n", sh(t, c, "(echo x >/m"+file+") 2>/dev/null && echo yes || echo no"), "written to")
				options := sh(t, c, "grep ' /m ' /proc/self/mounts")
				for _, option := range []string{"ro", "nosuid", "nodev", "noexec"} {
					assert.Regexp(t, "[ ,]"+option+"[ ,]", options)
				}
			})
		}
	})
	requireNothingHeld(t, n)

	t.Run("what is not there", func(t *testing.T) {
		for path, want := range map[string]string{
			"missing": "no such file or directory", "a/gone": "no such file or directory", "nowhere": "no such file or directory",
			"a/b/f/g": "not a directory", "loop": "too many levels of symbolic links",
			"out": "no such file or directory", "climb": "no such file or directory", "shadow": "no such file or directory",
			"magic": "no such file or directory", "pipe": "neither a directory nor a file", "device": "neither a directory nor a file",
		} {
			mountFails(t, n, ask("- {image: %s, subPath: %s, mountPath: /m}", ref, path), fmt.Sprintf("sub path %q of image %s: %s", path, ref, want))
		}
	})

	t.Run("over a restart", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: ask(
			"- {image: %[1]s, subPath: twice, mountPath: /m}\n- {image: %[1]s, subPath: tool, mountPath: /tool, exec: true}\n- {image: %[1]s, mountPath: /all}", ref)})
		c := run(t, pod, realnode.ContainerSpec{})
		assert.Equal(t, "ran\n", sh(t, c, "/tool"))
		overRestart(t, n, pod, c, "cat /m/f /tool /all/a/b/f")
		mounted, err := os.ReadDir(mountsDir(n))
		require.NoError(t, err)
		assert.Len(t, mounted, 3, "the image once, and each part of it")
		require.NoError(t, pod.Remove(t.Context()))
	})
	requireNothingHeld(t, n)
	n.AssertClean(t)
}
