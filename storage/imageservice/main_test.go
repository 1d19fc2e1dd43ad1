package imageservice_test

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"github.com/stretchr/testify/require"
	"go.podman.io/storage/pkg/reexec"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
	"github.com/ocihold/ocihold/storage/imageservice"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	goleak.VerifyTestMain(m)
}

// node is a service over real roots, a registry, and a CRI-O that is none.
type node struct {
	host    string // of the registry
	dir     string
	roots   *storage.Roots
	crio    *crio
	logged  *logtest.Hook
	images  cri.ImageServiceClient
	runtime cri.RuntimeServiceClient
	conn    *grpc.ClientConn

	mu    sync.Mutex
	fault http.HandlerFunc // if not nil, what the registry does
}

// newNode serves handlers default, vm, wasm and the plain runtime runc, until the test ends. change, if not nil, changes
// the options.
func newNode(t *testing.T, change func(*imageservice.Options)) *node {
	t.Helper()
	require.Zero(t, os.Getuid(), "containers/storage needs root")
	dir := t.TempDir()
	n := &node{dir: dir}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.mu.Lock()
		fault := n.fault
		n.mu.Unlock()
		if fault != nil {
			fault(w, r)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	n.host = strings.TrimPrefix(server.URL, "http://")

	logger, hook := logtest.NewNullLogger()
	n.logged = hook
	n.roots = openRoots(t, dir, logger)
	n.crio = newCRIO(t, filepath.Join(dir, "crio.sock"))
	crioConn, err := imageservice.Dial(n.crio.socket)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, crioConn.Close()) })
	opt := imageservice.Options{
		Roots: n.roots, CRIO: crioConn, Log: logger,
		Handlers: map[string]imageservice.Handler{"runc": {}, "vm": {Root: "vm"}, "wasm": {Root: "wasm", AllowAnnotation: true}},
	}
	if change != nil {
		change(&opt)
	}
	service, err := imageservice.New(opt)
	require.NoError(t, err)
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(dir, "image.sock"))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error)
	go func() { served <- service.Serve(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-served)
	})
	n.conn, err = imageservice.Dial(filepath.Join(dir, "image.sock"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.conn.Close()) })
	n.images, n.runtime = cri.NewImageServiceClient(n.conn), cri.NewRuntimeServiceClient(n.conn)
	return n
}

func openRoots(t *testing.T, dir string, logger logrus.FieldLogger) *storage.Roots {
	t.Helper()
	write := func(file, content string) string {
		file = filepath.Join(dir, file)
		require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
		return file
	}
	base := storage.Options{
		Name:              imageservice.DefaultRoot,
		GraphRoot:         filepath.Join(dir, "root"),
		RunRoot:           filepath.Join(dir, "run"),
		TempDir:           filepath.Join(dir, "tmp"),
		BlobInfoCacheDir:  filepath.Join(dir, "cache"),
		SignaturePolicy:   write("policy.json", `{"default":[{"type":"insecureAcceptAnything"}]}`),
		AuthFile:          write("auth.json", "{}"),
		RegistriesConf:    write("registries.conf", ""),
		RegistriesConfDir: filepath.Join(dir, "registries.conf.d"),
		Log:               logger,
	}
	vm, wasm := base, base
	vm.Name, vm.GraphRoot, vm.RunRoot, vm.Marker = "vm", filepath.Join(dir, "vm"), filepath.Join(dir, "vm-run"), true
	wasm.Name, wasm.GraphRoot, wasm.RunRoot, wasm.Marker = "wasm", filepath.Join(dir, "wasm"), filepath.Join(dir, "wasm-run"), true
	wasm.Platform = "wasi/wasm"
	require.NoError(t, storage.PrepareRoot(vm))
	require.NoError(t, storage.PrepareRoot(wasm))
	roots, err := storage.OpenRoots(base, []storage.Options{vm, wasm})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, roots.Close()) })
	return roots
}

func (n *node) setFault(fault http.HandlerFunc) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fault = fault
}

// push pushes an image or index and returns its full name.
func (n *node) push(t *testing.T, ref string, what remote.Taggable) string {
	t.Helper()
	ref = n.host + "/" + ref
	parsed, err := name.ParseReference(ref, name.Insecure)
	require.NoError(t, err)
	transport := http.DefaultTransport.(*http.Transport).Clone()
	defer transport.CloseIdleConnections()
	switch what := what.(type) {
	case v1.Image:
		require.NoError(t, remote.Write(parsed, what, remote.WithTransport(transport)))
	case v1.ImageIndex:
		require.NoError(t, remote.WriteIndex(parsed, what, remote.WithTransport(transport)))
	}
	return ref
}

// pull pulls for a handler and returns the id.
func (n *node) pull(t *testing.T, handler, ref string) string {
	t.Helper()
	resp, err := n.images.PullImage(t.Context(), &cri.PullImageRequest{Image: spec(handler, ref)})
	require.NoError(t, err)
	return resp.GetImageRef()
}

func (n *node) status(t *testing.T, s *cri.ImageSpec) *cri.Image {
	t.Helper()
	resp, err := n.images.ImageStatus(t.Context(), &cri.ImageStatusRequest{Image: s})
	require.NoError(t, err)
	return resp.GetImage()
}

func (n *node) list(t *testing.T) map[string]*cri.Image {
	t.Helper()
	resp, err := n.images.ListImages(t.Context(), &cri.ListImagesRequest{})
	require.NoError(t, err)
	found := make(map[string]*cri.Image)
	for _, image := range resp.GetImages() {
		require.NotContains(t, found, image.GetId(), "listed once")
		found[image.GetId()] = image
	}
	return found
}

func spec(handler, ref string) *cri.ImageSpec {
	return &cri.ImageSpec{Image: ref, RuntimeHandler: handler}
}

// annotated is a spec as kubelet makes it of a pod's.
func annotated(ref string, annotations ...string) *cri.ImageSpec {
	s := &cri.ImageSpec{Image: ref, Annotations: map[string]string{"kubernetes.io/config.source": "api"}}
	for i := 0; i < len(annotations); i += 2 {
		s.Annotations[annotations[i]] = annotations[i+1]
	}
	return s
}

// imageOf makes an image of one file.
func imageOf(t *testing.T, content, platform, user string) v1.Image {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	require.NoError(t, w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}))
	_, err := w.Write([]byte(content))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buf.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
	require.NoError(t, err)
	img, err := mutate.AppendLayers(mutate.MediaType(empty.Image, types.OCIManifestSchema1), layer)
	require.NoError(t, err)
	config, err := img.ConfigFile()
	require.NoError(t, err)
	config = config.DeepCopy()
	p, err := v1.ParsePlatform(platform)
	require.NoError(t, err)
	config.OS, config.Architecture, config.Config.User = p.OS, p.Architecture, user
	config.Config.Labels = map[string]string{"label": content}
	img, err = mutate.ConfigFile(img, config)
	require.NoError(t, err)
	return mutate.ConfigMediaType(img, types.OCIConfigJSON)
}

func indexOf(t *testing.T, imgs ...v1.Image) v1.ImageIndex {
	t.Helper()
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, img := range imgs {
		config, err := img.ConfigFile()
		require.NoError(t, err)
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: config.Platform()}})
	}
	return index
}

func idOf(t *testing.T, img v1.Image) string {
	t.Helper()
	id, err := img.ConfigName()
	require.NoError(t, err)
	return id.Hex
}
