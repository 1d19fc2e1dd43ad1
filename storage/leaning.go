package storage

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/lockfile"
)

// Lean is an image of CRI-O's own root that needs layers of handler roots, because CRI-O pulled it itself while those
// had them.
type Lean struct {
	// ImageID and Names are the image's.
	ImageID string   `json:"image_id"`
	Names   []string `json:"names"`
	// Handlers are those whose roots have layers that it needs.
	Handlers []string `json:"handlers"`
	// Missing says that it needs layers that no root has: it cannot run, and CRI-O's image list fails as a whole.
	Missing bool `json:"missing"`
}

// Leaning lists by image id the images of CRI-O's own root that lean on handler roots. [Roots.Mend] mends one. Roots
// whose disk is not mounted are passed over: what leans on them has Missing set.
func (r *Roots) Leaning(ctx context.Context) ([]Lean, error) {
	if err := r.base.usable(ctx); err != nil {
		return nil, fmt.Errorf("look for leaning images: %w", err)
	}
	mounted, _ := r.answering(ctx)
	var leans []Lean
	err := r.crio.locked(func(state *crioState) error {
		for _, image := range state.images {
			lean, err := state.lean(image, mounted)
			if err != nil {
				return fmt.Errorf("image %s: %w", image.ID, err)
			}
			if lean.Missing || len(lean.Handlers) > 0 {
				leans = append(leans, lean)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for leaning images: %w", err)
	}
	slices.SortFunc(leans, func(a, b Lean) int { return cmp.Compare(a.ImageID, b.ImageID) })
	return leans, nil
}

// crioRoot is CRI-O's own root as one that leans on others. Our handle of it has no additional stores and does not see
// whose layers it uses; the root's files tell.
type crioRoot struct{ root *Root }

// crioState is what decides whether a layer of a handler root may go.
type crioState struct {
	homes      []string          // directories of the overlay driver
	layers     map[string]string // parent by layer id
	images     []imageRecord
	containers []containerRecord
	// foreign are the link names of lower layers that are not in the root itself, by the layer that is on them.
	foreign map[string][]string
}

// As containers/storage keeps them in its JSON files.
type (
	layerRecord struct {
		ID     string `json:"id"`
		Parent string `json:"parent"`
	}
	imageRecord struct {
		ID              string   `json:"id"`
		Names           []string `json:"names"`
		TopLayer        string   `json:"layer"`
		MappedTopLayers []string `json:"mapped-layers"`
	}
	containerRecord struct {
		ID      string   `json:"id"`
		Names   []string `json:"names"`
		ImageID string   `json:"image"`
		LayerID string   `json:"layer"`
	}
)

// locked runs fn with CRI-O's root as it is and, as long as fn runs, stays: no program that shares the root can make
// an image, a layer or a container meanwhile. fn may lock handler roots, and must not lock CRI-O's.
//
// The order is that of containers/storage: layers.lock, images.lock, and then those of the additional stores.
// layers.lock is held exclusively: making an image takes it shared, so images.lock need only be shared.
func (c *crioRoot) locked(fn func(*crioState) error) error {
	// A root with an image store apart has two of each.
	dirs := []string{c.root.store.GraphRoot()}
	if dir := c.root.store.ImageStore(); dir != "" {
		dirs = append(dirs, dir)
	}
	for _, dir := range dirs {
		lock, err := lockfile.GetLockFile(filepath.Join(dir, "overlay-layers", "layers.lock"))
		if err != nil {
			return fmt.Errorf("lock the layers of CRI-O's root: %w", err)
		}
		lock.Lock()
		defer lock.Unlock()
	}
	for _, dir := range slices.Backward(dirs) {
		lock, err := lockfile.GetLockFile(filepath.Join(dir, "overlay-images", "images.lock"))
		if err != nil {
			return fmt.Errorf("lock the images of CRI-O's root: %w", err)
		}
		lock.RLock()
		defer lock.Unlock()
	}
	state, err := c.read(dirs)
	if err != nil {
		return fmt.Errorf("read CRI-O's root: %w", err)
	}
	return fn(state)
}

func (c *crioRoot) read(dirs []string) (*crioState, error) {
	state := &crioState{layers: make(map[string]string), foreign: make(map[string][]string)}
	for _, dir := range dirs {
		state.homes = append(state.homes, filepath.Join(dir, "overlay"))
		images, err := readRecords[imageRecord](filepath.Join(dir, "overlay-images", "images.json"))
		if err != nil {
			return nil, err
		}
		state.images = append(state.images, images...)
	}
	for _, dir := range append(dirs, c.root.store.RunRoot()) { // the run root: of a root that is transient
		for _, file := range []string{"layers.json", "volatile-layers.json"} {
			layers, err := readRecords[layerRecord](filepath.Join(dir, "overlay-layers", file))
			if err != nil {
				return nil, err
			}
			for _, l := range layers {
				state.layers[l.ID] = l.Parent
			}
		}
		for _, file := range []string{"containers.json", "volatile-containers.json"} {
			containers, err := readRecords[containerRecord](filepath.Join(dir, "overlay-containers", file))
			if err != nil {
				return nil, err
			}
			state.containers = append(state.containers, containers...)
		}
	}
	return state, state.readLinks()
}

// readRecords returns what a JSON file of containers/storage has, nothing where the file is not there, and ErrEmptyList
// where it has no bytes.
func readRecords[T any](path string) ([]T, error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if len(content) == 0 {
		return nil, emptyList(path)
	}
	var records []T
	if err := json.Unmarshal(content, &records); err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	return records, nil
}

// readLinks looks for layers whose lower layers, by the driver's own files, are in another root. layers.json does not
// tell when the layer was written while only the other root had its parent.
func (s *crioState) readLinks() error {
	own := make(map[string]bool)
	for _, home := range s.homes {
		links, err := os.ReadDir(filepath.Join(home, "l"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, link := range links {
			own[link.Name()] = true
		}
	}
	for id := range s.layers {
		for _, home := range s.homes {
			lower, err := os.ReadFile(filepath.Join(home, id, "lower"))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			for path := range strings.SplitSeq(strings.TrimSpace(string(lower)), ":") {
				if link := filepath.Base(path); !own[link] {
					s.foreign[id] = append(s.foreign[id], link)
				}
			}
		}
	}
	return nil
}

// wanted are the layers that CRI-O's root needs and has not.
func (s *crioState) wanted() map[string]bool {
	wanted := make(map[string]bool)
	want := func(id string) {
		if _, own := s.layers[id]; id != "" && !own {
			wanted[id] = true
		}
	}
	for _, image := range s.images {
		want(image.TopLayer)
		for _, id := range image.MappedTopLayers {
			want(id)
		}
	}
	for _, parent := range s.layers {
		want(parent)
	}
	for _, container := range s.containers {
		want(container.LayerID)
	}
	return wanted
}

// leanedOn returns those layers of a handler root that CRI-O's root needs directly. What is below them it needs too.
func (s *crioState) leanedOn(root *Root) (map[string]bool, error) {
	leaned := s.wanted()
	for _, links := range s.foreign {
		for _, link := range links {
			id, err := root.linkTarget(link)
			if err != nil {
				return nil, err
			}
			if id != "" {
				leaned[id] = true
			}
		}
	}
	return leaned, nil
}

// linkTarget returns the id of the layer that has this link name in the root, "" if none has.
func (r *Root) linkTarget(link string) (layerID string, err error) {
	for _, home := range r.homes() {
		target, err := os.Readlink(filepath.Join(home, "l", link)) // ../<layer id>/diff
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		return filepath.Base(filepath.Dir(target)), nil
	}
	return "", nil
}

// lean finds what an image of CRI-O's root needs from others.
func (s *crioState) lean(image imageRecord, roots []*Root) (Lean, error) {
	lean := Lean{ImageID: image.ID, Names: image.Names}
	lends := func(root *Root) {
		if !slices.Contains(lean.Handlers, root.name) {
			lean.Handlers = append(lean.Handlers, root.name)
		}
	}
	id := image.TopLayer
	for id != "" {
		parent, own := s.layers[id]
		if !own {
			break
		}
		for _, link := range s.foreign[id] {
			found := false
			for _, root := range roots {
				target, err := root.linkTarget(link)
				if err != nil {
					return Lean{}, err
				}
				if target != "" {
					found = true
					lends(root)
				}
			}
			lean.Missing = lean.Missing || !found
		}
		id = parent
	}
	if id == "" {
		return lean, nil
	}
	found := false
	for _, root := range roots {
		layer, err := root.store.Layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			continue
		}
		if err != nil {
			return Lean{}, err
		}
		if layer.ID == id {
			found = true
			lends(root)
		}
	}
	lean.Missing = lean.Missing || !found
	return lean, nil
}

// guarded runs fn, which removes layers of r, with the layers that must stay because CRI-O's root leans on them.
func (r *Root) guarded(fn func(leaned map[string]bool) error) error {
	if r.leans == nil {
		return fn(nil)
	}
	return r.leans.locked(func(state *crioState) error {
		leaned, err := state.leanedOn(r)
		if err != nil {
			return err
		}
		return fn(leaned)
	})
}

const keepNamePrefix = "ocihold-keep-"

// keep makes sure that the layer stays when the images that it belongs to are gone: it gets a child.
func (r *Root) keep(layerID string) error {
	id := ourID("keep", layerID)
	switch _, err := r.store.Layer(id); {
	case err == nil:
		return nil
	case !errors.Is(err, cstorage.ErrLayerUnknown):
		return fmt.Errorf("look for the child of layer %s: %w", layerID, err)
	}
	_, err := r.store.CreateLayer(id, layerID, []string{keepNamePrefix + layerID}, "", false, hostMapped())
	if err != nil && !errors.Is(err, cstorage.ErrDuplicateID) {
		return fmt.Errorf("keep layer %s, which CRI-O's root needs: %w", layerID, err)
	}
	return nil
}

// freeKept removes the layers that are only there because something leaned on them, and no longer does.
func (r *Root) freeKept(leaned map[string]bool) error {
	layers, err := r.store.Layers()
	if err != nil {
		return err
	}
	for i := range layers {
		layerID, ok := heldBy(layers[i].Names, keepNamePrefix)
		if !ok || leaned[layerID] {
			continue
		}
		if err := r.deleteChain(layers[i].ID, leaned); err != nil {
			return fmt.Errorf("free layer %s: %w", layerID, err)
		}
	}
	return nil
}
