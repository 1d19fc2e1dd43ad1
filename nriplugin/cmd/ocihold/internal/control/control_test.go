package control_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/health"
	"github.com/ocihold/ocihold/storage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// daemon answers with what it is made of.
type daemon struct {
	err  error
	left chan error // gets why the last pull ended
}

func (d daemon) Status(context.Context) (control.Status, error) {
	return control.Status{Version: "1", Report: health.Report{Registered: true}}, d.err
}

func (d daemon) Volumes(context.Context) ([]imagevolume.Status, error) {
	return []imagevolume.Status{{Pod: "p"}}, d.err
}

func (d daemon) Images(context.Context) (control.Images, error) {
	return control.Images{Images: []storage.ImageAt{{Image: storage.Image{ID: "a"}, Handlers: []string{"vm"}}}, Faults: []string{"b"}}, d.err
}

func (d daemon) DiskUse(context.Context) (control.DiskUse, error) {
	return control.DiskUse{Roots: []storage.RootUsage{{Handler: "vm", Images: []storage.ImageUsage{{ID: "a"}}}}, Faults: []string{"b"}}, d.err
}

// Pull of "endless" ends when its context does.
func (d daemon) Pull(ctx context.Context, handler, ref string, progress func(storage.Progress)) (storage.Image, error) {
	for done := range int64(3) {
		progress(storage.Progress{Done: done, Total: 2})
	}
	if ref == "endless" {
		<-ctx.Done()
		d.left <- ctx.Err()
		return storage.Image{}, ctx.Err()
	}
	return storage.Image{ID: ref, Names: []string{handler}}, d.err
}

func (d daemon) Import(_ context.Context, handler, from, name string, progress func(storage.Progress)) (storage.Image, error) {
	progress(storage.Progress{Done: 1, Total: 1})
	return storage.Image{ID: from, Names: []string{handler, name}}, d.err
}

func (d daemon) Remove(_ context.Context, handler, ref string) error {
	if handler != "vm" {
		return errors.New(handler + " has no " + ref)
	}
	return d.err
}

func (d daemon) Collect(_ context.Context, handler string, dryRun bool) (control.Collections, error) {
	return control.Collections{Collections: []storage.Collection{{Handler: handler, DryRun: dryRun}}}, d.err
}

// serve serves d until the test ends.
func serve(t *testing.T, d control.Daemon) (socket string, client *control.Client) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "s")
	require.NoError(t, os.WriteFile(socket, nil, 0o644), "a daemon before left it")
	listener, err := control.Listen(socket)
	require.NoError(t, err)
	log := logrus.New()
	log.SetOutput(io.Discard)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- control.Serve(ctx, listener, d, log) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return socket, control.NewClient(socket)
}

func TestAnswers(t *testing.T) {
	socket, client := serve(t, daemon{})
	info, err := os.Stat(socket)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode().Perm())

	status, err := client.Status(t.Context())
	require.NoError(t, err)
	assert.Equal(t, control.Status{Version: "1", Report: health.Report{Registered: true}}, status)
	volumes, err := client.Volumes(t.Context())
	require.NoError(t, err)
	assert.Equal(t, []imagevolume.Status{{Pod: "p"}}, volumes)
	images, err := client.Images(t.Context())
	require.NoError(t, err)
	assert.Equal(t, control.Images{Images: []storage.ImageAt{{Image: storage.Image{ID: "a"}, Handlers: []string{"vm"}}}, Faults: []string{"b"}}, images)

	disks, err := client.DiskUse(t.Context())
	require.NoError(t, err)
	assert.Equal(t, control.DiskUse{Roots: []storage.RootUsage{{Handler: "vm", Images: []storage.ImageUsage{{ID: "a"}}}}, Faults: []string{"b"}}, disks)

	var seen []int64
	image, err := client.Pull(t.Context(), "v&m", "reg/a b?&#:1", func(p storage.Progress) { seen = append(seen, p.Done) })
	require.NoError(t, err)
	assert.Equal(t, "reg/a b?&#:1", image.ID)
	assert.Equal(t, []string{"v&m"}, image.Names)
	assert.Equal(t, []int64{0, 1, 2}, seen)

	seen = nil
	image, err = client.Import(t.Context(), "v&m", "/a b?&#.tar", "n&:1", func(p storage.Progress) { seen = append(seen, p.Done) })
	require.NoError(t, err)
	assert.Equal(t, storage.Image{ID: "/a b?&#.tar", Names: []string{"v&m", "n&:1"}}, image)
	assert.Equal(t, []int64{1}, seen)

	require.NoError(t, client.Remove(t.Context(), "vm", "a"))
	require.EqualError(t, client.Remove(t.Context(), "wasm", "a"), "wasm has no a")
	for _, dryRun := range []bool{true, false} {
		collections, err := client.Collect(t.Context(), "vm", dryRun)
		require.NoError(t, err)
		assert.Equal(t, control.Collections{Collections: []storage.Collection{{Handler: "vm", DryRun: dryRun}}}, collections)
	}
}

