package integration

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// pullAs pulls through ocihold with credentials of CRI; nil for none.
func pullAs(t *testing.T, n *realnode.Node, handler, ref string, auth *cri.AuthConfig) (string, error) {
	t.Helper()
	return pullIn(t, n, "default", handler, ref, auth)
}

// TestPullsWithCredentialsShareTransfers pulls 8 images at once for two
// handlers with 4 credentials, one of them bad, each by two callers.
func TestPullsWithCredentialsShareTransfers(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, TLS: true, Auth: "user:secret"})
	const all, bad = 8, "mallory"
	users := []string{"user", "alice", "bob", bad}
	var known strings.Builder
	for _, name := range users {
		if name == bad {
			continue
		}
		hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
		require.NoError(t, err)
		fmt.Fprintf(&known, "%s:%s\n", name, hash)
	}
	require.NoError(t, os.WriteFile(filepath.Join(n.Dir(), "etc", "htpasswd"), []byte(known.String()), 0o600))
	refs, ids := make([]string, all), make([]string, all)
	for i := range all {
		image, err := images.Image(images.Config{}, []images.Entry{images.Big("big", 1<<20, uint64(i))})
		require.NoError(t, err)
		repository := fmt.Sprintf("shared/app-%d:1", i)
		require.NoError(t, n.Push(t.Context(), repository, image))
		refs[i], ids[i] = n.Ref(repository), configID(t, image)
	}
	require.NoError(t, n.Proxy().ResetCounts(t.Context()))
	// No transfer gets past its manifest until all callers are there.
	require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: "/manifests/", Stall: new(int64(0))}))

	handlers := []string{"", "vm"}
	type outcome struct {
		image, user, id string
		err             error
	}
	outcomes := make(chan outcome, 2*len(handlers)*all*len(users))
	var callers sync.WaitGroup
	for i, ref := range refs {
		for _, handler := range handlers {
			for _, user := range users {
				for range 2 {
					callers.Go(func() {
						id, err := pullAs(t, n, handler, ref, &cri.AuthConfig{Username: user, Password: "secret"})
						outcomes <- outcome{ids[i], user, id, err}
					})
				}
			}
		}
	}
	manifests := func(counts map[string]int) (sum int) {
		for request, n := range counts {
			if strings.Contains(request, "/manifests/") {
				sum += n
			}
		}
		return sum
	}
	require.Eventually(t, func() bool {
		return manifests(requests(t, n)) >= len(handlers)*all*len(users)
	}, 60*time.Second, 20*time.Millisecond)
	time.Sleep(time.Second) // for callers that share none
	require.NoError(t, n.Proxy().Clear(t.Context()))
	callers.Wait()
	close(outcomes)
	for o := range outcomes {
		if o.user == bad {
			assertNoAccess(t, o.err)
			continue
		}
		require.NoError(t, o.err)
		assert.Equal(t, o.image, o.id)
	}
	counts := requests(t, n)
	assert.Equal(t, len(handlers)*all*len(users), manifests(counts), "one for each image, handler and credentials")
	for request, got := range counts {
		if strings.Contains(request, "/blobs/") {
			assert.LessOrEqual(t, got, len(handlers)*(len(users)-1), request)
		}
	}

	// That the image is on the node now opens it to no one.
	for _, handler := range handlers {
		_, err := pullAs(t, n, handler, refs[0], &cri.AuthConfig{Username: bad, Password: "secret"})
		assertNoAccess(t, err)
	}
	log, err := os.ReadFile(n.LogFile(realnode.Ocihold))
	require.NoError(t, err)
	assert.NotContains(t, string(log), "secret")
	n.AssertClean(t)
}

// assertNoAccess holds that the registry refused the credentials, which is
// nothing that time mends.
func assertNoAccess(t *testing.T, err error) {
	t.Helper()
	require.ErrorContains(t, err, "registry refused access")
	assert.NotContains(t, err.Error(), "RegistryUnavailable")
	assert.NotContains(t, err.Error(), "secret")
	assert.Equal(t, codes.PermissionDenied, status.Code(err))
}

