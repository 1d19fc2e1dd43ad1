package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/docker/go-units"
	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	crioclient "github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/crio"
	"github.com/ocihold/ocihold/storage"
	"github.com/ocihold/ocihold/storage/imageservice"
)

func controlSocket(config conf.Config) string { return filepath.Join(config.RunDir, "ocihold.sock") }

// openRoots opens CRI-O's own root and those of handlers, as CRI-O and Ocihold
// are configured.
func openRoots(config conf.Config, crio *conf.CRIO, log logrus.FieldLogger) (*storage.Roots, error) {
	if err := config.ValidateHandlers(crio); err != nil {
		return nil, fmt.Errorf("check handlers against CRI-O's configuration: %w", err)
	}
	// CRI-O's directory is for others, too: ours is below it.
	temporary := config.StateDir
	if crio.BigFilesTemporaryDir != "" {
		temporary = filepath.Join(crio.BigFilesTemporaryDir, "ocihold")
	}
	base := storage.Options{
		Name:               imageservice.DefaultRoot,
		GraphRoot:          crio.Root,
		RunRoot:            crio.RunRoot,
		ImageStore:         crio.ImageStore,
		Pin:                config.Volumes.Pin,
		Driver:             crio.Driver,
		DriverOptions:      crio.StorageOptions,
		PullConcurrency:    config.Handlers[conf.DefaultHandler].PullConcurrency,
		StallTimeout:       config.Pull.StallTimeout,
		MediaTypes:         config.MediaTypes,
		ArtifactLimit:      volumeLimit(config.Volumes),
		TempDir:            filepath.Join(temporary, "downloads"),
		BlobInfoCacheDir:   filepath.Join(config.StateDir, "cache"),
		SignaturePolicy:    crio.SignaturePolicy,
		AuthFile:           crio.GlobalAuthFile,
		DecryptionKeys:     crio.DecryptionKeysPath,
		InsecureRegistries: crio.InsecureRegistries,
		Log:                log,
	}
	var handlers []storage.Options
	for _, h := range config.Roots() {
		handlers = append(handlers, handlerOptions(base, h))
	}
	roots, err := storage.OpenRoots(base, handlers)
	if err != nil {
		return nil, fmt.Errorf("open storage: %w", err)
	}
	return roots, nil
}

// handlerOptions are those of a handler's root, which pulls as CRI-O's own does
// except where the handler says otherwise.
func handlerOptions(base storage.Options, h conf.Handler) storage.Options {
	o := base
	o.Name = h.Name
	o.GraphRoot, o.RunRoot, o.ImageStore = h.Root, h.RunRoot, ""
	o.Driver, o.DriverOptions = h.Driver, h.Options
	o.Platform, o.PullConcurrency = h.Platform, h.PullConcurrency
	o.Marker = true
	o.Pin = false // nothing but Ocihold removes from there
	o.SignaturePolicy = cmp.Or(h.SignaturePolicy, base.SignaturePolicy)
	o.AuthFile = cmp.Or(h.AuthFile, base.AuthFile)
	o.RegistriesConf = cmp.Or(h.RegistriesConf, base.RegistriesConf)
	return o
}

// volumeUsers returns what says who has an image as a volume. It is nil where no
// daemon runs: there leases have to tell.
type volumeUsers func(ctx context.Context) (func(imageID string) []string, error)

// newImageService puts the image service together.
func newImageService(config conf.Config, crio *conf.CRIO, roots *storage.Roots, conn *grpc.ClientConn, volumes volumeUsers,
	log logrus.FieldLogger,
) (*imageservice.Service, error) {
	handlers, routes := chosen(config, crio)
	return imageservice.New(imageservice.Options{
		Roots: roots, CRIO: conn, Handlers: handlers, Routes: routes,
		PolicyDir:            crio.SignaturePolicyDir,
		AuthDir:              crio.NamespacedAuthDir,
		VolumeUsers:          volumes,
		MayPull:              mayPull(config, crioclient.NewClient(crio.Listen)),
		Pinned:               append([]string{crio.PauseImage}, crio.PinnedImages...),
		ReportRuntimeHandler: config.ImageService.ReportRuntimeHandler,
		Log:                  log,
	})
}

