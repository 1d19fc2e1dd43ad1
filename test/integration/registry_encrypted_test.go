package integration

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"

	encconfig "github.com/containers/ocicrypt/config"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/copy"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestEncryptedImage pulls an image that is encrypted for a key, with and
// without that key in CRI-O's decryption_keys_path.
func TestEncryptedImage(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	recipient, key := newRecipient(t)
	keys := filepath.Join(n.Dir(), "etc", "keys")
	private := filepath.Join(keys, "images", "app.pem")
	require.NoError(t, os.Mkdir(filepath.Dir(private), 0o700))
	giveKey := func() { require.NoError(t, os.WriteFile(private, key, 0o600)) }
	takeKey := func() { require.NoError(t, os.Remove(private)) }

	for _, handler := range []string{"", "vm"} {
		t.Run("handler "+handler, func(t *testing.T) {
			repository := "encrypted/app" + handler
			plain := runnable(t, n, "plain/app"+handler+":1", "secret of "+handler)
			recopy(t, n, "plain/app"+handler+":1", repository+":1", copy.Options{
				OciEncryptConfig: recipient.EncryptConfig, OciEncryptLayers: &[]int{},
			})
			tag, err := name.ParseReference(n.Ref(repository+":1"), name.Insecure)
			require.NoError(t, err)
			encrypted, err := remote.Image(tag, remote.WithTransport(n.RegistryTransport()))
			require.NoError(t, err)
			digest, err := encrypted.Digest()
			require.NoError(t, err)
			index, err := images.Index(encrypted)
			require.NoError(t, err)
			require.NoError(t, n.Push(t.Context(), repository+":index", index))
			id := configID(t, plain)

			for kind, ref := range map[string]string{
				"tag": n.Ref(repository + ":1"), "digest": n.Ref(repository + "@" + digest.String()), "index": n.Ref(repository + ":index"),
			} {
				t.Run(kind, func(t *testing.T) {
					_, err := pullAs(t, n, handler, ref, nil)
					requireLocked(t, err, keys)
					assertAbsent(t, n, ref)

					giveKey()
					got, err := pullAs(t, n, handler, ref, nil)
					require.NoError(t, err)
					assert.Equal(t, id, got)
					pod := runPod(t, n, realnode.PodSpec{Handler: handler})
					c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: ref})
					assert.Equal(t, "secret of "+handler, sh(t, c, "cat /version"))

					require.NoError(t, n.Proxy().ResetCounts(t.Context()))
					got, err = pullAs(t, n, handler, ref, nil)
					require.NoError(t, err)
					assert.Equal(t, id, got)
					for request := range requests(t, n) {
						assert.Contains(t, request, "/manifests/", "nothing is transferred again")
					}

					takeKey()
					_, err = pullAs(t, n, handler, ref, nil)
					requireLocked(t, err, keys)
					require.NoError(t, pod.Remove(t.Context()))
					require.NoError(t, removeFrom(t, n, handler, id))
				})
			}
		})
	}

	// A namespace that has not pulled it gets it as a volume only from a node
	// that has the key still.
	ref := n.Ref("encrypted/app:1")
	giveKey()
	_, err := pullAs(t, n, "", ref, &cri.AuthConfig{Username: "any", Password: "one"})
	require.NoError(t, err)
	takeKey()
	pod := runPod(t, n, realnode.PodSpec{Namespace: "other", Annotations: volumes(t, volume{Image: ref, MountPath: "/app", PullPolicy: "IfNotPresent"})})
	text := refused(t, pod, realnode.ContainerSpec{}, "access to it is not proven")
	assert.Contains(t, text, "image is encrypted")
	giveKey()
	c := run(t, pod, realnode.ContainerSpec{})
	assert.Equal(t, "secret of ", sh(t, c, "cat /app/version"))
	require.NoError(t, pod.Remove(t.Context()))

	// What is no key is named, and hinders no other image.
	require.NoError(t, os.WriteFile(filepath.Join(keys, "notes.txt"), []byte("no key"), 0o600))
	_, err = pullAs(t, n, "vm", ref, nil)
	require.ErrorContains(t, err, "read the decryption keys in "+keys+": notes.txt: ")
	_, err = pullAs(t, n, "vm", n.Ref("plain/app:1"), nil)
	require.NoError(t, err)
	n.AssertClean(t)
}

// newRecipient is whom images are encrypted for, and the key to open them.
func newRecipient(t testing.TB) (recipient encconfig.CryptoConfig, private []byte) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	recipient, err = encconfig.EncryptWithJwe([][]byte{pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})})
	require.NoError(t, err)
	return recipient, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
}

func requireLocked(t *testing.T, err error, keys string) {
	t.Helper()
	require.ErrorContains(t, err, "image is encrypted: layer sha256:")
	require.ErrorContains(t, err, "no key in "+keys+" (CRI-O's decryption_keys_path) opens it")
	assert.NotContains(t, strings.TrimSpace(err.Error()), "\n")
}
