package conf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"
)

// containers/storage's built-in values for a process that runs as root.
const (
	builtinRoot    = "/var/lib/containers/storage"
	builtinRunRoot = "/run/containers/storage"
)

// The files that containers/storage looks for; the first that exists counts.
const (
	overrideStorageConf = "/etc/containers/storage.conf"
	systemStorageConf   = "/usr/share/containers/storage.conf"
)

// storageConf is a storage.conf, as far as it sets what CRI-O takes from it.
type storageConf struct {
	Storage struct {
		Driver              string `toml:"driver"`
		RunRoot             string `toml:"runroot"`
		GraphRoot           string `toml:"graphroot"`
		ImageStore          string `toml:"imagestore"`
		RootlessStoragePath string `toml:"rootless_storage_path"`
		Options             struct {
			AdditionalImageStores []string    `toml:"additionalimagestores"`
			AdditionalLayerStores []string    `toml:"additionallayerstores"`
			Size                  string      `toml:"size"`
			MountProgram          string      `toml:"mount_program"`
			SkipMountHome         string      `toml:"skip_mount_home"`
			IgnoreChownErrors     string      `toml:"ignore_chown_errors"`
			ForceMask             os.FileMode `toml:"force_mask"`
			MountOpt              string      `toml:"mountopt"`
			Overlay               struct {
				IgnoreChownErrors string `toml:"ignore_chown_errors"`
				MountProgram      string `toml:"mount_program"`
				MountOpt          string `toml:"mountopt"`
				Size              string `toml:"size"`
				Inodes            string `toml:"inodes"`
				SkipMountHome     string `toml:"skip_mount_home"`
				ForceMask         string `toml:"force_mask"`
				UseComposefs      string `toml:"use_composefs"`
			} `toml:"overlay"`
			Vfs struct {
				IgnoreChownErrors string `toml:"ignore_chown_errors"`
			} `toml:"vfs"`
		} `toml:"options"`
	} `toml:"storage"`
}

// readStorageConf sets what CRI-O takes from storage.conf when it starts: its
// root, runroot, imagestore, driver and options. The rules are those of
// containers/storage 1.59, which CRI-O 1.34 is built with (types.
// DefaultStoreOptions); its later versions look into more files and write the
// options in another way. Of the options that belong to one driver, those of
// overlay and vfs are read.
func (c *CRIO) readStorageConf() error {
	c.Root, c.RunRoot = builtinRoot, builtinRunRoot
	file, mayBeAbsent := storageConfFile()
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) && mayBeAbsent {
		return nil
	}
	if err != nil {
		return err
	}
	var conf storageConf
	if _, err := toml.Decode(string(text), &conf); err != nil {
		return inFile(file, err)
	}
	s := &conf.Storage
	s.Driver = cmp.Or(os.Getenv("STORAGE_DRIVER"), s.Driver)
	c.Driver = s.Driver
	if c.Driver == "overlay2" {
		c.Driver = "overlay"
	}
	c.RunRoot = expandPath(cmp.Or(s.RunRoot, builtinRunRoot))
	c.Root = expandPath(cmp.Or(s.GraphRoot, s.RootlessStoragePath, builtinRoot))
	c.ImageStore = s.ImageStore
	if c.ImageStore == c.Root {
		return fmt.Errorf("%s: imagestore and graphroot are both %q", file, c.Root)
	}
	switch options, ok := os.LookupEnv("STORAGE_OPTS"); {
	case !ok:
		c.StorageOptions = conf.driverOptions()
	case options != "":
		c.StorageOptions = strings.Split(options, ",")
	}
	return nil
}

// storageConfFile returns the storage.conf that counts, and whether it may be
// absent.
func storageConfFile() (file string, mayBeAbsent bool) {
	if file, ok := os.LookupEnv("CONTAINERS_STORAGE_CONF"); ok {
		return file, false
	}
	if _, err := os.Stat(overrideStorageConf); err == nil {
		return overrideStorageConf, false
	}
	return systemStorageConf, true
}

// driverOptions returns the options as containers/storage hands them to the
// driver: those of [storage.options] first, then the driver's own, for which
// the former stand in where they are not set.
func (conf *storageConf) driverOptions() []string {
	var options []string
	add := func(driver, name, value string) {
		if value != "" {
			options = append(options, driver+"."+name+"="+value)
		}
	}
	driver, all := conf.Storage.Driver, &conf.Storage.Options
	var octalMask, maskAsText string
	if all.ForceMask != 0 {
		octalMask = strconv.FormatUint(uint64(all.ForceMask), 8)
		maskAsText = all.ForceMask.String() // as in "-rwxr-xr-x": what the library makes of it
	}
	for _, store := range all.AdditionalImageStores {
		options = append(options, driver+".imagestore="+store)
	}
	for _, store := range all.AdditionalLayerStores {
		options = append(options, driver+".additionallayerstore="+store)
	}
	add(driver, "size", all.Size)
	add(driver, "mount_program", all.MountProgram)
	add(driver, "skip_mount_home", all.SkipMountHome)
	add(driver, "ignore_chown_errors", all.IgnoreChownErrors)
	add(driver, "force_mask", octalMask)
	add(driver, "mountopt", all.MountOpt)

	switch driver {
	case "overlay", "overlay2":
		own := &all.Overlay
		add("overlay", "ignore_chown_errors", cmp.Or(own.IgnoreChownErrors, all.IgnoreChownErrors))
		add("overlay", "mount_program", cmp.Or(own.MountProgram, all.MountProgram))
		add("overlay", "mountopt", cmp.Or(own.MountOpt, all.MountOpt))
		add("overlay", "size", cmp.Or(own.Size, all.Size))
		add("overlay", "inodes", own.Inodes)
		add("overlay", "skip_mount_home", cmp.Or(own.SkipMountHome, all.SkipMountHome))
		add("overlay", "force_mask", cmp.Or(own.ForceMask, maskAsText))
		add("overlay", "use_composefs", own.UseComposefs)
	case "vfs":
		add("vfs", "ignore_chown_errors", cmp.Or(all.Vfs.IgnoreChownErrors, all.IgnoreChownErrors))
	}
	return options
}

// expandPath fills in variables and follows symbolic links, as
// containers/storage does with the paths of storage.conf, and only those.
func expandPath(path string) string {
	path = os.ExpandEnv(strings.ReplaceAll(path, "$UID", strconv.Itoa(os.Getuid())))
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return filepath.Clean(path)
}
