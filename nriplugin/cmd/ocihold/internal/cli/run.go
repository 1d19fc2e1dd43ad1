package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	sddaemon "github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/nriplugin"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
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
			"On SIGTERM it ends and leaves mounts and leases to running containers; started again, it takes them over.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, crio, err := a.loadCRIO(cmd)
			if err != nil {
				return err
			}
			return run(cmd.Context(), config, crio, a.logger(config))
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

func run(ctx context.Context, config conf.Config, crio *conf.CRIO, log *logrus.Logger) (err error) {
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
	if err := os.MkdirAll(config.RunDir, 0o700); err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	unlock, err := lockRunDir(config.RunDir)
	if err != nil {
		return err
	}
	defer unlock()

	mounts, err := hostmount.Open(config.MountsDir(), hostmount.API(config.Volumes.MountAPI))
	if err != nil {
		return fmt.Errorf("prepare host mounts: %w", err)
	}
	defer func() { err = errors.Join(err, mounts.Close()) }()
	var manager *imagevolume.Manager
	store, err := openStore(config, crio, func(ctx context.Context) (func(string) []string, error) { return manager.Users(ctx) }, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
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

	manager = imagevolume.New(volumeStores{store.roots, store.service, config.Volumes.TrustPresent}, mounts, log)
	socket := config.NRI.Socket
	if socket == "" {
		socket = crio.NRI.Listen
	}
	plugin := nriplugin.New(nriplugin.Options{
		Name: config.NRI.PluginName, Index: config.NRI.PluginIndex, Socket: socket, Log: log,
	}, manager)
	listener, err := control.Listen(controlSocket(config))
	if err != nil {
		return err
	}
	images, err := control.Listen(config.ImageSocket())
	if err != nil {
		return errors.Join(err, listener.Close())
	}

	exposed, err := listenMetrics(ctx, config)
	if err != nil {
		return errors.Join(err, listener.Close(), images.Close())
	}

	group, ctx := errgroup.WithContext(ctx)
	if exposed != nil {
		group.Go(func() error { return metrics.New(store.roots, log).Run(ctx, exposed) })
	}
	group.Go(func() error { return manager.Run(ctx) })
	group.Go(func() error { return plugin.Run(ctx) })
	group.Go(func() error {
		return control.Serve(ctx, listener, &daemon{store, manager, plugin}, log)
	})
	group.Go(func() error { return store.service.Serve(ctx, images) })
	if len(config.Roots()) > 0 {
		group.Go(func() error { return sweepRoots(ctx, store, log) })
		group.Go(func() error { return store.collectAll(ctx) })
	}
	if config.Handlers[conf.DefaultHandler].Pull != conf.PullCRIO {
		group.Go(func() error { return keepPauseImage(ctx, root, crio, log) })
	}
	if _, err := sddaemon.SdNotify(false, sddaemon.SdNotifyReady); err != nil {
		log.WithError(err).Warn("the service manager was not told")
	}
	log.WithField("version", version()).Info("ocihold runs")
	return group.Wait()
}

// listenMetrics listens where metrics are to be served; nil for nowhere.
func listenMetrics(ctx context.Context, config conf.Config) (net.Listener, error) {
	if config.Metrics.Address == "" {
		return nil, nil //nolint:nilnil // nowhere is what it says
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", config.Metrics.Address)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w: change address in [metrics]", err)
	}
	return listener, nil
}

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

// lockPatience is how long the lock of a killed daemon may outlive it: until
// the program that it was about to start has been loaded.
const lockPatience = 2 * time.Second

// lockRunDir makes this the only daemon of its run directory. The lock ends
// with the process.
func lockRunDir(dir string) (unlock func(), err error) {
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	for end := time.Now().Add(lockPatience); errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(end); {
		<-time.After(lockPatience / 100)
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("another ocihold runs in %s: stop it, or give this one a run_dir of its own: %w", dir, err)
	}
	return func() { file.Close() }, nil
}

// daemon answers the commands.
type daemon struct {
	localStore

	manager *imagevolume.Manager
	plugin  *nriplugin.Plugin
}

var _ control.Daemon = (*daemon)(nil)

func (d *daemon) Status(context.Context) (control.Status, error) {
	return control.Status{Version: version(), Registered: d.plugin.Registered()}, nil
}

func (d *daemon) Volumes(context.Context) ([]imagevolume.Status, error) {
	return d.manager.Volumes(), nil
}
