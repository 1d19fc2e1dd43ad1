package integration

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// stopped is how long the plugin is stopped: longer than CRI-O waits for it.
const stopped = 5 * time.Second

// Pods are made all the while as the plugin is stopped, and as it is killed or
// told to end at each step of its registration.
func TestPodsWhileThePluginFails(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	nri := newRelay(t, n)
	restartWith(t, n, fmt.Sprintf("[nri]\nsocket = %q\n", nri.socket))
	steps := nri.steps()
	t.Log("a registration has", steps, "steps") // with pods on the node more, and no fewer
	require.Greater(t, steps, 5, "connect, and two each to register, configure and synchronize")
	signal := func(t *testing.T, sig syscall.Signal) {
		t.Helper()
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, sig))
	}
	c := newCrowd(t, n)
	t.Run("stopped", func(t *testing.T) {
		for range count(1, 10) {
			before := c.now()
			freeze(t, n)
			end := time.NewTimer(stopped)
			c.await(t, func(now tally) bool { return now.refused > before.refused && now.plain > before.plain })
			<-end.C
			signal(t, syscall.SIGCONT)
			c.awaitMore(t)
		}
	})
	// register starts the daemon anew and has it get a signal before a step.
	register := func(t *testing.T, step int, sig syscall.Signal) {
		t.Helper()
		signal(t, syscall.SIGKILL)
		sent := make(chan error, 1)
		nri.doBefore(step, func() { sent <- n.Kill(context.WithoutCancel(t.Context()), realnode.Ocihold, sig) })
		if sig != syscall.SIGSTOP {
			require.ErrorContains(t, n.Start(t.Context(), realnode.Ocihold), "ocihold ended at once", "step %d", step)
			require.NoError(t, <-sent)
			return
		}
		started := make(chan error, 1)
		go func() { started <- n.Start(t.Context(), realnode.Ocihold) }()
		require.NoError(t, <-sent)
		<-time.NewTimer(stopped).C
		signal(t, syscall.SIGCONT)
		require.NoError(t, <-started)
	}
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "ends": syscall.SIGTERM} {
		t.Run(name+" at registration", func(t *testing.T) {
			before := c.now()
			for range count(1, 5) {
				for step := range steps {
					register(t, step+1, sig)
				}
			}
			c.await(t, func(now tally) bool { return now.refused > before.refused && now.plain > before.plain })
			require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
			c.awaitMore(t)
		})
	}
	t.Run("stopped at registration", func(t *testing.T) {
		for range count(1, 5) {
			for _, step := range []int{1, steps / 2, steps} {
				register(t, step, syscall.SIGSTOP)
			}
		}
		c.awaitMore(t)
	})
	c.leave(t)
	n.AssertClean(t)
}

// Pods are made all the while as CRI-O is restarted.
func TestPodsWhileCRIORestarts(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	c := newCrowd(t, n)
	c.awaitMore(t)
	for range count(3, 20) {
		before := c.now()
		require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGTERM))
		require.NoError(t, n.Start(t.Context(), realnode.CRIO))
		c.await(t, func(now tally) bool { return now.plain > before.plain })
	}
	c.awaitMore(t)
	c.leave(t)
	n.AssertClean(t)
}

// tally counts how containers fared.
type tally struct {
	given   int // have the volume they asked for
	refused int // by the guard
	plain   int // asked for none, and run
	lost    int // calls that CRI-O did not answer
}

// crowd makes pods, one after the other of each kind, as kubelet does: it tries
// again until the containers run. Whatever is against the rules it keeps as an
// error.
type crowd struct {
	node    *realnode.Node
	ref     string
	leaving chan struct{}
	making  sync.WaitGroup

	mu    sync.Mutex
	tally tally
	errs  []error
}

func newCrowd(t *testing.T, n *realnode.Node) *crowd {
	t.Helper()
	c := &crowd{node: n, ref: push(t, n, "plugin/model:1", version("one")), leaving: make(chan struct{})}
	list := volumes(t, volume{Image: c.ref, MountPath: "/models"})
	for _, annotations := range []map[string]string{list, {serverKey: list[domain]}, nil} {
		c.making.Go(func() {
			for {
				select {
				case <-c.leaving:
					return
				default:
					c.visit(annotations)
				}
			}
		})
	}
	t.Cleanup(c.end)
	return c
}

func (c *crowd) end() {
	select {
	case <-c.leaving:
	default:
		close(c.leaving)
	}
	c.making.Wait()
}

