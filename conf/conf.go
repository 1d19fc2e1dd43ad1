// Package conf reads the two configurations that Ocihold works by: its own,
// and what CRI-O's says, by CRI-O's rules. It also renders what CRI-O has to be
// told: a drop-in for crio.conf.d and an OCI hook file.
//
// Ocihold's own configuration is one TOML file and the *.toml files of the
// directory named like it with ".d" added, in lexical order; a later file
// overrides single keys of an earlier one, those of each handler too; the list
// of routes it replaces. Every key has a default. A key that
// Ocihold does not know, and a value of the wrong type, are errors that name
// file and line, so that a misspelt setting is never silently a default.
//
// CRI-O's configuration is only ever read. What CRI-O takes from its command
// line or environment is not seen here.
//
// Nothing in this package is kept between calls, and nothing on the host is
// changed. [Config.Validate], [DropIn] and [HookFile] are pure: whether a path
// exists is for others to find out.
package conf

import (
	"cmp"
	"time"
)

// DefaultFile is where Ocihold's configuration is looked for when no file is
// named.
const DefaultFile = "/etc/ocihold/ocihold.toml"

// Values of [Volumes.MountAPI].
const (
	// MountAuto takes fsconfig where the kernel has it, else mount.
	MountAuto = "auto"
	// MountFsconfig is fsopen(2) and fsconfig(2) with one lowerdir+ for each
	// layer.
	MountFsconfig = "fsconfig"
	// MountMount is mount(2) with all layers in one lowerdir option.
	MountMount = "mount"
)

// Values of [Config.MediaTypes].
const (
	// MediaTypeTar has a blob unpacked as a tar archive.
	MediaTypeTar = "tar"
	// MediaTypeFile has it be one file.
	MediaTypeFile = "file"
)

// Config is Ocihold's configuration.
type Config struct {
	// RunDir is the absolute directory for sockets, mounts and everything
	// else that does not outlive a boot.
	RunDir string `toml:"run_dir"`
	// StateDir is the absolute directory for downloads under way, what containers
	// write into volumes, and the cache of where blobs were seen: what may be
	// large, and may be lost. It should be on a disk, and has no other user.
	StateDir string `toml:"state_dir"`
	// LogLevel is the least severe level that is logged, by logrus' names.
	LogLevel string `toml:"log_level"`

	CRIO    CRIOLocation `toml:"crio"`
	NRI     NRI          `toml:"nri"`
	Hook    Hook         `toml:"hook"`
	Volumes Volumes      `toml:"volumes"`

	// Handlers are the storage roots of runtime handlers, by the handler's
	// name, and what there is to say about CRI-O's own as DefaultHandler.
	Handlers map[string]Handler `toml:"handlers"`
	// Routes are asked in this order, and the first whose pattern fits counts.
	Routes []Route `toml:"routes"`

	// MediaTypes say what becomes of the blobs of OCI artifacts, by patterns for
	// their media types in the form of the key mediaTypes of volumes: MediaTypeTar or MediaTypeFile.
	MediaTypes map[string]string `toml:"media_types"`

	ImageService ImageService `toml:"image_service"`
	Pull         Pull         `toml:"pull"`
	Metrics      Metrics      `toml:"metrics"`
}

// CRIOLocation says where CRI-O's configuration is; see [ReadCRIO].
type CRIOLocation struct {
	// Config is the absolute path that CRI-O is given as --config.
	Config string `toml:"config"`
	// ConfigDir is the absolute path that CRI-O is given as --config-dir.
	ConfigDir string `toml:"config_dir"`
	// DropIn is the absolute path of the file that Ocihold writes into
	// ConfigDir; empty means 99-ocihold.conf there. See [Config.DropInFile].
	DropIn string `toml:"drop_in"`
}

// NRI says how Ocihold registers as an NRI plugin.
type NRI struct {
	// PluginName is the name it registers with.
	PluginName string `toml:"plugin_name"`
	// PluginIndex is two digits; NRI calls plugins in the order of their
	// index.
	PluginIndex string `toml:"plugin_index"`
	// Socket is the absolute path of CRI-O's NRI socket; empty means the one
	// that CRI-O's configuration names ([CRIONRI.Listen]).
	Socket string `toml:"socket"`
	// Required has CRI-O's own validator refuse every container on the node, of
	// pods without volumes too, while Ocihold is not registered. It is for
	// CRI-O from the release 1.34 on. The guard does not depend on it.
	Required bool `toml:"required"`
}

