package integration

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// relay passes on what ocihold and CRI-O tell each other over NRI, and can be told
// to do something just before a step: the connection is the first, and each frame
// that either of them sends is one more.
type relay struct {
	socket, target string

	mu           sync.Mutex
	next, latest *passage // connections
}

// configured is the step that ends a plugin's configuration. What follows is
// Synchronize.
const configured = 5

// passage has the times of the steps of a connection.
type passage struct {
	mu     sync.Mutex
	steps  []time.Time
	at     int
	before func()
}

// newRelay returns a relay to the node's CRI-O that passes everything on.
func newRelay(t testing.TB, n *realnode.Node) *relay {
	t.Helper()
	run := filepath.Join(n.Dir(), "run")
	r := &relay{socket: filepath.Join(run, "relay.sock"), target: filepath.Join(run, "nri.sock"), next: &passage{}}
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", r.socket)
	require.NoError(t, err)
	var serving sync.WaitGroup
	t.Cleanup(func() {
		require.NoError(t, listener.Close())
		require.NoError(t, n.Kill(context.WithoutCancel(t.Context()), realnode.Ocihold, syscall.SIGKILL)) // ends the last connection
		serving.Wait()
	})
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { r.serve(conn) })
		}
	})
	return r
}

// doBefore has f called before a step of the next connection.
func (r *relay) doBefore(step int, f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next = &passage{at: step, before: f}
}

// steps are those of the latest connection so far.
func (r *relay) steps() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latest.mu.Lock()
	defer r.latest.mu.Unlock()
	return len(r.latest.steps)
}

// since is the time between the step after that one and the last, of the latest
// connection so far.
func (r *relay) since(step int) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.latest.mu.Lock()
	defer r.latest.mu.Unlock()
	steps := r.latest.steps
	return steps[len(steps)-1].Sub(steps[step])
}

func (r *relay) serve(plugin net.Conn) {
	defer plugin.Close()
	r.mu.Lock()
	p := r.next
	r.next, r.latest = &passage{}, p
	r.mu.Unlock()
	p.count()
	runtime, err := net.Dial("unix", r.target)
	if err != nil {
		return
	}
	var passing sync.WaitGroup
	passing.Go(func() { p.pass(runtime, plugin) })
	passing.Go(func() { p.pass(plugin, runtime) })
	passing.Wait()
}

// count begins a step.
func (p *passage) count() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.steps = append(p.steps, time.Now()); len(p.steps) == p.at {
		p.before()
	}
}

// pass ends with either connection, and ends both. A frame has a head of two
// numbers, the second of which is the length of what follows it.
func (p *passage) pass(to, from net.Conn) {
	defer to.Close()
	defer from.Close()
	for {
		head := make([]byte, 8)
		if _, err := io.ReadFull(from, head); err != nil {
			return
		}
		frame := make([]byte, 8+binary.BigEndian.Uint32(head[4:]))
		copy(frame, head)
		if _, err := io.ReadFull(from, frame[8:]); err != nil {
			return
		}
		p.count()
		if _, err := to.Write(frame); err != nil {
			return
		}
	}
}
