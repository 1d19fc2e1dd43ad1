package storage

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/moby/sys/mountinfo"
	cstorage "go.podman.io/storage"
	"golang.org/x/sys/unix"
)

// RootUsage is what a root has on its disk, and what of it could go. Sizes are in bytes as allocated on disk.
type RootUsage struct {
	// Handler is the name of the root's handler, and Root the root's directory.
	Handler    string     `json:"handler"`
	Root       string     `json:"root"`
	FileSystem FileSystem `json:"file_system"`
	// Bytes and Inodes are what all images and their records take, each layer counted once.
	Bytes  uint64 `json:"bytes"`
	Inodes uint64 `json:"inodes"`
	// SharedBytes are those of the layers that several of the root's images have.
	SharedBytes uint64 `json:"shared_bytes"`
	// ReclaimableBytes are those of the layers that go when every image goes that is neither leased nor run from: without
	// the layers that CRI-O's own root leans on.
	ReclaimableBytes uint64 `json:"reclaimable_bytes"`
	// Images are those without bad records, by their names.
	Images []ImageUsage `json:"images"`
	// Leaning are the images of CRI-O's own root that need layers of this one, by name, or by id where they have none.
	Leaning []string `json:"leaning,omitempty"`
}

// FileSystem is the one that a root is on.
type FileSystem struct {
	Mountpoint string `json:"mountpoint"`
	// Device and Type are as in /proc/self/mountinfo: "/dev/sda1", "ext4".
	Device string `json:"device"`
	Type   string `json:"type"`
	// Capacity and Available are in bytes; available is what others than root may still write.
	Capacity  uint64 `json:"capacity"`
	Available uint64 `json:"available"`
}

// ImageUsage is what an image takes in one root.
type ImageUsage struct {
	ID    string   `json:"id"`
	Names []string `json:"names"`
	// Bytes are those of all its layers in the root, OwnBytes those of the layers that no other image of the root has.
	Bytes    uint64 `json:"bytes"`
	OwnBytes uint64 `json:"own_bytes"`
	// Leased says that the image is leased, Used that a container of CRI-O or in this root is made from it.
	Leased bool `json:"leased"`
	Used   bool `json:"used"`
	// LeansOn are the handlers whose roots have layers that it needs. Only in CRI-O's own root.
	LeansOn []string `json:"leans_on,omitempty"`
	// InTwoRoots says that both CRI-O's own root and a handler's have the image: CRI-O runs its own copy.
	InTwoRoots bool `json:"in_two_roots"`
}

// Report says what each root has, CRI-O's own first. It waits until every layer is measured. There is an error for each
// image with a bad record (ErrBadRecord), for each layer that could not be read, for each root whose disk is not
// mounted (ErrUnmounted) or does not answer (ErrHung), and for each that could not be read; the report is whole for the others.
func (r *Roots) Report(ctx context.Context) ([]RootUsage, []error) {
	handlers, errs := r.answering(ctx)
	roots := append([]*Root{r.base}, handlers...)
	needs, bad, err := r.needs(handlers)
	if err != nil {
		return nil, append(errs, fmt.Errorf("report disk use: look what CRI-O's root needs: %w", err))
	}
	errs = append(errs, bad...)
	var report []RootUsage
	for _, root := range roots {
		got, err := Bounded(root, func() (reportOf, error) {
			usage, bad, err := root.report(ctx, needs)
			return reportOf{usage, bad}, err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("report disk use of handler %q: %w", root.name, err))
			continue
		}
		errs = append(errs, got.bad...)
		report = append(report, got.usage)
	}
	nameTwins(report, r.base.name)
	return report, errs
}

// reportOf is the report of one root, and what of it is bad.
type reportOf struct {
	usage RootUsage
	bad   []error
}

// nameTwins marks the images that are in CRI-O's own root and in a handler's.
func nameTwins(report []RootUsage, base string) {
	in := make(map[string][]string) // handlers by image id
	for _, root := range report {
		for _, image := range root.Images {
			in[image.ID] = append(in[image.ID], root.Handler)
		}
	}
	for _, root := range report {
		for i := range root.Images {
			handlers := in[root.Images[i].ID]
			root.Images[i].InTwoRoots = len(handlers) > 1 && slices.Contains(handlers, base)
		}
	}
}

// needs is what CRI-O's own root needs.
type needs struct {
	// images are those that its containers are made from, by id.
	images map[string]bool
	// leans are the images that lean on handler roots, by id.
	leans map[string]Lean
	// layers are those of handler roots, by the handler's name and their id.
	layers map[string]map[string]bool
}

