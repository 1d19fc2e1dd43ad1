package integration

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// Volumes are where CRI-O has its mounts, also when that is not where the host
// has them, nor where an earlier CRI-O had.
func TestCRIOsMountNamespace(t *testing.T) {
	for _, propagation := range []string{"private", "slave"} {
		t.Run(propagation, func(t *testing.T) {
			n := realnode.Boot(t, realnode.Options{})
			img, later := pushFiles(t, n, "ns/a:1", 3, 5), pushFiles(t, n, "ns/b:1", 1, 5)
			mounted := func(pid int) (keys []string) {
				t.Helper()
				for m := range strings.SplitSeq(mountsOf(t, pid), "\n") {
					if fields := strings.Fields(m); len(fields) > 4 && strings.HasPrefix(fields[4], mountsDir(n)+"/") {
						keys = append(keys, strings.TrimPrefix(fields[4], mountsDir(n)+"/"))
					}
				}
				return keys
			}
			restart := func(program string, sig syscall.Signal) {
				t.Helper()
				require.NoError(t, n.Kill(t.Context(), program, sig))
				require.NoError(t, n.Start(t.Context(), program))
				awaitRegistered(t, n)
			}
			annotations := volumes(t, volume{Image: img.ref, MountPath: "/vol"})

			// A volume from when the two shared it.
			shared := runPod(t, n, realnode.PodSpec{Annotations: annotations})
			first := run(t, shared, realnode.ContainerSpec{})
			assert.Equal(t, []string{img.id}, mounted(os.Getpid()))

			n.Under(realnode.CRIO, "unshare", "--mount", "--propagation", propagation)
			restart(realnode.CRIO, syscall.SIGKILL)
			assert.Empty(t, mounted(os.Getpid()))
			img.assertRead(t, first, "/vol")
			pod := runPod(t, n, realnode.PodSpec{Annotations: annotations})
			second := run(t, pod, realnode.ContainerSpec{})
			img.assertRead(t, second, "/vol")
			assert.Empty(t, mounted(os.Getpid()))
			assert.Equal(t, []string{img.id}, mounted(n.PID(t, realnode.CRIO)))

			for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
				restart(realnode.Ocihold, sig)
				assert.Equal(t, []string{img.id}, mounted(n.PID(t, realnode.CRIO)), "taken over")
				assert.Empty(t, mounted(os.Getpid()))
			}
			// CRI-O itself forgets the pods that it had in another namespace.
			require.NoError(t, pod.Remove(t.Context()))
			restart(realnode.CRIO, syscall.SIGTERM)
			img.assertRead(t, first, "/vol")
			third := run(t, runPod(t, n, realnode.PodSpec{Annotations: volumes(t,
				volume{Image: img.ref, MountPath: "/vol"}, volume{Image: later.ref, MountPath: "/later"})}), realnode.ContainerSpec{})
			img.assertRead(t, third, "/vol")
			later.assertRead(t, third, "/later")

			removeOtherPods(t, n, shared)
			await(t, func() error {
				if leases, err := n.Leases(); err != nil || len(leases) != 1 {
					return errors.Join(err, fmt.Errorf("leased are %q", leases))
				}
				return nil
			})
			img.assertRead(t, first, "/vol")
			require.NoError(t, shared.Remove(t.Context()))
			await(t, func() error {
				if keys := mounted(n.PID(t, realnode.CRIO)); len(keys) > 0 {
					return fmt.Errorf("mounted are %q", keys)
				}
				return nil
			})
			// And back.
			n.Under(realnode.CRIO)
			restart(realnode.CRIO, syscall.SIGTERM)
			last := runPod(t, n, realnode.PodSpec{Annotations: annotations})
			img.assertRead(t, run(t, last, realnode.ContainerSpec{}), "/vol")
			assert.Equal(t, []string{img.id}, mounted(os.Getpid()))
			require.NoError(t, last.Remove(t.Context()))
			n.AssertClean(t)
		})
	}
}
