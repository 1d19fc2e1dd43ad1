package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

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

	// Platform is the one whose images are chosen from an index, "os/arch" or "os/arch/variant". Empty means this node's.
	Platform string
	// Marker says that the root carries a marker file, which PrepareRoot makes. While it is missing, every call is
	// refused with ErrUnmounted, and nothing is written where the root's disk should be.
	Marker bool

	// Pin gives each leased image a name besides, PinRepository and its id as tag, by which CRI-O's pinned_images can
	// know it. A lease without it is not complete, nor one that has it where Pin is not set.
	Pin bool

	// PullConcurrency is how many transfers into the root may run at a time. 0 means any number.
	PullConcurrency int
	// StallTimeout ends a transfer for which the registry sends nothing for that long. 0 means DefaultStallTimeout.
	StallTimeout time.Duration

	// MediaTypes say by patterns, in which "*" is any text, which blobs of OCI artifacts are archives, BlobTar, and which are files, BlobFile.
	// The longest pattern that fits counts; where none does, the media types of archives are those that end in "tar",
	// "tar+gzip" or "tar+zstd". It counts when an artifact is pulled.
	MediaTypes map[string]string
	// ArtifactLimit is how large an image may be that is made of an OCI artifact, unpacked.
	ArtifactLimit Limit

	// TempDir takes blobs while they are downloaded, in a directory of this process's own. What processes left there that
	// have ended is removed. Empty means /var/tmp.
	TempDir string
	// BlobInfoCacheDir remembers where blobs were seen.
	BlobInfoCacheDir string

	// SignaturePolicy is CRI-O's signature_policy, a containers-policy.json(5) file.
	SignaturePolicy string
	// AuthFile is CRI-O's global_auth_file, a containers-auth.json(5) file.
	AuthFile string
	// RegistriesConf and RegistriesConfDir are containers-registries.conf(5) and its directory of drop-ins.
	RegistriesConf, RegistriesConfDir string
	// DecryptionKeys is CRI-O's decryption_keys_path: every file below it is a key for encrypted images, read when a pull
	// needs it. Empty means none.
	DecryptionKeys string
	// CertsDir is a containers-certs.d(5) directory.
	CertsDir string
	// InsecureRegistries is CRI-O's insecure_registries: "host", "host:port", or networks in CIDR notation. As with
	// CRI-O, 127.0.0.0/8 is always among them.
	InsecureRegistries []string

	// Log is told of transfers that ended well, and of those that were cancelled. Required.
	Log logrus.FieldLogger
}

// DefaultStallTimeout is Options.StallTimeout where that is 0.
const DefaultStallTimeout = 2 * time.Minute

// Root is an open root. Its methods may be called from several goroutines.
type Root struct {
	name     string
	store    cstorage.Store
	pin      bool
	marker   string // path of the marker file, empty for a root without
	sys      types.SystemContext
	insecure insecureRegistries
	keysDir  string
	stall    time.Duration
	rules    mediaTypes
	backoff  []time.Duration // before the first retry, the second, …
	slots    chan struct{}   // nil: any number of transfers
	now      func() time.Time
	log      logrus.FieldLogger

	artifactLimit Limit
	limits        *atomic.Pointer[[]Limit]

	pulse      *pulse
	downloads  *tempDir      // nil for the system's
	collecting chan struct{} // has room while no collection runs
	// toldTrouble is what the last collection could not do, as the log has it; whoever collects may touch it.
	toldTrouble string
	pulled      chan struct{} // gets one, where there is room, as a transfer ends; nil: no one is told

	// leans is who may lean on this root's layers, nil where no one does. Of CRI-O's own root, lenders are those that
	// it may lean on.
	leans   *crioRoot
	lenders func() []*Root

	counts   counters
	pulls    flights
	arriving arrivals
	leaseMu  sync.Mutex
	reserve  reserve
	// suspected says that what containers/storage has in memory may not be what is on disk.
	suspected atomic.Bool
	meter     meter
	// patience is how long Usage waits for layers to be measured.
	patience time.Duration
}

// storesMu orders GetStore and Free, which share an unguarded list.
var storesMu sync.Mutex

