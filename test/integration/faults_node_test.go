package integration

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// recoveryLimit is how long a node may take from the end of a fault until all
// works again by itself, where the machine has nothing else to do: see tryOut.
const recoveryLimit = 10 * time.Second

// sparedNode is a node with containers that have volumes and must not lose them,
// whatever happens around them: one with a volume from CRI-O's own root, and one
// from the root of vm.
type sparedNode struct {
	*realnode.Node

	random  *rand.Rand
	spared  []*spared
	passing atomic.Uint64 // counts names of pods

	usual time.Duration // that all takes which checkWorks does, without a fault

	mu      sync.Mutex
	without []error // containers that were seen to run without their volume
}

// spared is a container with a volume, which a test replaces only where the
// fault ends it.
type spared struct {
	handler string
	image   pushed
	pod     *realnode.Pod
	c       *realnode.Container
	pid     int
}

const sparedPath = "/vol"

// ended says that it has to be run anew.
func (s *spared) ended() { s.c, s.pid = nil, 0 }

func newSparedNode(t *testing.T, o realnode.Options, random *rand.Rand) *sparedNode {
	t.Helper()
	o.HandlerRoots = true
	n := &sparedNode{Node: realnode.Boot(t, o), random: random}
	for _, handler := range []string{"", "vm"} {
		n.spared = append(n.spared, &spared{handler: handler, image: pushFiles(t, n.Node, "spared/of-"+handler+"x:1", 3, 10)})
	}
	n.ensureSpared(t)
	await(t, n.checkLeft)
	return n
}

// ensureSpared runs the spared containers that do not run.
func (n *sparedNode) ensureSpared(t *testing.T) {
	t.Helper()
	for _, s := range n.spared {
		if s.c != nil {
			status, err := s.c.Status(t.Context())
			if err == nil && status.GetState() == cri.ContainerState_CONTAINER_RUNNING && alive(s.pid) {
				continue
			}
			await(t, func() error { return s.pod.Remove(t.Context()) })
			s.ended()
		}
		pod, err := n.RunPod(t.Context(), realnode.PodSpec{
			Handler: s.handler, Annotations: volumes(t, volume{Image: s.image.ref, MountPath: sparedPath}),
		})
		require.NoError(t, err)
		s.pod = pod
		s.c = run(t, s.pod, realnode.ContainerSpec{Command: []string{"/bin/sh", "-c", "while sleep 0.2; do echo alive; done"}})
		info, err := s.c.Info(t.Context())
		require.NoError(t, err)
		s.pid = info.PID
	}
}

// alive tells whether a container's process runs; one that merely was not waited for
// has no root.
func alive(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d/root/.", pid))
	return err == nil
}

// try runs a pod of the handler with a volume of the image, reads all of it in a
// container and removes the pod.
func (n *sparedNode) try(ctx context.Context, handler string, image pushed) error {
	text, err := json.Marshal([]volume{{Image: image.ref, MountPath: sparedPath, PullPolicy: "IfNotPresent"}})
	if err != nil {
		return err
	}
	call, done := patient(ctx)
	defer done()
	pod, err := n.RunPod(call, realnode.PodSpec{
		Name: fmt.Sprint("passing-", n.passing.Add(1)), Handler: handler, Annotations: map[string]string{domain: string(text)},
	})
	if err != nil {
		return err
	}
	c, err := n.runAgain(ctx, pod)
	if err == nil {
		err = n.reads(call, c, image)
	}
	return errors.Join(err, pod.Remove(call))
}

// patient returns the context for calls of CRI-O, which last longer than ctx. What
// its caller does not wait for, CRI-O makes and keeps for some minutes, should it be
// asked for again, and no list has it.
func patient(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
}

// reads returns an error unless the container reads all of its volume.
func (n *sparedNode) reads(ctx context.Context, c *realnode.Container, image pushed) error {
	info, err := c.Info(ctx)
	if err != nil {
		return err
	}
	return n.readsAs(info.PID, image)
}