// chosen are the handlers that the image service knows, and its routes to them.
func chosen(config conf.Config, crio *conf.CRIO) (map[string]imageservice.Handler, []imageservice.Route) {
	base := imageservice.Handler{
		AllowAnnotation: config.Handlers[conf.DefaultHandler].AllowAnnotation,
		CRIOPulls:       config.Handlers[conf.DefaultHandler].Pull == conf.PullCRIO,
	}
	handlers := map[string]imageservice.Handler{conf.DefaultHandler: base, crio.DefaultRuntime: base}
	for name := range crio.Runtimes {
		handlers[name] = base
	}
	for _, h := range config.Roots() {
		handlers[h.Name] = imageservice.Handler{Root: h.Name, AllowAnnotation: h.AllowAnnotation}
	}
	var routes []imageservice.Route
	for _, r := range config.Routes {
		routes = append(routes, imageservice.Route{Image: r.Image, Handler: r.Handler})
	}
	return handlers, routes
}

// mayPull returns what refuses a pull into a handler's root while the CRI-O that
// runs could not run images from there, or not safely. One that does not answer
// runs nothing; it will have read its files when it does.
func mayPull(config conf.Config, client *crioclient.Client) func(ctx context.Context, root string) error {
	return func(ctx context.Context, root string) error {
		live, err := client.Config(ctx)
		switch {
		case err != nil:
			return nil //nolint:nilerr // see above
		case live.InternalRepair:
			return errors.New("CRI-O runs with internal_repair on and could wipe its storage once a container runs from a handler's root: " +
				"run 'ocihold config crio --write' and restart CRI-O")
		case !slices.Contains(conf.ImageStores(live.StorageOptions), filepath.Clean(config.Handlers[root].Root)):
			return fmt.Errorf("CRI-O runs without the root of handler %q, %s, as additional image store: run 'ocihold config crio --write' "+
				"and restart CRI-O", root, config.Handlers[root].Root)
		}
		return nil
	}
}

// volumeStores are the roots as image volumes see them.
type volumeStores struct {
	roots   *storage.Roots
	service *imageservice.Service
	config  *atomic.Pointer[conf.Volumes]
}

var _ imagevolume.Stores = volumeStores{}

func (s volumeStores) Root(handler string) string {
	if slices.Contains(s.Roots(), handler) {
		return handler
	}
	return ""
}

func (s volumeStores) Roots() []string {
	names := slices.Clone(s.roots.Names())
	names[0] = "" // CRI-O's own is the first
	return names
}

func (s volumeStores) AllowScratch(bytes int64) error {
	most := int64(s.config.Load().MaxScratchBytes)
	if most > 0 && bytes > most {
		return fmt.Errorf("%w: scratchSize is %s and max_scratch_bytes in [volumes] %s: ask for less, or have the node allow more",
			imagevolume.ErrNotAllowed, units.BytesSize(float64(bytes)), units.BytesSize(float64(most)))
	}
	return nil
}

func (s volumeStores) Store(name string) (imagevolume.Store, error) {
	root, err := s.roots.Handler(name)
	if err != nil {
		return nil, err
	}
	return volumeStore{root, cmp.Or(name, imageservice.DefaultRoot), s.service, *s.config.Load()}, nil
}

// volumeStore is a root as image volumes see it.
type volumeStore struct {
	root    *storage.Root
	name    string
	service *imageservice.Service
	config  conf.Volumes
}

var _ imagevolume.Store = volumeStore{}

func (s volumeStore) Resolve(ctx context.Context, ref string) (imagevolume.Image, error) {
	image, err := storage.Bounded(s.root, func() (storage.Image, error) { return s.root.Resolve(ctx, ref) })
	return volumeImage(image), notPresent(err)
}

func (s volumeStore) Pull(ctx context.Context, ref, namespace string, progress func(imagevolume.Progress)) (imagevolume.Image, error) {
	if err := s.allowPull(ref, namespace); err != nil {
		return imagevolume.Image{}, err
	}
	image, err := s.service.PullInto(ctx, s.name, ref, storage.PullOptions{
		Limit:    volumeLimit(s.config),
		Progress: func(p storage.Progress) { progress(imagevolume.Progress{Done: p.Done, Total: p.Total}) },
	})
	return volumeImage(image), tooLarge(err)
}

func (s volumeStore) Permit(ctx context.Context, id, ref, namespace string, ask bool) error {
	return s.root.Bounded(func() error { return s.permit(ctx, id, ref, namespace, ask) })
}

func (s volumeStore) permit(ctx context.Context, id, ref, namespace string, ask bool) error {
	if err := s.allowPresent(ctx, id, ref, namespace); err != nil {
		return notPresent(err)
	}
	if s.config.TrustPresent {
		return nil
	}
	proven, err := s.root.Proven(ctx, id, namespace)
	switch {
	case err != nil:
		return notPresent(err)
	case proven:
		return nil
	case !ask:
		return imagevolume.ErrNotPermitted
	}
	err = s.root.Prove(ctx, id)
	if errors.Is(err, storage.ErrUnproven) {
		return fmt.Errorf("%w: %w", imagevolume.ErrNotPermitted, err)
	}
	return notPresent(err)
}

