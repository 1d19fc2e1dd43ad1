package conf

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"

	"github.com/sirupsen/logrus"
)

var twoDigits = regexp.MustCompile(`^[0-9]{2}$`)

// Validate reports every value that cannot be right on any host, joined. It
// looks at nothing but c.
func (c Config) Validate() error {
	var faults []error
	fault := func(key, value, rule string) {
		faults = append(faults, fmt.Errorf("%s = %q: %s", key, value, rule))
	}
	absolute := func(key, path string) {
		if !filepath.IsAbs(path) {
			fault(key, path, "must be an absolute path")
		}
	}
	absoluteOrEmpty := func(key, path string) {
		if path != "" {
			absolute(key, path)
		}
	}

	for _, d := range []struct{ key, dir string }{{"run_dir", c.RunDir}, {"state_dir", c.StateDir}} {
		absolute(d.key, d.dir)
		if filepath.Clean(d.dir) == "/" {
			fault(d.key, d.dir, "must not be the root directory")
		}
	}
	if _, err := logrus.ParseLevel(c.LogLevel); err != nil {
		fault("log_level", c.LogLevel, "must be one of panic, fatal, error, warn, info, debug, trace")
	}
	absolute("crio.config", c.CRIO.Config)
	absolute("crio.config_dir", c.CRIO.ConfigDir)
	if c.NRI.PluginName == "" {
		fault("nri.plugin_name", c.NRI.PluginName, "must not be empty")
	}
	if !twoDigits.MatchString(c.NRI.PluginIndex) {
		fault("nri.plugin_index", c.NRI.PluginIndex, "must be two digits")
	}
	absoluteOrEmpty("nri.socket", c.NRI.Socket)
	absolute("hook.guard", c.Hook.Guard)
	absoluteOrEmpty("hook.dir", c.Hook.Dir)
	switch c.Volumes.MountAPI {
	case MountAuto, MountFsconfig, MountMount:
	default:
		fault("volumes.mount_api", c.Volumes.MountAPI, "must be one of auto, fsconfig, mount")
	}
	return errors.Join(faults...)
}
