package control

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// Unused makes sure that Listen may put sockets at these paths: what is there is
// nothing, or a socket that nobody listens on any more. Links are not followed.
func Unused(sockets ...string) error {
	for _, socket := range sockets {
		info, err := os.Lstat(socket)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for an old socket: %w", err)
		}
		if info.Mode().Type() != fs.ModeSocket {
			return fmt.Errorf("%s is there and no socket: remove it, or set another path", socket)
		}
		conn, err := net.Dial("unix", socket) //nolint:noctx // answers at once
		if err == nil {
			conn.Close()
			return fmt.Errorf("another program listens on %s: stop it, or set another path", socket)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("look whether an old socket is used: %w", err)
		}
	}
	return nil
}
