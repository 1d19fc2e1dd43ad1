package cli

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
)

// listeners are what a daemon is asked by.
type listeners struct {
	commands net.Listener
	images   net.Listener // CRI's ImageService
	metrics  net.Listener // nil where they are not served
}

// listen makes all sockets of the daemon, or none.
func listen(ctx context.Context, config conf.Config) (l listeners, err error) {
	if err := control.Unused(controlSocket(config), config.ImageSocket()); err != nil {
		return listeners{}, err
	}
	if l.commands, err = control.Listen(controlSocket(config)); err != nil {
		return listeners{}, err
	}
	if l.images, err = control.Listen(config.ImageSocket()); err != nil {
		return listeners{}, errors.Join(err, l.commands.Close())
	}
	if config.Metrics.Address == "" {
		return l, nil
	}
	if l.metrics, err = new(net.ListenConfig).Listen(ctx, "tcp", config.Metrics.Address); err != nil {
		err = fmt.Errorf("serve metrics: %w: change address in [metrics]", err)
		return listeners{}, errors.Join(err, l.commands.Close(), l.images.Close())
	}
	return l, nil
}
