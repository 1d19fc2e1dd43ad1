package integration

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/realnode"
)

// TestMetrics asks a node's daemon, as Prometheus does, what has happened.
func TestMetrics(t *testing.T) {
	free, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: settings(t, fmt.Sprintf("[metrics]\naddress = %q\n", address))})
	a := pushApp(t, n, "counted:1", appLayer("lower", busybox(t)...))
	id := pullFor(t, n, "vm", a.ref)
	pod := runPod(t, n, realnode.PodSpec{Handler: "vm", Annotations: volumes(t, volume{Image: a.ref, MountPath: "/vol"})})
	run(t, pod, realnode.ContainerSpec{Image: id, UserImage: a.ref})
	require.ErrorContains(t, removeFrom(t, n, "vm", a.ref), "in use")
	gc(t, n)
	// The roots are looked at every few seconds.
	requireMetrics(t, address,
		`ocihold_pulls_total{handler="vm"} 1`, `ocihold_removals_refused_total{handler="vm"} 1`, `ocihold_collected_images_total{handler="vm"} 0`,
		`ocihold_images{handler="vm"} 1`, `ocihold_leases{handler="vm"} 1`, `ocihold_leases{handler="wasm"} 0`,
	)
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// requireMetrics waits until all of these lines are answered.
func requireMetrics(t *testing.T, address string, lines ...string) {
	t.Helper()
	var last []string
	get := func() bool {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+"/metrics", http.NoBody)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		defer func() { require.NoError(t, response.Body.Close()) }()
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		last = slices.DeleteFunc(strings.Split(string(body), "\n"), func(line string) bool { return !strings.HasPrefix(line, "ocihold_") })
		return !slices.ContainsFunc(lines, func(line string) bool { return !slices.Contains(last, line) })
	}
	deadline := time.Now().Add(time.Minute)
	for !get() {
		require.True(t, time.Now().Before(deadline), "wanted %q, last were %q", lines, last)
		time.Sleep(200 * time.Millisecond)
	}
}
