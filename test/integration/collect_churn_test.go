package integration

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// churn is pods that come and go on a node whose collector works and whose clock
// goes on in leaps, and what must be true after each step.
type churn struct {
	n      *realnode.Node
	random *rand.Rand
	apps   []app
	pods   []*churnPod
	clock  time.Duration
	went   int // images
}

type churnPod struct {
	*realnode.Pod

	runs, mounts app
	container    *realnode.Container
}

const (
	churnHigh, churnLow = 60, 40
	churnMinAge         = time.Minute
	churnMaxAge         = 24 * time.Hour
)

// TestCollectorChurn lets pods with volumes come and go, leaps with the clock, and
// collects: no image in use is lost, no unused one is kept past the marks, and in
// the end nothing is left.
func TestCollectorChurn(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: settings(t, fmt.Sprintf(`
[handlers.vm]
max_bytes = "12MiB"
gc_high = %d
gc_low = %d
gc_min_age = %q
gc_max_age = %q
gc_interval = "24h"
`, churnHigh, churnLow, churnMinAge, churnMaxAge))})
	c := &churn{n: n, random: seeded(t)}
	base := appLayer("base", busybox(t)...)
	for i := range 10 {
		layers := [][]images.Entry{base, {images.Big(fmt.Sprint("big-", i%5), 1<<20, uint64(i%5))}}
		layers = append(layers, []images.Entry{images.Big(fmt.Sprint("own-", i), 1<<20, uint64(100+i))})
		c.apps = append(c.apps, pushApp(t, n, fmt.Sprintf("churn/app-%d:1", i), layers...))
	}
	steps := count(40, 3000)
	for step := range steps {
		what := c.step(t)
		c.requireHeld(t, fmt.Sprintf("step %d: %s", step, what))
	}
	t.Logf("%d steps, %s, %d images went", steps, c.clock.Round(time.Minute), c.went)
	require.NotZero(t, c.went)
	for len(c.pods) > 0 {
		c.end(t, 0)
	}
	n.AssertClean(t)
	await(t, func() error { // what volumes held is let go
		shift(t, n, churnMaxAge+churnMinAge)
		gc(t, n)
		if left := layersOf(t, n.HandlerRoot("vm")); len(left) > 0 {
			return fmt.Errorf("layers are left: %q", left)
		}
		return nil
	})
}

// step does one thing and says what.
func (c *churn) step(t *testing.T) string {
	t.Helper()
	switch draw := c.random.IntN(10); {
	case draw < 4 && len(c.pods) < 5:
		p := &churnPod{runs: c.any(), mounts: c.any()}
		p.Pod = runPod(t, c.n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: p.mounts.ref, MountPath: "/vol"})})
		p.container = run(t, p.Pod, realnode.ContainerSpec{Image: pullFor(t, c.n, "vm", p.runs.ref), UserImage: p.runs.ref})
		c.pods = append(c.pods, p)
		return fmt.Sprintf("a pod runs %s and mounts %s", p.runs.ref, p.mounts.ref)
	case draw < 6 && len(c.pods) > 0:
		c.end(t, c.random.IntN(len(c.pods)))
		return "a pod ends"
	case draw < 7:
		a := c.any()
		pullFor(t, c.n, "vm", a.ref)
		return a.ref + " is pulled"
	default:
		leap := time.Duration(c.random.Int64N(int64(2 * time.Hour)))
		c.clock += leap
		shift(t, c.n, leap)
		c.collect(t)
		return fmt.Sprintf("%s pass and images are collected", leap)
	}
}

func (c *churn) any() app { return c.apps[c.random.IntN(len(c.apps))] }

func (c *churn) end(t *testing.T, i int) {
	t.Helper()
	require.NoError(t, c.pods[i].Remove(t.Context()))
	c.pods = slices.Delete(c.pods, i, i+1)
}

// collect collects and checks what is said of it.
func (c *churn) collect(t *testing.T) {
	t.Helper()
	result := gc(t, c.n)
	require.Empty(t, result.Faults)
	there := imagesOf(t, c.n)["vm"]
	for _, image := range result.Images {
		require.Equal(t, !image.Goes, slices.Contains(there, image.ID), "%s: %s", image.ID, image.Why)
		if image.Goes {
			c.went++
		}
		if image.Why == "there is room" {
			require.LessOrEqual(t, result.After, result.Capacity*churnHigh/100, "unused image %s is kept", image.ID)
		}
	}
}

// requireHeld holds that all that pods use is there and whole.
func (c *churn) requireHeld(t *testing.T, when string) {
	t.Helper()
	there := imagesOf(t, c.n)["vm"]
	for _, p := range c.pods {
		for _, a := range []app{p.runs, p.mounts} {
			require.Contains(t, there, a.ids["vm"], "%s: %s is in use", when, a.ref)
		}
		info, err := p.container.Info(t.Context())
		require.NoError(t, err, when)
		root := fmt.Sprintf("/proc/%d/root", info.PID)
		p.runs.requireFiles(t, root)
		p.mounts.requireFiles(t, root+"/vol")
	}
}

// Whichever comes first, the container or the collection of its image: a container
// that there is has all its files.
func TestCreateAgainstCollect(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: settings(t,
		"[handlers.vm]\nmax_bytes = \"16MiB\"\ngc_high = 2\ngc_low = 1\ngc_interval = \"24h\"\n")})
	a := pushApp(t, n, "raced:1", appLayer("lower", busybox(t)...), appLayer("upper"))
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm"})
	random := seeded(t)
	outcomes := map[string]int{}
	for i := range count(40, 1000) {
		id := pullFor(t, n, "vm", a.ref)
		begin := time.Now()
		gc(t, n)
		ahead := time.Duration(random.Int64N(2 * int64(time.Since(begin))))
		shift(t, n, time.Hour, id)
		var collected gcResult
		ended := make(chan error, 1)
		go func() {
			var err error
			collected, err = tryGC(t, n)
			ended <- err
		}()
		time.Sleep(ahead)
		c, created := pod.Create(t.Context(), realnode.ContainerSpec{Image: id, UserImage: a.ref, Attempt: uint32(i)})
		require.NoError(t, <-ended)
		goes := !slices.Contains(imagesOf(t, n)["vm"], id)
		// The collection that follows each pull may have been late, and faster.
		if at := slices.IndexFunc(collected.Images, func(image gcImage) bool { return image.ID == id }); at >= 0 {
			require.Equal(t, goes, collected.Images[at].Goes, "%d", i)
		}
		if created != nil {
			require.True(t, goes, "%d: nor is there a container: %v", i, created)
			outcomes["collected"]++
			continue
		}
		require.False(t, goes, "%d: collected under a container", i)
		require.NoError(t, c.Start(t.Context()))
		a.requireRead(t, c)
		require.NoError(t, c.Remove(t.Context()))
		outcomes["created"]++
	}
	t.Log(outcomes)
	require.Len(t, slices.Collect(maps.Keys(outcomes)), 2)
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
