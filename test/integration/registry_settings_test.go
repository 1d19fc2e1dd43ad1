package integration

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestStallTimeout has a registry stop in the middle of a layer, and before its
// manifest: the pull ends by itself.
func TestStallTimeout(t *testing.T) {
	settings := filepath.Join(t.TempDir(), "pull.toml")
	require.NoError(t, os.WriteFile(settings, []byte("[pull]\nstall_timeout = \"3s\"\n"), 0o600))
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: settings})
	t.Cleanup(func() { require.NoError(t, n.Proxy().Clear(context.WithoutCancel(t.Context()))) })
	ref := push(t, n, "stalls/app:1", []images.Entry{images.Big("big", 4<<20, 7)})
	for name, tc := range map[string]struct {
		handler string
		rule    proxy.Rule
	}{
		"layer":    {"", proxy.Rule{Path: "/stalls/app/blobs/", Skip: 1, Stall: new(int64(1 << 20))}},
		"manifest": {"vm", proxy.Rule{Path: "/stalls/app/manifests/", Stall: new(int64(0))}},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, n.Proxy().Add(t.Context(), tc.rule))
			_, err := pullAs(t, n, tc.handler, ref, nil)
			require.ErrorContains(t, err, "desc = RegistryUnavailable: ")
			require.ErrorContains(t, err, "3s")
			assert.Equal(t, codes.Unknown, status.Code(err))
			assertAbsent(t, n, ref)
			assertNoDownloads(t, n)
		})
	}
	n.AssertClean(t)
}

// TestBigFilesTemporaryDir looks where a download is while it is under way.
func TestBigFilesTemporaryDir(t *testing.T) {
	elsewhere := t.TempDir()
	dropIn := filepath.Join(t.TempDir(), "big.conf")
	require.NoError(t, os.WriteFile(dropIn, []byte("[crio.image]\nbig_files_temporary_dir = \""+elsewhere+"\"\n"), 0o600))
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, CRIOConf: []string{dropIn}})
	ref := push(t, n, "big/app:1", []images.Entry{images.Big("big", 4<<20, 8)})
	for _, handler := range []string{"", "vm"} {
		require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: "/big/app/blobs/", Skip: 1, Stall: new(int64(2 << 20))}))
		var pulls sync.WaitGroup
		pulls.Go(func() {
			_, err := pullAs(t, n, handler, ref, nil)
			assert.NoError(t, err)
		})
		require.Eventually(t, func() bool {
			files, err := filepath.Glob(filepath.Join(elsewhere, "ocihold", "downloads", "*", "*"))
			return assert.NoError(t, err) && slices.ContainsFunc(files, func(file string) bool {
				info, err := os.Stat(file)
				return err == nil && info.Size() > 0
			})
		}, time.Minute, 20*time.Millisecond, "the layer is there")
		assertNoDownloads(t, n) // in no other place
		require.NoError(t, n.Proxy().Clear(t.Context()))
		pulls.Wait()
		left, err := filepath.Glob(filepath.Join(elsewhere, "ocihold", "downloads", "*", "*"))
		require.NoError(t, err)
		assert.Empty(t, left)
	}
	n.AssertClean(t)
}

// TestProxyEnvironment pulls from a registry that is to be reached through a
// proxy only, as the daemon's environment says.
func TestProxyEnvironment(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	const host = "behind.invalid"
	config := filepath.Join(n.Dir(), "home", ".config", "containers")
	require.NoError(t, os.WriteFile(filepath.Join(config, "registries.conf.d", "behind.conf"),
		[]byte("[[registry]]\nlocation = \""+host+"\"\ninsecure = true\n"), 0o644))
	forward := newForwardProxy(t, host+":80", n.Registry())
	restartWith := func(env map[string]string) {
		for name, value := range env {
			t.Setenv(name, value)
		}
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	}
	image, err := images.Image(images.Config{}, version("behind"))
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "team/app:1", image))
	ref := host + "/team/app:1"
	absent := func() {
		_, err := pullAs(t, n, "vm", ref, nil)
		require.ErrorContains(t, err, "desc = RegistryUnavailable: ")
		require.ErrorContains(t, err, host)
	}
	absent()

	restartWith(map[string]string{"HTTP_PROXY": forward.URL, "HTTPS_PROXY": forward.URL})
	for _, handler := range []string{"", "vm"} {
		forward.forget()
		id, err := pullAs(t, n, handler, ref, nil)
		require.NoError(t, err)
		assert.Equal(t, configID(t, image), id)
		assert.NotEmpty(t, forward.blobs(), "by the proxy")
		require.NoError(t, removeFrom(t, n, "", id))
	}
	forward.forget()
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/app"})})
	assert.Equal(t, "behind", sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /app/version"))
	assert.NotEmpty(t, forward.blobs())
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)

	restartWith(map[string]string{"NO_PROXY": host})
	forward.forget()
	absent()
	assert.Empty(t, forward.blobs())
	_, err = n.OciholdRuntime().Version(t.Context(), &cri.VersionRequest{})
	require.NoError(t, err, "CRI-O is asked at its socket, whatever the proxy")
}

