package integration

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
	"github.com/ocihold/ocihold/test/token"
)

// authFileFor is an auth file with one entry for the node's registry.
func authFileFor(t testing.TB, n *realnode.Node, entry map[string]string) []byte {
	t.Helper()
	content, err := json.Marshal(map[string]any{"auths": map[string]any{n.Registry(): entry}})
	require.NoError(t, err)
	return content
}

func basic(user, password string) string {
	return base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
}

// pullIn pulls as kubelet does for a pod of a namespace.
func pullIn(t testing.TB, n *realnode.Node, namespace, handler, ref string, auth *cri.AuthConfig) (string, error) {
	t.Helper()
	answer, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{
		Image: &cri.ImageSpec{Image: ref, RuntimeHandler: handler}, Auth: auth,
		SandboxConfig: &cri.PodSandboxConfig{Metadata: &cri.PodSandboxMetadata{Name: "p", Namespace: namespace, Uid: "u"}},
	})
	return answer.GetImageRef(), err
}

// TestTokenRegistry pulls from a registry that takes tokens only, by all that
// may stand for them: a password, a refresh token, a token.
func TestTokenRegistry(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, TLS: true, Auth: "user:secret", Tokens: true})
	require.Regexp(t, `^Bearer realm="https://`+n.Registry()+`/token",`, challenge(t, n))
	nodes := authFileFor(t, n, map[string]string{"auth": basic("user", "secret")})
	setNodes := func(content []byte) { require.NoError(t, os.WriteFile(n.AuthFile(), content, 0o600)) }

	for _, handler := range []string{"", "vm"} {
		t.Run("handler "+handler, func(t *testing.T) {
			repository := "tokens/app" + handler
			image, err := images.Image(images.Config{}, version(handler))
			require.NoError(t, err)
			require.NoError(t, n.Push(t.Context(), repository+":1", image))
			ref := n.Ref(repository + ":1")
			own, err := n.Token(repository)
			require.NoError(t, err)
			another, err := n.Token("tokens/other")
			require.NoError(t, err)
			for name, tc := range map[string]struct {
				auth *cri.AuthConfig
				file map[string]string
				gets bool
			}{
				"password":                     {auth: &cri.AuthConfig{Username: "user", Password: "secret"}, gets: true},
				"password, encoded":            {auth: &cri.AuthConfig{Auth: basic("user", "secret")}, gets: true},
				"wrong password":               {auth: &cri.AuthConfig{Username: "user", Password: "secret2"}},
				"wrong password, right file":   {auth: &cri.AuthConfig{Username: "user", Password: "secret2"}, file: map[string]string{"auth": basic("user", "secret")}},
				"identity token":               {auth: &cri.AuthConfig{IdentityToken: token.RefreshToken("user", "secret")}, gets: true},
				"wrong identity token":         {auth: &cri.AuthConfig{IdentityToken: token.RefreshToken("user", "secret2")}},
				"registry token":               {auth: &cri.AuthConfig{RegistryToken: own}, gets: true},
				"another's registry token":     {auth: &cri.AuthConfig{RegistryToken: another}},
				"no registry token":            {auth: &cri.AuthConfig{RegistryToken: "secret2"}},
				"file with password":           {file: map[string]string{"auth": basic("user", "secret")}, gets: true},
				"file with wrong password":     {file: map[string]string{"auth": basic("user", "secret2")}},
				"file with identity token":     {file: map[string]string{"auth": basic("user", ""), "identitytoken": token.RefreshToken("user", "secret")}, gets: true},
				"file with wrong identity":     {file: map[string]string{"auth": basic("user", ""), "identitytoken": token.RefreshToken("user", "secret2")}},
				"nothing":                      {},
				"password beside another file": {auth: &cri.AuthConfig{Username: "user", Password: "secret"}, file: map[string]string{"auth": basic("user", "secret2")}, gets: true},
			} {
				t.Run(name, func(t *testing.T) {
					setNodes(authFileFor(t, n, tc.file))
					got, err := pullAs(t, n, handler, ref, tc.auth)
					if !tc.gets {
						assertNoAccess(t, err)
						assertAbsent(t, n, ref)
						return
					}
					require.NoError(t, err)
					assert.Equal(t, configID(t, image), got)
					require.NoError(t, removeFrom(t, n, handler, got))
				})
			}
			t.Run("credential helper", func(t *testing.T) {
				helper, err := json.Marshal(map[string]any{"credHelpers": map[string]string{n.Registry(): "node"}})
				require.NoError(t, err)
				setNodes(helper)
				answer := func(password string) {
					script := "#!/bin/sh\necho '{\"ServerURL\": \"" + n.Registry() + "\", \"Username\": \"user\", \"Secret\": \"" + password + "\"}'\n"
					require.NoError(t, os.WriteFile(filepath.Join(n.Dir(), "bin", "docker-credential-node"), []byte(script), 0o755))
				}
				answer("secret2")
				_, err = pullAs(t, n, handler, ref, nil)
				assertNoAccess(t, err)
				answer("secret")
				got, err := pullAs(t, n, handler, ref, nil)
				require.NoError(t, err)
				assert.Equal(t, configID(t, image), got)
				require.NoError(t, removeFrom(t, n, handler, got))
			})
			t.Run("volume", func(t *testing.T) {
				setNodes(authFileFor(t, n, map[string]string{"auth": basic("user", "secret2")}))
				pod := runPod(t, n, realnode.PodSpec{Handler: handler, Annotations: volumes(t, volume{Image: ref, MountPath: "/app"})})
				refused(t, pod, realnode.ContainerSpec{}, "registry refused access")
				setNodes(nodes)
				assert.Equal(t, handler, sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /app/version"))
				require.NoError(t, pod.Remove(t.Context()))
			})
		})
	}
	t.Run("auth files of namespaces", func(t *testing.T) { testNamespacedAuthFiles(t, n, setNodes) })
	n.AssertClean(t)
	log, err := os.ReadFile(n.LogFile(realnode.Ocihold))
	require.NoError(t, err)
	for _, secret := range []string{"secret", basic("user", "secret"), token.RefreshToken("user", "secret"), "eyJ"} {
		assert.NotContains(t, string(log), secret)
	}
}

