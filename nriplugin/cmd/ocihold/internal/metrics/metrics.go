// Package metrics serves what the roots have, and what was done in them, to
// Prometheus. Every metric has the label handler; "default" is CRI-O's own root.
//
// Counters are from memory. What takes a look at a root is looked at again and
// again, by a goroutine for each root, so that a disk that does not answer holds
// up nothing but the figures of its own root, which then stay as they were.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"github.com/ocihold/ocihold/storage"
)

// lookEvery is how often a root is looked at.
const lookEvery = 15 * time.Second

// Roots are what there is to tell of; *storage.Roots is one.
type Roots interface {
	Names() []string
	Counts(handler string) storage.Counts
	Handler(name string) (*storage.Root, error)
}

var _ Roots = (*storage.Roots)(nil)

// Metrics are the metrics of roots.
type Metrics struct {
	roots                       Roots
	log                         logrus.FieldLogger
	registry                    *prometheus.Registry
	images, bytes, leases, pins *prometheus.GaugeVec
}

// New returns metrics, which have nothing of what is to be looked at before Run.
func New(roots Roots, log logrus.FieldLogger) *Metrics {
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{"handler"})
	}
	m := &Metrics{
		roots: roots, log: log, registry: prometheus.NewRegistry(),
		images: gauge("ocihold_images", "Images in the root of the handler."),
		bytes:  gauge("ocihold_image_bytes", "Bytes on disk of the images in the root of the handler, each layer counted once."),
		leases: gauge("ocihold_leases", "Images in the root of the handler that are held for volumes."),
		pins:   gauge("ocihold_pins", "Images in the root of the handler that are pinned for a kubelet that asks CRI-O."),
	}
	m.registry.MustRegister(m.images, m.bytes, m.leases, m.pins, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for _, handler := range roots.Names() {
		m.count(handler)
	}
	return m
}

// count registers the counters of a root.
func (m *Metrics) count(handler string) {
	for name, counter := range map[string]struct {
		help string
		of   func(storage.Counts) uint64
	}{
		"ocihold_pulls_total":            {"Pulls into the root of the handler.", func(c storage.Counts) uint64 { return c.Pulls }},
		"ocihold_pull_failures_total":    {"Pulls into the root of the handler that failed.", func(c storage.Counts) uint64 { return c.FailedPulls }},
		"ocihold_removals_refused_total": {"Removals of images that were refused because the image was in use.", func(c storage.Counts) uint64 { return c.RefusedRemovals }},
		"ocihold_collections_total":      {"Collections in the root of the handler.", func(c storage.Counts) uint64 { return c.Collections }},
		"ocihold_collected_images_total": {"Images that collections have removed.", func(c storage.Counts) uint64 { return c.CollectedImages }},
		"ocihold_collected_bytes_total":  {"Bytes that collections have freed.", func(c storage.Counts) uint64 { return c.CollectedBytes }},
	} {
		m.registry.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: name, Help: counter.help, ConstLabels: prometheus.Labels{"handler": handler}},
			func() float64 { return float64(counter.of(m.roots.Counts(handler))) },
		))
	}
}

// Run looks at the roots and answers on listener, which it closes, until ctx ends. more adds what else is answered there.
func (m *Metrics) Run(ctx context.Context, listener net.Listener, more func(*http.ServeMux)) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, handler := range m.roots.Names() {
		group.Go(func() error { m.watch(ctx, handler); return nil })
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{ErrorLog: m.log}))
	more(mux)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	group.Go(func() error {
		stop := context.AfterFunc(ctx, func() { server.Close() })
		defer stop()
		if err := server.Serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve metrics: %w", err)
		}
		return nil
	})
	return group.Wait()
}

// watch looks at a root until ctx ends.
func (m *Metrics) watch(ctx context.Context, handler string) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		if err := m.look(ctx, handler); err != nil && ctx.Err() == nil {
			m.log.WithField("handler", handler).WithError(err).Debug("a root is not in the metrics")
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// look reads a root. One that cannot be read has no figures.
func (m *Metrics) look(ctx context.Context, handler string) (err error) {
	defer func() {
		if err != nil {
			for _, gauge := range []*prometheus.GaugeVec{m.images, m.bytes, m.leases, m.pins} {
				gauge.DeleteLabelValues(handler)
			}
		}
	}()
	root, err := m.roots.Handler(handler)
	if err != nil {
		return err
	}
	images, errs := root.Images(ctx)
	for _, err := range errs {
		if !errors.Is(err, storage.ErrBadRecord) {
			return err
		}
	}
	leases, err := root.Leases(ctx)
	if err != nil {
		return err
	}
	usage, err := root.Usage(ctx)
	if err != nil {
		return err
	}
	m.images.WithLabelValues(handler).Set(float64(len(images) + len(errs)))
	m.leases.WithLabelValues(handler).Set(float64(len(leases)))
	pins := 0
	for _, lease := range leases {
		if lease.Pinned {
			pins++
		}
	}
	m.pins.WithLabelValues(handler).Set(float64(pins))
	m.bytes.WithLabelValues(handler).Set(float64(usage.Bytes))
	return nil
}
