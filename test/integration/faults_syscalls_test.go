package integration

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// stateCalls are the system calls by which ocihold and its children change what
// outlives them: files, directories, attributes, mounts, loop devices, and what
// others are told over sockets, by write. One that is killed on entering such a call
// leaves what all calls before it have made; so calls that only read are not among
// them, nor those that take locks, which the kernel lets go, nor openat: what it
// creates is there when the next call is entered.
var stateCalls = strings.Join([]string{
	"write", "pwrite64", "ftruncate", "fallocate", "copy_file_range", "fsync", "fdatasync", "syncfs",
	"mkdirat", "unlinkat", "renameat", "renameat2", "linkat", "symlinkat", "mknodat",
	"fchmod", "fchmodat", "fchown", "fchownat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr",
	"mount", "umount2", "fsopen", "fsconfig", "fsmount", "open_tree", "move_mount", "mount_setattr", "ioctl",
}, ",")

// scratchSize is that of volumes that are written to.
const scratchSize = "16MiB"

// callNode is a node whose ocihold is killed at system calls.
type callNode struct {
	*sparedNode

	app   pushed   // an image that comes and goes
	paths []string // all that is kept when nothing is under way
}

// operation is work of ocihold's during which it is killed.
type operation struct {
	name string
	// starts says that the work is that of a start.
	starts bool
	// prepare sets up, with ocihold at rest, and returns what has ocihold do it. That may
	// be done again after it broke off, ends early when ctx does, and returns nil only
	// where all came out as it is to be.
	prepare func(t *testing.T, n *callNode, handler string) func(ctx context.Context) error
}

var operations = []operation{
	{name: "pull", prepare: func(_ *testing.T, n *callNode, handler string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := n.pullInto(ctx, handler, n.app.ref)
			return err
		}
	}},
	{name: "lease", prepare: func(t *testing.T, n *callNode, handler string) func(context.Context) error {
		_, err := n.pullInto(t.Context(), handler, n.app.ref)
		require.NoError(t, err)
		return func(ctx context.Context) error {
			_, _, err := n.runVolume(ctx, handler, n.app, writable{ReadOnly: true})
			return err
		}
	}},
	{name: "mount", prepare: func(_ *testing.T, n *callNode, handler string) func(context.Context) error {
		// The image is leased already, and mounted; over that comes room to write.
		of := n.spared[slices.IndexFunc(n.spared, func(s *spared) bool { return s.handler == handler })]
		return func(ctx context.Context) error {
			_, c, err := n.runVolume(ctx, handler, of.image, writable{ScratchSize: scratchSize})
			if err != nil {
				return err
			}
			out, err := c.Exec(ctx, "/bin/sh", "-ec", "echo written > "+sparedPath+"/written")
			if err == nil && out.ExitCode != 0 {
				err = fmt.Errorf("write to the volume: %s", out.Stderr)
			}
			return err
		}
	}},
	{name: "sweep", prepare: func(t *testing.T, n *callNode, handler string) func(context.Context) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		pod, _, err := n.runVolume(ctx, handler, n.app, writable{ScratchSize: scratchSize})
		require.NoError(t, err)
		return func(ctx context.Context) error {
			if err := pod.Remove(ctx); err != nil {
				return err
			}
			return awaited(ctx, n.checkLeft)
		}
	}},
	{name: "adopt", starts: true, prepare: func(t *testing.T, n *callNode, handler string) func(context.Context) error {
		// The volumes of the spared containers are taken over, and what has ended
		// meanwhile is let go.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		pod, _, err := n.runVolume(ctx, handler, n.app, writable{ScratchSize: scratchSize})
		require.NoError(t, err)
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL))
		require.NoError(t, pod.Remove(t.Context()))
		return func(ctx context.Context) error {
			if err := n.start(ctx); err != nil {
				return err
			}
			return awaited(ctx, n.checkLeft)
		}
	}},
	{name: "collect", prepare: func(t *testing.T, n *callNode, _ string) func(context.Context) error {
		_, err := n.pullInto(t.Context(), "vm", n.app.ref)
		require.NoError(t, err)
		return func(ctx context.Context) error {
			if slices.Contains(imagesOf(t, n.Node)["vm"], n.app.id) {
				shift(t, n.Node, 48*time.Hour, n.app.id)
			}
			if err := n.ocihold(ctx, "gc"); err != nil {
				return err
			}
			if slices.Contains(imagesOf(t, n.Node)["vm"], n.app.id) {
				return errors.New("the image was not collected")
			}
			return nil
		}
	}},
}

