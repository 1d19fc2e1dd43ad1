package integration

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/signature/signer"
	"go.podman.io/image/v5/signature/sigstore"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestSignedImages pulls images with sigstore signatures, and without, under
// policies that want one of a certain key: the node's, a namespace's, and a
// handler's own.
func TestSignedImages(t *testing.T) {
	ours, theirs := newSigner(t), newSigner(t)
	own := filepath.Join(t.TempDir(), "policy.json")
	settings := filepath.Join(t.TempDir(), "signed.toml")
	require.NoError(t, os.WriteFile(settings, []byte("[handlers.vm]\nsignature_policy = \""+own+"\"\n"), 0o600))
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: settings})
	require.NoError(t, os.Mkdir(registriesDir(n), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(registriesDir(n), "node.yaml"),
		[]byte("docker:\n  "+n.Registry()+":\n    use-sigstore-attachments: true\n"), 0o644))
	node := filepath.Join(n.Dir(), "home", ".config", "containers", "policy.json")
	accept, err := os.ReadFile(node)
	require.NoError(t, err)
	recipient, key := newRecipient(t)
	require.NoError(t, os.WriteFile(filepath.Join(n.Dir(), "etc", "keys", "key.pem"), key, 0o600))
	free := func(file string) { require.NoError(t, os.WriteFile(file, accept, 0o600)) }
	strict := func(file string) {
		require.NoError(t, os.WriteFile(file, policyFor(t, n.Ref("signed"), ours.public), 0o600))
	}
	free(own)

	ids := map[string]string{}
	pushed := func(repository string, by *signer.Signer) string {
		linux, err := images.Image(images.Config{}, version(repository))
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), repository+":unsigned", linux))
		ref := n.Ref(repository + ":1")
		ids[ref] = configID(t, linux)
		opt := copy.Options{ImageListSelection: copy.CopyAllImages}
		if by != nil {
			opt.Signers = []*signer.Signer{by}
		}
		recopy(t, n, repository+":unsigned", repository+":1", opt)
		return ref
	}
	right, wrong, unsigned := pushed("signed/right", ours.Signer), pushed("signed/wrong", theirs.Signer), pushed("signed/none", nil)
	recopy(t, n, "signed/right:1", "signed/moved:1", copy.Options{})
	moved := n.Ref("signed/moved:1")
	linux, err := images.Image(images.Config{}, version("index"))
	require.NoError(t, err)
	wasm, err := images.Image(images.Config{Platform: "wasi/wasm"}, version("index"))
	require.NoError(t, err)
	index, err := images.Index(linux, wasm)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "signed/index:unsigned", index))
	recopy(t, n, "signed/index:unsigned", "signed/index:1", copy.Options{
		ImageListSelection: copy.CopyAllImages, Signers: []*signer.Signer{ours.Signer},
	})
	list := n.Ref("signed/index:1")
	ids[list] = configID(t, linux)

	plain := runnable(t, n, "plain/app:1", "encrypted")
	encrypt := func(ref string, by signingKey) string {
		recopy(t, n, "plain/app:1", ref, copy.Options{
			OciEncryptConfig: recipient.EncryptConfig, OciEncryptLayers: &[]int{}, Signers: []*signer.Signer{by.Signer},
		})
		return n.Ref(ref)
	}
	encrypted, encryptedWrong := encrypt("signed/encrypted:1", ours), encrypt("signed/encrypted:2", theirs)
	ids[encrypted] = configID(t, plain)

	passes := func(t *testing.T, namespace, handler, ref string) {
		t.Helper()
		for range 2 { // the image that is there already is looked at, too
			got, err := pullIn(t, n, namespace, handler, ref, nil)
			require.NoError(t, err)
			assert.Equal(t, ids[ref], got)
		}
		require.NoError(t, removeFrom(t, n, "", ids[ref]))
	}
	refuses := func(t *testing.T, namespace, handler, ref, why string) {
		t.Helper()
		_, err := pullIn(t, n, namespace, handler, ref, nil)
		require.ErrorContains(t, err, "desc = SignatureValidationFailed: ")
		require.ErrorContains(t, err, why)
		assertAbsent(t, n, ref)
	}
	check := func(t *testing.T, namespace, handler string) {
		t.Helper()
		passes(t, namespace, handler, right)
		passes(t, namespace, handler, list)
		passes(t, namespace, handler, encrypted)
		refuses(t, namespace, handler, unsigned, "signature was required")
		refuses(t, namespace, handler, wrong, "cryptographic signature verification failed")
		refuses(t, namespace, handler, encryptedWrong, "cryptographic signature verification failed")
		refuses(t, namespace, handler, moved, "identity")
	}
	t.Run("signature_policy of CRI-O", func(t *testing.T) {
		strict(node)
		defer free(node)
		check(t, "default", "")
		passes(t, "default", "vm", right) // which has a policy of its own
		_, err := pullIn(t, n, "default", "vm", unsigned, nil)
		require.NoError(t, err)
		pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: unsigned, MountPath: "/app"})})
		refused(t, pod, realnode.ContainerSpec{}, "signature policy rejects the image")
		require.NoError(t, pod.Remove(t.Context()))
		require.NoError(t, removeFrom(t, n, "", ids[unsigned]))
	})
	t.Run("signature_policy_dir of CRI-O", func(t *testing.T) {
		policies := filepath.Join(n.Dir(), "etc", "policies", "team-a.json")
		strict(policies)
		defer func() { require.NoError(t, os.Remove(policies)) }()
		check(t, "team-a", "")
		check(t, "team-a", "vm")
		passes(t, "team-b", "", unsigned)
	})
	t.Run("policy of a handler", func(t *testing.T) {
		strict(own)
		defer free(own)
		check(t, "default", "vm")
		passes(t, "default", "", unsigned)
	})
	n.AssertClean(t)
}

// signingKey signs images.
type signingKey struct {
	*signer.Signer

	public []byte
}

func newSigner(t testing.TB) signingKey {
	t.Helper()
	pair, err := sigstore.GenerateKeyPair([]byte("passphrase"))
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "sigstore.key")
	require.NoError(t, os.WriteFile(file, pair.PrivateKey, 0o600))
	s, err := sigstore.NewSigner(sigstore.WithPrivateKeyFile(file, []byte("passphrase")))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return signingKey{s, pair.PublicKey}
}

// policyFor is a policy.json that wants a sigstore signature of the key for
// what is in the scope, and nothing of other images.
func policyFor(t testing.TB, scope string, public []byte) []byte {
	t.Helper()
	content, err := json.Marshal(map[string]any{
		"default": []any{map[string]any{"type": "insecureAcceptAnything"}},
		"transports": map[string]any{"docker": map[string]any{
			scope: []any{map[string]any{"type": "sigstoreSigned", "keyData": public}},
		}},
	})
	require.NoError(t, err)
	return content
}
