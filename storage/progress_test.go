package storage

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/assert"
	"go.podman.io/image/v5/types"
)

func TestTracker(t *testing.T) {
	a, b := digest.FromString("a"), digest.FromString("b")
	var got []Progress
	start := time.Now()
	tracker := newTracker([]types.BlobInfo{{Digest: a, Size: 100}, {Digest: b, Size: 50}, {Digest: a, Size: 100}, {Digest: "sha256:none", Size: -1}},
		func(p Progress) { got = append(got, p) })
	for _, e := range []struct {
		event  types.ProgressEvent
		digest digest.Digest
		offset uint64
		after  time.Duration
	}{
		{types.ProgressEventNewArtifact, a, 0, 0},
		{types.ProgressEventRead, a, 10, 10 * time.Millisecond},   // too soon
		{types.ProgressEventRead, a, 40, 300 * time.Millisecond},  // reported
		{types.ProgressEventRead, a, 30, 700 * time.Millisecond},  // a retried read does not go back
		{types.ProgressEventRead, a, 400, 910 * time.Millisecond}, // nor beyond
		{types.ProgressEventRead, "sha256:config", 7, 920 * time.Millisecond},
		{types.ProgressEventDone, a, 100, 950 * time.Millisecond},
		{types.ProgressEventSkipped, b, 0, 960 * time.Millisecond}, // the last one: reported at once
		{types.ProgressEventDone, b, 0, 2 * time.Second},
	} {
		tracker.add(types.ProgressProperties{Event: e.event, Artifact: types.BlobInfo{Digest: e.digest}, Offset: e.offset}, start.Add(e.after))
	}
	assert.Equal(t, []Progress{
		{Done: 0, Total: 150, Phase: PhaseDownloading},
		{Done: 40, Total: 150, Phase: PhaseDownloading},
		{Done: 40, Total: 150, Phase: PhaseDownloading},
		{Done: 100, Total: 150, Phase: PhaseDownloading},
		{Done: 150, Total: 150, Phase: PhaseStoring},
		{Done: 150, Total: 150, Phase: PhaseStoring},
	}, got)
}

func TestTrackerOfATransferThatStandsStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := digest.FromString("a"), digest.FromString("b")
		var got []int64
		tracker := newTracker([]types.BlobInfo{{Digest: a, Size: 100}, {Digest: b, Size: 50}}, func(p Progress) { got = append(got, p.Done) })
		events := make(chan types.ProgressProperties)
		go tracker.run(events)
		for _, offset := range []uint64{10, 20, 30} {
			events <- types.ProgressProperties{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: a}, Offset: offset}
		}
		time.Sleep(progressInterval - 1)
		synctest.Wait()
		assert.Equal(t, []int64{0}, got, "too soon")
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		assert.Equal(t, []int64{0, 30}, got)
		time.Sleep(10 * progressInterval)
		synctest.Wait()
		assert.Equal(t, []int64{0, 30}, got, "nothing new")
		close(events)
	})
}
