package integration

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/test/realnode"
)

// System calls that change what is on disk or mounted, or that take locks.
var (
	fileCalls  = []string{"openat", "write", "fsync", "syncfs", "renameat", "unlinkat", "mkdirat", "symlinkat", "linkat", "fchmodat", "utimensat", "lsetxattr", "fcntl", "close"}
	mountCalls = []string{"fsopen", "fsconfig", "fsmount", "move_mount", "mkdirat", "umount2", "unlinkat", "openat"}
)

// killedWork is work of ocihold's during which it is killed.
type killedWork struct {
	name  string
	calls []string
	// prepare sets up and returns the work, which returns when it is done, or when
	// ctx ends because ocihold is dead.
	prepare func(t *testing.T, n *sparedNode, app pushed) func(ctx context.Context)
}

var killedWorks = []killedWork{
	{"pull", fileCalls, func(_ *testing.T, n *sparedNode, app pushed) func(context.Context) {
		return func(ctx context.Context) { _, _ = n.pullInto(ctx, "vm", app.ref) }
	}},
	{"lease", fileCalls, giveVolume},
	{"mount", mountCalls, giveVolume},
	{"sweep", append(mountCalls, fileCalls...), func(t *testing.T, n *sparedNode, app pushed) func(context.Context) {
		pod, err := n.RunPod(t.Context(), volumePodSpec(t, app))
		require.NoError(t, err)
		run(t, pod, realnode.ContainerSpec{})
		return func(ctx context.Context) {
			_ = pod.Remove(ctx)
			for n.checkLeft() != nil && waited(ctx) {
			}
		}
	}},
	{"collect", fileCalls, func(t *testing.T, n *sparedNode, app pushed) func(context.Context) {
		id, err := n.pullInto(t.Context(), "vm", app.ref)
		require.NoError(t, err)
		shift(t, n.Node, 48*time.Hour, id)
		return func(ctx context.Context) { _ = n.ocihold(ctx, "gc") }
	}},
}

// giveVolume has a container get a volume of an image that is there.
func giveVolume(t *testing.T, n *sparedNode, app pushed) func(context.Context) {
	_, err := n.pullInto(t.Context(), "vm", app.ref)
	require.NoError(t, err)
	return func(ctx context.Context) {
		if pod, err := n.RunPod(ctx, volumePodSpec(t, app)); err == nil {
			_, _ = n.runAgain(ctx, pod)
		}
	}
}

func volumePodSpec(t *testing.T, image pushed) realnode.PodSpec {
	t.Helper()
	return realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: image.ref, MountPath: sparedPath})}
}

// waited lets a moment pass, and is false when ctx has ended.
func waited(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(20 * time.Millisecond):
		return true
	}
}

// TestKilledAtSystemCall kills ocihold as it enters a system call for the Nth time
// while it is at work. Started again, it leaves nothing of what was half done, and
// no running container has lost its volume.
func TestKilledAtSystemCall(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	n := newSparedNode(t, realnode.Options{OciholdConf: settings(t, "[handlers.vm]\ngc_max_age = \"24h\"\n")}, rand.New(rand.NewPCG(seed, 0)))
	probe, app := pushFiles(t, n.Node, "faults/probe:1", 1, 2), pushFiles(t, n.Node, "faults/app:1", 3, 4)
	for _, w := range killedWorks {
		t.Run(w.name, func(t *testing.T) {
			n.killedAt(t, w.calls, func(call string, nth int) bool {
				work := w.prepare(t, n, app)
				tracer := exec.CommandContext(t.Context(), "strace", append(killer(call, nth), "-p", fmt.Sprint(n.pid(t, realnode.Ocihold)))...)
				awaitAttached(t, tracer)
				killed := n.workUntilDead(t, work)
				_ = tracer.Process.Signal(syscall.SIGINT)
				_ = tracer.Wait()
				return killed
			}, probe, app)
		})
	}
	t.Run("adopt", func(t *testing.T) {
		n.killedAt(t, append(fileCalls, mountCalls...), func(call string, nth int) bool {
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
			program := []string{filepath.Join(n.Dir(), "bin", "ocihold"), "--config", n.OciholdConf(), "run"}
			tracer := exec.CommandContext(t.Context(), "strace", append(killer(call, nth), program...)...)
			tracer.Env = n.DaemonEnv()
			tracer.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			log, err := os.OpenFile(n.LogFile(realnode.Ocihold), os.O_APPEND|os.O_WRONLY, 0)
			require.NoError(t, err)
			defer log.Close()
			tracer.Stdout, tracer.Stderr = log, log
			require.NoError(t, tracer.Start())
			ended := make(chan struct{})
			go func() { _ = tracer.Wait(); close(ended) }()
			for {
				select {
				case <-ended:
					return true
				case <-time.After(50 * time.Millisecond):
				}
				if n.ocihold(t.Context(), "status") == nil {
					// It came through. SIGTERM passes on to the program, which ends strace.
					_ = tracer.Process.Signal(syscall.SIGTERM)
					<-ended
					return false
				}
			}
		}, probe, app)
	})
	for _, s := range n.spared {
		require.NoError(t, s.pod.Remove(t.Context()))
	}
	n.AssertClean(t)
}

