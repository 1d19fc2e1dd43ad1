package conf

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, string(want), string(got))
}

func TestDropIn(t *testing.T) {
	for name, tc := range map[string]struct {
		dir   string
		hooks []string
		want  string // HookDir
	}{
		"builtin":   {"", []string{"/usr/share/containers/oci/hooks.d"}, "/usr/share/containers/oci/hooks.d"},
		"several":   {"", []string{"/a", "/b \"c\""}, `/b "c"`},
		"own":       {"/own", []string{"/a", "/b"}, "/own"},
		"own-known": {"/a", []string{"/a", "/b"}, "/a"},
		"none":      {"", nil, "/etc/containers/oci/hooks.d"},
	} {
		t.Run(name, func(t *testing.T) {
			c, crio := Default(), builtinCRIO()
			c.Hook.Dir = tc.dir
			crio.HooksDir = tc.hooks
			assert.Equal(t, tc.want, HookDir(c, crio))
			got, err := DropIn(c, crio)
			require.NoError(t, err)
			golden(t, "dropin-"+name+".conf", got)
			assert.Equal(t, tc.hooks, crio.HooksDir, "the caller's list")

			dir := writeFiles(t, map[string]string{"99-ocihold.conf": string(got)})
			after, err := ReadCRIO("", dir)
			require.NoError(t, err)
			assert.False(t, after.InternalRepair)
			again, err := DropIn(c, after)
			require.NoError(t, err)
			assert.Equal(t, string(got), string(again), "rendered with the drop-in in force")
		})
	}
}

func TestHookFile(t *testing.T) {
	c := Default()
	c.RunDir = "/run/other"
	got, err := HookFile(c)
	require.NoError(t, err)
	golden(t, "hook.json", got)
	assert.True(t, json.Valid(got))
}

// The patterns are matched as CRI-O does: unanchored, key by key.
func TestHookKey(t *testing.T) {
	for key, want := range map[string]bool{
		"image-volume.ocihold.dev":                  true,
		"image-volume.ocihold.dev/pod":              true,
		"image-volume.ocihold.dev/container.server": true,
		"image-volume.ocihold.dev/contaner.server":  true,
		"image-volume.ocihold.dev.example/pod":      false,
		"my-image-volume.ocihold.dev/pod":           false,
		"image-volume-ocihold.dev/pod":              false,
		"ocihold.dev/volumes":                       false,
	} {
		got, err := regexp.MatchString(hookKey, key)
		require.NoError(t, err)
		assert.Equal(t, want, got, key)
	}
	for _, value := range []string{"", "x", "\n", "- a: b\n\n  c: d\n"} {
		got, err := regexp.MatchString(hookValue, value)
		require.NoError(t, err)
		assert.True(t, got, "%q", value)
	}
}
