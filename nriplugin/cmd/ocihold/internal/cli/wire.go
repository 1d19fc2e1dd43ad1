package cli

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/storage"
)

// defaultHandler is the handler whose root is CRI-O's own.
const defaultHandler = "default"

func controlSocket(config conf.Config) string { return filepath.Join(config.RunDir, "ocihold.sock") }

// openRoot opens CRI-O's own root, as CRI-O is configured. The daemon clears
// what a killed one left of its downloads; commands without a daemon have a
// directory apart.
func openRoot(config conf.Config, crio *conf.CRIO, daemon bool, log logrus.FieldLogger) (*storage.Root, error) {
	downloads := "commands"
	if daemon {
		downloads = "downloads"
	}
	root, err := storage.Open(storage.Options{
		Name:               defaultHandler,
		GraphRoot:          crio.Root,
		RunRoot:            crio.RunRoot,
		ImageStore:         crio.ImageStore,
		Driver:             crio.Driver,
		DriverOptions:      crio.StorageOptions,
		TempDir:            filepath.Join(config.StateDir, downloads),
		ClearTemp:          daemon,
		BlobInfoCacheDir:   filepath.Join(config.StateDir, "cache"),
		SignaturePolicy:    crio.SignaturePolicy,
		AuthFile:           crio.GlobalAuthFile,
		InsecureRegistries: crio.InsecureRegistries,
		Log:                log,
	})
	if err != nil {
		return nil, fmt.Errorf("open CRI-O's storage: %w", err)
	}
	return root, nil
}

// volumeStore is a root as image volumes see it.
type volumeStore struct{ root *storage.Root }

var _ imagevolume.Store = volumeStore{}

func (s volumeStore) Resolve(ctx context.Context, ref string) (imagevolume.Image, error) {
	image, err := s.root.Resolve(ctx, ref)
	return volumeImage(image), notPresent(err)
}

func (s volumeStore) Pull(ctx context.Context, ref string, progress func(imagevolume.Progress)) (imagevolume.Image, error) {
	image, err := s.root.Pull(ctx, ref, storage.PullOptions{Progress: func(p storage.Progress) {
		progress(imagevolume.Progress{Done: p.Done, Total: p.Total})
	}})
	return volumeImage(image), err
}

func (s volumeStore) Lease(ctx context.Context, id string) error {
	return notPresent(s.root.Lease(ctx, id))
}

func (s volumeStore) Release(ctx context.Context, id string) error { return s.root.Release(ctx, id) }

func (s volumeStore) Leases(ctx context.Context) (map[string]bool, error) {
	leases, err := s.root.Leases(ctx)
	if err != nil {
		return nil, err
	}
	whole := make(map[string]bool, len(leases))
	for _, lease := range leases {
		whole[lease.ImageID] = lease.Complete
	}
	return whole, nil
}

func (s volumeStore) LowerDirs(ctx context.Context, id string) ([]string, error) {
	dirs, err := s.root.LowerDirs(ctx, id)
	return dirs, notPresent(err)
}

func volumeImage(image storage.Image) imagevolume.Image {
	return imagevolume.Image{ID: image.ID, Digest: image.Digest.String()}
}

func notPresent(err error) error {
	if errors.Is(err, storage.ErrNotFound) {
		return fmt.Errorf("%w: %w", imagevolume.ErrNotPresent, err)
	}
	return err
}

// images lists a root for people.
func images(ctx context.Context, root *storage.Root) (control.Images, error) {
	list, errs := root.Images(ctx)
	var result control.Images
	for _, err := range errs {
		if !errors.Is(err, storage.ErrBadRecord) {
			return control.Images{}, err
		}
		result.Faults = append(result.Faults, err.Error())
	}
	result.Images = list
	return result, nil
}

// ask calls f with the daemon, or, where there is none, with the root opened by
// this process under the same locks.
func (a *app) ask(ctx context.Context, config conf.Config, crio *conf.CRIO, f func(imageStore) error) error {
	client := control.NewClient(controlSocket(config))
	_, err := client.Status(ctx)
	if err == nil {
		return f(client)
	}
	if !errors.Is(err, control.ErrDown) {
		return err
	}
	root, err := openRoot(config, crio, false, a.logger(config))
	if err != nil {
		return err
	}
	return errors.Join(f(localStore{root}), root.Close())
}

// imageStore is what commands that work without a daemon need.
type imageStore interface {
	Images(ctx context.Context) (control.Images, error)
	Pull(ctx context.Context, ref string, progress func(storage.Progress)) (storage.Image, error)
}

type localStore struct{ root *storage.Root }

func (s localStore) Images(ctx context.Context) (control.Images, error) { return images(ctx, s.root) }

func (s localStore) Pull(ctx context.Context, ref string, progress func(storage.Progress)) (storage.Image, error) {
	return s.root.Pull(ctx, ref, storage.PullOptions{Progress: progress})
}
