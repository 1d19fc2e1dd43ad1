package integration

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/test/realnode"
)

// fault is what befalls a program or what it keeps on disk.
type fault struct {
	name string
	// impossible tells whether it cannot befall the program during the action.
	impossible func(program string, a action) bool
	// quiet says that it cannot be repaired while the action goes on.
	quiet bool
	// reboots are the programs of which the repair boots the node anew.
	reboots []string
	// strike lets it befall, for some time, and returns what ends it. Where a
	// program was killed, that starts it again.
	strike func(t *testing.T, m *matrix, program string) (repair func())
}

const (
	// stopTime is how long a stopped program is stopped.
	stopTime = 5 * time.Second
	// badTime is how long other faults last.
	badTime = 2 * time.Second
)

var faults = []fault{
	{name: "killed", strike: func(t *testing.T, m *matrix, program string) func() {
		start := m.kill(t, program)
		last(t, badTime)
		return start
	}},
	{name: "stopped", strike: func(t *testing.T, m *matrix, program string) func() {
		m.signal(t, program, syscall.SIGSTOP)
		last(t, stopTime)
		return func() { m.signal(t, program, syscall.SIGCONT) }
	}},
	{
		name: "stopped with a lock",
		impossible: func(program string, a action) bool {
			// ocihold answers for a container that is created without a lock; CRI-O has
			// no part in what ocihold pulls and removes.
			return !hasRoot(program) || a.name == idle || program == realnode.Ocihold && a.name == creating ||
				program == realnode.CRIO && (a.name == "pull" || a.name == "remove")
		},
		strike: func(t *testing.T, m *matrix, program string) func() {
			m.stopWithLock(t, program)
			last(t, stopTime)
			return func() { m.signal(t, program, syscall.SIGCONT) }
		},
	},
	{name: "slow disk", strike: func(t *testing.T, m *matrix, program string) func() {
		m.disks[program].set(t, "slow", true)
		last(t, badTime)
		return func() { m.disks[program].set(t, "slow", false) }
	}},
	{
		name:       "full disk",
		impossible: func(program string, _ action) bool { return program == realnode.Registry }, // it is only read
		strike: func(t *testing.T, m *matrix, program string) func() {
			filler := fill(t, m.disks[program].point, 0)
			last(t, badTime)
			return func() { require.NoError(t, os.Remove(filler)) }
		},
	},
	{
		name: "failing disk", quiet: true, reboots: []string{realnode.Ocihold, realnode.CRIO, realnode.Registry, conmon},
		strike: func(t *testing.T, m *matrix, program string) func() {
			d := m.disks[program]
			d.set(t, "eio", true)
			last(t, badTime)
			require.NoError(t, m.checkBare())
			return func() {
				// The kernel writes to such a file system no more before it is mounted anew.
				d.set(t, "eio", false)
				m.halt(t)
				m.resume(t, program)
			}
		},
	},
	{name: "lost socket", strike: func(t *testing.T, m *matrix, program string) func() {
		for _, s := range m.sockets(t, program) {
			if err := os.Remove(s); err != nil { // conmon's may be gone with its container
				require.ErrorIs(t, err, os.ErrNotExist)
			}
		}
		last(t, badTime)
		switch program {
		case realnode.CRIO, realnode.Registry:
			return m.kill(t, program) // nothing of ours: somebody restarts it
		case conmon:
			return func() { m.replaceSpared(t) } // which have no sockets now
		}
		return func() {}
	}},
	{
		name: "truncated list", quiet: true, reboots: []string{realnode.CRIO},
		impossible: func(program string, _ action) bool { return !hasRoot(program) },
		strike: func(t *testing.T, m *matrix, program string) func() {
			return m.truncateList(t, program)
		},
	},
	{
		name: "read-only disk",
		impossible: func(program string, _ action) bool {
			return !hasRoot(program) // the registry's is only read, conmon has its log open
		},
		strike: func(t *testing.T, m *matrix, program string) func() {
			m.disks[program].setReadOnly(t, true)
			last(t, badTime)
			return func() {
				m.disks[program].setReadOnly(t, false)
				// containers/storage panics where it cannot open a lock file. What began while it
				// could ends the program, which whoever supervises it starts again.
				for _, p := range []string{realnode.CRIO, realnode.Ocihold} {
					if runs, err := m.Running(p); err == nil && !runs {
						t.Log(p, "has ended")
						require.NoError(t, m.Start(t.Context(), p))
					}
				}
			}
		},
	},
}

// hasRoot tells whether the program keeps a root of containers/storage.
func hasRoot(program string) bool { return program == realnode.Ocihold || program == realnode.CRIO }

// last is how long a fault lasts.
func last(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-t.Context().Done():
	case <-time.After(d):
	}
}

// signal sends a signal to the program, for conmon to each of its processes.
func (m *matrix) signal(t *testing.T, program string, sig syscall.Signal) {
	t.Helper()
	if program != conmon {
		require.NoError(t, m.Kill(t.Context(), program, sig))
		return
	}
	for _, pid := range m.conmons(t) {
		if err := unix.Kill(pid, sig); err != nil {
			require.ErrorIs(t, err, unix.ESRCH)
		}
	}
}

// kill kills the program and returns what starts it. No conmon is started for a
// container that has lost it: the spared ones are replaced.
func (m *matrix) kill(t *testing.T, program string) (start func()) {
	t.Helper()
	m.signal(t, program, syscall.SIGKILL)
	return func() {
		if program != conmon {
			require.NoError(t, m.Start(t.Context(), program))
			return
		}
		m.replaceSpared(t)
	}
}

