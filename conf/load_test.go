package conf

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// writeFiles writes files by relative path below a new directory and returns
// it.
func writeFiles(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	return dir
}

func TestLoad(t *testing.T) {
	dir := writeFiles(t, map[string]string{
		"ocihold.toml": `
run_dir = "/a"
log_level = "debug"
crio.config = "/b/crio.conf"
[nri]
plugin_name = "n"
plugin_index = "07"
socket = "/b/nri.sock"
[hook]
guard = "/b/guard"
dir = "/b/hooks.d"
[volumes]
mount_api = "mount"
trust_present = true
harden_native = false
allowed_images = ["reg.example/**"]
allowed_namespaces = ["team-*", "shop"]
max_image_bytes = "10GB"
max_scratch_bytes = "2GiB"
pin = true
[image_service]
socket = "/b/image.sock"
report_runtime_handler = true
[pull]
stall_timeout = "1m30s"
[metrics]
address = "[::1]:9537"
[media_types]
"application/vnd.a" = "tar"
"application/vnd.b*" = "tar"
[handlers.default]
pull = "crio"
[handlers.vm]
root = "/d/vm"
options = ["overlay.mountopt=nodev", "overlay.size=1G"]
allow_annotation = true
gc_high = 70
gc_low = 50
gc_min_age = "1h"
gc_max_age = "168h"
gc_interval = "5m"
max_bytes = "1.5GiB"
max_image_bytes = "1GiB"
pinned_images = ["a", "b/*"]
[handlers.wasm]
root = "/d/wasm"
runroot = "/e/wasm"
driver = "overlay"
platform = "wasi/wasm"
auth_file = "/b/auth.json"
signature_policy = "/b/policy.json"
registries_conf = "/b/registries.conf"
pull_concurrency = 3
[[routes]]
image = "a/*"
handler = "vm"
[[routes]]
image = "b/*"
handler = "wasm"
`,
		"ocihold.toml.d/40-handlers.toml": `
[handlers.vm]
root = "/d/other"
gc_low = 60
pinned_images = ["c"]
options = ["overlay.mountopt=noexec"]
[handlers.wasm]
pull_concurrency = 4
[[routes]]
handler = "vm"
image = "c"
`,
		"ocihold.toml.d/20-b.toml":     "log_level = \"warn\"\nnri = { plugin_index = \"20\" }\n[media_types]\n\"application/vnd.b*\" = \"file\"",
		"ocihold.toml.d/10-a.toml":     "log_level = \"trace\"\nrun_dir = \"/c\"",
		"ocihold.toml.d/30-c.conf":     "not read",
		"ocihold.toml.d/sub/40-d.toml": "not read",
	})
	c, err := Load(filepath.Join(dir, "ocihold.toml"), true)
	require.NoError(t, err)
	assert.Equal(t, Config{
		RunDir:   "/c",
		StateDir: "/var/lib/ocihold",
		LogLevel: "warn",
		CRIO:     CRIOLocation{Config: "/b/crio.conf", ConfigDir: "/etc/crio/crio.conf.d"},
		NRI:      NRI{PluginName: "n", PluginIndex: "20", Socket: "/b/nri.sock"},
		Hook:     Hook{Guard: "/b/guard", Dir: "/b/hooks.d"},
		Volumes: Volumes{
			MountAPI: "mount", TrustPresent: true, Pin: true,
			AllowedImages: []string{"reg.example/**"}, AllowedNamespaces: []string{"team-*", "shop"}, MaxImageBytes: 10_000_000_000,
			MaxScratchBytes: 2 << 30,
		},
		Handlers: map[string]Handler{
			"default": {Name: "default", Pull: "crio"},
			"vm": {
				Name: "vm", Root: "/d/other", RunRoot: "/c/roots/vm", Options: []string{"overlay.mountopt=noexec"},
				AllowAnnotation: true,
				GCHigh:          70, GCLow: 60, GCMinAge: time.Hour, GCMaxAge: 168 * time.Hour, GCInterval: 5 * time.Minute,
				MaxBytes: 3 << 29, MaxImageBytes: 1 << 30, PinnedImages: []string{"c"},
			},
			"wasm": {
				Name: "wasm", Root: "/d/wasm", RunRoot: "/e/wasm", Driver: "overlay", Platform: "wasi/wasm",
				AuthFile: "/b/auth.json", SignaturePolicy: "/b/policy.json", RegistriesConf: "/b/registries.conf", PullConcurrency: 4,
				GCHigh: 85, GCLow: 80, GCMinAge: 2 * time.Minute, GCInterval: time.Minute,
			},
		},
		Routes:       []Route{{Image: "c", Handler: "vm"}},
		MediaTypes:   map[string]string{"application/vnd.a": "tar", "application/vnd.b*": "file"},
		ImageService: ImageService{Socket: "/b/image.sock", ReportRuntimeHandler: true},
		Pull:         Pull{StallTimeout: 90 * time.Second},
		Metrics:      Metrics{Address: "[::1]:9537"},
	}, c)
	assert.Equal(t, "/c/mounts", c.MountsDir())
	assert.Equal(t, "/b/image.sock", c.ImageSocket())
	assert.Equal(t, "/etc/crio/crio.conf.d/99-ocihold.conf", c.DropInFile())
	assert.Equal(t, []Handler{c.Handlers["vm"], c.Handlers["wasm"]}, c.Roots())
}

