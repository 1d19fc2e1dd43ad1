package storage

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
	dirs, err := root.LowerDirs(tb.Context(), imageID)
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
		"files": {parts: []part{{mediaType: raw, title: "a", content: []byte("one")}, {mediaType: raw, title: "sub/dir/b", content: big}},
			want: map[string]string{"a": "one", "sub/dir/b": string(big)}},
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
		"foreign type as a tar":    {parts: []part{{mediaType: "application/vnd.example.bundle", content: gzipped(t, archive)}}, rules: map[string]string{"application/*": BlobFile, "application/vnd.example.*": BlobTar}, want: inTar},
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
