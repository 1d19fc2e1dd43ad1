package metrics

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/storage/pkg/reexec"
	"go.uber.org/goleak"

	"github.com/ocihold/ocihold/storage"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	goleak.VerifyTestMain(m)
}

// newRoots opens CRI-O's own root and that of vm.
func newRoots(t *testing.T, log logrus.FieldLogger) *storage.Roots {
	t.Helper()
	require.Zero(t, os.Getuid(), "containers/storage needs root")
	dir := t.TempDir()
	options := func(name string) storage.Options {
		return storage.Options{
			Name: name, GraphRoot: filepath.Join(dir, name), RunRoot: filepath.Join(dir, "run", name),
			TempDir: filepath.Join(dir, "tmp"), SignaturePolicy: filepath.Join(dir, "policy.json"), Log: log,
		}
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "policy.json"), []byte(`{"default":[{"type":"insecureAcceptAnything"}]}`), 0o600))
	base := options("default")
	base.Pin = true
	roots, err := storage.OpenRoots(base, []storage.Options{options("vm")})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, roots.Close()) })
	return roots
}

// pushed is an image in a registry of the test's.
func pushed(t *testing.T) (ref string) {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	image, err := random.Image(4096, 1)
	require.NoError(t, err)
	tag, err := name.NewTag(strings.TrimPrefix(server.URL, "http://") + "/a:1")
	require.NoError(t, err)
	require.NoError(t, remote.Write(tag, image))
	return tag.String()
}

func TestMetrics(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	roots := newRoots(t, log)
	vm, err := roots.Handler("vm")
	require.NoError(t, err)
	m := New(roots, log)
	ctx := t.Context()

	ref := pushed(t)
	image, err := vm.Pull(ctx, ref, storage.PullOptions{})
	require.NoError(t, err)
	_, err = vm.Pull(ctx, ref+"-none", storage.PullOptions{})
	require.Error(t, err)
	require.NoError(t, vm.Lease(ctx, image.ID))
	require.ErrorIs(t, roots.Remove(ctx, ref, nil), storage.ErrInUse)
	for _, handler := range roots.Names() {
		require.NoError(t, m.look(ctx, handler))
	}
	usage, err := vm.Usage(ctx)
	require.NoError(t, err)
	assert.InDelta(t, usage.Bytes, testutil.ToFloat64(m.bytes.WithLabelValues("vm")), 0)
	requireServed(t, m,
		`ocihold_images{handler="default"} 0`, `ocihold_images{handler="vm"} 1`,
		`ocihold_leases{handler="default"} 0`, `ocihold_leases{handler="vm"} 1`,
		`ocihold_pulls_total{handler="default"} 0`, `ocihold_pulls_total{handler="vm"} 2`,
		`ocihold_pull_failures_total{handler="vm"} 1`,
		`ocihold_removals_refused_total{handler="default"} 0`, `ocihold_removals_refused_total{handler="vm"} 1`,
		`ocihold_collections_total{handler="vm"} 0`, `ocihold_collected_images_total{handler="vm"} 0`,
	)

	require.NoError(t, vm.Release(ctx, image.ID))
	all := storage.CollectOptions{GCPolicy: storage.GCPolicy{High: 1, MaxBytes: 1}, DryRun: true}
	for _, dry := range []bool{true, false} {
		all.DryRun = dry
		_, err = roots.Collect(ctx, "vm", all)
		require.NoError(t, err)
	}
	for _, handler := range roots.Names() {
		require.NoError(t, m.look(ctx, handler))
	}
	requireServed(t, m,
		`ocihold_images{handler="vm"} 0`, `ocihold_leases{handler="vm"} 0`,
		`ocihold_collections_total{handler="vm"} 1`, `ocihold_collected_images_total{handler="vm"} 1`,
	)
	assert.Positive(t, roots.Counts("vm").CollectedBytes)
	problems, err := testutil.GatherAndLint(m.registry)
	require.NoError(t, err)
	assert.Empty(t, problems)

	base, err := roots.Handler("default")
	require.NoError(t, err)
	image, err = base.Pull(ctx, ref, storage.PullOptions{})
	require.NoError(t, err)
	require.NoError(t, base.Lease(ctx, image.ID))
	for _, handler := range roots.Names() {
		require.NoError(t, m.look(ctx, handler))
	}
	requireServed(t, m, `ocihold_pins{handler="default"} 1`, `ocihold_pins{handler="vm"} 0`)

	// A root that cannot be read has no figures.
	require.NoError(t, roots.Close())
	require.ErrorIs(t, m.look(ctx, "vm"), storage.ErrClosed)
	assert.Equal(t, 1, testutil.CollectAndCount(m.images), "that of default")
}

// requireServed holds that lines are among what Prometheus is answered.
func requireServed(t *testing.T, m *Metrics, lines ...string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx, listener, func(*http.ServeMux) {}) }()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listener.Addr().String()+"/metrics", http.NoBody)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	for _, line := range lines {
		assert.Contains(t, strings.Split(string(body), "\n"), line)
	}
	cancel()
	require.NoError(t, <-ended)
}
