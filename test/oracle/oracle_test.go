// Package oracle_test holds what Ocihold makes of CRI-O's configuration, and
// the files that Ocihold renders for CRI-O, against CRI-O's own packages. They
// answer through a program of their own, as they cannot be in one module with
// the product; its source is test/crio/oracle.
package oracle_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/test/realnode"
)

const cases = 80

func TestReadCRIO(t *testing.T) {
	oracle := oracleProgram(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var compared int
	for i := range cases {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			h := newHost(t, rand.New(rand.NewPCG(seed, uint64(i))))
			h.write(t)

			want, oracleErr := h.ask(oracle)
			got, err := conf.ReadCRIO(h.file, h.dir)
			if oracleErr != nil {
				require.Error(t, err, "CRI-O refuses it: %s\n%s", oracleErr, h)
				return
			}
			require.NoError(t, err, "CRI-O accepts it:\n%s", h)
			assert.Equal(t, want.settled(), h.settled(got), "%s", h)
			if t.Failed() {
				return
			}
			compared++

			config, inForce := h.handlers(), conf.ImageStores(lastOfEach(got.StorageOptions))
			dropIn, err := conf.DropIn(config, got)
			require.NoError(t, err)
			require.NoError(t, os.MkdirAll(h.dir, 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(h.dir, "ü-last.conf"), dropIn, 0o644))
			after, err := h.ask(oracle)
			require.NoError(t, err, "%s\n%s", h, dropIn)
			asked := *got
			for _, root := range config.Roots() {
				if !slices.Contains(inForce, root.Root) {
					asked.StorageOptions = append(asked.StorageOptions, "overlay.imagestore="+root.Root)
				}
			}
			asked.StorageOptions = lastOfEach(asked.StorageOptions) // CRI-O does so once it reads a file
			asked.InternalRepair = false
			asked.NRI.Enabled = true
			asked.NRI.DisableConnections = false
			if len(asked.HooksDir) == 0 {
				asked.HooksDir = []string{"/etc/containers/oci/hooks.d"}
			}
			assert.Equal(t, h.settled(&asked), after.settled(), "drop-in in force:\n%s\n%s", h, dropIn)

			got, err = conf.ReadCRIO(h.file, h.dir)
			require.NoError(t, err)
			assert.Equal(t, after.settled(), h.settled(got), "drop-in read:\n%s\n%s", h, dropIn)
			for _, root := range config.Roots() {
				assert.Equal(t, max(1, count(inForce, root.Root)), count(conf.ImageStores(after.StorageOptions), root.Root),
					"%s among CRI-O's stores:\n%s\n%s", root.Root, h, dropIn)
			}
			without, err := conf.ReadCRIOWithoutDropIn(h.file, h.dir)
			require.NoError(t, err)
			again, err := conf.DropIn(config, without)
			require.NoError(t, err)
			assert.Equal(t, string(dropIn), string(again), "rendered with the drop-in in force")
		})
	}
	assert.GreaterOrEqual(t, compared, cases/2, "too few configurations that CRI-O accepts")
}

func TestHookFile(t *testing.T) {
	oracle := oracleProgram(t)
	c := conf.Default()
	c.Hook.Guard = filepath.Join(t.TempDir(), "ocihold-guard")
	require.NoError(t, os.WriteFile(c.Hook.Guard, nil, 0o755))
	file, err := conf.HookFile(c)
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ocihold.json"), file, 0o644))

	for name, tc := range map[string]struct {
		annotations map[string]string
		runs        bool
	}{
		"none":           {map[string]string{}, false},
		"bare":           {map[string]string{"image-volume.ocihold.dev": "x"}, true},
		"pod":            {map[string]string{"image-volume.ocihold.dev/pod": "x"}, true},
		"container":      {map[string]string{"image-volume.ocihold.dev/container.a-b.c": "x"}, true},
		"misspelt":       {map[string]string{"image-volume.ocihold.dev/contaner.a": "x"}, true},
		"lines":          {map[string]string{"image-volume.ocihold.dev/pod": "\n- image: a\n  mountPath: /b\n\n"}, true},
		"empty":          {map[string]string{"image-volume.ocihold.dev/pod": ""}, true},
		"among others":   {map[string]string{"a": "b", "image-volume.ocihold.dev/pod": "x", "z": ""}, true},
		"other domain":   {map[string]string{"my-image-volume.ocihold.dev/pod": "x"}, false},
		"longer domain":  {map[string]string{"image-volume.ocihold.dev.example/pod": "x"}, false},
		"any character":  {map[string]string{"image-volume-ocihold.dev/pod": "x"}, false},
		"domain as text": {map[string]string{"a": "image-volume.ocihold.dev/pod"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			stdin, err := json.Marshal(tc.annotations)
			require.NoError(t, err)
			var hooks *struct {
				CreateRuntime []struct {
					Path string
					Args []string
				}
			}
			require.NoError(t, answer(exec.Command(oracle, "-hooks", dir), stdin, &hooks))
			if !tc.runs {
				assert.Nil(t, hooks)
				return
			}
			require.NotNil(t, hooks, "CRI-O does not run the hook")
			require.Len(t, hooks.CreateRuntime, 1)
			assert.Equal(t, c.Hook.Guard, hooks.CreateRuntime[0].Path)
			assert.Equal(t, []string{c.Hook.Guard, "--mounts", "/run/ocihold/mounts"}, hooks.CreateRuntime[0].Args)
		})
	}
}

