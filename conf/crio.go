package conf

import (
	"slices"
	"time"
)

// Where CRI-O looks for its configuration unless told otherwise (--config,
// --config-dir).
const (
	DefaultCRIOFile = "/etc/crio/crio.conf"
	DefaultCRIODir  = "/etc/crio/crio.conf.d"
)

// CRIO is what CRI-O's configuration says, as [ReadCRIO] found it: its
// built-in values and storage.conf's, overridden by its files. Field comments
// name CRI-O's own option. An empty value means what it means to CRI-O.
type CRIO struct {
	// Root is the absolute, clean path of the storage root (crio.root).
	Root string
	// RunRoot is the absolute, clean path of the storage's run directory
	// (crio.runroot).
	RunRoot string
	// ImageStore is where images are stored apart from Root; empty means in
	// Root (crio.imagestore).
	ImageStore string
	// Driver is the storage driver; empty means that containers/storage
	// picks one (crio.storage_driver).
	Driver string
	// StorageOptions are the driver's options, DRIVER.NAME=VALUE
	// (crio.storage_option).
	StorageOptions []string
	// InternalRepair is whether CRI-O checks its storage after an unclean
	// stop, and wipes what it finds damaged (crio.internal_repair).
	InternalRepair bool

	// Listen is CRI-O's own socket (crio.api.listen).
	Listen string

	// PauseImage is the image of infra containers (crio.image.pause_image).
	PauseImage string
	// PauseImageAuthFile has the credentials for it
	// (crio.image.pause_image_auth_file).
	PauseImageAuthFile string
	// GlobalAuthFile has the credentials for every pull
	// (crio.image.global_auth_file).
	GlobalAuthFile string
	// NamespacedAuthDir is where CRI-O's credential provider leaves auth files,
	// each for one pull for a namespace; the first builds of 1.34 lack it
	// (crio.image.namespaced_auth_dir).
	NamespacedAuthDir string
	// SignaturePolicy is a policy.json; empty means the system's
	// (crio.image.signature_policy).
	SignaturePolicy string
	// SignaturePolicyDir has a NAMESPACE.json for namespaces with a policy of
	// their own (crio.image.signature_policy_dir).
	SignaturePolicyDir string
	// BigFilesTemporaryDir is where blobs are kept while they are pulled;
	// empty means the library's choice (crio.image.big_files_temporary_dir).
	BigFilesTemporaryDir string
	// DefaultTransport is put before image names
	// (crio.image.default_transport).
	DefaultTransport string
	// InsecureRegistries are host names and CIDRs that are contacted without
	// TLS verification (crio.image.insecure_registries). CRI-O itself adds
	// 127.0.0.0/8 when it pulls.
	InsecureRegistries []string
	// PinnedImages are the patterns of images that are reported as pinned
	// (crio.image.pinned_images).
	PinnedImages []string
	// DecryptionKeysPath is the directory of image decryption keys
	// (crio.runtime.decryption_keys_path).
	DecryptionKeysPath string

	// DefaultRuntime is the handler of pods that name none; it is always in
	// Runtimes (crio.runtime.default_runtime).
	DefaultRuntime string
	// Runtimes are the runtime handlers by name (crio.runtime.runtimes). CRI-O
	// leaves out those it cannot use when it starts, such as one whose program
	// is missing; they are here all the same.
	Runtimes map[string]Runtime
	// HooksDir are the directories of OCI hook files; a file in a later one
	// replaces its namesake in an earlier one (crio.runtime.hooks_dir).
	HooksDir []string

	// NRI is the crio.nri table.
	NRI CRIONRI

	// DropIns are the files that [DropIn] rendered, among those that were read.
	DropIns []string
}

// Runtime is one runtime handler (crio.runtime.runtimes.NAME).
type Runtime struct {
	// Path is the runtime's program; a name without a slash is looked up in
	// CRI-O's PATH (runtime_path).
	Path string `toml:"runtime_path"`
	// Type is oci, vm or pod; empty means oci (runtime_type).
	Type string `toml:"runtime_type"`
	// Root is the runtime's state directory (runtime_root).
	Root string `toml:"runtime_root"`
	// ConfigPath is the runtime's own configuration, for type vm
	// (runtime_config_path).
	ConfigPath string `toml:"runtime_config_path"`
	// InheritDefaultRuntime says that the four above were taken from the
	// default runtime (inherit_default_runtime).
	InheritDefaultRuntime bool `toml:"inherit_default_runtime"`
}

// CRIONRI is CRI-O's side of NRI (crio.nri).
type CRIONRI struct {
	// Enabled is whether NRI is on (enable_nri).
	Enabled bool `toml:"enable_nri"`
	// Listen is the socket that plugins connect to (nri_listen).
	Listen string `toml:"nri_listen"`
	// DisableConnections is whether plugins that CRI-O did not start are
	// turned away (nri_disable_connections).
	DisableConnections bool `toml:"nri_disable_connections"`
	// PluginRegistrationTimeout is how long a plugin may take to register
	// (nri_plugin_registration_timeout).
	PluginRegistrationTimeout time.Duration `toml:"nri_plugin_registration_timeout"`
	// PluginRequestTimeout is how long a plugin may take to answer; CRI-O goes
	// on without one that takes longer (nri_plugin_request_timeout).
	PluginRequestTimeout time.Duration `toml:"nri_plugin_request_timeout"`
	// DefaultValidator is nil where no file has the table, and where a running
	// CRI-O reports none: one that is older than the release 1.34
	// (default_validator).
	DefaultValidator *CRIOValidator `toml:"default_validator"`
}

