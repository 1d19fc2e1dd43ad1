package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/storage"
	"github.com/ocihold/ocihold/storage/imageservice"
)

// collector collects in handlers' roots, as they are configured.
type collector struct {
	roots    *storage.Roots
	service  *imageservice.Service
	handlers atomic.Pointer[[]conf.Handler] // as they are configured now
	pinned   []string                       // in every root
	log      logrus.FieldLogger
}

func newCollector(config conf.Config, crio *conf.CRIO, roots *storage.Roots, service *imageservice.Service, log logrus.FieldLogger) *collector {
	c := &collector{
		roots: roots, service: service,
		pinned: append([]string{crio.PauseImage}, crio.PinnedImages...), log: log,
	}
	c.configure(config)
	return c
}

// configure has collections and pulls from now on go by this configuration.
func (c *collector) configure(config conf.Config) {
	handlers := config.Roots()
	c.handlers.Store(&handlers)
	for _, name := range c.roots.Names() {
		h := config.Handlers[name]
		at := " in [handlers." + name + "]"
		// The roots are those that were configured at start, as are their names.
		_ = c.roots.SetLimits(name,
			storage.Limit{Bytes: int64(h.MaxImageBytes), Setting: "max_image_bytes" + at},
			storage.Limit{Bytes: int64(h.MaxBytes), Setting: "max_bytes" + at},
		)
	}
}

// Collect collects in the root of the handler, or in each. With several, one
// that cannot be collected in is a fault and stops no other.
func (c *collector) Collect(ctx context.Context, handler string, dryRun bool) (control.Collections, error) {
	result := control.Collections{Collections: []storage.Collection{}}
	var names []string
	for _, h := range *c.handlers.Load() {
		names = append(names, h.Name)
		if handler != "" && h.Name != handler {
			continue
		}
		collection, err := c.collect(ctx, h, dryRun)
		switch {
		case err == nil:
			result.Collections = append(result.Collections, collection)
		case handler != "" || ctx.Err() != nil:
			return control.Collections{}, err
		default:
			result.Faults = append(result.Faults, err.Error())
		}
	}
	switch {
	case handler == conf.DefaultHandler:
		return control.Collections{}, fmt.Errorf("the root of handler %q is CRI-O's own, in which kubelet collects", handler)
	case handler != "" && !slices.Contains(names, handler):
		return control.Collections{}, fmt.Errorf("handler %q has no root of its own: there are %s", handler, strings.Join(names, ", "))
	}
	return result, nil
}

func (c *collector) collect(ctx context.Context, h conf.Handler, dryRun bool) (storage.Collection, error) {
	pinned := slices.Concat(c.pinned, h.PinnedImages)
	return c.roots.Collect(ctx, h.Name, storage.CollectOptions{
		GCPolicy: storage.GCPolicy{
			High: h.GCHigh, Low: h.GCLow, MaxBytes: int64(h.MaxBytes), MinAge: h.GCMinAge, MaxAge: h.GCMaxAge,
			Pinned: func(image storage.Image) bool { return imageservice.Pinned(pinned, image) },
		},
		DryRun: dryRun,
		Users:  c.service.Users,
	})
}

// collectAll collects in every handler's root until ctx ends, again and again and
// after pulls. A root that does not answer holds up only itself.
func (c *collector) collectAll(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, h := range *c.handlers.Load() {
		pulled, err := c.roots.Pulled(h.Name)
		if err != nil {
			return err
		}
		group.Go(func() error { c.collectOn(ctx, h.Name, pulled); return nil })
	}
	return group.Wait()
}

// handler returns how a handler is configured now. Handlers come and go with the
// daemon.
func (c *collector) handler(name string) conf.Handler {
	handlers := *c.handlers.Load()
	return handlers[slices.IndexFunc(handlers, func(h conf.Handler) bool { return h.Name == name })]
}

func (c *collector) collectOn(ctx context.Context, name string, pulled <-chan struct{}) {
	timer := time.NewTimer(c.handler(name).GCInterval)
	defer timer.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-pulled:
		}
		h := c.handler(name)
		timer.Reset(h.GCInterval)
		text := ""
		if _, err := c.collect(ctx, h, false); err != nil && ctx.Err() == nil {
			text = err.Error()
			if text != told {
				c.log.WithField("handler", h.Name).WithError(err).Warn("images are not collected; it is tried again")
			}
		}
		told = text
	}
}
