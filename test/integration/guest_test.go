package integration

import (
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestGuestRuntime gives volumes to containers of a runtime that takes nothing
// of the host but bind mounts, and that calls the guard with a process that has
// no mount of the container.
func TestGuestRuntime(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{Guest: true})
	ref := push(t, n, "guest:1", []images.Entry{images.File("program", "#!/bin/sh\necho runs\n", 0o755)}, version("one"))
	other := push(t, n, "guest:2", []images.Entry{images.File("dir/other", "two", 0o644)})
	names := strings.NewReplacer("REF", ref, "OTHER", other)
	asking := func(text string) realnode.PodSpec {
		return realnode.PodSpec{Handler: realnode.Guest, Annotations: map[string]string{"image-volume.ocihold.dev": names.Replace(text)}}
	}
	const whole = `[{"image": "REF", "mountPath": "/volume"}]`
	for name, tc := range map[string]struct{ asked, script, want string }{
		"image": {whole, "cat version; ./program 2>/dev/null || echo refused", "onerefused\n"},
		"image that may execute": {
			`[{"image": "REF", "mountPath": "/volume", "exec": true}]`, "cat version; ./program", "oneruns\n",
		},
		"layers of a media type": {
			`[{"image": "REF", "mountPath": "/volume", "mediaTypes": ["*tar*"]}]`, "cat version; test -f program && echo all", "oneall\n",
		},
		"sub path":    {`[{"image": "OTHER", "mountPath": "/volume", "subPath": "dir"}]`, "cat other", "two"},
		"single file": {`[{"image": "OTHER", "mountPath": "/volume/file", "subPath": "dir/other"}]`, "cat file", "two"},
		"several images": {
			`[{"images": [{"image": "REF"}, {"image": "OTHER"}], "mountPath": "/volume"}]`, "cat version dir/other", "onetwo",
		},
		"writable": {
			`[{"image": "REF", "mountPath": "/volume", "readOnly": false, "scratchSize": "16MiB"}]`,
			"echo new > version; cat version", "new\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := runPod(t, n, asking(tc.asked))
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, tc.want, sh(t, c, "cd /volume; "+tc.script))
			require.NoError(t, pod.Remove(t.Context()))
			requireNothingHeld(t, n)
		})
	}

	t.Run("native image volume", func(t *testing.T) {
		_, err := n.Pull(t.Context(), ref)
		require.NoError(t, err)
		pod := runPod(t, n, realnode.PodSpec{Handler: realnode.Guest})
		_, err = pod.Create(t.Context(), realnode.ContainerSpec{Mounts: []*cri.Mount{native(ref, "/volume", "")}})
		require.ErrorContains(t, err, `guest: mount of type "overlay" at /volume: a guest has only bind mounts of the host`)
	})

	t.Run("refused without its volume", func(t *testing.T) {
		pod := runPod(t, n, asking(whole))
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
		_, err := pod.Create(t.Context(), realnode.ContainerSpec{})
		require.ErrorContains(t, err, "not injected: is ocihold running?")
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		assert.Equal(t, "one", sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /volume/version"))
	})
	n.AssertClean(t)
}

// TestGVisor gives a volume to a container in gVisor's sandbox, which passes its
// hooks a process without the mounts of the container.
func TestGVisor(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{GVisor: true})
	ref := push(t, n, "gvisor:1", []images.Entry{images.File("program", "#!/bin/sh\necho runs\n", 0o755)}, version("one"))
	asked := volumes(t, volume{Image: ref, MountPath: "/volume"})
	pod := runPod(t, n, realnode.PodSpec{Handler: realnode.GVisor, OneSandbox: true, Annotations: asked})
	c := run(t, pod, realnode.ContainerSpec{})
	// runsc gives all containers the process of the sandbox, for whose end CRI-O then
	// waits when it stops one.
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	require.Positive(t, info.PID)
	t.Cleanup(func() { _ = syscall.Kill(info.PID, syscall.SIGKILL) })

	assert.Contains(t, sh(t, c, "dmesg"), "gVisor")
	assert.Equal(t, "onerefused\n", sh(t, c, "cd /volume; cat version; ./program 2>/dev/null || echo refused"))
	assert.Equal(t, "refused\n", sh(t, c, "touch /volume/new 2>/dev/null || echo refused"))
	id := imageID(t, c)
	assertHeld(t, n, id)

	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
	_, err = pod.Create(t.Context(), realnode.ContainerSpec{Name: "bare"})
	require.ErrorContains(t, err, "not injected: is ocihold running?")
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))

	require.NoError(t, syscall.Kill(info.PID, syscall.SIGKILL))
	require.NoError(t, pod.Remove(t.Context()))
	requireLetGo(t, n, id)
	n.AssertClean(t)
}