func TestLoadAbsent(t *testing.T) {
	dir := writeFiles(t, map[string]string{"none.toml.d/a.toml": `run_dir = "/a"`})

	c, err := Load(filepath.Join(dir, "absent.toml"), false)
	require.NoError(t, err)
	assert.Equal(t, Default(), c)

	c, err = Load(filepath.Join(dir, "none.toml"), false)
	require.NoError(t, err, "drop-ins without a main file")
	assert.Equal(t, "/a", c.RunDir)

	_, err = Load(filepath.Join(dir, "absent.toml"), true)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorContains(t, err, "absent.toml")

	_, err = Load(dir, false)
	assert.Error(t, err, "a directory is not an absent file")
}

func TestLoadRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		main, dropIn string
		want         []string // lines; DIR stands for the directory
	}{
		"unknown key at the top": {
			main: "\nrun_dri = \"/a\"\n",
			want: []string{`DIR/o.toml:2: unknown key "run_dri"; did you mean "run_dir"?`},
		},
		"unknown key in a table": {
			main: "# comment\n[volumes]\n\n\n\n\nmount_ap = \"auto\"\n",
			want: []string{`DIR/o.toml:7: unknown key "volumes.mount_ap"; did you mean "volumes.mount_api"?`},
		},
		"unknown table, its keys not told": {
			main: "[volume]\nmount_api = \"auto\"\nx.y = 1\n",
			want: []string{`DIR/o.toml:1: unknown key "volume"; did you mean "volumes"?`},
		},
		"unknown table below a known one": {
			main: "[nri.sockets]\na = 1\n",
			want: []string{`DIR/o.toml:1: unknown key "nri.sockets"; did you mean "nri.socket"?`},
		},
		"unknown array of tables": {
			main: "[[hooks]]\na = 1\n[[hooks]]\na = 2\n",
			want: []string{`DIR/o.toml:3: unknown key "hooks"; did you mean "hook"?`},
		},
		"unknown dotted key": {
			main: "log_level = \"info\"\nhook.gard = \"/a\"\n",
			want: []string{`DIR/o.toml:2: unknown key "hook.gard"; did you mean "hook.guard"?`},
		},
		"unknown key in an inline table": {
			main: "crio = { config = \"/a\", configdir = \"/b\" }\n",
			want: []string{`DIR/o.toml:1: unknown key "crio.configdir"; did you mean "crio.config_dir"?`},
		},
		"right key in the wrong table": {
			main: "mount_api = \"auto\"\n",
			want: []string{`DIR/o.toml:1: unknown key "mount_api"; did you mean "volumes.mount_api"?`},
		},
		"other case": {
			main: "[NRI]\n",
			want: []string{`DIR/o.toml:1: unknown key "NRI"; did you mean "nri"?`},
		},
		"quoted key": {
			main: "\"run dir\" = \"/a\"\n",
			want: []string{`DIR/o.toml:1: unknown key "\"run dir\""; did you mean "run_dir"?`},
		},
		"key below a value": {
			main: "[log_level]\nx = 1\n",
			want: []string{`DIR/o.toml:1: key "log_level" must be a string, not a table`},
		},
		"unknown key in a drop-in": {
			main:   "run_dir = \"/a\"\n",
			dropIn: "[volumes]\nmount_ap = \"auto\"\n",
			want:   []string{`DIR/o.toml.d/a.toml:2: unknown key "volumes.mount_ap"; did you mean "volumes.mount_api"?`},
		},
		"several faults": {
			main: "a = 1\nrun_dir = true\n[crio]\nconfig = 3\nb = [1,\n2]\nc = 1\n",
			want: []string{
				`DIR/o.toml:1: unknown key "a"; did you mean "run_dir"?`,
				`DIR/o.toml:2: key "run_dir" must be a string, not a bool`,
				`DIR/o.toml:4: key "crio.config" must be a string, not an integer`,
				`DIR/o.toml:5: unknown key "crio.b"; did you mean "crio.config"?`,
				`DIR/o.toml:7: unknown key "crio.c"; did you mean "crio.config"?`,
			},
		},
		"array for text": {
			main: "\n[nri]\nsocket = [\"/a\"]\n",
			want: []string{`DIR/o.toml:3: key "nri.socket" must be a string, not an array`},
		},
		"text for a table": {
			main: "volumes = \"auto\"\n",
			want: []string{`DIR/o.toml:1: key "volumes" must be a table, not a string`},
		},
		"array of tables for a table": {
			main: "[[volumes]]\nmount_api = \"auto\"\n",
			want: []string{`DIR/o.toml:1: key "volumes" must be a table, not an array of tables`},
		},
		"wrong type in a drop-in": {
			dropIn: "\nlog_level = 3\n",
			want:   []string{`DIR/o.toml.d/a.toml:2: key "log_level" must be a string, not an integer`},
		},
		"unknown key of a handler": {
			main: "[handlers.vm]\nroot = \"/a\"\nplatforms = \"wasi/wasm\"\n",
			want: []string{`DIR/o.toml:3: unknown key "handlers.vm.platforms"; did you mean "handlers.vm.platform"?`},
		},
		"handler's key at the top": {
			main: "platform = \"wasi/wasm\"\n",
			want: []string{`DIR/o.toml:1: unknown key "platform"; did you mean "handlers.NAME.platform"?`},
		},
		"handler that is no table": {
			main: "[handlers]\nvm = \"/a\"\n",
			want: []string{`DIR/o.toml:2: key "handlers.vm" must be a table, not a string`},
		},
		"options of other things than text": {
			main: "[handlers.vm]\noptions = [\"a=b\", 3]\n",
			want: []string{`DIR/o.toml:2: key "handlers.vm.options" must be an array of strings only, not with an integer`},
		},
		"number as text": {
			main: "handlers.vm = {pull_concurrency = \"3\"}\n",
			want: []string{`DIR/o.toml:1: key "handlers.vm.pull_concurrency" must be an integer, not a string`},
		},
		"unknown keys of routes": {
			main: "[[routes]]\nimage = \"a\"\nhandlr = \"vm\"\n[[routes]]\nhandler = \"vm\"\nimage = [\n\"a\"]\n\n[[routes]]\nhandlr = \"vm\"\n",
			want: []string{
				`DIR/o.toml:3: unknown key "routes.handlr"; did you mean "routes.handler"?`,
				`DIR/o.toml:7: key "routes.image" must be a string, not an array`,
				`DIR/o.toml:10: unknown key "routes.handlr"; did you mean "routes.handler"?`,
			},
		},
		"routes as a table": {
			main: "[routes]\nimage = \"a\"\n",
			want: []string{`DIR/o.toml:1: key "routes" must be an array of tables, not a table`},
		},
		"routes as text": {
			main: "routes = [\"a\"]\n",
			want: []string{`DIR/o.toml:1: key "routes" must be an array of tables, not an array`},
		},
		"time-out without a unit": {
			main: "[pull]\nstall_timeout = \"120\"\n",
			want: []string{`DIR/o.toml:2: key "pull.stall_timeout" must be a duration such as "2m", not "120"`},
		},
		"time-out as a number": {
			main: "[pull]\nstall_timeout = 120\n",
			want: []string{`DIR/o.toml:2: key "pull.stall_timeout" must be a duration such as "2m", not an integer`},
		},
		"size without a number": {
			main: "[handlers.vm]\nmax_bytes = \"much\"\n",
			want: []string{`DIR/o.toml:2: key "handlers.vm.max_bytes" must be a size such as "100GB" or "100GiB", not "much"`},
		},
		"size as a number": {
			main: "[handlers.vm]\nmax_bytes = 100\n",
			want: []string{`DIR/o.toml:2: key "handlers.vm.max_bytes" must be a size such as "100GB" or "100GiB", not an integer`},
		},
		"syntax": {
			main: "run_dir = \"/a\"\nlog_level = loud\n",
			want: []string{`DIR/o.toml:2: expected value but found "loud" instead`},
		},
		"same key twice": {
			main: "run_dir = \"/a\"\nrun_dir = \"/b\"\n",
			want: []string{`DIR/o.toml:2: Key 'run_dir' has already been defined.`},
		},
		"value": {
			main: "[volumes]\nmount_api = \"fuse\"\n",
			want: []string{`validate configuration of DIR/o.toml: volumes.mount_api = "fuse": must be one of auto, fsconfig, mount`},
		},
		"value in a drop-in": {
			dropIn: "log_level = \"loud\"\n",
			want:   []string{`validate configuration of DIR/o.toml: log_level = "loud": must be one of panic, fatal, error, warn, info, debug, trace`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := writeFiles(t, map[string]string{"o.toml": tc.main, "o.toml.d/a.toml": tc.dropIn})
			c, err := Load(filepath.Join(dir, "o.toml"), true)
			require.Error(t, err)
			assert.Equal(t, strings.Join(tc.want, "\n"), strings.ReplaceAll(err.Error(), dir, "DIR"))
			assert.Zero(t, c)
		})
	}
}