// TestKilledAtSystemCall kills ocihold as it enters a system call for the Nth time
// while it is at work. Started again, it leaves nothing of what was half done, does
// it when it is asked again, and no running container has lost its volume.
func TestKilledAtSystemCall(t *testing.T) {
	o := realnode.Options{OciholdConf: settings(t, "[volumes]\npin = true\n\n[handlers.vm]\ngc_max_age = \"24h\"\n")}
	n := &callNode{sparedNode: newSparedNode(t, o, seeded(t))}
	n.app = pushFiles(t, n.Node, "faults/app:1", 3, 4)
	for _, op := range operations {
		t.Run(op.name, func(t *testing.T) { n.sweep(t, op) })
	}
	for _, s := range n.spared {
		require.NoError(t, s.pod.Remove(t.Context()))
	}
	n.AssertClean(t)
}

// point is where ocihold is killed: as one of its threads enters the call for the nth
// time. strace counts for each thread by itself.
type point struct {
	handler, call string
	nth           int
}

// sweep has the operation done without a kill, to learn which points there are, and
// then with a kill at some of them, or at all.
func (n *callNode) sweep(t *testing.T, op operation) {
	t.Helper()
	handlers := []string{"", "vm"}
	if op.name == "collect" {
		handlers = handlers[1:] // CRI-O's root is kubelet's to collect
	}
	var points []point
	for _, handler := range handlers {
		trace := n.traced(t, op, op.prepare(t, n, handler))
		require.False(t, trace.killed)
		n.mustStart(t)
		n.clear(t)
		n.paths = n.kept(t)
		all, most := callsOf(trace)
		t.Logf("handler %q: %d calls, of one thread at most %v", handler, all, most)
		for _, call := range slices.Sorted(maps.Keys(most)) {
			for nth := range most[call] {
				points = append(points, point{handler, call, nth + 1})
			}
		}
	}
	want := count(2, len(points))
	kills, children, missed := 0, 0, 0
	for _, i := range n.random.Perm(len(points)) {
		if kills+missed >= want {
			break
		}
		reached := false
		// Threads share the work as it happens. One that made so many calls before may
		// make fewer now.
		for at := points[i]; at.nth > 0 && !reached; at.nth /= 2 {
			trace := n.killedAt(t, op, at)
			reached = trace.killed || trace.died()
			if trace.killed {
				kills++
			} else if reached {
				children++
			}
		}
		if !reached {
			missed++ // not each time is each call needed
		}
	}
	t.Logf("killed %d times at %d points; %d times a child was; %d points were not reached", kills, len(points), children, missed)
	require.GreaterOrEqual(t, 2*kills, want, "it is hardly ever killed")
}

// killedAt has ocihold do the operation, and killed at a point of it, and looks at the
// node.
func (n *callNode) killedAt(t *testing.T, op operation, at point) trace {
	t.Helper()
	do := op.prepare(t, n, at.handler)
	trace := n.traced(t, op, do, "-e", fmt.Sprintf("inject=%s:signal=SIGKILL:when=%d", at.call, at.nth))
	if trace.killed || trace.died() {
		all, last := 0, ""
		for _, line := range callLine.FindAllStringSubmatch(trace.log, -1) {
			all++
			if line[2] == at.call {
				last = line[0]
			}
		}
		t.Logf("%+v: killed %t at call %d: %s", at, trace.killed, all, last)
	}
	require.NoError(t, n.checkBare())
	require.NoError(t, n.checkSpared(false))
	if op.name == "collect" && trace.killed {
		n.age(t) // what is left of an image that was half removed goes when it is an hour old
	}
	n.mustStart(t)
	n.requireReadable(t)
	if trace.killed || trace.died() {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, do(ctx), "done again")
		require.NoError(t, n.checkBare())
		require.NoError(t, n.checkSpared(false))
	}
	if op.name == "pull" {
		require.NoError(t, n.try(t.Context(), at.handler, n.app))
	}
	n.clear(t)
	await(t, func() error { return n.checkPaths(t) })
	return trace
}

// trace is what strace saw of an operation.
type trace struct {
	log     string
	threads []string // ocihold's own
	killed  bool     // ocihold was
}

// died tells whether strace has killed ocihold, or a child of it.
func (tr trace) died() bool { return killedLine.MatchString(tr.log) }

