package conf

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// useStorageConf makes a storage.conf with this text the one that counts.
func useStorageConf(t *testing.T, text string) {
	t.Helper()
	dir := writeFiles(t, map[string]string{"storage.conf": text})
	t.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(dir, "storage.conf"))
	for _, name := range []string{"STORAGE_DRIVER", "STORAGE_OPTS"} {
		t.Setenv(name, "") // so that it is put back at the end
		require.NoError(t, os.Unsetenv(name))
	}
}

func TestReadCRIOBuiltIn(t *testing.T) {
	useStorageConf(t, "")
	c, err := ReadCRIO("", filepath.Join(t.TempDir(), "absent"))
	require.NoError(t, err)
	assert.Equal(t, &CRIO{
		Root:               "/var/lib/containers/storage",
		RunRoot:            "/run/containers/storage",
		InternalRepair:     true,
		Listen:             "/var/run/crio/crio.sock",
		PauseImage:         "registry.k8s.io/pause:3.10",
		NamespacedAuthDir:  "/etc/crio/auth",
		SignaturePolicyDir: "/etc/crio/policies",
		DefaultTransport:   "docker://",
		DecryptionKeysPath: "/etc/crio/keys/",
		DefaultRuntime:     "crun",
		Runtimes:           map[string]Runtime{"crun": {Path: "crun", Type: "oci", Root: "/run/crun"}},
		HooksDir:           []string{"/usr/share/containers/oci/hooks.d"},
		NRI: CRIONRI{
			Enabled: true, Listen: "/var/run/nri/nri.sock",
			PluginRegistrationTimeout: 5 * time.Second, PluginRequestTimeout: 2 * time.Second,
		},
	}, c)
}

func TestReadCRIOMerges(t *testing.T) {
	useStorageConf(t, "[storage]\ndriver = \"overlay\"\ngraphroot = \"/s/root\"\nrunroot = \"/s/run\"\n[storage.options]\nadditionalimagestores = [\"/s/1\"]\n")
	for name, tc := range map[string]struct {
		files map[string]string
		check func(*testing.T, *CRIO)
	}{
		"storage.conf gives defaults": {
			map[string]string{"crio.conf": ""},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, "/s/root", c.Root)
				assert.Equal(t, "/s/run", c.RunRoot)
				assert.Equal(t, "overlay", c.Driver)
				assert.Equal(t, []string{"overlay.imagestore=/s/1"}, c.StorageOptions)
			},
		},
		"crio.conf overrides it, empty values do not": {
			map[string]string{"crio.conf": "[crio]\nroot = \"/c//root/\"\nrunroot = \"\"\nstorage_driver = \"\"\n"},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, "/c/root", c.Root)
				assert.Equal(t, "/s/run", c.RunRoot)
				assert.Equal(t, "overlay", c.Driver)
			},
		},
		"any file name, lexical, recursive": {
			map[string]string{
				"crio.conf": "[crio.api]\nlisten = \"/0\"\n",
				"d/a.bak":   "[crio.api]\nlisten = \"/1\"\n[crio.image]\nglobal_auth_file = \"/1\"\nsignature_policy = \"/1\"\n",
				"d/b/z":     "[crio.image]\nglobal_auth_file = \"/2\"\nsignature_policy = \"/2\"\n",
				"d/c.conf":  "[crio.image]\nsignature_policy = \"/3\"\nnamespaced_auth_dir = \"/4\"\n",
			},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, []string{"/1", "/2", "/3", "/4"}, []string{c.Listen, c.GlobalAuthFile, c.SignaturePolicy, c.NamespacedAuthDir})
			},
		},
		"storage options add up, the last of each stays": {
			map[string]string{
				"crio.conf": "[crio]\nstorage_option = [\"b\", \"a\", \"b\"]\n",
				"d/1":       "[crio]\nstorage_option = [\"c\"]\n",
				"d/2":       "[crio]\nstorage_option = [\"a\", \"overlay.imagestore=/s/1\"]\n",
				"d/3":       "[crio]\nstorage_option = []\n",
			},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, []string{"b", "c", "a", "overlay.imagestore=/s/1"}, c.StorageOptions)
			},
		},
		"a repeated handler is replaced as a whole, others stay": {
			map[string]string{
				"crio.conf": "[crio.runtime.runtimes.runc]\nruntime_path = \"/r\"\nruntime_root = \"/rr\"\n",
				"d/1":       "[crio.runtime.runtimes.runc]\nruntime_type = \"pod\"\n",
			},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, map[string]Runtime{
					"crun": {Path: "crun", Type: "oci", Root: "/run/crun"},
					"runc": {Path: "runc", Type: "pod"},
				}, c.Runtimes)
			},
		},
		"a handler inherits from the default one": {
			map[string]string{
				"crio.conf": "[crio.runtime]\ndefault_runtime = \"d\"\n[crio.runtime.runtimes.d]\nruntime_root = \"/d\"\nruntime_type = \"vm\"\nruntime_config_path = \"/dc\"\n" +
					"[crio.runtime.runtimes.i]\nruntime_path = \"/i\"\ninherit_default_runtime = true\n",
			},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, "d", c.DefaultRuntime)
				assert.Equal(t, Runtime{Path: "d", Type: "vm", Root: "/d", ConfigPath: "/dc", InheritDefaultRuntime: true}, c.Runtimes["i"])
			},
		},
		"an empty default_runtime is crun": {
			map[string]string{"crio.conf": "[crio.runtime]\ndefault_runtime = \"\"\n"},
			func(t *testing.T, c *CRIO) { assert.Equal(t, "crun", c.DefaultRuntime) },
		},
		"lists are replaced": {
			map[string]string{
				"crio.conf": "[crio.runtime]\nhooks_dir = [\"/a\", \"/b\"]\n[crio.image]\npinned_images = [\"a\", \"b\"]\ninsecure_registries = [\"a\"]\n",
				"d/1":       "[crio.runtime]\nhooks_dir = [\"/c\"]\n[crio.image]\npinned_images = []\n",
			},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, []string{"/c"}, c.HooksDir)
				assert.Empty(t, c.PinnedImages)
				assert.Equal(t, []string{"a"}, c.InsecureRegistries)
			},
		},
		"NRI's empty settings are the built-in ones": {
			map[string]string{"crio.conf": "[crio.nri]\nnri_listen = \"\"\nnri_plugin_request_timeout = \"0s\"\nnri_plugin_registration_timeout = \"9s\"\n"},
			func(t *testing.T, c *CRIO) {
				assert.Equal(t, CRIONRI{
					Enabled: true, Listen: "/var/run/nri/nri.sock",
					PluginRegistrationTimeout: 9 * time.Second, PluginRequestTimeout: 2 * time.Second,
				}, c.NRI)
			},
		},
		"other keys are skipped": {
			map[string]string{"crio.conf": "x = 1\n[crio]\nx = 1\n[crio.runtime]\npids_limit = 3\n[crio.metrics]\nx = 1\n"},
			func(t *testing.T, c *CRIO) { assert.Equal(t, "/s/root", c.Root) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := writeFiles(t, tc.files)
			c, err := ReadCRIO(filepath.Join(dir, "crio.conf"), filepath.Join(dir, "d"))
			require.NoError(t, err)
			tc.check(t, c)
		})
	}
}

func TestReadCRIORefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		storage string
		files   map[string]string
		want    string
	}{
		"syntax": {
			files: map[string]string{"crio.conf": "[crio]\nroot = x\n"},
			want:  `read CRI-O's configuration: DIR/crio.conf:2: expected value but found "x" instead`,
		},
		"type in a drop-in": {
			files: map[string]string{"crio.conf": "", "d/e/a": "[crio]\n\nroot = 3\n"},
			want:  `read CRI-O's drop-in configuration: DIR/d/e/a: toml: line 3 (last key "crio.root"): incompatible types: TOML value has type int64; destination has type string`,
		},
		"unknown default runtime": {
			files: map[string]string{"crio.conf": "[crio.runtime]\ndefault_runtime = \"x\"\n"},
			want:  `validate CRI-O's configuration: default_runtime = "x" has no table crio.runtime.runtimes.x`,
		},
		"relative root": {
			files: map[string]string{"crio.conf": "[crio]\nroot = \"x\"\n"},
			want:  `validate CRI-O's configuration: root = "x" depends on CRI-O's working directory: make it an absolute path`,
		},
		"relative runroot": {
			files: map[string]string{"crio.conf": "[crio]\nrunroot = \"x\"\n"},
			want:  `validate CRI-O's configuration: runroot = "x" depends on CRI-O's working directory: make it an absolute path`,
		},
		"storage.conf syntax": {
			storage: "[storage]\ndriver = overlay\n",
			want:    `read containers/storage's configuration: STORAGE:2: expected value but found "overlay" instead`,
		},
		"imagestore in the root": {
			storage: "[storage]\ngraphroot = \"/a/./b\"\nimagestore = \"/a/b\"\n",
			want:    `read containers/storage's configuration: STORAGE: imagestore and graphroot are both "/a/b"`,
		},
		"absent crio.conf": {
			want: `read CRI-O's configuration: open DIR/crio.conf: no such file or directory`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			useStorageConf(t, tc.storage)
			dir := writeFiles(t, tc.files)
			c, err := ReadCRIO(filepath.Join(dir, "crio.conf"), filepath.Join(dir, "d"))
			require.Error(t, err)
			assert.Nil(t, c)
			text := strings.ReplaceAll(err.Error(), dir, "DIR")
			text = strings.ReplaceAll(text, os.Getenv("CONTAINERS_STORAGE_CONF"), "STORAGE")
			assert.Equal(t, tc.want, text)
		})
	}
}

