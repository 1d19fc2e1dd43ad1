package request

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// containerName is what Kubernetes allows as the name of a container.
var containerName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// Ours reports whether an annotation key is in the domain of image volumes,
// whether or not it is a key that ForContainer knows.
func Ours(key string) bool { return in(Domain, key) }

func in(domain, key string) bool {
	return key == domain || strings.HasPrefix(key, domain+"/")
}

func podKey(domain string) string       { return domain + "/pod" }
func containerKey(domain string) string { return domain + "/container." }

// effectiveKey returns the key of the domain that counts for the container, ""
// when there is none.
func effectiveKey(domain string, annotations map[string]string, container string) string {
	for _, key := range []string{containerKey(domain) + container, podKey(domain), domain} {
		if _, ok := annotations[key]; ok {
			return key
		}
	}
	return ""
}

// checkKeys returns the first key of the domain that no container can have.
func checkKeys(domain string, annotations map[string]string) (string, error) {
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if !in(domain, key) || key == domain || key == podKey(domain) {
			continue
		}
		if name, ok := strings.CutPrefix(key, containerKey(domain)); ok {
			if !containerName.MatchString(name) {
				return key, fmt.Errorf("%s is not a container name; write %sNAME", quote(name), containerKey(domain))
			}
			continue
		}
		head, name, _ := strings.Cut(strings.TrimPrefix(key, domain+"/"), ".")
		switch nearest(head, []string{"container", "pod"}) {
		case "container":
			if containerName.MatchString(name) {
				return key, fmt.Errorf("unknown key; did you mean %s%s?", containerKey(domain), name)
			}
		case "pod":
			return key, fmt.Errorf("unknown key; did you mean %s?", podKey(domain))
		}
		return key, fmt.Errorf("unknown key; known are %s, %s and %sNAME", domain, podKey(domain), containerKey(domain))
	}
	return "", nil
}
