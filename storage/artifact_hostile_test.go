package storage

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// escaped is a file that hostile content tries to make at the host's root.
const escaped = "/ocihold-test-escaped"

// hostileWorld is a root with an innocent image, and a directory beside it, of which no content may change a thing.
type hostileWorld struct {
	root   *Root
	opt    Options
	reg    *testRegistry
	watch  []string
	before map[string]string
}

func newHostileWorld(t *testing.T, change func(*Options)) *hostileWorld {
	t.Helper()
	w := &hostileWorld{reg: newRegistry(t), opt: testOptions(t)}
	if change != nil {
		change(&w.opt)
	}
	w.root = open(t, w.opt)
	outside := outsideOf(w.opt)
	require.NoError(t, os.MkdirAll(outside, 0o755))
	write(t, filepath.Join(outside, "secret"), "secret")
	w.reg.push(t, "bystander:1", imageOf(t, "one", "two"))
	bystander, err := w.root.Pull(t.Context(), w.reg.host+"/bystander:1", PullOptions{})
	require.NoError(t, err)
	layers, err := w.root.LowerDirs(t.Context(), bystander.ID, nil)
	require.NoError(t, err)
	w.watch = append(layers, outside)
	w.before = snapshot(t, w.watch...)
	return w
}

func outsideOf(opt Options) string { return filepath.Join(filepath.Dir(opt.GraphRoot), "outside") }

// snapshot says of each path below dirs what it is and has.
func snapshot(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, dir := range dirs {
		require.NoError(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return err
			}
			found[path] = fmt.Sprint(info.Mode(), info.ModTime(), info.Size())
			if info.Mode().IsRegular() {
				content, err := os.ReadFile(path)
				found[path] += string(content)
				return err
			}
			return nil
		}))
	}
	return found
}

// pull pulls what may be refused, and then checks that nothing but its own layers was touched. With an error there is
// nothing of it.
func (w *hostileWorld) pull(t *testing.T, ref string) (Image, error) {
	t.Helper()
	image, err := w.root.Pull(t.Context(), w.reg.host+"/"+ref, PullOptions{})
	t.Cleanup(func() {
		if err == nil && w.root.store.Exists(image.ID) {
			_, err := w.root.store.DeleteImage(image.ID, true)
			require.NoError(t, err)
		}
	})
	assert.Equal(t, w.before, snapshot(t, w.watch...), "what is none of the image's")
	assert.NoFileExists(t, escaped)
	images, errs := w.root.Images(t.Context())
	assert.Empty(t, errs)
	want := 1
	if err == nil {
		want = 2
		dirs, err := w.root.LowerDirs(t.Context(), image.ID, nil)
		require.NoError(t, err)
		for _, dir := range dirs {
			assert.True(t, strings.HasPrefix(dir, w.opt.GraphRoot))
		}
	}
	assert.Len(t, images, want)
	layers, layersErr := w.root.store.Layers()
	require.NoError(t, layersErr)
	for i := range layers {
		assert.False(t, incomplete(&layers[i]), "half a layer is left")
	}
	assertNoDownloads(t, w.opt)
	assertNothingStaged(t, w.opt)
	return image, err
}

func assertNothingStaged(t *testing.T, opt Options) {
	t.Helper()
	for _, dir := range []string{"overlay/tempdirs", "overlay-layers/tmp"} {
		staged, err := filepath.Glob(filepath.Join(opt.GraphRoot, dir, "temp-dir-*"))
		require.NoError(t, err)
		assert.Empty(t, staged)
	}
}

// check holds that what was pulled is harmless, where text is empty, or was refused with that text.
func check(t *testing.T, err error, text string) {
	t.Helper()
	if text == "" {
		require.NoError(t, err)
		return
	}
	require.ErrorContains(t, err, text)
	t.Log(err)
}

func reg(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }

func dir(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }

func symlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}
}

func hardlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}
}

func xattr(key, value string) tar.Header {
	h := reg("f")
	h.PAXRecords = map[string]string{"SCHILY.xattr." + key: value}
	return h
}

func with(h tar.Header, change func(*tar.Header)) tar.Header {
	change(&h)
	return h
}

