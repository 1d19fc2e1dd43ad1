package cli

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
	"github.com/ocihold/ocihold/storage"
)

const sweepEvery = 5 * time.Minute

// sweepRoots clears away, again and again until ctx ends, what roots have that
// nobody needs, and mends the images that lean on a handler's root: CRI-O pulled
// them by itself. last is what became of it.
func sweepRoots(ctx context.Context, store localStore, last *atomic.Pointer[health.Sweep], log logrus.FieldLogger) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	s := sweeper{store, log, map[string]bool{}}
	for {
		err := s.sweep(ctx)
		last.Store(sweepOf("sweep of the roots", time.Now(), err))
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		case <-store.roots.Returned():
		}
	}
}

type sweeper struct {
	store localStore
	log   logrus.FieldLogger
	told  map[string]bool // the images and what was said of them
}

func (s *sweeper) sweep(ctx context.Context) error {
	var undone []error
	for _, step := range []struct {
		do     func(context.Context) error
		undone string
	}{
		{s.store.roots.RemoveHalf, "images that a killed pull left half recorded are not removed"},
		{s.store.roots.RemoveUnwritten, "files that a killed program left half written are not removed"},
		{s.store.roots.ResumeMending, "images that were being mended are not whole yet"},
		{s.mend, "images that lean on handlers' roots are not known"},
		{s.store.roots.FreeKept, "layers that nothing needs are not freed"},
	} {
		if err := step.do(ctx); err != nil && ctx.Err() == nil {
			s.log.WithError(err).Warn(step.undone)
			undone = append(undone, err)
		}
	}
	return errors.Join(undone...)
}

// mend mends the images that nobody uses, and tells once of each that it cannot.
func (s *sweeper) mend(ctx context.Context) error {
	leans, err := s.store.roots.Leaning(ctx)
	for _, lean := range leans {
		err := s.store.service.Mend(ctx, lean.ImageID)
		log := s.log.WithFields(logrus.Fields{"image_id": lean.ImageID, "names": lean.Names, "handlers": lean.Handlers})
		switch {
		case ctx.Err() != nil: // the next start goes on
		case err == nil:
			log.Info("an image in CRI-O's root leaned on a handler's root, and has all its layers now")
		case errors.Is(err, storage.ErrInUse):
			if s.once(lean.ImageID + " in use") {
				log.WithError(err).Info("an image in CRI-O's root leans on a handler's root: it is mended when nobody uses it")
			}
		case s.once(lean.ImageID):
			log.WithError(err).Warn("an image in CRI-O's root leans on a handler's root and cannot be mended: what it needs stays; " +
				"remove it and pull it with 'ocihold pull'")
		}
	}
	return err
}

// once tells whether it is called with that text for the first time.
func (s *sweeper) once(text string) bool {
	first := !s.told[text]
	s.told[text] = true
	return first
}
