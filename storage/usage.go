package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
)

// Usage is what the images of a root take of its disk.
type Usage struct {
	// Bytes and Inodes are what is allocated on disk for image layers, each counted once, and for the images' records.
	// Containers' own layers are not among them.
	Bytes, Inodes uint64
	// Unmeasured is the number of layers that still have to be measured. They count as the size that is recorded for
	// them, and no inodes.
	Unmeasured int
	// Bad has an error for each layer that could not be measured as a whole. What could be read of it counts.
	Bad []error
	// Mountpoint is where the file system is mounted that has the layers.
	Mountpoint string
	// Device is that file system's device number, as stat(2) has it. Roots with the same share a disk.
	Device uint64
}

// measuringPatience is how long Usage waits for layers to be measured.
const measuringPatience = 2 * time.Second

// Usage adds the root's layers up. Layers that a pull by this package has brought were measured then; others are
// measured now, which takes long where there are many. Usage waits two seconds for that and then answers with what is
// known, while the measuring goes on.
func (r *Root) Usage(ctx context.Context) (Usage, error) {
	patience, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	usage, _, err := r.addUp(ctx, patience)
	if err != nil {
		return Usage{}, fmt.Errorf("add up the disk use of handler %q: %w", r.name, err)
	}
	return usage, nil
}

// addUp returns also what each layer takes. It waits for layers to be measured until patience ends.
func (r *Root) addUp(ctx, patience context.Context) (Usage, map[string]layerUse, error) {
	if err := r.usable(ctx); err != nil {
		return Usage{}, nil, err
	}
	layers, err := r.imageLayers()
	if err != nil {
		return Usage{}, nil, err
	}
	measured := r.measured(patience, layers)
	records, err := r.recordsUse(ctx)
	if ctx.Err() != nil {
		return Usage{}, nil, ctx.Err()
	}
	usage := Usage{Bytes: records.bytes, Inodes: records.inodes}
	if err != nil {
		usage.Bad = append(usage.Bad, fmt.Errorf("measure the records of images of handler %q: %w", r.name, err))
	}
	if usage.Mountpoint, usage.Device, err = fileSystemOf(r.imageHome()); err != nil {
		return Usage{}, nil, err
	}
	linked := make(map[uint64]link)
	maps.Copy(linked, records.linked)
	for i := range layers {
		use, ok := measured[layers[i].ID]
		if !ok {
			usage.Unmeasured++
			usage.Bytes += uint64(max(0, layers[i].UncompressedSize))
			continue
		}
		if use.err != nil {
			usage.Bad = append(usage.Bad, fmt.Errorf("measure layer %s of handler %q: %w", layers[i].ID, r.name, use.err))
		}
		usage.Bytes += use.bytes
		usage.Inodes += use.inodes
		maps.Copy(linked, use.linked)
	}
	for _, l := range linked {
		usage.Bytes += l.bytes
		usage.Inodes++
	}
	return usage, measured, nil
}

// imageLayers lists the layers that belong to no container and are written to the end.
func (r *Root) imageLayers() ([]cstorage.Layer, error) {
	all, err := r.store.MultiList(cstorage.MultiListOptions{Layers: true, Containers: true})
	if err != nil {
		return nil, err
	}
	ofContainers := make(map[string]bool, len(all.Containers))
	for i := range all.Containers {
		ofContainers[all.Containers[i].LayerID] = true
	}
	return slices.DeleteFunc(all.Layers, func(layer cstorage.Layer) bool {
		return incomplete(&layer) || ofContainers[layer.ID]
	}), nil
}

// incomplete tells whether the layer is being written (containers/storage, layers.go incompleteFlag).
func incomplete(layer *cstorage.Layer) bool {
	flag, _ := layer.Flags["incomplete"].(bool)
	return flag
}

// recordsUse adds up what is no layer's: the records of images, and the directories that layers are in. With an error it
// returns what could be read.
func (r *Root) recordsUse(ctx context.Context) (treeUse, error) {
	home := r.imageHome()
	layers := filepath.Join(home, "overlay-layers")
	var records treeUse
	errs := []error{
		records.addTree(ctx, filepath.Join(home, "overlay-images")),
		records.addFile(filepath.Join(home, "overlay")), records.addFile(filepath.Join(home, "overlay", "l")), records.addFile(layers),
	}
	entries, err := os.ReadDir(layers)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	for _, entry := range entries {
		if id, _, _ := strings.Cut(entry.Name(), "."); !reference.IsFullIdentifier(id) {
			errs = append(errs, records.addFile(filepath.Join(layers, entry.Name())))
		}
	}
	return records, errors.Join(errs...)
}

// imageHome is the directory that images and their layers are written to.
func (r *Root) imageHome() string {
	if dir := r.store.ImageStore(); dir != "" {
		return dir
	}
	return r.store.GraphRoot()
}

// fileSystemOf returns where the file system that has dir is mounted, and its device number.
func fileSystemOf(dir string) (mountpoint string, device uint64, err error) {
	number := func(path string) (uint64, error) {
		info, err := os.Stat(path)
		if err != nil {
			return 0, err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return 0, fmt.Errorf("stat %s: no device", path)
		}
		return stat.Dev, nil
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return "", 0, err
	}
	if device, err = number(dir); err != nil {
		return "", 0, err
	}
	for dir != "/" {
		above, err := number(filepath.Dir(dir))
		if err != nil {
			return "", 0, err
		}
		if above != device {
			break
		}
		dir = filepath.Dir(dir)
	}
	return dir, device, nil
}
