package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	cstorage "go.podman.io/storage"
)

const (
	// mendedNamePrefix and the id of a layer of CRI-O's own root are the name of the layer there that takes its place
	// while that is made anew.
	mendedNamePrefix = "ocihold-mended-"
	// mendsKey is the item of an image's big data that says which image it stands in for meanwhile.
	mendsKey = "ocihold-mends"
)

// Mend gives CRI-O's own root all the layers of an image of its that leans on handler roots. The image's id, names,
// digests and whatever else is kept with it stay. The content comes from the roots that it is in, and must have the
// digests that it was pulled by; no registry is asked.
//
// Layers of CRI-O's root that the overlay driver put on those of another root are removed and made anew: so images that
// share such a layer are mended together, and are absent from the root for a moment. All of them are on the node
// all the time, as a second, nameless record; what a killed process has left undone is for ResumeMending.
//
// It returns ErrInUse, and has changed nothing then, where one of these images is leased, being pulled or run, or where
// inUse, as in [Roots.Remove], says so; ErrNotFound; ErrBadRecord where a layer is in no root; and ErrDiskFull. An image
// that does not lean is left as it is.
func (r *Roots) Mend(ctx context.Context, imageID string, inUse func(imageID string) (users []string, err error)) error {
	r.mendMu.Lock()
	defer r.mendMu.Unlock()
	err := r.base.usable(ctx)
	if err == nil {
		err = r.mend(ctx, imageID, inUse)
	}
	if err != nil {
		return fmt.Errorf("mend image %s: %w", imageID, full(err))
	}
	return nil
}

// ResumeMending finishes what a Mend had begun that did not end.
func (r *Roots) ResumeMending(ctx context.Context) error {
	r.mendMu.Lock()
	defer r.mendMu.Unlock()
	err := r.base.usable(ctx)
	if err == nil {
		err = r.resumeMending(ctx)
	}
	if err != nil {
		return fmt.Errorf("finish mending images: %w", full(err))
	}
	return nil
}

// mending is what an image lacks to stand by itself.
type mending struct {
	// lent are the layers that CRI-O's own root has not, lowest first.
	lent []lentLayer
	// bent are layers of CRI-O's own root that the driver put on those of other roots, parents first.
	bent []string
	// images are the ids of those that have bent layers, and of the image itself.
	images []string
}

type lentLayer struct {
	root       *Root
	id, parent string
}

