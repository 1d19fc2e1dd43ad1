package integration

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/signature/signer"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestSignedArtifacts pulls artifacts under a policy that wants the sigstore
// signature of a certain key.
func TestSignedArtifacts(t *testing.T) {
	ours, theirs := newSigner(t), newSigner(t)
	n := realnode.Boot(t, realnode.Options{})
	require.NoError(t, os.Mkdir(registriesDir(n), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(registriesDir(n), "node.yaml"),
		[]byte("docker:\n  "+n.Registry()+":\n    use-sigstore-attachments: true\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(n.Dir(), "home", ".config", "containers", "policy.json"), policyFor(t, n.Ref("signed"), ours.public), 0o600))
	pushed := func(repository string, by *signer.Signer) string {
		content, err := images.Artifact("application/vnd.test", images.Blob{MediaType: "text/plain", Title: "f", Content: []byte(repository)})
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), repository+":unsigned", content))
		opt := copy.Options{}
		if by != nil {
			opt.Signers = []*signer.Signer{by}
		}
		recopy(t, n, repository+":unsigned", repository+":1", opt)
		return n.Ref(repository + ":1")
	}
	right, wrong, unsigned := pushed("signed/right", ours.Signer), pushed("signed/wrong", theirs.Signer), pushed("signed/none", nil)

	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: right, MountPath: "/volume"})})
	assertFiles(t, run(t, pod, realnode.ContainerSpec{}), "volume", map[string]string{"f": "signed/right"})
	require.NoError(t, pod.Remove(t.Context()))

	for ref, why := range map[string]string{unsigned: "signature was required", wrong: "cryptographic signature verification failed"} {
		require.NoError(t, n.Proxy().ResetCounts(t.Context()))
		_, err := pullAs(t, n, "", ref, nil)
		require.ErrorContains(t, err, "desc = SignatureValidationFailed: ")
		require.ErrorContains(t, err, why)
		assertAbsent(t, n, ref)
		pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
		refused(t, pod, realnode.ContainerSpec{}, "signature policy rejects the image")
		require.NoError(t, pod.Remove(t.Context()))
		blob := digest.FromString(strings.TrimSuffix(strings.TrimPrefix(ref, n.Registry()+"/"), ":1")).String()
		for request := range requests(t, n) {
			assert.NotContains(t, request, blob, "before it is allowed")
		}
	}

	// CRI-O wants a signature of what was made of it.
	id := pullFor(t, n, "", right)
	mount := native(right, "/volume", "")
	mount.Image.Image = id
	pod = runPod(t, n, realnode.PodSpec{})
	_, err := pod.Create(t.Context(), realnode.ContainerSpec{Mounts: []*cri.Mount{mount}})
	require.ErrorContains(t, err, "SignatureValidationFailed")
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
