package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/shortnames"
	istorage "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// minimumIDPrefix is the length from which CRI-O takes a text for the beginning of an image id
// (cri-o internal/storage minimumTruncatedIDLength).
const minimumIDPrefix = 3

// Resolve finds the image that ref means in the root, in CRI-O's order:
//
//  1. 64 hexadecimal digits, after "sha256:" or alone, are an image id and nothing else.
//  2. Three or more hexadecimal digits that begin exactly one image's id are that image. (podman takes a short name
//     first where there is one.)
//  3. Everything else is a name. A short name stands for its alias in registries.conf; then for one below "localhost"
//     (images built on this node: podman looks there, CRI-O does not); then below each of
//     unqualified-search-registries, in order. The first that the root has is the image. Without tag and digest the
//     tag is "latest". With a digest, it is the image of that digest which has a name in that repository; a tag beside
//     it is ignored.
//
// It returns ErrNotFound, ErrAmbiguous, ErrInvalidReference or ErrBadRecord.
func (r *Root) Resolve(ctx context.Context, ref string) (Image, error) {
	if err := r.usable(ctx); err != nil {
		return Image{}, fmt.Errorf("resolve %q: %w", ref, err)
	}
	record, err := r.resolve(ref)
	if err != nil {
		return Image{}, fmt.Errorf("resolve %q in the root of handler %q: %w", ref, r.name, err)
	}
	image, err := r.leaningImage(record)
	if err != nil {
		return Image{}, fmt.Errorf("resolve %q in the root of handler %q: %w", ref, r.name, err)
	}
	return image, nil
}

func (r *Root) resolve(ref string) (*cstorage.Image, error) {
	if hex := strings.TrimPrefix(ref, "sha256:"); reference.IsFullIdentifier(hex) {
		return r.resolveID(hex)
	}

	byID, idErr := r.resolveIDPrefix(ref)
	if idErr == nil {
		return byID, nil
	}
	if !errors.Is(idErr, ErrNotFound) && !errors.Is(idErr, ErrAmbiguous) {
		return nil, idErr
	}
	byName, err := r.resolveName(ref)
	if errors.Is(idErr, ErrAmbiguous) && (errors.Is(err, ErrNotFound) || errors.Is(err, ErrInvalidReference)) {
		return nil, idErr
	}
	return byName, err
}

// resolveID looks for the image with exactly this id.
func (r *Root) resolveID(id string) (*cstorage.Image, error) {
	record, err := r.store.Image(id)
	if errors.Is(err, cstorage.ErrImageUnknown) || (err == nil && record.ID != id) {
		return nil, ErrNotFound
	}
	return record, err
}

func (r *Root) resolveIDPrefix(prefix string) (*cstorage.Image, error) {
	if len(prefix) < minimumIDPrefix || strings.Trim(prefix, "0123456789abcdef") != "" {
		return nil, ErrNotFound
	}
	records, err := r.store.Images()
	if err != nil {
		return nil, err
	}
	var found *cstorage.Image
	for i := range records {
		if !strings.HasPrefix(records[i].ID, prefix) {
			continue
		}
		if found != nil {
			return nil, ErrAmbiguous
		}
		found = &records[i]
	}
	if found == nil {
		return nil, ErrNotFound
	}
	return found, nil
}

func (r *Root) resolveName(name string) (*cstorage.Image, error) {
	if _, err := parseName(name); err != nil {
		return nil, err
	}
	candidates, err := shortnames.ResolveLocally(&r.sys, name)
	if err != nil {
		return nil, err
	}
	for _, named := range candidates {
		ref, err := r.reference(named)
		if err != nil {
			return nil, err
		}
		_, record, err := istorage.ResolveReference(ref)
		if errors.Is(err, istorage.ErrNoSuchImage) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return record, nil
	}
	return nil, ErrNotFound
}

// reference returns the image of that name in the root.
func (r *Root) reference(named reference.Named) (types.ImageReference, error) {
	named, err := withoutTagBesideDigest(named)
	if err != nil {
		return nil, err
	}
	return istorage.Transport.NewStoreReference(r.store, named, "")
}

// parseName checks the spelling of an image name, short or not.
func parseName(name string) (reference.Named, error) {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidReference, err)
	}
	return named, nil
}

// withoutTagBesideDigest drops the tag of a reference that has a digest too: the digest alone says which image it is.
func withoutTagBesideDigest(named reference.Named) (reference.Named, error) {
	digested, ok := named.(reference.Digested)
	if !ok || reference.IsNameOnly(named) {
		return named, nil
	}
	return reference.WithDigest(reference.TrimNamed(named), digested.Digest())
}
