package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// pulseLimit is how long a disk may take to answer a beat before it counts as hung.
	pulseLimit = 10 * time.Second
	// pulseEvery is how often disks are asked by Watch, and pulsePatience how long a call may take before its root is asked.
	pulseEvery    = 10 * time.Second
	pulsePatience = time.Second
)

// pulse tells whether the disk of a root answers: a beat writes to it, and does not return while the disk is stuck.
// At most one beat is under way, so that a stuck disk holds one thread for it, however often it is asked for.
type pulse struct {
	of   string // whose it is
	beat func() error

	mu      sync.Mutex
	running chan struct{} // closed as the beat under way ends; nil where none is
	began   time.Time     // of that beat
	err     error         // of the last one that ended
}

func newPulse(opt Options) *pulse {
	return &pulse{
		of:   fmt.Sprintf("root of handler %q at %s", opt.Name, opt.GraphRoot),
		beat: func() error { return writeNothing(opt.GraphRoot) },
	}
}

// writeNothing writes to the disk that has dir and leaves nothing there. A full disk has answered, and so has one that
// dir is not on.
func writeNothing(dir string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err == nil {
		file := os.NewFile(uintptr(fd), dir)
		defer file.Close()
		if _, err = file.WriteString("beat"); err == nil {
			err = file.Sync()
		}
	}
	for _, fine := range []error{unix.ENOSPC, unix.EDQUOT, unix.EOPNOTSUPP, fs.ErrNotExist} {
		if errors.Is(err, fine) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("write to %s: %w", dir, err)
	}
	return nil
}

// start begins a beat, or joins the one under way.
func (p *pulse) start() (running chan struct{}, began time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == nil {
		running := make(chan struct{})
		p.running, p.began = running, time.Now()
		go func() { // ends when the disk answers
			err := p.beat()
			p.mu.Lock()
			defer p.mu.Unlock()
			p.running, p.err = nil, err
			close(running)
		}()
	}
	return p.running, p.began
}

// ask has the disk beat and returns what that gave, ErrHung, or nil when done is closed before.
func (p *pulse) ask(done <-chan struct{}) error {
	running, began := p.start()
	limit := time.NewTimer(time.Until(began.Add(pulseLimit)))
	defer limit.Stop()
	select {
	case <-running:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.err
	case <-limit.C:
		return p.hung()
	case <-done:
		return nil
	}
}

// hung returns ErrHung where a beat is under way for too long. It asks nothing.
func (p *pulse) hung() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == nil {
		return nil
	}
	if time.Since(p.began) >= pulseLimit {
		return fmt.Errorf("%s: %w since %s", p.of, ErrHung, p.began.Format(time.TimeOnly)) // the same text as long as it lasts
	}
	return nil
}

// Bounded returns what fn does, which works in r's root. Where that takes long and the root's disk does not answer, it
// returns ErrHung without fn, which goes on when the disk answers, for no one.
func Bounded[T any](r *Root, fn func() (T, error)) (T, error) { return bounded(r.pulse, fn) }

// Bounded is the function of that name for what has only an error.
func (r *Root) Bounded(fn func() error) error {
	_, err := Bounded(r, func() (struct{}, error) { return struct{}{}, fn() })
	return err
}

func bounded[T any](p *pulse, fn func() (T, error)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	var none T
	if err := p.hung(); err != nil {
		return none, err
	}
	done := make(chan outcome, 1)
	go func() {
		value, err := fn()
		done <- outcome{value, err}
	}()
	ticker := time.NewTicker(pulsePatience)
	defer ticker.Stop()
	for {
		select {
		case o := <-done:
			return o.value, o.err
		case <-ticker.C:
		}
		if err := p.hung(); err != nil {
			return none, err
		}
		p.start()
	}
}

// RootState is how a root is.
type RootState struct {
	// Handler is the name of the root's handler, and Root the root's directory.
	Handler string `json:"handler"`
	Root    string `json:"root"`
	// Fault is why it cannot be used; empty where it can.
	Fault string `json:"fault,omitempty"`
}

// Watch asks the disk of every root, again and again until ctx ends, whether it answers, and notices those that return.
func (r *Roots) Watch(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { r.base.pulse.watch(ctx, func() {}) })
	for _, h := range r.handlers {
		watching.Go(func() {
			h.pulse.watch(ctx, func() { _, _ = r.opened(h) }) // keeps the fault
		})
	}
	return nil
}

// watch calls look after each beat.
func (p *pulse) watch(ctx context.Context, look func()) {
	ticker := time.NewTicker(pulseEvery)
	defer ticker.Stop()
	for ctx.Err() == nil {
		_ = p.ask(ctx.Done()) // is kept
		look()
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// fault is why the disk is not as it should be, by the last beat.
func (p *pulse) fault() error {
	if err := p.hung(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// States tells how the roots are, CRI-O's own first, from memory: as they were when last looked at.
func (r *Roots) States() []RootState {
	r.mu.Lock()
	defer r.mu.Unlock()
	states := []RootState{stateOf(r.base.name, r.base.store.GraphRoot(), r.base.pulse.fault())}
	for _, h := range r.handlers {
		fault := h.fault
		if fault == nil || errors.Is(fault, ErrHung) {
			fault = h.pulse.fault()
		}
		states = append(states, stateOf(h.options.Name, h.options.GraphRoot, fault))
	}
	return states
}

func stateOf(handler, root string, fault error) RootState {
	state := RootState{Handler: handler, Root: root}
	if fault != nil {
		state.Fault = fault.Error()
	}
	return state
}
