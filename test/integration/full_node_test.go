package integration

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// fullNode is a node with many containers, each with an image of its own and one
// that all share as volumes.
type fullNode struct {
	*realnode.Node

	nri        *relay
	ready      string // the URL
	pods       []*realnode.Pod
	containers []*realnode.Container // in the order of their images
}

// eachPod is how many containers a pod has.
const eachPod = 25

func newFullNode(t testing.TB, n *realnode.Node, containers int) *fullNode {
	t.Helper()
	address := freeAddress(t)
	f := &fullNode{Node: n, nri: newRelay(t, n), ready: "http://" + address + "/readyz"}
	restartWith(t, n, fmt.Sprintf("[nri]\nsocket = %q\n[metrics]\naddress = %q\n", f.nri.socket, address))
	shared := push(t, n, "full/shared:1", version("shared"))
	for range containers / eachPod {
		names := make([]string, eachPod)
		annotations := map[string]string{}
		for i := range names {
			names[i] = fmt.Sprintf("c%d", i)
			text := fmt.Sprint(len(f.containers) + i)
			own := push(t, n, "full/"+text+":1", version(text))
			list := volumes(t, volume{Image: own, MountPath: "/own"}, volume{Image: shared, MountPath: "/shared"})
			annotations[domain+"/container."+names[i]] = list[domain]
		}
		pod, err := n.RunPod(t.Context(), realnode.PodSpec{Annotations: annotations})
		require.NoError(t, err)
		f.pods = append(f.pods, pod)
		for _, name := range names {
			f.containers = append(f.containers, run(t, pod, realnode.ContainerSpec{Name: name}))
		}
	}
	return f
}

// assertRead asserts that all containers read what is theirs.
func (f *fullNode) assertRead(t testing.TB) {
	t.Helper()
	for i, c := range f.containers {
		info, err := c.Info(t.Context())
		require.NoError(t, err)
		for path, want := range map[string]string{"own": fmt.Sprint(i), "shared": "shared"} {
			got, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/%s/version", info.PID, path))
			require.NoError(t, err)
			assert.Equal(t, want, string(got))
		}
	}
}

// restart ends a program and starts it again, and returns how long it took from
// then, or, with CRI-O, from its first answer on, until ocihold was ready.
func (f *fullNode) restart(t testing.TB, name string, sig syscall.Signal) time.Duration {
	t.Helper()
	require.NoError(t, f.Kill(t.Context(), name, sig))
	began := time.Now()
	started := make(chan error, 1)
	if name == realnode.CRIO {
		started <- f.Start(t.Context(), name)
		began = time.Now()
	} else {
		go func() { started <- f.Start(t.Context(), name) }()
	}
	require.Eventually(t, func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.ready, http.NoBody)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		return err == nil && errors.Join(response.Body.Close()) == nil && response.StatusCode == http.StatusOK
	}, time.Minute, 5*time.Millisecond)
	took := time.Since(began)
	require.NoError(t, <-started)
	return took
}

// Restarted over many containers, ocihold takes over all that it had.
func TestFullNode(t *testing.T) {
	many := count(50, 500)
	n := realnode.Boot(t, realnode.Options{})
	f := newFullNode(t, n, many)
	before := snapshotOf(t, n, f.containers)
	require.Len(t, before.Held.Leases, many+1)
	require.Len(t, before.Held.mounts(n), many+1)
	require.Len(t, before.Given, 2*many)
	for _, end := range []struct {
		name string
		sig  syscall.Signal
	}{
		{realnode.Ocihold, syscall.SIGKILL},
		{realnode.Ocihold, syscall.SIGTERM},
		{realnode.CRIO, syscall.SIGTERM},
	} {
		t.Log(end.name, end.sig, f.restart(t, end.name, end.sig))
		requireSnapshot(t, n, before, f.containers)
		f.assertRead(t)
	}
	for _, pod := range f.pods {
		require.NoError(t, pod.Remove(t.Context()))
	}
	n.AssertClean(t)
}

// BenchmarkFullNode shows how long it takes with 500 containers, and as many
// images in use, until ocihold is ready: from its start on, and from when a
// restarted CRI-O answers. And how long Synchronize takes, by which CRI-O tells it
// of all containers.
func BenchmarkFullNode(b *testing.B) {
	n := bootForBench(b, realnode.Options{})
	f := newFullNode(b, n, 500)
	for b.Loop() {
		took := map[string][]time.Duration{}
		for range 5 {
			for _, name := range []string{realnode.Ocihold, realnode.CRIO} {
				took[name] = append(took[name], f.restart(b, name, syscall.SIGTERM))
				took["synchronize"] = append(took["synchronize"], f.nri.since(configured))
			}
		}
		median := func(what string) float64 {
			slices.Sort(took[what])
			b.Log(what, took[what])
			return float64(quantile(took[what], 0.5).Microseconds()) / 1000
		}
		b.ReportMetric(median(realnode.Ocihold), "restart-ms")
		b.ReportMetric(median(realnode.CRIO), "crio-restart-ms")
		b.ReportMetric(median("synchronize"), "synchronize-ms")
	}
}
