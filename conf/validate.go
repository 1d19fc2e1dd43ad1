package conf

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/bmatcuk/doublestar/v4"
	"github.com/sirupsen/logrus"
)

var twoDigits = regexp.MustCompile(`^[0-9]{2}$`)

// checker collects what is wrong.
type checker struct{ faults []error }

func (k *checker) fault(key, value, rule string) {
	k.faults = append(k.faults, fmt.Errorf("%s = %q: %s", key, value, rule))
}

func (k *checker) absolute(key, path string) {
	if !filepath.IsAbs(path) {
		k.fault(key, path, "must be an absolute path")
	}
}

func (k *checker) absoluteOrEmpty(key, path string) {
	if path != "" {
		k.absolute(key, path)
	}
}

// Validate reports every value that cannot be right on any host, joined. It
// looks at nothing but c; see [Config.ValidateHandlers] for what depends on
// CRI-O's configuration.
func (c Config) Validate() error {
	k := &checker{}
	for _, d := range []struct{ key, dir string }{{"run_dir", c.RunDir}, {"state_dir", c.StateDir}} {
		k.absolute(d.key, d.dir)
		if filepath.Clean(d.dir) == "/" {
			k.fault(d.key, d.dir, "must not be the root directory")
		}
	}
	if _, err := logrus.ParseLevel(c.LogLevel); err != nil {
		k.fault("log_level", c.LogLevel, "must be one of panic, fatal, error, warn, info, debug, trace")
	}
	k.absolute("crio.config", c.CRIO.Config)
	k.absolute("crio.config_dir", c.CRIO.ConfigDir)
	if c.CRIO.DropIn != "" && !inside(filepath.Clean(c.CRIO.DropIn), filepath.Clean(c.CRIO.ConfigDir)) {
		k.fault("crio.drop_in", c.CRIO.DropIn, "must be a file in crio.config_dir")
	}
	if c.NRI.PluginName == "" {
		k.fault("nri.plugin_name", c.NRI.PluginName, "must not be empty")
	}
	if !twoDigits.MatchString(c.NRI.PluginIndex) {
		k.fault("nri.plugin_index", c.NRI.PluginIndex, "must be two digits")
	}
	k.absoluteOrEmpty("nri.socket", c.NRI.Socket)
	k.absolute("hook.guard", c.Hook.Guard)
	k.absoluteOrEmpty("hook.dir", c.Hook.Dir)
	switch c.Volumes.MountAPI {
	case MountAuto, MountFsconfig, MountMount:
	default:
		k.fault("volumes.mount_api", c.Volumes.MountAPI, "must be one of auto, fsconfig, mount")
	}
	k.checkAllowed("volumes.allowed_images", c.Volumes.AllowedImages, "must be patterns for image names, such as registry.example/models/**")
	k.checkAllowed("volumes.allowed_namespaces", c.Volumes.AllowedNamespaces, "must be patterns for namespaces, such as team-*")
	if c.Volumes.MaxImageBytes < 0 {
		k.fault("volumes.max_image_bytes", c.Volumes.MaxImageBytes.String(), "must not be negative")
	}
	if c.Volumes.MaxScratchBytes < 0 {
		k.fault("volumes.max_scratch_bytes", c.Volumes.MaxScratchBytes.String(), "must not be negative")
	}
	k.absoluteOrEmpty("image_service.socket", c.ImageService.Socket)
	if c.Pull.StallTimeout < time.Second {
		k.fault("pull.stall_timeout", c.Pull.StallTimeout.String(), "must be a second or more, such as 2m")
	}
	if _, port, err := net.SplitHostPort(c.Metrics.Address); c.Metrics.Address != "" && (err != nil || port == "") {
		k.fault("metrics.address", c.Metrics.Address, "must be host:port, such as 127.0.0.1:9537, or empty for no metrics")
	}
	for _, name := range slices.Sorted(maps.Keys(c.Handlers)) {
		h := c.Handlers[name]
		k.checkHandler(name, h)
		for _, d := range []struct{ key, dir string }{{"run_dir", c.RunDir}, {"state_dir", c.StateDir}} {
			if dir, root := filepath.Clean(d.dir), filepath.Clean(h.Root); name != DefaultHandler && (root == dir || inside(root, dir) || inside(dir, root)) {
				k.fault("handlers."+name+".root", h.Root, "must be apart from "+d.key+", "+dir+", which may be lost")
			}
		}
	}
	for _, pattern := range slices.Sorted(maps.Keys(c.MediaTypes)) {
		key, kind := fmt.Sprintf("media_types.%q", pattern), c.MediaTypes[pattern]
		if kind != MediaTypeTar && kind != MediaTypeFile {
			k.fault(key, kind, "must be tar or file")
		}
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			k.fault(key, kind, `the key must be a media type with "*" for any text, such as application/vnd.example.*`)
		}
	}
	for i, r := range c.Routes {
		k.checkRoute(i, r)
	}
	return errors.Join(k.faults...)
}

func (k *checker) checkAllowed(key string, patterns []string, rule string) {
	for _, pattern := range patterns {
		if pattern == "" || !doublestar.ValidatePattern(pattern) {
			k.fault(key, pattern, rule)
		}
	}
}
