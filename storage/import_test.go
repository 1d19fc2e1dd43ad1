package storage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// dockerArchive writes a docker-archive of the images by their names.
func dockerArchive(t *testing.T, images map[string]v1.Image) string {
	t.Helper()
	tagged := make(map[name.Tag]v1.Image)
	for n, image := range images {
		tag, err := name.NewTag(n)
		require.NoError(t, err)
		tagged[tag] = image
	}
	path := filepath.Join(t.TempDir(), "docker.tar")
	require.NoError(t, tarball.MultiWriteToFile(path, tagged))
	return path
}

// ociLayout writes an OCI layout of the images and indexes by their reference names.
func ociLayout(t *testing.T, images map[string]any) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "oci")
	at, err := layout.Write(dir, empty.Index)
	require.NoError(t, err)
	for n, image := range images {
		option := layout.WithAnnotations(map[string]string{})
		if n != "" {
			option = layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": n})
		}
		switch image := image.(type) {
		case v1.Image:
			require.NoError(t, at.AppendImage(image, option))
		case v1.ImageIndex:
			require.NoError(t, at.AppendIndex(image, option))
		}
	}
	return dir
}

// tarOf writes a directory's files as a tar file.
func tarOf(t *testing.T, dir string, compress bool) string {
	t.Helper()
	var content bytes.Buffer
	var out io.Writer = &content
	zip := gzip.NewWriter(&content)
	if compress {
		out = zip
	}
	w := tar.NewWriter(out)
	require.NoError(t, w.AddFS(os.DirFS(dir)))
	require.NoError(t, w.Close())
	if compress {
		require.NoError(t, zip.Close())
	}
	path := filepath.Join(t.TempDir(), "oci.tar")
	require.NoError(t, os.WriteFile(path, content.Bytes(), 0o600))
	return path
}

func zipped(t *testing.T, file string) string {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	var out bytes.Buffer
	zip := gzip.NewWriter(&out)
	_, err = zip.Write(content)
	require.NoError(t, err)
	require.NoError(t, zip.Close())
	require.NoError(t, os.WriteFile(file+".gz", out.Bytes(), 0o600))
	return file + ".gz"
}

func TestImport(t *testing.T) {
	app, other := imageOf(t, "one", "two"), imageOf(t, "three")
	index := indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x"))))
	one := dockerArchive(t, map[string]v1.Image{"reg.example/app:1": app})
	two := dockerArchive(t, map[string]v1.Image{"reg.example/app:1": app, "reg.example/other:1": other})
	named := ociLayout(t, map[string]any{"reg.example/app:1": app})
	several := ociLayout(t, map[string]any{"reg.example/other:1": other, "reg.example/app:1": app})
	plain := ociLayout(t, map[string]any{"latest": app})
	multi := ociLayout(t, map[string]any{"reg.example/app:1": index})
	nested := ociLayout(t, map[string]any{"reg.example/app:1": indexAmong(index)})

	for what, tc := range map[string]struct{ from, name, want string }{
		"docker-archive":                  {one, "", "reg.example/app:1"},
		"docker-archive said":             {"docker-archive:" + one, "", "reg.example/app:1"},
		"docker-archive compressed":       {zipped(t, one), "", "reg.example/app:1"},
		"docker-archive other name":       {one, "reg.example/new", "reg.example/new:latest"},
		"docker-archive one of several":   {two, "reg.example/app:1", "reg.example/app:1"},
		"OCI layout":                      {named, "", "reg.example/app:1"},
		"OCI layout said":                 {"oci:" + named, "", "reg.example/app:1"},
		"OCI layout one of several":       {several, "reg.example/app:1", "reg.example/app:1"},
		"OCI layout with a tag alone":     {plain, "reg.example/new:2", "reg.example/new:2"},
		"OCI layout with an index":        {multi, "", "reg.example/app:1"},
		"OCI layout with nested index":    {nested, "", "reg.example/app:1"},
		"oci-archive":                     {tarOf(t, named, false), "", "reg.example/app:1"},
		"oci-archive said":                {"oci-archive:" + tarOf(t, named, false), "", "reg.example/app:1"},
		"oci-archive compressed":          {tarOf(t, named, true), "", "reg.example/app:1"},
		"oci-archive one of several":      {tarOf(t, several, false), "reg.example/app:1", "reg.example/app:1"},
		"oci-archive with an index":       {tarOf(t, multi, false), "", "reg.example/app:1"},
		"oci-archive with index and name": {tarOf(t, multi, false), "reg.example/new:3", "reg.example/new:3"},
	} {
		t.Run(what, func(t *testing.T) {
			opt := testOptions(t)
			root := open(t, opt)
			var last Progress
			image, err := root.Import(t.Context(), tc.from, ImportOptions{Name: tc.name, Progress: func(p Progress) { last = p }})
			require.NoError(t, err)
			assert.Equal(t, imageID(t, app), image.ID)
			assert.Equal(t, []string{tc.want}, image.Names)
			assert.Positive(t, last.Total)
			assert.Equal(t, last.Total, last.Done)

			found, err := root.Resolve(t.Context(), tc.want)
			require.NoError(t, err)
			assertSame(t, image, found)
			dirs, err := root.LowerDirs(t.Context(), image.ID, nil)
			require.NoError(t, err)
			content, err := os.ReadFile(filepath.Join(dirs[0], "file-1"))
			require.NoError(t, err)
			assert.Equal(t, "two", string(content))

			proven, err := root.Proven(t.Context(), image.ID, "any")
			require.NoError(t, err)
			assert.True(t, proven)
			again, err := root.Import(t.Context(), tc.from, ImportOptions{Name: tc.name, Progress: func(Progress) { t.Error("it is there") }})
			require.NoError(t, err)
			assertSame(t, image, again)
			assertNoDownloads(t, opt)
		})
	}
}