// readsAs is reads of a container whose process is known. One that runs with another
// volume than it should have, or with none, is not forgotten, whatever comes of the
// error. A disk that fails is no loss.
func (n *sparedNode) readsAs(pid int, image pushed) error {
	err := image.checkFiles(fmt.Sprintf("/proc/%d/root%s", pid, sparedPath))
	if err != nil && alive(pid) && !errors.Is(err, unix.EIO) && !errors.Is(err, unix.EUCLEAN) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.without = append(n.without, fmt.Errorf("process %d runs without its volume: %w", pid, err))
	}
	return err
}

// runAgain runs a container as kubelet does, which tries again.
func (n *sparedNode) runAgain(ctx context.Context, pod *realnode.Pod) (*realnode.Container, error) {
	call, done := patient(ctx)
	defer done()
	for attempt := uint32(0); ; attempt++ {
		c, err := pod.Run(call, realnode.ContainerSpec{Attempt: attempt})
		if err == nil {
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// pullInto has ocihold pull an image for a handler.
func (n *sparedNode) pullInto(ctx context.Context, handler, ref string) (string, error) {
	resp, err := n.OciholdImages().PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: handler}})
	return resp.GetImageRef(), err
}

// removeFrom has ocihold remove an image of a handler's root; one that is not there is
// no error.
func (n *sparedNode) removeFrom(ctx context.Context, handler, ref string) error {
	_, err := n.OciholdImages().RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: handler}})
	return err
}

// checkFiles returns an error unless the directory has the image's files on disk, and
// no others.
func (p pushed) checkFiles(dir string) error {
	got := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return err
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, f); err != nil {
			return err
		}
		got[strings.TrimPrefix(path, dir+"/")] = hex.EncodeToString(sum.Sum(nil))
		return nil
	})
	if err == nil && !maps.Equal(got, p.sums) {
		err = fmt.Errorf("%s has %d files that are not those of %s, which has %d", dir, len(got), p.ref, len(p.sums))
	}
	return err
}

// checkSpared returns an error unless the spared containers that run read their
// volumes, and those that do not are as many as may have ended.
func (n *sparedNode) checkSpared(mayEnd bool) error {
	for _, s := range n.spared {
		if !alive(s.pid) {
			if mayEnd {
				continue
			}
			return fmt.Errorf("the container with %s has ended", s.image.ref)
		}
		if err := n.readsAs(s.pid, s.image); err != nil && alive(s.pid) {
			return fmt.Errorf("volume of a running container: %w", err)
		}
	}
	return nil
}

// checkBare returns an error for a container that runs without the volume that it
// was to have, or did when it was read. It asks the runtime's own records and the
// kernel, nobody else.
func (n *sparedNode) checkBare() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := errors.Join(n.without...); err != nil {
		return err
	}
	states, err := filepath.Glob(filepath.Join(n.Dir(), "run", "*", "*", "state.json"))
	if err != nil {
		return err
	}
	for _, file := range states {
		content, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		var state struct {
			PID    int `json:"init_process_pid"`
			Config struct{ Labels []string }
		}
		if json.Unmarshal(content, &state) != nil {
			continue // it is being written: nothing has started yet
		}
		asks := slices.ContainsFunc(state.Config.Labels, func(l string) bool { return strings.HasPrefix(l, domain) })
		if !asks || !slices.Contains(state.Config.Labels, "io.kubernetes.cri-o.ContainerType=container") {
			continue
		}
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", state.PID))
		if err != nil || strings.HasPrefix(string(name), "runc") {
			continue // it has ended, or has not started
		}
		mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", state.PID))
		if err != nil || len(mounts) == 0 {
			continue
		}
		if !strings.Contains(string(mounts), " "+sparedPath+" ") {
			return fmt.Errorf("bare: process %d, %s, runs without its volume: %s", state.PID, file, mounts)
		}
	}
	return nil
}

