package health

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
)

// Notifier tells the service manager (sd_notify(3)) how the daemon is. Where
// there is no service manager it tells no one.
type Notifier struct {
	watch *Watch
	log   logrus.FieldLogger

	mu   sync.Mutex
	told bool // that it is ready
}

// NewNotifier returns a Notifier of what watch finds.
func NewNotifier(watch *Watch, log logrus.FieldLogger) *Notifier {
	return &Notifier{watch: watch, log: log}
}

// Run tells READY when the daemon is ready for the first time, feeds the
// watchdog while it is alive, and tells STOPPING when ctx ends.
func (n *Notifier) Run(ctx context.Context) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("read what the service manager wants: %w", err)
	}
	every := askEvery / 4
	if interval > 0 {
		every = min(every, interval/4)
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		report := n.watch.Report()
		n.mu.Lock()
		if !n.told && report.Ready {
			n.told = true
			n.send(daemon.SdNotifyReady)
			n.log.Info("ocihold is ready")
		}
		n.mu.Unlock()
		if interval > 0 && report.Alive {
			n.send(daemon.SdNotifyWatchdog)
		}
		select {
		case <-ctx.Done():
			n.send(daemon.SdNotifyStopping)
			return nil
		case <-ticker.C:
		}
	}
}

// Reloading calls reload between telling RELOADING and READY.
func (n *Notifier) Reloading(reload func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.send(daemon.SdNotifyReloading + "\n" + daemon.SdNotifyMonotonicUsec())
	reload()
	if n.told {
		n.send(daemon.SdNotifyReady)
	}
}

func (n *Notifier) send(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		n.log.WithError(err).Warn("the service manager was not told")
	}
}
