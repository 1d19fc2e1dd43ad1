package storage

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// stuckDisk is a pulse whose beats wait, and what has them go on.
func stuckDisk() (p *pulse, goOn func()) {
	stuck := make(chan struct{})
	return &pulse{beat: func() error { <-stuck; return nil }}, func() { close(stuck) }
}

func TestPulse(t *testing.T) {
	p := newPulse(Options{GraphRoot: t.TempDir()})
	require.NoError(t, p.ask(nil))
	require.NoError(t, newPulse(Options{GraphRoot: "/no/such/place"}).ask(nil), "another's to tell")
	p = &pulse{beat: func() error { return errors.New("input/output error") }}
	require.EqualError(t, p.ask(nil), "input/output error")
	require.EqualError(t, p.fault(), "input/output error")
	require.NoError(t, p.hung(), "it has answered")
}

func TestStuckDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, goOn := stuckDisk()
		begun := time.Now()
		require.ErrorIs(t, p.ask(nil), ErrHung)
		assert.Equal(t, pulseLimit, time.Since(begun))
		// Then it is known.
		require.ErrorIs(t, p.ask(nil), ErrHung)
		called := false
		_, err := bounded(p, func() (int, error) { called = true; return 0, nil })
		require.ErrorIs(t, err, ErrHung)
		assert.False(t, called)
		assert.Equal(t, pulseLimit, time.Since(begun))
		goOn()
		synctest.Wait()
		require.NoError(t, p.ask(nil))
	})
}

func TestBounded(t *testing.T) {
	type answer struct {
		value int
		err   error
	}
	for name, tc := range map[string]struct {
		takes   time.Duration // of the call
		stuck   bool          // the disk
		want    answer
		after   time.Duration
		noBeats bool
	}{
		"short":           {takes: time.Millisecond, want: answer{1, nil}, after: time.Millisecond, noBeats: true},
		"long":            {takes: time.Hour, want: answer{1, nil}, after: time.Hour},
		"on a stuck disk": {takes: time.Hour, stuck: true, want: answer{0, ErrHung}, after: pulsePatience + pulseLimit},
		"just in time":    {takes: pulseLimit, stuck: true, want: answer{1, nil}, after: pulseLimit},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				beats := 0
				p := &pulse{beat: func() error { beats++; return nil }}
				if tc.stuck {
					var goOn func()
					p, goOn = stuckDisk()
					defer goOn()
				}
				begun := time.Now()
				value, err := bounded(p, func() (int, error) { time.Sleep(tc.takes); return 1, nil })
				require.ErrorIs(t, err, tc.want.err)
				assert.Equal(t, tc.want.value, value)
				assert.Equal(t, tc.after, time.Since(begun))
				assert.Equal(t, tc.noBeats, beats == 0 && !tc.stuck)
				time.Sleep(tc.takes) // until the call has ended, too
			})
		})
	}
}
