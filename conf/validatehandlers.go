package conf

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/bmatcuk/doublestar/v4"
)

var (
	handlerName  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)
	platformText = regexp.MustCompile(`^[a-z0-9_]+/[a-z0-9_]+(/[a-z0-9_.]+)?$`)
)

// checkHandler reports what cannot be right about a handler on any host.
func (k *checker) checkHandler(name string, h Handler) {
	at := "handlers." + name + "."
	if !handlerName.MatchString(name) {
		k.fault("handlers", name, "is no name for a handler: use letters, digits, '.', '_' and '-'")
	}
	if h.PullConcurrency < 0 {
		k.fault(at+"pull_concurrency", fmt.Sprint(h.PullConcurrency), "must not be negative")
	}
	if h.MaxImageBytes < 0 {
		k.fault(at+"max_image_bytes", h.MaxImageBytes.String(), "must not be negative")
	}
	if name == DefaultHandler {
		for _, is := range []struct{ key, value, of string }{
			{"root", h.Root, "root"},
			{"runroot", h.RunRoot, "runroot"},
			{"driver", h.Driver, "storage_driver"},
			{"options", strings.Join(h.Options, ","), "storage_option"},
			{"auth_file", h.AuthFile, "global_auth_file"},
			{"signature_policy", h.SignaturePolicy, "signature_policy"},
		} {
			if is.value != "" {
				k.fault(at+is.key, is.value, "must not be set: the default handler has CRI-O's own root, set "+is.of+" in CRI-O's configuration")
			}
		}
		for _, is := range []struct{ key, value string }{{"platform", h.Platform}, {"registries_conf", h.RegistriesConf}} {
			if is.value != "" {
				k.fault(at+is.key, is.value, "must not be set: the default handler has the node's own")
			}
		}
		k.checkNoCollector(at, h)
		switch h.Pull {
		case "", PullOcihold, PullCRIO:
		default:
			k.fault(at+"pull", h.Pull, "must be one of ocihold, crio")
		}
		return
	}
	k.absolute(at+"root", h.Root)
	switch {
	case filepath.Clean(h.Root) == "/":
		k.fault(at+"root", h.Root, "must not be the root directory")
	case strings.Contains(h.Root, ",") || strings.TrimSpace(h.Root) != h.Root:
		k.fault(at+"root", h.Root, "must not have a comma, nor a space at an end: CRI-O could not read it")
	}
	k.absoluteOrEmpty(at+"runroot", h.RunRoot)
	switch h.Driver {
	case "", "overlay", "overlay2":
	default:
		k.fault(at+"driver", h.Driver, "CRI-O passes over a root that is not its own driver's: must be overlay")
	}
	for _, o := range h.Options {
		if !strings.Contains(o, "=") {
			k.fault(at+"options", o, "must be DRIVER.NAME=VALUE")
		}
	}
	if stores := ImageStores(h.Options); len(stores) > 0 {
		k.fault(at+"options", stores[0], "must not be an additional image store: a handler's root has all its layers itself")
	}
	if h.Platform != "" && !platformText.MatchString(h.Platform) {
		k.fault(at+"platform", h.Platform, "must be os/arch or os/arch/variant, such as wasi/wasm")
	}
	k.absoluteOrEmpty(at+"auth_file", h.AuthFile)
	k.absoluteOrEmpty(at+"signature_policy", h.SignaturePolicy)
	k.absoluteOrEmpty(at+"registries_conf", h.RegistriesConf)
	k.checkCollector(at, h)
	if h.Pull != "" {
		k.fault(at+"pull", h.Pull, "must not be set: only handlers.default can be left to CRI-O")
	}
}

// checkCollector reports what cannot be right about a handler's garbage
// collection.
func (k *checker) checkCollector(at string, h Handler) {
	if h.GCHigh < 1 || h.GCHigh > 100 {
		k.fault(at+"gc_high", fmt.Sprint(h.GCHigh), "must be a percent from 1 to 100; 100 collects nothing for want of room")
	}
	if h.GCLow < 0 || h.GCLow >= h.GCHigh {
		k.fault(at+"gc_low", fmt.Sprint(h.GCLow), fmt.Sprintf("must be 0 or more, and less than gc_high, %d", h.GCHigh))
	}
	if h.GCMinAge < 0 {
		k.fault(at+"gc_min_age", h.GCMinAge.String(), "must not be negative")
	}
	if h.GCMaxAge < 0 || h.GCMaxAge > 0 && h.GCMaxAge <= h.GCMinAge {
		k.fault(at+"gc_max_age", h.GCMaxAge.String(), fmt.Sprintf("must be more than gc_min_age, %s, or 0s for no limit", h.GCMinAge))
	}
	if h.GCInterval < time.Second {
		k.fault(at+"gc_interval", h.GCInterval.String(), "must be a second or more, such as 1m")
	}
	if h.MaxBytes < 0 {
		k.fault(at+"max_bytes", h.MaxBytes.String(), "must not be negative")
	}
	if slices.Contains(h.PinnedImages, "") {
		k.fault(at+"pinned_images", "", "must be the name of an image, or a pattern such as registry.example/base/*")
	}
}

