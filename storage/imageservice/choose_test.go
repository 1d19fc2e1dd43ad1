package imageservice

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestRoute(t *testing.T) {
	const digest = "@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for name, tc := range map[string]struct {
		pattern   string
		fits, not []string
	}{
		"one name":        {"registry.example/app:1", []string{"registry.example/app:1"}, []string{"registry.example/app", "registry.example/app:10"}},
		"a folder":        {"registry.example/wasm/*", []string{"registry.example/wasm/a", "registry.example/wasm/a:1", "registry.example/wasm/a" + digest}, []string{"registry.example/wasm/a/b", "registry.example/a"}},
		"a registry":      {"registry.example/**", []string{"registry.example/a", "registry.example/a/b/c:1"}, []string{"registry.example:5000/a", "other.example/registry.example/a"}},
		"all below":       {"registry.example:5000/wasm/**", []string{"registry.example:5000/wasm/a", "registry.example:5000/wasm/a/b:1"}, []string{"registry.example:5000/wasm2/a"}},
		"any registry":    {"**/tools/*", []string{"registry.example/tools/a", "registry.example/team/tools/a:1"}, []string{"registry.example/tools/a/b"}},
		"a tag":           {"registry.example/**/*:wasm", []string{"registry.example/a:wasm", "registry.example/a/b:wasm"}, []string{"registry.example/a:1"}},
		"normalized name": {"docker.io/library/*", []string{"busybox", "docker.io/busybox:1"}, []string{"user/busybox"}},
		"everything":      {"**", []string{"busybox", "registry.example/a/b:1"}, []string{strings.Repeat("0", 64)}},
	} {
		t.Run(name, func(t *testing.T) {
			c := chooser{routes: []Route{{tc.pattern, "first"}, {tc.pattern, "second"}}}
			for _, image := range tc.fits {
				assert.Equal(t, "first", c.route(image), image)
			}
			for _, image := range tc.not {
				assert.Equal(t, DefaultRoot, c.route(image), image)
			}
		})
	}
}