// Hook says where the OCI hook is that refuses a container whose volumes were
// not injected.
type Hook struct {
	// Guard is the absolute path of the hook program, as CRI-O sees it. CRI-O
	// silently leaves out a hook whose program does not exist.
	Guard string `toml:"guard"`
	// Dir is the absolute directory of the hook file; empty means one that
	// CRI-O reads anyway. See [HookDir].
	Dir string `toml:"dir"`
}

// Volumes says how image volumes are mounted, and for whom.
type Volumes struct {
	// MountAPI is one of MountAuto, MountFsconfig and MountMount.
	MountAPI string `toml:"mount_api"`
	// TrustPresent has an image that is on the node be a volume for pods of
	// every namespace, whether or not access to it was proven.
	TrustPresent bool `toml:"trust_present"`
	// HardenNative gives Kubernetes' own image volumes, which CRI-O mounts, the
	// options noexec, nosuid and nodev, which CRI-O leaves out.
	HardenNative bool `toml:"harden_native"`
	// AllowedImages are patterns, as those of Route, for the whole names of the
	// images that volumes may be of; none is any image.
	AllowedImages []string `toml:"allowed_images"`
	// AllowedNamespaces are patterns for the namespaces whose pods may have
	// volumes; none is any namespace.
	AllowedNamespaces []string `toml:"allowed_namespaces"`
	// MaxImageBytes is what the layers of a volume's image may have in all, as
	// its manifest says, and unpacked; 0 is no limit.
	MaxImageBytes Size `toml:"max_image_bytes"`
	// MaxScratchBytes is what the scratchSize of a writable volume may be; 0 is
	// no limit but the disk.
	MaxScratchBytes Size `toml:"max_scratch_bytes"`
	// Pin gives images in use in CRI-O's own root a name besides, which fits
	// PinPattern, so that a kubelet that asks CRI-O itself for images does not
	// collect them. [DropIn] has CRI-O know the pattern.
	Pin bool `toml:"pin"`
}

// ImageService says how Ocihold serves the CRI ImageService.
type ImageService struct {
	// Socket is the absolute path of the socket for kubelet's
	// imageServiceEndpoint; empty means image.sock in RunDir. See
	// [Config.ImageSocket].
	Socket string `toml:"socket"`
	// ReportRuntimeHandler has images carry the handler whose root they are in
	// (CRI Image.spec.runtime_handler). A kubelet that gets it takes images in
	// use for unused.
	ReportRuntimeHandler bool `toml:"report_runtime_handler"`
}

// Pull says how images are pulled, into whichever root.
type Pull struct {
	// StallTimeout ends a pull for which the registry has sent nothing for that
	// long. At least a second.
	StallTimeout time.Duration `toml:"stall_timeout"`
}

// Metrics says where metrics for Prometheus are served, and health.
type Metrics struct {
	// Address is the host:port of GET /metrics, /healthz and /readyz; empty
	// means nowhere.
	Address string `toml:"address"`
}

// Default returns the configuration that holds where no file says otherwise.
func Default() Config {
	return Config{
		RunDir:   "/run/ocihold",
		StateDir: "/var/lib/ocihold",
		LogLevel: "info",
		CRIO:     CRIOLocation{Config: DefaultCRIOFile, ConfigDir: DefaultCRIODir},
		NRI:      NRI{PluginName: "ocihold", PluginIndex: "10"},
		Hook:     Hook{Guard: "/usr/libexec/ocihold/ocihold-guard"},
		Volumes:  Volumes{MountAPI: MountAuto, HardenNative: true, AllowedImages: []string{}, AllowedNamespaces: []string{}},
		Pull:     Pull{StallTimeout: 2 * time.Minute},
	}
}

// MountsDir is the directory below which the shared mounts of volumes are
// attached.
func (c Config) MountsDir() string { return c.RunDir + "/mounts" }

// ScratchDir is the directory on whose disk there is room for what containers
// write into volumes.
func (c Config) ScratchDir() string { return c.StateDir + "/scratch" }

// ImageSocket is the socket of the CRI ImageService.
func (c Config) ImageSocket() string { return cmp.Or(c.ImageService.Socket, c.RunDir+"/image.sock") }

// DropInFile is where the drop-in for CRI-O belongs; the name comes last among
// those in use, as a later file overrides an earlier one.
func (c Config) DropInFile() string {
	return cmp.Or(c.CRIO.DropIn, c.CRIO.ConfigDir+"/99-ocihold.conf")
}
