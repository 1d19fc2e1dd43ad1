package imageservice

import (
	"context"
	"errors"
)

// Mend gives CRI-O's own root all the layers of an image there that leans on handlers' roots, as storage.Roots.Mend
// does, unless anybody uses it.
func (s *Service) Mend(ctx context.Context, imageID string) error {
	return s.roots.Mend(ctx, imageID, func(id string) ([]string, error) {
		// Anew each time: what is copied meanwhile may be large.
		users, err := s.Users(ctx)
		if err != nil {
			return nil, err
		}
		return users(id)
	})
}

// mendAll mends every image that leans. It returns an error where one cannot be.
func (s *Service) mendAll(ctx context.Context) error {
	leans, err := s.roots.Leaning(ctx)
	for _, lean := range leans {
		err = errors.Join(err, s.Mend(ctx, lean.ImageID))
	}
	return err
}
