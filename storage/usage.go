package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	cstorage "go.podman.io/storage"
)

// Usage is what the images of a root take of its disk.
type Usage struct {
	// Bytes and Inodes are what is allocated on disk for image layers, each counted once, and for the images' records.
	// Containers' own layers are not among them.
	Bytes, Inodes uint64
	// Mountpoint is where the file system is mounted that has the layers.
	Mountpoint string
	// Device is that file system's device number, as stat(2) has it. Roots with the same share a disk.
	Device uint64
}

// usageCache remembers by layer id what a layer takes: layers do not change.
type usageCache struct {
	mu     sync.Mutex
	layers map[string]diskUse
}

type diskUse struct{ bytes, inodes uint64 }

// Usage adds the root's layers up. Layers that it has not seen before are walked, which takes a while for large ones.
func (r *Root) Usage(ctx context.Context) (Usage, error) {
	if err := r.usable(ctx); err != nil {
		return Usage{}, fmt.Errorf("add up the disk use of handler %q: %w", r.name, err)
	}
	usage, err := r.addUp(ctx)
	if err != nil {
		return Usage{}, fmt.Errorf("add up the disk use of handler %q: %w", r.name, err)
	}
	return usage, nil
}

func (r *Root) addUp(ctx context.Context) (Usage, error) {
	all, err := r.store.MultiList(cstorage.MultiListOptions{Layers: true, Containers: true})
	if err != nil {
		return Usage{}, err
	}
	home := r.imageHome()
	mountpoint, device, err := fileSystemOf(home)
	if err != nil {
		return Usage{}, err
	}
	records, err := walk(ctx, filepath.Join(home, "overlay-images"))
	if err != nil {
		return Usage{}, err
	}
	usage := Usage{Bytes: records.bytes, Inodes: records.inodes, Mountpoint: mountpoint, Device: device}
	ofContainers := make(map[string]bool, len(all.Containers))
	for i := range all.Containers {
		ofContainers[all.Containers[i].LayerID] = true
	}

	r.usage.mu.Lock()
	defer r.usage.mu.Unlock()
	seen := make(map[string]diskUse, len(all.Layers))
	for i := range all.Layers {
		id := all.Layers[i].ID
		if ofContainers[id] {
			continue
		}
		use, ok := r.usage.layers[id]
		if !ok {
			if use, err = walk(ctx, filepath.Join(home, "overlay", id)); err != nil {
				return Usage{}, err
			}
		}
		if !incomplete(&all.Layers[i]) {
			seen[id] = use
		}
		usage.Bytes += use.bytes
		usage.Inodes += use.inodes
	}
	r.usage.layers = seen
	return usage, nil
}

// incomplete tells whether the layer is being written (containers/storage, layers.go incompleteFlag).
func incomplete(layer *cstorage.Layer) bool {
	flag, _ := layer.Flags["incomplete"].(bool)
	return flag
}

// imageHome is the directory that images and their layers are written to.
func (r *Root) imageHome() string {
	if dir := r.store.ImageStore(); dir != "" {
		return dir
	}
	return r.store.GraphRoot()
}

// walk adds up what is allocated for dir. What vanishes meanwhile does not count, nor does a dir that is not there.
func walk(ctx context.Context, dir string) (diskUse, error) {
	var use diskUse
	type inode struct{ dev, ino uint64 }
	linked := make(map[inode]bool)
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("stat %s: no inode", path)
		}
		if !info.IsDir() && stat.Nlink > 1 {
			at := inode{stat.Dev, stat.Ino}
			if linked[at] {
				return nil
			}
			linked[at] = true
		}
		use.bytes += uint64(stat.Blocks) * 512 //nolint:gosec // never negative
		use.inodes++
		return nil
	})
	return use, err
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