// changed returns an archive with its first header changed, and the checksum right again.
func changed(archive []byte, at int, bytes ...byte) []byte {
	copy(archive[at:], bytes)
	copy(archive[148:156], "        ")
	sum := 0
	for _, b := range archive[:tarBlock] {
		sum += int(b)
	}
	copy(archive[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return archive
}

// sparse is an archive of a file of that size that has nothing but holes.
func sparse(t *testing.T, size int64) []byte {
	t.Helper()
	archive := archiveOf(t, tar.Header{Typeflag: tar.TypeReg, Name: "holes", Format: tar.FormatGNU})
	archive = append(archive[:tarBlock:tarBlock], make([]byte, 2*tarBlock)...)
	archive = changed(archive, 124, []byte("00000000000\x00")...) // no bytes in the archive
	archive = changed(archive, 483, []byte(fmt.Sprintf("%011o ", size))...)
	return changed(archive, 156, tar.TypeGNUSparse)
}

// holes is the same as PAX has it, with which archive/tar fills the holes.
func holes(t *testing.T, size int64) []byte {
	t.Helper()
	record := func(key, value string) string {
		rest := fmt.Sprintf(" %s=%s\n", key, value)
		return fmt.Sprint(len(rest)+2, rest)
	}
	entry := func(name string, kind byte, content string) []byte {
		archive := make([]byte, 2*tarBlock)
		copy(archive, archiveOf(t, reg(name))[:tarBlock])
		copy(archive[tarBlock:], content)
		return changed(changed(archive, 124, []byte(fmt.Sprintf("%011o\x00", len(content)))...), 156, kind)
	}
	notes := record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") + record("GNU.sparse.name", "holes") +
		record("GNU.sparse.realsize", fmt.Sprint(size))
	mapOf := "0\n" + strings.Repeat("\x00", tarBlock-2)
	return slices.Concat(entry("notes", tar.TypeXHeader, notes), entry("f", tar.TypeReg, mapOf), make([]byte, 2*tarBlock))
}

// TestHostileArchives pulls archives as a layer of an image and as a blob of an artifact.
func TestHostileArchives(t *testing.T) {
	w := newHostileWorld(t, nil)
	for name, tc := range map[string]struct {
		archive []byte
		text    string // of the error; empty where it is harmless
	}{
		"name above":                   {archiveOf(t, reg("../escaped")), ""},
		"name far above":               {archiveOf(t, reg("../../../../../../../.."+escaped)), ""},
		"name above in the middle":     {archiveOf(t, reg("a/../../escaped")), ""},
		"name absolute":                {archiveOf(t, reg(escaped)), ""},
		"name of dots":                 {archiveOf(t, dir("..")), ""},
		"name of the root of a file":   {archiveOf(t, reg(".")), "non-directory entry as the archive root"},
		"name of the root of a link":   {archiveOf(t, symlink(".", "/")), "non-directory entry as the archive root"},
		"no name":                      {archiveOf(t, reg("")), "non-directory entry as the archive root"},
		"through an absolute link":     {archiveOf(t, symlink("l", "/"), reg("l"+escaped)), ""},
		"through a link above":         {archiveOf(t, symlink("l", "../../../../../.."), reg("l"+escaped)), ""},
		"through a chain of links":     {archiveOf(t, symlink("a", "b"), symlink("b", "c/d"), symlink("c", "/"), reg("a"+escaped)), ""},
		"through a loop":               {archiveOf(t, symlink("a", "b"), symlink("b", "a"), reg("a/f")), "too many"},
		"link in place of a directory": {archiveOf(t, dir("d"), symlink("d", "/"), reg("d"+escaped)), "duplicates of file paths not supported"},
		"directory through a link":     {archiveOf(t, symlink("l", "/"), dir("l"+escaped)), ""},
		"mode through a link":          {archiveOf(t, dir("d"), with(symlink("d", "/"), func(h *tar.Header) { h.Mode = 0o777 })), "duplicates of file paths not supported"},
		"hard link absolute":           {archiveOf(t, hardlink("h", "/etc/hostname")), "no such file"},
		"hard link above":              {archiveOf(t, hardlink("h", "../../outside/secret")), "no such file"},
		"hard link through a link":     {archiveOf(t, symlink("l", "/etc"), hardlink("h", "l/hostname")), "no such file"},
		"hard link to a link":          {archiveOf(t, symlink("l", "/etc/hostname"), hardlink("h", "l")), ""},
		"write through a hard link":    {archiveOf(t, symlink("l", "/etc/hostname"), hardlink("h", "l"), reg("h")), "duplicates of file paths not supported"},
		"hard link to itself":          {archiveOf(t, hardlink("h", "h")), "no such file"},
		"hard link to the root":        {archiveOf(t, hardlink("h", ".")), "not permitted"},
		"character device":             {archiveOf(t, tar.Header{Typeflag: tar.TypeChar, Name: "mem", Devmajor: 1, Devminor: 1}), ""},
		"block device":                 {archiveOf(t, tar.Header{Typeflag: tar.TypeBlock, Name: "disk", Devmajor: 8}), ""},
		"device in place of the root":  {archiveOf(t, tar.Header{Typeflag: tar.TypeBlock, Name: ".", Devmajor: 8}), "non-directory entry as the archive root"},
		"overlay's own whiteout":       {archiveOf(t, tar.Header{Typeflag: tar.TypeChar, Name: "w"}), ""},
		"fifo":                         {archiveOf(t, tar.Header{Typeflag: tar.TypeFifo, Name: "p"}), ""},
		"setuid":                       {archiveOf(t, with(reg("su"), func(h *tar.Header) { h.Mode = 0o6755 })), ""},
		"whiteout of the parent":       {archiveOf(t, reg("d/.wh...")), "invalid whiteout"},
		"whiteout of the directory":    {archiveOf(t, reg("d/.wh..")), "invalid whiteout"},
		"whiteout of nothing":          {archiveOf(t, reg("d/.wh.")), "invalid whiteout"},
		"whiteout through a link":      {archiveOf(t, symlink("l", "/etc"), reg("l/.wh.hostname")), ""},
		"whiteout of what is absent":   {archiveOf(t, reg(".wh.absent")), ""},
		"whiteout of the root":         {archiveOf(t, reg(".wh..wh..opq")), ""},
		"whiteout through one":         {archiveOf(t, reg(".wh.d/f")), ""},
		"opaque through a link":        {archiveOf(t, symlink("l", "/etc"), reg("l/.wh..wh..opq")), ""},
		"aufs's own directory":         {archiveOf(t, reg(".wh..wh.plnk/1"), hardlink("h", ".wh..wh.plnk/1")), ""},
		"one file twice":               {archiveOf(t, reg("f"), reg("f")), "duplicates of file paths not supported"},
		"file over a directory":        {archiveOf(t, dir("d"), reg("d/f"), reg("d")), "duplicates of file paths not supported"},
		"directory over a file":        {archiveOf(t, reg("d"), dir("d"), reg("d/f")), "duplicates of file paths not supported"},
		"below a file":                 {archiveOf(t, reg("d"), reg("d/f")), "not a directory"},
		"10,000 files":                 {archiveOf(t, many(10000)...), ""},
		"name that is not UTF-8":       {archiveOf(t, with(reg("a\xff\xfe"), func(h *tar.Header) { h.Format = tar.FormatGNU })), ""},
		"name of 255 bytes":            {archiveOf(t, reg(strings.Repeat("a", 255))), ""},
		"name of 256 bytes":            {archiveOf(t, reg(strings.Repeat("a", 256))), "file name too long"},
		"deep path":                    {archiveOf(t, reg(strings.Repeat("d/", 800)+"f")), ""},
		"too deep a path":              {archiveOf(t, reg(strings.Repeat("d/", 3000)+"f")), "file name too long"},
		"name of 900 KB":               {archiveOf(t, reg(strings.Repeat("d", 900000))), "file name too long"},
		"long time ago":                {archiveOf(t, with(reg("f"), func(h *tar.Header) { h.ModTime = time.Unix(-1<<40, 0); h.Format = tar.FormatPAX })), ""},
		"far in the future":            {archiveOf(t, with(reg("f"), func(h *tar.Header) { h.ModTime = time.Unix(1<<55, 0); h.Format = tar.FormatPAX })), ""},
		"owner that is too large":      {archiveOf(t, with(reg("f"), func(h *tar.Header) { h.Uid = 1 << 40; h.Format = tar.FormatPAX })), ""},
		"overlay's redirect":           {archiveOf(t, xattr("trusted.overlay.redirect", "/../../outside")), ""},
		"overlay's metacopy":           {archiveOf(t, xattr("trusted.overlay.metacopy", "")), ""},
		"file capability":              {archiveOf(t, xattr("security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")), ""},
		"attribute of no kind":         {archiveOf(t, xattr("nonsense", "x")), ""},
		"entry of no kind":             {changed(archiveOf(t, reg("f")), 156, 'Z'), "unhandled tar header type"},
		"wrong checksum":               {append([]byte("x"), archiveOf(t, reg("f"))[1:]...), "header"},
		"negative size":                {changed(archiveOf(t, reg("f")), 124, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), "header"},
		"size beyond the end":          {changed(archiveOf(t, reg("f")), 124, []byte("00077777777")...), "unexpected EOF"},
		"cut off":                      {archiveOf(t, reg("f"))[:515], "unexpected EOF"},
		"without an end":               {archiveOf(t, reg("f"))[:1024], ""},
		"garbage behind the end":       {append(archiveOf(t, reg("f")), "garbage"...), ""},
		"nothing but zeros":            {make([]byte, 1<<20), ""},
		"sparse file":                  {holes(t, 1<<20), ""},
		"compressed twice":             {gzipped(t, gzipped(t, archiveOf(t, reg("f")))), "unexpected EOF"},
		"sparse file, the old way":     {sparse(t, 1<<20), "unhandled tar header type"},
	} {
		t.Run(name, func(t *testing.T) {
			for kind, push := range map[string]func(t *testing.T){
				"artifact": func(t *testing.T) {
					t.Helper()
					w.reg.pushArtifact(t, "a", part{mediaType: ispec.MediaTypeImageLayer, content: tc.archive})
				},
				"image": func(t *testing.T) {
					t.Helper()
					layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
						return io.NopCloser(bytes.NewReader(tc.archive)), nil
					}, tarball.WithMediaType(types.OCILayer))
					require.NoError(t, err)
					w.reg.push(t, "a:1", imageWith(t, "amd64", layer))
				},
			} {
				t.Run(kind, func(t *testing.T) {
					push(t)
					_, err := w.pull(t, "a:1")
					check(t, err, tc.text)
				})
			}
		})
	}
}

