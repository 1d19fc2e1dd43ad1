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
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/storage/pkg/reexec"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/cli"
)

func TestMain(m *testing.M) {
	if reexec.Init() {
		return
	}
	os.Exit(m.Run())
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
	assert.Equal(t, []string{"IMAGE", "IMAGE", "ID", "SIZE", "LEASED"}, strings.Fields(strings.Split(out, "\n")[0]))
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
		}, "run 'ocihold config hook > "},
		"hook file of another time": {func(t *testing.T, h host) {
			h.write(t, "hooks/ocihold.json", "{}")
		}, "run 'ocihold config hook > "},
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
