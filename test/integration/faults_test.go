package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// combination is one fault of one program while the node is about something.
type combination struct {
	program string
	fault   fault
	action  action
}

func (c combination) name() string { return c.program + "/" + c.fault.name + "/" + c.action.name }

// conmon watches containers, one process for each.
const conmon = "conmon"

// diskOf is where each program has what it keeps on disk, in the node's
// directory.
var diskOf = map[string]string{
	realnode.Ocihold:  "lib/handlers/vm",
	realnode.CRIO:     "lib/root",
	realnode.Registry: "lib/registry",
	conmon:            "log/pods",
}

// combinations are all that can be, and how many cannot.
func combinations() (possible []combination, impossible int) {
	for _, program := range []string{realnode.Ocihold, realnode.CRIO, realnode.Registry, conmon} {
		for _, f := range faults {
			for _, a := range actions {
				if f.impossible != nil && f.impossible(program, a) {
					impossible++
					continue
				}
				possible = append(possible, combination{program, f, a})
			}
		}
	}
	return possible, impossible
}

// TestFaults puts the programs of a node, and what they keep on disk, out of order
// while it is about something. No container ever runs without its volume, no
// volume of a running container is lost, nothing is left behind, and all works
// again soon after.
func TestFaults(t *testing.T) {
	random := seeded(t)
	all, impossible := combinations()
	t.Logf("%d combinations, %d more are impossible", len(all), impossible)
	require.GreaterOrEqual(t, len(all), 60)
	chosen := random.Perm(len(all))[:count(12, len(all))]
	slices.Sort(chosen)

	m := newMatrix(t, random)
	for _, i := range chosen {
		c := all[i]
		t.Run(c.name(), func(t *testing.T) { m.run(t, c) })
	}
	m.clear(t)
}

// matrix is a node on bad disks.
type matrix struct {
	*sparedNode

	disks map[string]*badDisk
	probe pushed   // an image that is only pulled to see whether that works
	apps  []pushed // images that actions pull and remove

	series  int  // of apps
	broken  bool // a combination failed, and may have left anything
	slowest time.Duration
}

func newMatrix(t *testing.T, random *rand.Rand) *matrix {
	t.Helper()
	dir, err := os.MkdirTemp("", "node")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	disks := newBadDisks(t, dir, diskOf)
	m := &matrix{disks: disks, sparedNode: newSparedNode(t, realnode.Options{Dir: dir, OciholdConf: settings(t, `
[handlers.vm]
gc_max_age = "24h"
`)}, random)}
	m.probe = pushFiles(t, m.Node, "faults/probe:1", 1, 2)
	m.pushApps(t)
	return m
}

// pushApps makes new images for the actions.
func (m *matrix) pushApps(t *testing.T) {
	t.Helper()
	m.series++
	m.apps = nil
	for i := range 4 {
		m.apps = append(m.apps, pushFiles(t, m.Node, fmt.Sprintf("faults/app:%d.%d", m.series, i), 3, 4))
	}
}

// run is one combination.
func (m *matrix) run(t *testing.T, c combination) {
	if m.broken {
		m.repair(t)
	}
	m.broken = true
	m.ensureSpared(t)
	await(t, m.checkLeft)
	handler := "vm"
	if c.program == realnode.CRIO {
		handler = ""
	}
	m.tryOut(t, m.probe)
	a := begin(t, c.action.prepare(t, m, handler))
	// Any moment of the action may be the one.
	last(t, time.Duration(m.random.Int64N(int64(time.Second))))
	before := a.made.Load()
	repair := c.fault.strike(t, m, c.program)
	require.NoError(t, m.checkBare())
	during := a.made.Load() - before
	if c.fault.quiet {
		a.stop()
	}
	reboots := slices.Contains(c.fault.reboots, c.program)
	repaired := time.Now()
	repair()
	if reboots || c.program == conmon { // whose containers are replaced
		repaired = time.Now()
	}
	m.slowest = max(m.slowest, m.recoversSince(t, repaired, m.probe))
	a.stop()
	t.Logf("%d attempts before, %d during the fault", before, during)

	require.NoError(t, m.checkSpared(reboots || c.program == conmon))
	m.ensureSpared(t)
	if c.program == realnode.CRIO {
		m.endForgotten(t)
	}
	m.requireOnlySpared(t)
	m.requireWholeImages(t)
	m.requireNoDevices(t)
	m.broken = false
}

