package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/storage/pkg/reexec"
	"go.uber.org/goleak"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/cli"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	goleak.VerifyTestMain(m)
}

// host is a directory with the configuration of a node that does not run.
type host struct{ dir string }

func newHost(t *testing.T) host {
	t.Helper()
	h := host{t.TempDir()}
	h.write(t, "ocihold.toml", `
run_dir = "DIR/run"
state_dir = "DIR/state"
[crio]
config = "DIR/crio.conf"
config_dir = "DIR/crio.conf.d"
[hook]
guard = "DIR/guard"
`)
	h.write(t, "crio.conf", `
[crio]
root = "DIR/root"
runroot = "DIR/runroot"
storage_driver = "overlay"
[crio.api]
listen = "DIR/crio.sock"
[crio.image]
signature_policy = "DIR/policy.json"
[crio.runtime]
hooks_dir = ["DIR/hooks"]
[crio.nri]
enable_nri = true
nri_listen = "DIR/nri.sock"
`)
	h.write(t, "policy.json", `{"default": [{"type": "insecureAcceptAnything"}]}`)
	return h
}

func (h host) path(name string) string { return filepath.Join(h.dir, name) }

func (h host) write(t *testing.T, name, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(h.path(name)), 0o755))
	require.NoError(t, os.WriteFile(h.path(name), []byte(strings.ReplaceAll(text, "DIR", h.dir)), 0o755))
}

// run runs a command line and returns what it prints.
func (h host) run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	err = cli.Execute(t.Context(), append([]string{"--config", h.path("ocihold.toml")}, args...), &out, &errs)
	return out.String(), errs.String(), err
}

func TestWithoutDaemon(t *testing.T) {
	for _, command := range []string{"status", "volumes"} {
		_, _, err := newHost(t).run(t, command)
		require.ErrorContains(t, err, "the daemon does not answer: is 'ocihold run' started?", command)
	}
}

func TestPullAndImages(t *testing.T) {
	require.Zero(t, os.Getuid(), "containers/storage needs root")
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/a/b:1"
	image, err := random.Image(1000, 2)
	require.NoError(t, err)
	tag, err := name.NewTag(ref)
	require.NoError(t, err)
	require.NoError(t, remote.Write(tag, image))
	want, err := image.ConfigName()
	require.NoError(t, err)

	h := newHost(t)
	out, progress, err := h.run(t, "pull", ref)
	require.NoError(t, err)
	assert.Equal(t, want.Hex+"\n", out)
	assert.Contains(t, progress, ref+": 100% of ")

	out, _, err = h.run(t, "images")
	require.NoError(t, err)
	assert.Equal(t, []string{"IMAGE", "IMAGE", "ID", "HANDLER", "SIZE", "LEASED"}, strings.Fields(strings.Split(out, "\n")[0]))
	assert.Contains(t, out, ref)
	assert.Contains(t, out, want.Hex[:12])

	out, _, err = h.run(t, "images", "-o", "json")
	require.NoError(t, err)
	var list struct {
		Images []struct {
			ID     string   `json:"id"`
			Names  []string `json:"names"`
			Leased bool     `json:"leased"`
		} `json:"images"`
	}
	require.NoError(t, json.Unmarshal([]byte(out), &list))
	require.Len(t, list.Images, 1)
	assert.Equal(t, want.Hex, list.Images[0].ID)
	assert.Equal(t, []string{ref}, list.Images[0].Names)

	_, _, err = h.run(t, "pull", ref+"-missing")
	require.ErrorContains(t, err, ref+"-missing")

	_, _, err = h.run(t, "pull", "--handler", "kata", ref)
	require.ErrorContains(t, err, `"kata" is not known: there are crun, default`)
	_, _, err = h.run(t, "rmi", ref)
	require.ErrorContains(t, err, "CRI-O does not answer at unix://"+h.path("crio.sock"))
	out, _, err = h.run(t, "images")
	require.NoError(t, err)
	assert.Contains(t, out, ref, "nothing is removed")
}

