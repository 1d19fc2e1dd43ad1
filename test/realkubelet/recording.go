package realkubelet

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// asked are the calls of a RuntimeService that kubelet makes all the time and
// that change nothing.
var asked = []string{
	"ContainerStats", "ContainerStatus", "ListContainerStats", "ListContainers", "ListPodSandbox", "ListPodSandboxStats",
	"PodSandboxStatus", "RuntimeConfig", "Status", "UpdateRuntimeConfig", "Version",
}

// Essence leaves out what kubelet asks over and over, as often as its clocks have
// it: reading calls of the RuntimeService; lists of images and disks except the
// first of each; the status of an image that it has asked for already since the
// last pull.
func Essence(calls []Call) []Call {
	calls = slices.DeleteFunc(slices.Clone(calls), func(c Call) bool {
		return slices.Contains(asked, strings.TrimPrefix(c.Method, "RuntimeService/"))
	})
	var kept []Call
	seen := make(map[string]bool)
	for _, call := range calls {
		key := fmt.Sprint(call.Method, call.Request)
		switch call.Method {
		case "ImageService/ImageFsInfo", "ImageService/ListImages", "ImageService/ImageStatus":
			if seen[key] {
				continue
			}
			seen[key] = true
		case "ImageService/PullImage":
			maps.DeleteFunc(seen, func(key string, _ bool) bool { return strings.HasPrefix(key, "ImageService/ImageStatus") })
		}
		kept = append(kept, call)
	}
	return kept
}

// Names replaces what differs from node to node and from run to run with
// placeholders, such as "<image 1>" for an image's id, and puts values of
// another node in their places.
type Names struct {
	known        *strings.Replacer // what is no identifier
	placeholders map[string]string // by value
	values       map[string]string // by placeholder
	count        map[string]int    // by kind
}

// NewNames returns names for a node, in whose directory and registry calls name
// files and images.
func NewNames(dir, registry string) *Names {
	return &Names{
		known:        strings.NewReplacer(dir, "<dir>", registry, "<registry>"),
		placeholders: make(map[string]string),
		values: map[string]string{
			"<dir>": dir, "<registry>": registry,
			"<hash>": "0", "<random>": "00000000", "<time>": "2026-01-01T00:00:00Z",
		},
		count: make(map[string]int),
	}
}

// learn makes up a placeholder for a value.
func (n *Names) learn(kind, value string) string {
	n.count[kind]++
	placeholder := fmt.Sprintf("<%s %d>", kind, n.count[kind])
	n.placeholders[value], n.values[placeholder] = placeholder, value
	return placeholder
}

// varying are the keys whose values differ by machine or time, with what is put
// there.
var varying = map[string]string{
	"inodesUsed":                   "<number>",
	"io.kubernetes.container.hash": "<hash>",
	"kubernetes.io/config.seen":    "<time>",
	"mountpoint":                   "<path>",
	"size":                         "<number>",
	"timestamp":                    "<number>",
	"usedBytes":                    "<number>",
}

var (
	logFile     = regexp.MustCompile(`(/containers/[^/]+/)[0-9a-f]{8}$`)
	identifier  = regexp.MustCompile(`sha256:[0-9a-f]{64}|[0-9a-f]{64}|[0-9a-f]{32}`)
	placeholder = regexp.MustCompile(`<[a-z]+( [0-9]+)?>`)
)

// Generalize returns a call with placeholders. They are numbered as they come
// up, so that calls have to come in order. A list of images comes out in the
// order of their names: that of their ids is another on each machine.
func (n *Names) Generalize(call Call) Call {
	call.Request = edit("", call.Request, n.hide)
	call.Answer = edit("", sorted(call.Answer), n.hide)
	call.Error = n.hide("", call.Error)
	return call
}

// sorted returns an answer with its list of images, if it has one, sorted.
func sorted(answer any) any {
	message, _ := answer.(map[string]any)
	images, ok := message["images"].([]any)
	if !ok {
		return answer
	}
	message = maps.Clone(message)
	message["images"] = slices.SortedFunc(slices.Values(images), func(a, b any) int {
		return strings.Compare(imageNames(a), imageNames(b))
	})
	return message
}

func imageNames(image any) string { return fmt.Sprint(image.(map[string]any)["repoTags"]) }

func (n *Names) hide(key, text string) string {
	if replacement, ok := varying[key]; ok {
		return replacement
	}
	text = logFile.ReplaceAllString(n.known.Replace(text), "${1}<random>")
	return identifier.ReplaceAllStringFunc(text, func(value string) string {
		if p, ok := n.placeholders[value]; ok {
			return p
		}
		switch {
		case len(value) == 32:
			return n.learn("uid", value)
		case strings.Contains(value, ":"):
			return n.learn("digest", value)
		case key == "podSandboxId":
			return n.learn("sandbox", value)
		case key == "containerId":
			return n.learn("container", value)
		default:
			return n.learn("image", value)
		}
	})
}

// Specialize returns a call with values in place of its request's placeholders.
// A pod's uid, which kubelet makes up, gets a value here; any other placeholder
// must have come up in an earlier answer.
func (n *Names) Specialize(call Call) (Call, error) {
	var unknown []string
	call.Request = edit("", call.Request, func(_, text string) string {
		return placeholder.ReplaceAllStringFunc(text, func(p string) string {
			if _, ok := n.values[p]; !ok && strings.HasPrefix(p, "<uid ") {
				n.learn("uid", fmt.Sprintf("%032x", len(n.values)))
			}
			value, ok := n.values[p]
			if !ok {
				unknown = append(unknown, p)
			}
			return value
		})
	})
	if len(unknown) > 0 {
		return Call{}, fmt.Errorf("recorded call %s: no answer has had %s", call.Method, strings.Join(unknown, ", "))
	}
	return call, nil
}

// edit returns a copy of a message with every string edited, in the order of the
// keys.
func edit(key string, v any, f func(key, text string) string) any {
	switch v := v.(type) {
	case map[string]any:
		if _, ok := varying[key]; ok {
			return f(key, "")
		}
		edited := make(map[string]any, len(v))
		for _, k := range slices.Sorted(maps.Keys(v)) {
			edited[k] = edit(k, v[k], f)
		}
		return edited
	case []any:
		edited := make([]any, len(v))
		for i := range v {
			edited[i] = edit(key, v[i], f)
		}
		return edited
	case string:
		return f(key, v)
	default:
		return v
	}
}