func many(n int) (entries []tar.Header) {
	for i := range n {
		entries = append(entries, reg(fmt.Sprintf("d%d/f%d", i%100, i)))
	}
	return entries
}

// TestHostileArtifacts pulls manifests and blobs.
func TestHostileArtifacts(t *testing.T) {
	const raw = "application/octet-stream"
	file := func(title string) part {
		return part{mediaType: raw, title: title, content: []byte("content of " + title)}
	}
	noted := func(note string) part {
		return part{mediaType: raw, content: []byte(note), annotations: map[string]string{ispec.AnnotationTitle: "f", "org.cncf.model.file.metadata+json": note}}
	}
	said := func(change func(*ispec.Descriptor)) part {
		return part{mediaType: raw, title: "f", content: []byte("content"), descriptor: change}
	}
	archive := func(entries ...tar.Header) part {
		return part{mediaType: ispec.MediaTypeImageLayer, content: archiveOf(t, entries...)}
	}
	packed := func(mediaType string, content []byte) part { return part{mediaType: mediaType, content: content} }
	const gz, zst = "application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.oci.image.layer.v1.tar+zstd"
	bomb := archiveOf(t, with(reg("f"), func(*tar.Header) {}))
	bomb = append(bomb, make([]byte, 64<<20)...)
	numbered := func(n int) (parts []part) {
		for i := range n {
			parts = append(parts, file(fmt.Sprint("f", i)))
		}
		return parts
	}

	w := newHostileWorld(t, func(o *Options) { o.ArtifactLimit = Limit{32 << 20, "max_bytes"} })
	for name, tc := range map[string]struct {
		parts []part
		text  string
	}{
		"title above":             {[]part{file("../escaped")}, `its title "../escaped" has ".." in it`},
		"title above in it":       {[]part{file("a/../../escaped")}, `has ".." in it`},
		"title that stays":        {[]part{file("a/../b")}, `has ".." in it`},
		"title of dots":           {[]part{file("..")}, `has ".." in it`},
		"title absolute":          {[]part{file(escaped)}, "is an absolute path"},
		"title of a dot":          {[]part{file(".")}, "is that of a directory"},
		"title of slashes":        {[]part{file("//")}, "is an absolute path"},
		"title of a directory":    {[]part{file("a/")}, "is that of a directory"},
		"title with a dot behind": {[]part{file("a/.")}, "is that of a directory"},
		"title of a whiteout":     {[]part{file(".wh.a")}, "would delete files"},
		"title below a whiteout":  {[]part{file(".wh.a/b")}, "would delete files"},
		"title of an opaque":      {[]part{file("a/.wh..wh..opq")}, "would delete files"},
		"title of 256 bytes":      {[]part{file(strings.Repeat("a", 256))}, "has a name longer than 255 bytes"},
		"title that is too long":  {[]part{file(strings.Repeat("a/", 2048) + "f")}, "is longer than 4095 bytes"},
		"title with a zero byte":  {[]part{file("a\x00b")}, "has control characters"},
		"title with a line end":   {[]part{file("a\nb")}, "has control characters"},
		"title that turns round":  {[]part{file("a\u202eb")}, ""},
		"title of a blank":        {[]part{file(" ")}, ""},
		"title of an option":      {[]part{file("--help")}, ""},
		"title that is deep":      {[]part{file(strings.Repeat("d/", 100) + "f")}, ""},
		"title that is too deep":  {[]part{file(strings.Repeat("d/", 101) + "f")}, "has more than 100 directories"},
		"one title twice":         {[]part{file("a"), {mediaType: raw, title: "a", content: []byte("other")}}, `two blobs are named "a"`},
		"one file twice":          {[]part{file("a"), file("a")}, `two blobs are named "a"`},
		"one title in two forms":  {[]part{file("a"), {mediaType: raw, title: "./a", content: []byte("other")}}, `two blobs are named "a"`},
		"title below another":     {[]part{file("a"), file("a/b")}, `one blob is named "a", and another "a/b", which is below it`},
		"title above another":     {[]part{file("a/b/c"), file("a")}, `one blob is named "a", and another "a/b/c", which is below it`},
		"title of an untitled":    {[]part{{mediaType: raw, content: []byte("x")}, {mediaType: raw, title: "sha256-" + digest.FromString("x").Encoded(), content: []byte("y")}}, "two blobs are named"},
		"through a link":          {[]part{archive(symlink("l", "/")), file("l" + escaped)}, `passes through the symbolic link "l"`},
		"through a link below":    {[]part{archive(dir("d"), symlink("d/l", "..")), file("d/l/f")}, `passes through the symbolic link "d/l"`},
		"through a link as a tar": {[]part{archive(symlink("l", "/")), {mediaType: ispec.MediaTypeImageLayer, title: "l" + escaped, content: []byte("no archive")}}, `passes through the symbolic link "l"`},
		"over a link":             {[]part{archive(symlink("l", "/etc/hostname")), file("l")}, ""},
		"below a file of a tar":   {[]part{archive(reg("d")), file("d/f")}, `is below "d", which is a file in another blob`},
		"over a directory":        {[]part{archive(dir("d"), reg("d/f")), file("d")}, "is a directory in another blob"},
		"below a whiteout":        {[]part{file("x"), archive(reg(".wh.d")), file("d/f")}, ""},
		"link over a file":        {[]part{file("d/f"), archive(symlink("d", "/"))}, ""},
		"whiteout of a file":      {[]part{file("f"), archive(reg(".wh.f"))}, ""},

		"larger than it says":   {[]part{said(func(d *ispec.Descriptor) { d.Size-- })}, "has more than 6 bytes"},
		"smaller than it says":  {[]part{said(func(d *ispec.Descriptor) { d.Size++ })}, "has 7 bytes, and not 8"},
		"larger than nothing":   {[]part{said(func(d *ispec.Descriptor) { d.Size = 0 })}, "has more than 0 bytes"},
		"negative size":         {[]part{said(func(d *ispec.Descriptor) { d.Size = -1 })}, "has a size of -1 bytes"},
		"size of all there is":  {[]part{said(func(d *ispec.Descriptor) { d.Size = 1<<63 - 1 })}, "image is too large"},
		"digest of nothing":     {[]part{said(func(d *ispec.Descriptor) { d.Digest = "" })}, "invalid checksum digest format"},
		"digest of no kind":     {[]part{said(func(d *ispec.Descriptor) { d.Digest = "md5:d41d8cd98f00b204e9800998ecf8427e" })}, "unsupported digest algorithm"},
		"digest that is a path": {[]part{said(func(d *ispec.Descriptor) { d.Digest = "sha256:../../a" })}, "invalid checksum digest length"},
		"blob that is absent":   {[]part{said(func(d *ispec.Descriptor) { d.Digest = digest.FromString("absent") })}, "image not found"},
		"encrypted":             {[]part{said(func(d *ispec.Descriptor) { d.MediaType = ispec.MediaTypeImageLayerGzip + "+encrypted" })}, "encrypted artifacts are not supported"},
		"data in the manifest":  {[]part{said(func(d *ispec.Descriptor) { d.Data = []byte("other content") })}, ""},
		"no blob":               {[]part{{mediaType: raw, title: "f"}}, ""},
		"128 blobs":             {numbered(128), ""},
		"501 blobs":             {numbered(501), "it has 501 blobs, and a volume takes 500"},

		"note that is no JSON":     {[]part{noted("{")}, ""},
		"note of another kind":     {[]part{noted(`{"mode":"all","mtime":3}`)}, ""},
		"note of setuid":           {[]part{noted(`{"mode":3565}`)}, ""},
		"note of a large mode":     {[]part{noted(`{"mode":4294967295}`)}, ""},
		"note of a time long ago":  {[]part{noted(`{"mtime":"0001-01-01T00:00:01Z"}`)}, ""},
		"note of a time to come":   {[]part{noted(`{"mtime":"9999-12-31T23:59:59Z"}`)}, ""},
		"gzip that is cut off":     {[]part{packed(gz, gzipped(t, bomb[:1<<20])[:500])}, "unexpected EOF"},
		"gzip with garbage behind": {[]part{packed(gz, append(gzipped(t, archiveOf(t, reg("f"))), "garbage"...))}, "say so in media_types"},
		"gzip with a wrong sum":    {[]part{packed(gz, flipped(gzipped(t, archiveOf(t, reg("f"))), -6))}, "checksum"},
		"gzip of two":              {[]part{packed(gz, append(gzipped(t, archiveOf(t, reg("f"))[:1024]), gzipped(t, make([]byte, 1024))...))}, ""},
		"gzip bomb":                {[]part{packed(gz, gzipped(t, bomb))}, "max_bytes: image is too large: with layer sha256:"},
		"zstd bomb":                {[]part{packed(zst, zstandard(t, bomb))}, "max_bytes: image is too large: with layer sha256:"},
		"bomb of holes":            {[]part{packed(gz, gzipped(t, holes(t, 1<<30)))}, "max_bytes: image is too large: with layer sha256:"},
		"bomb of parts":            {[]part{packed(gz, gzipped(t, bomb[:20<<20])), packed(gz, gzipped(t, bomb[:21<<20]))}, "max_bytes: image is too large: with layer sha256:"},
		"zstd of a large window":   {[]part{packed(zst, []byte{0x28, 0xb5, 0x2f, 0xfd, 0, 0xa8, 1, 0, 0})}, "window size exceeded"},
		"zstd that is cut off":     {[]part{packed(zst, zstandard(t, archiveOf(t, reg("f")))[:60])}, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			w.reg.pushArtifact(t, "a", tc.parts...)
			image, err := w.pull(t, "a:1")
			check(t, err, tc.text)
			if err != nil {
				return
			}
			dirs, err := w.root.LowerDirs(t.Context(), image.ID, nil)
			require.NoError(t, err)
			if info, err := os.Lstat(filepath.Join(dirs[0], "f")); err == nil {
				assert.Zero(t, info.Mode()&^(fs.ModeCharDevice|fs.ModeDevice|0o777))
			}
		})
	}
}

