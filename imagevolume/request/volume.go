package request

import (
	"cmp"
	// The digests that references may have.
	_ "crypto/sha256"
	_ "crypto/sha512"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/docker/go-units"
	"go.podman.io/image/v5/docker/reference"
	"go.yaml.in/yaml/v3"
)

// Limits of Linux paths (PATH_MAX, NAME_MAX), in bytes.
const (
	maxPath      = 4096
	maxComponent = 255
)

// maxImages bounds the images of one volume: their names have to go into the
// name of its mount.
const maxImages = 8

var (
	volumeKeys = []string{
		"image", "images", "mountPath", "pullPolicy", "mediaTypes", "subPath", "readOnly", "scratch", "scratchSize", "exec",
	}
	sourceKeys = []string{"image", "mediaTypes", "subPath"}
	policies   = []string{string(Always), string(IfNotPresent), string(Never)}
	scratches  = []string{string(ScratchContainer), string(ScratchPod)}
	// reserved are the directories that the runtime fills for the container.
	reserved = []string{"/proc", "/sys", "/dev"}
	imageID  = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// parseVolume reads one entry of a list. The text of its errors goes on after
// the index of the entry.
func parseVolume(item *yaml.Node) (Volume, error) {
	var volume Volume
	var single Source
	var policy PullPolicy
	writable := false
	seen, err := mapping(item, "a volume; write image and mountPath", volumeKeys, func(key string, value *yaml.Node) (err error) {
		switch key {
		case "image", "mediaTypes", "subPath":
			err = single.set(key, value)
		case "images":
			volume.Sources, err = parseImages(value)
		case "mountPath":
			if volume.MountPath, err = text(value); err == nil {
				volume.MountPath, err = cleanMountPath(volume.MountPath)
			}
		case "pullPolicy":
			var name string
			if name, err = oneOf(value, "pull policy", policies); err == nil {
				policy = PullPolicy(name)
			}
		case "readOnly":
			var readOnly bool
			readOnly, err = boolean(value)
			writable = !readOnly
		case "scratch":
			var name string
			if name, err = oneOf(value, "lifetime of what is written", scratches); err == nil {
				volume.Scratch = Scratch(name)
			}
		case "scratchSize":
			volume.ScratchSize, err = scratchSize(value)
		case "exec":
			volume.Exec, err = boolean(value)
		}
		return at("."+key, err)
	})
	switch {
	case err != nil:
		return volume, err
	case !seen["image"] && !seen["images"]:
		return volume, errors.New(": has no image; add image: NAME")
	case seen["image"] && seen["images"]:
		return volume, errors.New(": has image beside images; keep one of them")
	case !seen["mountPath"]:
		return volume, errors.New(": has no mountPath; add mountPath: /PATH")
	}
	if seen["image"] {
		volume.Sources = []Source{single}
	}
	for _, key := range sourceKeys {
		if seen["images"] && seen[key] {
			return volume, fmt.Errorf(".%s: is beside images; write it to each of them", key)
		}
	}
	for _, key := range []string{"scratch", "scratchSize"} {
		if seen[key] && !writable {
			return volume, fmt.Errorf(".%s: is for what a container writes; add readOnly: false, or remove it", key)
		}
	}
	if writable {
		volume.Scratch = cmp.Or(volume.Scratch, ScratchContainer)
		volume.ScratchSize = cmp.Or(volume.ScratchSize, DefaultScratchSize)
	}
	for i := range volume.Sources {
		volume.Sources[i].PullPolicy = cmp.Or(policy, defaultPolicy(volume.Sources[i].Image))
	}
	return volume, nil
}

func parseImages(list *yaml.Node) ([]Source, error) {
	switch n := len(list.Content); {
	case !is(list, yaml.SequenceNode, tagList):
		return nil, fmt.Errorf(`is %s, not a list of images; write "- image: ..."`, describe(list))
	case n == 0:
		return nil, errors.New(`is empty; write "- image: ..."`)
	case n > maxImages:
		return nil, fmt.Errorf("has %d images; at most %d are allowed", n, maxImages)
	}
	sources := make([]Source, len(list.Content))
	for i, item := range list.Content {
		seen, err := mapping(item, "an image; write image: NAME", sourceKeys, func(key string, value *yaml.Node) error {
			return at("."+key, sources[i].set(key, value))
		})
		if err == nil && !seen["image"] {
			err = errors.New(": has no image; add image: NAME")
		}
		if err != nil {
			return nil, fmt.Errorf("[%d]%w", i, err)
		}
	}
	return sources, nil
}

// set reads one of sourceKeys.
func (s *Source) set(key string, value *yaml.Node) (err error) {
	switch key {
	case "image":
		if s.Image, err = text(value); err == nil {
			err = checkImage(s.Image)
		}
	case "mediaTypes":
		s.MediaTypes, err = parseMediaTypes(value)
	case "subPath":
		if s.SubPath, err = text(value); err == nil {
			s.SubPath, err = cleanSubPath(s.SubPath)
		}
	}
	return err
}

// at puts the place of a value before its error, which may begin with a place
// within the value.
func at(place string, err error) error {
	switch {
	case err == nil:
		return nil
	case strings.HasPrefix(err.Error(), "["):
		return fmt.Errorf("%s%w", place, err)
	default:
		return fmt.Errorf("%s: %w", place, err)
	}
}

// mapping hands each key of a mapping to set, once, and returns them.
func mapping(item *yaml.Node, what string, known []string, set func(key string, value *yaml.Node) error) (seen map[string]bool, err error) {
	if !is(item, yaml.MappingNode, tagMap) {
		return nil, fmt.Errorf(": is %s, not %s", describe(item), what)
	}
	seen = map[string]bool{}
	for i := 0; i+1 < len(item.Content); i += 2 {
		key, value := item.Content[i], item.Content[i+1]
		switch {
		case !is(key, yaml.ScalarNode, tagString):
			return nil, fmt.Errorf(": has a key that is %s; known are %s", describe(key), strings.Join(known, ", "))
		case seen[key.Value]:
			return nil, fmt.Errorf(": key %s is there twice; keep one", quote(key.Value))
		case !slices.Contains(known, key.Value):
			if near := nearest(key.Value, known); near != "" {
				return nil, fmt.Errorf(": unknown key %s; did you mean %s?", quote(key.Value), quote(near))
			}
			return nil, fmt.Errorf(": unknown key %s; known are %s", quote(key.Value), strings.Join(known, ", "))
		}
		seen[key.Value] = true
		if err := set(key.Value, value); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

func text(value *yaml.Node) (string, error) {
	switch {
	case !is(value, yaml.ScalarNode, tagString):
		return "", fmt.Errorf("is %s, not a string; write a string, in quotes if need be", describe(value))
	case value.Value == "":
		return "", errors.New("is empty; give it a value or remove it")
	}
	return value.Value, nil
}

func boolean(value *yaml.Node) (bool, error) {
	if is(value, yaml.ScalarNode, tagBool) {
		switch strings.ToLower(value.Value) {
		case "true":
			return true, nil
		case "false":
			return false, nil
		}
	}
	return false, fmt.Errorf("is %s; write true or false, without quotes", describe(value))
}

func oneOf(value *yaml.Node, what string, known []string) (string, error) {
	word, err := text(value)
	if err != nil || slices.Contains(known, word) {
		return word, err
	}
	if near := nearest(word, known); near != "" {
		return "", fmt.Errorf("%s is not a %s; did you mean %s?", quote(word), what, near)
	}
	return "", fmt.Errorf("%s is not a %s; known are %s", quote(word), what, strings.Join(known, ", "))
}

func scratchSize(value *yaml.Node) (int64, error) {
	size, err := text(value)
	if err != nil {
		return 0, err
	}
	bytes, err := units.RAMInBytes(size)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s is not a size; write a number and a unit, such as 2GiB", quote(size))
	case bytes < MinScratchSize, bytes > MaxScratchSize:
		return 0, fmt.Errorf("%s is not between %s and %s; choose another size", quote(size),
			units.BytesSize(MinScratchSize), units.BytesSize(MaxScratchSize))
	}
	return bytes, nil
}

// defaultPolicy is Kubernetes' rule (SetDefaults_Volume in pkg/apis/core/v1).
func defaultPolicy(image string) PullPolicy {
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return IfNotPresent
	}
	tagged, ok := named.(reference.Tagged)
	if ok && tagged.Tag() == "latest" || reference.IsNameOnly(named) {
		return Always
	}
	return IfNotPresent
}

// checkImage accepts what CRI-O accepts as the image of a container: a full or
// short name with tag, digest or both, or an image id.
func checkImage(image string) error {
	switch {
	case strings.ContainsFunc(image, unicode.IsControl):
		return fmt.Errorf("%s has control characters; remove them", quote(image))
	case strings.TrimSpace(image) != image:
		return fmt.Errorf("%s has space around it; remove it", quote(image))
	case strings.Contains(image, "://"):
		return fmt.Errorf("%s has a transport; write the name alone, without ...://", quote(image))
	case imageID.MatchString(image):
		return nil
	}
	if _, err := reference.ParseNormalizedNamed(image); err != nil {
		return fmt.Errorf("%s: %s; write REGISTRY/NAME:TAG or REGISTRY/NAME@DIGEST", quote(image), oneLine(err.Error()))
	}
	return nil
}

// maxMediaTypes is far above any use.
const maxMediaTypes = 16

func parseMediaTypes(list *yaml.Node) ([]string, error) {
	switch n := len(list.Content); {
	case !is(list, yaml.SequenceNode, tagList):
		return nil, fmt.Errorf("is %s, not a list of media types; write [TYPE, ...]", describe(list))
	case n == 0:
		return nil, errors.New("is empty; remove it to have all layers")
	case n > maxMediaTypes:
		return nil, fmt.Errorf("has %d media types; at most %d are allowed", n, maxMediaTypes)
	}
	patterns := make([]string, len(list.Content))
	for i, item := range list.Content {
		pattern, err := text(item)
		if err == nil {
			err = checkMediaType(pattern)
		}
		if err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		patterns[i] = pattern
	}
	return patterns, nil
}

func checkMediaType(pattern string) error {
	_, err := path.Match(pattern, "")
	switch {
	case strings.ContainsFunc(pattern, unicode.IsControl):
		return fmt.Errorf("%s has control characters; remove them", quote(pattern))
	case strings.ContainsFunc(pattern, unicode.IsSpace):
		return fmt.Errorf("%s has space in it; remove it", quote(pattern))
	case len(pattern) > maxComponent:
		return fmt.Errorf("%s has more than %d bytes; shorten it", quote(pattern), maxComponent)
	case err != nil:
		return fmt.Errorf(`%s has an open [ or ends with \; remove it`, quote(pattern))
	}
	return nil
}

// cleanSubPath checks a path by Kubernetes' rules for sub paths.
func cleanSubPath(p string) (string, error) {
	if err := checkPath(p); err != nil {
		return "", err
	}
	clean := path.Clean(p)
	switch {
	case p[0] == '/':
		return "", fmt.Errorf("%s is absolute; write it without / at its start", quote(p))
	case clean == ".":
		return "", fmt.Errorf("%s is the whole image; remove it", quote(p))
	}
	return clean, nil
}

// checkPath refuses what no path may have.
func checkPath(p string) error {
	for component := range strings.SplitSeq(p, "/") {
		switch {
		case component == "..":
			return fmt.Errorf(`%s has ".." in it; write the path without`, quote(p))
		case len(component) > maxComponent:
			return fmt.Errorf("%s has a name of more than %d bytes; shorten it", quote(p), maxComponent)
		}
	}
	switch {
	case strings.ContainsFunc(p, unicode.IsControl):
		return fmt.Errorf("%s has control characters; remove them", quote(p))
	case len(p) >= maxPath:
		return fmt.Errorf("%s has %d bytes or more; shorten it", quote(p), maxPath)
	}
	return nil
}

// cleanMountPath checks a path by Kubernetes' rules and those of the runtime,
// and returns it without doubled and trailing slashes.
func cleanMountPath(p string) (string, error) {
	if err := checkPath(p); err != nil {
		return "", err
	}
	clean := path.Clean(p)
	switch {
	case p[0] != '/':
		return "", fmt.Errorf("%s is relative; start it with /", quote(p))
	case strings.Contains(p, ":"):
		return "", fmt.Errorf(`%s has ":" in it, which Kubernetes does not allow; choose another path`, quote(p))
	case clean == "/":
		return "", fmt.Errorf("%s is the root of the container; choose a directory in it", quote(p))
	}
	for _, dir := range reserved {
		if clean == dir || within(clean, dir) {
			return "", fmt.Errorf("%s is in %s, which belongs to the runtime; choose another path", quote(p), dir)
		}
	}
	return clean, nil
}