// forwardProxy is an HTTP proxy that knows one server, by a name that no one
// else knows.
type forwardProxy struct {
	*httptest.Server

	mu       sync.Mutex
	requests []string
}

func newForwardProxy(t testing.TB, host, address string) *forwardProxy {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
	p := &forwardProxy{}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		p.requests = append(p.requests, r.Method+" "+r.URL.String())
		p.mu.Unlock()
		if _, _, err := net.SplitHostPort(r.Host); err != nil {
			r.Host += ":80"
		}
		if r.Method == http.MethodConnect || r.Host != host {
			http.Error(w, "not here", http.StatusBadGateway)
			return
		}
		out := r.Clone(r.Context())
		out.RequestURI, out.URL.Host = "", address
		resp, err := transport.RoundTrip(out)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer func() { _ = resp.Body.Close() }()
		maps.Copy(w.Header(), resp.Header)
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, resp.Body)
	}))
	t.Cleanup(p.Close)
	return p
}

// blobs are the requests for blobs.
func (p *forwardProxy) blobs() (found []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, request := range p.requests {
		if strings.Contains(request, "/blobs/") {
			found = append(found, request)
		}
	}
	return found
}

func (p *forwardProxy) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = nil
}

// TestPlatformOfSingleManifest pulls an image of another platform that is in no
// index: a handler with a platform refuses it, and one without takes it, as
// CRI-O does.
func TestPlatformOfSingleManifest(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	foreign, err := images.Image(images.Config{Platform: "linux/s390x"}, version("s390x"))
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "single/app:1", foreign))
	ref := n.Ref("single/app:1")

	_, err = pullAs(t, n, "wasm", ref, nil)
	require.ErrorContains(t, err, "it is for linux/s390x, and this root has images for wasi/wasm: push it for that platform too, or change the handler's platform")
	assert.Equal(t, codes.NotFound, status.Code(err))
	assertAbsent(t, n, ref)

	_, err = n.Images().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref}})
	require.NoError(t, err, "CRI-O's own pull")
	answer, err := n.Images().ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref}})
	require.NoError(t, err)
	require.Equal(t, configID(t, foreign), answer.GetImage().GetId())
	require.NoError(t, removeFrom(t, n, "", configID(t, foreign)))
	for _, handler := range []string{"", "vm"} {
		id, err := pullAs(t, n, handler, ref, nil)
		require.NoError(t, err)
		assert.Equal(t, configID(t, foreign), id)
	}
}

// TestCertsOfRegistry pulls from a registry whose authority only its directory
// in certs.d names. It goes by a name that registries.conf leads to it, as
// loopback addresses are not verified.
func TestCertsOfRegistry(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, TLS: true})
	const host = "secure.invalid"
	config := filepath.Join(n.Dir(), "home", ".config", "containers")
	require.NoError(t, os.WriteFile(filepath.Join(config, "registries.conf.d", "secure.conf"),
		[]byte("[[registry]]\nprefix = \""+host+"\"\nlocation = \""+n.Registry()+"\"\n"), 0o644))
	push(t, n, "secure/app:1", version("secure"))
	ref := host + "/secure/app:1"

	// The system's authorities do not include it any more.
	system := filepath.Join(n.Dir(), "etc", "tls.crt")
	authority, err := os.ReadFile(system)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(system, nil, 0o644))
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	certs := filepath.Join(config, "certs.d", n.Registry())
	for _, handler := range []string{"", "vm"} {
		_, err = pullAs(t, n, handler, ref, nil)
		require.ErrorContains(t, err, "certificate signed by unknown authority")
		require.NoError(t, os.MkdirAll(certs, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(certs, "ca.crt"), authority, 0o644))
		_, err = pullAs(t, n, handler, ref, nil)
		require.NoError(t, err)
		require.NoError(t, os.RemoveAll(certs))
	}
	n.AssertClean(t)
}
