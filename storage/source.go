package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"
)

// source is an image at its registry whose manifests have been read.
type source struct {
	types.ImageSource

	// digests are those of the manifest that the reference names and, where that is an index, of the instance for this
	// platform.
	digests []digest.Digest
	// instance is the digest of the instance for this platform, nil where the reference names no index.
	instance *digest.Digest
	// layers are what has to be there in the end.
	layers []types.BlobInfo
}

// openSource asks the registry, or the mirrors that registries.conf gives for it, for the manifest: one request, and
// one more for the instance of an index unless known already has it. The caller closes the source.
func openSource(ctx context.Context, named reference.Named, sys *types.SystemContext, known func(top, instance digest.Digest) bool) (_ *source, err error) {
	ref, err := docker.NewReference(named)
	if err != nil {
		return nil, err
	}
	opened, err := ref.NewImageSource(ctx, sys)
	if err != nil {
		return nil, err
	}
	s := &source{ImageSource: opened}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()

	blob, mime, err := image.UnparsedInstance(opened, nil).Manifest(ctx)
	if err != nil {
		return nil, err
	}
	if err := checkSchema(mime); err != nil {
		return nil, err
	}
	top, err := manifest.Digest(blob)
	if err != nil {
		return nil, err
	}
	s.digests = []digest.Digest{top}
	if manifest.MIMETypeIsMultiImage(mime) {
		list, err := manifest.ListFromBlob(blob, mime)
		if err != nil {
			return nil, fmt.Errorf("parse the index: %w", err)
		}
		instance, err := list.ChooseInstance(sys)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrNotFound, err)
		}
		s.instance = &instance
		s.digests = append(s.digests, instance)
		if known(top, instance) {
			return s, nil
		}
		if blob, mime, err = image.UnparsedInstance(opened, &instance).Manifest(ctx); err != nil {
			return nil, err
		}
	} else if known(top, top) {
		return s, nil
	}
	if s.layers, err = layersOf(blob, mime); err != nil {
		return nil, err
	}
	return s, nil
}

// layersOf returns the layers of a single image's manifest. It returns ErrUnsupported for what cannot be kept as an
// image.
func layersOf(blob []byte, mime string) ([]types.BlobInfo, error) {
	if err := checkSchema(mime); err != nil {
		return nil, err
	}
	m, err := manifest.FromBlob(blob, mime)
	if err != nil {
		return nil, fmt.Errorf("parse the manifest: %w", err)
	}
	if config := m.ConfigInfo().MediaType; mime == ispec.MediaTypeImageManifest && config != ispec.MediaTypeImageConfig {
		return nil, fmt.Errorf("it is an OCI artifact (config type %q), not an image: %w", config, ErrUnsupported)
	}
	var layers []types.BlobInfo
	for _, l := range m.LayerInfos() {
		if !l.EmptyLayer {
			layers = append(layers, l.BlobInfo)
		}
	}
	return layers, nil
}

func checkSchema(mime string) error {
	switch manifest.NormalizedMIMEType(mime) {
	case manifest.DockerV2Schema1MediaType, manifest.DockerV2Schema1SignedMediaType:
		return fmt.Errorf("the registry has it as Docker schema 1: %w: push it again as an OCI or Docker schema 2 image", ErrUnsupported)
	}
	return nil
}

// allowed checks the image against the signature policy.
func (s *source) allowed(ctx context.Context, policy *signature.PolicyContext) error {
	ok, err := policy.IsRunningImageAllowed(ctx, image.UnparsedInstance(s.ImageSource, s.instance))
	if err == nil && !ok {
		return ErrSignature
	}
	return err
}

// presentAs tells whether digests, of an image in a root, name what the source has.
func (s *source) presentAs(digests []digest.Digest) bool {
	for _, d := range s.digests {
		if !slices.Contains(digests, d) {
			return false
		}
	}
	return true
}

// openedReference is a reference whose source is open already, so that copying it does not ask for the manifest again.
type openedReference struct {
	types.ImageReference
	source types.ImageSource
}

func (r openedReference) NewImageSource(context.Context, *types.SystemContext) (types.ImageSource, error) {
	return r.source, nil
}