func TestValidate(t *testing.T) {
	require.NoError(t, Default().Validate())
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"relative run_dir":    {func(c *Config) { c.RunDir = "run" }, `run_dir = "run": must be an absolute path`},
		"empty run_dir":       {func(c *Config) { c.RunDir = "" }, `run_dir = "": must be an absolute path`},
		"root as run_dir":     {func(c *Config) { c.RunDir = "/a/.." }, `run_dir = "/a/..": must not be the root directory`},
		"relative state_dir":  {func(c *Config) { c.StateDir = "lib" }, `state_dir = "lib": must be an absolute path`},
		"root as state_dir":   {func(c *Config) { c.StateDir = "//" }, `state_dir = "//": must not be the root directory`},
		"log_level":           {func(c *Config) { c.LogLevel = "" }, `log_level = "": must be one of panic, fatal, error, warn, info, debug, trace`},
		"relative config":     {func(c *Config) { c.CRIO.Config = "a" }, `crio.config = "a": must be an absolute path`},
		"relative config_dir": {func(c *Config) { c.CRIO.ConfigDir = "a" }, `crio.config_dir = "a": must be an absolute path`},
		"no plugin name":      {func(c *Config) { c.NRI.PluginName = "" }, `nri.plugin_name = "": must not be empty`},
		"one digit":           {func(c *Config) { c.NRI.PluginIndex = "1" }, `nri.plugin_index = "1": must be two digits`},
		"three digits":        {func(c *Config) { c.NRI.PluginIndex = "100" }, `nri.plugin_index = "100": must be two digits`},
		"no digits":           {func(c *Config) { c.NRI.PluginIndex = "ab" }, `nri.plugin_index = "ab": must be two digits`},
		"relative socket":     {func(c *Config) { c.NRI.Socket = "a" }, `nri.socket = "a": must be an absolute path`},
		"relative guard":      {func(c *Config) { c.Hook.Guard = "ocihold-guard" }, `hook.guard = "ocihold-guard": must be an absolute path`},
		"no guard":            {func(c *Config) { c.Hook.Guard = "" }, `hook.guard = "": must be an absolute path`},
		"relative hook dir":   {func(c *Config) { c.Hook.Dir = "a" }, `hook.dir = "a": must be an absolute path`},
		"drop_in elsewhere":   {func(c *Config) { c.CRIO.DropIn = "/etc/crio/crio.conf.d/../a" }, `crio.drop_in = "/etc/crio/crio.conf.d/../a": must be a file in crio.config_dir`},
		"relative image.sock": {func(c *Config) { c.ImageService.Socket = "a" }, `image_service.socket = "a": must be an absolute path`},
		"mount_api":           {func(c *Config) { c.Volumes.MountAPI = "" }, `volumes.mount_api = "": must be one of auto, fsconfig, mount`},
		"allowed images":      {func(c *Config) { c.Volumes.AllowedImages = []string{"a", "["} }, `volumes.allowed_images = "[": must be patterns for image names, such as registry.example/models/**`},
		"allowed namespaces":  {func(c *Config) { c.Volumes.AllowedNamespaces = []string{""} }, `volumes.allowed_namespaces = "": must be patterns for namespaces, such as team-*`},
		"max scratch bytes":   {func(c *Config) { c.Volumes.MaxScratchBytes = -1 }, `volumes.max_scratch_bytes = "-1B": must not be negative`},
		"max image bytes":     {func(c *Config) { c.Volumes.MaxImageBytes = -1 }, `volumes.max_image_bytes = "-1B": must not be negative`},
		"no stall_timeout":    {func(c *Config) { c.Pull.StallTimeout = 0 }, `pull.stall_timeout = "0s": must be a second or more, such as 2m`},
		"metrics on no port":  {func(c *Config) { c.Metrics.Address = "127.0.0.1" }, `metrics.address = "127.0.0.1": must be host:port, such as 127.0.0.1:9537, or empty for no metrics`},
		"media type as zip":   {func(c *Config) { c.MediaTypes = map[string]string{"a/b": "zip"} }, `media_types."a/b" = "zip": must be tar or file`},
		"no media type":       {func(c *Config) { c.MediaTypes = map[string]string{"": "tar"} }, `media_types."" = "tar": the key must be a media type with "*" for any text, such as application/vnd.example.*`},
		"media type pattern":  {func(c *Config) { c.MediaTypes = map[string]string{"a/[": "tar"} }, `media_types."a/[" = "tar": the key must be a media type with "*" for any text, such as application/vnd.example.*`},
		"all are told": {
			func(c *Config) { c.NRI.PluginName, c.NRI.PluginIndex = "", "" },
			"nri.plugin_name = \"\": must not be empty\nnri.plugin_index = \"\": must be two digits",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := Default()
			tc.change(&c)
			assert.EqualError(t, c.Validate(), tc.want)
		})
	}
}

