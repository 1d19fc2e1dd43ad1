package integration

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

// refused creates a container again and again, until the answer is an error
// with that text, and returns it.
func refused(t testing.TB, pod *realnode.Pod, spec realnode.ContainerSpec, text string) string {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		_, err := pod.Create(t.Context(), spec)
		require.Error(t, err, "wanted: %s", text)
		if strings.Contains(err.Error(), text) {
			return err.Error()
		}
		require.True(t, time.Now().Before(deadline), "wanted: %s; last: %v", text, err)
		time.Sleep(50 * time.Millisecond)
	}
}

// imagesSeen lists the ids of the images on the node that CRI-O and podman see,
// which must be the same.
func imagesSeen(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	ids := func(name string, args ...string) []string {
		out, err := command(t, n, name, args...)
		require.NoError(t, err)
		ids := strings.Fields(strings.ReplaceAll(out, "sha256:", ""))
		slices.Sort(ids)
		return slices.Compact(ids)
	}
	byCRIO := ids("crictl", "--image-endpoint", "unix://"+filepath.Join(n.Dir(), "run", "crio.sock"), "images", "--quiet", "--no-trunc")
	assert.Equal(t, byCRIO, ids("podman", "images", "--all", "--quiet", "--no-trunc"))
	return byCRIO
}

// pullFiles are the files of pulls under way.
func pullFiles(t testing.TB, n *realnode.Node) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(n.Dir(), "tmp", "ocihold", "downloads", "*", "*"))
	require.NoError(t, err)
	return files
}

// assertNoLeftovers fails the test unless, within some seconds, a pull that
// went wrong has left nothing: no lease, no mount, no file, and no image beyond
// those before.
func assertNoLeftovers(t testing.TB, n *realnode.Node, before []string) {
	t.Helper()
	n.AssertClean(t)
	require.Eventually(t, func() bool { return len(pullFiles(t, n)) == 0 }, 20*time.Second, 20*time.Millisecond, "files are left")
	assert.Equal(t, before, imagesSeen(t, n))
}