func flipped(content []byte, at int) []byte {
	content[len(content)+at] ^= 1
	return content
}

// TestHostileManifests pulls manifests that no tool writes.
func TestHostileManifests(t *testing.T) {
	layer := part{mediaType: "application/octet-stream", title: "f", content: []byte("content")}
	described, err := json.Marshal(layer.describe())
	require.NoError(t, err)
	w := newHostileWorld(t, nil)
	for name, tc := range map[string]struct{ manifest, text string }{
		"no config":              {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","layers":[LAYER]}`, ""},
		"no type":                {`{"schemaVersion":2,"mediaType":"MIME","layers":[LAYER]}`, ""},
		"no media type":          {`{"schemaVersion":2,"config":{},"layers":[LAYER]}`, ""},
		"no layers":              {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b"}`, ""},
		"layers of nothing":      {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","layers":null}`, ""},
		"layer of nothing":       {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","layers":[null]}`, "invalid checksum digest format"},
		"layers of another kind": {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","layers":{}}`, "parse the manifest"},
		"annotation of a number": {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","layers":[{"annotations":{"a":1}}]}`, "parse the manifest"},
		"config without digest":  {`{"schemaVersion":2,"mediaType":"MIME","config":{"mediaType":"CONFIG"},"layers":[]}`, "parse the manifest: config: digest"},
		"config with a path":     {`{"schemaVersion":2,"mediaType":"MIME","config":{"mediaType":"CONFIG","digest":"sha256:../a"},"layers":[]}`, "parse the manifest: config: digest"},
		"config with one word":   {`{"schemaVersion":2,"mediaType":"MIME","config":{"mediaType":"CONFIG","digest":"a"},"layers":[]}`, "parse the manifest: config: digest"},
		"an image's config":      {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","config":{"mediaType":"CONFIG","digest":"sha256:` + id("1") + `"},"layers":[LAYER]}`, ""},
		"also an index":          {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","layers":[LAYER],"manifests":[]}`, "parse the manifest"},
		"time of no kind":        {`{"schemaVersion":2,"mediaType":"MIME","artifactType":"a/b","annotations":{"org.opencontainers.image.created":"yesterday"},"layers":[LAYER]}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w.reg.pushBlob(t, "a", layer.content)
			text := strings.NewReplacer("LAYER", string(described), "MIME", ispec.MediaTypeImageManifest, "CONFIG", ispec.MediaTypeImageConfig).Replace(tc.manifest)
			w.reg.pushManifest(t, "a", "1", ispec.MediaTypeImageManifest, json.RawMessage(text))
			_, err := w.pull(t, "a:1")
			check(t, err, tc.text)
			if err == nil {
				_, err = w.pull(t, "a:1")
				require.NoError(t, err, "again")
			}
		})
	}

	t.Run("blob elsewhere", func(t *testing.T) {
		asked := false
		other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
		t.Cleanup(other.Close)
		layer := layer
		layer.descriptor = func(d *ispec.Descriptor) { d.URLs = []string{other.URL + "/blob"} }
		w.reg.pushArtifact(t, "a", layer)
		_, err := w.pull(t, "a:1")
		require.NoError(t, err)
		assert.False(t, asked)
	})

	t.Run("wrong content", func(t *testing.T) {
		for what, content := range map[string]string{"other": "CONTENT", "one byte": "contenT", "cut off": "con"} {
			w := newHostileWorld(t, nil)
			w.reg.pushArtifact(t, "a", part{mediaType: ispec.MediaTypeImageLayer, content: archiveOf(t, reg("g"))}, layer)
			w.reg.setFault(func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				if strings.HasSuffix(r.URL.Path, digest.FromString("content").String()) {
					_, _ = rw.Write([]byte(content))
					return
				}
				next.ServeHTTP(rw, r)
			})
			_, err := w.pull(t, "a:1")
			require.ErrorIs(t, err, ErrDigestMismatch, what)
			assert.Len(t, layerIDs(t, w.root), 3, "the first blob's stays")
			w.reg.setFault(nil)
			w.reg.take()
			_, err = w.pull(t, "a:1")
			require.NoError(t, err)
			assert.Equal(t, 1, strings.Count(strings.Join(w.reg.take(), " "), "/blobs/"), "and is not pulled again")
		}
	})
}
