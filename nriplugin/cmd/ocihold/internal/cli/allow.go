package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/storage"
)

// allowPull refuses what pods of the namespace may not have pulled. A short name is
// allowed where all that it may be pulled by are.
func (s volumeStore) allowPull(ref, namespace string) error {
	if err := s.allowNamespace(namespace); err != nil || len(s.config.AllowedImages) == 0 {
		return err
	}
	names, err := s.root.PullNames(ref)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !fits(s.config.AllowedImages, name) {
			return fmt.Errorf("%w: image %s is not among allowed_images in [volumes]", imagevolume.ErrNotAllowed, name)
		}
	}
	return nil
}

// allowPresent refuses an image that is there and that pods of the namespace may not
// have by this name. Where they call it by its ID or a short name, one of the image's
// own names has to be allowed.
func (s volumeStore) allowPresent(ctx context.Context, id, ref, namespace string) error {
	if err := s.allowNamespace(namespace); err != nil {
		return err
	}
	if len(s.config.AllowedImages) > 0 {
		names, err := s.root.PresentNames(ctx, ref, id)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(names, func(name string) bool { return fits(s.config.AllowedImages, name) }) {
			return fmt.Errorf("%w: image %s, whose names are %q, is not among allowed_images in [volumes]", imagevolume.ErrNotAllowed, ref, names)
		}
	}
	if err := s.root.CheckSize(ctx, id, volumeLimit(s.config)); err != nil {
		return fmt.Errorf("image %s: %w", ref, tooLarge(err))
	}
	return nil
}

func (s volumeStore) allowNamespace(namespace string) error {
	if len(s.config.AllowedNamespaces) > 0 && !fits(s.config.AllowedNamespaces, namespace) {
		return fmt.Errorf("%w: namespace %s is not among allowed_namespaces in [volumes]", imagevolume.ErrNotAllowed, namespace)
	}
	return nil
}

// fits reports whether one of the patterns, which were checked, fits the name.
func fits(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		ok, _ := doublestar.Match(pattern, name)
		return ok
	})
}

// volumeLimit is how large an image may be that is a volume.
func volumeLimit(config conf.Volumes) storage.Limit {
	return storage.Limit{Bytes: int64(config.MaxImageBytes), Setting: "max_image_bytes in [volumes]"}
}

func tooLarge(err error) error {
	if errors.Is(err, storage.ErrTooLarge) {
		return fmt.Errorf("%w: %w", imagevolume.ErrNotAllowed, err)
	}
	return err
}
