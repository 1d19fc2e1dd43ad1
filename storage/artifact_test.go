package storage

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// part is a blob of a test's artifact.
type part struct {
	mediaType, title string
	annotations      map[string]string
	content          []byte
	// descriptor, if not nil, changes what the manifest says of the blob.
	descriptor func(*ispec.Descriptor)
}

func (p part) describe() ispec.Descriptor {
	d := ispec.Descriptor{MediaType: p.mediaType, Digest: digest.FromBytes(p.content), Size: int64(len(p.content)), Annotations: p.annotations}
	if p.title != "" {
		d.Annotations = map[string]string{ispec.AnnotationTitle: p.title}
	}
	if p.descriptor != nil {
		p.descriptor(&d)
	}
	return d
}

func manifestOf(parts ...part) ispec.Manifest {
	m := ispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageManifest,
		ArtifactType: "application/vnd.example.model", Config: ispec.DescriptorEmptyJSON,
	}
	for _, p := range parts {
		m.Layers = append(m.Layers, p.describe())
	}
	return m
}

// send makes a request of the registry that must succeed.
func (r *testRegistry) send(tb testing.TB, method, path, mediaType string, body []byte) {
	tb.Helper()
	req, err := http.NewRequestWithContext(context.Background(), method, "http://"+r.host+path, bytes.NewReader(body))
	require.NoError(tb, err)
	req.Header.Set("Content-Type", mediaType)
	transport := http.DefaultTransport.(*http.Transport).Clone()
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(tb, err)
	answer, err := io.ReadAll(resp.Body)
	require.NoError(tb, err)
	require.NoError(tb, resp.Body.Close())
	require.Less(tb, resp.StatusCode, 300, "%s", answer)
}

func (r *testRegistry) pushBlob(tb testing.TB, repository string, content []byte) {
	tb.Helper()
	r.send(tb, http.MethodPost, "/v2/"+repository+"/blobs/uploads/?digest="+digest.FromBytes(content).String(), "application/octet-stream", content)
}

func (r *testRegistry) pushManifest(tb testing.TB, repository, tag, mediaType string, m any) digest.Digest {
	tb.Helper()
	content, err := json.Marshal(m)
	require.NoError(tb, err)
	r.send(tb, http.MethodPut, "/v2/"+repository+"/manifests/"+tag, mediaType, content)
	r.take()
	return digest.FromBytes(content)
}

// pushArtifact pushes an artifact as repository:1.
func (r *testRegistry) pushArtifact(tb testing.TB, repository string, parts ...part) digest.Digest {
	tb.Helper()
	for _, p := range parts {
		r.pushBlob(tb, repository, p.content)
	}
	return r.pushManifest(tb, repository, "1", ispec.MediaTypeImageManifest, manifestOf(parts...))
}

func archiveOf(tb testing.TB, entries ...tar.Header) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		content := []byte(nil)
		if e.Typeflag == tar.TypeReg {
			content = []byte("content of " + e.Name)
			e.Size = int64(len(content))
		}
		if e.Mode == 0 {
			e.Mode = 0o755
		}
		require.NoError(tb, w.WriteHeader(&e))
		_, err := w.Write(content)
		require.NoError(tb, err)
	}
	require.NoError(tb, w.Close())
	return buf.Bytes()
}

func gzipped(tb testing.TB, content []byte) []byte {
	tb.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := w.Write(content)
	require.NoError(tb, err)
	require.NoError(tb, w.Close())
	return buf.Bytes()
}

func zstandard(tb testing.TB, content []byte) []byte {
	tb.Helper()
	w, err := zstd.NewWriter(nil)
	require.NoError(tb, err)
	defer func() { require.NoError(tb, w.Close()) }()
	return w.EncodeAll(content, nil)
}