func oracleProgram(t *testing.T) string {
	t.Helper()
	program, err := realnode.OracleBinary(t.Context())
	require.NoError(t, err)
	require.Zero(t, os.Geteuid(), "must run as root: containers/storage has other defaults for users")
	return program
}

// answer runs a command and decodes what it prints.
func answer(cmd *exec.Cmd, stdin []byte, v any) error {
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(stdin), &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("run oracle: %w: %s", err, stderr.String())
	}
	return json.Unmarshal(out, v)
}

// crioConfig is CRI-O's config.Config, as far as conf.CRIO has it.
type crioConfig struct {
	Root, RunRoot, ImageStore, Storage             string
	StorageOptions                                 []string
	InternalRepair                                 bool
	Listen                                         string
	PauseImage, PauseImageAuthFile, GlobalAuthFile string
	SignaturePolicyPath, SignaturePolicyDir        string
	BigFilesTemporaryDir, DefaultTransport         string
	InsecureRegistries, PinnedImages               []string
	DecryptionKeysPath, DefaultRuntime             string
	Runtimes                                       map[string]crioRuntime
	HooksDir                                       []string
	NRI                                            crioNRI
}

type crioRuntime struct {
	RuntimePath, RuntimeType, RuntimeRoot, RuntimeConfigPath string
	InheritDefaultRuntime                                    bool
}

type crioNRI struct {
	Enabled                                         bool
	SocketPath                                      string
	DisableConnections                              bool
	PluginRegistrationTimeout, PluginRequestTimeout time.Duration
}

// settled returns o as conf.CRIO, with what CRI-O does to its values only
// where it uses them: paths of the store made clean, NRI's empty settings
// filled in. No difference is made between an empty and no list.
func (o *crioConfig) settled() conf.CRIO {
	c := conf.CRIO{
		Root: filepath.Clean(o.Root), RunRoot: filepath.Clean(o.RunRoot),
		ImageStore: o.ImageStore, Driver: o.Storage, StorageOptions: list(o.StorageOptions),
		InternalRepair: o.InternalRepair, Listen: o.Listen,
		PauseImage: o.PauseImage, PauseImageAuthFile: o.PauseImageAuthFile, GlobalAuthFile: o.GlobalAuthFile,
		NamespacedAuthDir: "/etc/crio/auth", // the CRI-O at hand is too old for it
		SignaturePolicy:   o.SignaturePolicyPath, SignaturePolicyDir: o.SignaturePolicyDir,
		BigFilesTemporaryDir: o.BigFilesTemporaryDir, DefaultTransport: o.DefaultTransport,
		InsecureRegistries: list(o.InsecureRegistries), PinnedImages: list(o.PinnedImages),
		DecryptionKeysPath: o.DecryptionKeysPath, DefaultRuntime: o.DefaultRuntime,
		Runtimes: map[string]conf.Runtime{}, HooksDir: list(o.HooksDir),
		NRI: conf.CRIONRI{
			Enabled: o.NRI.Enabled, Listen: o.NRI.SocketPath, DisableConnections: o.NRI.DisableConnections,
			PluginRegistrationTimeout: o.NRI.PluginRegistrationTimeout, PluginRequestTimeout: o.NRI.PluginRequestTimeout,
		},
	}
	for name, r := range o.Runtimes {
		c.Runtimes[name] = conf.Runtime{
			Path: r.RuntimePath, Type: r.RuntimeType, Root: r.RuntimeRoot, ConfigPath: r.RuntimeConfigPath,
			InheritDefaultRuntime: r.InheritDefaultRuntime,
		}
	}
	if c.NRI.Listen == "" {
		c.NRI.Listen = "/var/run/nri/nri.sock"
	}
	if c.NRI.PluginRegistrationTimeout == 0 {
		c.NRI.PluginRegistrationTimeout = 5 * time.Second
	}
	if c.NRI.PluginRequestTimeout == 0 {
		c.NRI.PluginRequestTimeout = 2 * time.Second
	}
	return c
}