func (r *Roots) mend(ctx context.Context, imageID string, inUse func(string) ([]string, error)) (err error) {
	lenders, _ := r.answering(ctx)
	var todo mending
	err = r.crio.locked(func(state *crioState) (err error) {
		todo, err = state.planMending(imageID, lenders)
		return err
	})
	if err != nil || len(todo.lent)+len(todo.bent) == 0 {
		return err
	}
	if err := r.idle(todo.images, inUse); err != nil {
		return err
	}
	copied := ""
	defer func() {
		if err != nil {
			err = errors.Join(err, r.resumeMending(context.WithoutCancel(ctx)), r.base.deleteChain(copied, nil))
		}
	}()
	for _, l := range todo.lent {
		if err := r.base.copyLayer(ctx, l.root, l.id, l.id, l.parent); err != nil {
			return err
		}
		copied = l.id
	}
	if len(todo.bent) == 0 {
		return nil
	}
	spares, err := r.spare(ctx, todo)
	if err != nil {
		return err
	}
	r.base.leaseMu.Lock() // who wants to lease one of them waits until it is back
	defer r.base.leaseMu.Unlock()
	if err := r.idle(todo.images, inUse); err != nil {
		return err
	}
	for _, id := range todo.images {
		if err := r.base.deleteImage(id); err != nil {
			return fmt.Errorf("remove image %s: %w", id, err)
		}
	}
	for _, id := range spares {
		if err := r.replaceBySpare(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// planMending finds what to do for an image of CRI-O's own root. Nothing is to do where it does not lean.
func (s *crioState) planMending(imageID string, lenders []*Root) (mending, error) {
	at := slices.IndexFunc(s.images, func(i imageRecord) bool { return i.ID == imageID })
	if at < 0 {
		return mending{}, ErrNotFound
	}
	todo := mending{images: []string{imageID}}
	lowestBent := ""
	for id := s.images[at].TopLayer; id != ""; {
		if parent, own := s.layers[id]; own {
			if len(s.foreign[id]) > 0 {
				lowestBent = id
			}
			id = parent
			continue
		}
		lent, err := borrow(lenders, id)
		if err != nil {
			return mending{}, err
		}
		todo.lent = append(todo.lent, lent)
		id = lent.parent
	}
	slices.Reverse(todo.lent)
	if lowestBent != "" {
		return todo, s.planBent(&todo, lowestBent)
	}
	return todo, nil
}

// borrow finds the layer in one of the roots.
func borrow(lenders []*Root, id string) (lentLayer, error) {
	for _, root := range lenders {
		layer, err := root.store.Layer(id)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			continue
		}
		if err != nil {
			return lentLayer{}, err
		}
		if layer.ID == id && !incomplete(layer) {
			return lentLayer{root, id, layer.Parent}, nil
		}
	}
	return lentLayer{}, fmt.Errorf("%w: layer %s is in no root", ErrBadRecord, id)
}

// planBent adds the lowest bent layer, all that are on it, and their images.
func (s *crioState) planBent(todo *mending, lowest string) error {
	todo.bent = []string{lowest}
	for i := 0; i < len(todo.bent); i++ {
		for id, parent := range s.layers {
			if parent == todo.bent[i] {
				todo.bent = append(todo.bent, id)
			}
		}
	}
	ofImages := make(map[string]bool)
	for _, image := range s.images {
		for _, top := range append([]string{image.TopLayer}, image.MappedTopLayers...) {
			if slices.Contains(todo.bent, top) {
				todo.images = union(todo.images, []string{image.ID})
			}
			for id := top; id != ""; id = s.layers[id] {
				ofImages[id] = true
			}
		}
		// These are made again for the first container that wants them.
		todo.bent = slices.DeleteFunc(todo.bent, func(id string) bool { return slices.Contains(image.MappedTopLayers, id) })
	}
	for _, c := range s.containers {
		if slices.Contains(todo.bent, c.LayerID) {
			return inUseBy([]string{describe(c.Names, c.ID)})
		}
	}
	for _, id := range todo.bent {
		if !ofImages[id] {
			return inUseBy([]string{fmt.Sprintf("layer %s, which is no image's", id)})
		}
	}
	return nil
}

// idle returns ErrInUse where something uses one of the images of CRI-O's own root.
func (r *Roots) idle(imageIDs []string, inUse func(string) ([]string, error)) error {
	var users []string
	for _, id := range imageIDs {
		record, err := r.base.resolveID(id)
		if err != nil {
			return err
		}
		users = append(users, r.pullsOf(record.Names)...)
		if inUse != nil {
			others, err := inUse(id)
			if err != nil {
				return fmt.Errorf("ask who uses image %s: %w", id, err)
			}
			users = append(users, others...)
		}
	}
	err := r.crio.locked(func(state *crioState) error {
		for _, id := range imageIDs {
			users = append(users, state.containersOf(id)...)
		}
		return nil
	})
	if err == nil && len(users) > 0 {
		err = inUseBy(users)
	}
	return err
}

// spare makes second copies of the bent layers, and second records of their images on these, and returns the ids of
// the records.
func (r *Roots) spare(ctx context.Context, todo mending) (ids []string, err error) {
	instead := func(id string) string {
		if slices.Contains(todo.bent, id) {
			return ourID("mended", id)
		}
		return id
	}
	for _, id := range todo.bent {
		layer, err := r.base.store.Layer(id)
		if err != nil {
			return nil, fmt.Errorf("read layer %s: %w", id, err)
		}
		if err := r.base.copyLayer(ctx, r.base, id, instead(id), instead(layer.Parent), mendedNamePrefix+id); err != nil {
			return nil, err
		}
	}
	for _, id := range todo.images {
		record, err := r.base.resolveID(id)
		if err != nil {
			return nil, err
		}
		note, err := json.Marshal(imageRecord{ID: id, Names: record.Names})
		if err != nil {
			return nil, err
		}
		spareID := ourID("mends", id)
		err = r.base.duplicate(record, spareID, nil, instead(record.TopLayer), cstorage.ImageBigDataOption{Key: mendsKey, Data: note})
		if err != nil {
			return nil, err
		}
		ids = append(ids, spareID)
	}
	return ids, nil
}

// replaceBySpare makes the image anew that the record stands in for, if it is not there, and removes the record.
func (r *Roots) replaceBySpare(ctx context.Context, spareID string) error {
	spare, err := r.base.resolveID(spareID)
	if err != nil {
		return err
	}
	note, err := r.base.store.ImageBigData(spareID, mendsKey)
	if err != nil {
		return err
	}
	var of imageRecord
	if err := json.Unmarshal(note, &of); err != nil {
		return fmt.Errorf("read for which image %s stands: %w", spareID, err)
	}
	switch record, err := r.base.resolveID(of.ID); {
	case err == nil && slices.Contains(record.BigDataNames, cstorage.ImageDigestBigDataKey):
		return r.base.deleteImage(spareID) // it is still there, or again
	case err == nil: // half of it is
		if err := r.base.deleteImage(of.ID); err != nil {
			return err
		}
	case !errors.Is(err, ErrNotFound):
		return err
	}
	top, err := r.straighten(ctx, spare.TopLayer)
	if err != nil {
		return err
	}
	names := slices.DeleteFunc(of.Names, r.base.store.Exists) // taken by another image
	if err := r.base.duplicate(spare, of.ID, names, top); err != nil && !errors.Is(err, cstorage.ErrDuplicateID) {
		return err
	}
	return r.base.deleteImage(spareID)
}

// straighten copies the layers that stand in for bent ones under the ids of these, and returns the topmost. Where one
// that is bent cannot go, as something that began meanwhile uses it, no other can be put on it: then either all are
// there, or those that stand in for them stay.
func (r *Roots) straighten(ctx context.Context, top string) (string, error) {
	var bent map[string][]string
	if err := r.crio.locked(func(state *crioState) error { bent = state.foreign; return nil }); err != nil {
		return "", err
	}
	type standIn struct{ id, of string }
	var chain []standIn
	parent := ""
	for id := top; id != ""; {
		layer, err := r.base.store.Layer(id)
		if err != nil {
			return "", fmt.Errorf("read layer %s: %w", id, err)
		}
		of, ok := heldBy(layer.Names, mendedNamePrefix)
		if !ok {
			parent = id
			break
		}
		// A process that was killed as it removed the images may have left it.
		if len(bent[of]) > 0 {
			switch gone, err := r.base.deleteUnused(of); {
			case err != nil:
				return "", err
			case !gone && len(chain) == 0:
				return of, nil // the image leans again
			case !gone:
				return top, nil
			}
		}
		chain = append(chain, standIn{id, of})
		id = layer.Parent
	}
	for _, l := range slices.Backward(chain) {
		if err := r.base.copyLayer(ctx, r.base, l.id, l.of, parent); err != nil {
			return "", err
		}
		parent = l.of
	}
	return parent, nil
}

// resumeMending replaces all images that a second record stands in for, and removes what is left of second layers.
func (r *Roots) resumeMending(ctx context.Context) error {
	records, err := r.base.store.Images()
	if err != nil {
		return err
	}
	for i := range records {
		if slices.Contains(records[i].BigDataNames, mendsKey) {
			if err := r.replaceBySpare(ctx, records[i].ID); err != nil {
				return err
			}
		}
	}
	layers, err := r.base.store.Layers()
	if err != nil {
		return err
	}
	for i := range layers {
		if _, ok := heldBy(layers[i].Names, mendedNamePrefix); ok {
			if err := r.base.deleteChain(layers[i].ID, nil); err != nil {
				return err
			}
		}
	}
	return nil
}