// leave has the crowd finish what it is at and go, and shows how it fared.
func (c *crowd) leave(t *testing.T) {
	t.Helper()
	c.end()
	t.Logf("%+v", c.now())
	require.NoError(t, errors.Join(c.errs...))
	removeOtherPods(t, c.node, &realnode.Pod{}) // those whose making CRI-O did not tell of
}

func (c *crowd) now() tally {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tally
}

func (c *crowd) note(f func(*tally)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.tally)
}

func (c *crowd) fault(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.errs = append(c.errs, err)
}

// await waits until so much has happened.
func (c *crowd) await(t *testing.T, enough func(tally) bool) {
	t.Helper()
	require.Eventually(t, func() bool { return enough(c.now()) }, crowdLimit, 20*time.Millisecond)
}

// awaitMore waits until the plugin gives volumes as ever: to containers whose
// pods are made from now on, too.
func (c *crowd) awaitMore(t *testing.T) {
	t.Helper()
	before := c.now()
	c.await(t, func(now tally) bool { return now.given > before.given+3 && now.plain > before.plain+3 })
}

// crowdLimit bounds how long a pod may take.
const crowdLimit = 5 * time.Minute

// visit makes a pod, of two containers of which the annotations are for one, or
// which have none, and removes it.
func (c *crowd) visit(annotations map[string]string) {
	ctx, cancel := context.WithTimeout(context.Background(), crowdLimit)
	defer cancel()
	pod, err := c.node.RunPod(ctx, realnode.PodSpec{Annotations: annotations})
	switch {
	case unanswered(err):
		c.note(func(now *tally) { now.lost++ })
		return
	case err != nil:
		c.fault(err)
		return
	}
	wants := map[string]bool{"server": annotations != nil, "other": annotations[domain] != ""}
	for name := range wants {
		if err := c.make(ctx, pod, name, wants[name]); err != nil {
			c.fault(fmt.Errorf("container %s: %w", name, err))
		}
	}
	if err := c.inspect(ctx, pod, wants); err != nil {
		c.fault(err)
	}
	if err := c.answered(func() error { return pod.Remove(ctx) }); err != nil {
		c.fault(err)
	}
}

// make makes a container, again and again where it asks for a volume.
func (c *crowd) make(ctx context.Context, pod *realnode.Pod, name string, wants bool) error {
	for attempt := uint32(0); ; attempt++ {
		_, err := pod.Run(ctx, realnode.ContainerSpec{Name: name, Attempt: attempt})
		switch {
		case err == nil && wants:
			c.note(func(now *tally) { now.given++ })
			return nil
		case err == nil:
			c.note(func(now *tally) { now.plain++ })
			return nil
		case unanswered(err):
			c.note(func(now *tally) { now.lost++ })
		case !wants:
			return err
		case strings.Contains(err.Error(), "ocihold-guard: image volume /models of container "+name) &&
			strings.Contains(err.Error(), " but not injected: is ocihold running?"):
			c.note(func(now *tally) { now.refused++ })
		case !strings.Contains(err.Error(), "will be tried again"):
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not well again: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// inspect looks into all of the pod's containers that run, also those that CRI-O
// has not told of when they were made.
func (c *crowd) inspect(ctx context.Context, pod *realnode.Pod, wants map[string]bool) error {
	return c.answered(func() error {
		list, err := c.node.Runtime().ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{
			PodSandboxId: pod.ID, State: &cri.ContainerStateValue{State: cri.ContainerState_CONTAINER_RUNNING},
		}})
		for _, container := range list.GetContainers() {
			reply, failed := c.node.Runtime().ExecSync(ctx, &cri.ExecSyncRequest{
				ContainerId: container.GetId(), Cmd: []string{"/bin/sh", "-c", "cat /models/version || true"}, Timeout: 60,
			})
			if err = errors.Join(err, failed); failed != nil {
				continue
			}
			if got := string(reply.GetStdout()); (got == "one") != wants[container.GetMetadata().GetName()] {
				err = errors.Join(err, fmt.Errorf("container %s of a pod has %q at /models", container.GetMetadata().GetName(), got))
			}
		}
		return err
	})
}

// answered does something until CRI-O answers.
func (c *crowd) answered(do func() error) error {
	for {
		err := do()
		if !unanswered(err) {
			return err
		}
		c.note(func(now *tally) { now.lost++ })
		time.Sleep(50 * time.Millisecond)
	}
}

// unanswered reports whether CRI-O has ended before it answered.
func unanswered(err error) bool {
	s, ok := status.FromError(err)
	return ok && s.Code() == codes.Unavailable
}