func lastOfEach(l []string) (kept []string) {
	for i, s := range l {
		if !slices.Contains(l[i+1:], s) {
			kept = append(kept, s)
		}
	}
	return kept
}

func count(l []string, s string) (n int) {
	for _, other := range l {
		if other == s {
			n++
		}
	}
	return n
}

func list(l []string) []string { return append([]string{}, l...) }

// host is a set of configuration files, and what they refer to, in a temporary
// directory.
type host struct {
	*rand.Rand
	tmp, bin  string
	file, dir string
	text      map[string]string // by path
}

func newHost(t *testing.T, r *rand.Rand) *host {
	t.Helper()
	tmp := t.TempDir()
	h := &host{Rand: r, tmp: tmp, bin: filepath.Join(tmp, "bin"), dir: filepath.Join(tmp, "crio.conf.d"), text: map[string]string{}}
	for _, name := range []string{"CONTAINERS_STORAGE_CONF", "XDG_CONFIG_HOME", "STORAGE_DRIVER", "STORAGE_OPTS"} {
		t.Setenv(name, "") // so that it is put back at the end
		require.NoError(t, os.Unsetenv(name))
	}
	t.Setenv("PATH", h.bin+":"+os.Getenv("PATH"))

	switch h.IntN(8) {
	case 0:
	case 1:
		t.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(tmp, h.pick("absent", "storage.conf")))
		h.text[filepath.Join(tmp, "storage.conf")] = h.storageConf()
	default:
		t.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(tmp, "storage.conf"))
		h.text[filepath.Join(tmp, "storage.conf")] = h.storageConf()
	}
	if h.once(8) {
		t.Setenv("STORAGE_DRIVER", h.pick("overlay", "overlay2", "vfs"))
	}
	if h.once(8) {
		t.Setenv("STORAGE_OPTS", h.pick("", "overlay.size=1G", "overlay.size=2G,overlay.mountopt=nodev"))
	}
	if !h.once(6) {
		h.file = filepath.Join(tmp, "crio.conf")
		if !h.once(20) {
			h.text[h.file] = h.crioConf()
		}
	}
	names := []string{
		"00-a.conf", "00-a.conf.bak", "10-b.toml", "9-c", ".hidden", "B.conf", "a.conf", "ä.conf", "README",
		"05-sub/z.conf", "05-sub/a.conf", "05-sub.conf", "05-sub/deep/er/x", "z/99.conf",
	}
	for range h.IntN(6) {
		h.text[filepath.Join(h.dir, h.pick(names...))] = h.crioConf()
	}
	return h
}

// settled returns what was read in the form of crioConfig.settled.
func (h *host) settled(c *conf.CRIO) conf.CRIO {
	s := *c
	s.DropIns = nil // no part of what CRI-O knows
	s.StorageOptions, s.HooksDir = list(c.StorageOptions), list(c.HooksDir)
	s.InsecureRegistries, s.PinnedImages = list(c.InsecureRegistries), list(c.PinnedImages)
	s.Runtimes = map[string]conf.Runtime{}
	for name, r := range c.Runtimes {
		if !strings.Contains(r.Path, "/") {
			r.Path = filepath.Join(h.bin, r.Path)
		}
		s.Runtimes[name] = r
	}
	return s
}

