package storage

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.podman.io/image/v5/docker/reference"
	cstorage "go.podman.io/storage"
	"go.podman.io/storage/types"
)

// Lease is a lease as found in a root.
type Lease struct {
	// ImageID is the image it holds.
	ImageID string
	// Complete says that the image is there with both the record and the child layer, and a pin where there are to be
	// pins. An incomplete lease is made whole by Lease while the image is there, and cleared away by Release.
	Complete bool
	// Pinned says that the image has its pin (PinRepository).
	Pinned bool
}

const (
	recordNamePrefix = "ocihold-lease-"
	childNamePrefix  = "ocihold-hold-"
)

// leaseID are the ids of what a lease is made of. They follow from the image id, so that taking a lease twice, in two
// processes or after a crash, cannot make two.
type leaseID struct {
	record      string // container record
	recordLayer string // the record's own layer
	child       string // child of the image's top layer
}

func leaseIDs(imageID string) leaseID {
	return leaseID{
		record:      ourID("record", imageID),
		recordLayer: ourID("record layer", imageID),
		child:       ourID("child", imageID),
	}
}

// ourID is the id of what we make for an image or a layer.
func ourID(part, of string) string {
	sum := sha256.Sum256([]byte("ocihold " + part + " " + of))
	return hex.EncodeToString(sum[:])
}

// hostMapped are the options of a layer whose owners are the host's.
func hostMapped() *cstorage.LayerOptions {
	return &cstorage.LayerOptions{IDMappingOptions: cstorage.LayerIDMappingOptions{HostUIDMapping: true, HostGIDMapping: true}}
}

