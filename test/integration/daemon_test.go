package integration

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// freeAddress is one that nobody listens on.
func freeAddress(t testing.TB) string {
	t.Helper()
	free, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, free.Close()) }()
	return free.Addr().String()
}

// The daemon tells over HTTP how it is.
func TestHealth(t *testing.T) {
	address := freeAddress(t)
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true, OciholdConf: settings(t, fmt.Sprintf("[metrics]\naddress = %q\n", address))})
	is := func(path string, code int, text string) {
		t.Helper()
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, http.NoBody)
			require.NoError(c, err)
			response, err := http.DefaultClient.Do(request)
			require.NoError(c, err)
			body, err := io.ReadAll(response.Body)
			require.NoError(c, errors.Join(err, response.Body.Close()))
			assert.Equal(c, code, response.StatusCode, path)
			assert.Contains(c, string(body), text)
		}, time.Minute, 50*time.Millisecond)
	}
	is("/healthz", http.StatusOK, "ok")
	is("/readyz", http.StatusOK, "ok")
	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGTERM))
	is("/readyz", http.StatusServiceUnavailable, "not registered with CRI-O")
	is("/healthz", http.StatusOK, "not registered with CRI-O")
	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	is("/readyz", http.StatusOK, "ok")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		out, err := ociholdCommand(t, n, "status")
		require.NoError(c, err)
		assert.Regexp(c, `comparison of leases and mounts +ok +[0-9ms]+ ago`, out)
		assert.Regexp(c, `sweep of the roots +ok +[0-9ms]+ ago`, out)
	}, 2*time.Minute, 100*time.Millisecond)
	// The disk of one root that goes away is told, and no reason to be unready.
	marker := filepath.Join(n.HandlerRoot("vm"), ".ocihold-root")
	require.NoError(t, os.Rename(marker, marker+".away"))
	is("/readyz", http.StatusOK, "root of handler vm: ")
	out, err := ociholdCommand(t, n, "status")
	require.NoError(t, err)
	assert.Regexp(t, `root of handler vm +.*root is not there`, out)
	require.NoError(t, os.Rename(marker+".away", marker))
	is("/readyz", http.StatusOK, "ok")
}

// serviceManager is what a service manager hears.
type serviceManager struct{ socket *net.UnixConn }

func newServiceManager(t *testing.T, n *realnode.Node) serviceManager {
	t.Helper()
	path := filepath.Join(n.Dir(), "run", "notify.sock")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, socket.Close()) })
	n.Under(realnode.Ocihold, "env", "NOTIFY_SOCKET="+path, "WATCHDOG_USEC=2000000")
	return serviceManager{socket}
}

// until reads until it hears a text, and returns what came before.
func (m serviceManager) until(t *testing.T, text string) (before []string) {
	t.Helper()
	require.NoError(t, m.socket.SetReadDeadline(time.Now().Add(time.Minute)))
	buffer := make([]byte, 4096)
	for {
		size, err := m.socket.Read(buffer)
		require.NoError(t, err, "wait for %s after %q", text, before)
		if got := string(buffer[:size]); strings.HasPrefix(got, text) {
			return before
		}
		before = append(before, string(buffer[:size]))
	}
}

func TestServiceManager(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	m := newServiceManager(t, n)
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGTERM))
	started := make(chan error, 1)
	go func() { started <- n.Start(t.Context(), realnode.Ocihold) }()
	// Alive, and not ready without CRI-O.
	for range 4 {
		assert.NotContains(t, m.until(t, "WATCHDOG=1"), "READY=1")
	}
	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	m.until(t, "READY=1")
	require.NoError(t, <-started)
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGHUP))
	m.until(t, "RELOADING=1\nMONOTONIC_USEC=")
	assert.NotContains(t, m.until(t, "READY=1"), "STOPPING=1")
	require.NoError(t, n.Kill(t.Context(), realnode.CRIO, syscall.SIGTERM))
	for range 4 { // a restart would not help
		m.until(t, "WATCHDOG=1")
	}
	require.NoError(t, n.Start(t.Context(), realnode.CRIO))
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	m.until(t, "STOPPING=1")
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
}