// handlers returns a configuration with some handlers, whose roots may be in
// force.
func (h *host) handlers() conf.Config {
	c := conf.Default()
	c.Handlers = map[string]conf.Handler{conf.DefaultHandler: {Pull: conf.PullCRIO}}
	for i, root := range []string{"/s/1", "/s/2", "/s/3 \"ü\""} {
		if h.once(2) {
			c.Handlers[fmt.Sprint("h", i)] = conf.Handler{Root: root}
		}
	}
	return c
}

func (h *host) write(t *testing.T) {
	t.Helper()
	for _, name := range []string{"crun", "runc", "vm", "wasm", "containerd-shim-kata-v2"} {
		h.text[filepath.Join(h.bin, name)] = "#!/bin/sh\necho '{}'\n"
	}
	h.text[filepath.Join(h.tmp, "real", "runtime-config")] = ""
	for path, text := range h.text {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o755))
	}
	require.NoError(t, os.Symlink("real", filepath.Join(h.tmp, "link")))
}

func (h *host) ask(oracle string) (*crioConfig, error) {
	var c crioConfig
	return &c, answer(exec.Command(oracle, h.file, h.dir), nil, &c)
}

// String prints the configuration files.
func (h *host) String() string {
	var out strings.Builder
	for _, name := range []string{"CONTAINERS_STORAGE_CONF", "STORAGE_DRIVER", "STORAGE_OPTS"} {
		if value, ok := os.LookupEnv(name); ok {
			fmt.Fprintf(&out, "%s=%q\n", name, value)
		}
	}
	var paths []string
	for path := range h.text {
		if !strings.HasPrefix(path, h.bin) {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	for _, path := range paths {
		fmt.Fprintf(&out, "--- %s\n%s", path, h.text[path])
	}
	return out.String()
}

func (h *host) once(in int) bool { return h.IntN(in) == 0 }

func (h *host) pick(from ...string) string { return from[h.IntN(len(from))] }

// some returns up to n picks as a TOML array.
func (h *host) some(n int, from ...string) string {
	picked := []string{}
	for range h.IntN(n + 1) {
		picked = append(picked, fmt.Sprintf("%q", h.pick(from...)))
	}
	return "[" + strings.Join(picked, ", ") + "]"
}

// text collects some of the lines it is offered.
type text struct {
	*host
	out strings.Builder
}

func (w *text) maybe(in int, key, value string) {
	if w.once(in) {
		fmt.Fprintf(&w.out, "%s = %s\n", key, value)
	}
}

func (w *text) maybeText(in int, key string, from ...string) {
	w.maybe(in, key, fmt.Sprintf("%q", w.pick(from...)))
}

func (w *text) table(name string) { fmt.Fprintf(&w.out, "[%s]\n", name) }

func (h *host) storageConf() string {
	w := &text{host: h}
	w.table("storage")
	w.maybeText(2, "driver", "overlay", "overlay", "overlay2", "vfs", "")
	w.maybeText(2, "graphroot", h.tmp+"/real", h.tmp+"/link", h.tmp+"/link/../b", "/x/$UID/${STORAGE_DRIVER}y", "")
	w.maybeText(3, "runroot", h.tmp+"/link", "/run/x//y/", "")
	w.maybeText(4, "imagestore", h.tmp+"/images", h.tmp+"/real")
	w.maybeText(6, "rootless_storage_path", "/y/$UID")
	w.maybe(6, "transient_store", "true")
	w.table("storage.options")
	w.maybe(2, "additionalimagestores", h.some(3, "/s/1", "/s/2"))
	w.maybe(6, "additionallayerstores", h.some(2, "/l/1", "/l/2:ref"))
	w.maybeText(4, "size", "1G")
	w.maybeText(5, "mount_program", "/usr/bin/fuse-overlayfs")
	w.maybeText(4, "skip_mount_home", "true", "false")
	w.maybeText(4, "ignore_chown_errors", "true")
	w.maybe(5, "force_mask", "0o700")
	w.maybeText(4, "mountopt", "nodev", "nodev,metacopy=on")
	w.maybe(6, "pull_options", `{enable_partial_images = "true"}`)
	w.table("storage.options.overlay")
	w.maybeText(4, "ignore_chown_errors", "false")
	w.maybeText(4, "mount_program", "/bin/other")
	w.maybeText(3, "mountopt", "volatile", "nodev")
	w.maybeText(4, "size", "2G")
	w.maybeText(4, "inodes", "1000")
	w.maybeText(4, "skip_mount_home", "true")
	w.maybeText(4, "force_mask", "0755", "shared")
	w.maybeText(4, "use_composefs", "true")
	w.table("storage.options.vfs")
	w.maybeText(3, "ignore_chown_errors", "false")
	w.maybe(40, "ignore_chown_errors", "= syntax")
	return w.out.String()
}

func (h *host) crioConf() string {
	w := &text{host: h}
	w.table("crio")
	w.maybeText(3, h.pick("root", "root", "Root"), "/a/root", "/a/./root/../b/", "")
	w.maybeText(3, "runroot", "/a/run", "/a/run/", "")
	w.maybeText(4, "imagestore", "/a/images", "")
	w.maybeText(3, "storage_driver", "overlay", "vfs", "")
	w.maybe(2, "storage_option", h.some(4, "overlay.mountopt=nodev", "overlay.mountopt=nodev,metacopy=on", "overlay.imagestore=/s/1", "overlay.imagestore=/s/2", "overlay2.additionalimagestore = /s/2/,/s/x"))
	w.maybe(3, "internal_repair", h.pick("true", "false"))
	w.maybeText(5, "log_dir", "/a/log")
	w.maybe(40, "runroot_", "{not_known_to = 'CRI-O'}")
	w.table("crio.api")
	w.maybeText(3, "listen", "/a/crio.sock", "")
	w.maybeText(5, "stream_port", "0")
	w.table("crio.image")
	w.maybeText(4, "pause_image", "example.com/pause:1", "example.com/other")
	w.maybeText(4, "pause_image_auth_file", "/a/pause.json", "")
	w.maybeText(4, "global_auth_file", "/a/auth.json", "")
	w.maybeText(4, "signature_policy", "/a/policy.json", "")
	w.maybeText(4, "signature_policy_dir", "/a/policies")
	w.maybeText(4, "big_files_temporary_dir", "/a/tmp", "")
	w.maybeText(4, "default_transport", "docker://", "oci:")
	w.maybe(4, "insecure_registries", h.some(3, "localhost:5000", "10.0.0.0/8", "example.com"))
	w.maybe(4, "pinned_images", h.some(3, "a*", "*b*", "c"))
	w.table("crio.nri")
	w.maybe(3, "enable_nri", h.pick("true", "false"))
	w.maybeText(4, "nri_listen", "/a/nri.sock", "")
	w.maybe(4, "nri_disable_connections", h.pick("true", "false"))
	w.maybe(4, "nri_plugin_registration_timeout", h.pick(`"7s"`, `"0s"`, "3000000000"))
	w.maybe(4, "nri_plugin_request_timeout", h.pick(`"1m"`, `"0"`, "500000000"))
	w.table("crio.runtime")
	w.maybeText(4, "decryption_keys_path", "/a/keys", "")
	w.maybeText(4, "default_runtime", "", "crun", "crun", "runc", "vm")
	w.maybe(3, "hooks_dir", h.some(3, "/a/hooks.d", "/b/hooks.d", "/usr/share/containers/oci/hooks.d"))
	w.maybeText(5, "log_level", "debug")
	w.maybe(40, "default_runtime_", "= syntax")
	for _, name := range []string{"crun", "runc", "wasm"} {
		if h.once(3) {
			w.table("crio.runtime.runtimes." + name)
			w.maybeText(2, "runtime_path", h.bin+"/"+h.pick("crun", "runc", "wasm"))
			w.maybeText(2, "runtime_type", "", "oci", "pod")
			w.maybeText(2, "runtime_root", "/run/"+name)
			w.maybe(4, "inherit_default_runtime", h.pick("true", "false"))
			w.maybe(5, "monitor_env", `["PATH=/bin"]`)
		}
	}
	if h.once(3) {
		w.table("crio.runtime.runtimes.vm")
		fmt.Fprintf(&w.out, "runtime_path = %q\nruntime_type = \"vm\"\n", h.bin+"/containerd-shim-kata-v2")
		w.maybeText(2, "runtime_root", "/run/vm")
		w.maybeText(2, "runtime_config_path", h.tmp+"/real/runtime-config")
		w.maybe(4, "inherit_default_runtime", "true")
	}
	return w.out.String()
}
