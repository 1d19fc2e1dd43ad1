package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The binary, as it is installed: static, small, silent when the container may
// start, and one line for the runtime to show when it may not.
func TestGuard(t *testing.T) {
	dir := t.TempDir()
	guard := filepath.Join(dir, "ocihold-guard")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", guard, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	info, err := os.Stat(guard)
	require.NoError(t, err)
	require.Less(t, info.Size(), int64(5_000_000))

	const key = "image-volume.ocihold.dev/pod"
	mount := func(at string) map[string]any {
		return map[string]any{
			"destination": at, "type": "bind", "source": dir + "/abc123",
			"options": []string{"bind", "ro", "nosuid", "nodev", "noexec"},
		}
	}
	for _, tc := range []struct {
		name   string
		mounts []any
		stderr string
	}{
		{"injected", []any{mount("/models"), mount("/tools")}, ""},
		{"not injected", nil, "ocihold-guard: image volume /models of container server of pod shop/web-0: requested by annotation " + key +
			" but not injected: is ocihold running? Start it (systemctl status ocihold); kubelet tries again\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			config, err := json.Marshal(map[string]any{
				"mounts": tc.mounts,
				"annotations": map[string]string{
					key: "- image: llama@sha256:" + strings.Repeat("a", 64) + "\n  mountPath: /models\n" +
						"- image: llama@sha512:" + strings.Repeat("a", 128) + "\n  mountPath: /tools\n",
					"io.kubernetes.container.name": "server", "io.kubernetes.pod.name": "web-0", "io.kubernetes.pod.namespace": "shop",
				},
			})
			require.NoError(t, err)
			bundle := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600))

			cmd := exec.CommandContext(t.Context(), guard, "--mounts", dir)
			cmd.Stdin = strings.NewReader(`{"id":"4f6d","bundle":"` + bundle + `"}`)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err = cmd.Run()
			require.Equal(t, tc.stderr, stderr.String())
			require.Empty(t, stdout.String())
			if tc.stderr == "" {
				require.NoError(t, err)
				return
			}
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, 1, exit.ExitCode())
		})
	}
}
