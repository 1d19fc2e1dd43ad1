package storage

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// errAbandoned is the cause of a transfer's cancellation when the last of its waiters has left.
var errAbandoned = errors.New("no one waits for the pull any more")

// flights lets callers that want the same transfer share one. The zero value is ready for use.
type flights struct {
	mu      sync.Mutex
	running map[string]*flight
	ended   []span // those that have ended within endedKept
	closed  bool
	wg      sync.WaitGroup
}

// endedKept is how long it is known of a transfer when it was.
const endedKept = time.Hour

type span struct{ began, ended time.Time }

// flight is one transfer. waiters, last and abandoned are guarded by flights.mu; image and err are set before done is
// closed.
type flight struct {
	began     time.Time
	cancel    context.CancelCauseFunc
	waiters   map[*waiter]struct{}
	last      *Progress
	abandoned bool

	done  chan struct{}
	image Image
	err   error
}

// transfer is the work that a flight does. It returns soon after ctx is cancelled, and calls report no more after it
// has returned.
type transfer func(ctx context.Context, report func(Progress)) (Image, error)

// do returns the outcome of the running transfer of that key, or of fn where there is none. It returns early when ctx
// ends; the transfer goes on for the others, and is cancelled when no one is left. The transfer does not inherit ctx's
// end, only its values.
func (f *flights) do(ctx context.Context, key string, report func(Progress), fn transfer) (Image, error) {
	w := &waiter{report: report}
	for {
		fl, joined, err := f.join(ctx, key, w, fn)
		if err != nil {
			return Image{}, err
		}
		select {
		case <-fl.done:
			if joined {
				return fl.image, fl.err
			}
		case <-ctx.Done():
			if joined {
				f.leave(fl, w)
			}
			return Image{}, context.Cause(ctx)
		}
	}
}

// join makes w a waiter of the key's flight, and starts the flight where there is none. A flight that is being
// cancelled cannot be joined; when it is done there is room for a new one.
func (f *flights) join(ctx context.Context, key string, w *waiter, fn transfer) (fl *flight, joined bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, false, ErrClosed
	}
	if fl, ok := f.running[key]; ok {
		if fl.abandoned {
			return fl, false, nil
		}
		fl.waiters[w] = struct{}{}
		if fl.last != nil {
			w.deliver(*fl.last)
		}
		return fl, true, nil
	}

	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	fl = &flight{began: time.Now(), cancel: cancel, waiters: map[*waiter]struct{}{w: {}}, done: make(chan struct{})}
	if f.running == nil {
		f.running = make(map[string]*flight)
	}
	f.running[key] = fl
	f.wg.Go(func() {
		defer cancel(nil)
		image, err := fn(runCtx, func(p Progress) { f.deliver(fl, p) })
		if err != nil && runCtx.Err() != nil {
			err = context.Cause(runCtx)
		}
		fl.image, fl.err = image, err
		f.mu.Lock()
		delete(f.running, key)
		f.noteEnd(fl.began, time.Now())
		f.mu.Unlock()
		close(fl.done)
	})
	return fl, true, nil
}

func (f *flights) leave(fl *flight, w *waiter) {
	w.leave()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(fl.waiters, w)
	if len(fl.waiters) == 0 {
		fl.abandoned = true
		fl.cancel(errAbandoned)
	}
}

func (f *flights) deliver(fl *flight, p Progress) {
	f.mu.Lock()
	fl.last = &p
	waiters := make([]*waiter, 0, len(fl.waiters))
	for w := range fl.waiters {
		waiters = append(waiters, w)
	}
	f.mu.Unlock()
	for _, w := range waiters {
		w.deliver(p)
	}
}

// close cancels every transfer and waits until they have ended. Nothing can be started afterwards.
func (f *flights) close() {
	f.mu.Lock()
	f.closed = true
	for _, fl := range f.running {
		fl.cancel(ErrClosed)
	}
	f.mu.Unlock()
	f.wg.Wait()
}

// transferring tells whether a transfer is under way whose key has that name among its candidates.
func (f *flights) transferring(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.running {
		candidates, _, _ := strings.Cut(key, "\n")
		if slices.Contains(strings.Fields(candidates), name) {
			return true
		}
	}
	return false
}

// noteEnd is called with mu held.
func (f *flights) noteEnd(began, now time.Time) {
	f.ended = slices.DeleteFunc(f.ended, func(s span) bool { return now.Sub(s.ended) > endedKept })
	f.ended = append(f.ended, span{began, now})
}

// oldest returns when the oldest of the transfers has begun that are under way or have ended within grace before now, at
// most endedKept, and whether there is one.
func (f *flights) oldest(now time.Time, grace time.Duration) (began time.Time, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	consider := func(t time.Time) {
		if !ok || t.Before(began) {
			began, ok = t, true
		}
	}
	for _, fl := range f.running {
		consider(fl.began)
	}
	for _, s := range f.ended {
		if now.Sub(s.ended) < grace {
			consider(s.began)
		}
	}
	return began, ok
}

// idle tells whether no transfer is under way.
func (f *flights) idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.running) == 0
}

func (f *flights) isClosed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed
}

// waiter is one caller. Its mutex makes sure that report is not called once the caller has left.
type waiter struct {
	mu     sync.Mutex
	report func(Progress)
}

func (w *waiter) deliver(p Progress) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.report != nil {
		w.report(p)
	}
}

func (w *waiter) leave() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report = nil
}
