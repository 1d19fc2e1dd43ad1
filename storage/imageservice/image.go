package imageservice

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker/reference"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// criImage returns an image as CRI has it.
func (s *Service) criImage(image storage.ImageAt, config ispec.Image) *cri.Image {
	tags, digests := names(image.Image)
	uid, username := user(config.Config.User)
	spec := &cri.ImageSpec{}
	if s.report && image.Handlers[0] != DefaultRoot {
		spec.RuntimeHandler = image.Handlers[0]
	}
	return &cri.Image{
		Id:          image.ID,
		RepoTags:    tags,
		RepoDigests: digests,
		Size:        max(1, uint64(image.Size)), //nolint:gosec // a sum of sizes; clients refuse 0
		Uid:         uid,
		Username:    username,
		Spec:        spec,
		Pinned:      image.Pinned || pinned(s.pinned, tags, digests),
	}
}

// names returns an image's names with a tag, and those with a digest: the ones it was pulled by, and each repository it
// has a tag in with each of its digests.
func names(image storage.Image) (tags, digests []string) {
	found := make(map[string]struct{})
	for _, name := range image.Names {
		named, err := reference.ParseNormalizedNamed(name)
		if err != nil {
			continue // no sound record has such a name
		}
		if _, ok := named.(reference.Digested); ok {
			found[name] = struct{}{}
			continue
		}
		tags = append(tags, name)
		for _, digest := range image.Digests {
			found[named.Name()+"@"+digest.String()] = struct{}{}
		}
	}
	return tags, slices.Sorted(maps.Keys(found))
}

// user splits the user that an image's config names, "user:group", into CRI's two fields, of which one at most is set.
func user(config string) (uid *cri.Int64Value, username string) {
	name, _, _ := strings.Cut(config, ":")
	if id, err := strconv.ParseInt(name, 10, 64); err == nil {
		return &cri.Int64Value{Value: id}, ""
	}
	return nil, name
}

// Pinned tells whether one of the patterns fits one of the image's names, by the rules of CRI-O's pinned_images.
func Pinned(patterns []string, image storage.Image) bool {
	tags, digests := names(image)
	return pinned(patterns, tags, digests)
}

// pinned tells whether one of CRI-O's pinned_images patterns fits one of the names. As in CRI-O, a pattern that ends in "*"
// fits what contains the rest of it, without a "*" at its beginning; all else is compared as a whole. Case does not
// matter.
func pinned(patterns []string, names ...[]string) bool {
	for _, name := range slices.Concat(names...) {
		name = strings.ToLower(name)
		for _, pattern := range patterns {
			pattern, part := strings.CutSuffix(strings.ToLower(pattern), "*")
			if name == pattern || part && strings.Contains(name, strings.TrimPrefix(pattern, "*")) {
				return true
			}
		}
	}
	return false
}
