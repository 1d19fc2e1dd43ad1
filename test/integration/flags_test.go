package integration

import (
	"os"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// capDACOverride is the attribute security.capability, in the form of
// vfs_cap_data (linux/capability.h), that gives a program CAP_DAC_OVERRIDE.
const capDACOverride = "\x01\x00\x00\x02" + "\x02\x00\x00\x00" + "\x00\x00\x00\x00" + "\x00\x00\x00\x00" + "\x00\x00\x00\x00"

// flagImages pushes an image whose directory files has what flags of a mount
// prevent, and returns its name, and what pulls a container's image with the very
// same directory, for a container that runs as that user.
func flagImages(t testing.TB, n *realnode.Node) (ref string, containerImage func(user string) string) {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	require.NoError(t, err)
	program := string(busybox)
	files := []images.Entry{
		images.Dir("files", 0o777),
		images.File("files/hello", "#!/bin/sh\necho hello\n", 0o755),
		images.File("files/echo", program, 0o755),
		images.File("files/su", program, 0o4755),
		images.File("files/busybox", program, 0o755).WithXattr("security.capability", capDACOverride),
		images.CharDevice("files/null", 1, 3),
		images.File("files/file", "content\n", 0o666).Owned(1000, 1000),
		images.Dir("files/dir", 0o777).Owned(1000, 1000),
	}
	// The containers' own image: no password for root, and uid 1000 to run as.
	base := append([]images.Entry{
		images.Dir("bin", 0o755), images.File("bin/busybox", program, 0o755),
		images.Dir("etc", 0o755), images.File("etc/passwd", "root::0:0:root:/:/bin/sh\nuser:x:1000:1000:user:/:/bin/sh\n", 0o644),
		images.File("etc/group", "root:x:0:\nuser:x:1000:\n", 0o644),
		images.File("secret", "secret\n", 0o600),
	}, files...)
	for _, applet := range []string{"sh", "sleep", "cat", "id", "echo", "touch", "rm", "mkdir", "rmdir", "chmod", "chown", "mv", "ln", "truncate"} {
		base = append(base, images.Symlink("bin/"+applet, "busybox"))
	}
	containerImage = func(user string) string {
		image, err := images.Image(images.Config{User: user, Env: []string{"PATH=/bin"}}, base)
		require.NoError(t, err)
		ref := "flags/base:uid-" + user
		require.NoError(t, n.Push(t.Context(), ref, image))
		_, err = n.Pull(t.Context(), n.Ref(ref))
		require.NoError(t, err)
		return n.Ref(ref)
	}
	return push(t, n, "flags/volume:1", files), containerImage
}

// tryIn runs a script in the directory files below dir.
func tryIn(t testing.TB, c *realnode.Container, dir, script string) realnode.Output {
	t.Helper()
	out, err := c.Exec(t.Context(), "/bin/sh", "-c", "cd "+path.Join(dir, "files")+" && { "+script+"; }")
	require.NoError(t, err)
	return out
}

// mountOptions returns the options that the container sees of what is mounted at
// each of the paths.
func mountOptions(t testing.TB, c *realnode.Container, paths ...string) map[string]string {
	t.Helper()
	got := map[string]string{}
	for line := range strings.Lines(sh(t, c, "cat /proc/self/mountinfo")) {
		if field := strings.Fields(line); slices.Contains(paths, field[4]) {
			got[field[4]] = field[5]
		}
	}
	return got
}

// TestFlags tries in a volume what its mount has to prevent. Each attempt is
// made with the very same files in the container's own root file system, too,
// where it must succeed: so it is the mount that makes the difference.
func TestFlags(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref, containerImage := flagImages(t, n)
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t,
		volume{Image: ref, MountPath: "/volume"},
		volume{Image: ref, MountPath: "/exec", Exec: true},
	)})
	root := run(t, pod, realnode.ContainerSpec{Name: "root", Image: containerImage("0")})
	user := run(t, pod, realnode.ContainerSpec{Name: "user", Image: containerImage("1000")})
	require.Equal(t, "1000\n", sh(t, user, "id -u"))

	try := func(c *realnode.Container, dir, script string) realnode.Output {
		t.Helper()
		return tryIn(t, c, dir, script)
	}
	const own, noexec, exec = "/", "/volume", "/exec"

	t.Run("options", func(t *testing.T) {
		options := map[string]string{noexec: "ro,nosuid,nodev,noexec,relatime", exec: "ro,nosuid,nodev,relatime"}
		for _, c := range []*realnode.Container{root, user} {
			assert.Equal(t, options, mountOptions(t, c, noexec, exec))
		}
	})

	t.Run("programs", func(t *testing.T) {
		for _, program := range []string{"./hello", "./echo hello"} {
			for _, dir := range []string{own, exec} {
				assert.Equal(t, realnode.Output{Stdout: "hello\n"}, try(root, dir, program), "%s in %s", program, dir)
			}
			out := try(root, noexec, program)
			assert.Equal(t, 126, out.ExitCode, program)
			assert.Contains(t, out.Stderr, "Permission denied")
		}
		// Nor as what the runtime starts.
		_, err := pod.Run(t.Context(), realnode.ContainerSpec{Name: "entry", Image: containerImage("0"), Command: []string{"/volume/files/echo", "hello"}})
		require.ErrorContains(t, err, "/volume/files/echo: permission denied")
		run(t, pod, realnode.ContainerSpec{Name: "entry", Attempt: 1, Image: containerImage("0"), Command: []string{"/exec/files/echo", "hello"}})
	})

	t.Run("setuid", func(t *testing.T) {
		// A copy of su with root's setuid bit; root has no password.
		const script = "./su -c 'id -u' root"
		assert.Equal(t, realnode.Output{Stdout: "0\n"}, try(user, own, script))
		for _, dir := range []string{exec, noexec} {
			out := try(user, dir, script)
			assert.NotZero(t, out.ExitCode, dir)
			assert.Empty(t, out.Stdout, dir)
			if dir == exec {
				assert.Contains(t, out.Stderr, "must be suid to work properly", "it runs, as uid 1000")
			}
		}
	})

	t.Run("file capabilities", func(t *testing.T) {
		const script = "./busybox cat /secret"
		assert.Equal(t, realnode.Output{Stdout: "secret\n"}, try(user, own, script))
		for _, dir := range []string{exec, noexec} {
			out := try(user, dir, script)
			assert.NotZero(t, out.ExitCode, dir)
			assert.Empty(t, out.Stdout, dir)
			assert.Contains(t, out.Stderr, "Permission denied", dir)
		}
	})

	t.Run("devices", func(t *testing.T) {
		for _, script := range []string{"cat <null", "echo >null"} {
			for _, c := range []*realnode.Container{root, user} {
				assert.Equal(t, realnode.Output{}, try(c, own, script))
				for _, dir := range []string{exec, noexec} {
					out := try(c, dir, script)
					assert.NotZero(t, out.ExitCode, "%s in %s", script, dir)
					assert.Contains(t, out.Stderr, "Permission denied", "%s in %s", script, dir)
				}
			}
		}
	})

	t.Run("writes", func(t *testing.T) {
		for _, script := range []string{
			"echo more >>file", "echo other >file", "echo new >new", "touch new", "touch file", "rm file", "truncate -s 0 file", "mkdir new", "rmdir dir",
			"chmod 600 file", "chown 1 file", "mv file other", "ln file other", "ln -s file other",
		} {
			for _, dir := range []string{exec, noexec} {
				out := try(root, dir, script)
				assert.NotZero(t, out.ExitCode, "%s in %s", script, dir)
				assert.Contains(t, out.Stderr, "Read-only file system", "%s in %s", script, dir)
			}
			// Each in a copy of what is there.
			out := try(root, own, "mkdir -p /copy && rm -rf /copy/* && cat file >/copy/file && mkdir /copy/dir && cd /copy && "+script)
			assert.Zero(t, out.ExitCode, "%s: %s", script, out.Stderr)
		}
		assert.Equal(t, "content\n", sh(t, root, "cat /volume/files/file"))
	})

	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