// checkWorks returns an error unless all that a node does works: pods with volumes
// from either root, pods without, pulls and removals for either root.
func (n *sparedNode) checkWorks(ctx context.Context, probe pushed) error {
	if err := n.ocihold(ctx, "status"); err != nil {
		return err
	}
	// Not by a connection that is there from before.
	conn, err := new(net.Dialer).DialContext(ctx, "unix", n.ImageSocket())
	if err != nil {
		return err
	}
	_ = conn.Close()
	for _, s := range n.spared {
		if err := n.try(ctx, s.handler, s.image); err != nil {
			return fmt.Errorf("volume for handler %q: %w", s.handler, err)
		}
		if _, err := n.pullInto(ctx, s.handler, probe.ref); err != nil {
			return fmt.Errorf("pull for handler %q: %w", s.handler, err)
		}
		if err := n.removeFrom(ctx, s.handler, probe.ref); err != nil {
			return fmt.Errorf("remove for handler %q: %w", s.handler, err)
		}
	}
	call, done := patient(ctx)
	defer done()
	pod, err := n.RunPod(call, realnode.PodSpec{Name: fmt.Sprint("plain-", n.passing.Add(1))})
	if err != nil {
		return err
	}
	_, err = pod.Run(call, realnode.ContainerSpec{})
	return errors.Join(err, pod.Remove(call))
}

// tryOut holds that all works, and from how long that takes on a machine that may have
// more to do, how long a recovery may.
func (n *sparedNode) tryOut(t *testing.T, probe pushed) {
	t.Helper()
	began := time.Now()
	require.NoError(t, n.checkWorks(t.Context(), probe))
	n.usual = time.Since(began)
}