// traced does the operation under strace. Where ocihold was not killed, it is done.
func (n *callNode) traced(t *testing.T, op operation, do func(context.Context) error, inject ...string) (tr trace) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "strace")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	read := func() string {
		written, err := os.ReadFile(file)
		require.NoError(t, err)
		return string(written)
	}
	args := append([]string{"-f", "-y", "-s", "80", "-o", file, "-e", "trace=" + stateCalls}, inject...)
	detach := func() {}
	if op.starts {
		n.Under(realnode.Ocihold, append([]string{"strace", "-D"}, args...)...)
		defer n.Under(realnode.Ocihold)
	} else {
		tracer := exec.CommandContext(t.Context(), "strace", append(args, "-p", fmt.Sprint(n.PID(t, realnode.Ocihold)))...)
		awaitAttached(t, tracer)
		detach = sync.OnceFunc(func() {
			// By SIGINT it would wait for each thread, and for ever where they die just now.
			_ = tracer.Process.Kill()
			_ = tracer.Wait()
		})
		defer detach()
	}
	runs := func() bool {
		is, err := n.Running(realnode.Ocihold)
		require.NoError(t, err)
		return is
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	// One that is being killed is seen to run for some time yet.
	own := func() bool {
		return slices.ContainsFunc(killedLine.FindAllStringSubmatch(read(), -1), func(line []string) bool {
			return slices.Contains(tr.threads, line[1])
		})
	}
	died := func() bool { return (trace{log: read()}).died() }
	began := !op.starts
	for ended := false; !ended; {
		select {
		case err := <-done:
			ended = true
			if runs() && !died() {
				require.NoError(t, err)
			}
		case <-time.After(20 * time.Millisecond):
			if began = began || runs(); !began {
				continue
			}
			tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", n.PID(t, realnode.Ocihold)))
			for _, task := range tasks {
				if !slices.Contains(tr.threads, task.Name()) {
					tr.threads = append(tr.threads, task.Name())
				}
			}
			switch {
			case !runs() || own():
				cancel()
			case died() && !op.starts:
				detach() // else each child that is started instead would be killed
			}
		}
	}
	if tr.killed = own() || !runs(); tr.killed {
		require.Eventually(t, func() bool { return !runs() && died() }, time.Minute, 10*time.Millisecond, "ocihold ended by itself")
	} else {
		detach()
		if op.starts {
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
			end := regexp.MustCompile(fmt.Sprintf(`(?m)^%d +\+\+\+`, n.PID(t, realnode.Ocihold)))
			require.Eventually(t, func() bool { return end.MatchString(read()) }, time.Minute, 10*time.Millisecond)
			tr.killed = died() // as it ended
		}
	}
	tr.log = read()
	return tr
}

// start starts ocihold, if it does not run, and waits until it is registered.
func (n *callNode) start(ctx context.Context) error {
	runs, err := n.Running(realnode.Ocihold)
	if err == nil && !runs {
		err = n.Start(ctx, realnode.Ocihold)
	}
	if err != nil {
		return err
	}
	return awaited(ctx, func() error { return n.ocihold(ctx, "status") })
}

// mustStart is start, also where ocihold is just ending.
func (n *callNode) mustStart(t *testing.T) {
	t.Helper()
	all, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, awaited(all, func() error {
		ctx, cancel := context.WithTimeout(all, 10*time.Second)
		defer cancel()
		return n.start(ctx)
	}))
}

// runVolume runs a pod with a volume of the image, and a container, and reads all of it
// there.
func (n *callNode) runVolume(ctx context.Context, handler string, image pushed, how writable) (*realnode.Pod, *realnode.Container, error) {
	how.volume = volume{Image: image.ref, MountPath: sparedPath}
	text, err := json.Marshal([]writable{how})
	if err != nil {
		return nil, nil, err
	}
	pod, err := n.RunPod(ctx, realnode.PodSpec{
		Name: fmt.Sprint("volume-", n.passing.Add(1)), Handler: handler, Annotations: map[string]string{domain: string(text)},
	})
	if err != nil {
		return nil, nil, err
	}
	c, err := n.runAgain(ctx, pod)
	if err != nil {
		return nil, nil, err
	}
	info, err := c.Info(ctx)
	if err != nil {
		return nil, nil, err
	}
	return pod, c, image.checkFiles(fmt.Sprintf("/proc/%d/root%s", info.PID, sparedPath))
}

