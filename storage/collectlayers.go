package storage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/pkg/lockfile"
)

// restAge is how old a layer is that no image has, and that goes for it: other programs record an image when all its
// layers are there.
const restAge = time.Hour

// collectRests removes layers that no image has, data of images whose record is gone, and downloads of ended processes.
func (r *Root) collectRests(ctx context.Context, bytes map[string]uint64, c *Collection) error {
	all, err := r.store.MultiList(cstorage.MultiListOptions{Images: true, Layers: true, Containers: true})
	if err != nil {
		return err
	}
	for _, id := range r.rests(all) {
		if !c.DryRun {
			gone, err := r.collectLayer(id)
			if err != nil {
				c.Faults = append(c.Faults, fmt.Sprintf("remove layer %s, which no image has: %v", id, err))
			}
			if !gone {
				continue
			}
		}
		c.Layers = append(c.Layers, GCLayer{ID: id, Bytes: bytes[id]})
		c.Freed += bytes[id]
	}
	if !c.DryRun {
		if err := r.collectData(all.Images); err != nil {
			c.Faults = append(c.Faults, fmt.Sprintf("remove data of images that are gone: %v", err))
		}
	}
	if r.downloads == nil {
		return nil
	}
	err = deadTempDirs(r.downloads.parent, func(dir string) error {
		var use treeUse
		err := use.addTree(ctx, dir)
		if err == nil && !c.DryRun {
			err = os.RemoveAll(dir)
		}
		c.Blobs += use.bytes
		return err
	})
	if err != nil {
		c.Faults = append(c.Faults, fmt.Sprintf("clear the directory for downloads: %v", err))
	}
	return nil
}

// collectLayer removes one layer, unless something has come to use it.
func (r *Root) collectLayer(id string) (gone bool, err error) {
	err = withRoom([]*Root{r}, func() error {
		return r.guarded(func(leaned map[string]bool) error {
			if leaned[id] {
				return nil
			}
			gone, err = r.deleteUnused(id)
			return err
		})
	})
	return gone, err
}

// collectData removes the directories of images that have no record and are old: a removal that was killed leaves them.
// images are those that there were a moment ago.
func (r *Root) collectData(images []cstorage.Image) error {
	home := filepath.Join(r.imageHome(), "overlay-images")
	strays := func(has func(id string) bool) (dirs []string, err error) {
		entries, err := os.ReadDir(home)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if !reference.IsFullIdentifier(e.Name()) || has(e.Name()) {
				continue
			}
			info, err := e.Info()
			if err != nil {
				return nil, err
			}
			if r.now().Sub(info.ModTime()) >= restAge {
				dirs = append(dirs, filepath.Join(home, e.Name()))
			}
		}
		return dirs, nil
	}
	found, err := strays(func(id string) bool {
		return slices.ContainsFunc(images, func(i cstorage.Image) bool { return i.ID == id })
	})
	if len(found) == 0 {
		return err
	}
	lock, err := lockfile.GetLockFile(filepath.Join(home, "images.lock"))
	if err != nil {
		return err
	}
	lock.Lock()
	defer lock.Unlock()
	records, err := readRecords[imageRecord](filepath.Join(home, "images.json"))
	if records == nil {
		return err // a list that was lost may come back
	}
	found, err = strays(func(id string) bool {
		return slices.ContainsFunc(records, func(i imageRecord) bool { return i.ID == id })
	})
	for _, dir := range found {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

// rests are the layers that nothing has, children before their parents: what was left of pulls that ended midway, and
// is old. While a pull is under way there are none: it may be about to use them.
func (r *Root) rests(all cstorage.MultiListResult) (rests []string) {
	if !r.pulls.idle() {
		return nil
	}
	t := treeOf(all)
	had := map[string]bool{}
	has := func(layer string) {
		for _, id := range t.chain(layer) {
			had[id] = true
		}
	}
	for _, layers := range t.images {
		for _, id := range layers {
			had[id] = true
		}
	}
	for i := range all.Containers {
		has(all.Containers[i].LayerID)
	}
	for i := range all.Layers {
		l := &all.Layers[i]
		if len(l.Names) > 0 || incomplete(l) || r.now().Sub(l.Created) < restAge {
			has(l.ID)
		}
	}
	for i := range all.Layers {
		if id := all.Layers[i].ID; !had[id] {
			rests = append(rests, id)
		}
	}
	slices.SortFunc(rests, func(a, b string) int { return len(t.chain(b)) - len(t.chain(a)) })
	return rests
}

// tree is which layers images have.
type tree struct {
	parents map[string]string
	images  map[string][]string // all layers, by image
	tops    map[string][]string // top layers, by image
}

func treeOf(all cstorage.MultiListResult) tree {
	t := tree{parents: map[string]string{}, images: map[string][]string{}, tops: map[string][]string{}}
	for i := range all.Layers {
		t.parents[all.Layers[i].ID] = all.Layers[i].Parent
	}
	for i := range all.Images {
		image := &all.Images[i]
		t.tops[image.ID] = append([]string{image.TopLayer}, image.MappedTopLayers...)
		for _, top := range t.tops[image.ID] {
			t.images[image.ID] = union(t.images[image.ID], t.chain(top))
		}
	}
	return t
}

// chain returns the layer and all below it, as far as they are there.
func (t tree) chain(layer string) (chain []string) {
	for layer != "" {
		parent, ok := t.parents[layer]
		if !ok {
			break
		}
		chain = append(chain, layer)
		layer = parent
	}
	return chain
}

// uses counts the images that have each layer. A layer that no image has, or that is leaned on, is one more for itself
// and those below it.
func (t tree) uses(leaned map[string]bool) map[string]int {
	uses := map[string]int{}
	for _, layers := range t.images {
		for _, layer := range layers {
			uses[layer]++
		}
	}
	var others []string
	for layer := range t.parents {
		if uses[layer] == 0 || leaned[layer] {
			others = append(others, layer)
		}
	}
	for _, other := range others {
		for _, layer := range t.chain(other) {
			uses[layer]++
		}
	}
	return uses
}
