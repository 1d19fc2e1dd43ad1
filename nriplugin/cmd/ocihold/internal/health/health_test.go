package health_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
	"github.com/ocihold/ocihold/storage"
)

func TestWatch(t *testing.T) {
	for name, tc := range map[string]struct {
		ask             func(context.Context) error
		registered      bool
		base, other     string // faults
		sweep           string
		alive, ready    bool
		healthz, readyz int
		text            string
	}{
		"well":        {registered: true, alive: true, ready: true, healthz: 200, readyz: 200, text: "ok\n"},
		"no CRI-O":    {alive: true, healthz: 200, readyz: 503, text: "not registered with CRI-O: is it running, with NRI enabled?\n"},
		"part failed": {ask: func(context.Context) error { return errors.New("no\nnever") }, registered: true, healthz: 503, readyz: 503, text: "p: no; never\n"},
		"part is stuck": {
			ask: func(context.Context) error { time.Sleep(time.Hour); return nil }, registered: true,
			healthz: 503, readyz: 503, text: "p: it does not answer since 00:00:00\n",
		},
		"one root's disk": {registered: true, other: "stuck\nstill", alive: true, ready: true, healthz: 200, readyz: 200, text: "root of handler vm: stuck; still\n"},
		"CRI-O's disk":    {registered: true, base: "stuck", alive: true, healthz: 200, readyz: 503, text: "root of handler default: stuck\n"},
		"sweep":           {registered: true, sweep: "half\ndone", alive: true, ready: true, healthz: 200, readyz: 200, text: "s: half; done\n"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ask := tc.ask
				if ask == nil {
					ask = func(context.Context) error { return nil }
				}
				w := health.New(health.Options{
					Parts:      map[string]func(context.Context) error{"p": ask},
					Registered: func() bool { return tc.registered },
					Sweeps:     func() []health.Sweep { return []health.Sweep{{Name: "s", Fault: tc.sweep}} },
					Roots: func() []storage.RootState {
						return []storage.RootState{{Handler: "default", Fault: tc.base}, {Handler: "vm", Fault: tc.other}}
					},
				})
				assert.False(t, w.Report().Alive, "before it was looked")
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error)
				go func() { done <- w.Run(ctx) }()
				time.Sleep(time.Minute)
				r := w.Report()
				assert.Equal(t, tc.alive, r.Alive)
				assert.Equal(t, tc.ready, r.Ready)
				mux := http.NewServeMux()
				w.Handle(mux)
				for path, want := range map[string]int{"/healthz": tc.healthz, "/readyz": tc.readyz} {
					out := httptest.NewRecorder()
					mux.ServeHTTP(out, httptest.NewRequest(http.MethodGet, path, http.NoBody))
					assert.Equal(t, want, out.Code, path)
					assert.Equal(t, tc.text, out.Body.String())
				}
				cancel()
				require.NoError(t, <-done)
			})
		})
	}
}
