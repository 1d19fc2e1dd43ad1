package conf

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/BurntSushi/toml"
)

// ReadCRIO reads CRI-O's configuration as CRI-O 1.34 does: its built-in
// values, storage.conf's where it takes defaults from there, file, and then
// every file below dir, whatever it is called, in lexical order. A later file
// overrides; only storage_option adds up, and a runtime handler is replaced as
// a whole.
//
// An absent file is an error (fs.ErrNotExist) unless it is [DefaultCRIOFile],
// and an empty name means none; dir may be absent. Keys that are of no concern
// here are skipped, so a file that CRI-O would refuse for those is accepted.
//
// containers/storage has a say in where storage.conf is and what it means, by
// the environment variables CONTAINERS_STORAGE_CONF, STORAGE_DRIVER and
// STORAGE_OPTS; this process must have them as CRI-O has. XDG_CONFIG_HOME, which
// no service has, is left aside.
func ReadCRIO(file, dir string) (*CRIO, error) { return readCRIO(file, dir, true) }

// ReadCRIOWithoutDropIn is ReadCRIO without the files below dir that [DropIn]
// rendered: what CRI-O would do if Ocihold had told it nothing.
func ReadCRIOWithoutDropIn(file, dir string) (*CRIO, error) { return readCRIO(file, dir, false) }

// ParseCRIO reads the configuration that a running CRI-O reports, which is
// complete.
func ParseCRIO(text []byte) (*CRIO, error) {
	c := &CRIO{}
	if _, err := toml.Decode(string(text), c.tables()); err != nil {
		return nil, fmt.Errorf("read the configuration that CRI-O reports: %w", err)
	}
	return c, nil
}

func readCRIO(file, dir string, withOurs bool) (*CRIO, error) {
	c := builtinCRIO()
	if err := c.readStorageConf(); err != nil {
		return nil, fmt.Errorf("read containers/storage's configuration: %w", err)
	}
	if file != "" {
		err := c.readFile(file, true)
		if err != nil && (file != DefaultCRIOFile || !errors.Is(err, fs.ErrNotExist)) {
			return nil, fmt.Errorf("read CRI-O's configuration: %w", err)
		}
	}
	if err := c.readDir(dir, withOurs); err != nil {
		return nil, fmt.Errorf("read CRI-O's drop-in configuration: %w", err)
	}
	if err := c.settle(); err != nil {
		return nil, fmt.Errorf("validate CRI-O's configuration: %w", err)
	}
	return c, nil
}

// readDir reads all files below dir. Like CRI-O, it follows no symbolic link
// to a directory.
func (c *CRIO) readDir(dir string, withOurs bool) error {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		return c.readFile(path, withOurs)
	})
}

// readFile overrides c by one file (config.UpdateFromDropInFile).
func (c *CRIO) readFile(file string, withOurs bool) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if bytes.HasPrefix(text, []byte(dropInHeader)) {
		c.DropIns = append(c.DropIns, file)
		if !withOurs {
			return nil
		}
	}
	before := *c
	before.StorageOptions = slices.Clone(c.StorageOptions) // decoding reuses the array
	if _, err := toml.Decode(string(text), c.tables()); err != nil {
		return inFile(file, err)
	}
	c.StorageOptions = keepLast(append(before.StorageOptions, c.StorageOptions...))
	c.Root = cmp.Or(c.Root, before.Root)
	c.RunRoot = cmp.Or(c.RunRoot, before.RunRoot)
	c.Driver = cmp.Or(c.Driver, before.Driver)
	return nil
}

// settle does what CRI-O does to the values once all files are read.
func (c *CRIO) settle() error {
	for _, dir := range []struct {
		key  string
		path *string
	}{{"root", &c.Root}, {"runroot", &c.RunRoot}} {
		if !filepath.IsAbs(*dir.path) {
			return fmt.Errorf("%s = %q depends on CRI-O's working directory: make it an absolute path", dir.key, *dir.path)
		}
		*dir.path = filepath.Clean(*dir.path)
	}
	c.DefaultRuntime = cmp.Or(c.DefaultRuntime, builtinRuntime)
	std, ok := c.Runtimes[c.DefaultRuntime]
	if !ok {
		return fmt.Errorf("default_runtime = %q has no table crio.runtime.runtimes.%s", c.DefaultRuntime, c.DefaultRuntime)
	}
	std.Path = cmp.Or(std.Path, c.DefaultRuntime)
	for name, r := range c.Runtimes {
		if r.InheritDefaultRuntime {
			r = std
			r.InheritDefaultRuntime = true
		}
		r.Path = cmp.Or(r.Path, name)
		c.Runtimes[name] = r
	}
	c.NRI.Listen = cmp.Or(c.NRI.Listen, builtinNRIListen)
	c.NRI.PluginRegistrationTimeout = cmp.Or(c.NRI.PluginRegistrationTimeout, builtinRegistrationTimeout)
	c.NRI.PluginRequestTimeout = cmp.Or(c.NRI.PluginRequestTimeout, builtinRequestTimeout)
	return nil
}
