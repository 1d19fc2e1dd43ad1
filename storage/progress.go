package storage

import (
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
}

// newTracker returns a tracker for an image of these layers, and reports that none of them has come.
func newTracker(layers []types.BlobInfo, report func(Progress)) *tracker {
	t := &tracker{
		sizes:    make(map[digest.Digest]int64, len(layers)),
		done:     make(map[digest.Digest]int64, len(layers)),
		progress: Progress{Phase: PhaseDownloading},
		report:   report,
	}
	for _, l := range layers {
		if _, ok := t.sizes[l.Digest]; !ok && l.Size > 0 {
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
		select {
		case e, ok := <-events:
			if !ok {
				return
			}
			t.add(e, time.Now())
		case now := <-due:
			t.flush(now)
		}
	}
}

func (t *tracker) add(e types.ProgressProperties, now time.Time) {
	size, ok := t.sizes[e.Artifact.Digest]
	if !ok {
		return
	}
	done := t.done[e.Artifact.Digest]
	switch e.Event {
	case types.ProgressEventRead:
		done = max(done, min(size, int64(e.Offset))) //nolint:gosec // an offset within a blob fits an int64
	case types.ProgressEventDone, types.ProgressEventSkipped:
		done = size
	default:
		return
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
