package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
)

// Image is what a root says about one image.
type Image struct {
	// ID is the image id: 64 hexadecimal digits, for most images the digest of its config.
	ID string `json:"id"`
	// Digest is the digest of the image's own manifest, whichever way the image was found; never that of an index. Of an
	// image that was made of an OCI artifact it is the artifact's.
	Digest digest.Digest `json:"digest"`
	// Digests are those of all manifests kept with the image, that of the index it was chosen from among them.
	Digests []digest.Digest `json:"digests"`
	// Names are its references, normalized, with a tag or a digest each. A pin is none of them.
	Names []string `json:"names"`
	// Size is the sum of its layers' unpacked sizes in bytes, as recorded when they were written. A layer without such
	// a record counts as 0.
	Size int64 `json:"size"`
	// Created is the time that the image's config gives.
	Created time.Time `json:"created"`
	// Leased says that the image has a lease record.
	Leased bool `json:"leased"`
}

// Images lists the root's images in no particular order. Images with bad records are left out, and there is one error
// for each that names it and wraps ErrBadRecord. Any other error means that the root could not be read.
func (r *Root) Images(ctx context.Context) ([]Image, []error) {
	if err := r.usable(ctx); err != nil {
		return nil, []error{fmt.Errorf("list images of handler %q: %w", r.name, err)}
	}
	all, err := r.store.MultiList(cstorage.MultiListOptions{Images: true, Layers: true, Containers: true})
	if err != nil {
		return nil, []error{fmt.Errorf("list images of handler %q: %w", r.name, err)}
	}
	images, bad := r.readImages(all)
	for i := range bad {
		bad[i] = fmt.Errorf("list images of handler %q: %w", r.name, bad[i])
	}
	return images, bad
}

// readImages completes the image records of a list that has layers and containers too.
func (r *Root) readImages(all cstorage.MultiListResult) (images []Image, bad []error) {
	layers := make(map[string]*cstorage.Layer, len(all.Layers))
	for i := range all.Layers {
		layers[all.Layers[i].ID] = &all.Layers[i]
	}
	containers := make(map[string]bool, len(all.Containers))
	for i := range all.Containers {
		containers[all.Containers[i].ID] = true
	}
	layer := func(id string) (*cstorage.Layer, error) {
		if l, ok := layers[id]; ok {
			return l, nil
		}
		return r.lent(id)
	}

	images = make([]Image, 0, len(all.Images))
	for i := range all.Images {
		image, err := readRecord(&all.Images[i], layer)
		if err == nil {
			if _, err = r.config(image.ID); errors.Is(err, ErrNotFound) {
				continue // gone meanwhile
			}
			if err != nil {
				err = fmt.Errorf("image %s, names %q: %w", image.ID, image.Names, err)
			}
		}
		if err != nil {
			bad = append(bad, err)
			continue
		}
		image.Leased = containers[leaseIDs(image.ID).record]
		images = append(images, image)
	}
	return images, bad
}

// lent returns a layer that CRI-O's own root has not itself, but leans on in a handler root.
func (r *Root) lent(id string) (*cstorage.Layer, error) {
	if r.lenders != nil {
		for _, lender := range r.lenders() {
			if layer, err := lender.store.Layer(id); err == nil && layer.ID == id {
				return layer, nil
			}
		}
	}
	return nil, cstorage.ErrLayerUnknown
}

// leaningImage completes one image record, whose layers may be lent.
func (r *Root) leaningImage(record *cstorage.Image) (Image, error) {
	return r.complete(record, func(id string) (*cstorage.Layer, error) {
		layer, err := r.store.Layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			return r.lent(id)
		}
		return layer, err
	})
}

// image completes one image record, whose layers are all in the root itself.
func (r *Root) image(record *cstorage.Image) (Image, error) {
	return r.complete(record, r.store.Layer)
}

func (r *Root) complete(record *cstorage.Image, layer func(id string) (*cstorage.Layer, error)) (Image, error) {
	image, err := readRecord(record, layer)
	if err != nil {
		return Image{}, err
	}
	switch _, err := r.store.Container(leaseIDs(image.ID).record); {
	case err == nil:
		image.Leased = true
	case !errors.Is(err, cstorage.ErrContainerUnknown):
		return Image{}, fmt.Errorf("look for the lease of image %s: %w", image.ID, err)
	}
	return image, nil
}

// readRecord checks an image record and adds up its layers. It returns ErrBadRecord where CRI-O's image list would fail
// as a whole, or a mount could not be made.
func readRecord(record *cstorage.Image, layer func(id string) (*cstorage.Layer, error)) (Image, error) {
	bad := func(format string, args ...any) (Image, error) {
		return Image{}, fmt.Errorf("image %s, names %q: %w: %w", record.ID, record.Names, ErrBadRecord, fmt.Errorf(format, args...))
	}
	if !reference.IsFullIdentifier(record.ID) {
		return bad("the id is not 64 hexadecimal digits")
	}
	for _, name := range record.Names {
		named, err := reference.ParseNormalizedNamed(name)
		if err != nil {
			return bad("name %q: %w", name, err)
		}
		if reference.IsNameOnly(named) {
			return bad("name %q has neither a tag nor a digest", name)
		}
	}
	// record.Digest is the one the image was first pulled by, maybe an index's.
	manifest, ok := record.BigDataDigests[cstorage.ImageDigestBigDataKey]
	if !ok {
		manifest = record.Digest
	}
	if manifest == "" || len(record.Digests) == 0 {
		return bad("it has no manifest")
	}
	digests := record.Digests
	if isOfArtifact(record) { // what was made of it no registry has
		made := manifest
		manifest = record.BigDataDigests[artifactKey]
		digests = slices.DeleteFunc(slices.Clone(digests), func(d digest.Digest) bool { return d == made })
	}
	var size int64
	for id := record.TopLayer; id != ""; {
		l, err := layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			return bad("layer %s: %w", id, err)
		}
		if err != nil {
			return Image{}, fmt.Errorf("read layer %s of image %s: %w", id, record.ID, err)
		}
		if l.UncompressedSize > 0 {
			size += l.UncompressedSize
		}
		id = l.Parent
	}
	return Image{
		ID:      record.ID,
		Digest:  manifest,
		Digests: digests,
		Names:   unpinned(record.Names),
		Size:    size,
		Created: record.Created,
	}, nil
}