func (s volumeStore) Lease(ctx context.Context, id string) error {
	return s.root.Bounded(func() error { return notPresent(s.root.Lease(ctx, id)) })
}

func (s volumeStore) Release(ctx context.Context, id string) error {
	return s.root.Bounded(func() error { return s.root.Release(ctx, id) })
}

func (s volumeStore) Leases(ctx context.Context) (map[string]bool, error) {
	leases, err := storage.Bounded(s.root, func() ([]storage.Lease, error) { return s.root.Leases(ctx) })
	if err != nil {
		return nil, err
	}
	whole := make(map[string]bool, len(leases))
	for _, lease := range leases {
		whole[lease.ImageID] = lease.Complete
	}
	return whole, nil
}

func (s volumeStore) MountedAt(ctx context.Context, dirs []string) (map[string][]string, error) {
	return storage.Bounded(s.root, func() (map[string][]string, error) { return s.root.MountedAt(ctx, dirs) })
}

func (s volumeStore) LowerDirs(ctx context.Context, id string, mediaTypes []string) ([]string, error) {
	dirs, err := storage.Bounded(s.root, func() ([]string, error) { return s.root.LowerDirs(ctx, id, mediaTypes) })
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

// ask calls f with the daemon, or, where there is none, with the roots opened by
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
	store, err := openStore(config, crio, nil, a.logger(config))
	if err != nil {
		return err
	}
	return errors.Join(f(store), store.Close())
}

// imageStore is what commands that work without a daemon need.
type imageStore interface {
	Images(ctx context.Context) (control.Images, error)
	DiskUse(ctx context.Context) (control.DiskUse, error)
	Pull(ctx context.Context, handler, ref string, progress func(storage.Progress)) (storage.Image, error)
	Import(ctx context.Context, handler, from, name string, progress func(storage.Progress)) (storage.Image, error)
	Remove(ctx context.Context, handler, ref string) error
	Collect(ctx context.Context, handler string, dryRun bool) (control.Collections, error)
}

// localStore are the roots as this process has them open.
type localStore struct {
	*collector

	config conf.Config
	conn   *grpc.ClientConn
}

func openStore(config conf.Config, crio *conf.CRIO, volumes volumeUsers, log logrus.FieldLogger) (_ localStore, err error) {
	conn, err := imageservice.Dial(crio.Listen)
	if err != nil {
		return localStore{}, err
	}
	roots, err := openRoots(config, crio, log)
	if err != nil {
		return localStore{}, errors.Join(err, conn.Close())
	}
	service, err := newImageService(config, crio, roots, conn, volumes, log)
	if err != nil {
		return localStore{}, errors.Join(err, roots.Close(), conn.Close())
	}
	return localStore{newCollector(config, crio, roots, service, log), config, conn}, nil
}

func (s localStore) Close() error { return errors.Join(s.roots.Close(), s.conn.Close()) }

func (s localStore) Images(ctx context.Context) (control.Images, error) {
	list, errs := s.roots.List(ctx)
	var result control.Images
	for _, err := range errs {
		if !errors.Is(err, storage.ErrBadRecord) && !storage.IsAway(err) {
			return control.Images{}, err
		}
		result.Faults = append(result.Faults, err.Error())
	}
	result.Images = list
	return result, nil
}

func (s localStore) DiskUse(ctx context.Context) (control.DiskUse, error) {
	roots, errs := s.roots.Report(ctx)
	if len(roots) == 0 {
		return control.DiskUse{}, errors.Join(errs...)
	}
	scratch, err := hostmount.ScratchIn(s.config.MountsDir())
	if err != nil {
		errs = append(errs, err)
	}
	result := control.DiskUse{Roots: roots, Scratch: control.Scratch{Scratch: scratch, Directory: s.config.ScratchDir()}}
	for _, err := range errs {
		result.Faults = append(result.Faults, err.Error())
	}
	return result, nil
}

func (s localStore) Pull(ctx context.Context, handler, ref string, progress func(storage.Progress)) (storage.Image, error) {
	return s.service.Pull(ctx, handler, ref, storage.PullOptions{Progress: progress})
}

func (s localStore) Import(ctx context.Context, handler, from, name string, progress func(storage.Progress)) (storage.Image, error) {
	return s.service.Import(ctx, handler, from, storage.ImportOptions{Name: name, Progress: progress})
}

func (s localStore) Remove(ctx context.Context, handler, ref string) error {
	return s.service.Remove(ctx, handler, ref)
}