// filesOf returns the regular files of an image with their content, as an overlay of its layers has them.
func filesOf(tb testing.TB, root *Root, imageID string) map[string]string {
	tb.Helper()
	dirs, err := root.LowerDirs(tb.Context(), imageID, nil)
	require.NoError(tb, err)
	files := map[string]string{}
	for _, dir := range slices.Backward(dirs) {
		require.NoError(tb, fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}
			content, err := os.ReadFile(filepath.Join(dir, path))
			files[path] = string(content)
			return err
		}))
	}
	return files
}

func TestPullArtifact(t *testing.T) {
	reg := newRegistry(t)
	archive := archiveOf(t, tar.Header{Name: "dir/in-tar", Typeflag: tar.TypeReg, Mode: 0o600})
	inTar := map[string]string{"dir/in-tar": "content of dir/in-tar"}
	untitled := []byte("untitled")
	raw := "application/octet-stream"
	big := []byte(noise(1 << 20))

	for name, tc := range map[string]struct {
		parts []part
		rules map[string]string
		want  map[string]string
	}{
		"files": {
			parts: []part{{mediaType: raw, title: "a", content: []byte("one")}, {mediaType: raw, title: "sub/dir/b", content: big}},
			want:  map[string]string{"a": "one", "sub/dir/b": string(big)},
		},
		"no blobs":                 {want: map[string]string{}},
		"empty file":               {parts: []part{{mediaType: raw, title: "a"}}, want: map[string]string{"a": ""}},
		"empty archive":            {parts: []part{{mediaType: ispec.MediaTypeImageLayer}}, want: map[string]string{}},
		"untitled":                 {parts: []part{{mediaType: raw, content: untitled}}, want: map[string]string{"sha256-" + digest.FromBytes(untitled).Encoded(): "untitled"}},
		"untitled twice":           {parts: []part{{mediaType: raw, content: untitled}, {mediaType: raw, content: untitled}}, want: map[string]string{"sha256-" + digest.FromBytes(untitled).Encoded(): "untitled"}},
		"title to be cleaned":      {parts: []part{{mediaType: raw, title: "./a//b", content: big}}, want: map[string]string{"a/b": string(big)}},
		"name of 255 bytes":        {parts: []part{{mediaType: raw, title: strings.Repeat("é", 127) + "x", content: untitled}}, want: map[string]string{strings.Repeat("é", 127) + "x": "untitled"}},
		"no media type":            {parts: []part{{title: "a", content: untitled}}, want: map[string]string{"a": "untitled"}},
		"one content in two files": {parts: []part{{mediaType: raw, title: "a", content: big}, {mediaType: raw, title: "b", content: big}}, want: map[string]string{"a": string(big), "b": string(big)}},
		"tar":                      {parts: []part{{mediaType: ispec.MediaTypeImageLayer, content: archive}}, want: inTar},
		"tar+gzip":                 {parts: []part{{mediaType: "application/vnd.cncf.helm.chart.content.v1.tar+gzip", content: gzipped(t, archive)}}, want: inTar},
		"tar+zstd":                 {parts: []part{{mediaType: "application/vnd.cncf.model.weight.v1.tar+zstd", content: zstandard(t, archive)}}, want: inTar},
		"tar of another kind":      {parts: []part{{mediaType: "application/x-tar", content: zstandard(t, archive)}}, want: inTar},
		"titled tar":               {parts: []part{{mediaType: ispec.MediaTypeImageLayerGzip, title: "dir", content: gzipped(t, archive)}}, want: inTar},
		"no tar":                   {parts: []part{{mediaType: ispec.MediaTypeImageLayer, title: "a", content: untitled}}, want: map[string]string{"a": "untitled"}},
		"large no tar":             {parts: []part{{mediaType: ispec.MediaTypeImageLayer, title: "a", content: big}}, want: map[string]string{"a": string(big)}},
		"compressed no tar":        {parts: []part{{mediaType: ispec.MediaTypeImageLayerGzip, title: "a.gz", content: gzipped(t, big)}}, want: map[string]string{"a.gz": string(gzipped(t, big))}},
		"tar over a file":          {parts: []part{{mediaType: raw, title: "dir/in-tar", content: untitled}, {mediaType: ispec.MediaTypeImageLayer, content: archive}}, want: inTar},
		"file over one of a tar":   {parts: []part{{mediaType: ispec.MediaTypeImageLayer, content: archive}, {mediaType: raw, title: "dir/in-tar", content: untitled}}, want: map[string]string{"dir/in-tar": "untitled"}},
		"tar as a file":            {parts: []part{{mediaType: "application/x-tar", title: "a.tar", content: archive}}, rules: map[string]string{"application/x-*": BlobFile}, want: map[string]string{"a.tar": string(archive)}},
		"foreign type as a tar":    {parts: []part{{mediaType: "application/vnd.example.bundle", content: gzipped(t, archive)}}, rules: map[string]string{"*": BlobFile, "*.example.*": BlobTar}, want: inTar},
		"ModelPack's path":         {parts: []part{{mediaType: raw, annotations: map[string]string{"org.cncf.model.filepath": "w/a", ispec.AnnotationTitle: "a"}, content: untitled}}, want: map[string]string{"w/a": "untitled"}},
		"ModelPack's path before":  {parts: []part{{mediaType: raw, annotations: map[string]string{"org.cnai.model.filepath": "w/a"}, content: untitled}}, want: map[string]string{"w/a": "untitled"}},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			opt.MediaTypes = tc.rules
			root := open(t, opt)
			repository := strings.NewReplacer(" ", "-", ",", "", "+", "-", "'", "").Replace(strings.ToLower(name))
			d := reg.pushArtifact(t, repository, tc.parts...)
			ref := reg.host + "/" + repository
			got, err := root.Pull(t.Context(), ref+":1", PullOptions{})
			require.NoError(t, err)
			assert.Equal(t, tc.want, filesOf(t, root, got.ID))
			assert.Equal(t, d, got.Digest)
			assert.Equal(t, []digest.Digest{d}, got.Digests)
			assert.Equal(t, []string{ref + ":1"}, got.Names)
			assert.Len(t, layerIDs(t, root), len(tc.parts))
			assertNoDownloads(t, opt)

			images, errs := root.Images(t.Context())
			assert.Empty(t, errs)
			assert.Equal(t, []Image{got}, images)
			for _, ref := range []string{ref + ":1", ref + "@" + d.String(), got.ID} {
				found, err := root.Resolve(t.Context(), ref)
				require.NoError(t, err)
				assert.Equal(t, got, found)
			}
			config, err := root.Config(t.Context(), got.ID)
			require.NoError(t, err)
			assert.Equal(t, "linux/"+runtime.GOARCH, config.OS+"/"+config.Architecture)
			assert.Len(t, config.RootFS.DiffIDs, len(tc.parts))
			assert.Equal(t, map[string]string{"ocihold.dev/artifact": d.String(), "ocihold.dev/artifact-type": "application/vnd.example.model"}, config.Config.Labels)

			record, err := root.store.Image(got.ID)
			require.NoError(t, err)
			types, err := root.layerTypes(record)
			require.NoError(t, err)
			require.Len(t, types, len(tc.parts))
			for i, p := range tc.parts {
				assert.Equal(t, p.mediaType, types[i])
			}

			reg.take()
			for _, ref := range []string{ref + ":1", ref + "@" + d.String()} {
				again, err := root.Pull(t.Context(), ref, PullOptions{})
				require.NoError(t, err)
				assert.Equal(t, got.ID, again.ID)
			}
			blobs := slices.DeleteFunc(reg.take(), func(r string) bool { return !strings.Contains(r, "/blobs/") })
			assert.Empty(t, blobs, "it is there")
		})
	}
}

