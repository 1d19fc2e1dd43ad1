package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realkubelet"
	"github.com/ocihold/ocihold/test/realnode"
)

// needKubelet skips a test of the real kubelet unless it is asked for: building
// it takes minutes.
func needKubelet(t *testing.T) {
	t.Helper()
	if os.Getenv("OCIHOLD_KUBELET") == "" && os.Getenv("OCIHOLD_SOAK") == "" {
		t.Skip("the real kubelet is for make kubelet")
	}
}

// kubeletImages pushes what kubelet's pods are made of, and returns the names:
// an image to run, one with USER 1000, and one for volumes.
func kubeletImages(t *testing.T, n *realnode.Node) (app, user, volume string) {
	t.Helper()
	app = push(t, n, "kubelet/app:1", busybox(t))
	image, err := images.Image(images.Config{User: "1000"}, busybox(t), []images.Entry{images.File("user", "x", 0o644)})
	require.NoError(t, err)
	require.NoError(t, n.Push(t.Context(), "kubelet/user:1", image))
	volume = push(t, n, "kubelet/volume:1", []images.Entry{images.File("content", "it is here", 0o644)})
	return app, n.Ref("kubelet/user:1"), volume
}

// TestKubelet has a real kubelet run pods, with and without its gate for
// runtime_handler, and compares what it says with the recordings that
// TestKubeletCalls replays. OCIHOLD_RECORD=1 writes them anew.
func TestKubelet(t *testing.T) {
	needKubelet(t)
	for name, gate := range map[string]bool{"handler": true, "annotation": false} {
		t.Run(name, func(t *testing.T) {
			n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
			app, user, volume := kubeletImages(t, n)
			k := realkubelet.Start(t, n, realkubelet.Options{
				Gates: map[string]bool{"RuntimeClassInImageCriApi": gate, "ImageVolume": true},
			})
			var vm map[string]string
			if !gate {
				vm = map[string]string{"runtime-handler.ocihold.dev": "vm"}
			}
			pods := []realkubelet.Pod{
				{Name: "plain", Image: app, PullPolicy: "IfNotPresent"},
				{Name: "user", Image: user, PullPolicy: "IfNotPresent", RuntimeClass: "vm", Annotations: vm},
				{Name: "nonroot", Image: user, PullPolicy: "Always", RuntimeClass: "vm", Annotations: vm, NonRoot: true},
				{Name: "volume", Image: app, PullPolicy: "Never", Volume: volume},
			}
			// One after the other, so that the calls have an order.
			for _, pod := range pods {
				k.Run(t, pod)
				c := k.AwaitContainer(t, pod.Name, 0)
				assertRuns(t, n, pod, c)
				if pod.PullPolicy == "Always" {
					require.NoError(t, syscall.Kill(containerPID(t, n, c), syscall.SIGKILL))
					assertRuns(t, n, pod, k.AwaitContainer(t, pod.Name, 1))
				}
			}
			assertOnlyIn(t, n, "vm", user)
			compareRecording(t, n, name, k.Calls())
		})
	}
}

// TestKubeletCalls replays what a real kubelet has said to a node: all answers
// are like those that it was given, and the containers run as their images say.
func TestKubeletCalls(t *testing.T) {
	for _, name := range []string{"handler", "annotation"} {
		t.Run(name, func(t *testing.T) {
			n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
			_, user, _ := kubeletImages(t, n)
			users := replay(t, n, name)
			assert.Equal(t, []string{"0", "1000", "1000", "1000", "0"}, users, "as the images say")
			assertOnlyIn(t, n, "vm", user)
		})
	}
}

