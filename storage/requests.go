package storage

import (
	"context"
	"net/http/httptrace"
	"sync"
	"time"
)

// requests counts the requests of a transfer that have no answer yet. A request that net/http sends twice, because the
// connection was gone, may be counted twice. The zero value is ready for use.
type requests struct {
	mu    sync.Mutex
	open  int
	since time.Time // of the last request or answer
}

// traced returns a context whose requests are counted.
func (r *requests) traced(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GetConn: r.begin, GotFirstResponseByte: r.end})
}

func (r *requests) begin(string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open++
	r.since = time.Now()
}

func (r *requests) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = max(0, r.open-1)
	r.since = time.Now()
}

// waiting tells whether an answer is awaited, and since when nothing has happened.
func (r *requests) waiting() (since time.Time, waiting bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.since, r.open > 0
}
