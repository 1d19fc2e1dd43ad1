package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestMain makes the test binary serve as pinns, which starts itself again.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == holdArg || os.Args[1] == "-d") {
		main()
		return
	}
	os.Exit(m.Run())
}

// pinned runs pinns with these arguments and returns the directory of the pins.
func pinned(t *testing.T, args ...string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("namespaces can be pinned by root only")
	}
	dir := t.TempDir()
	self, err := os.Executable()
	require.NoError(t, err)
	out, err := exec.Command(self, append([]string{"-d", dir, "-f", "pod"}, args...)...).CombinedOutput()
	pins, globErr := filepath.Glob(filepath.Join(dir, "*", "pod"))
	require.NoError(t, globErr)
	t.Cleanup(func() {
		for _, p := range pins {
			require.NoError(t, unix.Unmount(p, unix.MNT_DETACH))
		}
	})
	require.NoError(t, err, "%s", out)
	return dir
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	require.NoError(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// inside runs a command in the pinned namespaces.
func inside(t *testing.T, dir string, options string, command ...string) string {
	t.Helper()
	args := strings.Fields(strings.ReplaceAll(options, "DIR", dir))
	out, err := exec.Command("nsenter", append(args, command...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return strings.TrimSpace(string(out))
}

func TestPinsFreshAndHostNamespaces(t *testing.T) {
	dir := pinned(t, "--ipc", "--uts=host", "--net", "-s", "net.ipv4.ip_unprivileged_port_start=123")
	assert.Equal(t, inode(t, "/proc/self/ns/uts"), inode(t, dir+"/utsns/pod"))
	assert.NotEqual(t, inode(t, "/proc/self/ns/ipc"), inode(t, dir+"/ipcns/pod"))
	assert.NotEqual(t, inode(t, "/proc/self/ns/net"), inode(t, dir+"/netns/pod"))
	assert.Equal(t, "123", inside(t, dir, "--net=DIR/netns/pod", "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start"))
}

func TestPinsUserNamespaceThatOwnsTheOthers(t *testing.T) {
	dir := pinned(t, "--user", "--net", "--ipc", "--uid-mapping=0-100000-65536@", "--gid-mapping=0-200000-65536@")
	assert.Equal(t, "0 100000 65536", strings.Join(strings.Fields(inside(t, dir, "--user=DIR/userns/pod", "cat", "/proc/self/uid_map")), " "))
	assert.Equal(t, "0 200000 65536", strings.Join(strings.Fields(inside(t, dir, "--user=DIR/userns/pod", "cat", "/proc/self/gid_map")), " "))
	// Its root may change the network namespace: it is the owner.
	inside(t, dir, "--user=DIR/userns/pod --net=DIR/netns/pod", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
}

func TestBadArguments(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		err  string
	}{
		{"nothing", nil, "are needed"},
		{"no namespace", []string{"-d", "/d", "-f", "f"}, "are needed"},
		{"no value", []string{"-d"}, "-d needs a value"},
		{"unknown", []string{"--time"}, `unknown argument "--time"`},
		{"not host", []string{"--net=other"}, `unknown argument "--net=other"`},
		{"no mapping", []string{"-d", "/d", "-f", "f", "--user"}, "--user needs"},
		{"bad mapping", []string{"--uid-mapping=0-1@"}, "is not CONTAINER-HOST-SIZE"},
		{"bad number", []string{"--gid-mapping=0-x-1@"}, "invalid syntax"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parse(tt.args)
			require.ErrorContains(t, err, tt.err)
		})
	}
}
