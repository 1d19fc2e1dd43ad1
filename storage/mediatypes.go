package storage

import (
	"fmt"
	"path"
	"slices"
	"strings"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	cstorage "go.podman.io/storage"
)

// matchMediaType reports whether a pattern matches a media type. A pattern is as [path.Match] has them, except that "*"
// and "?" stand for a slash as well: "*model*" matches "application/vnd.cncf.model.weight.v1.tar".
func matchMediaType(pattern, mediaType string) (bool, error) {
	return path.Match(slashless.Replace(pattern), slashless.Replace(mediaType))
}

// slashless has a character for the slash that is nothing special in a path and that no media type has.
var slashless = strings.NewReplacer("/", "\x00")

// chooseLayers returns those of dirs, an image's layers from the top, whose media types one of the patterns matches.
func (r *Root) chooseLayers(record *cstorage.Image, dirs, patterns []string) ([]string, error) {
	types, err := r.layerTypes(record)
	if err != nil {
		return nil, err
	}
	if len(types) != len(dirs) {
		return nil, fmt.Errorf("%w: its manifest has %d layers, its record %d", ErrBadRecord, len(types), len(dirs))
	}
	slices.Reverse(types)
	var chosen []string
	for i, dir := range dirs {
		for _, pattern := range patterns {
			matches, err := matchMediaType(pattern, types[i])
			if err != nil {
				return nil, fmt.Errorf("media type %q: %w", pattern, err)
			}
			if matches {
				chosen = append(chosen, dir)
				break
			}
		}
	}
	if chosen == nil {
		slices.Sort(types)
		return nil, fmt.Errorf("%w: media types %s; it has %s", ErrNoSuchLayer, quoted(patterns), quoted(slices.Compact(types)))
	}
	return chosen, nil
}

func quoted(texts []string) string {
	if len(texts) == 0 {
		return "none"
	}
	return `"` + strings.Join(texts, `", "`) + `"`
}

// layerTypes returns the media types of an image's layers, lowest first: of one that was made of an artifact, those of
// the artifact's blobs.
func (r *Root) layerTypes(record *cstorage.Image) ([]string, error) {
	layers, err := r.keptLayers(record)
	types := make([]string, len(layers))
	for i, l := range layers {
		types[i] = l.MediaType
	}
	return types, err
}

// keptLayers returns an image's layers as its manifest has them, lowest first: of one that was made of an artifact, the
// artifact's blobs.
func (r *Root) keptLayers(record *cstorage.Image) ([]manifest.LayerInfo, error) {
	key := cstorage.ImageDigestBigDataKey
	if isOfArtifact(record) {
		key = artifactKey
	}
	content, err := r.store.ImageBigData(record.ID, key)
	if err != nil {
		return nil, fmt.Errorf("%w: manifest: %w", ErrBadRecord, err)
	}
	mime := manifest.GuessMIMEType(content)
	if key == artifactKey {
		mime = ispec.MediaTypeImageManifest
	}
	m, err := manifest.FromBlob(content, mime)
	if err != nil {
		return nil, fmt.Errorf("%w: manifest: %w", ErrBadRecord, err)
	}
	return slices.DeleteFunc(m.LayerInfos(), func(l manifest.LayerInfo) bool { return l.EmptyLayer }), nil
}
