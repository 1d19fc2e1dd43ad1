package guard

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

func TestMountinfo(t *testing.T) {
	text, err := os.ReadFile("testdata/mountinfo")
	require.NoError(t, err)
	const rootfs = "/var/lib/containers/storage/overlay/5f0c/merged"
	line := "88 71 0:40 / " + rootfs + "/m ro - overlay /m/a ro"
	for _, tc := range []struct {
		name, text, rootfs string
		want               bool
	}{
		{"mounts", string(text), rootfs, true},
		{"a mount is not under itself", string(text), rootfs + "/data/m", false},
		{"a name that begins alike", string(text), "/var/lib/containers/storage/overlay/5f0", false},
		{"many layers", line + ",lowerdir=" + strings.Repeat("/layers/of/an/image:", 500*20), rootfs, true},
		{"a space", `88 71 0:40 / /a\040b/m ro - overlay /m/a ro`, "/a b", true},
		{"none", "", rootfs, false},
	} {
		got, err := anyUnder(strings.NewReader(tc.text), tc.rootfs)
		require.NoError(t, err, tc.name)
		require.Equal(t, tc.want, got, tc.name)
	}
	for _, line := range []string{"x " + rootfs, "88 71 0:40 / " + rootfs + "/m ro - overlay", strings.Repeat("x", maxLine+1)} {
		_, err := anyUnder(strings.NewReader(line), rootfs)
		require.Error(t, err)
	}
}

// process starts a process that has run the script in a mount namespace of its
// own, and returns its id.
func process(t *testing.T, dir, script string) int {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "--propagation", "private",
		"sh", "-ec", script+"\necho ready; read -r end")
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	return cmd.Process.Pid
}

// The process is what a runtime leaves before it changes the root: the root
// file system of the container with mounts in it.
func TestProcess(t *testing.T) {
	const (
		overlay   = "mount -t overlay $PWD/mounts/abc123 -o ro,lowerdir=layer:empty mounts/abc123\n"
		proc      = "mount --bind rootfs rootfs; mount -t tmpfs tmpfs rootfs/proc\n"
		bind      = "mount --bind mounts/abc123 rootfs/models\n"
		remount   = "mount -o remount,bind,ro,nosuid,nodev,noexec rootfs/models\n"
		linked    = "mkdir rootfs/data; rmdir rootfs/models; ln -s /data rootfs/models\n"
		elsewhere = "mount --bind mounts/abc123 rootfs/data; mount -o remount,bind,ro,nosuid,nodev,noexec rootfs/data\n"
	)
	another := strings.ReplaceAll(overlay, "abc123", "other")
	const other = `not mounted: something else is there, not "DIR/mounts/abc123": ` + restart
	for _, tc := range []struct {
		name, script, want string
	}{
		{"mounted", overlay + proc + bind + remount, ""},
		{"mounted behind a link", overlay + proc + linked + elsewhere, ""},
		{"mounted on another mount", overlay + proc + "mount -t tmpfs other rootfs/models\n" + bind + remount, ""},
		{"nothing mounted yet", overlay, ""},
		{"only the root file system", overlay + "mount --bind rootfs rootfs", ""},
		{"mounted at the end of no link", overlay + proc + linked, "-"},
		{"not mounted", overlay + proc, "-"},
		{"covered", overlay + proc + bind + remount + "mount -t tmpfs other rootfs/models", other},
		{"overlay gone before the bind", "mount -t tmpfs daemon mounts; mkdir mounts/abc123\n" + proc + bind + remount, other},
		{"part of the volume", overlay + proc + "mount --bind mounts/abc123/sub rootfs/models\n" + remount, other},
		{"a part that is the volume", another + "mount --bind mounts/other/sub mounts/abc123\n" + proc + bind + remount, ""},
		{"all instead of a part", another + "mount --bind mounts/other/sub mounts/abc123\n" + proc + strings.ReplaceAll(bind, "abc123", "other") + remount, other},
		{"forged source", proc + "mount -t tmpfs $PWD/mounts/abc123 rootfs/models", other},
		{"another image", overlay + another + proc + strings.ReplaceAll(bind, "abc123", "other") + remount, other},
		{"path gone", overlay + proc + "rmdir rootfs/models", "not mounted: open it in the container: no such file or directory"},
		{"options lost", overlay + proc + bind, "mounted without nosuid: it needs a runtime that keeps the options of bind mounts"},
		{"writable", "mkdir upper work; mount -t overlay writable -o lowerdir=layer,upperdir=upper,workdir=work mounts/abc123\n" + proc + bind +
			strings.ReplaceAll(remount, ",ro,", ","), "mounted without ro: it needs a runtime that keeps the options of bind mounts"},
		{"noexec lost", overlay + proc + bind + strings.ReplaceAll(remount, ",noexec", ""), "mounted without noexec: it needs a runtime that keeps the options of bind mounts"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, sub := range []string{"layer/sub", "empty", "mounts/abc123", "mounts/other", "rootfs/models", "rootfs/proc"} {
				require.NoError(t, os.MkdirAll(filepath.Join(dir, sub), 0o755))
			}
			// The path in the bundle has a link in it, mountinfo does not.
			require.NoError(t, os.Symlink(filepath.Join(dir, "rootfs"), filepath.Join(dir, "link")))
			mounts := filepath.Join(dir, "mounts")
			c := &config{
				Root: specs.Root{Path: filepath.Join(dir, "link")},
				Mounts: []specs.Mount{{
					Destination: "/models", Type: "bind", Source: filepath.Join(mounts, "abc123"),
					Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"},
				}},
				Annotations: recorded(t).Annotations,
			}
			c.Annotations[serverKey] = "- {image: llama:7b, mountPath: /models}"

			err := hook(t, mounts, c, process(t, dir, tc.script))
			switch tc.want {
			case "":
				require.NoError(t, err)
			case "-":
				require.ErrorContains(t, err, models+"not mounted: ")
			default:
				require.EqualError(t, err, models+strings.ReplaceAll(tc.want, "DIR", dir))
			}
		})
	}
}

func TestProcessGone(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "true")
	require.NoError(t, cmd.Run())
	b := &bundle{Root: specs.Root{Path: "/rootfs"}}
	require.NoError(t, b.checkProcess(cmd.Process.Pid, []volume{{Volume: request.Volume{MountPath: "/models"}, source: mountsDir + "/abc123"}}))
}

func TestRootfs(t *testing.T) {
	require.Equal(t, "/bundle/rootfs", (&bundle{Root: specs.Root{Path: "rootfs"}, dir: "/bundle"}).rootfs())
}
