package conf

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// handlers returns a configuration that is right with crioForHandlers.
func handlers() Config {
	c := Default()
	c.Handlers = map[string]Handler{
		"default": {PullConcurrency: 2, AllowAnnotation: true, MaxImageBytes: 1, Pull: PullCRIO},
		"vm":      {Root: "/d/vm"},
		"wasm":    {Root: "/d/vm2/", Platform: "wasi/wasm", Options: []string{"overlay.mountopt=nodev"}, Driver: "overlay"},
	}
	c.Routes = []Route{
		{Image: "registry.example/*:[0-9]", Handler: "wasm"}, {Image: "a", Handler: "runc"}, {Image: "b", Handler: "default"},
	}
	for name, h := range c.Handlers {
		if name != DefaultHandler {
			d := newHandler(name)
			h.GCHigh, h.GCLow, h.GCMinAge, h.GCInterval = d.GCHigh, d.GCLow, d.GCMinAge, d.GCInterval
			c.Handlers[name] = h
		}
	}
	c.nameHandlers()
	return c
}

func crioForHandlers() *CRIO {
	return &CRIO{
		Root: "/var/lib/containers/storage", RunRoot: "/run/containers/storage", Driver: "overlay", DefaultRuntime: "crun",
		Runtimes: map[string]Runtime{"crun": {}, "runc": {}},
	}
}

