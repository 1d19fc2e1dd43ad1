package integration

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// TestPrivateImageIsForWhomAccessWasProven pulls a private image with the pull
// secret of one namespace, and has pods of others want it as a volume.
func TestPrivateImageIsForWhomAccessWasProven(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{Auth: "user:secret"})
	nodes, err := os.ReadFile(n.AuthFile())
	require.NoError(t, err)
	setNodes := func(content string) {
		require.NoError(t, os.WriteFile(n.AuthFile(), []byte(content), 0o600))
	}
	setNodes("{}")
	pullWith := func(ref, password, namespace string) error {
		_, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{
			Image: &cri.ImageSpec{Image: ref}, Auth: &cri.AuthConfig{Username: "user", Password: password},
			SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Namespace: namespace}},
		})
		return err
	}
	podOf := func(namespace, ref, policy string) *realnode.Pod {
		return runPod(t, n, realnode.PodSpec{
			Namespace: namespace, Annotations: volumes(t, volume{Image: ref, MountPath: "/models", PullPolicy: policy}),
		})
	}
	gets := func(namespace, ref, policy string) {
		t.Helper()
		c := run(t, podOf(namespace, ref, policy), realnode.ContainerSpec{})
		assert.Equal(t, "secret", sh(t, c, "cat /models/version"))
	}

	ref := push(t, n, "access/model:1", version("secret"))
	require.NoError(t, pullWith(ref, "secret", "team-a"))
	require.Error(t, pullWith(ref, "wrong", "team-b"))
	require.NoError(t, n.Proxy().ResetCounts(t.Context()))

	gets("team-a", ref, "IfNotPresent")
	gets("team-a", ref, "Never")
	assert.Empty(t, requests(t, n), "a proven image costs no request")
	never := podOf("team-b", ref, "Never")
	refusal := refused(t, never, realnode.ContainerSpec{}, "ErrImageNeverPull")
	assert.Contains(t, refusal, "for namespace team-b access to it is not proven")
	assert.Contains(t, refusal, "trust_present = true")
	assert.Empty(t, requests(t, n), "nor does one that may not be asked for")
	ifNotPresent := podOf("team-b", ref, "IfNotPresent")
	refusal = refused(t, ifNotPresent, realnode.ContainerSpec{}, "for namespace team-b access to it is not proven")
	assert.Contains(t, refusal, "trust_present = true")
	assert.Contains(t, refusal, "registry refused access")

	// Once the namespace's own secret has pulled it.
	require.NoError(t, pullWith(ref, "secret", "team-b"))
	for _, pod := range []*realnode.Pod{never, ifNotPresent} {
		assert.Equal(t, "secret", sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /models/version"))
	}

	// With credentials of the node it is everyone's, for one request.
	setNodes(string(nodes))
	require.NoError(t, n.Proxy().ResetCounts(t.Context()))
	gets("team-c", ref, "IfNotPresent")
	counts := requests(t, n)
	require.Len(t, counts, 1, "%v", counts)
	assert.Contains(t, slices.Collect(maps.Keys(counts))[0], "/v2/access/model/manifests/sha256:")
	setNodes("{}")
	require.NoError(t, n.Proxy().ResetCounts(t.Context()))
	gets("team-d", ref, "IfNotPresent")
	gets("team-e", ref, "Never")
	assert.Empty(t, requests(t, n))

	// The setting trusts whatever is there.
	other := push(t, n, "access/other:1", version("secret"), version("secret"))
	require.NoError(t, pullWith(other, "secret", "team-a"))
	pod := podOf("team-b", other, "Never")
	refused(t, pod, realnode.ContainerSpec{}, "trust_present")
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	dir := n.OciholdConf() + ".d"
	require.NoError(t, os.MkdirAll(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "60-trust.toml"), []byte("[volumes]\ntrust_present = true\n"), 0o644))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	require.NoError(t, n.Proxy().ResetCounts(t.Context()))
	assert.Equal(t, "secret", sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /models/version"))
	gets("team-z", other, "IfNotPresent")
	assert.Empty(t, requests(t, n))
}
