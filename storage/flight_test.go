package storage

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFlightIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flights
		var runs atomic.Int32
		gate := make(chan struct{})
		fn := func(context.Context, func(Progress)) (Image, error) {
			runs.Add(1)
			<-gate
			return Image{ID: "x"}, nil
		}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				image, err := f.do(t.Context(), "k", nil, fn)
				assert.NoError(t, err)
				assert.Equal(t, "x", image.ID)
			})
		}
		synctest.Wait()
		close(gate)
		wg.Wait()
		assert.EqualValues(t, 1, runs.Load())

		_, err := f.do(t.Context(), "k", nil, fn)
		require.NoError(t, err)
		assert.EqualValues(t, 2, runs.Load(), "a finished flight is not reused")
	})
}

func TestFlightsOfOtherKeysRunBesideIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flights
		inner := func(context.Context, func(Progress)) (Image, error) { return Image{ID: "inner"}, nil }
		image, err := f.do(t.Context(), "a", nil, func(ctx context.Context, _ func(Progress)) (Image, error) {
			return f.do(ctx, "b", nil, inner)
		})
		require.NoError(t, err)
		assert.Equal(t, "inner", image.ID)
	})
}

func TestFlightWaiterLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flights
		gate := make(chan struct{})
		cause := errors.New("no patience")
		leaving, leave := context.WithCancelCause(t.Context())
		var reports atomic.Int32
		var wg sync.WaitGroup
		fn := func(ctx context.Context, report func(Progress)) (Image, error) {
			report(Progress{Done: 1})
			<-gate
			assert.NoError(t, ctx.Err(), "the transfer goes on for the one who stays")
			report(Progress{Done: 2})
			return Image{ID: "x"}, nil
		}
		wg.Go(func() {
			_, err := f.do(leaving, "k", func(Progress) { reports.Add(1) }, fn)
			assert.ErrorIs(t, err, cause)
		})
		synctest.Wait()
		var late []Progress
		wg.Go(func() {
			image, err := f.do(t.Context(), "k", func(p Progress) { late = append(late, p) }, fn)
			assert.NoError(t, err)
			assert.Equal(t, "x", image.ID)
		})
		synctest.Wait()
		leave(cause)
		synctest.Wait()
		close(gate)
		wg.Wait()
		assert.EqualValues(t, 1, reports.Load(), "no report after leaving")
		assert.Equal(t, []Progress{{Done: 1}, {Done: 2}}, late, "who joins late is told what was reported last")
	})
}

func TestFlightLastWaiterLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flights
		ctx, leave := context.WithCancel(t.Context())
		gate := make(chan struct{})
		var cancelled error
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := f.do(ctx, "k", nil, func(ctx context.Context, _ func(Progress)) (Image, error) {
				<-ctx.Done()
				cancelled = context.Cause(ctx)
				<-gate // cleaning up takes a while
				return Image{}, ctx.Err()
			})
			assert.ErrorIs(t, err, context.Canceled)
		})
		synctest.Wait()
		leave()
		wg.Wait()

		// While the old transfer cleans up no new one starts, and who waits for that may leave too.
		second := func(context.Context, func(Progress)) (Image, error) { return Image{ID: "second"}, nil }
		impatient, leave2 := context.WithCancel(t.Context())
		wg.Go(func() {
			_, err := f.do(impatient, "k", nil, second)
			assert.ErrorIs(t, err, context.Canceled)
		})
		var started atomic.Bool
		wg.Go(func() {
			image, err := f.do(t.Context(), "k", nil, func(ctx context.Context, report func(Progress)) (Image, error) {
				started.Store(true)
				return second(ctx, report)
			})
			assert.NoError(t, err)
			assert.Equal(t, "second", image.ID)
		})
		synctest.Wait()
		leave2()
		synctest.Wait()
		assert.False(t, started.Load())
		close(gate)
		wg.Wait()
		assert.ErrorIs(t, cancelled, errAbandoned)
	})
}

func TestFlightsClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f flights
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := f.do(t.Context(), "k", nil, func(ctx context.Context, _ func(Progress)) (Image, error) {
				<-ctx.Done()
				return Image{}, errors.New("some other text")
			})
			assert.ErrorIs(t, err, ErrClosed)
		})
		synctest.Wait()
		f.close()
		wg.Wait()
		_, err := f.do(t.Context(), "k", nil, nil)
		require.ErrorIs(t, err, ErrClosed)
	})
}

func TestWaiterThatLeftIsToldNothing(t *testing.T) {
	var got []Progress
	w := &waiter{report: func(p Progress) { got = append(got, p) }}
	w.deliver(Progress{Done: 1})
	w.leave()
	w.deliver(Progress{Done: 2})
	assert.Equal(t, []Progress{{Done: 1}}, got)
}

func TestOldest(t *testing.T) {
	var f flights
	_, ok := f.oldest(time.Now(), time.Hour)
	assert.False(t, ok)
	before := time.Now()
	_, err := f.do(t.Context(), "one", nil, func(context.Context, func(Progress)) (Image, error) { return Image{}, nil })
	require.NoError(t, err)
	began, ok := f.oldest(time.Now(), time.Hour)
	assert.True(t, ok, "it has just ended")
	assert.False(t, began.Before(before))
	_, ok = f.oldest(time.Now(), 0)
	assert.False(t, ok)
	_, err = f.do(t.Context(), "two", nil, func(context.Context, func(Progress)) (Image, error) {
		running, ok := f.oldest(time.Now(), 0)
		assert.True(t, ok)
		assert.False(t, running.Before(began))
		all, _ := f.oldest(time.Now(), time.Hour)
		assert.Equal(t, began, all)
		return Image{}, nil
	})
	require.NoError(t, err)
	f.noteEnd(before, time.Now().Add(2*endedKept))
	assert.Len(t, f.ended, 1, "what ended long ago is forgotten")
}
