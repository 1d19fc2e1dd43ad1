package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/image"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/signature"
	"go.podman.io/image/v5/types"
)

// source is an image at its registry, or in a file, whose manifests have been read.
type source struct {
	types.ImageSource

	// local says that it is in a file, for which no one waits.
	local bool

	// digests are those of the manifest that the reference names and, where that is an index, of the instance for this
	// platform.
	digests []digest.Digest
	// instance is the digest of the instance for this platform, nil where the reference names no index.
	instance *digest.Digest
	// layers are what has to be there in the end.
	layers []types.BlobInfo
	// config is the digest of its config, empty for an artifact, and artifact is the manifest of one.
	config   digest.Digest
	artifact *ispec.Manifest
	// manifests are the contents of those manifests that the root is to have, too, and that containers/image may not keep:
	// the indexes that it was chosen from, outermost first, where containers/image would not choose it, in which case the
	// source is that of the instance by itself, and instance is nil; and its own, where layers are encrypted. For an
	// artifact they are all, its own the last.
	manifests [][]byte
	// limit is that of whoever asks for it.
	limit Limit
	// announce, if not nil, is called with the image's id before it is in the root.
	announce func(imageID string)
}

// knows tells whether the root has an index, or a single manifest, and the instance chosen from it already.
type knows func(top, instance digest.Digest) bool

// openSource asks the registry, or the mirrors that registries.conf gives for it, for the manifest: one request, one
// for each index in an index on the way, and one more for the instance of an index unless known already has it. The caller closes the source.
func openSource(ctx context.Context, named reference.Named, sys *types.SystemContext, known knows) (*source, error) {
	ref, err := docker.NewReference(named)
	if err != nil {
		return nil, err
	}
	opened, err := ref.NewImageSource(ctx, sys)
	if err != nil {
		return nil, err
	}
	return readSource(ctx, &source{ImageSource: opened}, sys, known)
}

