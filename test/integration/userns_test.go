package integration

import (
	"fmt"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestUserNamespaces gives volumes to pods that have user namespaces, in which
// files have the owners that they have in the image.
func TestUserNamespaces(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "users:1",
		[]images.Entry{images.Dir("dir", 0o755).Owned(1000, 2000), images.File("dir/private", "theirs", 0o600).Owned(1000, 2000)},
		[]images.Entry{images.File("root", "root's", 0o600)})
	other := push(t, n, "users:2", []images.Entry{images.Dir("dir", 0o755), images.File("dir/private", "ours", 0o600).Owned(7, 8)})
	users := func(host uint32) *cri.IDMapping { return &cri.IDMapping{HostId: host, Length: 65536} }
	const owners = "stat -c '%n %u:%g' . dir dir/private root"
	const asInTheImage = ". 0:0\ndir 1000:2000\ndir/private 1000:2000\nroot 0:0\n"
	whole := ask("[{image: %s, mountPath: /m}]", ref)

	for name, tc := range map[string]struct{ annotation, script, want string }{
		"image": {"[{image: %s, mountPath: /m}]", "cd /m; " + owners + "; cat root dir/private", asInTheImage + "root'stheirs"},
		"layers": {
			"[{image: %s, mountPath: /m, mediaTypes: ['*tar*']}]", "cd /m; " + owners, asInTheImage,
		},
		"sub path":    {"[{image: %s, mountPath: /m, subPath: dir}]", "stat -c '%u:%g' /m /m/private", "1000:2000\n1000:2000\n"},
		"single file": {"[{image: %s, mountPath: /m, subPath: root}]", "stat -c '%u:%g' /m; cat /m", "0:0\nroot's"},
		"several images": {
			"[{images: [{image: %s}, {image: " + other + ", subPath: dir}], mountPath: /m}]", "cd /m; stat -c '%u:%g' root dir/private private", "0:0\n1000:2000\n7:8\n",
		},
		"scratch": {
			"[{image: %s, mountPath: /m, readOnly: false}]",
			"cd /m; echo new >new; echo more >>dir/private; chown 5:6 root; stat -c '%u:%g' . new dir/private root; cat dir/private",
			"0:0\n0:0\n1000:2000\n5:6\ntheirsmore\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := runPod(t, n, realnode.PodSpec{Annotations: ask(tc.annotation, ref), Users: users(200000)})
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, "0 200000 65536\n", sh(t, c, "set -- $(cat /proc/self/uid_map); echo $*"))
			assert.Equal(t, tc.want, sh(t, c, tc.script))
			require.NoError(t, pod.Remove(t.Context()))
			requireNothingHeld(t, n)
		})
	}

	t.Run("one mount for each mapping", func(t *testing.T) {
		sources := map[string]bool{}
		var pods []*realnode.Pod
		for _, ids := range []*cri.IDMapping{nil, users(200000), users(200000), users(300000)} {
			pod := runPod(t, n, realnode.PodSpec{Annotations: whole, Users: ids})
			pods = append(pods, pod)
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, asInTheImage, sh(t, c, "cd /m; "+owners))
			sources[sourceOf(t, c, "/m")] = true
		}
		assert.Len(t, sources, 3)
		for _, pod := range pods {
			require.NoError(t, pod.Remove(t.Context()))
		}
		requireNothingHeld(t, n)
	})

	t.Run("restarts", func(t *testing.T) {
		pod := runPod(t, n, realnode.PodSpec{Annotations: whole, Users: users(200000)})
		c := run(t, pod, realnode.ContainerSpec{})
		overRestart(t, n, pod, c, "cd /m; "+owners)
		for _, name := range []string{realnode.CRIO, realnode.Ocihold} {
			require.NoError(t, n.Kill(t.Context(), name, syscall.SIGKILL))
		}
		for _, name := range []string{realnode.CRIO, realnode.Ocihold} {
			require.NoError(t, n.Start(t.Context(), name))
		}
		awaitRegistered(t, n)
		// CRI-O tells of the namespace after its restart, too. It makes the container
		// in the host's, though (1.34.0).
		third := run(t, pod, realnode.ContainerSpec{Name: "third"})
		assert.Equal(t, sourceOf(t, c, "/m"), sourceOf(t, third, "/m"))
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
	})

	t.Run("owners that cannot be mapped", func(t *testing.T) {
		// As a kernel answers for a file system that cannot map ids.
		tracer := exec.CommandContext(t.Context(), "strace", "-f", "-o", "/dev/null", "-e", "trace=mount_setattr",
			"-e", "inject=mount_setattr:error=EINVAL", "-p", fmt.Sprint(n.PID(t, realnode.Ocihold)))
		awaitAttached(t, tracer)
		pod := runPod(t, n, realnode.PodSpec{Annotations: whole, Users: users(200000)})
		text := refused(t, pod, realnode.ContainerSpec{}, "the owners of the image's files cannot be mapped")
		assert.Contains(t, text, "ImageVolumeMountFailed: image volume /m: ")
		assert.Contains(t, text, "Linux 5.19 or later")
		plain := runPod(t, n, realnode.PodSpec{Annotations: whole})
		assert.Equal(t, asInTheImage, sh(t, run(t, plain, realnode.ContainerSpec{}), "cd /m; "+owners), "others have the volume")
		require.NoError(t, plain.Remove(t.Context()))

		require.NoError(t, tracer.Process.Kill())
		require.Error(t, tracer.Wait())
		assert.Equal(t, asInTheImage, sh(t, run(t, pod, realnode.ContainerSpec{}), "cd /m; "+owners), "it is tried again")
		require.NoError(t, pod.Remove(t.Context()))
		requireNothingHeld(t, n)
	})
	n.AssertClean(t)
}

// sourceOf is what of the host a container has at a path.
func sourceOf(t *testing.T, c *realnode.Container, path string) string {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	for _, m := range info.RuntimeSpec.Mounts {
		if m.Destination == path {
			return m.Source
		}
	}
	require.FailNow(t, "nothing is mounted at "+path)
	return ""
}
