package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/ocihold/ocihold/storage"
)

// Serve answers on listener until ctx ends.
func Serve(ctx context.Context, listener net.Listener, daemon Daemon, log logrus.FieldLogger) error {
	server := &http.Server{
		Handler:           unrecovered(handler(daemon, log)),
		ReadHeaderTimeout: 10 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(listener); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve commands: %w", err)
	}
	return nil
}

// unrecovered has a panic end the process, for whoever supervises it to start it
// again. net/http would go on, and with it locks that containers/storage held as it
// panicked: everybody would wait for them for ever.
func unrecovered(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		done := make(chan struct{})
		go func() { defer close(done); handler.ServeHTTP(w, r) }()
		<-done
	})
}

func handler(daemon Daemon, log logrus.FieldLogger) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /status", answer(log, daemon.Status))
	mux.Handle("GET /volumes", answer(log, daemon.Volumes))
	mux.Handle("GET /images", answer(log, daemon.Images))
	mux.Handle("GET /df", answer(log, daemon.DiskUse))
	mux.HandleFunc("POST /pull", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		bring(r.Context(), w, func(ctx context.Context, progress func(storage.Progress)) (storage.Image, error) {
			return daemon.Pull(ctx, query.Get("handler"), query.Get("ref"), progress)
		})
	})
	mux.HandleFunc("POST /import", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		bring(r.Context(), w, func(ctx context.Context, progress func(storage.Progress)) (storage.Image, error) {
			return daemon.Import(ctx, query.Get("handler"), query.Get("from"), query.Get("name"), progress)
		})
	})
	mux.HandleFunc("POST /remove", func(w http.ResponseWriter, r *http.Request) {
		if err := daemon.Remove(r.Context(), r.URL.Query().Get("handler"), r.URL.Query().Get("ref")); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	mux.HandleFunc("POST /collect", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		answer(log, func(ctx context.Context) (Collections, error) {
			return daemon.Collect(ctx, query.Get("handler"), query.Get("dry_run") == "true")
		}).ServeHTTP(w, r)
	})
	return mux
}

// answer serves one question that needs nothing but a context.
func answer[T any](log logrus.FieldLogger, ask func(context.Context) (T, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		result, err := ask(r.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(result); err != nil {
			log.WithError(err).Debug("a command left before its answer")
		}
	})
}

// bring answers with the events of a pull or import.
func bring(ctx context.Context, w http.ResponseWriter, begin func(context.Context, func(storage.Progress)) (storage.Image, error)) {
	lines := json.NewEncoder(w)
	send := func(event pullEvent) {
		// One who has left is noticed by the request's context.
		if lines.Encode(event) == nil {
			_ = http.NewResponseController(w).Flush()
		}
	}
	image, err := begin(ctx, func(p storage.Progress) { send(pullEvent{Progress: &p}) })
	if err != nil {
		send(pullEvent{Error: err.Error()})
		return
	}
	send(pullEvent{Image: &image})
}
