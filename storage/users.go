package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// CheckRoot returns ErrUnmounted unless the root has the marker file of PrepareRoot with the handler's name. It opens
// nothing.
func CheckRoot(opt Options) error {
	if err := checkMarker(filepath.Join(opt.GraphRoot, markerFile), opt.Name); err != nil {
		return fmt.Errorf("check the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	return nil
}

// Users names what would break if CRI-O did not read the root at dir any more: containers and images of CRI-O's own
// root that have layers there, and the containers in that root itself, leases among them. The root need not be one of
// r; its files are read as they are. Where they are not there, as its disk is not mounted, what has layers in no root
// counts as using it.
func (r *Roots) Users(ctx context.Context, dir string) ([]string, error) {
	if err := r.base.usable(ctx); err != nil {
		return nil, fmt.Errorf("look who uses the root %s: %w", dir, err)
	}
	others, _ := r.mounted()
	users, err := r.users(dir, others)
	if err != nil {
		return nil, fmt.Errorf("look who uses the root %s: %w", dir, err)
	}
	return append(users.containers, users.images...), nil
}

// rootUsers are those that use a root, for people.
type rootUsers struct{ containers, images []string }

// users looks for them. others are handler roots that may have the same layers.
func (r *Roots) users(dir string, others []*Root) (users rootUsers, err error) {
	absent := false
	if _, err := os.Stat(filepath.Join(dir, "overlay-layers", "layers.json")); errors.Is(err, fs.ErrNotExist) {
		absent = true
	} else if err != nil {
		return rootUsers{}, err
	}
	layers := map[string]bool{}
	for _, file := range []string{"layers.json", "volatile-layers.json"} {
		records, err := readRecords[layerRecord](filepath.Join(dir, "overlay-layers", file))
		if err != nil {
			return rootUsers{}, err
		}
		for _, l := range records {
			layers[l.ID] = true
		}
	}
	for _, file := range []string{"containers.json", "volatile-containers.json"} {
		records, err := readRecords[containerRecord](filepath.Join(dir, "overlay-containers", file))
		if err != nil {
			return rootUsers{}, err
		}
		for _, c := range records {
			users.containers = append(users.containers, fmt.Sprintf("container %s of that root, of image %s", nameOr(c.Names, c.ID), c.ImageID))
		}
	}
	others = slices.DeleteFunc(slices.Clone(others), func(root *Root) bool { return filepath.Clean(root.store.GraphRoot()) == filepath.Clean(dir) })
	err = r.crio.locked(func(state *crioState) error {
		needs := func(top string) (bool, error) {
			for id := top; id != ""; {
				for _, link := range state.foreign[id] {
					if there, err := present(filepath.Join(dir, "overlay", "l", link)); there || err != nil {
						return there, err
					}
				}
				parent, own := state.layers[id]
				if !own {
					there := slices.ContainsFunc(others, func(root *Root) bool { return root.store.Exists(id) })
					return layers[id] || absent && !there, nil
				}
				id = parent
			}
			return false, nil
		}
		for _, c := range state.containers {
			does, err := needs(c.LayerID)
			if err != nil {
				return err
			}
			if does {
				users.containers = append(users.containers, fmt.Sprintf("container %s of CRI-O", nameOr(c.Names, c.ID)))
			}
		}
		for _, image := range state.images {
			for _, top := range append([]string{image.TopLayer}, image.MappedTopLayers...) {
				does, err := needs(top)
				if err != nil {
					return err
				}
				if does {
					users.images = append(users.images, fmt.Sprintf("image %s in CRI-O's root", nameOr(image.Names, image.ID)))
					break
				}
			}
		}
		return nil
	})
	return users, err
}

func nameOr(names []string, id string) string {
	if len(names) > 0 {
		return names[0]
	}
	return id
}