// TestFailedPulls breaks what a pull needs, one thing at a time. The answer
// says what it is, in the same words each time; nothing is left; and the same
// request succeeds when the cause is gone.
func TestFailedPulls(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	type step func(t testing.TB, ref string)
	seed := uint64(0)
	// pushed pushes an image whose layers no other has, the big one lowest.
	pushed := func(t testing.TB, ref string) v1.Image {
		seed++
		image, err := images.Image(images.Config{}, []images.Entry{images.Big("big", 1<<20, seed)}, version(ref))
		require.NoError(t, err)
		require.NoError(t, n.Push(t.Context(), ref, image))
		return image
	}
	pushes := func(t testing.TB, ref string) { pushed(t, ref) }
	spoilt := func(rule proxy.Rule) step {
		return func(t testing.TB, ref string) {
			pushed(t, ref)
			require.NoError(t, n.Proxy().Add(t.Context(), rule))
		}
	}
	spoiltConfig := func(rule proxy.Rule) step {
		return func(t testing.TB, ref string) {
			sum, err := pushed(t, ref).ConfigName()
			require.NoError(t, err)
			rule.Path = "/blobs/" + sum.String()
			require.NoError(t, n.Proxy().Add(t.Context(), rule))
		}
	}
	spoiltLayer := func(rule proxy.Rule) step {
		return func(t testing.TB, ref string) {
			layers, err := pushed(t, ref).Layers()
			require.NoError(t, err)
			sum, err := layers[0].Digest()
			require.NoError(t, err)
			rule.Path = "/blobs/" + sum.String()
			require.NoError(t, n.Proxy().Add(t.Context(), rule))
		}
	}
	mended := func(t testing.TB, _ string) { require.NoError(t, n.Proxy().Clear(t.Context())) }
	killed := func(name string) step {
		return func(t testing.TB, ref string) {
			pushed(t, ref)
			require.NoError(t, n.Kill(t.Context(), name, syscall.SIGKILL))
		}
	}
	started := func(name string) step {
		return func(t testing.TB, _ string) { require.NoError(t, n.Start(t.Context(), name)) }
	}
	const sum = "sha256:[0-9a-f]{64}"
	for _, tc := range []struct {
		name         string
		breaks, mend step
		want         string // with REGISTRY and IMAGE, which is without tag
	}{
		{
			"missing", func(testing.TB, string) {}, pushes,
			`image not found: registry REGISTRY: reading manifest 1 in IMAGE: manifest unknown`,
		},
		{
			"registry down", killed(realnode.Registry), started(realnode.Registry),
			`registry unavailable: registry REGISTRY: fetching manifest 1 in IMAGE: pinging container registry REGISTRY: received unexpected HTTP status: 502 Bad Gateway`,
		},
		{
			"no one listens", killed(realnode.Proxy), started(realnode.Proxy),
			`registry unavailable: registry REGISTRY: fetching manifest 1 in IMAGE: pinging container registry REGISTRY: Get "http://REGISTRY/v2/": dial tcp REGISTRY: connect: connection refused`,
		},
		{
			"server error", spoilt(proxy.Rule{Path: "/manifests/", Status: 503}), mended,
			`registry unavailable: registry REGISTRY: reading manifest 1 in IMAGE: received unexpected HTTP status: 503 Service Unavailable`,
		},
		{
			"forbidden", spoilt(proxy.Rule{Path: "/manifests/", Status: 403}), mended,
			`registry refused access: registry REGISTRY: reading manifest 1 in IMAGE: .*: check the credentials in the auth file, or whether the image exists`,
		},
		{
			"altered config", spoiltConfig(proxy.Rule{Flip: new(int64(100))}), mended,
			`digest mismatch: registry REGISTRY, or a proxy before it, sends other content than it promises: parsing image configuration: config validation failed: blob digest ` + sum + ` does not match expected ` + sum,
		},
		{
			"altered layer", spoiltLayer(proxy.Rule{Flip: new(int64(1 << 19))}), mended,
			`digest mismatch: registry REGISTRY, or a proxy before it, sends other content than it promises: writing blob: happened during read: Digest did not match, expected ` + sum + `, got ` + sum,
		},
		{
			"cut manifest", spoilt(proxy.Rule{Path: "/manifests/", Cut: new(int64(20))}), mended,
			`registry unavailable: registry REGISTRY: reading manifest body 1 in IMAGE: unexpected EOF`,
		},
		{
			"cut config", spoiltConfig(proxy.Rule{Cut: new(int64(100))}), mended,
			`registry unavailable: registry REGISTRY: parsing image configuration: unexpected EOF`,
		},
		{
			"cut layer", spoiltLayer(proxy.Rule{Cut: new(int64(1 << 19))}), mended,
			`registry unavailable: registry REGISTRY: .*unexpected EOF`,
		},
		{
			"artifact with a bad title", func(t testing.TB, ref string) {
				artifact, err := images.Artifact("application/x.test", images.Blob{MediaType: "text/plain", Title: "../a", Content: []byte("a")})
				require.NoError(t, err)
				require.NoError(t, n.Push(t.Context(), ref, artifact))
			}, pushes,
			`blob ` + sum + `: invalid OCI artifact: its title "../a" has ".." in it`,
		},
		{
			"other platform", func(t testing.TB, ref string) {
				image, err := images.Image(images.Config{Platform: "plan9/mips"}, version(ref))
				require.NoError(t, err)
				index, err := images.Index(image)
				require.NoError(t, err)
				require.NoError(t, n.Push(t.Context(), ref, index))
			}, pushes,
			`image not found: .*no image found in image index for architecture .*`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Cleanup(func() { require.NoError(t, n.Proxy().Clear(context.WithoutCancel(t.Context()))) })
			before := imagesSeen(t, n)
			name := "failed/" + strings.ReplaceAll(tc.name, " ", "-")
			ref := name + ":1"
			tc.breaks(t, ref)
			pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: n.Ref(ref), MountPath: "/models"})})

			want := strings.NewReplacer("REGISTRY", regexp.QuoteMeta(n.Registry()), "IMAGE", regexp.QuoteMeta(n.Ref(name))).Replace(tc.want)
			failed := `image volume /models: pull "` + n.Ref(ref) + `": `
			first := refused(t, pod, realnode.ContainerSpec{}, failed)
			for range 2 {
				text := refused(t, pod, realnode.ContainerSpec{}, failed)
				assert.Equal(t, first, text, "the same words each time")
				assert.Regexp(t, `desc = image volume /models: pull "[^ ]+": `+want+`; will be tried again$`, text)
				assert.NotContains(t, text, n.Dir(), "names no file of the moment")
			}
			assertNoLeftovers(t, n, before)
			tc.mend(t, ref)
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, ref, sh(t, c, "cat /models/version"))
			require.NoError(t, pod.Remove(t.Context()))
			n.AssertClean(t)
		})
	}
}