// replay plays a recording, holds that the answers are like the recorded ones,
// and returns as which user each container runs.
func replay(t *testing.T, n *realnode.Node, name string) (users []string) {
	t.Helper()
	content, err := os.ReadFile(recordingFile(name))
	require.NoError(t, err)
	var recording []realkubelet.Call
	require.NoError(t, json.Unmarshal(content, &recording))
	player, names := realkubelet.NewPlayer(t, n), realkubelet.NewNames(n.Dir(), n.Registry())
	for i, want := range recording {
		call, err := names.Specialize(want)
		require.NoError(t, err)
		if call.Method == "RuntimeService/CreateContainer" {
			makeHostFiles(t, call.Request)
		}
		done, err := player.Play(t.Context(), call)
		require.NoError(t, err)
		require.Equal(t, want, names.Generalize(done), "call %d, %s", i, call.Method)
		if call.Method == "RuntimeService/StartContainer" {
			users = append(users, containerUID(t, n, call.Request.(map[string]any)["containerId"].(string)))
		}
	}
	return users
}

// makeHostFiles makes what kubelet has made before it creates a container: the
// files to mount and the directory of the log.
func makeHostFiles(t *testing.T, createContainer any) {
	t.Helper()
	content, err := json.Marshal(createContainer)
	require.NoError(t, err)
	request := &cri.CreateContainerRequest{}
	require.NoError(t, protojson.Unmarshal(content, request))
	log := filepath.Join(request.GetSandboxConfig().GetLogDirectory(), request.GetConfig().GetLogPath())
	require.NoError(t, os.MkdirAll(filepath.Dir(log), 0o755))
	for _, m := range request.GetConfig().GetMounts() {
		if file := m.GetHostPath(); file != "" {
			require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
			require.NoError(t, os.WriteFile(file, nil, 0o644))
		}
	}
}

// compareRecording compares kubelet's calls with a recording, or writes it.
func compareRecording(t *testing.T, n *realnode.Node, name string, calls []realkubelet.Call) {
	t.Helper()
	names := realkubelet.NewNames(n.Dir(), n.Registry())
	var recording []realkubelet.Call
	for _, call := range realkubelet.Essence(calls) {
		recording = append(recording, names.Generalize(call))
	}
	var got bytes.Buffer
	encoder := json.NewEncoder(&got)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	require.NoError(t, encoder.Encode(recording))
	if os.Getenv("OCIHOLD_RECORD") != "" {
		require.NoError(t, os.WriteFile(recordingFile(name), got.Bytes(), 0o644))
		return
	}
	want, err := os.ReadFile(recordingFile(name))
	require.NoError(t, err)
	assert.Equal(t, string(want), got.String(), "OCIHOLD_RECORD=1 records it anew")
}

func recordingFile(name string) string { return filepath.Join("testdata", "kubelet", name+".json") }

// assertRuns holds that a container runs as its image says, and reads its
// volume.
func assertRuns(t *testing.T, n *realnode.Node, pod realkubelet.Pod, id string) {
	t.Helper()
	want := "0"
	if strings.Contains(pod.Image, "user") {
		want = "1000"
	}
	assert.Equal(t, want, containerUID(t, n, id), pod.Name)
	if pod.Volume != "" {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/volume/content", containerPID(t, n, id)))
		require.NoError(t, err)
		assert.Equal(t, "it is here", string(content))
	}
}

// containerPID is the first process of a container.
func containerPID(t *testing.T, n *realnode.Node, id string) int {
	t.Helper()
	resp, err := n.Runtime().ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	require.NoError(t, err)
	var info realnode.Info
	require.NoError(t, json.Unmarshal([]byte(resp.GetInfo()["info"]), &info))
	require.NotZero(t, info.PID)
	return info.PID
}

// containerUID is the user that a container's first process runs as, as the
// kernel has it.
func containerUID(t *testing.T, n *realnode.Node, id string) string {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", containerPID(t, n, id)))
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(status), "\nUid:")
	return strings.Fields(rest)[0]
}

// assertOnlyIn holds that the root of a handler alone has an image.
func assertOnlyIn(t *testing.T, n *realnode.Node, handler, ref string) {
	t.Helper()
	for _, h := range []string{"runc", "vm", "wasm"} {
		answer, err := n.OciholdImages().ImageStatus(context.WithoutCancel(t.Context()),
			&cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: ref, RuntimeHandler: h}})
		require.NoError(t, err)
		assert.Equal(t, h == handler, answer.GetImage() != nil, h)
	}
}
