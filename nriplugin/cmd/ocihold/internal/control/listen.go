package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// lookEvery is how often a listener looks whether its socket is still there.
const lookEvery = time.Second

// Listen makes the socket, with mode 0600, in place of one that a daemon before
// left. Whoever calls it has made sure that there is no other daemon. Somebody
// who clears the directory away takes the socket from those who want to connect:
// it is made again. Where that fails, Accept returns the error.
func Listen(socket string) (net.Listener, error) {
	current, err := listen(socket)
	if err != nil {
		return nil, err
	}
	return &listener{path: socket, current: current}, nil
}

func listen(socket string) (*net.UnixListener, error) {
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	// The mode that the socket has becomes that of the file.
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) (err error) {
		controlErr := conn.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, controlErr)
	}}
	made, err := config.Listen(context.Background(), "unix", socket) // binds at once
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", socket, err)
	}
	return made.(*net.UnixListener), nil //nolint:forcetypeassert // it is one, for this network
}

// listener is one whose socket is made again.
type listener struct {
	path string

	mu      sync.Mutex
	current *net.UnixListener
	closed  bool
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		l.mu.Lock()
		current := l.current
		l.mu.Unlock()
		if err := current.SetDeadline(time.Now().Add(lookEvery)); err != nil {
			return nil, err
		}
		conn, err := current.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return conn, err
		}
		if err := l.look(); err != nil {
			return nil, err
		}
	}
}

// look makes the socket again if it is gone.
func (l *listener) look() error {
	if _, err := os.Lstat(l.path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	made, err := listen(l.path)
	if err != nil {
		return err
	}
	l.current.SetUnlinkOnClose(false)
	_ = l.current.Close() // no one can reach it any more
	l.current = made
	return nil
}

func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	return l.current.Close()
}

func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }
