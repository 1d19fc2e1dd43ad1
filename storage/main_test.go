package storage

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/require"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/reexec"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// deleteImageCommand, run in a process of its own, removes an image from a root: GRAPHROOT RUNROOT ID.
const deleteImageCommand = "storage-test-delete-image"

func TestMain(m *testing.M) {
	reexec.Register(deleteImageCommand, func() {
		store, err := cstorage.GetStore(cstorage.StoreOptions{
			GraphRoot: os.Args[1], RunRoot: os.Args[2], GraphDriverName: "overlay",
			GraphDriverOptions: []string{"overlay.skip_mount_home=true"},
		})
		if err == nil {
			_, err = store.DeleteImage(os.Args[3], true)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	})
	registerCRIO()
	if reexec.Init() {
		return
	}
	goleak.VerifyTestMain(m)
}

// deleteImage removes an image as another program would.
func deleteImage(opt Options, id string) error {
	cmd := reexec.Command(deleteImageCommand, opt.GraphRoot, opt.RunRoot, id)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// testOptions are those of a fresh root, with configuration files of its own.
func testOptions(tb testing.TB) Options {
	tb.Helper()
	if os.Getuid() != 0 {
		tb.Skip("needs root: overlay mounts and layer ownership")
	}
	dir := tb.TempDir()
	opt := Options{
		Name:              "default",
		GraphRoot:         filepath.Join(dir, "root"),
		RunRoot:           filepath.Join(dir, "run"),
		TempDir:           filepath.Join(dir, "tmp"),
		BlobInfoCacheDir:  filepath.Join(dir, "cache"),
		SignaturePolicy:   filepath.Join(dir, "policy.json"),
		AuthFile:          filepath.Join(dir, "auth.json"),
		RegistriesConf:    filepath.Join(dir, "registries.conf"),
		RegistriesConfDir: filepath.Join(dir, "registries.conf.d"),
		Log:               quiet(),
	}
	write(tb, opt.SignaturePolicy, `{"default":[{"type":"insecureAcceptAnything"}]}`)
	write(tb, opt.RegistriesConf, "")
	write(tb, opt.AuthFile, "{}")
	return opt
}

func quiet() *logrus.Logger {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return l
}

func write(tb testing.TB, path, content string) {
	tb.Helper()
	require.NoError(tb, os.WriteFile(path, []byte(content), 0o600))
}

func open(tb testing.TB, opt Options) *Root {
	tb.Helper()
	root, err := Open(opt)
	require.NoError(tb, err)
	root.backoff = []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond}
	tb.Cleanup(func() { require.NoError(tb, root.Close()) })
	return root
}

// testRegistry is a registry behind a handler that counts and can be made to misbehave.
type testRegistry struct {
	host string

	mu       sync.Mutex
	requests []string
	fault    func(w http.ResponseWriter, r *http.Request, next http.Handler)
}

func newRegistry(tb testing.TB) *testRegistry {
	tb.Helper()
	reg := &testRegistry{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		reg.mu.Lock()
		reg.requests = append(reg.requests, r.Method+" "+r.URL.Path)
		fault := reg.fault
		reg.mu.Unlock()
		if fault != nil {
			fault(w, r, inner)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	tb.Cleanup(server.Close)
	reg.host = strings.TrimPrefix(server.URL, "http://")
	return reg
}

func (r *testRegistry) setFault(fault func(w http.ResponseWriter, req *http.Request, next http.Handler)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault = fault
}

// stallFirst makes the registry hold its first answer back from now on: arrived receives when it is asked for it, closing
// goOn lets it answer.
func (r *testRegistry) stallFirst() (arrived <-chan struct{}, goOn chan<- struct{}) {
	asked, release := make(chan struct{}, 1), make(chan struct{})
	r.setFault(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		select {
		case asked <- struct{}{}:
			<-release
		default:
		}
		next.ServeHTTP(w, req)
	})
	return asked, release
}

// take returns the requests since the last call, without pings.
func (r *testRegistry) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for _, req := range r.requests {
		if req != "GET /v2/" {
			out = append(out, req)
		}
	}
	r.requests = nil
	return out
}

// push puts an image or index at host/ref.
func (r *testRegistry) push(tb testing.TB, ref string, what any) v1.Hash {
	tb.Helper()
	parsed, err := name.ParseReference(r.host+"/"+ref, name.Insecure)
	require.NoError(tb, err)
	transport := http.DefaultTransport.(*http.Transport).Clone()
	defer transport.CloseIdleConnections()
	var digest v1.Hash
	switch what := what.(type) {
	case v1.Image:
		require.NoError(tb, remote.Write(parsed, what, remote.WithTransport(transport)))
		digest, err = what.Digest()
	case v1.ImageIndex:
		require.NoError(tb, remote.WriteIndex(parsed, what, remote.WithTransport(transport)))
		digest, err = what.Digest()
	default:
		require.Failf(tb, "push", "cannot push a %T", what)
	}
	require.NoError(tb, err)
	r.take()
	return digest
}

// imageOf makes an image for this platform with one layer for each content, which is its file "file-N".
func imageOf(tb testing.TB, contents ...string) v1.Image {
	tb.Helper()
	layers := make([]v1.Layer, len(contents))
	for i, content := range contents {
		layers[i] = layerOf(tb, fmt.Sprintf("file-%d", i), []byte(content))
	}
	return imageWith(tb, "amd64", layers...)
}

func imageWith(tb testing.TB, arch string, layers ...v1.Layer) v1.Image {
	tb.Helper()
	img, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layers...)
	require.NoError(tb, err)
	config, err := img.ConfigFile()
	require.NoError(tb, err)
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", arch
	img, err = mutate.ConfigFile(img, config)
	require.NoError(tb, err)
	return mutate.ConfigMediaType(img, types.OCIConfigJSON)
}