// Lease holds the image until Release. It is idempotent, completes a lease that is incomplete, and is atomic against
// the image's removal: it returns ErrNotFound where the image is gone. One that was removed by force, lease or no lease, is
// made again from what the lease kept, without a registry.
func (r *Root) Lease(ctx context.Context, imageID string) (err error) {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("lease image %s: %w", imageID, err)
	}
	defer func() { r.suspect(err) }()
	if !reference.IsFullIdentifier(imageID) {
		return fmt.Errorf("lease image %q: %w: not an image id", imageID, ErrInvalidReference)
	}
	r.leaseMu.Lock()
	defer r.leaseMu.Unlock()
	if err := r.restore(imageID); err != nil {
		return fmt.Errorf("lease image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	created, err := r.createRecord(imageID)
	if err != nil {
		return fmt.Errorf("lease image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	if err := r.createChild(imageID); err != nil {
		if created {
			err = errors.Join(err, r.store.DeleteContainer(leaseIDs(imageID).record))
		}
		return fmt.Errorf("lease image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	if err := r.setPin(imageID, r.pin); err != nil {
		return fmt.Errorf("lease image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	r.noteUse(imageID)
	return nil
}

// createRecord makes the container record that blocks removal, where it is missing.
func (r *Root) createRecord(imageID string) (created bool, err error) {
	ids := leaseIDs(imageID)
	switch record, err := r.store.Container(ids.record); {
	case err == nil:
		return false, checkLease(record.Metadata)
	case !errors.Is(err, cstorage.ErrContainerUnknown):
		return false, fmt.Errorf("look for the record: %w", err)
	}
	// A process that was killed between making the layer and the record left the layer.
	if err := r.deleteLayer(ids.recordLayer); err != nil {
		return false, fmt.Errorf("remove the layer of an unfinished record: %w", err)
	}
	_, err = r.store.CreateContainer(ids.record, []string{recordNamePrefix + imageID}, imageID, ids.recordLayer, "{}",
		&cstorage.ContainerOptions{
			IDMappingOptions: types.IDMappingOptions{HostUIDMapping: true, HostGIDMapping: true},
			LabelOpts:        []string{"disable"},
		})
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, cstorage.ErrImageUnknown):
		return false, ErrNotFound
	case errors.Is(err, cstorage.ErrDuplicateID), errors.Is(err, cstorage.ErrDuplicateName):
		if _, lookErr := r.store.Container(ids.record); lookErr == nil {
			return false, nil // another process was faster
		}
	}
	return false, fmt.Errorf("create the record: %w", err)
}

// createChild makes the layer that keeps the content through a forced removal, where it is missing. The record is there.
func (r *Root) createChild(imageID string) error {
	record, err := r.resolveID(imageID)
	if err != nil {
		return fmt.Errorf("look for the image: %w", err)
	}
	if record.TopLayer == "" {
		return nil
	}
	ids := leaseIDs(imageID)
	child, err := r.store.Layer(ids.child)
	has := err == nil && child.Parent == record.TopLayer
	switch {
	case has:
	case err == nil:
		if err := r.guarded(func(leaned map[string]bool) error { return r.deleteChain(ids.child, leaned) }); err != nil {
			return fmt.Errorf("remove the child of another top layer: %w", err)
		}
	case !errors.Is(err, cstorage.ErrLayerUnknown):
		return fmt.Errorf("look for the child layer: %w", err)
	}
	if !has {
		_, err = r.store.CreateLayer(ids.child, record.TopLayer, []string{childNamePrefix + imageID}, "", false, hostMapped())
		if err != nil && !errors.Is(err, cstorage.ErrDuplicateID) {
			return fmt.Errorf("create the child layer: %w", err)
		}
	}
	if err := r.keepRecord(record, ids.child); err != nil {
		return fmt.Errorf("keep the image's record with the child layer: %w", err)
	}
	return nil
}

// Release lets go of the image. It is idempotent, and clears away incomplete leases too. Where the image itself was
// removed by force, the layers that only the lease kept go with it.
func (r *Root) Release(ctx context.Context, imageID string) error {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("release image %s: %w", imageID, err)
	}
	r.leaseMu.Lock()
	defer r.leaseMu.Unlock()
	if err := withRoom([]*Root{r}, func() error { return r.release(imageID) }); err != nil {
		return fmt.Errorf("release image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	r.noteUse(imageID) // until now
	return nil
}

func (r *Root) release(imageID string) error {
	ids := leaseIDs(imageID)
	if record, err := r.store.Container(ids.record); err == nil {
		if err := checkLease(record.Metadata); err != nil {
			return err
		}
	}
	if err := r.setPin(imageID, false); err != nil {
		return err
	}
	switch _, err := r.store.Container(ids.record); {
	case err == nil:
		if err := r.store.DeleteContainer(ids.record); err != nil && !errors.Is(err, cstorage.ErrNotAContainer) {
			return fmt.Errorf("remove the record: %w", err)
		}
	case !errors.Is(err, cstorage.ErrContainerUnknown):
		return fmt.Errorf("look for the record: %w", err)
	}
	if err := r.deleteLayer(ids.recordLayer); err != nil {
		return fmt.Errorf("remove the record's layer: %w", err)
	}
	if err := r.releaseChild(imageID); err != nil {
		return fmt.Errorf("remove the child layer: %w", err)
	}
	return nil
}

// releaseChild removes the child layer and, where the image was removed by force, what only the child kept.
func (r *Root) releaseChild(imageID string) error {
	child, err := r.store.Layer(leaseIDs(imageID).child)
	if errors.Is(err, cstorage.ErrLayerUnknown) {
		return nil
	}
	if err != nil {
		return err
	}
	if gone, err := r.deleteUnused(child.ID); err != nil || !gone {
		return err
	}
	if _, err := r.resolveID(imageID); !errors.Is(err, ErrNotFound) {
		return err
	}
	return r.guarded(func(leaned map[string]bool) error { return r.deleteChain(child.Parent, leaned) })
}

// deleteLayer removes the layer if it is there.
func (r *Root) deleteLayer(id string) error {
	if _, err := r.store.Layer(id); errors.Is(err, cstorage.ErrLayerUnknown) {
		return nil
	}
	if err := r.store.DeleteLayer(id); err != nil && !errors.Is(err, cstorage.ErrNotALayer) {
		return err
	}
	return nil
}

// deleteChain removes the layer and then its parents, up to the first that something else uses. One that CRI-O's root
// leans on is kept until that ends.
func (r *Root) deleteChain(id string, leaned map[string]bool) error {
	for id != "" {
		if leaned[id] {
			return r.keep(id)
		}
		layer, err := r.store.Layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			return nil
		}
		if err != nil {
			return err
		}
		if gone, err := r.deleteUnused(id); err != nil || !gone {
			return err
		}
		id = layer.Parent
	}
	return nil
}

// deleteUnused removes the layer, unless something in the root uses it, and tells whether it is gone.
func (r *Root) deleteUnused(id string) (gone bool, err error) {
	// DeleteLayer itself looks neither at images in a second image store nor at mapped top layers.
	images, err := r.store.ImagesByTopLayer(id)
	if err != nil && !errors.Is(err, cstorage.ErrLayerUnknown) {
		return false, err
	}
	if len(images) > 0 {
		return false, nil
	}
	switch err := r.store.DeleteLayer(id); {
	case err == nil, errors.Is(err, cstorage.ErrNotALayer):
		return true, nil
	case errors.Is(err, cstorage.ErrLayerHasChildren),
		errors.Is(err, cstorage.ErrLayerUsedByImage),
		errors.Is(err, cstorage.ErrLayerUsedByContainer):
		return false, nil
	default:
		return false, err
	}
}

// Leases lists the leases in the root by image id, incomplete ones too.
func (r *Root) Leases(ctx context.Context) ([]Lease, error) {
	if err := r.usable(ctx); err != nil {
		return nil, fmt.Errorf("list leases of handler %q: %w", r.name, err)
	}
	all, err := r.store.MultiList(cstorage.MultiListOptions{Images: true, Layers: true, Containers: true})
	if err != nil {
		return nil, fmt.Errorf("list leases of handler %q: %w", r.name, err)
	}
	topLayers := make(map[string]string, len(all.Images))
	found := make(map[string]struct{})
	pinned := make(map[string]bool)
	for i := range all.Images {
		imageID := all.Images[i].ID
		topLayers[imageID] = all.Images[i].TopLayer
		if slices.Contains(all.Images[i].Names, pinOf(imageID)) {
			found[imageID] = struct{}{}
			pinned[imageID] = true
		}
	}
	records := make(map[string]bool)
	for i := range all.Containers {
		if imageID, ok := heldBy(all.Containers[i].Names, recordNamePrefix); ok {
			if err := checkLease(all.Containers[i].Metadata); err != nil {
				return nil, fmt.Errorf("list leases of handler %q: image %s: %w", r.name, imageID, err)
			}
			found[imageID] = struct{}{}
			records[imageID] = true
		}
	}
	childrenOf := make(map[string]string)
	for i := range all.Layers {
		if imageID, ok := heldBy(all.Layers[i].Names, childNamePrefix); ok {
			found[imageID] = struct{}{}
			childrenOf[imageID] = all.Layers[i].Parent
		}
	}
	leases := make([]Lease, 0, len(found))
	for imageID := range found {
		top, hasImage := topLayers[imageID]
		leases = append(leases, Lease{
			ImageID:  imageID,
			Complete: hasImage && records[imageID] && childrenOf[imageID] == top && pinned[imageID] == r.pin,
			Pinned:   pinned[imageID],
		})
	}
	slices.SortFunc(leases, func(a, b Lease) int { return cmp.Compare(a.ImageID, b.ImageID) })
	return leases, nil
}

// heldBy returns the image id that a name of ours carries.
func heldBy(names []string, prefix string) (imageID string, ok bool) {
	for _, name := range names {
		if id, ok := strings.CutPrefix(name, prefix); ok && reference.IsFullIdentifier(id) {
			return id, true
		}
	}
	return "", false
}
