package integration

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// app is a pushed image, for linux and for wasi/wasm, whose layers are the same.
type app struct {
	ref   string
	index v1.ImageIndex
	ids   map[string]string // by handler
	files map[string]string // hashes of contents by path
}

// appLayer is a layer with a file of this name and more.
func appLayer(name string, more ...images.Entry) []images.Entry {
	return append([]images.Entry{
		images.File(name, strings.Repeat(name, 100), 0o644), images.File("dir-"+name+"/file", name, 0o600),
	}, more...)
}

func pushApp(t testing.TB, n *realnode.Node, ref string, layers ...[]images.Entry) app {
	t.Helper()
	linux, err := images.Image(images.Config{}, layers...)
	require.NoError(t, err)
	wasm, err := images.Image(images.Config{Platform: "wasi/wasm"}, layers...)
	require.NoError(t, err)
	index, err := images.Index(linux, wasm)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), ref, index))
	a := app{
		ref:   n.Ref(ref),
		index: index,
		ids:   map[string]string{"": configID(t, linux), "vm": configID(t, linux), "wasm": configID(t, wasm)},
		files: map[string]string{},
	}
	for _, e := range slices.Concat(layers...) {
		if e.Content != nil {
			a.files[e.Path] = hashOf(t, e.Content())
		}
	}
	return a
}

// requireRead reads every file of a container's root file system: as the
// container has it, and as a program sees it that is started in it now.
func (a app) requireRead(t testing.TB, c *realnode.Container) {
	t.Helper()
	info, err := c.Info(t.Context())
	require.NoError(t, err)
	a.requireFiles(t, fmt.Sprintf("/proc/%d/root", info.PID))
	var paths []string
	for path := range maps.Keys(a.files) {
		paths = append(paths, "/"+path)
	}
	sh(t, c, "cat "+strings.Join(paths, " ")+" > /dev/null")
}

// requireFiles reads every file of a file system, and requires the image's.
func (a app) requireFiles(t testing.TB, root string) {
	t.Helper()
	var own syscall.Stat_t
	require.NoError(t, syscall.Stat(root, &own))
	got := map[string]string{} // without what the runtime adds
	require.NoError(t, filepath.WalkDir(root+"/", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok && entry.IsDir() && stat.Dev != own.Dev {
			return fs.SkipDir // /proc, /dev and the like
		}
		if !info.Mode().IsRegular() {
			return nil
		}
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		hash := hashOf(t, file)
		name := strings.TrimPrefix(path, root+"/")
		if _, ours := a.files[name]; ours {
			got[name] = hash
		}
		return nil
	}))
	require.Equal(t, a.files, got, a.ref)
}

func hashOf(t testing.TB, r io.Reader) string {
	t.Helper()
	hash := sha256.New()
	_, err := io.Copy(hash, r)
	require.NoError(t, err)
	return hex.EncodeToString(hash.Sum(nil))
}
