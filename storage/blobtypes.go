package storage

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
)

// What Options.MediaTypes may make of an artifact's blobs.
const (
	// BlobTar has a blob unpacked as a tar archive, plain or compressed with gzip or zstd.
	BlobTar = "tar"
	// BlobFile has it be one file.
	BlobFile = "file"
)

// tarType matches the media types of archives: "tar" with or without a compression ends them, as in
// application/vnd.oci.image.layer.v1.tar+gzip, application/vnd.docker.image.rootfs.diff.tar.gzip and application/x-tar.
var tarType = regexp.MustCompile(`(?:^|[/.+-])tar(?:[.+](?:gzip|zstd))?$`)

// isTar tells whether blobs of the type are archives where no rule says otherwise.
func isTar(mediaType string) bool { return tarType.MatchString(mediaType) }

// mediaTypes are Options.MediaTypes, the rule that counts first.
type mediaTypes []mediaTypeRule

type mediaTypeRule struct {
	pattern string
	unpack  bool
}

// newMediaTypes checks the rules. The longest pattern counts first.
func newMediaTypes(rules map[string]string) (mediaTypes, error) {
	var types mediaTypes
	for _, pattern := range slices.Sorted(maps.Keys(rules)) {
		if _, err := matchMediaType(pattern, ""); err != nil {
			return nil, fmt.Errorf("media type %q: %w", pattern, err)
		}
		kind := rules[pattern]
		if kind != BlobTar && kind != BlobFile {
			return nil, fmt.Errorf("media type %q: %q is neither %q nor %q", pattern, kind, BlobTar, BlobFile)
		}
		types = append(types, mediaTypeRule{pattern, kind == BlobTar})
	}
	slices.SortStableFunc(types, func(a, b mediaTypeRule) int { return cmp.Compare(len(b.pattern), len(a.pattern)) })
	return types, nil
}

// unpack tells whether blobs of the type are archives.
func (t mediaTypes) unpack(mediaType string) bool {
	for _, rule := range t {
		if fits, err := matchMediaType(rule.pattern, mediaType); err == nil && fits {
			return rule.unpack
		}
	}
	return isTar(mediaType)
}