// takeBlobs counts the requests for blobs since the last call.
func (r *testRegistry) takeBlobs() (n int) {
	for _, request := range r.take() {
		if strings.Contains(request, "/blobs/") {
			n++
		}
	}
	return n
}

func TestPullArtifactFromIndex(t *testing.T) {
	reg := newRegistry(t)
	raw := func(content string) part { return part{mediaType: "text/plain", title: "f", content: []byte(content)} }
	descriptor := func(content string, platform *ispec.Platform) ispec.Descriptor {
		p := raw(content)
		reg.pushBlob(t, "a", p.content)
		m, err := json.Marshal(manifestOf(p))
		require.NoError(t, err)
		d := reg.pushManifest(t, "a", content, ispec.MediaTypeImageManifest, json.RawMessage(m))
		return ispec.Descriptor{MediaType: ispec.MediaTypeImageManifest, Digest: d, Size: int64(len(m)), Platform: platform}
	}
	index := func(tag string, entries ...ispec.Descriptor) ispec.Descriptor {
		m, err := json.Marshal(ispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ispec.MediaTypeImageIndex, Manifests: entries})
		require.NoError(t, err)
		d := reg.pushManifest(t, "a", tag, ispec.MediaTypeImageIndex, json.RawMessage(m))
		return ispec.Descriptor{MediaType: ispec.MediaTypeImageIndex, Digest: d, Size: int64(len(m))}
	}
	amd, wasm := descriptor("amd", &ispec.Platform{OS: "linux", Architecture: "amd64"}), descriptor("wasm", &ispec.Platform{OS: "wasi", Architecture: "wasm"})
	plain := index("plain", amd, wasm)
	index("nested", plain)
	index("anywhere", descriptor("anywhere", nil))

	for _, tc := range []struct{ platform, tag, want string }{
		{"linux/amd64", "plain", "amd"},
		{"wasi/wasm", "plain", "wasm"},
		{"linux/amd64", "nested", "amd"},
		{"wasi/wasm", "nested", "wasm"},
		{"linux/amd64", "anywhere", "anywhere"},
		{"wasi/wasm", "anywhere", "anywhere"},
		{"wasi/wasm", "amd", "amd"},
	} {
		t.Run(tc.platform+" of "+tc.tag, func(t *testing.T) {
			opt := testOptions(t)
			opt.Platform = tc.platform
			root := open(t, opt)
			ref := reg.host + "/a:" + tc.tag
			got, err := root.Pull(t.Context(), ref, PullOptions{})
			require.NoError(t, err)
			assert.Equal(t, map[string]string{"f": tc.want}, filesOf(t, root, got.ID))
			config, err := root.Config(t.Context(), got.ID)
			require.NoError(t, err)
			assert.Equal(t, tc.platform, config.OS+"/"+config.Architecture)
			reg.takeBlobs()
			again, err := root.Pull(t.Context(), ref, PullOptions{})
			require.NoError(t, err)
			assert.Equal(t, got.ID, again.ID)
			assert.ElementsMatch(t, got.Digests, again.Digests)
			assert.Zero(t, reg.takeBlobs())
			for _, d := range got.Digests {
				found, err := root.Resolve(t.Context(), reg.host+"/a@"+d.String())
				require.NoError(t, err)
				assert.Equal(t, got.ID, found.ID)
			}
		})
	}
}