// attempts are those of an action.
type attempts struct {
	made atomic.Int64
	stop func() // and wait for the last to end
}

// begin has attempts made one after the other. What comes of them while the node is
// out of order is not asked.
func begin(t *testing.T, attempt func(ctx context.Context, i int) error) *attempts {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	a := &attempts{stop: func() { cancel(); <-ended }}
	t.Cleanup(a.stop)
	go func() {
		defer close(ended)
		for i := 0; ctx.Err() == nil; i++ {
			if attempt(ctx, i) != nil {
				last(t, 100*time.Millisecond) // what does not work is not tried all the time
			}
			a.made.Add(1)
		}
	}()
	return a
}

// repair makes the node good for the next combination after one that failed, and may
// have left any of it in any state.
func (m *matrix) repair(t *testing.T) {
	t.Helper()
	for _, d := range m.disks {
		d.set(t, "slow", false)
		d.set(t, "eio", false)
	}
	m.halt(t)
	for _, d := range m.disks {
		require.NoError(t, os.RemoveAll(filepath.Join(d.point, "filler")))
	}
	m.wipe(t, m.HandlerRoot("vm"))
	m.resume(t, realnode.CRIO)
	m.pushApps(t)
	require.NoError(t, m.clearPods(t.Context()))
	m.mu.Lock()
	defer m.mu.Unlock()
	m.without = nil
}

// halt ends all and mounts the disks anew.
func (m *matrix) halt(t *testing.T) {
	t.Helper()
	require.NoError(t, m.Halt(t.Context()))
	for _, s := range m.spared {
		s.pid = 0
	}
	for _, d := range m.disks {
		d.awaitDetached(t)
		d.mount(t)
	}
}

// resume starts all again after a fault of a program that ended the node. Where that
// was CRI-O's, whose lists may be anything by then, its root is wiped first, as one
// would do.
func (m *matrix) resume(t *testing.T, program string) {
	t.Helper()
	if program == realnode.CRIO {
		m.wipe(t, m.CRIORoot())
	}
	require.NoError(t, m.Resume(t.Context()))
	_, err := m.Pull(t.Context(), m.BaseImage())
	require.NoError(t, err)
}

// wipe removes all of a root but what marks it as a handler's.
func (m *matrix) wipe(t *testing.T, root string) {
	t.Helper()
	entries, err := filepath.Glob(filepath.Join(root, "[^.]*"))
	require.NoError(t, err)
	for _, e := range entries {
		require.NoError(t, os.RemoveAll(e))
	}
}

// requireWholeImages reads each image of the actions that is listed, in whichever
// root, and removes it.
func (m *matrix) requireWholeImages(t *testing.T) {
	t.Helper()
	in := imagesOf(t, m.Node)
	for _, app := range m.apps {
		for _, s := range m.spared {
			root := s.handler
			if root == "" {
				root = "default"
			}
			if slices.Contains(in[root], app.id) {
				require.NoError(t, m.try(t.Context(), s.handler, app))
			}
			await(t, func() error { return m.removeFrom(t.Context(), s.handler, app.ref) })
		}
	}
	await(t, m.checkLeft)
}

// requireNoDevices holds that each disk has its one loop device, and that there is no
// other.
func (m *matrix) requireNoDevices(t *testing.T) {
	t.Helper()
	devices, err := loopDevices(filepath.Dir(m.disks[conmon].shown))
	require.NoError(t, err)
	require.Len(t, devices, len(m.disks))
	inside, err := loopDevices(m.Dir())
	require.NoError(t, err)
	require.Empty(t, inside)
}

// clear ends what the matrix has on the node.
func (m *matrix) clear(t *testing.T) {
	t.Helper()
	t.Logf("the slowest recovery took %s", m.slowest)
	if m.broken {
		return
	}
	for _, s := range m.spared {
		require.NoError(t, s.pod.Remove(t.Context()))
	}
	require.Eventually(t, func() bool {
		h, err := heldBy(m.Node)
		return err == nil && len(h.mounts(m.Node))+len(h.Leases) == 0
	}, time.Minute, 100*time.Millisecond)
	m.AssertClean(t)
}
