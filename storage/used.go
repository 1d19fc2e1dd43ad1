package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/storage/pkg/lockfile"
)

// MarkUsed notes that the image is used now. It returns ErrNotFound where the root does not have it.
//
// The time is that of the last change of the directory in which containers/storage keeps the image's data. So one that
// nothing was ever noted of, such as another program's, was last used when it was written.
func (r *Root) MarkUsed(ctx context.Context, imageID string) error {
	if err := r.usable(ctx); err != nil {
		return fmt.Errorf("note the use of image %s: %w", imageID, err)
	}
	if !reference.IsFullIdentifier(imageID) {
		return fmt.Errorf("note the use of image %q: %w: not an image id", imageID, ErrInvalidReference)
	}
	if err := r.markUsed(imageID); err != nil {
		return fmt.Errorf("note the use of image %s in the root of handler %q: %w", imageID, r.name, err)
	}
	return nil
}

// noteUse notes the use where no one waits for the outcome.
func (r *Root) noteUse(imageID string) {
	if err := r.markUsed(imageID); err != nil && !errors.Is(err, ErrNotFound) {
		r.log.WithField("id", imageID).WithError(err).Warn("the use of an image is not noted")
	}
}

// markUsed is atomic against a collection of the image: either it returns ErrNotFound or the image stays.
func (r *Root) markUsed(imageID string) error {
	lock, err := r.usedLock()
	if err != nil {
		return err
	}
	lock.RLock()
	defer lock.Unlock()
	return r.setUsed(imageID, r.now())
}

func (r *Root) setUsed(imageID string, at time.Time) error {
	err := os.Chtimes(r.dataDir(imageID), time.Time{}, at)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrNotFound
	}
	return err
}

// lastUsed returns when the image was last used. A time to come, of a clock that was wrong, becomes now.
func (r *Root) lastUsed(imageID string) (time.Time, error) {
	info, err := os.Stat(r.dataDir(imageID))
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, ErrNotFound
	}
	if err != nil {
		return time.Time{}, err
	}
	if now := r.now(); info.ModTime().After(now) {
		return now, r.setUsed(imageID, now)
	}
	return info.ModTime(), nil
}

// usedLock is held shared to note a use, and exclusively to look at that and remove the image.
func (r *Root) usedLock() (*lockfile.LockFile, error) {
	return lockfile.GetLockFile(filepath.Join(r.store.RunRoot(), "ocihold-used.lock"))
}

// dataDir is where containers/storage keeps what it has of an image besides the layers.
func (r *Root) dataDir(imageID string) string {
	return filepath.Join(r.imageHome(), "overlay-images", imageID)
}
