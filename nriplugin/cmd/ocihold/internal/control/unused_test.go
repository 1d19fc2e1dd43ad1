package control_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
)

func TestUnused(t *testing.T) {
	dir, err := os.MkdirTemp("", "s")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	path := filepath.Join(dir, "s")
	require.NoError(t, control.Unused(path), "nothing there")

	listener, err := control.Listen(path)
	require.NoError(t, err)
	require.ErrorContains(t, control.Unused(path), "another program listens on "+path)
	require.NoError(t, listener.Close())

	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	require.NoError(t, err)
	old.SetUnlinkOnClose(false) // as of a killed program
	require.NoError(t, old.Close())
	require.NoError(t, control.Unused(path))
	listener, err = control.Listen(path)
	require.NoError(t, err)
	info, err := os.Lstat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())

	for name, make := range map[string]func(string) error{
		"file":      func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"directory": func(p string) error { return os.Mkdir(p, 0o700) },
		"link":      func(p string) error { return os.Symlink(path, p) },
	} {
		other := filepath.Join(dir, name)
		require.NoError(t, make(other))
		require.ErrorContains(t, control.Unused(other), other+" is there and no socket", name)
	}
	require.NoError(t, listener.Close())
}
