package integration

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// rootOfHandler is where the images of a handler are, "" for CRI-O's own.
func rootOfHandler(n *realnode.Node, handler string) string {
	if handler == "" {
		return n.CRIORoot()
	}
	return n.HandlerRoot(handler)
}

// topLayers are the top layers of a root's images, by image id.
func topLayers(t testing.TB, root string) map[string]string {
	t.Helper()
	var records []struct{ ID, Layer string }
	readRecords(t, filepath.Join(root, "overlay-images", "images.json"), &records)
	tops := map[string]string{}
	for _, image := range records {
		tops[image.ID] = image.Layer
	}
	return tops
}

// layersOf are the ids of a root's layers, without those of running containers.
func layersOf(t testing.TB, root string) []string {
	t.Helper()
	var records []struct{ ID string }
	readRecords(t, filepath.Join(root, "overlay-layers", "layers.json"), &records)
	ids := []string{}
	for _, layer := range records {
		ids = append(ids, layer.ID)
	}
	slices.Sort(ids)
	return ids
}

func readRecords(t testing.TB, file string, records any) {
	t.Helper()
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(content, records))
}

// find returns the layers of a root that have this file.
func find(t testing.TB, root, file string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, "overlay", "*", "diff", file))
	require.NoError(t, err)
	return found
}

// requireAllMount mounts those of the images that are there, as the overlay
// driver would in each root, and reads them.
func requireAllMount(t testing.TB, n *realnode.Node, apps ...app) {
	t.Helper()
	for _, handler := range handlersOfRoots {
		tops := topLayers(t, rootOfHandler(n, handler))
		for _, a := range apps {
			for _, id := range []string{a.ids[""], a.ids["wasm"]} {
				if top, ok := tops[id]; ok {
					dirs := append(stackOf(t, n, handler, top), t.TempDir()) // one alone is refused
					at := t.TempDir()
					require.NoError(t, syscall.Mount("overlay", at, "overlay", syscall.MS_RDONLY, "lowerdir="+strings.Join(dirs, ":")), "%q", dirs)
					a.requireFiles(t, at)
					require.NoError(t, syscall.Unmount(at, 0))
				}
			}
		}
	}
}

// stackOf are the directories, topmost first, that the overlay driver of a
// handler's root mounts for a layer. CRI-O's own root may use those of others.
func stackOf(t testing.TB, n *realnode.Node, handler, top string) []string {
	t.Helper()
	homes := []string{filepath.Join(rootOfHandler(n, handler), "overlay")}
	if handler == "" {
		homes = append(homes, filepath.Join(n.HandlerRoot("vm"), "overlay"), filepath.Join(n.HandlerRoot("wasm"), "overlay"))
	}
	in := func(path string) string {
		for _, home := range homes {
			if dir, err := filepath.EvalSymlinks(filepath.Join(home, path)); err == nil {
				return dir
			}
		}
		require.Fail(t, "a layer is gone", "%s in %q", path, homes)
		return ""
	}
	dirs := []string{in(filepath.Join(top, "diff"))}
	lower, err := os.ReadFile(filepath.Join(filepath.Dir(dirs[0]), "lower"))
	if errors.Is(err, fs.ErrNotExist) {
		return dirs
	}
	require.NoError(t, err)
	for link := range strings.SplitSeq(strings.TrimSpace(string(lower)), ":") {
		dirs = append(dirs, in(link))
	}
	return dirs
}
