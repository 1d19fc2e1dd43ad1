package cli

import (
	"context"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
)

// reloader takes up, on SIGHUP, what it can of a changed configuration.
type reloader struct {
	now     conf.Config // in force
	crio    *conf.CRIO
	reread  func() (conf.Config, error)
	store   localStore
	volumes *atomic.Pointer[conf.Volumes]
	log     *logrus.Logger
}

func (r *reloader) run(ctx context.Context, notifier *health.Notifier) error {
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGHUP)
	defer signal.Stop(asked)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-asked:
			notifier.Reloading(r.reload)
		}
	}
}

// reload takes up all that it can, or nothing where the files are at fault.
func (r *reloader) reload() {
	next, err := r.reread()
	if err != nil {
		r.log.WithError(err).Error("the configuration is not taken up; the old one stays in force")
		return
	}
	now, taken, restart, err := r.now.Reload(next)
	if err == nil {
		err = now.ValidateHandlers(r.crio)
	}
	if err == nil {
		err = r.store.service.Choose(chosen(now, r.crio))
	}
	if err != nil {
		r.log.WithError(err).Error("the configuration is not taken up; the old one stays in force")
		return
	}
	r.now = now
	if level, err := logrus.ParseLevel(now.LogLevel); err == nil { // validated with the configuration
		r.log.SetLevel(level)
	}
	r.volumes.Store(&now.Volumes)
	r.store.configure(now)
	for _, key := range restart {
		r.log.WithField("key", key).Warn("a changed setting needs a restart of ocihold")
	}
	r.log.WithField("keys", taken).Info("the configuration is read again")
}
