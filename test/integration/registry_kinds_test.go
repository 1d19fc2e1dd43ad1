package integration

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/pkg/compression"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// TestKindsOfImages runs an image in every kind of package that there is, has
// it as a volume of itself, and compares what is there with what GNU tar makes
// of its layers.
func TestKindsOfImages(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	layers := append([][]images.Entry{busybox(t)}, stack(4)...)
	want := tree(t, unpack(t, layers))

	for name, tc := range map[string]struct {
		packing images.Packing
		index   bool
		recopy  *compression.Algorithm
	}{
		"gzip":                 {packing: images.Gzip},
		"gzip, index":          {packing: images.Gzip, index: true},
		"plain":                {packing: images.Plain},
		"zstd":                 {packing: images.Zstd},
		"estargz":              {packing: images.EStargz},
		"docker schema 2":      {packing: images.Docker},
		"docker manifest list": {packing: images.Docker, index: true},
		"zstd:chunked":         {packing: images.Gzip, recopy: &compression.ZstdChunked},
	} {
		t.Run(name, func(t *testing.T) {
			image, err := images.Image(images.Config{Packing: tc.packing, Env: []string{"KIND=" + name}}, layers...)
			require.NoError(t, err)
			repository := "kinds/" + strings.NewReplacer(" ", "-", ",", "", ":", "-").Replace(name)
			var pushable images.Pushable = image
			if tc.index {
				wasm, err := images.Image(images.Config{Packing: tc.packing, Platform: "wasi/wasm"}, version("wasm"))
				require.NoError(t, err)
				index, err := images.Index(wasm, image)
				require.NoError(t, err)
				pushable = index
			}
			require.NoError(t, n.Push(t.Context(), repository+":1", pushable))
			ref := n.Ref(repository + ":1")
			if tc.recopy != nil {
				system := nodeSystem(t, n)
				system.CompressionFormat = tc.recopy
				recopy(t, n, repository+":1", repository+":2", copy.Options{DestinationCtx: system, ForceCompressionFormat: true})
				ref = n.Ref(repository + ":2")
			}
			for _, handler := range []string{"", "vm"} {
				t.Run("handler "+handler, func(t *testing.T) { testKind(t, n, handler, ref, image, want) })
			}
		})
	}
	t.Run("docker schema 1", func(t *testing.T) { testSchema1(t, n) })
	n.AssertClean(t)
}

func testKind(t *testing.T, n *realnode.Node, handler, ref string, image v1.Image, want map[string]string) {
	id, err := pullAs(t, n, handler, ref, nil)
	require.NoError(t, err)
	assert.Equal(t, configID(t, image), id)
	require.NoError(t, n.Proxy().ResetCounts(t.Context()))
	again, err := pullAs(t, n, handler, ref, nil)
	require.NoError(t, err)
	assert.Equal(t, id, again)
	for request := range requests(t, n) {
		assert.NotContains(t, request, "/blobs/", "nothing is transferred again")
	}

	pod := runPod(t, n, realnode.PodSpec{Handler: handler, Annotations: volumes(t, volume{Image: ref, MountPath: "/volume"})})
	c := run(t, pod, realnode.ContainerSpec{Image: id, UserImage: ref})
	assert.Equal(t, "content of layer 3\n", sh(t, c, "cat /layer-003"))
	got := tree(t, filepath.Join(rootOf(t, c), "volume"))
	for _, file := range []string{"stargz.index.json", ".no.prefetch.landmark"} {
		delete(got, file) // of eStargz's own
	}
	assert.Equal(t, want, got)
	require.NoError(t, pod.Remove(t.Context()))
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		assert.NoError(c, removeFrom(t, n, "", id))
	}, 20*time.Second, 50*time.Millisecond, "the volume's lease goes")
}

// testSchema1 pulls what no registry of today takes any more: Docker's first
// kind of manifest.
func testSchema1(t *testing.T, n *realnode.Node) {
	const kind = "application/vnd.docker.distribution.manifest.v1+prettyjws"
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", kind)
			_, _ = w.Write([]byte(`{"schemaVersion":1,"name":"old/app","tag":"1","architecture":"amd64","fsLayers":[],"history":[],"signatures":[]}`))
		}
	}))
	t.Cleanup(old.Close)
	ref := strings.TrimPrefix(old.URL, "http://") + "/old/app:1"
	for _, handler := range []string{"", "vm"} {
		_, err := pullAs(t, n, handler, ref, nil)
		require.ErrorContains(t, err, "the registry has it as Docker schema 1: not supported: push it again as an OCI or Docker schema 2 image")
		assertAbsent(t, n, ref)
	}
}
