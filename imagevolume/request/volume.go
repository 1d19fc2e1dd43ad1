package request

import (
	// The digests that references may have.
	_ "crypto/sha256"
	_ "crypto/sha512"
	"errors"
	"fmt"
	"path"
	"regexp"
	"strings"
	"unicode"

	"go.podman.io/image/v5/docker/reference"
	"go.yaml.in/yaml/v3"
)

// Limits of Linux paths (PATH_MAX, NAME_MAX), in bytes.
const (
	maxPath      = 4096
	maxComponent = 255
)

var (
	fields   = []string{"image", "mountPath", "pullPolicy", "readOnly", "exec"}
	policies = []string{string(Always), string(IfNotPresent), string(Never)}
	// reserved are the directories that the runtime fills for the container.
	reserved = []string{"/proc", "/sys", "/dev"}
	imageID  = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// parseVolume reads one entry of a list. The text of its errors goes on after
// the index of the entry.
func parseVolume(item *yaml.Node) (Volume, error) {
	var volume Volume
	if !is(item, yaml.MappingNode, tagMap) {
		return volume, fmt.Errorf(": is %s, not a volume; write image and mountPath", describe(item))
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(item.Content); i += 2 {
		field, value := item.Content[i], item.Content[i+1]
		if !is(field, yaml.ScalarNode, tagString) {
			return volume, fmt.Errorf(": has a key that is %s; known are %s", describe(field), strings.Join(fields, ", "))
		}
		if seen[field.Value] {
			return volume, fmt.Errorf(": key %s is there twice; keep one", quote(field.Value))
		}
		seen[field.Value] = true
		if err := volume.set(field.Value, value); err != nil {
			return volume, err
		}
	}
	switch {
	case !seen["image"]:
		return volume, errors.New(": has no image; add image: NAME")
	case !seen["mountPath"]:
		return volume, errors.New(": has no mountPath; add mountPath: /PATH")
	case !seen["pullPolicy"]:
		volume.PullPolicy = defaultPolicy(volume.Image)
	}
	return volume, nil
}

func (v *Volume) set(field string, value *yaml.Node) error {
	var err error
	switch field {
	case "image":
		if v.Image, err = text(value); err == nil {
			err = checkImage(v.Image)
		}
	case "mountPath":
		if v.MountPath, err = text(value); err == nil {
			v.MountPath, err = cleanMountPath(v.MountPath)
		}
	case "pullPolicy":
		var policy string
		if policy, err = text(value); err == nil {
			v.PullPolicy, err = parsePolicy(policy)
		}
	case "readOnly":
		var readOnly bool
		if readOnly, err = boolean(value); err == nil && !readOnly {
			err = errors.New("is false, but writable volumes are not supported; remove it")
		}
	case "exec":
		v.Exec, err = boolean(value)
	default:
		if near := nearest(field, fields); near != "" {
			return fmt.Errorf(": unknown key %s; did you mean %s?", quote(field), quote(near))
		}
		return fmt.Errorf(": unknown key %s; known are %s", quote(field), strings.Join(fields, ", "))
	}
	if err != nil {
		return fmt.Errorf(".%s: %w", field, err)
	}
	return nil
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

func parsePolicy(policy string) (PullPolicy, error) {
	for _, known := range policies {
		if policy == known {
			return PullPolicy(known), nil
		}
	}
	if near := nearest(policy, policies); near != "" {
		return "", fmt.Errorf("%s is not a pull policy; did you mean %s?", quote(policy), near)
	}
	return "", fmt.Errorf("%s is not a pull policy; known are %s", quote(policy), strings.Join(policies, ", "))
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

// cleanMountPath checks a path by Kubernetes' rules and those of the runtime,
// and returns it without doubled and trailing slashes.
func cleanMountPath(p string) (string, error) {
	components := strings.SplitSeq(p, "/")
	for component := range components {
		switch {
		case component == "..":
			return "", fmt.Errorf(`%s has ".." in it; write the path without`, quote(p))
		case len(component) > maxComponent:
			return "", fmt.Errorf("%s has a name of more than %d bytes; shorten it", quote(p), maxComponent)
		}
	}
	clean := path.Clean(p)
	switch {
	case p[0] != '/':
		return "", fmt.Errorf("%s is relative; start it with /", quote(p))
	case strings.ContainsFunc(p, unicode.IsControl):
		return "", fmt.Errorf("%s has control characters; remove them", quote(p))
	case strings.Contains(p, ":"):
		return "", fmt.Errorf(`%s has ":" in it, which Kubernetes does not allow; choose another path`, quote(p))
	case len(p) >= maxPath:
		return "", fmt.Errorf("%s has %d bytes or more; shorten it", quote(p), maxPath)
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
