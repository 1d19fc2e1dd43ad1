package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// BenchmarkGuard runs the guard for a container that has its volume, as a
// runtime does: with a process that has left the host's mount namespace, on a
// host with a few mounts or with a thousand. It reports the most memory that it
// ever had, too.
func BenchmarkGuard(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("mounting needs root")
	}
	dir := b.TempDir()
	guard := filepath.Join(dir, "ocihold-guard")
	build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", guard, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(b, err, "%s", out)
	for _, sub := range []string{"layer", "empty", "mounts/abc", "rootfs/models", "others"} {
		require.NoError(b, os.MkdirAll(filepath.Join(dir, sub), 0o755))
	}
	require.NoError(b, os.WriteFile(filepath.Join(dir, "config.json"), fmt.Appendf(nil, `{
		"root": {"path": %q},
		"mounts": [{"destination": "/models", "type": "bind", "source": "%s/mounts/abc", "options": ["bind", "ro", "nosuid", "nodev", "noexec"]}],
		"annotations": {
			"image-volume.ocihold.dev": "- {image: registry.example/models/llama:7b, mountPath: /models}",
			"io.kubernetes.container.name": "server", "io.kubernetes.pod.name": "web-0", "io.kubernetes.pod.namespace": "shop"
		}
	}`, dir+"/rootfs", dir), 0o600))

	for _, others := range []int{10, 1000} {
		b.Run(fmt.Sprintf("mounts=%d", others), func(b *testing.B) {
			state := fmt.Sprintf(`{"ociVersion":"1.0.2","id":"4f6d","status":"creating","pid":%d,"bundle":%q}`, container(b, dir, others), dir)
			command := func() *exec.Cmd {
				cmd := exec.CommandContext(b.Context(), guard, "--mounts", dir+"/mounts")
				cmd.Stdin, cmd.Stderr = strings.NewReader(state), os.Stderr
				return cmd
			}
			for b.Loop() {
				require.NoError(b, command().Run())
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/1000/float64(b.N), "ms/op")
			b.ReportMetric(peak(b, command()), "peak-MB")
		})
	}
}

// container starts a process with the mounts of a container, among others, and
// returns its id.
func container(b *testing.B, dir string, others int) int {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), "unshare", "--mount", "--propagation", "private", "sh", "-ec", fmt.Sprintf(`
		for i in $(seq %d); do mkdir -p others/$i; mount --bind others/$i others/$i; done
		mount -t overlay $PWD/mounts/abc -o ro,lowerdir=layer:empty mounts/abc
		mount --bind rootfs rootfs
		mount --bind mounts/abc rootfs/models
		mount -o remount,bind,ro,nosuid,nodev,noexec rootfs/models
		echo ready; read -r end`, others))
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(b, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	b.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	_, err = bufio.NewReader(stdout).ReadString('\n')
	require.NoError(b, err)
	return cmd.Process.Pid
}

// peak runs the command and returns the most memory it has had, in MB. It is
// looked at as the process exits: what wait(2) gives counts the parent's, too.
func peak(b *testing.B, cmd *exec.Cmd) float64 {
	b.Helper()
	runtime.LockOSThread() // all of a tracee's tracing is one thread's
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	require.NoError(b, cmd.Start())
	var status unix.WaitStatus
	var kB float64
	for trace := func() error { return unix.PtraceSetOptions(cmd.Process.Pid, unix.PTRACE_O_TRACEEXIT) }; ; trace = func() error { return nil } {
		_, err := unix.Wait4(cmd.Process.Pid, &status, unix.WALL, nil)
		require.NoError(b, err)
		if status.Exited() {
			require.Zero(b, status.ExitStatus())
			return kB / 1000
		}
		require.NoError(b, trace())
		signal := 0
		switch {
		case status.TrapCause() == unix.PTRACE_EVENT_EXIT:
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
			require.NoError(b, err)
			_, rest, _ := strings.Cut(string(text), "VmHWM:")
			_, err = fmt.Sscan(rest, &kB)
			require.NoError(b, err)
		case status.StopSignal() != unix.SIGTRAP:
			signal = int(status.StopSignal())
		}
		require.NoError(b, unix.PtraceCont(cmd.Process.Pid, signal))
	}
}