func TestConfigForCRIO(t *testing.T) {
	h := newHost(t)
	out, _, err := h.run(t, "config", "crio")
	require.NoError(t, err)
	assert.Contains(t, out, "internal_repair = false\n")
	assert.Contains(t, out, fmt.Sprintf("hooks_dir = [%q]\n", h.path("hooks")))

	out, _, err = h.run(t, "config", "hook")
	require.NoError(t, err)
	assert.Contains(t, out, fmt.Sprintf("%q", h.path("guard")))
	assert.Contains(t, out, fmt.Sprintf("%q", h.path("run/mounts")))
}

// TestInstall sets up a host whose CRI-O does not run.
func TestInstall(t *testing.T) {
	require.Zero(t, os.Getuid(), "containers/storage needs root")
	h := newHost(t)
	h.write(t, "guard", "#!/bin/sh\n")
	h.write(t, "ocihold.toml.d/10.toml", "[handlers.vm]\nroot = \"DIR/roots/vm\"\n")
	require.NoError(t, os.MkdirAll(h.path("crio.conf.d"), 0o755))
	rendered, _, err := h.run(t, "config", "crio")
	require.NoError(t, err)
	assert.Contains(t, rendered, fmt.Sprintf("storage_option = [\"overlay.imagestore=%s\"]\n", h.path("roots/vm")))
	assert.NoDirExists(t, h.path("roots"), "printing changes nothing")

	out, _, err := h.run(t, "config", "crio", "--write")
	require.NoError(t, err)
	assert.Equal(t, "Wrote "+h.path("crio.conf.d/99-ocihold.conf")+".\nCRI-O does not answer. Start it, then ocihold: systemctl start crio ocihold\n", out)
	text, err := os.ReadFile(h.path("crio.conf.d/99-ocihold.conf"))
	require.NoError(t, err)
	assert.Equal(t, rendered, string(text))
	assert.FileExists(t, h.path("roots/vm/.ocihold-root"))
	files, err := os.ReadDir(h.path("crio.conf.d"))
	require.NoError(t, err)
	assert.Len(t, files, 1)
	out, _, err = h.run(t, "config", "hook", "--write")
	require.NoError(t, err)
	assert.Contains(t, out, "Wrote "+h.path("hooks/ocihold.json"))

	out, _, err = h.run(t, "check", "-o", "json", "--kubelet-config", h.path("absent"))
	require.EqualError(t, err, "the node is not set up: 3 failed")
	var findings []struct{ Check, Result, Detail, Fix string }
	require.NoError(t, json.Unmarshal([]byte(out), &findings))
	results := map[string]string{}
	for _, f := range findings {
		results[f.Check] = f.Result
		if f.Result == "failed" {
			assert.NotEmpty(t, f.Fix, f.Check)
		}
	}
	assert.Equal(t, map[string]string{
		"handlers": "ok", "drop-in": "ok", "misplaced files": "ok", "CRI-O": "failed", "root of vm": "ok", "hook": "ok",
		"writable volumes": "ok", "daemon": "failed", "image service": "failed", "kubelet": "warning", "images": "ok",
	}, results)

	// Nothing needs the root, so it can be taken out, and its disk may be gone.
	h.write(t, "ocihold.toml.d/10.toml", "")
	require.NoError(t, os.RemoveAll(h.path("roots")))
	_, _, err = h.run(t, "config", "crio", "--write")
	require.NoError(t, err)
	text, err = os.ReadFile(h.path("crio.conf.d/99-ocihold.conf"))
	require.NoError(t, err)
	assert.NotContains(t, string(text), "imagestore")
}

