package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"

	cstorage "go.podman.io/storage"
)

// RemoveHalf removes what a pull leaves that is killed as it records its image: records with neither a name nor a
// manifest, over which CRI-O's image list would fail. Of a pull under way no such record is seen: the record and the
// manifest are written in one hold of the root's lock. It looks at those roots only whose disk is mounted.
func (r *Roots) RemoveHalf(ctx context.Context) error {
	roots, _ := r.all()
	var errs []error
	for _, root := range roots {
		errs = append(errs, root.Bounded(func() error { return r.removeHalf(ctx, root) }))
	}
	return errors.Join(errs...)
}

func (r *Roots) removeHalf(ctx context.Context, root *Root) error {
	records, err := root.store.Images()
	if err != nil {
		return fmt.Errorf("list images of the root of handler %q: %w", root.name, err)
	}
	var errs []error
	for i := range records {
		if len(records[i].Names) > 0 || slices.Contains(records[i].BigDataNames, cstorage.ImageDigestBigDataKey) {
			continue
		}
		if err := r.remove(ctx, root.name, records[i].ID); err != nil {
			errs = append(errs, fmt.Errorf("remove half an image: %w", err))
		}
	}
	return errors.Join(errs...)
}
