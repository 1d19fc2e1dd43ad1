package imageservice

import "context"

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