// replaceSpared ends the spared containers, for others to be made in their place.
func (m *matrix) replaceSpared(t *testing.T) {
	t.Helper()
	require.NoError(t, m.checkSpared(true))
	for _, s := range m.spared {
		await(t, func() error { return s.pod.Remove(t.Context()) })
		s.ended()
	}
}

// conmons are the processes of conmon on this node.
func (m *matrix) conmons(t *testing.T) []int {
	t.Helper()
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	var pids []int
	for _, file := range commands {
		command, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(command, []byte(m.Dir()+"/")) {
			continue
		}
		program, _, _ := bytes.Cut(command, []byte{0})
		if filepath.Base(string(program)) == conmon {
			pid, err := strconv.Atoi(strings.Split(file, "/")[2])
			require.NoError(t, err)
			pids = append(pids, pid)
		}
	}
	require.NotEmpty(t, pids)
	return pids
}

// sockets are the sockets by which others reach the program.
func (m *matrix) sockets(t *testing.T, program string) []string {
	t.Helper()
	run := filepath.Join(m.Dir(), "run")
	switch program {
	case realnode.Ocihold:
		return []string{filepath.Join(m.RunDir(), "ocihold.sock"), m.ImageSocket()}
	case realnode.CRIO:
		return []string{filepath.Join(run, "crio.sock"), filepath.Join(run, "nri.sock")}
	case realnode.Registry:
		return []string{filepath.Join(run, "registry.sock")}
	}
	attach, err := filepath.Glob(filepath.Join(run, "attach", "*", "attach"))
	require.NoError(t, err)
	require.NotEmpty(t, attach)
	return attach
}

// stopWithLock stops the program at a moment when it holds a lock of one of the
// roots.
func (m *matrix) stopWithLock(t *testing.T, program string) {
	t.Helper()
	var inodes []string
	for _, root := range []string{m.CRIORoot(), m.HandlerRoot("vm")} {
		files, err := filepath.Glob(filepath.Join(root, "overlay-*", "*.lock"))
		require.NoError(t, err)
		for _, file := range files {
			info, err := os.Stat(file)
			require.NoError(t, err)
			inodes = append(inodes, fmt.Sprint(info.Sys().(*syscall.Stat_t).Ino))
		}
	}
	pid := m.PID(t, program)
	holds := regexp.MustCompile(fmt.Sprintf(`POSIX +ADVISORY +WRITE +%d [0-9a-f:]+:(%s) `, pid, strings.Join(inodes, "|")))
	require.Eventually(t, func() bool {
		require.NoError(t, m.Kill(t.Context(), program, syscall.SIGSTOP))
		locks, err := os.ReadFile("/proc/locks")
		require.NoError(t, err)
		for line := range strings.Lines(string(locks)) {
			if holds.MatchString(line) && !strings.Contains(line, "->") { // that waits for one
				t.Log("stopped with ", strings.TrimSpace(line))
				return true
			}
		}
		require.NoError(t, m.Kill(t.Context(), program, syscall.SIGCONT))
		return false
	}, 30*time.Second, time.Millisecond, "%s never has a lock", program)
}

// truncateList kills the program and cuts a list of its root, as some file systems do
// when power is lost, and has the program start on it. What is returned brings the
// list back and starts the program again. CRI-O has forgotten running containers by
// then, and has made anew what it took for missing: the node is booted anew.
func (m *matrix) truncateList(t *testing.T, program string) (repair func()) {
	t.Helper()
	root := m.CRIORoot()
	if program == realnode.Ocihold {
		root = m.HandlerRoot("vm")
	}
	lists := []string{"overlay-layers/layers.json", "overlay-images/images.json", "overlay-containers/containers.json"}
	file := filepath.Join(root, lists[m.random.IntN(len(lists))])
	m.signal(t, program, syscall.SIGKILL)
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	left := m.random.IntN(len(content))
	if m.random.IntN(2) == 0 {
		left = 0 // which containers/storage reads as a list of nothing
	}
	if program == realnode.CRIO && strings.Contains(file, "layers.json") {
		left = max(left, 1) // at its start CRI-O itself removes the files of layers that are not in the list
	}
	t.Logf("%s is cut from %d to %d bytes", file, len(content), left)
	require.NoError(t, os.Truncate(file, int64(left)))
	begun, cancel := context.WithTimeout(t.Context(), badTime)
	started := m.Start(begun, program)
	cancel()
	last(t, badTime)
	require.NoError(t, m.checkSpared(false))
	now, err := os.ReadFile(file)
	require.NoError(t, err)
	list, err := ociholdCommand(t, m.Node, "images")
	if program == realnode.Ocihold {
		require.Len(t, now, left, "it is left as it is")
	}
	// CRI-O may have written it anew, and ocihold may know from before what was in it.
	if len(now) == left && (program == realnode.Ocihold || !strings.Contains(list, m.spared[0].image.ref)) {
		assert.Contains(t, list+fmt.Sprint(err, started), file, "the file is named")
	}
	return func() {
		if program == realnode.CRIO {
			m.halt(t)
			m.resume(t, program)
		} else {
			m.signal(t, program, syscall.SIGKILL)
			require.NoError(t, os.WriteFile(file, content, 0o600))
			require.NoError(t, m.Start(t.Context(), program))
		}
		in := imagesOf(t, m.Node)
		for _, s := range m.spared {
			assert.True(t, s.handler == "" && program == realnode.CRIO || in.has(s.image.id), "nothing more is lost")
		}
		m.pushApps(t) // of those that were pulled meanwhile, the list has what is not there
	}
}