func TestArtifactIsOne(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	blobs := []part{{mediaType: "text/plain", title: "f", content: []byte("one")}, {mediaType: "text/plain", title: "g", content: []byte("two")}}
	d := reg.pushArtifact(t, "a", blobs...)
	reg.pushArtifact(t, "b", blobs...)
	first, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	reg.takeBlobs()

	t.Run("by another name", func(t *testing.T) {
		got, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
		require.NoError(t, err)
		assert.Equal(t, first.ID, got.ID)
		assert.ElementsMatch(t, []string{reg.host + "/a:1", reg.host + "/b:1"}, got.Names)
		assert.Zero(t, reg.takeBlobs())
	})
	t.Run("in another root", func(t *testing.T) {
		got, err := open(t, testOptions(t)).Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.NoError(t, err)
		assert.Equal(t, first.ID, got.ID)
	})
	t.Run("moved tag", func(t *testing.T) {
		reg.pushArtifact(t, "a", append(blobs[:1:1], part{mediaType: "text/plain", title: "h", content: []byte("three")})...)
		reg.takeBlobs()
		moved, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.NoError(t, err)
		assert.NotEqual(t, first.ID, moved.ID)
		assert.Equal(t, map[string]string{"f": "one", "h": "three"}, filesOf(t, root, moved.ID))
		assert.Equal(t, 1, reg.takeBlobs(), "the first layer is there")
		old, err := root.Resolve(t.Context(), first.ID)
		require.NoError(t, err)
		assert.Equal(t, []string{reg.host + "/b:1"}, old.Names)
	})
	t.Run("removed by force while it is leased", func(t *testing.T) {
		require.NoError(t, root.Lease(t.Context(), first.ID))
		require.NoError(t, root.store.DeleteContainer(leaseIDs(first.ID).record))
		require.NoError(t, deleteImage(opt, first.ID))
		require.NoError(t, root.Lease(t.Context(), first.ID))
		got, err := root.Resolve(t.Context(), reg.host+"/b@"+d.String())
		require.NoError(t, err)
		assert.Equal(t, d, got.Digest)
		assert.Equal(t, first.Digests, got.Digests)
		require.NoError(t, root.Release(t.Context(), first.ID))
	})
	t.Run("policy", func(t *testing.T) {
		write(t, opt.SignaturePolicy, `{"default":[{"type":"reject"}]}`)
		for _, ref := range []string{"/b:1", "/a:1"} {
			_, err := root.Pull(t.Context(), reg.host+ref, PullOptions{})
			require.ErrorIs(t, err, ErrSignature)
		}
		opt := testOptions(t)
		write(t, opt.SignaturePolicy, `{"default":[{"type":"reject"}]}`)
		strict := open(t, opt)
		_, err := strict.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.ErrorIs(t, err, ErrSignature)
		assert.Zero(t, reg.takeBlobs())
		assert.Empty(t, layerIDs(t, strict))
	})
}