// CRIOValidator is the validator in CRI-O that refuses containers
// (crio.nri.default_validator).
type CRIOValidator struct {
	// Enable is whether it is on (nri_enable_default_validator).
	Enable bool `toml:"nri_enable_default_validator"`
	// RequiredPlugins are the plugins without which no container is created
	// (nri_validator_required_plugins).
	RequiredPlugins []string `toml:"nri_validator_required_plugins"`
}

// CRI-O's built-in values.
const (
	builtinRuntime             = "crun"
	builtinNRIListen           = "/var/run/nri/nri.sock"
	builtinRegistrationTimeout = 5 * time.Second
	builtinRequestTimeout      = 2 * time.Second
)

// builtinCRIO returns what CRI-O starts from (config.DefaultConfig), the
// storage settings aside.
func builtinCRIO() *CRIO {
	return &CRIO{
		InternalRepair:     true,
		Listen:             "/var/run/crio/crio.sock",
		PauseImage:         "registry.k8s.io/pause:3.10",
		NamespacedAuthDir:  "/etc/crio/auth",
		SignaturePolicyDir: "/etc/crio/policies",
		DefaultTransport:   "docker://",
		DecryptionKeysPath: "/etc/crio/keys/",
		DefaultRuntime:     builtinRuntime,
		Runtimes: map[string]Runtime{
			builtinRuntime: {Type: "oci", Root: "/run/crun"},
		},
		HooksDir: []string{"/usr/share/containers/oci/hooks.d"},
		NRI: CRIONRI{
			Enabled:                   true,
			Listen:                    builtinNRIListen,
			PluginRegistrationTimeout: builtinRegistrationTimeout,
			PluginRequestTimeout:      builtinRequestTimeout,
		},
	}
}

// crioTables is a CRIO in the shape of CRI-O's files, for decoding.
type crioTables struct {
	Crio struct {
		Root           *string   `toml:"root"`
		RunRoot        *string   `toml:"runroot"`
		ImageStore     *string   `toml:"imagestore"`
		Driver         *string   `toml:"storage_driver"`
		StorageOptions *[]string `toml:"storage_option"`
		InternalRepair *bool     `toml:"internal_repair"`
		API            struct {
			Listen *string `toml:"listen"`
		} `toml:"api"`
		Runtime struct {
			DecryptionKeysPath *string             `toml:"decryption_keys_path"`
			DefaultRuntime     *string             `toml:"default_runtime"`
			Runtimes           *map[string]Runtime `toml:"runtimes"`
			HooksDir           *[]string           `toml:"hooks_dir"`
		} `toml:"runtime"`
		Image struct {
			PauseImage           *string   `toml:"pause_image"`
			PauseImageAuthFile   *string   `toml:"pause_image_auth_file"`
			GlobalAuthFile       *string   `toml:"global_auth_file"`
			NamespacedAuthDir    *string   `toml:"namespaced_auth_dir"`
			SignaturePolicy      *string   `toml:"signature_policy"`
			SignaturePolicyDir   *string   `toml:"signature_policy_dir"`
			BigFilesTemporaryDir *string   `toml:"big_files_temporary_dir"`
			DefaultTransport     *string   `toml:"default_transport"`
			InsecureRegistries   *[]string `toml:"insecure_registries"`
			PinnedImages         *[]string `toml:"pinned_images"`
		} `toml:"image"`
		NRI *CRIONRI `toml:"nri"`
	} `toml:"crio"`
}

// tables returns a view of c: decoding into it sets c's fields.
func (c *CRIO) tables() *crioTables {
	t := &crioTables{}
	t.Crio.Root = &c.Root
	t.Crio.RunRoot = &c.RunRoot
	t.Crio.ImageStore = &c.ImageStore
	t.Crio.Driver = &c.Driver
	t.Crio.StorageOptions = &c.StorageOptions
	t.Crio.InternalRepair = &c.InternalRepair
	t.Crio.API.Listen = &c.Listen
	t.Crio.Runtime.DecryptionKeysPath = &c.DecryptionKeysPath
	t.Crio.Runtime.DefaultRuntime = &c.DefaultRuntime
	t.Crio.Runtime.Runtimes = &c.Runtimes
	t.Crio.Runtime.HooksDir = &c.HooksDir
	t.Crio.Image.PauseImage = &c.PauseImage
	t.Crio.Image.PauseImageAuthFile = &c.PauseImageAuthFile
	t.Crio.Image.GlobalAuthFile = &c.GlobalAuthFile
	t.Crio.Image.NamespacedAuthDir = &c.NamespacedAuthDir
	t.Crio.Image.SignaturePolicy = &c.SignaturePolicy
	t.Crio.Image.SignaturePolicyDir = &c.SignaturePolicyDir
	t.Crio.Image.BigFilesTemporaryDir = &c.BigFilesTemporaryDir
	t.Crio.Image.DefaultTransport = &c.DefaultTransport
	t.Crio.Image.InsecureRegistries = &c.InsecureRegistries
	t.Crio.Image.PinnedImages = &c.PinnedImages
	t.Crio.NRI = &c.NRI
	return t
}

// keepLast removes repeated options, keeping the last of each.
func keepLast(options []string) []string {
	var kept []string
	for i, o := range options {
		if !slices.Contains(options[i+1:], o) {
			kept = append(kept, o)
		}
	}
	return kept
}
