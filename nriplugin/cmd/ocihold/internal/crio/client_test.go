package crio_test

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/crio"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve answers for CRI-O and returns its socket.
func serve(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "crio.sock")
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	require.NoError(t, err)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-done, http.ErrServerClosed)
	})
	return socket
}

func TestConfig(t *testing.T) {
	socket := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/config" {
			http.NotFound(w, r)
			return
		}
		_, err := w.Write([]byte(`[crio]
  root = "/r"
  storage_option = ["overlay.imagestore=/a"]
  internal_repair = true
  [crio.runtime]
    hooks_dir = ["/h"]
  [crio.nri]
    enable_nri = true
    nri_listen = "/n"
`))
		assert.NoError(t, err)
	})
	c := crio.NewClient(socket)
	got, err := c.Config(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "/r", got.Root)
	assert.Equal(t, []string{"overlay.imagestore=/a"}, got.StorageOptions)
	assert.True(t, got.InternalRepair)
	assert.Equal(t, []string{"/h"}, got.HooksDir)
	assert.True(t, got.NRI.Enabled)

	pid, err := c.PID(t.Context())
	require.NoError(t, err)
	assert.Equal(t, os.Getpid(), pid)
}

func TestNoAnswer(t *testing.T) {
	for name, tc := range map[string]struct {
		handler http.HandlerFunc
		want    string
	}{
		"error":    {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusInternalServerError) }, "500"},
		"nonsense": {func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }, "read the configuration that CRI-O reports"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := crio.NewClient(serve(t, tc.handler)).Config(t.Context())
			require.ErrorContains(t, err, tc.want)
		})
	}
	socket := filepath.Join(t.TempDir(), "crio.sock")
	_, err := crio.NewClient(socket).Config(t.Context())
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, socket)
	_, err = crio.NewClient(socket).PID(t.Context())
	require.ErrorIs(t, err, os.ErrNotExist)
}
