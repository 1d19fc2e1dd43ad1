package cli

import (
	"context"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/storage"
)

const sweepEvery = 5 * time.Minute

// sweepRoots frees, again and again until ctx ends, what handlers' roots kept for
// images in CRI-O's root that are gone by now, and tells once of each image that
// leans on a handler's root: CRI-O pulled it by itself.
func sweepRoots(ctx context.Context, roots *storage.Roots, log logrus.FieldLogger) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	told := map[string]bool{}
	for {
		if err := roots.FreeKept(ctx); err != nil && ctx.Err() == nil {
			log.WithError(err).Warn("layers that nothing needs are not freed")
		}
		leans, err := roots.Leaning(ctx)
		if err != nil && ctx.Err() == nil {
			log.WithError(err).Warn("images that lean on handlers' roots are not known")
		}
		for _, lean := range leans {
			if !told[lean.ImageID] {
				told[lean.ImageID] = true
				log.WithFields(logrus.Fields{
					"image_id": lean.ImageID, "names": lean.Names, "handlers": lean.Handlers, "missing": lean.Missing,
				}).Warn("an image in CRI-O's root leans on a handler's root: remove it and pull it with 'ocihold pull'")
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
