package storage

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// pushImage pushes an image of these blobs as repository:1, whose config says that unpacked they have those digests.
func (r *testRegistry) pushImage(tb testing.TB, repository string, diffs []digest.Digest, parts ...part) {
	tb.Helper()
	config, err := json.Marshal(ispec.Image{
		Platform: ispec.Platform{OS: "linux", Architecture: "amd64"}, RootFS: ispec.RootFS{Type: "layers", DiffIDs: diffs},
	})
	require.NoError(tb, err)
	m := manifestOf(parts...)
	m.ArtifactType = ""
	m.Config = ispec.Descriptor{MediaType: ispec.MediaTypeImageConfig, Digest: digest.FromBytes(config), Size: int64(len(config))}
	r.pushBlob(tb, repository, config)
	for _, p := range parts {
		r.pushBlob(tb, repository, p.content)
	}
	r.pushManifest(tb, repository, "1", ispec.MediaTypeImageManifest, m)
}

// pushPacked pushes an image of archives, each packed, as repository:1.
func (r *testRegistry) pushPacked(tb testing.TB, repository, mediaType string, pack func(testing.TB, []byte) []byte, archives ...[]byte) {
	tb.Helper()
	var diffs []digest.Digest
	var parts []part
	for _, archive := range archives {
		diffs = append(diffs, digest.FromBytes(archive))
		parts = append(parts, part{mediaType: mediaType, content: pack(tb, archive)})
	}
	r.pushImage(tb, repository, diffs, parts...)
}

func plain(_ testing.TB, content []byte) []byte { return content }

// TestHostileImages pulls images that are refused for what their manifests, configs and compression are. What is in
// their archives is in TestHostileArchives.
func TestHostileImages(t *testing.T) {
	const gz, zst = ispec.MediaTypeImageLayerGzip, ispec.MediaTypeImageLayerZstd
	archive := archiveOf(t, reg("f"))
	diff := digest.FromBytes(archive)
	said := func(change func(*ispec.Descriptor)) part {
		return part{mediaType: gz, content: gzipped(t, archive), descriptor: change}
	}
	packed := func(mediaType string, content []byte) part { return part{mediaType: mediaType, content: content} }
	nothing := make([]byte, 2*tarBlock)
	numbered := func(n int) (diffs []digest.Digest, parts []part) {
		for i := range n {
			content := archiveOf(t, reg(fmt.Sprint("f", i)))
			diffs, parts = append(diffs, digest.FromBytes(content)), append(parts, packed(ispec.MediaTypeImageLayer, content))
		}
		return diffs, parts
	}
	diffsOf128, partsOf128 := numbered(128)

	w := newHostileWorld(t, nil)
	for name, tc := range map[string]struct {
		diffs []digest.Digest
		parts []part
		text  string
	}{
		"128 layers":               {diffsOf128, partsOf128, ""},
		"no layers":                {nil, nil, ""},
		"one layer twice":          {[]digest.Digest{diff, diff}, []part{said(nil), said(nil)}, ""},
		"blob of nothing":          {[]digest.Digest{digest.FromString("")}, []part{packed(ispec.MediaTypeImageLayer, nil)}, ""},
		"archive of nothing":       {[]digest.Digest{digest.FromBytes(nothing)}, []part{packed(gz, gzipped(t, nothing))}, ""},
		"larger than it says":      {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Size-- })}, "has more than"},
		"smaller than it says":     {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Size++ })}, "bytes, and not"},
		"larger than nothing":      {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Size = 0 })}, "has more than 0 bytes"},
		"negative size":            {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Size = -2 })}, "size -2 is negative"},
		"size of all there is":     {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Size = 1<<63 - 1 })}, "bytes, and not"},
		"digest that is a path":    {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Digest = "sha256:../../a" })}, "invalid checksum digest length"},
		"digest of other content":  {[]digest.Digest{diff}, []part{said(func(d *ispec.Descriptor) { d.Digest = digest.FromString("absent") })}, "image not found"},
		"unpacked to other":        {[]digest.Digest{digest.FromString("other")}, []part{said(nil)}, "digest mismatch"},
		"unpacked to a path":       {[]digest.Digest{"sha256:../../a"}, []part{said(nil)}, "digest mismatch"},
		"more layers than it says": {nil, []part{said(nil)}, ""},
		"fewer than it says":       {[]digest.Digest{diff, diff}, []part{said(nil)}, ""},
		"gzip that is cut off":     {[]digest.Digest{diff}, []part{packed(gz, gzipped(t, archive)[:60])}, "unexpected EOF"},
		"gzip with a wrong sum":    {[]digest.Digest{diff}, []part{packed(gz, flipped(gzipped(t, archive), -6))}, "checksum"},
		"gzip with garbage behind": {[]digest.Digest{diff}, []part{packed(gz, append(gzipped(t, archive), "garbage"...))}, "writing blob"},
		"gzip of two":              {[]digest.Digest{diff}, []part{packed(gz, append(gzipped(t, archive[:tarBlock]), gzipped(t, archive[tarBlock:])...))}, ""},
		"gzip in gzip":             {[]digest.Digest{digest.FromBytes(gzipped(t, archive))}, []part{packed(gz, gzipped(t, gzipped(t, archive)))}, "unexpected EOF"},
		"zstd":                     {[]digest.Digest{diff}, []part{packed(zst, zstandard(t, archive))}, ""},
		"zstd that is cut off":     {[]digest.Digest{diff}, []part{packed(zst, zstandard(t, archive)[:60])}, "writing blob"},
		"zstd called gzip":         {[]digest.Digest{diff}, []part{packed(gz, zstandard(t, archive))}, ""},
		"no archive":               {[]digest.Digest{digest.FromString("no archive")}, []part{packed(ispec.MediaTypeImageLayer, []byte("no archive"))}, "unexpected EOF"},
		"BZh, as bzip2 begins":     {[]digest.Digest{digest.FromBytes(archiveOf(t, reg("BZh9")))}, []part{packed(gz, gzipped(t, archiveOf(t, reg("BZh9"))))}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w.reg.pushImage(t, "a", tc.diffs, tc.parts...)
			_, err := w.pull(t, "a:1")
			check(t, err, tc.text)
		})
	}
}

