package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
)

// LowerDirs returns the directories of the image's layers, topmost first, ready to be the lower directories of an
// overlay mount. They stay as they are while the image is leased. An image without layers has none. With patterns for
// media types (see matchMediaType) only layers count that one of them matches.
//
// It returns ErrNoSuchLayer, with the media types that there are, where the patterns match no layer; ErrNotFound where the image is gone, and ErrUnsupported where a layer's files are not simply in its diff
// directory: composefs, a diff directory that is a link or one of several, a root written through a mount_program.
func (r *Root) LowerDirs(ctx context.Context, imageID string, mediaTypes []string) ([]string, error) {
	if err := r.usable(ctx); err != nil {
		return nil, fmt.Errorf("find the layers of image %s: %w", imageID, err)
	}
	dirs, err := r.lowerDirs(imageID, mediaTypes)
	if err != nil {
		return nil, fmt.Errorf("find the layers of image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	return dirs, nil
}

func (r *Root) lowerDirs(imageID string, mediaTypes []string) ([]string, error) {
	if !reference.IsFullIdentifier(imageID) {
		return nil, fmt.Errorf("%w: %q is not an image id", ErrInvalidReference, imageID)
	}
	record, err := r.resolveID(imageID)
	if err != nil {
		return nil, err
	}
	homes := r.homes()
	for _, home := range homes {
		if err := checkNative(home); err != nil {
			return nil, err
		}
	}
	var dirs []string
	for id := record.TopLayer; id != ""; {
		layer, err := r.store.Layer(id)
		if err != nil {
			return nil, fmt.Errorf("read layer %s: %w", id, err)
		}
		dir, err := diffDir(homes, id)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, dir)
		id = layer.Parent
	}
	if len(mediaTypes) == 0 {
		return dirs, nil
	}
	return r.chooseLayers(record, dirs, mediaTypes)
}

// MountedAt finds the images whose topmost layer has its place at one of dirs when it is mounted: their ids, sorted, by
// directory. Leased images that were removed by force are among them. Directories that are no layer's are left out.
func (r *Root) MountedAt(ctx context.Context, dirs []string) (map[string][]string, error) {
	if err := r.usable(ctx); err != nil {
		return nil, fmt.Errorf("find the images that are mounted: %w", err)
	}
	// The driver mounts a layer of a second image store below the run root.
	homes := append(r.homes(), filepath.Join(r.store.RunRoot(), "overlay"))
	at := make(map[string]string) // directory by layer id
	for _, dir := range dirs {
		layer := filepath.Dir(dir)
		if filepath.Base(dir) == "merged" && slices.Contains(homes, filepath.Dir(layer)) {
			at[filepath.Base(layer)] = dir
		}
	}
	found := make(map[string][]string)
	if len(at) == 0 {
		return found, nil
	}
	all, err := r.store.MultiList(cstorage.MultiListOptions{Images: true, Layers: true})
	if err != nil {
		return nil, fmt.Errorf("find the images that are mounted: %w", err)
	}
	add := func(layer, imageID string) {
		if dir, ok := at[layer]; ok {
			found[dir] = union(found[dir], []string{imageID})
		}
	}
	for i := range all.Images {
		add(all.Images[i].TopLayer, all.Images[i].ID)
	}
	for i := range all.Layers {
		if imageID, ok := heldBy(all.Layers[i].Names, childNamePrefix); ok {
			add(all.Layers[i].Parent, imageID)
		}
	}
	for _, ids := range found {
		slices.Sort(ids)
	}
	return found, nil
}

// homes are the overlay driver's directories in the root, the one that images are written to first.
func (r *Root) homes() []string {
	homes := []string{filepath.Join(r.store.GraphRoot(), "overlay")}
	if imageStore := r.store.ImageStore(); imageStore != "" {
		homes = append([]string{filepath.Join(imageStore, "overlay")}, homes...)
	}
	return homes
}

// checkNative returns ErrUnsupported if the driver wrote to home through a mount_program, which may represent whiteouts
// in its own way.
func checkNative(home string) error {
	flag, err := os.ReadFile(filepath.Join(home, ".has-mount-program")) // kept by the driver: "true" or "false"
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for a mount_program: %w", err)
	}
	if strings.TrimSpace(string(flag)) == "true" {
		return fmt.Errorf("%s was written through a mount_program: %w: make the root anew with the kernel's overlay", home, ErrUnsupported)
	}
	return nil
}

// diffDir returns the directory that has a layer's files, in the first of homes that has the layer.
func diffDir(homes []string, layerID string) (string, error) {
	for _, home := range homes {
		diff := filepath.Join(home, layerID, "diff")
		info, err := os.Lstat(diff)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("look at layer %s: %w", layerID, err)
		}
		if !info.IsDir() {
			return "", fmt.Errorf("layer %s: %s is not a directory itself: %w", layerID, diff, ErrUnsupported)
		}
		for _, other := range []string{"composefs-data", "diff1"} {
			if exists, err := present(filepath.Join(home, layerID, other)); err != nil {
				return "", err
			} else if exists {
				return "", fmt.Errorf("layer %s has %s: %w", layerID, other, ErrUnsupported)
			}
		}
		return diff, nil
	}
	return "", fmt.Errorf("%w: layer %s has no files", ErrBadRecord, layerID)
}

func present(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