// SIGHUP has changed settings taken up, and those named that need a restart.
func TestReload(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	app := pushApp(t, n, "reload/app:1", appLayer("app", busybox(t)...))
	file := filepath.Join(n.OciholdConf()+".d", "60-reload.toml")
	reload := func(text, told string) {
		t.Helper()
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		before := len(logOf(t, n, realnode.Ocihold))
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGHUP))
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			assert.Contains(c, logOf(t, n, realnode.Ocihold)[before:], told)
		}, time.Minute, 50*time.Millisecond)
	}
	const route = "[[routes]]\nimage = \"**/reload/*\"\nhandler = \"vm\"\n"
	reload("log_level = \"debug\"\nstate_dir = \"/elsewhere\"\n"+route+"[handlers.vm]\ngc_high = 50\ngc_low = 40\n",
		`keys="[handlers.vm.gc_high handlers.vm.gc_low log_level routes]"`)
	assert.Contains(t, logOf(t, n, realnode.Ocihold), `msg="a changed setting needs a restart of ocihold" key=state_dir`)
	pull := func() {
		t.Helper()
		_, err := n.OciholdImages().PullImage(t.Context(), &cri.PullImageRequest{Image: &cri.ImageSpec{Image: app.ref}})
		require.NoError(t, err)
	}
	pull()
	assertOnlyIn(t, n, "vm", app.ref)
	assert.Contains(t, logOf(t, n, realnode.Ocihold), "level=debug")

	for text, told := range map[string]string{
		"log_levl = \"info\"\n": "unknown key",
		"[[routes]]\nimage = \"**/reload/*\"\nhandler = \"none\"\n": "there is no such handler",
	} {
		reload(text, "the old one stays in force")
		assert.Contains(t, logOf(t, n, realnode.Ocihold), told)
		require.NoError(t, removeFrom(t, n, "", app.ref))
		pull()
		assertOnlyIn(t, n, "vm", app.ref) // the route is in force
	}
	require.NoError(t, removeFrom(t, n, "", app.ref))
	n.AssertClean(t)
}

// A daemon that is told to end in the midst of a pull does so, and leaves what
// running containers need, and nothing else.
func TestGracefulStop(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	img := pushFiles(t, n, "stop/has:1", 1, 2)
	slow := pushFiles(t, n, "stop/slow:1", 1, 2)
	stop := func() {
		t.Helper()
		begun := time.Now()
		require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
		t.Log("it took", time.Since(begun))
		for _, socket := range []string{"ocihold.sock", "image.sock"} {
			assert.NoFileExists(t, filepath.Join(n.RunDir(), socket))
		}
	}
	tmpfs := func() bool {
		var st unix.Statfs_t
		require.NoError(t, unix.Statfs(mountsDir(n), &st))
		return st.Type == unix.TMPFS_MAGIC
	}
	stallBlobs(t, n, "stop/slow")
	waits := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: slow.ref, MountPath: "/vol"})})
	refused(t, waits, realnode.ContainerSpec{}, "will be tried again")
	stop()
	assertNoDownloads(t, n)
	assert.False(t, tmpfs(), "nothing was mounted")
	require.NoError(t, n.Proxy().Clear(t.Context()))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))

	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
	c := run(t, pod, realnode.ContainerSpec{})
	require.NoError(t, waits.Remove(t.Context()))
	await(t, func() error { return checkHeld(n, img.id) })
	stop()
	assert.True(t, tmpfs())
	require.NoError(t, checkHeld(n, img.id))
	img.assertRead(t, c, "/vol")
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}

// The run directory and the sockets are for no one else.
func TestSockets(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{})
	for _, socket := range []string{"ocihold.sock", "image.sock"} {
		info, err := os.Lstat(filepath.Join(n.RunDir(), socket))
		require.NoError(t, err)
		assert.Equal(t, os.ModeSocket|0o600, info.Mode())
	}
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGKILL)) // its sockets stay
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))

	socket, lock := filepath.Join(n.RunDir(), "image.sock"), filepath.Join(n.RunDir(), "lock")
	other := n.OciholdConf() + ".d/70-socket.toml"
	for name, tc := range map[string]struct {
		spoil, mend func() error
		want        string
	}{
		"another program's socket": {
			func() error {
				return os.WriteFile(other, fmt.Appendf(nil, "[image_service]\nsocket = %q\n", filepath.Join(n.Dir(), "run", "crio.sock")), 0o600)
			},
			func() error { return os.Remove(other) }, "another program listens on ",
		},
		"a link for a socket": {
			func() error { return os.Symlink("/etc/passwd", socket) }, func() error { return os.Remove(socket) },
			"image.sock is there and no socket",
		},
		"a link for the lock": {
			func() error { return errors.Join(os.Remove(lock), os.Symlink(filepath.Join(n.Dir(), "stolen"), lock)) },
			func() error { return os.Remove(lock) }, "open lock",
		},
		"a run directory for others": {
			func() error { return os.Chmod(n.RunDir(), 0o777) }, func() error { return os.Chmod(n.RunDir(), 0o755) }, "can be written by others",
		},
		"a link for the run directory": {
			func() error {
				return errors.Join(os.Rename(n.RunDir(), n.RunDir()+".d"), os.Symlink(n.RunDir()+".d", n.RunDir()))
			},
			func() error { return errors.Join(os.Remove(n.RunDir()), os.Rename(n.RunDir()+".d", n.RunDir())) },
			"is a link",
		},
	} {
		require.NoError(t, tc.spoil(), name)
		_, err := ociholdCommand(t, n, "run")
		require.ErrorContains(t, err, tc.want, name)
		require.NoError(t, tc.mend(), name)
	}
	assert.NoFileExists(t, filepath.Join(n.Dir(), "stolen"))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	n.AssertClean(t)
}