// killedAt has ocihold killed at one of the calls, as often as it is worth, and looks at
// the node after each.
func (n *sparedNode) killedAt(t *testing.T, calls []string, work func(call string, nth int) (killed bool), probe, app pushed) {
	t.Helper()
	kills, tries := 0, 0
	for kills < count(2, 40) {
		tries++
		require.Less(t, tries, 20*(kills+5), "it is hardly ever killed")
		// strace counts for each thread by itself: small numbers are the common ones.
		call, nth := calls[n.random.IntN(len(calls))], 1+int(n.random.ExpFloat64()*6)
		killed := work(call, nth)
		if killed {
			kills++
			t.Logf("killed at %s %d", call, nth)
			require.NoError(t, n.checkBare())
		}
		running, err := n.Running(realnode.Ocihold)
		require.NoError(t, err)
		if !running {
			require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		}
		if killed {
			n.recovers(t, probe)
		}
		require.NoError(t, n.checkSpared(false))
		n.requireOnlySpared(t)
		if _, err := n.pullInto(t.Context(), "vm", app.ref); killed && err == nil {
			require.NoError(t, n.try(t.Context(), "vm", app), "the image is whole")
		}
		await(t, func() error { return n.removeFrom(t.Context(), "vm", app.ref) })
		await(t, n.checkLeft)
	}
	t.Logf("%d kills in %d tries", kills, tries)
}

// killer are the arguments by which strace kills what it traces as that enters the
// call for the nth time.
func killer(call string, nth int) []string {
	return []string{"-f", "-o", "/dev/null", "-e", "trace=" + call, "-e", fmt.Sprintf("inject=%s:signal=SIGKILL:when=%d", call, nth)}
}

// awaitAttached starts strace and returns when it traces.
func awaitAttached(t *testing.T, tracer *exec.Cmd) {
	t.Helper()
	out, err := tracer.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, tracer.Start())
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadString('\n')
		require.NoError(t, err, "%s", line)
		if strings.Contains(line, " attached") {
			break
		}
	}
	go func() { _, _ = io.Copy(io.Discard, lines) }()
}

// workUntilDead does the work, and tells whether ocihold was killed by then.
func (n *sparedNode) workUntilDead(t *testing.T, work func(context.Context)) (killed bool) {
	t.Helper()
	fd, err := unix.PidfdOpen(n.pid(t, realnode.Ocihold), 0)
	if err != nil {
		require.ErrorIs(t, err, unix.ESRCH)
		return true
	}
	defer unix.Close(fd)
	dead := func() bool {
		ready, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return ready > 0
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan struct{})
	go func() { work(ctx); close(done) }()
	for {
		select {
		case <-done:
			return dead()
		case <-time.After(20 * time.Millisecond):
			if dead() {
				cancel()
			}
		}
	}
}
