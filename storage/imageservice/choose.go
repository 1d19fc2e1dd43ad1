package imageservice

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
	"go.podman.io/image/v5/docker/reference"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Annotations by which a pod chooses the handler of its images.
const (
	HandlerAnnotation           = "runtime-handler.ocihold.dev"
	ContainerdHandlerAnnotation = "io.containerd.cri.runtime-handler"
)

// errHandler is returned, wrapped, for a handler that is not known or may not be chosen.
var errHandler = errors.New("bad runtime handler")

// chooser chooses handlers. It is pure.
type chooser struct {
	handlers map[string]Handler
	routes   []Route
}

// choice is the outcome: a handler and its root.
type choice struct {
	Handler

	name string
}

func (h Handler) root() string { return cmp.Or(h.Root, DefaultRoot) }

// narrow tells whether a call with this spec is about one root only.
func narrow(spec *cri.ImageSpec) bool {
	return spec.GetRuntimeHandler() != "" || len(spec.GetAnnotations()) > 0
}

// choose returns the handler that a call with this spec is for.
func (c chooser) choose(spec *cri.ImageSpec) (choice, error) {
	if name := spec.GetRuntimeHandler(); name != "" {
		return c.known(name)
	}
	otherwise, err := c.known(c.route(spec.GetImage()))
	if err != nil {
		return choice{}, err
	}
	for _, key := range []string{HandlerAnnotation, ContainerdHandlerAnnotation} {
		name := spec.GetAnnotations()[key]
		if name == "" {
			continue
		}
		chosen, err := c.known(name)
		if err != nil {
			return choice{}, fmt.Errorf("annotation %s: %w", key, err)
		}
		if !chosen.AllowAnnotation && chosen.root() != otherwise.root() {
			return choice{}, fmt.Errorf("annotation %s: %w: pods may not choose %q: set allow_annotation = true in [handlers.%s]",
				key, errHandler, name, name)
		}
		return chosen, nil
	}
	return otherwise, nil
}

func (c chooser) known(name string) (choice, error) {
	h, ok := c.handlers[name]
	if !ok {
		names := slices.Sorted(maps.Keys(c.handlers))
		return choice{}, fmt.Errorf("%w: %q is not known: there are %s", errHandler, name, strings.Join(names, ", "))
	}
	return choice{h, name}, nil
}

// route returns the handler of the first route that fits the image, or the default.
func (c chooser) route(image string) string {
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return DefaultRoot // an image id, or what is refused later
	}
	name := reference.TagNameOnly(named).String()
	for _, r := range c.routes {
		if ok, _ := doublestar.Match(r.Image, name); ok { // the patterns were checked
			return r.Handler
		}
	}
	return DefaultRoot
}
