// Package request turns the image volume annotations of a pod into the
// volumes that one of its containers asks for.
//
// An annotation is a list of volumes, in YAML or JSON, under one of three keys:
//
//	image-volume.ocihold.dev/container.NAME   for the container NAME
//	image-volume.ocihold.dev/pod              for every container of the pod
//	image-volume.ocihold.dev                  the same
//
// Only the first of these that is there counts for a container; lists are not
// merged, and an empty list ([]) asks for nothing. It is the lookup of NRI's
// GetEffectiveAnnotation. A key under the domain that is none of the three, a
// misspelt one or one with an impossible container name, is a fault of the
// whole pod: whom it was meant for cannot be told, so none of its containers
// may start without it. A faulty list is a fault of the containers it counts
// for, and of no other.
//
// A volume has these keys, and no other:
//
//	image        name, tag, digest, short name or image id
//	mediaTypes   list of patterns: only layers of these media types
//	subPath      a directory or file of the image, which is the volume then
//	images       instead of these three: a list of them, stacked, later wins
//	mountPath    absolute path in the container; required
//	pullPolicy   Always, IfNotPresent or Never; by default what Kubernetes says
//	readOnly     false gives the container a writable copy; by default true
//	scratch      with readOnly: false, how long what is written stays: as long
//	             as the container, the default, or the pod
//	scratchSize  with readOnly: false, how much can be written, such as 2GiB
//	exec         true allows programs in the volume to run; by default false
//
// The package is pure: no input but its arguments, no logging, and equal input
// gives equal text of an error, so that kubelet folds repeated events.
package request

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Domain is the annotation domain; it is also the bare key for every container
// of the pod.
const Domain = "image-volume.ocihold.dev"

// PullPolicy says when an image is fetched, as in Kubernetes' image volumes
// (KEP-4639).
type PullPolicy string

// The pull policies of Kubernetes.
const (
	Always       PullPolicy = "Always"
	IfNotPresent PullPolicy = "IfNotPresent"
	Never        PullPolicy = "Never"
)

// Volume is what a container asks to have mounted at one path.
type Volume struct {
	// Sources are what it shows, stacked: where several have a path, the last
	// of them counts. There is at least one.
	Sources []Source
	// MountPath is where it goes in the container: absolute and clean.
	MountPath string
	// Scratch is empty for a volume that is read-only.
	Scratch Scratch
	// ScratchSize is how much may be written, in bytes; 0 for a volume that is
	// read-only.
	ScratchSize int64
	// Exec allows programs in the volume to run.
	Exec bool
	// Key is the annotation key that it was read from.
	Key string
}

// OfOne reports whether the volume is for one container alone, by its key.
func (v Volume) OfOne() bool { return strings.HasPrefix(v.Key, containerKey(Domain)) }

// Source is an image, or a part of one, in a volume.
type Source struct {
	// Image is the reference as written: an image name with tag or digest, a
	// short name, or an image id.
	Image string
	// PullPolicy is never empty. Where the annotation has none it is Always for
	// the tag latest and for neither tag nor digest, else IfNotPresent. For a
	// full image id, which no registry knows, it is IfNotPresent.
	PullPolicy PullPolicy
	// MediaTypes are patterns for the media types of layers, as [path.Match]
	// has them, except that * and ? stand for a slash, too. Only layers that one
	// of them matches count; without patterns, all do.
	MediaTypes []string
	// SubPath is what of the image counts: clean, relative and without "..";
	// empty for all of it.
	SubPath string
}

// Scratch says how long what is written to a volume stays.
type Scratch string

// The lifetimes of what is written: that of the container, and that of the pod.
const (
	ScratchContainer Scratch = "container"
	ScratchPod       Scratch = "pod"
)

// Bounds of Volume.ScratchSize, in bytes.
const (
	DefaultScratchSize = 1 << 30
	MinScratchSize     = 16 << 20
	MaxScratchSize     = 16 << 40
)

// Pod names a pod in errors.
type Pod struct {
	Namespace, Name string
}

// String returns namespace/name, quoted where it would not be plain to read.
func (p Pod) String() string {
	return plain(p.Namespace + "/" + p.Name)
}

// ForContainer returns the volumes that the container asks for, in the order of
// the annotation; none when no annotation is for it. The annotations are the
// pod's. All volumes are valid or the result is one error, of one line, that
// names pod, container, annotation key, place, fault and fix.
func ForContainer(pod Pod, annotations map[string]string, container string) ([]Volume, error) {
	key, err := checkKeys(Domain, annotations)
	var volumes []Volume
	if err == nil {
		if key = effectiveKey(Domain, annotations, container); key == "" {
			return nil, nil
		}
		volumes, err = parse(key, annotations[key])
	}
	if err != nil {
		return nil, fmt.Errorf("image volumes of container %s of pod %s: annotation %s: %w",
			plain(container), pod, plain(key), err)
	}
	return volumes, nil
}

// All returns every volume that some container of the pod may ask for, ordered
// by key and place in the list: what ForContainer returns for any container is
// in it. Faulty lists are left out: the error is for the container that is
// created with it. One image may appear more than once.
func All(annotations map[string]string) []Volume {
	if _, err := checkKeys(Domain, annotations); err != nil {
		return nil
	}
	var all []Volume
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		if !Ours(key) || key == Domain && effectiveKey(Domain, annotations, "") != Domain {
			continue
		}
		if volumes, err := parse(key, annotations[key]); err == nil {
			all = append(all, volumes...)
		}
	}
	return all
}