func TestErrors(t *testing.T) {
	_, client := serve(t, daemon{err: errors.New("the disk is full")})
	_, err := client.Status(t.Context())
	require.EqualError(t, err, "the disk is full")
	_, err = client.Images(t.Context())
	require.EqualError(t, err, "the disk is full")
	_, err = client.DiskUse(t.Context())
	require.EqualError(t, err, "the disk is full")
	_, err = client.Pull(t.Context(), "", "a", func(storage.Progress) {})
	require.EqualError(t, err, "the disk is full")
	_, err = client.Import(t.Context(), "", "a", "", func(storage.Progress) {})
	require.EqualError(t, err, "the disk is full")
	require.EqualError(t, client.Remove(t.Context(), "vm", "a"), "the disk is full")
	_, err = client.Collect(t.Context(), "vm", false)
	require.EqualError(t, err, "the disk is full")
}

// panicking panics as it is asked, as containers/storage does where a disk became
// read-only just now.
type panicking struct{ daemon }

func (panicking) Images(context.Context) (control.Images, error) {
	panic("open images.lock: read-only file system")
}

// A panic ends the daemon: one that went on would hold its locks for ever.
func TestPanicEndsTheDaemon(t *testing.T) {
	if os.Getenv("OCIHOLD_TEST_PANIC") != "" {
		_, client := serve(t, panicking{})
		_, _ = client.Images(t.Context())
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestPanicEndsTheDaemon$")
	cmd.Env = append(os.Environ(), "OCIHOLD_TEST_PANIC=1", "TMPDIR="+t.TempDir()) // which it does not remove
	out, err := cmd.CombinedOutput()
	require.Error(t, err, "%s", out)
	assert.Contains(t, string(out), "panic: open images.lock: read-only file system")
	assert.Contains(t, string(out), "panicking.Images", "where it came from")
}

func TestNoDaemon(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	_, err := control.NewClient(socket).Status(t.Context())
	require.ErrorIs(t, err, control.ErrDown)
	assert.ErrorContains(t, err, socket)
}

func TestWhoLeavesEndsItsPull(t *testing.T) {
	d := daemon{left: make(chan error, 1)}
	_, client := serve(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := client.Pull(ctx, "", "endless", func(p storage.Progress) {
		if p.Done == 2 {
			cancel()
		}
	})
	require.ErrorIs(t, err, context.Canceled)
	select {
	case err := <-d.left:
		require.ErrorIs(t, err, context.Canceled)
	case <-time.After(10 * time.Second):
		t.Fatal("the pull goes on")
	}
}

func TestDaemonThatGoesAwayIsNoSuccess(t *testing.T) {
	d := daemon{left: make(chan error, 1)}
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := control.Listen(socket)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- control.Serve(ctx, listener, d, logrus.New()) }()
	_, err = control.NewClient(socket).Pull(t.Context(), "", "endless", func(storage.Progress) { cancel() })
	require.Error(t, err)
	require.NoError(t, <-ended)
	require.ErrorIs(t, <-d.left, context.Canceled)
}
