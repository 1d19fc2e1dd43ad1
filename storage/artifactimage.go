package storage

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// Labels of an image that was made of an artifact: the artifact's digest and type.
const (
	artifactLabel     = "ocihold.dev/artifact"
	artifactTypeLabel = "ocihold.dev/artifact-type"
)

// makeImage makes an image of the artifact that the open source has, which it closes. Its blobs go from the registry into
// their layers, one after the other; the image is there when all are.
func (r *Root) makeImage(
	ctx context.Context, named reference.Named, src *source, policy *signature.PolicyContext, report func(Progress),
) (_ *cstorage.Image, err error) {
	defer func() { err = errors.Join(err, src.Close()) }()
	blobs, err := planBlobs(src.artifact, r.rules)
	if err != nil {
		return nil, err
	}
	if err := src.allowed(ctx, policy); err != nil {
		return nil, err
	}
	if err := r.takeSlot(ctx); err != nil {
		return nil, err
	}
	defer r.leaveSlot()
	layers, err := r.makeLayers(ctx, src, blobs, report)
	if err != nil {
		return nil, err
	}
	record, err := r.recordArtifact(named, src, layers)
	if err != nil {
		return nil, fmt.Errorf("record the image: %w", err)
	}
	return record, nil
}

// makeLayers makes the layers of the blobs that the root does not have, and returns all, lowest first.
func (r *Root) makeLayers(ctx context.Context, src *source, blobs []blob, report func(Progress)) (layers []*cstorage.Layer, err error) {
	stalled := stallError(r.stall)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := newStallWatch(r.stall, func() {
		if !src.local {
			cancel(stalled)
		}
	})
	events := make(chan types.ProgressProperties)
	var tracking sync.WaitGroup
	// The tracker itself awaits nothing: a blob comes no faster than it is unpacked.
	tracker := newTracker(src.layers, report, &requests{}, r.stall, func() {})
	tracking.Go(func() { tracker.run(events) })
	defer tracking.Wait()
	defer close(events)

	budget := r.budget(src)
	parent := ""
	defer func() {
		if err != nil && budget.err != nil {
			err = errors.Join(err, r.removeRests(parent))
		}
	}()
	for _, b := range blobs {
		tell := func(event types.ProgressEvent, bytes int64) {
			events <- types.ProgressProperties{Event: event, Artifact: types.BlobInfo{Digest: b.Digest}, Offset: uint64(bytes)} //nolint:gosec // never negative
		}
		id := b.layerID(parent)
		has, err := r.hasLayer(id)
		if err != nil {
			return nil, fmt.Errorf("look for layer %s: %w", id, err)
		}
		budget.start(b.Digest, budget.spent)
		if !has {
			err := r.makeLayer(ctx, id, parent, blobWriter{
				source: src, blob: b, stall: watch, budget: budget,
				came:  func(bytes int64) { tell(types.ProgressEventRead, bytes) },
				clear: func(name string) error { return r.clearOf(layers, name) },
			})
			if err != nil && errors.Is(context.Cause(ctx), errStalled) {
				return nil, stalled
			}
			if err != nil {
				return nil, err
			}
		}
		tell(types.ProgressEventDone, b.Size)
		layer, err := r.store.Layer(id)
		if err == nil && has {
			err = budget.limit(layer.UncompressedSize)
			budget.spent += layer.UncompressedSize
		}
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", id, err)
		}
		layers, parent = append(layers, layer), id
	}
	return layers, nil
}

// makeLayer makes a layer of what the writer writes. Where that fails there is none.
func (r *Root) makeLayer(ctx context.Context, id, parent string, writer blobWriter) error {
	content, stream := io.Pipe()
	var writing sync.WaitGroup
	var unwritten error
	writing.Go(func() {
		unwritten = writer.writeTo(ctx, stream)
		stream.CloseWithError(unwritten)
	})
	_, _, err := r.store.PutLayer(id, parent, nil, "", false, hostMapped(), content)
	content.CloseWithError(err)
	writing.Wait()
	switch {
	case errors.Is(err, cstorage.ErrDuplicateID): // another process was faster
		return nil
	case err != nil && unwritten != nil && !errors.Is(unwritten, err):
		return unwritten
	case err != nil:
		return fmt.Errorf("unpack blob %s: %w", writer.blob.Digest, err)
	}
	return nil
}

// removeRests removes the highest layer of an image that is not to be, and those below it, up to the first that something
// else uses.
func (r *Root) removeRests(top string) error {
	for top != "" {
		layer, err := r.store.Layer(top)
		if errors.Is(err, cstorage.ErrLayerUnknown) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("look for layer %s: %w", top, err)
		}
		if gone, err := r.collectLayer(top); err != nil || !gone {
			return err
		}
		top = layer.Parent
	}
	return nil
}