// The sample shows every key, commented out, with its default, or, for
// handlers, routes and media types, with an example that says something else.
func TestSample(t *testing.T) {
	const sample = "../contrib/ocihold.toml"
	c, err := Load(sample, true)
	require.NoError(t, err)
	assert.Equal(t, Default(), c)

	text, err := os.ReadFile(sample)
	require.NoError(t, err)
	text = regexp.MustCompile(`(?m)^# ([a-z_]+ = |"[^"\n]+" = |\[)`).ReplaceAll(text, []byte("$1"))
	c = Config{}
	require.NoError(t, c.parse(sample, string(text)))
	c.nameHandlers()
	require.NoError(t, c.Validate())
	require.NoError(t, c.ValidateHandlers(&CRIO{Root: "/var/lib/containers/storage", RunRoot: "/run/containers/storage"}))
	c.Handlers, c.Routes, c.MediaTypes = nil, nil, nil
	assert.Equal(t, Default(), c)

	var tree map[string]any
	shown, err := toml.Decode(string(text), &tree)
	require.NoError(t, err)
	named := map[string]bool{}
	for _, key := range shown.Keys() {
		if len(key) > 2 && key[0] == "handlers" {
			key = toml.Key{key[0], "NAME", key[2]}
		}
		if len(key) == 2 && key[0] == "media_types" {
			key = toml.Key{key[0], "NAME"}
		}
		named[key.String()] = true
	}
	for _, known := range configShape.all(nil, nil) {
		if key := known.key.String(); key != "handlers" && key != "handlers.NAME" {
			assert.True(t, named[key], "%s is not in the sample", key)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("run_dir = \"/a\"\n[volumes]\nmount_ap = 1\n")
	f.Add("[[nri]]\nx.\"y z\" = { a = [1, {b = 2}] }\n[nri.socket]\n")
	f.Add("[handlers.a]\nroot = \"/a\"\noptions = [\"a\"]\n[handlers.\"b c\"]\npull_concurrency = 2\n[[routes]]\nimage = \"a\"\n[[routes]]\n")
	f.Add("routes = [{image = \"a\", b = 1}, {handler = 3}]\n[handlers]\n")
	f.Add("[handlers.a]\nmax_bytes = \"1.5GiB\"\ngc_high = 3\n")
	f.Add("[pull]\nstall_timeout = \"1h2m3.5s\"\n")
	f.Add("[media_types]\n\"a/*\" = \"tar\"\nb = 1\n")
	f.Add("crio.config = 1979-05-27T07:32:00Z\nRUN_DIR = 'x'")
	f.Fuzz(func(t *testing.T, text string) {
		c := Default()
		err := c.parse("f", text)
		if err == nil {
			// What is accepted means the same when it is written down.
			again, err := toml.Marshal(c)
			require.NoError(t, err)
			var d Config
			require.NoError(t, d.parse("g", string(again)))
			assert.Equal(t, c, d)
			return
		}
		assert.Equal(t, Default(), c, "changed in spite of %v", err)
		lines := strings.Count(text, "\n") + 1
		for fault := range strings.SplitSeq(err.Error(), "\n") {
			var n int
			_, scanErr := fmt.Sscanf(fault, "f:%d: ", &n)
			require.NoError(t, scanErr, "no line in %q", fault)
			assert.True(t, n >= 1 && n <= lines+1, "line %d of %d in %q", n, lines, fault)
		}
	})
}
