package integration

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/realnode"
)

// TestLostEvents ends containers in ways of which NRI tells nothing: what was
// held for them goes with the next comparison, and not before.
func TestLostEvents(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	before := layers(t, n)
	img := pushFiles(t, n, "lost:1", 3, 10)
	spec := realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})}
	released := func(t *testing.T) {
		t.Helper()
		requireNothingHeld(t, n)
		_, err := command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
		require.Equal(t, before, layers(t, n))
	}
	restart := func(t *testing.T, meanwhile func()) {
		t.Helper()
		for _, name := range []string{realnode.CRIO, realnode.Ocihold} {
			require.NoError(t, n.Kill(t.Context(), name, syscall.SIGKILL))
		}
		meanwhile()
		for _, name := range []string{realnode.CRIO, realnode.Ocihold} {
			require.NoError(t, n.Start(t.Context(), name))
		}
		awaitRegistered(t, n)
	}
	kill := func(t *testing.T, pid int) {
		t.Helper()
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		await(t, func() error {
			if syscall.Kill(pid, 0) == nil {
				return errors.New("the process has not ended")
			}
			return nil
		})
	}
	pidOf := func(t *testing.T, c *realnode.Container) int {
		t.Helper()
		info, err := c.Info(t.Context())
		require.NoError(t, err)
		require.Positive(t, info.PID)
		return info.PID
	}

	t.Run("containers that fail in the runtime", func(t *testing.T) {
		pod := runPod(t, n, spec)
		run(t, pod, realnode.ContainerSpec{}) // the image is there from here on
		for attempt := range uint32(3) {
			failing := realnode.ContainerSpec{Name: "fails", Attempt: attempt, Command: []string{"/none"}}
			c, err := pod.Create(t.Context(), failing)
			if err == nil {
				err = c.Start(t.Context())
			}
			require.Error(t, err)
		}
		require.NoError(t, checkHeld(n, img.id))
		require.NoError(t, pod.Remove(t.Context()))
		released(t)
	})

	t.Run("exited while CRI-O and ocihold are away", func(t *testing.T) {
		pod := runPod(t, n, spec)
		c := run(t, pod, realnode.ContainerSpec{})
		pid := pidOf(t, c)
		restart(t, func() { kill(t, pid) })
		await(t, func() error {
			status, err := c.Status(t.Context())
			if err == nil && status.GetState() != cri.ContainerState_CONTAINER_EXITED {
				err = errors.New("the container has not exited")
			}
			return err
		})
		settle(t, n, img.id) // its pod is there, and may start another
		img.assertRead(t, run(t, pod, realnode.ContainerSpec{Attempt: 1}), "/vol")
		require.NoError(t, pod.Remove(t.Context()))
		released(t)
	})

	t.Run("forgotten by CRI-O", func(t *testing.T) {
		pod := runPod(t, n, spec)
		c := run(t, pod, realnode.ContainerSpec{})
		pid := pidOf(t, c)
		restart(t, func() { disown(t, n, c) })
		require.NoError(t, pod.Remove(t.Context()))
		settle(t, n, img.id) // by what the kernel says
		kill(t, pid)
		wakeSettling(t, n)
		requireNothingHeld(t, n)
		_, err := command(t, n, "crictl", "rmi", img.ref)
		require.NoError(t, err)
	})

	t.Run("a sandbox whose caller did not wait", func(t *testing.T) {
		id := pullFor(t, n, "", img.ref)
		remove := func() error {
			_, err := n.OciholdImages().RemoveImage(t.Context(), &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: id}})
			return err
		}
		// CRI-O tells of it at the very end, which may come late.
		told := false
		for wait := time.Duration(0); !told && wait < time.Second; wait += 10 * time.Millisecond {
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGSTOP))
			ctx, leave := context.WithTimeout(t.Context(), wait)
			pod, err := n.RunPod(ctx, spec)
			leave()
			require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGCONT))
			if err == nil {
				require.NoError(t, pod.Remove(t.Context()))
			}
			err = remove()
			told = err != nil && strings.Contains(err.Error(), "which asks for it as a volume")
			pullFor(t, n, "", img.ref)
		}
		require.True(t, told)
		list, err := n.Runtime().ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
		require.NoError(t, err)
		require.Empty(t, list.GetItems())
		require.Eventually(t, func() bool { return remove() == nil }, time.Minute, 100*time.Millisecond)
		requireNothingHeld(t, n)
		require.Contains(t, logOf(t, n, realnode.Ocihold), "sandbox is gone, which the runtime did not tell")
	})
	n.AssertClean(t)
}