func layerOf(tb testing.TB, file string, content []byte) v1.Layer {
	tb.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	require.NoError(tb, w.WriteHeader(&tar.Header{Name: file, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}))
	_, err := w.Write(content)
	require.NoError(tb, err)
	require.NoError(tb, w.Close())
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buf.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	require.NoError(tb, err)
	return layer
}

func imageID(tb testing.TB, img v1.Image) string {
	tb.Helper()
	id, err := img.ConfigName()
	require.NoError(tb, err)
	return id.Hex
}

// layerIDs returns the ids of all layers in the root, as its layers.json has them.
func layerIDs(tb testing.TB, root *Root) []string {
	tb.Helper()
	layers, err := root.store.Layers()
	require.NoError(tb, err)
	ids := make([]string, 0, len(layers))
	for _, l := range layers {
		ids = append(ids, l.ID)
	}
	return ids
}

// podman runs Debian's podman on the root.
func podman(tb testing.TB, opt Options, args ...string) (string, error) {
	tb.Helper()
	path, err := exec.LookPath("podman")
	if err != nil {
		tb.Skip("needs podman: ", err)
	}
	require.LessOrEqual(tb, len(opt.RunRoot), 50, "podman takes no longer run root: shorten the test's name or TMPDIR")
	// podman binds the driver's directory onto itself and leaves it so.
	tb.Cleanup(func() { _ = unix.Unmount(filepath.Join(opt.GraphRoot, "overlay"), unix.MNT_DETACH) })
	base := []string{
		"--root", opt.GraphRoot, "--runroot", opt.RunRoot, "--tmpdir", filepath.Join(filepath.Dir(opt.GraphRoot), "libpod"),
		"--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "none",
	}
	cmd := exec.Command(path, append(base, args...)...)
	cmd.Env = append(os.Environ(), "CONTAINERS_REGISTRIES_CONF="+opt.RegistriesConf)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("podman %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}
