package conf

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
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
		dir     string
		hooks   []string
		roots   []string // of handlers
		options []string // in force
		pin     bool
		pinned  []string // in force
		want    string   // HookDir

		validator *CRIOValidator // in force
		required  bool
	}{
		"builtin":   {hooks: []string{"/usr/share/containers/oci/hooks.d"}, want: "/usr/share/containers/oci/hooks.d"},
		"several":   {hooks: []string{"/a", "/b \"c\""}, want: `/b "c"`},
		"own":       {dir: "/own", hooks: []string{"/a", "/b"}, want: "/own"},
		"own-known": {dir: "/a", hooks: []string{"/a", "/b"}, want: "/a"},
		"none":      {want: "/etc/containers/oci/hooks.d"},
		"handlers":  {hooks: []string{"/a"}, roots: []string{"/d/wasm", "/d/\"vm\"/"}, options: []string{"overlay.mountopt=nodev"}, want: "/a"},
		"handlers-in-force": {
			hooks: []string{"/a"}, roots: []string{"/d/a", "/d/b/", "/d/c"}, want: "/a",
			options: []string{"overlay.imagestore=/d/x,/d/./a", "Overlay2.AdditionalImageStore = /d/b"},
		},
		"pin": {hooks: []string{"/a"}, pin: true, want: "/a"},
		"pin-in-force": {
			hooks: []string{"/a"}, pin: true, pinned: []string{"in-use.ocihold.dev/*", "registry.example/\"a\""}, want: "/a",
		},
		"pin-merged": {hooks: []string{"/a"}, roots: []string{"/d/a"}, pin: true, pinned: []string{"*b*", "c"}, want: "/a"},
		"validator":  {hooks: []string{"/a"}, want: "/a", validator: &CRIOValidator{}},
		"validator-required": {
			hooks: []string{"/a"}, want: "/a", validator: &CRIOValidator{RequiredPlugins: []string{"other"}}, required: true,
		},
		"no-pin": {hooks: []string{"/a"}, pinned: []string{"*b*"}, want: "/a"},
	} {
		t.Run(name, func(t *testing.T) {
			c := Default()
			c.Hook.Dir = tc.dir
			c.Volumes.Pin = tc.pin
			c.NRI.Required = tc.required
			c.Handlers = map[string]Handler{DefaultHandler: {Pull: PullOcihold}}
			for i, root := range tc.roots {
				c.Handlers[fmt.Sprint("h", i)] = Handler{Root: root}
			}
			lists, err := toml.Marshal(map[string]any{"crio": map[string]any{
				"storage_option": tc.options, "runtime": map[string]any{"hooks_dir": append([]string{}, tc.hooks...)},
				"image": map[string]any{"pinned_images": append([]string{}, tc.pinned...)},
			}})
			require.NoError(t, err)
			files := map[string]string{"10.conf": string(lists)}
			if v := tc.validator; v != nil {
				table, err := toml.Marshal(map[string]any{"crio": map[string]any{"nri": map[string]any{"default_validator": *v}}})
				require.NoError(t, err)
				files["20.conf"] = string(table)
			}
			dir := writeFiles(t, files)
			crio, err := ReadCRIO("", dir)
			require.NoError(t, err)
			assert.Empty(t, crio.DropIns)
			assert.Equal(t, tc.want, HookDir(c, crio))
			got, err := DropIn(c, crio)
			require.NoError(t, err)
			golden(t, "dropin-"+name+".conf", got)

			file := filepath.Join(dir, "99-ocihold.conf")
			require.NoError(t, os.WriteFile(file, got, 0o644))
			after, err := ReadCRIO("", dir)
			require.NoError(t, err)
			assert.Equal(t, []string{file}, after.DropIns)
			assert.False(t, after.InternalRepair)
			assert.Subset(t, after.PinnedImages, tc.pinned)
			assert.Equal(t, tc.pin, slices.Contains(after.PinnedImages, PinPattern))
			assert.Empty(t, Unmet(c, after))
			if tc.required {
				assert.Contains(t, strings.Join(Unmet(c, crio), "\n"), "does not require the plugin ocihold")
			}
			if tc.validator != nil {
				assert.True(t, after.NRI.DefaultValidator.Enable)
				assert.Subset(t, after.NRI.DefaultValidator.RequiredPlugins, tc.validator.RequiredPlugins)
				assert.Equal(t, tc.required, slices.Contains(after.NRI.DefaultValidator.RequiredPlugins, "ocihold"))
			}
			known := !tc.pin || slices.Contains(tc.pinned, PinPattern)
			assert.Equal(t, !known, strings.Contains(strings.Join(Unmet(c, crio), "\n"), PinPattern))
			for _, root := range tc.roots {
				assert.Contains(t, ImageStores(after.StorageOptions), filepath.Clean(root))
			}
			assert.Len(t, ImageStores(after.StorageOptions), len(slices.Compact(slices.Sorted(slices.Values(ImageStores(after.StorageOptions))))), "a store twice")

			without, err := ReadCRIOWithoutDropIn("", dir)
			require.NoError(t, err)
			assert.Equal(t, []string{file}, without.DropIns)
			without.DropIns = nil
			assert.Equal(t, crio, without)
			again, err := DropIn(c, without)
			require.NoError(t, err)
			assert.Equal(t, string(got), string(again), "rendered with the drop-in in force")
		})
	}
}

// What CRI-O has not cannot be required of it.
func TestDropInWithoutValidator(t *testing.T) {
	c := Default()
	c.NRI.Required = true
	_, err := DropIn(c, builtinCRIO())
	require.ErrorContains(t, err, "required in [nri]")
	live, err := ParseCRIO([]byte("[crio.nri]\nenable_nri = true\n[crio.nri.default_validator]\nnri_enable_default_validator = false\n"))
	require.NoError(t, err)
	assert.NotNil(t, live.NRI.DefaultValidator, "a running CRI-O that has it says so")
	live, err = ParseCRIO([]byte("[crio.nri]\nenable_nri = true\n"))
	require.NoError(t, err)
	assert.Nil(t, live.NRI.DefaultValidator)
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
