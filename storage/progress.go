package storage

import (
	"errors"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/types"
)

// Phase is what a pull is doing.
type Phase string

const (
	// PhaseDownloading lasts until the last byte of the last layer has come. Finished layers are unpacked meanwhile.
	PhaseDownloading Phase = "downloading"
	// PhaseStoring is what remains: the last layers are unpacked and synced, and the image is recorded.
	PhaseStoring Phase = "storing"
)

// Progress is how far a pull has come.
type Progress struct {
	// Done and Total count the bytes of the image's layers as the registry has them (compressed, as a rule). Layers
	// that the root had already are in both.
	Done, Total int64
	// Phase tells whether anything is still to come over the network.
	Phase Phase
}

// progressInterval is the least time between two reports of one phase.
const progressInterval = 200 * time.Millisecond

// tracker adds up containers/image's events per blob to a Progress for the image.
type tracker struct {
	sizes      map[digest.Digest]int64
	done       map[digest.Digest]int64
	progress   Progress
	report     func(Progress)
	lastReport time.Time
	unreported bool

	// stalled is called when nothing comes for as long as stall while something is awaited: until the first blob
	// begins (started) the answer to a request, then the rest of those in receiving. Neither the wait for a lock nor
	// unpacking what has come counts.
	stall   time.Duration
	stalled func()
	// larger, if not nil, is called when more of a blob comes than its manifest says it has.
	larger    func(error)
	requests  *requests
	lastCame  time.Time
	started   bool
	receiving map[digest.Digest]bool
}

// errStalled is wrapped by the cause of a transfer's cancellation when nothing came for too long.
var errStalled = errors.New("nothing came")

func stallError(stall time.Duration) error {
	return fmt.Errorf("%w from the registry for %s", errStalled, stall)
}

// newTracker returns a tracker for an image of these layers, and reports that none of them has come. stalled is called
// when nothing comes for as long as stall.
func newTracker(layers []types.BlobInfo, report func(Progress), requests *requests, stall time.Duration, stalled func()) *tracker {
	t := &tracker{
		stall:     stall,
		stalled:   stalled,
		requests:  requests,
		lastCame:  time.Now(),
		receiving: make(map[digest.Digest]bool),
		sizes:     make(map[digest.Digest]int64, len(layers)),
		done:      make(map[digest.Digest]int64, len(layers)),
		progress:  Progress{Phase: PhaseDownloading},
		report:    report,
	}
	for _, l := range layers {
		if _, ok := t.sizes[l.Digest]; !ok && l.Size >= 0 {
			t.sizes[l.Digest] = l.Size
			t.progress.Total += l.Size
		}
	}
	t.flush(time.Now())
	return t
}

// run takes events until the channel is closed. What comes too soon after a report is reported when its time has come,
// also if nothing follows: a transfer may stand still there.
func (t *tracker) run(events <-chan types.ProgressProperties) {
	for {
		var due <-chan time.Time
		if t.unreported {
			due = time.After(time.Until(t.lastReport.Add(progressInterval)))
		}
		var late <-chan time.Time
		if !t.started || len(t.receiving) > 0 {
			late = time.After(time.Until(t.lastCame.Add(t.stall)))
		}
		select {
		case e, ok := <-events:
			if !ok {
				return
			}
			t.add(e, time.Now())
		case now := <-due:
			t.flush(now)
		case now := <-late:
			t.checkStall(now)
		}
	}
}

// checkStall is called when no event has come for as long as stall.
func (t *tracker) checkStall(now time.Time) {
	if !t.started {
		since, waiting := t.requests.waiting()
		if !waiting {
			t.lastCame = now
			return
		}
		if now.Sub(since) < t.stall {
			t.lastCame = since
			return
		}
	}
	t.stalled()
	t.lastCame = now
}

func (t *tracker) add(e types.ProgressProperties, now time.Time) {
	t.started, t.lastCame = true, now
	size, ok := t.sizes[e.Artifact.Digest]
	if !ok {
		return
	}
	done := t.done[e.Artifact.Digest]
	switch e.Event {
	case types.ProgressEventNewArtifact:
		t.receiving[e.Artifact.Digest] = true
		return
	case types.ProgressEventRead:
		if has := int64(e.Offset); has > size && t.larger != nil { //nolint:gosec // an offset within a blob fits an int64
			t.larger(sizeFault(e.Artifact.Digest, has, size))
		}
		done = max(done, min(size, int64(e.Offset))) //nolint:gosec // an offset within a blob fits an int64
	case types.ProgressEventDone, types.ProgressEventSkipped:
		done = size
	default:
		return
	}
	if done == size {
		delete(t.receiving, e.Artifact.Digest)
	}
	t.progress.Done += done - t.done[e.Artifact.Digest]
	t.done[e.Artifact.Digest] = done
	switch {
	case t.progress.Done == t.progress.Total && t.progress.Phase == PhaseDownloading:
		t.progress.Phase = PhaseStoring
		t.flush(now)
	case now.Sub(t.lastReport) >= progressInterval:
		t.flush(now)
	default:
		t.unreported = true
	}
}

func (t *tracker) flush(now time.Time) {
	t.lastReport, t.unreported = now, false
	t.report(t.progress)
}
