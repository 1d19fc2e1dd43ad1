package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// count is how often to do what is worth doing often.
func count(scaled, full int) int {
	if os.Getenv("OCIHOLD_SOAK") != "" {
		return full
	}
	return scaled
}

// seeded is a source of random numbers whose seed is logged, and can be given in
// OCIHOLD_SEED to have the same again.
func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv("OCIHOLD_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	t.Log("seed", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// volume is a volume as a pod's annotation has it.
type volume struct {
	Image      string `json:"image"`
	MountPath  string `json:"mountPath"`
	PullPolicy string `json:"pullPolicy,omitempty"`
	Exec       bool   `json:"exec,omitempty"`
}

// volumes are the annotations of a pod whose containers all get vs.
func volumes(t testing.TB, vs ...volume) map[string]string {
	t.Helper()
	text, err := json.Marshal(vs)
	require.NoError(t, err)
	return map[string]string{"image-volume.ocihold.dev": string(text)}
}

// runPod runs a pod that is removed with the test.
func runPod(t testing.TB, n *realnode.Node, spec realnode.PodSpec) *realnode.Pod {
	t.Helper()
	pod, err := n.RunPod(t.Context(), spec)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pod.Remove(context.WithoutCancel(t.Context()))) })
	return pod
}

// create creates a container as kubelet does: it tries again, while the answer
// is that the volume will be there.
func create(t testing.TB, pod *realnode.Pod, spec realnode.ContainerSpec) *realnode.Container {
	t.Helper()
	var c *realnode.Container
	var err error
	deadline := time.Now().Add(time.Minute)
	for {
		c, err = pod.Create(t.Context(), spec)
		if err == nil || !strings.Contains(err.Error(), "will be tried again") || time.Now().After(deadline) {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	require.NoError(t, err)
	return c
}

// run creates and starts a container.
func run(t testing.TB, pod *realnode.Pod, spec realnode.ContainerSpec) *realnode.Container {
	t.Helper()
	c := create(t, pod, spec)
	require.NoError(t, c.Start(t.Context()))
	return c
}

// sh runs a shell command in a container, which must succeed.
func sh(t testing.TB, c *realnode.Container, script string) string {
	t.Helper()
	out, err := c.Exec(t.Context(), "/bin/sh", "-ec", script)
	require.NoError(t, err)
	require.Zero(t, out.ExitCode, "%s: %s%s", script, out.Stdout, out.Stderr)
	return out.Stdout
}

// push pushes an image of layers and returns its full name.
func push(t testing.TB, n *realnode.Node, ref string, layers ...[]images.Entry) string {
	t.Helper()
	image, err := images.Image(images.Config{}, layers...)
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), ref, image))
	return n.Ref(ref)
}

// command runs a command line against the node and returns what it prints.
func command(t testing.TB, n *realnode.Node, name string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "env", append([]string{"PATH=" + n.Path(), name}, args...)...)
	cmd.Env = append(os.Environ(), n.Env()...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// ociholdCommand runs one of ocihold's commands with the node's configuration.
func ociholdCommand(t testing.TB, n *realnode.Node, args ...string) (string, error) {
	t.Helper()
	return command(t, n, "ocihold", append([]string{"--config", n.OciholdConf()}, args...)...)
}
