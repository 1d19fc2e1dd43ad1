// Package crio asks a running CRI-O, at its own socket, for what is no part of
// CRI: its configuration in force, and which process it is.
package crio

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"

	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/conf"
)

// maxAnswer is more than any configuration takes, in bytes.
const maxAnswer = 16 << 20

// Client asks the CRI-O that listens on a socket.
type Client struct{ socket string }

// NewClient returns a client of the CRI-O at an absolute path
// (crio.api.listen). It connects for each question.
func NewClient(socket string) *Client { return &Client{socket} }

// Config returns the configuration that CRI-O runs with, its command line and
// environment included.
func (c *Client) Config(ctx context.Context) (*conf.CRIO, error) {
	transport := &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) },
		DisableKeepAlives: true,
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://crio/config", nil)
	if err != nil {
		return nil, fmt.Errorf("ask CRI-O for its configuration: %w", err)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask CRI-O at %s for its configuration: %w", c.socket, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask CRI-O at %s for its configuration: %s", c.socket, resp.Status)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("ask CRI-O at %s for its configuration: %w", c.socket, err)
	}
	return conf.ParseCRIO(text)
}

// PID returns CRI-O's process id in this process' PID namespace, 0 if it has
// none there. Behind a socket that systemd opened it is systemd's.
func (c *Client) PID(ctx context.Context) (int, error) {
	conn, err := c.dial(ctx)
	if err != nil {
		return 0, fmt.Errorf("find CRI-O's process: %w", err)
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("find CRI-O's process: %w", err)
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, fmt.Errorf("find CRI-O's process: %w", err)
	}
	if peerErr != nil {
		return 0, fmt.Errorf("find CRI-O's process: %w", peerErr)
	}
	return int(peer.Pid), nil
}

func (c *Client) dial(ctx context.Context) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil //nolint:forcetypeassert // what "unix" gives
}