func TestImportArtifact(t *testing.T) {
	artifact := mutate.ConfigMediaType(imageOf(t, "one", "two"), "application/vnd.example.config")
	d, err := artifact.Digest()
	require.NoError(t, err)
	layout := ociLayout(t, map[string]any{"reg.example/a:1": artifact})
	opt := testOptions(t)
	root := open(t, opt)
	for range 2 {
		got, err := root.Import(t.Context(), layout, ImportOptions{})
		require.NoError(t, err)
		assert.Equal(t, digest.Digest(d.String()), got.Digest)
		assert.Equal(t, map[string]string{"file-0": "one", "file-1": "two"}, filesOf(t, root, got.ID))
		assertProven(t, root, got.ID, "any", true)
	}
	assertNoDownloads(t, opt)
}

func TestPullOfAnArtifactProvesAccess(t *testing.T) {
	reg := newRegistry(t)
	reg.pushArtifact(t, "a", part{mediaType: "text/plain", title: "f", content: []byte("one")})
	reg.private("user", "secret")
	root := open(t, testOptions(t))
	got, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{Auth: &Auth{Username: "user", Password: "secret"}, Namespace: "team"})
	require.NoError(t, err)
	assertProven(t, root, got.ID, "team", true)
	assertProven(t, root, got.ID, "other", false)
	require.ErrorIs(t, root.Prove(t.Context(), got.ID), ErrUnproven)
	reg.setFault(nil)
	reg.take()
	require.NoError(t, root.Prove(t.Context(), got.ID))
	assert.Len(t, reg.take(), 1, "only the artifact's digest is asked for")
	assertProven(t, root, got.ID, "other", true)
}

func TestPullArtifactBreaksOff(t *testing.T) {
	reg := newRegistry(t)
	small, big := part{mediaType: "text/plain", title: "s", content: []byte("small")}, part{mediaType: "text/plain", title: "b", content: []byte(noise(4 << 20))}
	reg.pushArtifact(t, "a", small, big)
	ref, path := reg.host+"/a:1", digest.FromBytes(big.content).String()
	// halve sends half of the big blob, and then does what is to be done.
	halve := func(then func(w http.ResponseWriter, r *http.Request)) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if !strings.HasSuffix(r.URL.Path, path) {
				next.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(big.content)))
			_, _ = w.Write(big.content[:2<<20])
			w.(http.Flusher).Flush() //nolint:forcetypeassert // the server's
			then(w, r)
		}
	}
	nothingOf := func(t *testing.T, root *Root, opt Options) {
		t.Helper()
		images, errs := root.Images(t.Context())
		assert.Empty(t, images)
		assert.Empty(t, errs)
		assert.Len(t, layerIDs(t, root), 1, "that of the small blob stays for the next pull")
		staged, err := filepath.Glob(filepath.Join(opt.GraphRoot, "overlay*", "t*mp*", "temp-dir-*"))
		require.NoError(t, err)
		assert.Empty(t, staged)
		reg.setFault(nil)
		reg.take()
		got, err := root.Pull(t.Context(), ref, PullOptions{})
		require.NoError(t, err)
		assert.Equal(t, map[string]string{"s": "small", "b": string(big.content)}, filesOf(t, root, got.ID))
		assert.Equal(t, 1, reg.takeBlobs())
	}

	t.Run("caller leaves", func(t *testing.T) {
		opt := testOptions(t)
		root := open(t, opt)
		ctx, cancel := context.WithCancel(t.Context())
		reg.setFault(halve(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
		var last Progress
		_, err := root.Pull(ctx, ref, PullOptions{Progress: func(p Progress) {
			last = p
			if p.Done >= 2<<20 {
				cancel()
			}
		}})
		require.ErrorIs(t, err, context.Canceled)
		assert.Equal(t, int64(5+4<<20), last.Total)
		require.Eventually(t, root.pulls.idle, time.Minute, time.Millisecond)
		nothingOf(t, root, opt)
	})
	t.Run("registry stalls", func(t *testing.T) {
		opt := testOptions(t)
		opt.StallTimeout = 200 * time.Millisecond
		root := open(t, opt)
		reg.setFault(halve(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
		_, err := root.Pull(t.Context(), ref, PullOptions{})
		require.ErrorIs(t, err, ErrRegistryUnavailable)
		require.ErrorContains(t, err, "nothing came from the registry for 200ms")
		root.stall = time.Minute
		nothingOf(t, root, opt)
	})
	t.Run("registry does not answer", func(t *testing.T) {
		opt := testOptions(t)
		opt.StallTimeout = 200 * time.Millisecond
		root := open(t, opt)
		reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if strings.HasSuffix(r.URL.Path, path) {
				<-r.Context().Done()
				return
			}
			next.ServeHTTP(w, r)
		})
		_, err := root.Pull(t.Context(), ref, PullOptions{})
		require.ErrorIs(t, err, ErrRegistryUnavailable)
		root.stall = time.Minute
		nothingOf(t, root, opt)
	})
	t.Run("connection is cut once", func(t *testing.T) {
		var cuts atomic.Int32
		reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if strings.HasSuffix(r.URL.Path, path) && cuts.Add(1) == 1 {
				halve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })(w, r, next)
			}
			next.ServeHTTP(w, r)
		})
		root := open(t, testOptions(t))
		var phases []Phase
		got, err := root.Pull(t.Context(), ref, PullOptions{Progress: func(p Progress) { phases = append(phases, p.Phase) }})
		require.NoError(t, err)
		assert.Equal(t, map[string]string{"s": "small", "b": string(big.content)}, filesOf(t, root, got.ID))
		assert.Equal(t, PhaseStoring, phases[len(phases)-1])
		reg.setFault(nil)
	})
	t.Run("disk is full", func(t *testing.T) {
		opt := testOptions(t)
		require.NoError(t, os.MkdirAll(opt.GraphRoot, 0o700))
		require.NoError(t, unix.Mount("full", opt.GraphRoot, "tmpfs", 0, "size=3m"))
		t.Cleanup(func() { require.NoError(t, unix.Unmount(opt.GraphRoot, 0)) })
		root := open(t, opt)
		_, err := root.Pull(t.Context(), ref, PullOptions{})
		require.ErrorIs(t, err, ErrDiskFull)
		images, errs := root.Images(t.Context())
		assert.Empty(t, images)
		assert.Empty(t, errs)
	})
	t.Run("many at once", func(t *testing.T) {
		root := open(t, testOptions(t))
		reg.take()
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				_, err := root.Pull(t.Context(), ref, PullOptions{})
				assert.NoError(t, err)
			})
		}
		all.Wait()
		assert.Equal(t, 2, reg.takeBlobs(), "they share it")
	})
}