// TestAlteredManifest asks by digest for a manifest that something on the way
// has altered.
func TestAlteredManifest(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	image, err := images.Image(images.Config{}, version("one"))
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "failed/manifest:1", image))
	sum, err := image.Digest()
	require.NoError(t, err)
	before := imagesSeen(t, n)
	require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: "/manifests/", Flip: new(int64(10))}))

	pod := runPod(t, n, realnode.PodSpec{
		Annotations: volumes(t, volume{Image: n.Ref("failed/manifest@" + sum.String()), MountPath: "/models"}),
	})
	text := refused(t, pod, realnode.ContainerSpec{}, "digest mismatch")
	assert.Contains(t, text, "registry "+n.Registry()+", or a proxy before it, sends other content than it promises")
	assert.Contains(t, text, sum.String())
	assertNoLeftovers(t, n, before)
	require.NoError(t, n.Proxy().Clear(t.Context()))
	c := run(t, pod, realnode.ContainerSpec{})
	assert.Equal(t, "one", sh(t, c, "cat /models/version"))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// TestStalledPull has a registry that stops in the middle of a layer: create
// tells how far it is, and the pull ends with the pod, or goes on.
func TestStalledPull(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	const size = 10 << 20
	ref := push(t, n, "stalled:1", []images.Entry{images.Big("big", size, 3)}, version("one"))
	before := imagesSeen(t, n)
	require.NoError(t, n.Proxy().Add(t.Context(), proxy.Rule{Path: "/blobs/", Skip: 1, Stall: new(int64(size / 2))}))
	annotations := volumes(t, volume{Image: ref, MountPath: "/models"})
	first := runPod(t, n, realnode.PodSpec{Annotations: annotations})
	second := runPod(t, n, realnode.PodSpec{Annotations: annotations})

	text := refused(t, first, realnode.ContainerSpec{}, "% of")
	assert.Regexp(t, `desc = image volume /models: pulling `+regexp.QuoteMeta(ref)+`: \d+% of 10.\d+MB; will be tried again$`, text)
	require.NotEmpty(t, pullFiles(t, n))
	assert.Equal(t, before, imagesSeen(t, n), "no half image")
	leases, err := n.Leases()
	require.NoError(t, err)
	assert.Empty(t, leases)

	require.NoError(t, first.Remove(t.Context()))
	assert.Contains(t, refused(t, second, realnode.ContainerSpec{}, "% of"), "will be tried again", "the other pod still waits")
	require.NotEmpty(t, pullFiles(t, n))

	start := time.Now()
	require.NoError(t, second.Remove(t.Context()))
	assertNoLeftovers(t, n, before)
	assert.Less(t, time.Since(start), 5*time.Second)

	third := runPod(t, n, realnode.PodSpec{Annotations: annotations})
	refused(t, third, realnode.ContainerSpec{}, "% of")
	require.NoError(t, n.Proxy().Clear(t.Context())) // which lets it go on
	c := run(t, third, realnode.ContainerSpec{})
	assert.Equal(t, "one", sh(t, c, "cat /models/version"))
	require.NoError(t, third.Remove(t.Context()))
	n.AssertClean(t)
}

// TestWrongCredentials changes CRI-O's global_auth_file under the running
// daemon.
func TestWrongCredentials(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{Auth: "reader:secret"})
	right, err := os.ReadFile(n.AuthFile())
	require.NoError(t, err)
	wrong, err := json.Marshal(map[string]any{"auths": map[string]any{
		n.Registry(): map[string]string{"auth": base64.StdEncoding.EncodeToString([]byte("reader:guessed"))},
	}})
	require.NoError(t, err)
	for _, tc := range []struct {
		name string
		auth []byte
	}{
		{"wrong password", wrong},
		{"no credentials", []byte("{}")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := imagesSeen(t, n)
			ref := push(t, n, "private/"+strings.ReplaceAll(tc.name, " ", "-")+":1", version(tc.name))
			require.NoError(t, os.WriteFile(n.AuthFile(), tc.auth, 0o600))
			pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
			text := refused(t, pod, realnode.ContainerSpec{}, "registry refused access")
			assert.Regexp(t, `desc = image volume /models: pull "`+regexp.QuoteMeta(ref)+`": registry refused access: registry `+
				regexp.QuoteMeta(n.Registry())+`: .*: check the credentials in the auth file, or whether the image exists; will be tried again$`, text)
			assert.NotContains(t, text, "guessed")
			assertNoLeftovers(t, n, before)

			require.NoError(t, os.WriteFile(n.AuthFile(), right, 0o600))
			c := run(t, pod, realnode.ContainerSpec{})
			assert.Equal(t, tc.name, sh(t, c, "cat /models/version"))
			require.NoError(t, pod.Remove(t.Context()))
			n.AssertClean(t)
		})
	}
}