// readSource reads the manifests of s, and closes it where that fails.
func readSource(ctx context.Context, s *source, sys *types.SystemContext, known knows) (_ *source, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()

	blob, mime, err := image.UnparsedInstance(s.ImageSource, nil).Manifest(ctx)
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
	leaf := found{digest: top}
	if manifest.MIMETypeIsMultiImage(mime) {
		if leaf, err = s.choose(ctx, sys, blob, mime, maxNesting); err != nil {
			return nil, err
		}
		s.digests = append(append(s.digests, leaf.between...), leaf.digest)
		s.instance = &leaf.digest
	}
	if leaf.apart {
		s.manifests = append([][]byte{blob}, leaf.indexes...)
		s.ImageSource, s.instance = leafSource{s.ImageSource, leaf.digest}, nil
	} else if known(top, leaf.digest) {
		return s, nil
	}
	index := blob
	unparsed := image.UnparsedInstance(s.ImageSource, s.instance)
	if blob, mime, err = unparsed.Manifest(ctx); err != nil {
		return nil, err
	}
	if err := s.readManifest(blob, mime); err != nil {
		return nil, err
	}
	if s.artifact != nil {
		if s.instance != nil {
			s.manifests = [][]byte{index}
		}
		s.manifests = append(s.manifests, blob)
		return s, nil
	}
	if isEncrypted(s.layers) {
		s.manifests = append(s.manifests, blob)
	}
	if sys.OSChoice != "" && !leaf.placed {
		if err := checkPlatform(ctx, sys, unparsed); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// maxNesting is how deep indexes may be in each other.
const maxNesting = 4

// found is the image that was chosen from an index.
type found struct {
	digest digest.Digest
	// placed says that the index gives its platform.
	placed bool
	// apart says that containers/image would not choose it by itself.
	apart bool
	// between are the indexes on the way to it, below the first; indexes are their contents.
	between []digest.Digest
	indexes [][]byte
}

// choose finds the image for the platform in an index and the indexes in it. What has the platform in the index comes
// first; entries without any are taken in their order, an index only if it has an image that fits.
func (s *source) choose(ctx context.Context, sys *types.SystemContext, blob []byte, mime string, depth int) (found, error) {
	if depth == 0 {
		return found{}, fmt.Errorf("more than %d indexes in each other: %w", maxNesting, ErrUnsupported)
	}
	list, err := manifest.ListFromBlob(blob, mime)
	if err != nil {
		return found{}, fmt.Errorf("parse the index: %w", err)
	}
	best, err := list.ChooseInstance(sys)
	if err != nil {
		return found{}, noInstance(list, err)
	}
	var none error
	for _, d := range union([]digest.Digest{best}, list.Instances()) {
		entry, err := list.Instance(d)
		if err != nil {
			return found{}, fmt.Errorf("parse the index: %w", err)
		}
		placed := entry.ReadOnly.Platform != nil
		if placed && d != best {
			continue
		}
		if !manifest.MIMETypeIsMultiImage(entry.MediaType) {
			return found{digest: d, placed: placed, apart: d != best}, nil
		}
		below, mime, err := image.UnparsedInstance(s.ImageSource, &d).Manifest(ctx)
		if err != nil {
			return found{}, err
		}
		inner, err := s.choose(ctx, sys, below, mime, depth-1)
		if err == nil {
			inner.apart = true
			inner.between = append([]digest.Digest{d}, inner.between...)
			inner.indexes = append([][]byte{below}, inner.indexes...)
			return inner, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return found{}, err
		}
		none = cmp.Or(none, err)
	}
	return found{}, none
}

// checkPlatform refuses an image whose config is for another platform.
func checkPlatform(ctx context.Context, sys *types.SystemContext, unparsed *image.UnparsedImage) error {
	single, err := image.FromUnparsedImage(ctx, sys, unparsed)
	if err != nil {
		return err
	}
	config, err := single.OCIConfig(ctx)
	if err != nil {
		return err
	}
	differs := func(has, wanted string) bool { return has != "" && wanted != "" && has != wanted }
	if differs(config.OS, sys.OSChoice) || differs(config.Architecture, sys.ArchitectureChoice) || differs(config.Variant, sys.VariantChoice) {
		return fmt.Errorf("%w: it is for %s, and this root has images for %s: push it for that platform too, or change the handler's platform",
			ErrNotFound, platformText(config.Platform),
			platformText(ispec.Platform{OS: sys.OSChoice, Architecture: sys.ArchitectureChoice, Variant: sys.VariantChoice}))
	}
	return nil
}

func platformText(p ispec.Platform) string {
	text := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		text += "/" + p.Variant
	}
	return text
}

// leafSource is an image of an index in an index, as if it were there by itself: containers/image chooses from the
// outermost index only.
type leafSource struct {
	types.ImageSource

	leaf digest.Digest
}

// Reference is the image's own where the reference is a digest; it has the digest of the index otherwise.
func (s leafSource) Reference() types.ImageReference {
	ref := s.ImageSource.Reference()
	named := ref.DockerReference()
	if _, ok := named.(reference.Digested); !ok {
		return ref
	}
	own, err := reference.WithDigest(reference.TrimNamed(named), s.leaf)
	if err != nil {
		return ref
	}
	if ownRef, err := docker.NewReference(own); err == nil {
		return ownRef
	}
	return ref
}

func (s leafSource) GetManifest(ctx context.Context, _ *digest.Digest) ([]byte, string, error) {
	return s.ImageSource.GetManifest(ctx, &s.leaf)
}

func (s leafSource) GetSignatures(ctx context.Context, _ *digest.Digest) ([][]byte, error) {
	return s.ImageSource.GetSignatures(ctx, &s.leaf)
}

func (s leafSource) LayerInfosForCopy(ctx context.Context, _ *digest.Digest) ([]types.BlobInfo, error) {
	return s.ImageSource.LayerInfosForCopy(ctx, &s.leaf)
}

// noInstance says which platforms an index has, as none of them fits.
func noInstance(list manifest.List, err error) error {
	var platforms []string
	for _, d := range list.Instances() {
		instance, instanceErr := list.Instance(d)
		if instanceErr != nil || instance.ReadOnly.Platform == nil {
			continue
		}
		platforms = union(platforms, []string{platformText(*instance.ReadOnly.Platform)})
	}
	return fmt.Errorf("%w: %w: the index has it for %s", ErrNotFound, err, cmp.Or(strings.Join(platforms, ", "), "no platform"))
}

// readManifest takes the layers and the config from a single image's manifest. It returns ErrUnsupported for what cannot
// be kept as an image.
func (s *source) readManifest(blob []byte, mime string) error {
	if err := checkSchema(mime); err != nil {
		return err
	}
	m, err := manifest.FromBlob(blob, mime)
	if err != nil {
		return fmt.Errorf("parse the manifest: %w", err)
	}
	if mime == ispec.MediaTypeImageManifest {
		if s.artifact, err = parseArtifact(blob); err != nil {
			return fmt.Errorf("parse the manifest: %w", err)
		}
	}
	if s.artifact == nil { // whose blobs are looked at as its files are planned
		s.config = m.ConfigInfo().Digest
		if err := checkBlob(m.ConfigInfo()); err != nil {
			return fmt.Errorf("parse the manifest: config: %w", err)
		}
	}
	for i, l := range m.LayerInfos() {
		if err := checkBlob(l.BlobInfo); s.artifact == nil && err != nil {
			return fmt.Errorf("parse the manifest: layer %d: %w", i, err)
		}
		if !l.EmptyLayer {
			s.layers = append(s.layers, l.BlobInfo)
		}
	}
	return nil
}

// checkBlob refuses a blob whose digest is none, which could be a path, or whose size is none; -1 is a size not known.
func checkBlob(b types.BlobInfo) error {
	if err := b.Digest.Validate(); err != nil {
		return fmt.Errorf("digest %q: %w", b.Digest, err)
	}
	if b.Size < -1 {
		return fmt.Errorf("size %d is negative", b.Size)
	}
	return nil
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