// The capabilities that the unit gives are enough.
func TestUnitPrivileges(t *testing.T) {
	unit, err := os.ReadFile("../../contrib/systemd/ocihold.service")
	require.NoError(t, err)
	_, after, ok := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	require.True(t, ok)
	line, _, _ := strings.Cut(after, "\n")
	bounds := "-all"
	for capability := range strings.FieldsSeq(line) {
		bounds += ",+" + strings.ToLower(strings.TrimPrefix(capability, "CAP_"))
	}
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	n.Under(realnode.Ocihold, "setpriv", "--bounding-set="+bounds, "--inh-caps=-all", "--no-new-privs")
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))

	capability := "\x01\x00\x00\x02\x00\x04" + strings.Repeat("\x00", 14) // cap_net_bind_service, as the kernel has it
	odd := []images.Entry{
		images.Dir("closed", 0o000), images.File("closed/file", "secret", 0o000), images.File("setuid", "x", 0o4755),
		images.CharDevice("null", 1, 3), images.File("owned", "x", 0o640).Owned(1234, 4321),
		images.File("capable", "x", 0o755).WithXattr("security.capability", capability), images.Whiteout("gone"),
	}
	ref := push(t, n, "odd:1", []images.Entry{images.File("gone", "x", 0o644)}, odd)
	mapped := &cri.IDMapping{HostId: 200000, Length: 65536}
	for _, spec := range []realnode.PodSpec{{}, {Handler: "vm"}, {Users: mapped}} {
		spec.Annotations = volumes(t, volume{Image: ref, MountPath: "/vol"})
		pod := runPod(t, n, spec)
		c := run(t, pod, realnode.ContainerSpec{})
		assert.Equal(t, "secret", sh(t, c, "cat /vol/closed/file"))
		assert.Equal(t, "4755 1234:4321 1:3 no\n",
			sh(t, c, "echo $(stat -c %a /vol/setuid) $(stat -c %u:%g /vol/owned) $(stat -c %t:%T /vol/null) $(test -e /vol/gone || echo no)"))
		found, err := filepath.Glob(filepath.Join(mountsDir(n), "*", "capable"))
		require.NoError(t, err)
		require.NotEmpty(t, found)
		size, err := unix.Lgetxattr(found[0], "security.capability", make([]byte, 64))
		require.NoError(t, err)
		want := 20
		if spec.Users != nil {
			want = 24 // with whom root is
		}
		assert.Equal(t, want, size)
		require.NoError(t, pod.Remove(t.Context()))
		n.AssertClean(t)
	}
	require.NoError(t, removeFrom(t, n, "", ref))
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	n.AssertClean(t)
}

// What a newer version has left is left as it is, and the daemon says so.
func TestNewerFormat(t *testing.T) {
	n := realnode.Boot(t, realnode.Options{HandlerRoots: true})
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	marker := filepath.Join(n.HandlerRoot("vm"), ".ocihold-root")
	require.NoError(t, os.WriteFile(marker, []byte("vm\nformat 2\n"), 0o600))
	_, err := ociholdCommand(t, n, "run")
	require.ErrorContains(t, err, marker+": it was made by a newer ocihold: run that again: it has format 2, and this one knows 1")
	require.NoError(t, os.WriteFile(marker, []byte("vm\nformat 1\n"), 0o600))
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))

	// A newer one leaves a lease, and its container running.
	img := pushFiles(t, n, "newer:1", 1, 2)
	pod := runPod(t, n, realnode.PodSpec{Annotations: volumes(t, volume{Image: img.ref, MountPath: "/vol"})})
	c := run(t, pod, realnode.ContainerSpec{})
	require.NoError(t, n.Kill(t.Context(), realnode.Ocihold, syscall.SIGTERM))
	records := filepath.Join(n.CRIORoot(), "overlay-containers", "containers.json")
	const was, is = `"metadata":"{}"`, `"metadata":"{\"ocihold_format\":2}"`
	edit(t, records, was, is)
	_, err = ociholdCommand(t, n, "run")
	require.ErrorContains(t, err, "image "+img.id+": it was made by a newer ocihold")
	img.assertRead(t, c, "/vol")
	require.NoError(t, checkHeld(n, img.id))
	edit(t, records, is, was)
	require.NoError(t, n.Start(t.Context(), realnode.Ocihold))
	require.NoError(t, pod.Remove(t.Context()))
	n.AssertClean(t)
}