// needs reads what CRI-O's own root needs of handler roots. There is an error for each image of which it is not known.
func (r *Roots) needs(handlers []*Root) (_ needs, bad []error, err error) {
	n := needs{make(map[string]bool), make(map[string]Lean), make(map[string]map[string]bool)}
	err = r.crio.locked(func(state *crioState) error {
		for _, c := range state.containers {
			if _, ours := heldBy(c.Names, recordNamePrefix); !ours {
				n.images[c.ImageID] = true
			}
		}
		for _, image := range state.images {
			lean, err := state.lean(image, handlers)
			if err != nil {
				bad = append(bad, fmt.Errorf("look what image %s leans on: %w", nameOr(image.Names, image.ID), err))
			}
			n.leans[image.ID] = lean
		}
		for _, root := range handlers {
			leaned, err := state.leanedOn(root)
			if err != nil {
				return err
			}
			n.layers[root.name] = leaned
		}
		return nil
	})
	return n, bad, err
}

// report describes the root and its images.
func (r *Root) report(ctx context.Context, needs needs) (_ RootUsage, bad []error, err error) {
	usage, measured, err := r.addUp(ctx, ctx)
	if err != nil {
		return RootUsage{}, nil, err
	}
	all, err := r.store.MultiList(cstorage.MultiListOptions{Images: true, Layers: true, Containers: true})
	if err != nil {
		return RootUsage{}, nil, err
	}
	result := RootUsage{Handler: r.name, Root: r.store.GraphRoot(), Bytes: usage.Bytes, Inodes: usage.Inodes}
	if result.FileSystem, err = describeFileSystem(usage.Mountpoint); err != nil {
		return RootUsage{}, nil, err
	}
	used := maps.Clone(needs.images)
	for i := range all.Containers {
		if _, ours := heldBy(all.Containers[i].Names, recordNamePrefix); !ours {
			used[all.Containers[i].ImageID] = true
		}
	}
	images, bad := r.Images(ctx)
	result.Images = make([]ImageUsage, len(images))
	for i, image := range images {
		result.Images[i] = ImageUsage{ID: image.ID, Names: image.Names, Leased: image.Leased, Used: used[image.ID]}
		if r.leans == nil {
			result.Images[i].LeansOn = needs.leans[image.ID].Handlers
		}
	}
	slices.SortFunc(result.Images, func(a, b ImageUsage) int {
		return cmp.Or(slices.Compare(a.Names, b.Names), cmp.Compare(a.ID, b.ID))
	})
	for _, id := range slices.Sorted(maps.Keys(needs.leans)) {
		if lean := needs.leans[id]; slices.Contains(lean.Handlers, r.name) {
			result.Leaning = append(result.Leaning, nameOr(lean.Names, id))
		}
	}
	result.divide(all, measured, needs.layers[r.name])
	return result, append(usage.Bad, bad...), nil
}

// divide says which image has which share of the layers, and which of these would go with the images. Leaned are layers
// that would not.
func (u *RootUsage) divide(all cstorage.MultiListResult, measured map[string]layerUse, leaned map[string]bool) {
	t := treeOf(all)
	users := make(map[string]int, len(t.parents)) // images by layer
	tops := make(map[string]string, len(all.Images))
	for i := range all.Images {
		tops[all.Images[i].ID] = all.Images[i].TopLayer
		for _, id := range t.chain(all.Images[i].TopLayer) {
			users[id]++
		}
	}
	stays := maps.Clone(leaned)
	if stays == nil {
		stays = make(map[string]bool)
	}
	for id := range t.parents {
		if users[id] == 0 {
			stays[id] = true // a container's, or what holds those below it
		}
	}
	for i := range u.Images {
		image := &u.Images[i]
		top := tops[image.ID]
		if image.Leased || image.Used {
			stays[top] = true
		}
		for _, id := range t.chain(top) {
			image.Bytes += measured[id].all()
			if users[id] == 1 {
				image.OwnBytes += measured[id].all()
			}
		}
	}
	for _, id := range slices.Collect(maps.Keys(stays)) {
		for _, id := range t.chain(id) {
			stays[id] = true
		}
	}
	for id, n := range users {
		if n > 1 {
			u.SharedBytes += measured[id].all()
		}
		if !stays[id] {
			u.ReclaimableBytes += measured[id].all()
		}
	}
}

// describeFileSystem looks up the file system that is mounted there.
func describeFileSystem(mountpoint string) (FileSystem, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(mountpoint, &stat); err != nil {
		return FileSystem{}, fmt.Errorf("statfs %s: %w", mountpoint, err)
	}
	block := uint64(stat.Frsize) //nolint:gosec // never negative
	result := FileSystem{Mountpoint: mountpoint, Capacity: stat.Blocks * block, Available: stat.Bavail * block}
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(mountpoint))
	if err != nil {
		return FileSystem{}, fmt.Errorf("read the mounts: %w", err)
	}
	for _, m := range mounts {
		result.Device, result.Type = m.Source, m.FSType
	}
	return result, nil
}