func TestValidateHandlersAlone(t *testing.T) {
	require.NoError(t, handlers().Validate())
	for name, tc := range map[string]struct {
		handler string
		change  func(*Handler)
		want    string
	}{
		"no root": {"vm", func(h *Handler) { h.Root = "" }, `handlers.vm.root = "": must be an absolute path`},
		"root as root": {"vm", func(h *Handler) { h.Root = "/.." }, "handlers.vm.root = \"/..\": must not be the root directory\n" +
			"handlers.vm.root = \"/..\": must be apart from run_dir, /run/ocihold, which may be lost\n" +
			"handlers.vm.root = \"/..\": must be apart from state_dir, /var/lib/ocihold, which may be lost"},
		"in state_dir":        {"vm", func(h *Handler) { h.Root = "/var/lib/ocihold/vm" }, `handlers.vm.root = "/var/lib/ocihold/vm": must be apart from state_dir, /var/lib/ocihold, which may be lost`},
		"is run_dir":          {"vm", func(h *Handler) { h.Root = "/run/ocihold/" }, `handlers.vm.root = "/run/ocihold/": must be apart from run_dir, /run/ocihold, which may be lost`},
		"comma":               {"vm", func(h *Handler) { h.Root = "/a,b" }, `handlers.vm.root = "/a,b": must not have a comma, nor a space at an end: CRI-O could not read it`},
		"space":               {"vm", func(h *Handler) { h.Root = "/a " }, `handlers.vm.root = "/a ": must not have a comma, nor a space at an end: CRI-O could not read it`},
		"relative runroot":    {"vm", func(h *Handler) { h.RunRoot = "a" }, `handlers.vm.runroot = "a": must be an absolute path`},
		"driver":              {"vm", func(h *Handler) { h.Driver = "vfs" }, `handlers.vm.driver = "vfs": CRI-O passes over a root that is not its own driver's: must be overlay`},
		"option":              {"vm", func(h *Handler) { h.Options = []string{"nodev"} }, `handlers.vm.options = "nodev": must be DRIVER.NAME=VALUE`},
		"image store":         {"vm", func(h *Handler) { h.Options = []string{"overlay.imagestore=/s"} }, `handlers.vm.options = "/s": must not be an additional image store: a handler's root has all its layers itself`},
		"platform":            {"vm", func(h *Handler) { h.Platform = "wasm" }, `handlers.vm.platform = "wasm": must be os/arch or os/arch/variant, such as wasi/wasm`},
		"relative auth_file":  {"vm", func(h *Handler) { h.AuthFile = "a" }, `handlers.vm.auth_file = "a": must be an absolute path`},
		"relative policy":     {"vm", func(h *Handler) { h.SignaturePolicy = "a" }, `handlers.vm.signature_policy = "a": must be an absolute path`},
		"relative registries": {"vm", func(h *Handler) { h.RegistriesConf = "a" }, `handlers.vm.registries_conf = "a": must be an absolute path`},
		"concurrency":         {"vm", func(h *Handler) { h.PullConcurrency = -1 }, `handlers.vm.pull_concurrency = "-1": must not be negative`},
		"pull":                {"vm", func(h *Handler) { h.Pull = "crio" }, `handlers.vm.pull = "crio": must not be set: only handlers.default can be left to CRI-O`},
		"default's root": {"default", func(h *Handler) { h.Root = "/a" }, `handlers.default.root = "/a": must not be set: ` +
			`the default handler has CRI-O's own root, set root in CRI-O's configuration`},
		"default's auth_file": {"default", func(h *Handler) { h.AuthFile = "/a" }, `handlers.default.auth_file = "/a": must not be set: ` +
			`the default handler has CRI-O's own root, set global_auth_file in CRI-O's configuration`},
		"default's platform": {"default", func(h *Handler) { h.Platform = "a/b" }, `handlers.default.platform = "a/b": must not be set: the default handler has the node's own`},
		"default's pull":     {"default", func(h *Handler) { h.Pull = "kubelet" }, `handlers.default.pull = "kubelet": must be one of ocihold, crio`},
		"name": {
			"a/b", func(h *Handler) { *h = newHandler(""); h.Root = "/a" },
			`handlers = "a/b": is no name for a handler: use letters, digits, '.', '_' and '-'`,
		},
		"high over all":    {"vm", func(h *Handler) { h.GCHigh = 101 }, `handlers.vm.gc_high = "101": must be a percent from 1 to 100; 100 collects nothing for want of room`},
		"low over high":    {"vm", func(h *Handler) { h.GCHigh = 80 }, `handlers.vm.gc_low = "80": must be 0 or more, and less than gc_high, 80`},
		"negative low":     {"vm", func(h *Handler) { h.GCLow = -1 }, `handlers.vm.gc_low = "-1": must be 0 or more, and less than gc_high, 85`},
		"negative min age": {"vm", func(h *Handler) { h.GCMinAge = -time.Second }, `handlers.vm.gc_min_age = "-1s": must not be negative`},
		"max age too low":  {"vm", func(h *Handler) { h.GCMaxAge = time.Minute }, `handlers.vm.gc_max_age = "1m0s": must be more than gc_min_age, 2m0s, or 0s for no limit`},
		"interval":         {"vm", func(h *Handler) { h.GCInterval = 0 }, `handlers.vm.gc_interval = "0s": must be a second or more, such as 1m`},
		"negative size":    {"vm", func(h *Handler) { h.MaxBytes = -1 }, `handlers.vm.max_bytes = "-1B": must not be negative`},
		"negative image":   {"vm", func(h *Handler) { h.MaxImageBytes = -1 }, `handlers.vm.max_image_bytes = "-1B": must not be negative`},
		"empty pattern":    {"vm", func(h *Handler) { h.PinnedImages = []string{""} }, `handlers.vm.pinned_images = "": must be the name of an image, or a pattern such as registry.example/base/*`},
		"default's mark": {"default", func(h *Handler) { h.GCHigh = 80 }, `handlers.default.gc_high = "80": must not be set: kubelet collects the ` +
			`default handler's images, set imageGCHighThresholdPercent, imageGCLowThresholdPercent, imageMinimumGCAge and imageMaximumGCAge in kubelet's configuration`},
		"default's pins": {
			"default", func(h *Handler) { h.PinnedImages = []string{"a"} },
			`handlers.default.pinned_images = "a": must not be set: set pinned_images in CRI-O's configuration`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := handlers()
			h := c.Handlers[tc.handler]
			tc.change(&h)
			c.Handlers[tc.handler] = h
			assert.EqualError(t, c.Validate(), tc.want)
		})
	}
	for name, tc := range map[string]struct {
		route Route
		want  string
	}{
		"no image":    {Route{Handler: "vm"}, `routes[0].image = "": must be a pattern for image names, such as registry.example/wasm/**`},
		"bad pattern": {Route{Image: "[", Handler: "vm"}, `routes[0].image = "[": must be a pattern for image names, such as registry.example/wasm/**`},
		"no handler":  {Route{Image: "a"}, `routes[0].handler = "": must not be empty`},
	} {
		t.Run(name, func(t *testing.T) {
			c := handlers()
			c.Routes = []Route{tc.route}
			assert.EqualError(t, c.Validate(), tc.want)
		})
	}
}