// checkNoCollector refuses settings of a collection that kubelet makes.
func (k *checker) checkNoCollector(at string, h Handler) {
	const kubelets = "must not be set: kubelet collects the default handler's images, set imageGCHighThresholdPercent, " +
		"imageGCLowThresholdPercent, imageMinimumGCAge and imageMaximumGCAge in kubelet's configuration"
	for _, is := range []struct {
		key, value string
		set        bool
	}{
		{"gc_high", fmt.Sprint(h.GCHigh), h.GCHigh != 0},
		{"gc_low", fmt.Sprint(h.GCLow), h.GCLow != 0},
		{"gc_min_age", h.GCMinAge.String(), h.GCMinAge != 0},
		{"gc_max_age", h.GCMaxAge.String(), h.GCMaxAge != 0},
		{"gc_interval", h.GCInterval.String(), h.GCInterval != 0},
		{"max_bytes", h.MaxBytes.String(), h.MaxBytes != 0},
	} {
		if is.set {
			k.fault(at+is.key, is.value, kubelets)
		}
	}
	if len(h.PinnedImages) > 0 {
		k.fault(at+"pinned_images", strings.Join(h.PinnedImages, ","), "must not be set: set pinned_images in CRI-O's configuration")
	}
}

func (k *checker) checkRoute(i int, r Route) {
	at := fmt.Sprintf("routes[%d].", i)
	if !doublestar.ValidatePattern(r.Image) || r.Image == "" {
		k.fault(at+"image", r.Image, "must be a pattern for image names, such as registry.example/wasm/**")
	}
	if r.Handler == "" {
		k.fault(at+"handler", r.Handler, "must not be empty")
	}
}

// place is a directory that must not be in another, nor another in it.
type place struct{ what, path, fix string }

// ValidateHandlers reports what of the handlers and routes does not go together
// with CRI-O's configuration, joined; each error says what to change. It looks
// at nothing but c and crio. Paths are compared as they are written.
func (c Config) ValidateHandlers(crio *CRIO) error {
	var faults []error
	add := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }

	places := []place{{"CRI-O's root", crio.Root, ""}, {"CRI-O's runroot", crio.RunRoot, ""}}
	if crio.ImageStore != "" {
		places = append(places, place{"CRI-O's imagestore", filepath.Clean(crio.ImageStore), ""})
	}
	own := len(places)
	for _, h := range c.Roots() {
		places = append(places,
			place{"the root of handler " + h.Name, filepath.Clean(h.Root), "handlers." + h.Name + ".root"},
			place{"the runroot of handler " + h.Name, filepath.Clean(h.RunRoot), "handlers." + h.Name + ".runroot"})
	}
	for i := own; i < len(places); i++ {
		one := places[i]
		for _, other := range places[:i] {
			switch {
			case one.path == other.path:
				add("%s and %s are both %s: set %s to a directory of its own", other.what, one.what, one.path, one.fix)
			case inside(one.path, other.path):
				add("%s, %s, is inside %s, %s: set %s to a directory beside it", one.what, one.path, other.what, other.path, one.fix)
			case inside(other.path, one.path):
				add("%s, %s, is inside %s, %s: set %s to a directory beside it", other.what, other.path, one.what, one.path, one.fix)
			}
		}
	}

	if roots := c.Roots(); len(roots) > 0 {
		switch crio.Driver {
		case "", "overlay", "overlay2":
		default:
			add("CRI-O's storage_driver is %q and cannot read the root of handler %s: set storage_driver = \"overlay\" in CRI-O's "+
				"configuration, or remove the handlers", crio.Driver, roots[0].Name)
		}
	}
	if _, ok := c.Handlers[crio.DefaultRuntime]; ok && crio.DefaultRuntime != DefaultHandler {
		add("handlers.%s is CRI-O's default_runtime, whose images are in CRI-O's root: set it up as handlers.default, or change "+
			"default_runtime", crio.DefaultRuntime)
	}

	known := c.KnownHandlers(crio)
	for i, r := range c.Routes {
		if !slices.Contains(known, r.Handler) {
			add("routes[%d].handler = %q: there is no such handler: use one of %s, or add a [handlers.%s]", i, r.Handler,
				strings.Join(known, ", "), r.Handler)
		}
	}
	return errors.Join(faults...)
}

// KnownHandlers returns the names of the handlers that an image can be asked
// for, sorted: DefaultHandler, those of c and CRI-O's.
func (c Config) KnownHandlers(crio *CRIO) []string {
	names := map[string]bool{DefaultHandler: true}
	for name := range c.Handlers {
		names[name] = true
	}
	for name := range crio.Runtimes {
		names[name] = true
	}
	return slices.Sorted(maps.Keys(names))
}

// inside tells whether a path is below a directory.
func inside(path, dir string) bool { return strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") }