func TestReadCRIOAbsent(t *testing.T) {
	useStorageConf(t, "")
	dir := writeFiles(t, map[string]string{"a/b/c": ""})
	_, err := ReadCRIO(filepath.Join(dir, "absent"), dir)
	require.ErrorIs(t, err, fs.ErrNotExist)

	require.NoError(t, os.Symlink("b", filepath.Join(dir, "a", "link")))
	_, err = ReadCRIO("", dir)
	require.Error(t, err, "a link to a directory is read as a file, as CRI-O does")

	t.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(dir, "absent"))
	_, err = ReadCRIO("", "")
	require.ErrorIs(t, err, fs.ErrNotExist, "a storage.conf that is named must exist")
}

func TestReadStorageConf(t *testing.T) {
	t.Setenv("OCIHOLD_TEST_DIR", "/v")
	for name, tc := range map[string]struct {
		text    string
		env     map[string]string
		root    string
		driver  string
		options []string
	}{
		"variables":                        {text: "graphroot = \"$OCIHOLD_TEST_DIR/x/../y\"", root: "/v/y"},
		"rootless path where no root":      {text: "rootless_storage_path = \"/l\"", root: "/l"},
		"root before rootless path":        {text: "rootless_storage_path = \"/l\"\ngraphroot = \"/g\"", root: "/g"},
		"overlay2 is overlay":              {text: "driver = \"overlay2\"\n[storage.options]\nsize = \"1G\"", driver: "overlay", options: []string{"overlay2.size=1G", "overlay.size=1G"}},
		"a driver's own option goes ahead": {text: "driver = \"overlay\"\n[storage.options]\nmountopt = \"a\"\n[storage.options.overlay]\nmountopt = \"b\"", driver: "overlay", options: []string{"overlay.mountopt=a", "overlay.mountopt=b"}},
		"vfs":                              {text: "driver = \"vfs\"\n[storage.options.overlay]\nmountopt = \"b\"\n[storage.options.vfs]\nignore_chown_errors = \"true\"", driver: "vfs", options: []string{"vfs.ignore_chown_errors=true"}},
		"STORAGE_DRIVER":                   {text: "driver = \"vfs\"\n[storage.options]\nsize = \"1G\"", env: map[string]string{"STORAGE_DRIVER": "overlay"}, driver: "overlay", options: []string{"overlay.size=1G", "overlay.size=1G"}},
		"STORAGE_OPTS":                     {text: "driver = \"vfs\"\n[storage.options]\nsize = \"1G\"", env: map[string]string{"STORAGE_OPTS": "a=1,b=2"}, driver: "vfs", options: []string{"a=1", "b=2"}},
		"empty STORAGE_OPTS":               {text: "[storage.options]\nsize = \"1G\"", env: map[string]string{"STORAGE_OPTS": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			useStorageConf(t, "[storage]\n"+tc.text)
			for k, v := range tc.env {
				t.Setenv(k, v)
			}
			var c CRIO
			require.NoError(t, c.readStorageConf())
			if tc.root == "" {
				tc.root = builtinRoot
			}
			assert.Equal(t, tc.root, c.Root)
			assert.Equal(t, tc.driver, c.Driver)
			assert.Equal(t, tc.options, c.StorageOptions)
		})
	}
}

func FuzzReadCRIO(f *testing.F) {
	f.Add("[crio]\nroot = \"/a\"\nstorage_option = [\"a\", \"a\"]\n[crio.runtime.runtimes.x]\ninherit_default_runtime = true\n")
	f.Add("[crio.nri]\nnri_plugin_request_timeout = \"1s\"\n[crio.runtime]\nhooks_dir = [\"\\n\"]\n")
	f.Fuzz(func(t *testing.T, text string) {
		useStorageConf(t, "")
		dir := writeFiles(t, map[string]string{"crio.conf": text})
		c, err := ReadCRIO(filepath.Join(dir, "crio.conf"), "")
		if err != nil {
			return
		}
		assert.True(t, filepath.IsAbs(c.Root) && filepath.IsAbs(c.RunRoot))
		assert.Contains(t, c.Runtimes, c.DefaultRuntime)
		config := handlers()
		dropIn, err := DropIn(config, c)
		require.NoError(t, err)
		dir = writeFiles(t, map[string]string{"crio.conf": text, "d/x": string(dropIn)})
		after, err := ReadCRIO(filepath.Join(dir, "crio.conf"), filepath.Join(dir, "d"))
		require.NoError(t, err, "%s", dropIn)
		assert.False(t, after.InternalRepair)
		assert.True(t, after.NRI.Enabled)
		assert.Contains(t, after.HooksDir, HookDir(config, c))
		assert.Subset(t, ImageStores(after.StorageOptions), []string{"/d/vm", "/d/vm2"})
		assert.Subset(t, after.HooksDir, c.HooksDir)
	})
}
