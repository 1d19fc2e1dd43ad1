package guard

import (
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// Whatever the runtime writes, a container whose bundle lacks the volume is
// refused.
func FuzzRun(f *testing.F) {
	bundle := f.TempDir()
	text, err := os.ReadFile("testdata/config.json")
	require.NoError(f, err)
	text = []byte(strings.ReplaceAll(string(text), mountsDir, "/elsewhere"))
	require.NoError(f, os.WriteFile(filepath.Join(bundle, "config.json"), text, 0o600))
	f.Add(`{"ociVersion":"1.0.2-dev","id":"4f6d","status":"creating","pid":1,"bundle":"BUNDLE","annotations":{"a":"b"}}`)
	f.Add(`{"bundle":"BUNDLE"}`)
	f.Add(`{"pid":-1}`)
	f.Fuzz(func(t *testing.T, state string) {
		state = strings.ReplaceAll(state, "BUNDLE", bundle)
		err := Run([]string{"--mounts", mountsDir}, strings.NewReader(state))
		require.Error(t, err)
		require.NotContains(t, err.Error(), "\n")
	})
}

// A bundle is accepted only with the volume as its last mount at or over the
// path.
func FuzzBundle(f *testing.F) {
	text, err := os.ReadFile("testdata/config.json")
	require.NoError(f, err)
	var c config
	require.NoError(f, json.Unmarshal(text, &c))
	mounts, err := json.Marshal(c.Mounts)
	require.NoError(f, err)
	f.Add(mounts, false)
	f.Add(mounts, true)
	f.Add([]byte(`[{"destination":"/models","type":"bind","source":"/run/ocihold/mounts/a","options":["ro","nosuid","nodev","noexec"]},{"destination":"models//"}]`), true)
	f.Fuzz(func(t *testing.T, mounts []byte, exec bool) {
		b := &bundle{}
		if json.Unmarshal(mounts, &b.Mounts) != nil {
			return
		}
		mount, err := b.injected(request.Volume{MountPath: "/models", Exec: exec}, mountsDir)
		if err != nil {
			return
		}
		over := slices.Clone(b.Mounts)
		over = slices.DeleteFunc(over, func(m specs.Mount) bool {
			at := path.Join("/", m.Destination)
			return at != "/models" && at != "/"
		})
		require.NotEmpty(t, over)
		last := over[len(over)-1]
		require.Equal(t, "/models", path.Join("/", last.Destination))
		require.Equal(t, mount, last.Source)
		require.Equal(t, mountsDir, filepath.Dir(mount))
		require.Equal(t, "bind", last.Type)
		require.Subset(t, last.Options, []string{"ro", "nosuid", "nodev"})
		require.NotContains(t, last.Options, "rw")
		if !exec {
			require.Contains(t, last.Options, "noexec")
			require.NotContains(t, last.Options, "exec")
		}
	})
}