func TestValidateHandlers(t *testing.T) {
	require.NoError(t, handlers().ValidateHandlers(crioForHandlers()))
	require.NoError(t, Default().ValidateHandlers(&CRIO{Driver: "vfs"}))
	set := func(name string, change func(*Handler)) func(*Config, *CRIO) {
		return func(c *Config, _ *CRIO) {
			h := c.Handlers[name]
			change(&h)
			c.Handlers[name] = h
		}
	}
	for name, tc := range map[string]struct {
		change func(*Config, *CRIO)
		want   string
	}{
		"one root for two": {
			set("wasm", func(h *Handler) { h.Root = "/d/../d/vm/" }),
			`the root of handler vm and the root of handler wasm are both /d/vm: set handlers.wasm.root to a directory of its own`,
		},
		"root in another": {
			set("wasm", func(h *Handler) { h.Root = "/d/vm/wasm" }),
			`the root of handler wasm, /d/vm/wasm, is inside the root of handler vm, /d/vm: set handlers.wasm.root to a directory beside it`,
		},
		"another in the root": {
			set("wasm", func(h *Handler) { h.Root = "/d" }),
			`the root of handler vm, /d/vm, is inside the root of handler wasm, /d: set handlers.wasm.root to a directory beside it`,
		},
		"CRI-O's root": {
			set("vm", func(h *Handler) { h.Root = "/var/lib/containers/storage" }),
			`CRI-O's root and the root of handler vm are both /var/lib/containers/storage: set handlers.vm.root to a directory of its own`,
		},
		"in CRI-O's root": {
			set("vm", func(h *Handler) { h.Root = "/var/lib/containers/storage/vm" }),
			`the root of handler vm, /var/lib/containers/storage/vm, is inside CRI-O's root, /var/lib/containers/storage: ` +
				`set handlers.vm.root to a directory beside it`,
		},
		"CRI-O's imagestore": {
			func(_ *Config, crio *CRIO) { crio.ImageStore = "/d/vm/" },
			`CRI-O's imagestore and the root of handler vm are both /d/vm: set handlers.vm.root to a directory of its own`,
		},
		"one runroot for two": {
			set("wasm", func(h *Handler) { h.RunRoot = "/run/ocihold/roots/vm" }),
			`the runroot of handler vm and the runroot of handler wasm are both /run/ocihold/roots/vm: ` +
				`set handlers.wasm.runroot to a directory of its own`,
		},
		"CRI-O's runroot": {
			set("vm", func(h *Handler) { h.RunRoot = "/run/containers/storage" }),
			`CRI-O's runroot and the runroot of handler vm are both /run/containers/storage: ` +
				`set handlers.vm.runroot to a directory of its own`,
		},
		"runroot in the root": {
			set("vm", func(h *Handler) { h.RunRoot = "/d/vm/run" }),
			`the runroot of handler vm, /d/vm/run, is inside the root of handler vm, /d/vm: set handlers.vm.runroot to a directory beside it`,
		},
		"CRI-O's driver": {
			func(_ *Config, crio *CRIO) { crio.Driver = "vfs" },
			`CRI-O's storage_driver is "vfs" and cannot read the root of handler vm: set storage_driver = "overlay" in CRI-O's configuration, ` +
				`or remove the handlers`,
		},
		"default_runtime": {
			func(_ *Config, crio *CRIO) { crio.DefaultRuntime = "vm" },
			`handlers.vm is CRI-O's default_runtime, whose images are in CRI-O's root: set it up as handlers.default, or change default_runtime`,
		},
		"unknown handler in a route": {
			func(c *Config, _ *CRIO) { c.Routes[1].Handler = "kata" },
			`routes[1].handler = "kata": there is no such handler: use one of crun, default, runc, vm, wasm, or add a [handlers.kata]`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, crio := handlers(), crioForHandlers()
			tc.change(&c, crio)
			assert.EqualError(t, c.ValidateHandlers(crio), tc.want)
		})
	}
}