// Open opens the root that opt names, and creates it where it does not exist. It returns ErrUnsupported for a driver or
// driver option that the package does not support.
func Open(opt Options) (_ *Root, err error) {
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
	sys := types.SystemContext{
		SignaturePolicyPath:         opt.SignaturePolicy,
		AuthFilePath:                opt.AuthFile,
		SystemRegistriesConfPath:    opt.RegistriesConf,
		SystemRegistriesConfDirPath: opt.RegistriesConfDir,
		DockerPerHostCertDirPath:    opt.CertsDir,
		BlobInfoCacheDir:            opt.BlobInfoCacheDir,
	}
	if err := choosePlatform(&sys, opt.Platform); err != nil {
		return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	rules, err := newMediaTypes(opt.MediaTypes)
	if err != nil {
		return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
	}
	marker := ""
	if opt.Marker {
		marker = filepath.Join(opt.GraphRoot, markerFile)
		if err := checkMarker(marker, opt.Name); err != nil {
			return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
		}
	}
	var downloads *tempDir
	if opt.TempDir != "" {
		if downloads, err = claimTempDir(opt.TempDir); err != nil {
			return nil, fmt.Errorf("open the root of handler %q at %s: %w", opt.Name, opt.GraphRoot, err)
		}
		sys.BigFilesTemporaryDir = downloads.path
		defer func() {
			if err != nil {
				err = errors.Join(err, downloads.release())
			}
		}()
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
	r := &Root{
		name:     opt.Name,
		store:    store,
		pin:      opt.Pin,
		marker:   marker,
		sys:      sys,
		insecure: insecure,
		keysDir:  opt.DecryptionKeys,
		stall:    cmp.Or(opt.StallTimeout, DefaultStallTimeout),
		rules:    rules,
		backoff:  []time.Duration{time.Second, 2 * time.Second, 4 * time.Second},
		patience: measuringPatience,
		now:      time.Now,
		log:      opt.Log.WithField("handler", opt.Name),

		artifactLimit: opt.ArtifactLimit,
		limits:        &atomic.Pointer[[]Limit]{},

		pulse:      newPulse(opt),
		downloads:  downloads,
		collecting: make(chan struct{}, 1),
	}
	if opt.PullConcurrency > 0 {
		r.slots = make(chan struct{}, opt.PullConcurrency)
	}
	if opt.Marker {
		r.keepReserve()
	}
	return r, nil
}

// choosePlatform makes sys choose images for the platform "os/arch[/variant]" from indexes.
func choosePlatform(sys *types.SystemContext, platform string) error {
	if platform == "" {
		return nil
	}
	parts := strings.Split(platform, "/")
	if len(parts) < 2 || len(parts) > 3 || slices.Contains(parts, "") {
		return fmt.Errorf("platform %q: want os/arch or os/arch/variant, such as linux/arm64/v8 or wasi/wasm", platform)
	}
	sys.OSChoice, sys.ArchitectureChoice = parts[0], parts[1]
	if len(parts) == 3 {
		sys.VariantChoice = parts[2]
	}
	return nil
}

// Close cancels the pulls and measuring under way, waits for them, and lets go of the root. It changes nothing in the root.
func (r *Root) Close() error {
	r.pulls.close()
	r.meter.close()
	storesMu.Lock()
	defer storesMu.Unlock()
	r.store.Free()
	if r.downloads == nil {
		return nil
	}
	return r.downloads.release()
}

// usable returns why a call on r must not begin: ErrClosed, ErrUnmounted, ErrReadOnly, ErrEmptyList, or ctx's error.
func (r *Root) usable(ctx context.Context) error {
	if err := r.ready(); err != nil {
		return err
	}
	r.reassure()
	return ctx.Err()
}

// ready returns ErrClosed, ErrUnmounted, ErrReadOnly or ErrEmptyList where r cannot be used. Calls that only read are
// refused too where the marker is missing, as containers/storage makes directories for its lock files, and on a read-only
// disk, where it panics.
func (r *Root) ready() error {
	if r.pulls.isClosed() {
		return ErrClosed
	}
	err := checkWritable(r.store.GraphRoot())
	if r.marker != "" {
		err = checkMarker(r.marker, r.name)
	}
	if err != nil {
		return err
	}
	return r.checkLists()
}

// checkLists returns ErrEmptyList where a list of the root has no bytes. containers/storage never writes one like that
// and reads it as a list of nothing: the next pull would take the files of layers, which containers may have mounted,
// for leftovers.
func (r *Root) checkLists() error {
	for _, home := range r.homes() {
		for _, file := range []string{"overlay-layers/layers.json", "overlay-images/images.json", "overlay-containers/containers.json"} {
			path := filepath.Join(filepath.Dir(home), file)
			if info, err := os.Stat(path); err == nil && info.Size() == 0 {
				return emptyList(path)
			}
		}
	}
	return nil
}

func emptyList(path string) error {
	return fmt.Errorf("%s: %w: restore the file, or stop what uses the root, empty it, and have its images pulled again", path, ErrEmptyList)
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