// testNamespacedAuthFiles leaves auth files as CRI-O's credential provider
// does, each for one pull.
func testNamespacedAuthFiles(t *testing.T, n *realnode.Node, setNodes func([]byte)) {
	setNodes([]byte("{}"))
	ref := push(t, n, "tokens/namespaced:1", version("private"))
	dir := filepath.Join(n.Dir(), "etc", "auth")
	leave := func(namespace, password string) string {
		file := filepath.Join(dir, fmt.Sprintf("%s-%x.json", namespace, sha256.Sum256([]byte(strings.TrimSuffix(ref, ":1")))))
		require.NoError(t, os.WriteFile(file, authFileFor(t, n, map[string]string{"auth": basic("user", password)}), 0o600))
		return file
	}
	requireTaken := func(file string) {
		require.NoFileExists(t, file)
		left, err := os.ReadDir(filepath.Join(dir, "in-use"))
		require.NoError(t, err)
		require.Empty(t, left)
	}

	right := leave("team-a", "secret")
	_, err := pullIn(t, n, "team-b", "vm", ref, nil)
	assertNoAccess(t, err)
	_, err = pullIn(t, n, "", "vm", ref, nil)
	assertNoAccess(t, err)
	require.FileExists(t, right)
	_, err = pullIn(t, n, "team-a", "vm", ref, nil)
	require.NoError(t, err)
	requireTaken(right)
	_, err = pullIn(t, n, "team-a", "vm", ref, nil)
	assertNoAccess(t, err)
	wrong := leave("team-a", "secret2")
	_, err = pullIn(t, n, "team-a", "vm", ref, nil)
	assertNoAccess(t, err)
	requireTaken(wrong)

	// It has proven access for its namespace, and for no other.
	podOf := func(namespace string) *realnode.Pod {
		return runPod(t, n, realnode.PodSpec{
			Namespace: namespace, Handler: "vm",
			Annotations: volumes(t, volume{Image: ref, MountPath: "/app", PullPolicy: "IfNotPresent"}),
		})
	}
	own, other := podOf("team-a"), podOf("team-b")
	assert.Equal(t, "private", sh(t, run(t, own, realnode.ContainerSpec{}), "cat /app/version"))
	refused(t, other, realnode.ContainerSpec{}, "for namespace team-b access to it is not proven")
	require.NoError(t, own.Remove(t.Context()))
	require.NoError(t, other.Remove(t.Context()))
}

// challenge is what the registry asks those for who give no credentials.
func challenge(t testing.TB, n *realnode.Node) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
		DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+n.Registry()+"/v2/", nil)
	require.NoError(t, err)
	resp, err := client.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.Header.Get("WWW-Authenticate")
}
