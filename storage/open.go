package storage

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/sirupsen/logrus"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// Options say which root to open and how to pull into it. The empty value of a field that names a file or directory
// means the system default of containers/image, unless the field says otherwise.
type Options struct {
	// Name is the handler's name; messages carry it.
	Name string

	// GraphRoot and RunRoot are CRI-O's root and runroot. Both are required. A root has exactly one run root: programs
	// that share the one must share the other.
	GraphRoot, RunRoot string
	// ImageStore is CRI-O's imagestore: a place for images apart from that of containers. Empty means GraphRoot.
	ImageStore string
	// Driver is CRI-O's storage_driver: "overlay", its alias "overlay2", or empty for overlay.
	Driver string
	// DriverOptions are CRI-O's storage_option.
	DriverOptions []string

	// TempDir takes blobs while they are downloaded. Empty means /var/tmp.
	TempDir string
	// ClearTemp removes what killed processes left in TempDir. Only for a TempDir that no one else pulls through.
	ClearTemp bool
	// BlobInfoCacheDir remembers where blobs were seen.
	BlobInfoCacheDir string

	// SignaturePolicy is CRI-O's signature_policy, a containers-policy.json(5) file.
	SignaturePolicy string
	// AuthFile is CRI-O's global_auth_file, a containers-auth.json(5) file.
	AuthFile string
	// RegistriesConf and RegistriesConfDir are containers-registries.conf(5) and its directory of drop-ins.
	RegistriesConf, RegistriesConfDir string
	// CertsDir is a containers-certs.d(5) directory.
	CertsDir string
	// InsecureRegistries is CRI-O's insecure_registries: "host", "host:port", or networks in CIDR notation. As with
	// CRI-O, 127.0.0.0/8 is always among them.
	InsecureRegistries []string

	// Log is told of transfers that ended well, and of those that were cancelled. Required.
	Log logrus.FieldLogger
}

// Root is an open root. Its methods may be called from several goroutines.
type Root struct {
	name     string
	store    cstorage.Store
	sys      types.SystemContext
	insecure insecureRegistries
	log      logrus.FieldLogger

	pulls   flights
	leaseMu sync.Mutex
}

// storesMu orders GetStore and Free, which share an unguarded list.
var storesMu sync.Mutex

// Open opens the root that opt names, and creates it where it does not exist. It returns ErrUnsupported for a driver or
// driver option that the package does not support.
func Open(opt Options) (*Root, error) {
	if opt.GraphRoot == "" || opt.RunRoot == "" {
		return nil, fmt.Errorf("open the root of handler %q: graph root and run root are both required", opt.Name)
	}
	switch opt.Driver {
	case "", "overlay", "overlay2":
	default:
		return nil, fmt.Errorf("open the root of handler %q at %s: storage driver %q: %w: set storage_driver = \"overlay\"",
			opt.Name, opt.GraphRoot, opt.Driver, ErrUnsupported)
	}
	driverOptions, err := overlayOptions(opt.DriverOptions)
	if err != nil {
		return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	insecure, err := parseInsecureRegistries(opt.InsecureRegistries)
	if err != nil {
		return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	if opt.TempDir != "" {
		if err := prepareTempDir(opt.TempDir, opt.ClearTemp); err != nil {
			return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
		}
	}

	storesMu.Lock()
	defer storesMu.Unlock()
	store, err := cstorage.GetStore(cstorage.StoreOptions{
		GraphRoot:          opt.GraphRoot,
		RunRoot:            opt.RunRoot,
		ImageStore:         opt.ImageStore,
		GraphDriverName:    "overlay",
		GraphDriverOptions: driverOptions,
	})
	if err != nil {
		return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	return &Root{
		name:  opt.Name,
		store: store,
		sys: types.SystemContext{
			SignaturePolicyPath:         opt.SignaturePolicy,
			AuthFilePath:                opt.AuthFile,
			SystemRegistriesConfPath:    opt.RegistriesConf,
			SystemRegistriesConfDirPath: opt.RegistriesConfDir,
			DockerPerHostCertDirPath:    opt.CertsDir,
			BigFilesTemporaryDir:        opt.TempDir,
			BlobInfoCacheDir:            opt.BlobInfoCacheDir,
		},
		insecure: insecure,
		log:      opt.Log.WithField("handler", opt.Name),
	}, nil
}

// Close cancels the pulls under way, waits for them, and lets go of the root. It changes nothing in the root.
func (r *Root) Close() error {
	r.pulls.close()
	storesMu.Lock()
	defer storesMu.Unlock()
	r.store.Free()
	return nil
}

// usable returns why a call on r must not begin: ErrClosed, or ctx's error.
func (r *Root) usable(ctx context.Context) error {
	if r.pulls.isClosed() {
		return ErrClosed
	}
	return ctx.Err()
}

// overlayOptions returns the driver options for our handle of a root: no additional stores, layers synced to disk
// before they are recorded, and no change to the propagation of the root's own mount, which belongs to CRI-O.
func overlayOptions(options []string) ([]string, error) {
	out := make([]string, 0, len(options)+2)
	for _, o := range options {
		key, _, _ := strings.Cut(o, "=")
		driver, name, found := strings.Cut(strings.ToLower(strings.TrimSpace(key)), ".")
		if !found {
			driver, name = "", driver
		}
		if driver != "" && driver != "overlay" && driver != "overlay2" {
			continue
		}
		switch name {
		case "imagestore", "additionalimagestore", "additionalimagestores", "additionallayerstore", "additionallayerstores",
			"sync", "skip_mount_home":
		case "mount_program":
			return nil, fmt.Errorf("storage option %q: %w: remove it, the kernel's overlay is needed", o, ErrUnsupported)
		case "use_composefs":
			return nil, fmt.Errorf("storage option %q: %w: remove it", o, ErrUnsupported)
		default:
			out = append(out, o)
		}
	}
	return append(out, "overlay.sync=filesystem", "overlay.skip_mount_home=true"), nil
}

// tempPrefix begins the name of everything that containers/image puts into its directory for big files.
const tempPrefix = "container_images_"

func prepareTempDir(dir string, clearIt bool) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create the directory for downloads: %w", err)
	}
	if !clearIt {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("clear the directory for downloads: %w", err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tempPrefix) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("clear the directory for downloads: %w", err)
		}
	}
	return nil
}
