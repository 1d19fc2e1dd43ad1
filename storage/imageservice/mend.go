package imageservice

import (
	"context"
	"errors"
	"fmt"

	"github.com/ocihold/ocihold/storage"
)

// Mend gives CRI-O's own root all the layers of an image there that leans on handlers' roots, as storage.Roots.Mend
// does, unless anybody uses it.
func (s *Service) Mend(ctx context.Context, imageID string) error {
	return s.roots.Mend(ctx, imageID, func(id string) ([]string, error) {
		// Anew each time: what is copied meanwhile may be large.
		users, err := users(ctx, s.crio)
		if err != nil {
			return nil, err
		}
		return users(id)
	})
}

// PullInto pulls into a root, by its name. Where images that CRI-O has pulled lean, and the pull needs one of their
// layers, these images are mended first; it returns storage.ErrLeans with who uses them where they cannot be.
func (s *Service) PullInto(ctx context.Context, name, ref string, opt storage.PullOptions) (storage.Image, error) {
	root, err := s.writable(ctx, name)
	if err != nil {
		return storage.Image{}, fmt.Errorf("pull %q: %w", ref, err)
	}
	image, err := root.Pull(ctx, ref, opt)
	if !errors.Is(err, storage.ErrLeans) {
		return image, err
	}
	if mendErr := s.mendAll(ctx); mendErr != nil {
		return storage.Image{}, fmt.Errorf("%w: %w", err, mendErr)
	}
	return root.Pull(ctx, ref, opt)
}

func (s *Service) mendAll(ctx context.Context) error {
	leans, err := s.roots.Leaning(ctx)
	for _, lean := range leans {
		err = errors.Join(err, s.Mend(ctx, lean.ImageID))
	}
	return err
}
