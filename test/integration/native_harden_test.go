package integration

import (
	"os"
	"path"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestNativeFlags tries in Kubernetes' own image volumes what CRI-O's mounts of them
// do not prevent and Ocihold's do. Each attempt is made with the very same files in
// the container's own root file system, too.
func TestNativeFlags(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref, containerImage := flagImages(t, n)
	_, err := n.Pull(t.Context(), ref)
	require.NoError(t, err)
	const crio, hardened, exec = "rw,relatime", "ro,nosuid,nodev,noexec,relatime", "ro,nosuid,nodev,relatime"
	// The sub path has the files that the others have in a directory.
	natives := []*cri.Mount{native(ref, "/volume", ""), native(ref, "/sub/files", "files")}
	runIn := func(t *testing.T, user string, annotations map[string]string) *realnode.Container {
		t.Helper()
		pod := runPod(t, n, realnode.PodSpec{Annotations: annotations})
		return run(t, pod, realnode.ContainerSpec{Image: containerImage(user), Mounts: natives})
	}
	options := func(t *testing.T, c *realnode.Container) []string {
		t.Helper()
		got := mountOptions(t, c, "/volume", "/sub/files")
		return []string{got["/volume"], got["/sub/files"]}
	}
	// check tries everything; runs says whether programs do.
	check := func(t *testing.T, root, user *realnode.Container, runs bool) {
		t.Helper()
		for _, dir := range []string{"/volume", "/sub"} {
			assert.Equal(t, realnode.Output{Stdout: "content\n"}, tryIn(t, root, dir, "cat file"))
			for _, program := range []string{"./hello", "./echo hello"} {
				require.Equal(t, realnode.Output{Stdout: "hello\n"}, tryIn(t, root, "/", program))
				out := tryIn(t, root, dir, program)
				if runs {
					assert.Equal(t, realnode.Output{Stdout: "hello\n"}, out)
				} else {
					assert.Equal(t, 126, out.ExitCode, "%s in %s", program, dir)
					assert.Contains(t, out.Stderr, "Permission denied")
				}
			}
			for _, script := range []string{"./su -c 'id -u' root", "./busybox cat /secret"} { // setuid, capabilities
				require.Zero(t, tryIn(t, user, "/", script).ExitCode)
				out := tryIn(t, user, dir, script)
				assert.NotZero(t, out.ExitCode, "%s in %s", script, dir)
				assert.Empty(t, out.Stdout, "%s in %s", script, dir)
			}
			require.Zero(t, tryIn(t, root, "/", "echo >null").ExitCode)
			out := tryIn(t, root, dir, "echo >null")
			assert.Contains(t, out.Stderr, "Permission denied", "device in %s", dir)
			assert.Contains(t, tryIn(t, root, dir, "echo >file").Stderr, "Read-only file system")
		}
	}

	t.Run("programs do not run", func(t *testing.T) {
		root, user := runIn(t, "0", nil), runIn(t, "1000", nil)
		require.Equal(t, []string{hardened, hardened}, options(t, root))
		check(t, root, user, false)
	})
	t.Run("programs run where the pod says so", func(t *testing.T) {
		annotations := map[string]string{"native-exec.ocihold.dev/container.main": "true"}
		root, user := runIn(t, "0", annotations), runIn(t, "1000", annotations)
		require.Equal(t, []string{exec, exec}, options(t, root))
		check(t, root, user, true)
		pod := runPod(t, n, realnode.PodSpec{Annotations: annotations})
		other := run(t, pod, realnode.ContainerSpec{Name: "other", Mounts: natives})
		require.Equal(t, []string{hardened, hardened}, options(t, other))
	})
	t.Run("a faulty annotation", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: map[string]string{"native-exec.ocihold.dev": "yes"}})
		refused(t, pod, realnode.ContainerSpec{Mounts: natives},
			`annotation native-exec.ocihold.dev: "yes" is neither "true" nor "false"`)
		run(t, pod, realnode.ContainerSpec{Name: "without"})
	})
	t.Run("the files of an artifact", func(t *testing.T) {
		artifact, err := images.Artifact("application/vnd.test.tool", images.Blob{MediaType: "text/plain", Title: "dir/tool", Content: []byte("#!/bin/sh\necho ran\n")})
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), "tool:1", artifact))
		_, err = n.Pull(t.Context(), n.Ref("tool:1")) // into CRI-O's store of artifacts
		require.NoError(t, err)
		_, c := runNative(t, n, native(n.Ref("tool:1"), "/vol", ""))
		require.Equal(t, "#!/bin/sh\necho ran\n", sh(t, c, "cat /vol/dir/tool"))
		require.Equal(t, map[string]string{"/vol/dir/tool": hardened}, mountOptions(t, c, "/vol/dir/tool"))
	})
	t.Run("beside a volume by annotation, in a directory and at the same path", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
		c := run(t, pod, realnode.ContainerSpec{Mounts: []*cri.Mount{
			native(ref, "/data/native/", ""), {HostPath: t.TempDir(), ContainerPath: "/data"},
		}})
		require.Equal(t, map[string]string{"/models": hardened, "/data/native": hardened}, mountOptions(t, c, "/models", "/data/native"))
		sh(t, c, "cat /models/files/file /data/native/files/file")
		refused(t, pod, realnode.ContainerSpec{Name: "twice", Mounts: []*cri.Mount{native(ref, "/models", "")}}, "something else is mounted there already")
	})
	t.Run("a restart of ocihold, and not hardened", func(t *testing.T) {
		before := runIn(t, "0", nil)
		restartWith(t, n, "[volumes]\nharden_native = false\n")
		require.Equal(t, []string{hardened, hardened}, options(t, before))
		as := runIn(t, "0", map[string]string{"native-exec.ocihold.dev": "yes"})
		require.Equal(t, []string{crio, crio}, options(t, as))
		require.Equal(t, realnode.Output{Stdout: "hello\n"}, tryIn(t, as, "/volume", "./hello"))
		restartWith(t, n, "")
		require.Equal(t, []string{hardened, hardened}, options(t, runIn(t, "0", nil)))
	})
	t.Run("CRI-O's mount on the host goes with the image", func(t *testing.T) {
		mounts := func() (points []string) {
			all, err := os.ReadFile("/proc/self/mountinfo")
			require.NoError(t, err)
			for line := range strings.Lines(string(all)) {
				if point := strings.Fields(line)[4]; strings.HasPrefix(point, n.CRIORoot()) && path.Base(point) == "merged" {
					points = append(points, point)
				}
			}
			return points
		}
		require.Len(t, mounts(), 1, "of all the containers that had the image")
		await(t, func() error { return checkLeased(n) })
		_, err := command(t, n, "crictl", "rmi", ref)
		require.NoError(t, err)
		require.Empty(t, mounts())
	})
	n.AssertClean(t)
}
