package conf

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// DefaultHandler is the name under which [Config.Handlers] has the settings of
// CRI-O's own root.
const DefaultHandler = "default"

// Values of [Handler.Pull].
const (
	// PullOcihold has Ocihold pull into CRI-O's root.
	PullOcihold = "ocihold"
	// PullCRIO has CRI-O pull.
	PullCRIO = "crio"
)

// Handler is the storage root of one runtime handler, or, as "default", what
// there is to say about CRI-O's own root: only PullConcurrency,
// AllowAnnotation, MaxImageBytes and Pull.
type Handler struct {
	// Name is the key in [Config.Handlers].
	Name string `toml:"-"`

	// Root is the absolute directory of the images, on a disk. CRI-O reads it
	// as an additional image store.
	Root string `toml:"root"`
	// RunRoot is the absolute directory for what of the root does not outlive
	// a boot; [Load] makes an empty one RunDir/roots/NAME.
	RunRoot string `toml:"runroot"`
	// Driver is overlay, or empty, which means it: CRI-O does not read a root
	// of another driver than its own.
	Driver string `toml:"driver"`
	// Options are the driver's options, DRIVER.NAME=VALUE.
	Options []string `toml:"options"`
	// Platform is the os/arch[/variant] that is taken from an image index;
	// empty means this host's.
	Platform string `toml:"platform"`

	// AuthFile, SignaturePolicy and RegistriesConf replace CRI-O's
	// global_auth_file, CRI-O's signature_policy and the system's
	// registries.conf for pulls into this root; empty means those.
	AuthFile        string `toml:"auth_file"`
	SignaturePolicy string `toml:"signature_policy"`
	RegistriesConf  string `toml:"registries_conf"`

	// PullConcurrency is how many images are pulled at a time; 0 means any
	// number.
	PullConcurrency int `toml:"pull_concurrency"`
	// AllowAnnotation lets a pod choose the handler by annotation.
	AllowAnnotation bool `toml:"allow_annotation"`

	// GCHigh and GCLow are percents: of the root's file system, or of MaxBytes
	// where that is set. Above GCHigh, unused images go, least recently used
	// first, until GCLow; 100 as GCHigh is never reached.
	GCHigh int `toml:"gc_high"`
	GCLow  int `toml:"gc_low"`
	// GCMinAge is how long an image stays after its last use.
	GCMinAge time.Duration `toml:"gc_min_age"`
	// GCMaxAge is after how long without use an image goes, however much room
	// there is; 0 means never.
	GCMaxAge time.Duration `toml:"gc_max_age"`
	// GCInterval is how often the root is looked at besides after pulls.
	GCInterval time.Duration `toml:"gc_interval"`
	// MaxBytes is what images may take of the disk; 0 means that only the file
	// system bounds them.
	MaxBytes Size `toml:"max_bytes"`
	// MaxImageBytes is what one image may have, unpacked, that is pulled into
	// the root; 0 is as much as MaxBytes and the disk allow.
	MaxImageBytes Size `toml:"max_image_bytes"`
	// PinnedImages are images that are never collected, in addition to those of
	// CRI-O's pinned_images and by its rules for patterns.
	PinnedImages []string `toml:"pinned_images"`

	// Pull is PullOcihold, or empty, which means it, or PullCRIO. Only of the
	// default handler.
	Pull string `toml:"pull"`
}

// Route sends images to a handler where the pod's runtime class does not.
type Route struct {
	// Image is a pattern for the whole name, with registry and tag, as
	// [doublestar.Match] has them: "*" is any text without a slash, and "**",
	// between slashes or at an end, any number of parts of the name.
	Image string `toml:"image"`
	// Handler is a name in [Config.Handlers], one of CRI-O's runtime handlers,
	// or DefaultHandler.
	Handler string `toml:"handler"`
}

// Roots returns the handlers that have a root of their own, by name.
func (c Config) Roots() []Handler {
	var roots []Handler
	for _, name := range slices.Sorted(maps.Keys(c.Handlers)) {
		if name != DefaultHandler {
			roots = append(roots, c.Handlers[name])
		}
	}
	return roots
}

// newHandler returns the settings of a handler that no file says more of.
func newHandler(name string) Handler {
	if name == DefaultHandler {
		return Handler{}
	}
	return Handler{GCHigh: 85, GCLow: 80, GCMinAge: 2 * time.Minute, GCInterval: time.Minute}
}

// nameHandlers fills in what a handler has from its name.
func (c *Config) nameHandlers() {
	for name, h := range c.Handlers {
		h.Name = name
		if h.RunRoot == "" && name != DefaultHandler {
			h.RunRoot = filepath.Join(c.RunDir, "roots", name)
		}
		c.Handlers[name] = h
	}
}

// ImageStores returns the additional image stores that storage options name,
// clean, in the way of the overlay driver.
func ImageStores(options []string) []string {
	var stores []string
	for _, option := range options {
		key, value, _ := strings.Cut(option, "=")
		key = strings.ToLower(strings.TrimSpace(key))
		for _, driver := range []string{"overlay.", "overlay2.", "."} {
			key = strings.TrimPrefix(key, driver)
		}
		if key != "imagestore" && key != "additionalimagestore" {
			continue
		}
		for store := range strings.SplitSeq(strings.TrimSpace(value), ",") {
			if store != "" {
				stores = append(stores, filepath.Clean(store))
			}
		}
	}
	return stores
}

// imageStoreOption is the storage option that has CRI-O read a root.
func imageStoreOption(root string) string {
	return fmt.Sprintf("overlay.imagestore=%s", filepath.Clean(root))
}
