// Package health watches the daemon from within, and tells how it is: over
// HTTP, to the service manager, and to whoever asks a Watch.
//
// Every second each part is asked, by one goroutine of its own. One that takes
// longer than a few seconds counts as stuck until it answers; nobody waits for
// it. Answers are from memory.
//
//   - alive: the parts progress. When they do not, only a restart helps.
//   - ready: alive, registered with CRI-O, and CRI-O's root answers. What
//     follows from CRI-O being away, or from one handler's disk, is no reason
//     for a restart.
package health

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ocihold/ocihold/storage"
)

const (
	askEvery = time.Second
	// stuckAfter is how long a part may take to answer.
	stuckAfter = 10 * time.Second
)

// Sweep is what has become of work that is done again and again.
type Sweep struct {
	// Name says what work.
	Name string `json:"name"`
	// At is when it was last done, zero for never.
	At time.Time `json:"at,omitzero"`
	// Fault is what it could not do; empty for nothing.
	Fault string `json:"fault,omitempty"`
}

// Part is a part of the daemon.
type Part struct {
	Name string `json:"name"`
	// Fault is what is wrong with it; empty for nothing.
	Fault string `json:"fault,omitempty"`
}

// Report is how the daemon is. Each fault is one line.
type Report struct {
	// Registered says that CRI-O passes NRI's events to the daemon.
	Registered bool                `json:"registered"`
	Ready      bool                `json:"ready"`
	Alive      bool                `json:"alive"`
	Parts      []Part              `json:"parts,omitempty"`
	Sweeps     []Sweep             `json:"sweeps,omitempty"`
	Roots      []storage.RootState `json:"roots,omitempty"`
}

// Options say what is watched.
type Options struct {
	// Parts are asked for an error each; nil is well.
	Parts map[string]func(context.Context) error
	// Registered, Sweeps and Roots answer from memory. The first root is
	// CRI-O's.
	Registered func() bool
	Sweeps     func() []Sweep
	Roots      func() []storage.RootState
}

// Watch watches.
type Watch struct {
	options Options

	mu    sync.Mutex // guards parts
	parts map[string]*part
}

// part is what is known of a part; began is that of the question under way.
type part struct {
	began time.Time
	asked bool // there was an answer
	err   error
}

// New returns a Watch, which finds everything unwell before Run.
func New(options Options) *Watch {
	w := &Watch{options: options, parts: map[string]*part{}}
	for name := range options.Parts {
		w.parts[name] = &part{}
	}
	return w
}

// Run asks the parts until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for name, ask := range w.options.Parts {
		group.Go(func() error { w.watch(ctx, w.parts[name], ask); return nil })
	}
	return group.Wait()
}

func (w *Watch) watch(ctx context.Context, p *part, ask func(context.Context) error) {
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		w.mu.Lock()
		p.began = time.Now()
		w.mu.Unlock()
		bound, cancel := context.WithTimeout(ctx, stuckAfter)
		err := ask(bound)
		cancel()
		w.mu.Lock()
		p.began, p.asked, p.err = time.Time{}, true, err
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// fault is called with w.mu held.
func (p *part) fault() string {
	switch {
	case !p.began.IsZero() && time.Since(p.began) >= stuckAfter:
		return "it does not answer since " + p.began.Format(time.TimeOnly)
	case p.err != nil:
		return p.err.Error()
	case !p.asked:
		return "it is starting"
	}
	return ""
}

// Report tells how the daemon is.
func (w *Watch) Report() Report {
	r := Report{
		Registered: w.options.Registered(), Alive: true,
		Sweeps: w.options.Sweeps(), Roots: w.options.Roots(),
	}
	w.mu.Lock()
	for name, p := range w.parts {
		r.Parts = append(r.Parts, Part{name, oneLine(p.fault())})
	}
	w.mu.Unlock()
	for i := range r.Sweeps {
		r.Sweeps[i].Fault = oneLine(r.Sweeps[i].Fault)
	}
	for i := range r.Roots {
		r.Roots[i].Fault = oneLine(r.Roots[i].Fault)
	}
	slices.SortFunc(r.Parts, func(a, b Part) int { return strings.Compare(a.Name, b.Name) })
	for _, p := range r.Parts {
		r.Alive = r.Alive && p.Fault == ""
	}
	r.Ready = r.Alive && r.Registered && r.Roots[0].Fault == ""
	return r
}

func oneLine(fault string) string { return strings.ReplaceAll(fault, "\n", "; ") }

// Handle adds GET /healthz and /readyz to mux: 200 or 503, and what is wrong,
// a line each.
func (w *Watch) Handle(mux *http.ServeMux) {
	for path, well := range map[string]func(Report) bool{
		"/healthz": func(r Report) bool { return r.Alive },
		"/readyz":  func(r Report) bool { return r.Ready },
	} {
		mux.HandleFunc("GET "+path, func(out http.ResponseWriter, _ *http.Request) {
			r := w.Report()
			if !well(r) {
				out.WriteHeader(http.StatusServiceUnavailable)
			}
			fmt.Fprintln(out, strings.Join(r.Lines(), "\n"))
		})
	}
}

// Lines says what is wrong, or that all is well.
func (r Report) Lines() []string {
	var lines []string
	if !r.Registered {
		lines = append(lines, "not registered with CRI-O: is it running, with NRI enabled?")
	}
	for _, p := range r.Parts {
		if p.Fault != "" {
			lines = append(lines, p.Name+": "+p.Fault)
		}
	}
	for _, root := range r.Roots {
		if root.Fault != "" {
			lines = append(lines, "root of handler "+root.Handler+": "+root.Fault)
		}
	}
	for _, s := range r.Sweeps {
		if s.Fault != "" {
			lines = append(lines, s.Name+": "+s.Fault)
		}
	}
	if lines == nil {
		lines = []string{"ok"}
	}
	return lines
}