// age makes the layers of vm, and what there is of the image that comes and goes, a day
// older, while ocihold does not run.
func (n *callNode) age(t *testing.T) {
	t.Helper()
	yesterday := time.Now().AddDate(0, 0, -1)
	err := os.Chtimes(filepath.Join(n.HandlerRoot("vm"), "overlay-images", n.app.id), yesterday, yesterday)
	if err != nil {
		require.ErrorIs(t, err, os.ErrNotExist)
	}
	file := filepath.Join(n.HandlerRoot("vm"), "overlay-layers", "layers.json")
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	var layers []map[string]any
	require.NoError(t, json.Unmarshal(content, &layers))
	for _, l := range layers {
		l["created"] = yesterday
	}
	content, err = json.Marshal(layers)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, content, 0o600))
}

// requireReadable holds that the lists of all roots are read by CRI-O, by crictl from
// ocihold, and by ocihold's command.
func (n *callNode) requireReadable(t *testing.T) {
	t.Helper()
	for _, line := range [][]string{{"crictl", "images"}, {"ocihold", "images"}} {
		await(t, func() error {
			_, err := command(t, n.Node, line[0], line[1:]...)
			return err
		})
	}
	await(t, func() error {
		_, err := n.Images().ListImages(t.Context(), &cri.ListImagesRequest{})
		return err
	})
}

// clear removes all pods but the spared ones and the image that comes and goes, and
// waits until ocihold has let go of all that was theirs.
func (n *callNode) clear(t *testing.T) {
	t.Helper()
	await(t, func() error { return n.clearPods(t.Context()) })
	await(t, n.checkLeft)
	for _, s := range n.spared {
		await(t, func() error { return n.removeFrom(t.Context(), s.handler, n.app.ref) })
	}
	require.NoError(t, checkPinned(t, n.Node, n.spared[0].image.id))
}

// kept are the files and directories, down to records and layers, of all that ocihold
// keeps or shares, and the loop devices of what containers write.
func (n *callNode) kept(t *testing.T) (all []string) {
	t.Helper()
	dirs := []string{
		n.RunDir(), filepath.Join(n.RunDir(), "roots"), filepath.Join(n.RunDir(), "roots", "vm"), n.CRIORunRoot(),
		filepath.Join(n.Dir(), "lib", "ocihold"), filepath.Join(n.Dir(), "tmp"),
	}
	for _, root := range []string{n.CRIORoot(), n.HandlerRoot("vm")} {
		for _, sub := range []string{"overlay", "overlay-layers", "overlay-images", "overlay-containers"} {
			dirs = append(dirs, filepath.Join(root, sub))
		}
	}
	for _, dir := range dirs {
		for _, pattern := range []string{"*", "*/*"} {
			found, err := filepath.Glob(filepath.Join(dir, pattern))
			require.NoError(t, err)
			all = append(all, found...)
		}
	}
	devices, err := loopDevices(n.Dir())
	require.NoError(t, err)
	return append(all, devices...)
}

// checkPaths returns an error unless there is what there was when nothing was under way.
func (n *callNode) checkPaths(t *testing.T) error {
	t.Helper()
	now := n.kept(t)
	more := slices.DeleteFunc(slices.Clone(now), func(p string) bool { return slices.Contains(n.paths, p) })
	less := slices.DeleteFunc(slices.Clone(n.paths), func(p string) bool { return slices.Contains(now, p) })
	if len(more) > 0 || len(less) > 0 {
		return fmt.Errorf("left are %q, gone are %q", more, less)
	}
	return nil
}

// awaited waits until check returns nil, or ctx ends.
func awaited(ctx context.Context, check func() error) error {
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Lines of strace's.
var (
	callLine   = regexp.MustCompile(`(?m)^(\d+) +(\w+)\(.*`)
	killedLine = regexp.MustCompile(`(?m)^(\d+) +\+\+\+ killed by SIGKILL`)
)

// callsOf counts the system calls of ocihold's own threads, and of each call how many
// the thread made that made most.
func callsOf(tr trace) (all int, most map[string]int) {
	of := map[[2]string]int{}
	most = map[string]int{}
	for _, line := range callLine.FindAllStringSubmatch(tr.log, -1) {
		if thread, call := line[1], line[2]; slices.Contains(tr.threads, thread) {
			all++
			of[[2]string{thread, call}]++
			most[call] = max(most[call], of[[2]string{thread, call}])
		}
	}
	return all, most
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