// TestUnknownAuthority changes the registry's certificate for one of another
// authority, and then makes that known to the node. The registry goes by a name
// that registries.conf leads to it, as loopback addresses are not verified.
func TestUnknownAuthority(t *testing.T) {
	const host = "secure.invalid"
	n := realnode.Boot(t, realnode.Options{TLS: true})
	config := filepath.Join(n.Dir(), "home", ".config", "containers")
	require.NoError(t, os.WriteFile(filepath.Join(config, "registries.conf.d", "secure.conf"),
		[]byte("[[registry]]\nprefix = \""+host+"\"\nlocation = \""+n.Registry()+"\"\n"), 0o644))
	pod := func(name string) *realnode.Pod {
		push(t, n, name, version(name))
		return runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: host + "/" + name, MountPath: "/models"})})
	}
	known := pod("known:1")
	assert.Equal(t, "known:1", sh(t, run(t, known, realnode.ContainerSpec{}), "cat /models/version"))
	require.NoError(t, known.Remove(t.Context()))

	other := httptest.NewTLSServer(nil) // for its certificate, which names 127.0.0.1
	t.Cleanup(other.Close)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other.Certificate().Raw})
	key, err := x509.MarshalPKCS8PrivateKey(other.TLS.Certificates[0].PrivateKey)
	require.NoError(t, err)
	require.NoError(t, n.Kill(t.Context(), realnode.Proxy, syscall.SIGKILL))
	require.NoError(t, os.WriteFile(filepath.Join(n.Dir(), "etc", "tls.crt"), authority, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(n.Dir(), "etc", "tls.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600))
	require.NoError(t, n.Start(t.Context(), realnode.Proxy))

	before := imagesSeen(t, n)
	unknown := pod("unknown:1")
	text := refused(t, unknown, realnode.ContainerSpec{}, "certificate")
	assert.Regexp(t, `desc = image volume /models: pull "secure.invalid/unknown:1": registry unavailable: registry secure.invalid: .*`+
		`tls: failed to verify certificate: x509: certificate signed by unknown authority.*; will be tried again$`, text)
	assertNoLeftovers(t, n, before)

	certs := filepath.Join(config, "certs.d", n.Registry())
	require.NoError(t, os.MkdirAll(certs, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(certs, "ca.crt"), authority, 0o644))
	assert.Equal(t, "unknown:1", sh(t, run(t, unknown, realnode.ContainerSpec{}), "cat /models/version"))
	require.NoError(t, unknown.Remove(t.Context()))
	n.AssertClean(t)
}

// TestUnsupportedStorage starts the daemon with a CRI-O configuration whose
// storage it cannot work with.
func TestUnsupportedStorage(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	ref := push(t, n, "unsupported:1", version("one"))
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: ref, MountPath: "/models"})})
	before := imagesSeen(t, n)
	dropIn := filepath.Join(n.Dir(), "etc", "crio", "crio.conf.d", "99-unsupported.conf")
	for _, tc := range []struct{ name, crio, want string }{
		{"vfs", `storage_driver = "vfs"`, `storage driver "vfs": not supported: set storage_driver = "overlay"`},
		{
			"mount_program", `storage_option = ["overlay.mount_program=/usr/bin/fuse-overlayfs"]`,
			`storage option "overlay.mount_program=/usr/bin/fuse-overlayfs": not supported: remove it, the kernel's overlay is needed`,
		},
		{"composefs", `storage_option = ["overlay.use_composefs=true"]`, `storage option "overlay.use_composefs=true": not supported: remove it`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.NoError(t, os.WriteFile(dropIn, []byte("[crio]\n"+tc.crio+"\n"), 0o644))
			start := time.Now()
			out, err := command(t, n, "timeout", "20", "ocihold", "--config", n.OciholdConf(), "run") // where it runs, it would go on
			require.ErrorContains(t, err, "exit status 1")
			assert.Less(t, time.Since(start), 5*time.Second)
			assert.Equal(t, `ocihold: open storage: open the root of handler "default" at `+n.CRIORoot()+": "+tc.want+"\n", out)

			assert.NoDirExists(t, filepath.Join(n.CRIORoot(), "vfs"))
			mounts, err := os.ReadFile("/proc/self/mounts")
			require.NoError(t, err)
			assert.NotContains(t, string(mounts), n.RunDir())
			refused(t, pod, realnode.ContainerSpec{}, "not injected: is ocihold running?")
			assertNoLeftovers(t, n, before)
		})
	}
	require.NoError(t, os.Remove(dropIn))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	assert.Equal(t, "one", sh(t, run(t, pod, realnode.ContainerSpec{}), "cat /models/version"))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
