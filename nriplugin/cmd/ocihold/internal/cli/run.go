package cli

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/nriplugin"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/metrics"
	"github.com/ocihold/ocihold/storage"
	"github.com/ocihold/ocihold/storage/imageservice"
)

func (a *app) runCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: "Run the daemon: serves CRI's ImageService, which keeps the images of each runtime handler in the handler's root, and\n" +
			"registers with CRI-O as an NRI plugin that gives containers the image volumes that pods ask for.\n" +
			"On SIGTERM it ends and leaves mounts and leases to running containers; started again, it takes them over. On SIGHUP it\n" +
			"reads its configuration again.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, crio, err := a.loadCRIO(cmd)
			if err != nil {
				return err
			}
			reread := func() (conf.Config, error) { return a.load(cmd) }
			return alone(cmd.Context(), config, func(ctx context.Context) error {
				return run(ctx, config, crio, reread, a.logger(config))
			})
		},
	}
}

func (a *app) logger(config conf.Config) *logrus.Logger {
	log := logrus.New()
	log.SetOutput(a.err)
	if level, err := logrus.ParseLevel(config.LogLevel); err == nil { // validated with the configuration
		log.SetLevel(level)
	}
	return log
}

func run(ctx context.Context, config conf.Config, crio *conf.CRIO, reread func() (conf.Config, error), log *logrus.Logger) (err error) {
	if !crio.NRI.Enabled {
		return errors.New("CRI-O's configuration has NRI switched off: set enable_nri = true in [crio.nri], " +
			"as 'ocihold config crio' does, and restart CRI-O")
	}
	if err := checkHook(config, crio); err != nil {
		return err
	}
	if crio.InternalRepair && len(config.Roots()) > 0 {
		return errors.New("CRI-O's internal_repair is on: a CRI-O that is killed would wipe its storage once a container runs from a " +
			"handler's root: install what 'ocihold config crio' prints, and restart CRI-O")
	}
	if crio.InternalRepair {
		log.Warn("CRI-O's internal_repair is on and may delete what keeps an image in use: install what 'ocihold config crio' prints")
	}
	mounts := hostmount.NewFollower(config.MountsDir(), hostmount.API(config.Volumes.MountAPI), config.ScratchDir())
	defer func() { err = errors.Join(err, mounts.Close()) }()
	var manager *imagevolume.Manager
	store, err := openStore(config, crio, func(ctx context.Context) (func(string) []string, error) { return manager.Users(ctx) }, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if err := store.roots.CheckFormat(ctx); err != nil {
		return err
	}
	if err := store.roots.RemoveHalf(ctx); err != nil {
		log.WithError(err).Warn("images that a killed pull left half recorded are not removed")
	}
	if err := store.roots.RemoveUnwritten(ctx); err != nil {
		log.WithError(err).Warn("files that a killed program left half written are not removed")
	}
	root, err := store.roots.Handler(imageservice.DefaultRoot)
	if err != nil {
		return err
	}

	var volumes atomic.Pointer[conf.Volumes]
	volumes.Store(&config.Volumes)
	manager = imagevolume.New(volumeStores{store.roots, store.service, &volumes}, mounts, log)
	socket := config.NRI.Socket
	if socket == "" {
		socket = crio.NRI.Listen
	}
	plugin := nriplugin.New(nriplugin.Options{
		Name: config.NRI.PluginName, Index: config.NRI.PluginIndex, Socket: socket, Attach: mounts.Follow,
		HardenNative: config.Volumes.HardenNative, Log: log,
	}, manager)
	own, err := imageservice.Dial(config.ImageSocket())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, own.Close()) }()
	on, err := listen(ctx, config)
	if err != nil {
		return err
	}

	var swept atomic.Pointer[health.Sweep]
	watch := health.New(healthOptions(config, store, manager, plugin, own, &swept))
	notifier := health.NewNotifier(watch, log)
	reloaded := &reloader{
		now: config, crio: crio, reread: reread, store: store, volumes: &volumes, log: log,
	}

	group, ctx := errgroup.WithContext(ctx)
	if on.metrics != nil {
		group.Go(func() error { return metrics.New(store.roots, log).Run(ctx, on.metrics, watch.Handle) })
	}
	group.Go(func() error { return store.roots.Watch(ctx) })
	group.Go(func() error { return watch.Run(ctx) })
	group.Go(func() error { return notifier.Run(ctx) })
	group.Go(func() error { return reloaded.run(ctx, notifier) })
	group.Go(func() error { return manager.Run(ctx) })
	group.Go(func() error { return plugin.Run(ctx) })
	group.Go(func() error { return compareSandboxes(ctx, cri.NewRuntimeServiceClient(store.conn), manager, log) })
	group.Go(func() error {
		return control.Serve(ctx, on.commands, &daemon{store, manager, watch}, log)
	})
	group.Go(func() error { return store.service.Serve(ctx, on.images) })
	if len(config.Roots()) > 0 {
		group.Go(func() error { return sweepRoots(ctx, store, &swept, log) })
		group.Go(func() error { return store.collectAll(ctx) })
	}
	if config.Handlers[conf.DefaultHandler].Pull != conf.PullCRIO {
		group.Go(func() error { return keepPauseImage(ctx, root, crio, log) })
	}
	log.WithField("version", version()).Info("ocihold runs")
	return group.Wait()
}

// daemon answers the commands.
type daemon struct {
	localStore

	manager *imagevolume.Manager
	watch   *health.Watch
}

var _ control.Daemon = (*daemon)(nil)

func (d *daemon) Status(context.Context) (control.Status, error) {
	return control.Status{Report: d.watch.Report(), Version: version()}, nil
}

// Volumes lists the volumes, and of native ones, of which CRI-O tells the image's ID,
// name and digest, too, unless they are artifacts.
func (d *daemon) Volumes(ctx context.Context) ([]imagevolume.Status, error) {
	root, err := d.roots.Handler(imageservice.DefaultRoot)
	if err != nil {
		return nil, err
	}
	volumes := d.manager.Volumes()
	for i := range volumes {
		v := &volumes[i]
		if !v.Native {
			continue
		}
		image, err := root.Resolve(ctx, v.ImageID)
		if errors.Is(err, storage.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		v.Digest = image.Digest.String()
		if len(image.Names) > 0 {
			v.Image = image.Names[0]
		}
	}
	return volumes, nil
}