func TestImportRefused(t *testing.T) {
	app, other := imageOf(t, "one"), imageOf(t, "three")
	one := dockerArchive(t, map[string]v1.Image{"reg.example/app:1": app})
	two := dockerArchive(t, map[string]v1.Image{"reg.example/app:1": app, "reg.example/other:1": other})
	foreign := ociLayout(t, map[string]any{"a:1": mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
		Add: imageWith(t, "s390x"), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}},
	})})
	cut := filepath.Join(t.TempDir(), "cut.tar")
	content, err := os.ReadFile(one)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(cut, content[:512+100], 0o600))
	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, []byte("no archive"), 0o600))
	nothing := filepath.Join(t.TempDir(), "tar")
	require.NoError(t, os.WriteFile(nothing, make([]byte, 1024), 0o600))

	// A layer that is not what its digest says.
	bad := ociLayout(t, map[string]any{"reg.example/app:1": imageOf(t, "one", "other")})
	blobs, err := os.ReadDir(filepath.Join(bad, "blobs", "sha256"))
	require.NoError(t, err)
	layers, err := imageOf(t, "one", "other").Layers()
	require.NoError(t, err)
	last, err := layers[1].Digest()
	require.NoError(t, err)
	first, err := layers[0].Digest()
	require.NoError(t, err)
	require.NotEmpty(t, blobs)
	wrong, err := os.ReadFile(filepath.Join(bad, "blobs", "sha256", first.Hex))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(bad, "blobs", "sha256", last.Hex), wrong, 0o600))

	for what, tc := range map[string]struct {
		from, name string
		is         error
		says       string
	}{
		"several none chosen":      {two, "", ErrInvalidReference, "reg.example/other:1"},
		"several another name":     {two, "reg.example/new:1", ErrNotFound, "none is named reg.example/new:1"},
		"no name":                  {ociLayout(t, map[string]any{"latest": app}), "", ErrInvalidReference, "it has no name"},
		"bad name":                 {one, "UPPER case", ErrInvalidReference, ""},
		"digest as name":           {one, "a@sha256:" + imageID(t, app), ErrInvalidReference, "a tag"},
		"no such file":             {"/no/such/file", "", os.ErrNotExist, "/no/such/file"},
		"no such kind":             {"dir:" + one, "", os.ErrNotExist, "dir:"},
		"no archive":               {text, "", nil, "read it as a tar file"},
		"tar of nothing":           {nothing, "", ErrUnsupported, "manifest.json"},
		"docker-archive as OCI":    {"oci-archive:" + one, "", ErrUnsupported, "index.json"},
		"file as layout":           {"oci:" + one, "", ErrUnsupported, "a file is no OCI layout"},
		"directory as archive":     {"docker-archive:" + foreign, "", ErrUnsupported, "a directory is no docker-archive"},
		"directory of other files": {t.TempDir(), "", ErrUnsupported, "no OCI layout"},
		"empty layout":             {ociLayout(t, nil), "a:1", ErrNotFound, "there is no image in it"},
		"another platform":         {foreign, "", ErrNotFound, "linux/s390x"},
		"cut off":                  {cut, "", io.ErrUnexpectedEOF, ""},
		"content that is changed":  {bad, "", ErrDigestMismatch, ""},
	} {
		t.Run(what, func(t *testing.T) {
			opt := testOptions(t)
			root := open(t, opt)
			_, err := root.Import(t.Context(), tc.from, ImportOptions{Name: tc.name})
			require.Error(t, err)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			require.ErrorContains(t, err, tc.says)
			images, bad := root.Images(t.Context())
			assert.Empty(t, bad)
			assert.Empty(t, images)
			assertNoDownloads(t, opt)
		})
	}
}

func TestImportIsUnderThePolicyOfTheName(t *testing.T) {
	opt := testOptions(t)
	write(t, opt.SignaturePolicy, `{"default":[{"type":"insecureAcceptAnything"}],
		"transports":{"docker":{"bad.example":[{"type":"reject"}]}}}`)
	root := open(t, opt)
	app := imageOf(t, "one")
	archive := dockerArchive(t, map[string]v1.Image{"bad.example/app:1": app})
	_, err := root.Import(t.Context(), archive, ImportOptions{})
	require.ErrorIs(t, err, ErrSignature)
	images, _ := root.Images(t.Context())
	require.Empty(t, images)
	_, err = root.Import(t.Context(), archive, ImportOptions{Name: "good.example/app:1"})
	require.NoError(t, err)

	// Also for what is there already.
	write(t, opt.SignaturePolicy, `{"default":[{"type":"reject"}]}`)
	_, err = root.Import(t.Context(), archive, ImportOptions{Name: "good.example/app:1"})
	require.ErrorIs(t, err, ErrSignature)
}

func TestImportEnds(t *testing.T) {
	opt := testOptions(t)
	root := open(t, opt)
	archive := zipped(t, dockerArchive(t, map[string]v1.Image{"reg.example/app:1": imageOf(t, "one", "two")}))

	ctx, cancel := context.WithCancel(t.Context())
	_, err := root.Import(ctx, archive, ImportOptions{Progress: func(Progress) { cancel() }})
	require.ErrorIs(t, err, context.Canceled)

	require.NoError(t, root.Close())
	_, err = root.Import(t.Context(), archive, ImportOptions{})
	require.ErrorIs(t, err, ErrClosed)
	assertNoDownloads(t, opt)
}
