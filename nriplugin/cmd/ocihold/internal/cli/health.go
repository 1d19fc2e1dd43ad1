package cli

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/nriplugin"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
)

// healthOptions say what of a daemon is watched. own is a connection to its
// ImageService.
func healthOptions(config conf.Config, store localStore, manager *imagevolume.Manager, plugin *nriplugin.Plugin,
	own *grpc.ClientConn, swept *atomic.Pointer[health.Sweep],
) health.Options {
	commands := control.NewClient(controlSocket(config))
	return health.Options{
		Parts: map[string]func(context.Context) error{
			"socket of the commands": func(ctx context.Context) error {
				_, err := commands.Status(ctx)
				return err
			},
			"socket of the image service": func(ctx context.Context) error { return connect(ctx, own) },
			"image volumes": func(context.Context) error {
				manager.Synchronized() // waits for what NRI's events wait for
				return nil
			},
		},
		Registered: plugin.Registered,
		Roots:      store.roots.States,
		Sweeps: func() []health.Sweep {
			at, err := manager.Settled()
			sweeps := []health.Sweep{*sweepOf("comparison of leases and mounts", at, err)}
			if last := swept.Load(); last != nil {
				sweeps = append(sweeps, *last)
			}
			return sweeps
		},
	}
}

// connect returns nil when the connection stands.
func connect(ctx context.Context, conn *grpc.ClientConn) error {
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			return fmt.Errorf("connect to %s: %w", conn.Target(), ctx.Err())
		}
	}
	return nil
}

func sweepOf(name string, at time.Time, err error) *health.Sweep {
	sweep := &health.Sweep{Name: name, At: at}
	if err != nil {
		sweep.Fault = err.Error()
	}
	return sweep
}
