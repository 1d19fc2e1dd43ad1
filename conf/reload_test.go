package conf

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// reloaded is a configuration with a handler of each kind.
func reloaded() Config {
	c := Default()
	vm := newHandler("vm")
	vm.Root, vm.MaxBytes, vm.PinnedImages, vm.Options = "/vm", 3<<29+1, []string{"a"}, []string{"overlay.size=1G"}
	c.Handlers = map[string]Handler{"default": {Pull: PullCRIO}, "v.m": vm}
	c.Routes = []Route{{Image: "a/**", Handler: "v.m"}}
	c.nameHandlers()
	return c
}

func TestText(t *testing.T) {
	for name, c := range map[string]Config{"default": Default(), "all": reloaded()} {
		t.Run(name, func(t *testing.T) {
			text, err := c.Text()
			require.NoError(t, err)
			file := filepath.Join(t.TempDir(), "o.toml")
			require.NoError(t, os.WriteFile(file, text, 0o600))
			again, err := Load(file, true)
			require.NoError(t, err, "%s", text)
			textAgain, err := again.Text()
			require.NoError(t, err)
			assert.Equal(t, string(text), string(textAgain))
			now, taken, restart, err := c.Reload(again)
			require.NoError(t, err)
			assert.Equal(t, c.Handlers["v.m"], now.Handlers["v.m"])
			assert.Empty(t, taken)
			assert.Empty(t, restart)
		})
	}
}

func TestReload(t *testing.T) {
	handler := func(change func(*Handler)) func(*Config) {
		return func(c *Config) {
			h := c.Handlers["v.m"]
			change(&h)
			c.Handlers["v.m"] = h
		}
	}
	for name, tc := range map[string]struct {
		change         func(*Config)
		taken, restart []string
	}{
		"log level":      {change: func(c *Config) { c.LogLevel = "debug" }, taken: []string{"log_level"}},
		"allowed images": {change: func(c *Config) { c.Volumes.AllowedImages = []string{"a"} }, taken: []string{"volumes.allowed_images"}},
		"allowed namespaces": {
			change: func(c *Config) { c.Volumes.AllowedNamespaces = []string{"a"} }, taken: []string{"volumes.allowed_namespaces"},
		},
		"image size":    {change: func(c *Config) { c.Volumes.MaxImageBytes = 1 }, restart: []string{"volumes.max_image_bytes"}},
		"scratch size":  {change: func(c *Config) { c.Volumes.MaxScratchBytes = 1 }, taken: []string{"volumes.max_scratch_bytes"}},
		"trust":         {change: func(c *Config) { c.Volumes.TrustPresent = true }, taken: []string{"volumes.trust_present"}},
		"routes":        {change: func(c *Config) { c.Routes = nil }, taken: []string{"routes"}},
		"marks":         {change: handler(func(h *Handler) { h.GCHigh, h.GCLow = 50, 40 }), taken: []string{"handlers.v.m.gc_high", "handlers.v.m.gc_low"}},
		"age and size":  {change: handler(func(h *Handler) { h.GCMinAge, h.MaxBytes = time.Hour, 1 }), taken: []string{"handlers.v.m.gc_min_age", "handlers.v.m.max_bytes"}},
		"size of one":   {change: handler(func(h *Handler) { h.MaxImageBytes = 1 }), taken: []string{"handlers.v.m.max_image_bytes"}},
		"annotation":    {change: handler(func(h *Handler) { h.AllowAnnotation = true }), taken: []string{"handlers.v.m.allow_annotation"}},
		"pinned images": {change: handler(func(h *Handler) { h.PinnedImages = nil }), taken: []string{"handlers.v.m.pinned_images"}},
		"run directory": {change: func(c *Config) { c.RunDir = "/r" }, restart: []string{"run_dir"}},
		"root":          {change: handler(func(h *Handler) { h.Root = "/r" }), restart: []string{"handlers.v.m.root"}},
		"new handler":   {change: func(c *Config) { c.Handlers["n"] = newHandler("n") }, restart: []string{"handlers.n"}},
		"no handlers":   {change: func(c *Config) { c.Handlers = nil }, restart: []string{"handlers.default", "handlers.v.m"}},
		"both": {
			change: func(c *Config) { c.LogLevel, c.Pull.StallTimeout = "warn", time.Hour },
			taken:  []string{"log_level"}, restart: []string{"pull.stall_timeout"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			old, next := reloaded(), reloaded()
			tc.change(&next)
			now, taken, restart, err := old.Reload(next)
			require.NoError(t, err)
			assert.Equal(t, tc.taken, taken)
			assert.Equal(t, tc.restart, restart)
			want := reloaded()
			if tc.restart == nil {
				want = next
			} else if tc.taken != nil {
				want.LogLevel = next.LogLevel
			}
			assert.Equal(t, want, now)
		})
	}
}
