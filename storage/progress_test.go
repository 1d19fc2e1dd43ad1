package storage

import (
	"slices"
	"sync"
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
		func(p Progress) { got = append(got, p) }, &requests{}, time.Hour, nil)
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
		var mu sync.Mutex
		var all []int64
		got := func() []int64 {
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(all)
		}
		tracker := newTracker([]types.BlobInfo{{Digest: a, Size: 100}, {Digest: b, Size: 50}}, func(p Progress) {
			mu.Lock()
			defer mu.Unlock()
			all = append(all, p.Done)
		}, &requests{}, time.Hour, nil)
		events := make(chan types.ProgressProperties)
		go tracker.run(events)
		for _, offset := range []uint64{10, 20, 30} {
			events <- types.ProgressProperties{Event: types.ProgressEventRead, Artifact: types.BlobInfo{Digest: a}, Offset: offset}
		}
		time.Sleep(progressInterval - 1)
		synctest.Wait()
		assert.Equal(t, []int64{0}, got(), "too soon")
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		assert.Equal(t, []int64{0, 30}, got())
		time.Sleep(10 * progressInterval)
		synctest.Wait()
		assert.Equal(t, []int64{0, 30}, got(), "nothing new")
		close(events)
	})
}

func TestTrackerStall(t *testing.T) {
	const stall = time.Minute
	a := digest.FromString("a")
	send := func(event types.ProgressEvent, offset uint64) func(chan<- types.ProgressProperties, *requests) {
		return func(events chan<- types.ProgressProperties, _ *requests) {
			events <- types.ProgressProperties{Event: event, Artifact: types.BlobInfo{Digest: a}, Offset: offset}
		}
	}
	wait := func(d time.Duration) func(chan<- types.ProgressProperties, *requests) {
		return func(chan<- types.ProgressProperties, *requests) { time.Sleep(d); synctest.Wait() }
	}
	ask := func(_ chan<- types.ProgressProperties, r *requests) { r.begin("") }
	answer := func(_ chan<- types.ProgressProperties, r *requests) { r.end() }
	begin := send(types.ProgressEventNewArtifact, 0)
	for name, tc := range map[string]struct {
		steps []func(chan<- types.ProgressProperties, *requests)
		want  bool
	}{
		"no answer to the first request":  {steps: []func(chan<- types.ProgressProperties, *requests){ask, wait(stall)}, want: true},
		"answer in time":                  {steps: []func(chan<- types.ProgressProperties, *requests){ask, wait(stall - 1), answer, wait(10 * stall)}},
		"waits for a lock":                {steps: []func(chan<- types.ProgressProperties, *requests){wait(10 * stall)}},
		"asks after waiting for a lock":   {steps: []func(chan<- types.ProgressProperties, *requests){wait(stall - 1), ask, wait(stall - 1)}},
		"no answer after a lock":          {steps: []func(chan<- types.ProgressProperties, *requests){wait(stall - 1), ask, wait(stall)}, want: true},
		"blob never comes":                {steps: []func(chan<- types.ProgressProperties, *requests){begin, wait(stall)}, want: true},
		"blob stands still":               {steps: []func(chan<- types.ProgressProperties, *requests){begin, send(types.ProgressEventRead, 99), wait(stall)}, want: true},
		"blob comes slowly":               {steps: []func(chan<- types.ProgressProperties, *requests){begin, wait(stall - 1), send(types.ProgressEventRead, 1), wait(stall - 1), send(types.ProgressEventRead, 2), wait(stall - 1)}},
		"blob is there and being stored":  {steps: []func(chan<- types.ProgressProperties, *requests){begin, send(types.ProgressEventRead, 100), wait(10 * stall)}},
		"blob was there":                  {steps: []func(chan<- types.ProgressProperties, *requests){send(types.ProgressEventSkipped, 0), wait(10 * stall)}},
		"a request is open while storing": {steps: []func(chan<- types.ProgressProperties, *requests){ask, begin, send(types.ProgressEventRead, 100), wait(10 * stall)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				stalled := false
				open := &requests{}
				tracker := newTracker([]types.BlobInfo{{Digest: a, Size: 100}}, func(Progress) {}, open, stall, func() { stalled = true })
				events := make(chan types.ProgressProperties)
				go tracker.run(events)
				for _, step := range tc.steps {
					step(events, open)
				}
				synctest.Wait()
				close(events)
				assert.Equal(t, tc.want, stalled)
			})
		})
	}
}
