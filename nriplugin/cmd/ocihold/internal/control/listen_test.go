package control

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestListenMakesALostSocketAgain(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	require.NoError(t, os.WriteFile(socket, nil, 0o600), "in the way")
	l, err := Listen(socket)
	require.NoError(t, err)
	accepted := make(chan error, 10)
	go func() {
		for {
			conn, err := l.Accept()
			accepted <- err
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	for range 2 {
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			conn, err := net.Dial("unix", socket)
			if assert.NoError(c, err) {
				conn.Close()
			}
		}, 10*time.Second, 10*time.Millisecond)
		require.NoError(t, <-accepted)
		info, err := os.Stat(socket)
		require.NoError(t, err)
		assert.Equal(t, os.ModeSocket|0o600, info.Mode())
		require.NoError(t, os.Remove(socket))
	}
	require.NoError(t, l.Close())
	require.ErrorIs(t, <-accepted, net.ErrClosed)
	assert.NoFileExists(t, socket)

	l, err = Listen(socket)
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(filepath.Dir(socket)))
	_, err = l.Accept()
	require.ErrorContains(t, err, "listen on "+socket)
	require.NoError(t, l.Close())
}
