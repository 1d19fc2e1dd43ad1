package request

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

const (
	podKey       = Domain + "/pod"
	containerKey = Domain + "/container."
)

// containerName is what Kubernetes allows as the name of a container.
var containerName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Ours reports whether an annotation key is in the domain of image volumes,
// whether or not it is a key that ForContainer knows.
func Ours(key string) bool {
	return key == Domain || strings.HasPrefix(key, Domain+"/")
}

// effectiveKey returns the key whose list counts for the container, "" when
// there is none.
func effectiveKey(annotations map[string]string, container string) string {
	for _, key := range []string{containerKey + container, podKey, Domain} {
		if _, ok := annotations[key]; ok {
			return key
		}
	}
	return ""
}

// checkKeys returns the first key of the domain that no container can have.
func checkKeys(annotations map[string]string) (string, error) {
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if !Ours(key) || key == Domain || key == podKey {
			continue
		}
		if name, ok := strings.CutPrefix(key, containerKey); ok {
			if !containerName.MatchString(name) {
				return key, fmt.Errorf("%s is not a container name; write %sNAME", quote(name), containerKey)
			}
			continue
		}
		head, name, _ := strings.Cut(strings.TrimPrefix(key, Domain+"/"), ".")
		switch nearest(head, []string{"container", "pod"}) {
		case "container":
			if containerName.MatchString(name) {
				return key, fmt.Errorf("unknown key; did you mean %s%s?", containerKey, name)
			}
		case "pod":
			return key, fmt.Errorf("unknown key; did you mean %s?", podKey)
		}
		return key, fmt.Errorf("unknown key; known are %s, %s and %sNAME", Domain, podKey, containerKey)
	}
	return "", nil
}
