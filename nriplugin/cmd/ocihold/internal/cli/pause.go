package cli

import (
	"context"
	"errors"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/storage"
)

// pauseRetry is how long it takes to the next try to pull the pause image.
const pauseRetry = 30 * time.Second

// keepPauseImage pulls the pause image into CRI-O's root before CRI-O needs it:
// CRI-O's own pull might lean on layers in handlers' roots.
func keepPauseImage(ctx context.Context, root *storage.Root, crio *conf.CRIO, log logrus.FieldLogger) error {
	for ctx.Err() == nil {
		_, err := root.Resolve(ctx, crio.PauseImage)
		if errors.Is(err, storage.ErrNotFound) {
			_, err = root.Pull(ctx, crio.PauseImage, storage.PullOptions{AuthFile: crio.PauseImageAuthFile})
		}
		if err == nil {
			break
		}
		log.WithError(err).Warn("the pause image is not there")
		select {
		case <-ctx.Done():
		case <-time.After(pauseRetry):
		}
	}
	return nil
}
