package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// The annotations that CRI-O writes for a container (github.com/cri-o/cri-o,
// pkg/annotations), and kubelet's labels, which it copies there.
const (
	containerType        = "io.kubernetes.cri-o.ContainerType"
	containerAnnotations = "io.kubernetes.cri-o.Annotations"
	containerLabels      = "io.kubernetes.cri-o.Labels"
	sandboxName          = "io.kubernetes.cri-o.SandboxName"
	podNamespace         = "io.kubernetes.pod.namespace"
	podName              = "io.kubernetes.pod.name"
)

const restart = "is ocihold running? Start it (systemctl status ocihold); kubelet tries again"

// errNotInjected is the fault of a volume that the bundle knows nothing of.
var errNotInjected = errors.New("not injected: " + restart)

// bundle is what the guard needs of a bundle's config.json.
type bundle struct {
	Root        specs.Root        `json:"root"`
	Mounts      []specs.Mount     `json:"mounts"`
	Annotations map[string]string `json:"annotations"`

	dir string
}

func readBundle(dir string) (*bundle, error) {
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("%q is not an absolute path", dir)
	}
	text, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	b := &bundle{dir: dir}
	if err := json.Unmarshal(text, b); err != nil {
		return nil, fmt.Errorf("parse config.json: %w", err)
	}
	return b, nil
}

// wanted returns the volumes that the pod asks for in this container.
func (b *bundle) wanted() ([]request.Volume, error) {
	if b.Annotations[containerType] == "sandbox" || !anyOurs(b.Annotations) {
		return nil, nil
	}
	for _, own := range []string{containerAnnotations, containerLabels} {
		if err := b.notShadowed(own); err != nil {
			return nil, err
		}
	}
	if b.container() == "" {
		return nil, fmt.Errorf("container of pod %s has image volume annotations but no name: give it metadata.name", b.pod())
	}
	return request.ForContainer(b.pod(), b.Annotations, b.container())
}

// notShadowed refuses a container that has keys of the domain of its own, in
// the annotation that lists its annotations or labels: CRI-O lets them replace
// those of the pod, which are the ones that the daemon sees.
func (b *bundle) notShadowed(own string) error {
	text, ok := b.Annotations[own]
	if !ok {
		return nil
	}
	var keys map[string]string
	if err := json.Unmarshal([]byte(text), &keys); err != nil {
		return fmt.Errorf("container %s of pod %s: parse annotation %s: %w", b.container(), b.pod(), own, err)
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if request.Ours(key) {
			return fmt.Errorf("container %s of pod %s: %q is among the annotations or labels of the container, "+
				"where it does not count: annotate the pod", b.container(), b.pod(), key)
		}
	}
	return nil
}

func anyOurs(annotations map[string]string) bool {
	for key := range annotations {
		if request.Ours(key) {
			return true
		}
	}
	return false
}

func (b *bundle) container() string {
	return request.ContainerName(b.Annotations)
}

// pod names the pod by kubelet's labels, else by the name that CRI-O makes of
// its metadata: k8s_NAME_NAMESPACE_UID_ATTEMPT.
func (b *bundle) pod() request.Pod {
	if name := b.Annotations[podName]; name != "" {
		return request.Pod{Namespace: b.Annotations[podNamespace], Name: name}
	}
	name := b.Annotations[sandboxName]
	if parts := strings.Split(name, "_"); len(parts) == 5 {
		return request.Pod{Namespace: parts[2], Name: parts[1]}
	}
	return request.Pod{Name: name}
}

// injected returns the path of the daemon's mount that the bundle has for the
// volume.
func (b *bundle) injected(v request.Volume, dir string) (string, error) {
	found := errNotInjected
	var mount string
	for _, m := range b.Mounts {
		at := path.Clean("/" + m.Destination)
		switch source := filepath.Clean(m.Source); {
		case at == v.MountPath && m.Source == source && filepath.Dir(source) == dir:
			found = checkBind(m, v)
			mount = source
		case covers(at, v.MountPath) && mount != "":
			found = fmt.Errorf("covered by the mount of %q at %q: choose another mountPath", m.Source, at)
		}
	}
	return mount, found
}

// covers reports whether a mount at the path at hides p; both are clean.
func covers(at, p string) bool {
	return at == "/" || at == p || strings.HasPrefix(p, at+"/")
}

func checkBind(m specs.Mount, v request.Volume) error {
	if m.Type != "bind" {
		return fmt.Errorf("injected with type %q, not bind: %s", m.Type, restart)
	}
	for _, option := range required(v) {
		if !slices.Contains(m.Options, option) {
			return fmt.Errorf("injected without %s: %s", option, restart)
		}
	}
	// With r before it, an option is for this mount and those below.
	undoing := []string{"suid", "rsuid", "dev", "rdev"}
	if v.Scratch == "" {
		undoing = append(undoing, "rw", "rrw")
	} else {
		undoing = append(undoing, "ro", "rro")
	}
	if !v.Exec {
		undoing = append(undoing, "exec", "rexec")
	}
	for _, option := range m.Options {
		if slices.Contains(undoing, option) {
			return fmt.Errorf("injected with %s: %s", option, restart)
		}
	}
	return nil
}

// required lists the options that a volume's mount has.
func required(v request.Volume) []string {
	options := []string{"ro", "nosuid", "nodev"}
	if v.Scratch != "" {
		options[0] = "rw"
	}
	if !v.Exec {
		options = append(options, "noexec")
	}
	return options
}

func (b *bundle) refuse(v request.Volume, fault error) error {
	return fmt.Errorf("image volume %s of container %s of pod %s: requested by annotation %s but %w",
		v.MountPath, b.container(), b.pod(), v.Key, fault)
}