// TestBlobWithoutAnEnd pulls a layer of which more and more comes.
func TestBlobWithoutAnEnd(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	archive := archiveOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "f"})
	reg.pushPacked(t, "a", ispec.MediaTypeImageLayer, plain, archive)
	ended := make(chan struct{})
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.HasSuffix(r.URL.Path, digest.FromBytes(archive).String()) {
			next.ServeHTTP(w, r)
			return
		}
		defer close(ended)
		for {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				return
			}
		}
	})
	_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.ErrorIs(t, err, ErrDigestMismatch)
	require.ErrorContains(t, err, fmt.Sprintf("has more than %d bytes", len(archive)))
	<-ended
	assertNoDownloads(t, opt)
	require.Empty(t, layerIDs(t, root))
}

// zeros is an archive of one file of that size.
func zeros(t *testing.T, name string, size int) []byte {
	t.Helper()
	var buf bytes.Buffer
	archive := tar.NewWriter(&buf)
	require.NoError(t, archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(size), Mode: 0o644}))
	_, err := archive.Write(make([]byte, size))
	require.NoError(t, err)
	require.NoError(t, archive.Close())
	return buf.Bytes()
}

// TestUnpackedLimit pulls images that are small until they are unpacked.
func TestUnpackedLimit(t *testing.T) {
	const gz, zst = ispec.MediaTypeImageLayerGzip, ispec.MediaTypeImageLayerZstd
	const mb = 1 << 20
	limit := Limit{8 * mb, "max in [test]"}
	bomb := zeros(t, "f", 64*mb)
	var files []tar.Header
	for i := range 17_000 {
		files = append(files, dir(fmt.Sprint("d", i)))
	}
	manyHoles := append(bytes.Repeat(holes(t, 2*mb)[:4*tarBlock], 6), make([]byte, 2*tarBlock)...)
	for name, push := range map[string]func(r *testRegistry){
		"gzip":   func(r *testRegistry) { r.pushPacked(t, "a", gz, gzipped, bomb) },
		"zstd":   func(r *testRegistry) { r.pushPacked(t, "a", zst, zstandard, bomb) },
		"plain":  func(r *testRegistry) { r.pushPacked(t, "a", ispec.MediaTypeImageLayer, plain, zeros(t, "f", 9*mb)) },
		"Docker": func(r *testRegistry) { r.push(t, "a:1", dockerImage(t, bomb)) },
		"layers": func(r *testRegistry) {
			r.pushPacked(t, "a", gz, gzipped, zeros(t, "a", 3*mb), zeros(t, "b", 3*mb), zeros(t, "c", 3*mb))
		},
		"holes":      func(r *testRegistry) { r.pushPacked(t, "a", gz, gzipped, holes(t, 256*mb)) },
		"many holes": func(r *testRegistry) { r.pushPacked(t, "a", gz, gzipped, manyHoles) },
		"many files": func(r *testRegistry) { r.pushPacked(t, "a", gz, gzipped, archiveOf(t, files...)) },
		"behind the end": func(r *testRegistry) {
			r.pushPacked(t, "a", gz, gzipped, append(archiveOf(t, reg("f")), make([]byte, 16*mb)...))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newHostileWorld(t, nil)
			before := layerIDs(t, w.root)
			push(w.reg)
			for _, set := range []string{"root", "pull"} {
				var opt PullOptions
				if set == "root" {
					w.root.limits.Store(&[]Limit{{}, limit})
				} else {
					w.root.limits.Store(nil)
					opt.Limit = limit
				}
				_, err := w.root.Pull(t.Context(), w.reg.host+"/a:1", opt)
				require.ErrorIs(t, err, ErrTooLarge, set)
				assert.Regexp(t, `^pull "127\.0\.0\.1:\d+/a:1": max in \[test\]: image is too large: `+
					`(with layer sha256:[0-9a-f]{64} it has more than 8\.389MB, unpacked|its layers have more than 8\.389MB in all)$`, err.Error(), set)
				assert.ElementsMatch(t, before, layerIDs(t, w.root), "its layers are gone")
				_, err = w.root.Resolve(t.Context(), w.reg.host+"/a:1")
				require.ErrorIs(t, err, ErrNotFound)
				assertNoDownloads(t, w.opt)
				assertNothingStaged(t, w.opt)
			}
			w.reg.push(t, "b:1", imageOf(t, "good"))
			_, err := w.root.Pull(t.Context(), w.reg.host+"/b:1", PullOptions{Limit: limit})
			require.NoError(t, err)
		})
	}
}