// TestPrivateRegistry pulls from a registry with TLS and a password, by the
// settings that CRI-O has for it.
func TestPrivateRegistry(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, TLS: true, Auth: "user:secret"})
	config := filepath.Join(n.Dir(), "home", ".config", "containers")
	registries := fmt.Sprintf("[[registry]]\nlocation = \"origin.invalid\"\n[[registry.mirror]]\nlocation = %q\n"+
		"[[registry]]\nlocation = %q\nblocked = true\n", n.Ref("mirrored"), n.Ref("blocked"))
	require.NoError(t, os.WriteFile(filepath.Join(config, "registries.conf.d", "50-test.conf"), []byte(registries), 0o600))
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	authFile, err := os.ReadFile(n.AuthFile())
	require.NoError(t, err)

	for _, handler := range []string{"", "vm"} {
		t.Run("handler "+handler, func(t *testing.T) {
			image := func(repository string) (ref, id string) {
				image, err := images.Image(images.Config{}, []images.Entry{images.File("f", repository+handler, 0o644)})
				require.NoError(t, err)
				require.NoError(t, n.Push(t.Context(), repository+":1", image))
				return n.Ref(repository + ":1"), configID(t, image)
			}
			pulls := func(t *testing.T, ref, id string, auth *cri.AuthConfig) {
				t.Helper()
				got, err := pullAs(t, n, handler, ref, auth)
				require.NoError(t, err)
				assert.Equal(t, id, got)
				require.NoError(t, removeFrom(t, n, "", id))
			}
			t.Run("auth file", func(t *testing.T) {
				ref, id := image("private/file")
				pulls(t, ref, id, nil)
			})
			t.Run("credentials of CRI", func(t *testing.T) {
				require.NoError(t, os.WriteFile(n.AuthFile(), []byte("{}"), 0o600))
				t.Cleanup(func() { require.NoError(t, os.WriteFile(n.AuthFile(), authFile, 0o600)) })
				ref, id := image("private/cri")
				_, err := pullAs(t, n, handler, ref, nil)
				assertNoAccess(t, err)
				_, err = pullAs(t, n, handler, ref, &cri.AuthConfig{Username: "user", Password: "wrong"})
				assertNoAccess(t, err)
				pulls(t, ref, id, &cri.AuthConfig{Username: "user", Password: "secret"})
				pulls(t, ref, id, &cri.AuthConfig{Auth: base64.StdEncoding.EncodeToString([]byte("user:secret"))})
			})
			t.Run("mirror", func(t *testing.T) {
				_, id := image("mirrored/app")
				pulls(t, "origin.invalid/app:1", id, nil)
			})
			t.Run("blocked", func(t *testing.T) {
				ref, _ := image("blocked/app")
				_, err := pullAs(t, n, handler, ref, nil)
				require.ErrorContains(t, err, "blocked in")
				assert.NotContains(t, err.Error(), "RegistryUnavailable")
				assert.Equal(t, codes.Unknown, status.Code(err))
				assertAbsent(t, n, ref)
			})
			t.Run("unreachable", func(t *testing.T) {
				ref, _ := image("private/away")
				require.NoError(t, n.Kill(t.Context(), realnode.Proxy, syscall.SIGKILL))
				t.Cleanup(func() { require.NoError(t, n.Start(context.WithoutCancel(t.Context()), realnode.Proxy)) })
				_, err := pullAs(t, n, handler, ref, nil)
				require.ErrorContains(t, err, "desc = RegistryUnavailable: ")
				assert.Equal(t, codes.Unknown, status.Code(err))
			})
			t.Run("signatures", func(t *testing.T) { testUnsigned(t, n, handler, config, image, pulls) })
		})
	}
	n.AssertClean(t)
}

// testUnsigned pulls unsigned images under policies that want signatures or
// nothing at all.
func testUnsigned(t *testing.T, n *realnode.Node, handler, config string,
	image func(string) (ref, id string), pulls func(t *testing.T, ref, id string, auth *cri.AuthConfig),
) {
	file := filepath.Join(config, "policy.json")
	before, err := os.ReadFile(file)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.WriteFile(file, before, 0o600)) })
	accept, reject := []any{map[string]any{"type": "insecureAcceptAnything"}}, []any{map[string]any{"type": "reject"}}
	signed := []any{map[string]any{"type": "sigstoreSigned", "keyData": publicKey(t)}}
	write := func(file string, byDefault any) {
		text, err := json.Marshal(map[string]any{"default": byDefault, "transports": map[string]any{"docker": map[string]any{
			n.Ref("signed"): signed, n.Ref("rejected"): reject,
		}}})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, text, 0o600))
	}
	rejected := func(ref, why string) {
		t.Helper()
		_, err := pullAs(t, n, handler, ref, nil)
		require.ErrorContains(t, err, "desc = SignatureValidationFailed: ")
		require.ErrorContains(t, err, why)
		assert.Equal(t, codes.Unknown, status.Code(err))
		assertAbsent(t, n, ref)
	}
	write(file, accept)
	free, freeID := image("free/app")
	pulls(t, free, freeID, nil)
	unsigned, _ := image("signed/app")
	rejected(unsigned, "signature was required")
	forbidden, forbiddenID := image("rejected/app")
	rejected(forbidden, "rejected by policy")

	// What is on the node is pulled again under the policy of this moment.
	require.NoError(t, os.WriteFile(file, before, 0o600))
	id, err := pullAs(t, n, handler, forbidden, nil)
	require.NoError(t, err)
	require.Equal(t, forbiddenID, id)
	write(file, accept)
	_, err = pullAs(t, n, handler, forbidden, nil)
	require.ErrorContains(t, err, "desc = SignatureValidationFailed: ")
	require.NoError(t, removeFrom(t, n, "", id))

	// A namespace may have a policy of its own.
	own := filepath.Join(n.Dir(), "etc", "policies", "default.json")
	write(own, reject)
	rejected(free, "rejected by policy")
	require.NoError(t, os.Remove(own))
	pulls(t, free, freeID, nil)
}

// publicKey is a public key in the form that a signature policy takes.
func publicKey(t *testing.T) string {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}