func FuzzPlanBlobs(f *testing.F) {
	for _, p := range []part{
		{title: "a/b"}, {title: "../a"}, {annotations: map[string]string{"org.cncf.model.filepath": "w/a", "org.cncf.model.file.metadata+json": `{"mode":420,"mtime":"2025-01-01T00:00:00Z"}`}},
	} {
		content, err := json.Marshal(manifestOf(p, part{mediaType: ispec.MediaTypeImageLayerGzip}))
		require.NoError(f, err)
		f.Add(content)
	}
	f.Add([]byte(`{"layers":[{"mediaType":"a/b.tar+zstd","digest":"sha256:` + id("1") + `","size":1},null]}`))
	rules, err := newMediaTypes(map[string]string{"a/*": BlobFile, "b/c*": BlobTar})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, content []byte) {
		m, err := parseArtifact(content)
		if err != nil || m == nil {
			return
		}
		blobs, err := planBlobs(m, rules)
		if err != nil {
			require.True(t, errors.Is(err, ErrInvalidArtifact) || errors.Is(err, ErrUnsupported), "%v", err)
			return
		}
		require.Len(t, blobs, len(m.Layers))
		for _, b := range blobs {
			require.Zero(t, b.mode&^0o777)
			require.GreaterOrEqual(t, b.mtime.Unix(), int64(0))
			if b.name == "" {
				require.True(t, b.unpack)
				continue
			}
			require.True(t, filepath.IsLocal(b.name), "%q", b.name)
			require.Equal(t, filepath.Clean(b.name), b.name)
			// What is written can be read.
			var out bytes.Buffer
			b.Size = 0
			w := blobWriter{blob: b, budget: &budget{}, clear: func(string) error { return nil }}
			require.NoError(t, w.writeFile(&out, strings.NewReader("")))
			var last string
			for entries := tar.NewReader(&out); ; {
				entry, err := entries.Next()
				if errors.Is(err, io.EOF) {
					break
				}
				require.NoError(t, err)
				last = entry.Name
			}
			require.Equal(t, b.name, last)
		}
	})
}

// FuzzArchive reads blobs as archives: none is taken for whole that is not, and none is more than it may be.
func FuzzArchive(f *testing.F) {
	archive := archiveOf(f, tar.Header{Name: "d/f", Typeflag: tar.TypeReg}, tar.Header{Name: "l", Linkname: "d", Typeflag: tar.TypeSymlink})
	f.Add(archive)
	f.Add(gzipped(f, archive))
	f.Add(zstandard(f, archive))
	f.Add([]byte("no archive"))
	f.Fuzz(func(t *testing.T, content []byte) {
		const limit = 1 << 20
		d := digest.FromBytes(content)
		for _, name := range []string{"", "title"} {
			b := blob{Descriptor: ispec.Descriptor{Digest: d, Size: int64(len(content))}, unpack: true, name: name}
			w := blobWriter{blob: b, budget: &budget{limits: []Limit{{Bytes: limit}}}, clear: func(string) error { return nil }}
			r := &blobReader{
				content: bytes.NewReader(content), blob: b, verifier: d.Verifier(), came: func(int64) {},
				stall: newStallWatch(time.Hour, func() {}),
			}
			var out bytes.Buffer
			err := w.write(&out, r)
			require.NoError(t, r.err)
			require.LessOrEqual(t, out.Len(), limit+2*len(content)+4*tarBlock)
			if err == nil {
				require.Equal(t, int64(len(content)), r.read)
			}
		}
	})
}
