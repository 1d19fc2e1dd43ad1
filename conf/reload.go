package conf

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// Text returns c as a file that [Load] makes the same of.
func (c Config) Text() ([]byte, error) {
	var text bytes.Buffer
	encoder := toml.NewEncoder(&text)
	encoder.Indent = ""
	if err := encoder.Encode(c); err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	return text.Bytes(), nil
}

// reloadedKeys are those that need no restart.
var reloadedKeys = []string{"log_level", "routes", "volumes.trust_present", "volumes.allowed_images", "volumes.allowed_namespaces", "volumes.max_scratch_bytes"}

// reloadedOfHandlers are the keys of a handler that need no restart.
var reloadedOfHandlers = []string{
	"allow_annotation", "gc_high", "gc_low", "gc_min_age", "gc_max_age", "gc_interval", "max_bytes", "max_image_bytes", "pinned_images",
}

// Reload returns c with those settings of next that need no restart, the keys of
// those that differ, sorted, and the keys of the others that differ.
func (c Config) Reload(next Config) (now Config, taken, restart []string, err error) {
	keys, err := c.differ(next)
	if err != nil {
		return Config{}, nil, nil, err
	}
	now = c
	now.LogLevel, now.Routes, now.Volumes.TrustPresent = next.LogLevel, next.Routes, next.Volumes.TrustPresent
	now.Volumes.AllowedImages, now.Volumes.AllowedNamespaces = next.Volumes.AllowedImages, next.Volumes.AllowedNamespaces
	now.Volumes.MaxScratchBytes = next.Volumes.MaxScratchBytes
	now.Handlers = maps.Clone(c.Handlers)
	for name, h := range now.Handlers {
		n, ok := next.Handlers[name]
		if !ok {
			continue
		}
		h.AllowAnnotation = n.AllowAnnotation
		h.GCHigh, h.GCLow, h.GCMinAge, h.GCMaxAge, h.GCInterval = n.GCHigh, n.GCLow, n.GCMinAge, n.GCMaxAge, n.GCInterval
		h.MaxBytes, h.MaxImageBytes, h.PinnedImages = n.MaxBytes, n.MaxImageBytes, n.PinnedImages
		now.Handlers[name] = h
	}
	for _, key := range keys {
		parts := strings.Split(key, ".")
		known := slices.Contains(reloadedKeys, key) ||
			len(parts) > 2 && parts[0] == "handlers" && slices.Contains(reloadedOfHandlers, parts[len(parts)-1])
		if known {
			taken = append(taken, key)
		} else {
			restart = append(restart, key)
		}
	}
	return now, taken, restart, nil
}

// differ returns the keys that have different values, sorted. A handler that only
// one of the two has is one key.
func (c Config) differ(other Config) ([]string, error) {
	var trees [2]map[string]any
	for i, config := range []Config{c, other} {
		text, err := config.Text()
		if err != nil {
			return nil, err
		}
		if err := toml.Unmarshal(text, &trees[i]); err != nil {
			return nil, fmt.Errorf("compare configurations: %w", err)
		}
	}
	return slices.Sorted(maps.Keys(differ("", trees[0], trees[1]))), nil
}

func differ(at string, a, b map[string]any) map[string]bool {
	found := map[string]bool{}
	for _, key := range slices.Concat(slices.Collect(maps.Keys(a)), slices.Collect(maps.Keys(b))) {
		tableA, isA := a[key].(map[string]any)
		tableB, isB := b[key].(map[string]any)
		switch {
		case isA && isB, at == "" && (isA || isB):
			maps.Copy(found, differ(at+key+".", tableA, tableB))
		case !reflect.DeepEqual(a[key], b[key]):
			found[at+key] = true
		}
	}
	return found
}