// recoversSince waits until all works, which may take recoveryLimit, or ten times what
// is usual where that is more, from a fault that ended at some time. It returns how
// long it took.
func (n *sparedNode) recoversSince(t *testing.T, began time.Time, probe pushed) time.Duration {
	t.Helper()
	limit := max(recoveryLimit, 10*n.usual)
	ctx, cancel := context.WithTimeout(t.Context(), 3*limit)
	defer cancel()
	var failed time.Duration // after what it last did not work
	var why error
	for {
		tried := time.Now()
		attempt, done := context.WithTimeout(ctx, limit)
		err := n.checkWorks(attempt, probe)
		done()
		if err == nil {
			t.Logf("all works %.1fs after the fault, and did not after %.1fs: %v (without a fault it takes %.1fs)",
				time.Since(began).Seconds(), failed.Seconds(), why, n.usual.Seconds())
			require.Less(t, tried.Sub(began), limit)
			return time.Since(began)
		}
		failed, why = time.Since(began), err
		require.NoError(t, ctx.Err(), "it does not work: %s", err)
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// clearPods removes all pods but the spared ones.
func (n *sparedNode) clearPods(ctx context.Context) error {
	pods, err := n.Runtime().ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range pods.GetItems() {
		if slices.ContainsFunc(n.spared, func(s *spared) bool { return s.pod != nil && s.pod.ID == p.GetId() }) {
			continue
		}
		if err := n.Pod(p.GetId()).Remove(ctx); err != nil {
			return err
		}
	}
	return nil
}

// endForgotten ends what CRI-O has left of containers that it was killed over, and does
// not know any more. It has their volumes as long as it is there.
func (n *sparedNode) endForgotten(t *testing.T) {
	t.Helper()
	await(t, func() error { return n.clearPods(t.Context()) })
	var known []string
	for _, s := range n.spared {
		known = append(known, s.pod.ID, s.c.ID)
	}
	ended, err := n.EndForgotten(known...)
	require.NoError(t, err)
	if len(ended) > 0 {
		t.Logf("CRI-O has forgotten %q", ended)
	}
}

// checkLeft returns an error if anything is left, in either root, on the host or
// in directories for what passes, that is not for the spared containers.
func (n *sparedNode) checkLeft() error {
	var mounts []string
	for _, s := range n.spared {
		root, key := n.CRIORoot(), s.image.id
		if s.handler != "" {
			root, key = n.HandlerRoot(s.handler), s.handler+"."+key
		}
		mounts = append(mounts, key)
		for what, file := range map[string]string{
			"ocihold-lease-": "overlay-containers/containers.json", "ocihold-hold-": "overlay-layers/layers.json",
		} {
			names, err := namesIn(filepath.Join(root, file), what)
			if err != nil {
				return err
			}
			if !slices.Equal(names, []string{s.image.id}) {
				return fmt.Errorf("%s in %s are of %q, not of %s alone", what, root, names, s.image.id)
			}
		}
	}
	h, err := heldBy(n.Node)
	if err != nil {
		return err
	}
	slices.Sort(mounts)
	if got := h.mounts(n.Node); !slices.Equal(got, mounts) {
		return fmt.Errorf("mounts of %q, not of %q", got, mounts)
	}
	if !slices.Equal(h.Points, mounts) {
		return fmt.Errorf("mount points %q, not %q", h.Points, mounts)
	}
	for _, dir := range []string{"tmp", "lib/ocihold"} {
		err := filepath.WalkDir(filepath.Join(n.Dir(), dir), func(path string, _ fs.DirEntry, err error) error {
			if strings.Contains(path, "container_images_") {
				return fmt.Errorf("a download is left: %s", path)
			}
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unwritten are the files that a program leaves in the roots when it is killed as it
// writes.
func (n *sparedNode) unwritten(t *testing.T) (files []string) {
	t.Helper()
	for _, root := range []string{n.CRIORoot(), n.HandlerRoot("vm")} {
		for _, pattern := range []string{".tmp-*", "*/.tmp-*"} {
			found, err := filepath.Glob(filepath.Join(root, "overlay-*", pattern))
			require.NoError(t, err)
			files = append(files, found...)
		}
	}
	return files
}

// namesIn are the names that begin with prefix in a list of containers/storage,
// without it.
func namesIn(file, prefix string) ([]string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var records []struct {
		Names []string `json:"names"`
	}
	if err := json.Unmarshal(content, &records); err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	var names []string
	for _, r := range records {
		for _, name := range r.Names {
			if rest, ok := strings.CutPrefix(name, prefix); ok {
				names = append(names, rest)
			}
		}
	}
	return names, nil
}

// requireOnlySpared removes all other pods and waits until nothing but the spared
// containers' volumes is held.
func (n *sparedNode) requireOnlySpared(t *testing.T) {
	t.Helper()
	await(t, func() error { return n.clearPods(t.Context()) })
	wakeSettling(t, n.Node)
	defer func() {
		if t.Failed() {
			n.explain(t)
		}
	}()
	await(t, n.checkLeft)
	require.NoError(t, n.checkBare())
	if len(n.unwritten(t)) > 0 {
		// Those of CRI-O go with a sweep, such as there is at each start.
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
		require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
		require.Empty(t, n.unwritten(t))
	}
}

// explain shows who has what in its mount table, and what ocihold said last.
func (n *sparedNode) explain(t *testing.T) {
	files, _ := filepath.Glob("/proc/[0-9]*/mountinfo")
	for _, f := range files {
		mounts, _ := os.ReadFile(f)
		for line := range strings.Lines(string(mounts)) {
			if strings.Contains(line, " "+sparedPath+" ") && strings.Contains(line, n.Dir()) {
				command, _ := os.ReadFile(filepath.Join(filepath.Dir(f), "cmdline"))
				t.Logf("%s %q: %s", f, command, line)
			}
		}
	}
	log := strings.Split(logOf(t, n.Node, realnode.Ocihold), "\n")
	t.Log(strings.Join(log[max(0, len(log)-60):], "\n"))
}