func dockerImage(t *testing.T, archive []byte) v1.Image {
	t.Helper()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive)), nil },
		tarball.WithMediaType(types.DockerLayer))
	require.NoError(t, err)
	return imageWith(t, "amd64", layer)
}

// TestUnpackedLimitOfSharedLayers pulls an image most of which the root has: that counts, and stays.
func TestUnpackedLimitOfSharedLayers(t *testing.T) {
	const mb = 1 << 20
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	base, more := zeros(t, "base", 8*mb), zeros(t, "more", 3*mb)
	reg.pushPacked(t, "base", ispec.MediaTypeImageLayerGzip, gzipped, base)
	reg.pushPacked(t, "app", ispec.MediaTypeImageLayerGzip, gzipped, base, more)
	_, err := root.Pull(t.Context(), reg.host+"/base:1", PullOptions{})
	require.NoError(t, err)
	before := layerIDs(t, root)

	total := int64(len(base) + len(more))
	_, err = root.Pull(t.Context(), reg.host+"/app:1", PullOptions{Limit: Limit{total - 1, "max"}})
	require.ErrorIs(t, err, ErrTooLarge)
	require.ErrorContains(t, err, digest.FromBytes(gzipped(t, more)).String())
	require.Equal(t, before, layerIDs(t, root))
	image, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{Limit: Limit{total, "max"}})
	require.NoError(t, err)
	require.NoError(t, root.CheckSize(t.Context(), image.ID, Limit{total, "max"}))
	require.ErrorIs(t, root.CheckSize(t.Context(), image.ID, Limit{total - 1, "max"}), ErrTooLarge)

	// The records are those that a pull without a limit leaves.
	layers, err := root.store.Layers()
	require.NoError(t, err)
	for _, l := range layers {
		content := more
		if l.Parent == "" {
			content = base
		}
		assert.Equal(t, digest.FromBytes(content), l.UncompressedDigest)
		assert.Equal(t, int64(len(content)), l.UncompressedSize)
		assert.Equal(t, digest.FromBytes(gzipped(t, content)), l.CompressedDigest)
		assert.Equal(t, int64(len(gzipped(t, content))), l.CompressedSize)
	}
}

// TestUnpackedOntoAFullDisk pulls an image that the disk has no room for: it is refused before the disk is full.
func TestUnpackedOntoAFullDisk(t *testing.T) {
	const mb = 1 << 20
	for name, tc := range map[string]struct {
		options string
		archive []byte
	}{
		"one file": {"size=64m", zeros(t, "f", 256*mb)},
		"bytes":    {"size=64m", bytes.Join([][]byte{zeros(t, "a", 30*mb)[:30*mb+tarBlock], zeros(t, "b", 30*mb)[:30*mb+tarBlock], zeros(t, "c", 30*mb)}, nil)},
		"holes":    {"size=64m", holes(t, 128*mb)},
		"files":    {"size=64m,nr_inodes=8000", archiveOf(t, many(10_000)...)},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			opt := testOptions(t)
			require.NoError(t, os.Mkdir(opt.GraphRoot, 0o700))
			require.NoError(t, unix.Mount("small", opt.GraphRoot, "tmpfs", 0, tc.options))
			t.Cleanup(func() { require.NoError(t, unix.Unmount(opt.GraphRoot, unix.MNT_DETACH)) })
			root := open(t, opt)
			before, err := roomIn(opt.GraphRoot)
			require.NoError(t, err)
			reg.pushPacked(t, "a", ispec.MediaTypeImageLayerGzip, gzipped, archiveOf(t, symlink("l", "f")), tc.archive)
			for range 2 {
				_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
				require.ErrorIs(t, err, ErrDiskFull)
				require.ErrorContains(t, err, "would fill the disk of the root, which has ")
				require.NotContains(t, err.Error(), unix.ENOSPC.Error())
				require.Empty(t, layerIDs(t, root))
				assertNothingStaged(t, opt)
				after, err := roomIn(opt.GraphRoot)
				require.NoError(t, err)
				require.Less(t, before.available-after.available, uint64(mb))
			}
			reg.push(t, "b:1", imageOf(t, strings.Repeat("good", 1<<20)))
			_, err = root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
			require.NoError(t, err)
		})
	}
}