// clearOf returns ErrInvalidArtifact where a file of that name would not be in directories of the layers alone, or in the
// place of a directory.
func (r *Root) clearOf(layers []*cstorage.Layer, name string) error {
	for _, layer := range layers {
		dir, err := diffDir(r.homes(), layer.ID)
		if err != nil {
			return err
		}
		if err := clearIn(dir, name); err != nil {
			return err
		}
	}
	return nil
}

func clearIn(layer, name string) (err error) {
	files, err := os.OpenRoot(layer)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.Close()) }()
	for dir := range parents(name) {
		switch info, err := files.Lstat(dir); {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case info.Mode()&fs.ModeSymlink != 0:
			return fmt.Errorf("%w: the file %q passes through the symbolic link %q of another blob", ErrInvalidArtifact, name, dir)
		case info.Mode()&fs.ModeCharDevice != 0: // a whiteout, which deletes what is below
			return nil
		case !info.IsDir():
			return fmt.Errorf("%w: the file %q is below %q, which is a file in another blob", ErrInvalidArtifact, name, dir)
		}
	}
	info, err := files.Lstat(name)
	if err == nil && info.IsDir() {
		return fmt.Errorf("%w: the file %q is a directory in another blob", ErrInvalidArtifact, name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// recordArtifact makes the image of the layers, or gives it the name where the root has it.
func (r *Root) recordArtifact(named reference.Named, src *source, layers []*cstorage.Layer) (*cstorage.Image, error) {
	original := src.manifests[len(src.manifests)-1]
	made, err := r.describe(src.artifact, digest.FromBytes(original), layers)
	if err != nil {
		return nil, err
	}
	options := &cstorage.ImageOptions{
		Digest:       digest.FromBytes(original),
		CreationDate: made.created,
		BigData: []cstorage.ImageBigDataOption{
			{Key: made.config.Digest.String(), Data: made.config.Data, Digest: made.config.Digest},
			{Key: artifactKey, Data: original, Digest: digest.FromBytes(original)},
		},
	}
	keep := func(key string, content []byte) {
		options.BigData = append(options.BigData, cstorage.ImageBigDataOption{Key: key, Data: content, Digest: digest.FromBytes(content)})
	}
	for _, content := range append(slices.Clone(src.manifests), made.manifest) {
		keep(manifestKey(digest.FromBytes(content)), content)
	}
	keep(cstorage.ImageDigestBigDataKey, made.manifest) // the last: with it the record is whole

	id, top := made.config.Digest.Encoded(), ""
	if len(layers) > 0 {
		top = layers[len(layers)-1].ID
	}
	if src.announce != nil {
		src.announce(id)
	}
	// Without a name: what a killed process leaves of it is known by that, see RemoveHalf.
	_, err = r.store.CreateImage(id, nil, top, "{}", options)
	if errors.Is(err, cstorage.ErrDuplicateID) {
		return r.addManifests(id, named, src.manifests)
	}
	if err != nil {
		return nil, err
	}
	record, err := r.addManifests(id, named, nil)
	if err != nil {
		_, deleteErr := r.store.DeleteImage(id, true)
		return nil, errors.Join(err, deleteErr)
	}
	return record, nil
}

// madeImage is what there is to record of an image.
type madeImage struct {
	config   ispec.Descriptor // with its content
	manifest []byte
	created  time.Time // zero for now
}

// describe makes the config and the manifest of an image with these layers.
func (r *Root) describe(artifact *ispec.Manifest, original digest.Digest, layers []*cstorage.Layer) (made madeImage, err error) {
	config := ispec.Image{
		Platform: ispec.Platform{
			OS:           cmp.Or(r.sys.OSChoice, runtime.GOOS),
			Architecture: cmp.Or(r.sys.ArchitectureChoice, runtime.GOARCH),
			Variant:      r.sys.VariantChoice,
		},
		Config: ispec.ImageConfig{Labels: map[string]string{artifactLabel: original.String()}},
		RootFS: ispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{}},
	}
	if kind := cmp.Or(artifact.ArtifactType, artifact.Config.MediaType); kind != "" {
		config.Config.Labels[artifactTypeLabel] = kind
	}
	if created, err := time.Parse(time.RFC3339, artifact.Annotations[ispec.AnnotationCreated]); err == nil {
		config.Created, made.created = &created, created
	}
	image := ispec.Manifest{
		Versioned:   specs.Versioned{SchemaVersion: 2},
		MediaType:   ispec.MediaTypeImageManifest,
		Annotations: artifact.Annotations,
		Layers:      []ispec.Descriptor{},
	}
	for _, l := range layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.UncompressedDigest)
		image.Layers = append(image.Layers, ispec.Descriptor{
			MediaType: ispec.MediaTypeImageLayer, Digest: l.UncompressedDigest, Size: l.UncompressedSize,
		})
	}
	content, err := json.Marshal(config)
	if err != nil {
		return madeImage{}, err
	}
	image.Config = ispec.Descriptor{MediaType: ispec.MediaTypeImageConfig, Digest: digest.FromBytes(content), Size: int64(len(content))}
	made.config = image.Config
	made.config.Data = content
	made.manifest, err = json.Marshal(image)
	return made, err
}
