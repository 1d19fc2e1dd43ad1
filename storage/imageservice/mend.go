package imageservice

import (
	"context"
	"fmt"
)

// Mend gives CRI-O's own root all the layers of an image there that leans on handlers' roots, as storage.Roots.Mend
// does, unless anybody uses it.
func (s *Service) Mend(ctx context.Context, imageID string) error {
	users, err := users(ctx, s.crio)
	if err != nil {
		return fmt.Errorf("mend image %s: %w", imageID, err)
	}
	return s.roots.Mend(ctx, imageID, users)
}