func TestBadCommandLines(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no such command": {[]string{"remove"}, `unknown command "remove"`},
		"no such part":    {[]string{"config", "kubelet"}, `unknown command "kubelet"`},
		"no such format":  {[]string{"images", "-o", "xml"}, "use table or json"},
		"no image":        {[]string{"pull"}, "accepts 1 arg(s)"},
		"bad image":       {[]string{"pull", "A B"}, "A B"},
		"too much":        {[]string{"volumes", "all"}, "unknown command"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := newHost(t).run(t, c.args...)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// TestRunRefuses holds that a daemon does not start half configured.
func TestRunRefuses(t *testing.T) {
	ready := func(t *testing.T) host {
		h := newHost(t)
		h.write(t, "guard", "#!/bin/sh\n")
		hook, _, err := h.run(t, "config", "hook")
		require.NoError(t, err)
		h.write(t, "hooks/ocihold.json", hook)
		return h
	}
	for name, c := range map[string]struct {
		spoil func(t *testing.T, h host)
		want  string
	}{
		"unknown key": {func(t *testing.T, h host) {
			h.write(t, "ocihold.toml.d/10.toml", "run_dirr = \"/x\"\n")
		}, `10.toml:1: unknown key "run_dirr"; did you mean "run_dir"?`},
		"NRI off": {func(t *testing.T, h host) {
			h.write(t, "crio.conf.d/10.conf", "[crio.nri]\nenable_nri = false\n")
		}, "set enable_nri = true"},
		"no guard": {func(t *testing.T, h host) {
			require.NoError(t, os.Remove(h.path("guard")))
		}, "install ocihold-guard there"},
		"no hook file": {func(t *testing.T, h host) {
			require.NoError(t, os.Remove(h.path("hooks/ocihold.json")))
		}, "run 'ocihold config hook --write'"},
		"hook file of another time": {func(t *testing.T, h host) {
			h.write(t, "hooks/ocihold.json", "{}")
		}, "run 'ocihold config hook --write'"},
		"unsupported driver": {func(t *testing.T, h host) {
			h.write(t, "crio.conf.d/10.conf", "[crio]\nstorage_driver = \"vfs\"\n")
		}, `storage driver "vfs"`},
	} {
		t.Run(name, func(t *testing.T) {
			h := ready(t)
			c.spoil(t, h)
			_, _, err := h.run(t, "run")
			require.ErrorContains(t, err, c.want)
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			require.NoError(t, err)
			assert.NotContains(t, string(mounts), h.dir, "nothing is left")
		})
	}
}

func TestImport(t *testing.T) {
	require.Zero(t, os.Getuid(), "containers/storage needs root")
	image, err := random.Image(1000, 2)
	require.NoError(t, err)
	want, err := image.ConfigName()
	require.NoError(t, err)
	tag, err := name.NewTag("reg.example/a/b:1")
	require.NoError(t, err)
	h := newHost(t)
	require.NoError(t, tarball.WriteToFile(h.path("image.tar"), tag, image))

	t.Chdir(h.dir)
	for _, from := range []string{"image.tar", "docker-archive:image.tar", h.path("image.tar")} {
		out, _, err := h.run(t, "import", from)
		require.NoError(t, err, from)
		assert.Equal(t, want.Hex+"\n", out)
	}
	out, progress, err := h.run(t, "import", "--name", "reg.example/new", "-o", "json", "image.tar")
	require.NoError(t, err)
	assert.Contains(t, out, `"reg.example/new:latest"`)
	assert.Contains(t, progress, "image.tar: 100% of ")

	_, _, err = h.run(t, "import", "oci-archive:image.tar")
	require.ErrorContains(t, err, "import oci-archive:"+h.path("image.tar"))
	_, _, err = h.run(t, "import", "--handler", "kata", "image.tar")
	require.ErrorContains(t, err, `"kata" is not known: there are crun, default`)
}

func TestTemporaryDirectoryIsThatOfCRIO(t *testing.T) {
	h := newHost(t)
	_, _, err := h.run(t, "images")
	require.NoError(t, err)
	assert.DirExists(t, h.path("state/downloads"))

	h = newHost(t)
	h.write(t, "crio.conf.d/10-big", "[crio.image]\nbig_files_temporary_dir = \"DIR/big\"\n")
	_, _, err = h.run(t, "images")
	require.NoError(t, err)
	assert.DirExists(t, h.path("big/ocihold/downloads"))
	assert.NoDirExists(t, h.path("state/downloads"))
}
