package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

const (
	// maxText is what Kubernetes allows for all annotations of an object, in
	// bytes (TotalAnnotationSizeLimitB).
	maxText = 256 << 10
	// maxVolumes is far above any use and bounds the mounts of a container.
	maxVolumes = 64
)

// The YAML tags of values, as yaml.Node.ShortTag has them.
const (
	tagNull   = "!!null"
	tagBool   = "!!bool"
	tagString = "!!str"
	tagInt    = "!!int"
	tagFloat  = "!!float"
	tagMap    = "!!map"
	tagList   = "!!seq"
)

// parse reads the list of volumes under one key.
func parse(key, text string) ([]Volume, error) {
	list, err := document(text)
	if err != nil {
		return nil, err
	}
	if !is(list, yaml.SequenceNode, tagList) {
		return nil, fmt.Errorf(`is %s, not a list of volumes; write "- image: ...", or [] for no volume`, describe(list))
	}
	if n := len(list.Content); n > maxVolumes {
		return nil, fmt.Errorf("has %d volumes; at most %d are allowed", n, maxVolumes)
	}
	volumes := make([]Volume, 0, len(list.Content))
	for i, item := range list.Content {
		volume, err := parseVolume(item)
		if err != nil {
			return nil, fmt.Errorf("[%d]%w", i, err)
		}
		for j, other := range volumes {
			if err := apart(volume.MountPath, other.MountPath, j); err != nil {
				return nil, fmt.Errorf("[%d].mountPath: %w", i, err)
			}
		}
		volume.Key = key
		volumes = append(volumes, volume)
	}
	return volumes, nil
}

// apart refuses two mounts at one path, or one inside the other: the inner one
// would need a directory in a volume that nothing can be made in.
func apart(p, other string, index int) error {
	switch {
	case p == other:
		return fmt.Errorf("%s is the path of [%d] too; give each volume a path of its own", quote(p), index)
	case within(p, other):
		return fmt.Errorf("%s is inside %s of [%d]; mount them side by side", quote(p), quote(other), index)
	case within(other, p):
		return fmt.Errorf("%s of [%d] is inside %s; mount them side by side", quote(other), index, quote(p))
	}
	return nil
}

// within reports whether p is below dir; both are clean.
func within(p, dir string) bool {
	return strings.HasPrefix(p, path.Clean(dir)+"/")
}

// document parses text as JSON, and what is not JSON as one YAML document
// without anchors and aliases.
func document(text string) (*yaml.Node, error) {
	switch {
	case len(text) > maxText:
		return nil, fmt.Errorf("has more than %d bytes; shorten it", maxText)
	case !utf8.ValidString(text):
		return nil, errors.New("is not UTF-8; write it in UTF-8")
	case json.Valid([]byte(text)):
		// Not every JSON is YAML: tabs, surrogate pairs.
		decoder := json.NewDecoder(strings.NewReader(text))
		decoder.UseNumber()
		return jsonNode(decoder)
	}
	decoder := yaml.NewDecoder(bytes.NewReader([]byte(text)))
	var document, next yaml.Node
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil, errors.New("is empty; write [] for no volume, or remove it")
	} else if err != nil {
		return nil, syntaxError(err)
	}
	if err := decoder.Decode(&next); err == nil {
		return nil, errors.New("has more than one YAML document; keep one list")
	} else if !errors.Is(err, io.EOF) {
		return nil, syntaxError(err)
	}
	if node := anchored(&document); node != nil {
		return nil, fmt.Errorf("line %d: has a YAML anchor or alias; write the value out", node.Line)
	}
	return document.Content[0], nil
}

func syntaxError(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	return fmt.Errorf("is neither YAML nor JSON: %s; check indentation and quotes", oneLine(text))
}

// anchored returns the first node with an anchor or alias.
func anchored(node *yaml.Node) *yaml.Node {
	if node.Anchor != "" || node.Kind == yaml.AliasNode {
		return node
	}
	for _, child := range node.Content {
		if found := anchored(child); found != nil {
			return found
		}
	}
	return nil
}

// jsonNode reads one value of valid JSON in the form of YAML nodes, which keep
// repeated keys.
func jsonNode(decoder *json.Decoder) (*yaml.Node, error) {
	token, err := decoder.Token()
	if err != nil {
		return nil, fmt.Errorf("read JSON: %w", err)
	}
	switch token := token.(type) {
	case json.Delim:
		node := &yaml.Node{Kind: yaml.SequenceNode, Tag: tagList}
		if token == '{' {
			node = &yaml.Node{Kind: yaml.MappingNode, Tag: tagMap}
		}
		for decoder.More() {
			child, err := jsonNode(decoder)
			if err != nil {
				return nil, err
			}
			node.Content = append(node.Content, child)
		}
		if _, err := decoder.Token(); err != nil {
			return nil, fmt.Errorf("read JSON: %w", err)
		}
		return node, nil
	case string:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagString, Value: token}, nil
	case json.Number:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagFloat, Value: token.String()}, nil
	case bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagBool, Value: fmt.Sprint(token)}, nil
	default:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagNull}, nil
	}
}

// is reports whether the node is of the kind and, explicit tags included, of
// the type.
func is(node *yaml.Node, kind yaml.Kind, tag string) bool {
	return node.Kind == kind && node.ShortTag() == tag
}

// describe says what a node is, for a message that it should be something else.
func describe(node *yaml.Node) string {
	switch tag := node.ShortTag(); {
	case is(node, yaml.MappingNode, tagMap):
		return "a mapping"
	case is(node, yaml.SequenceNode, tagList):
		return "a list"
	case node.Kind != yaml.ScalarNode:
		return "of type " + plain(tag)
	case tag == tagNull:
		return "null"
	case tag == tagBool:
		return "the boolean " + plain(node.Value)
	case tag == tagInt, tag == tagFloat:
		return "the number " + plain(node.Value)
	case tag == tagString:
		return "the string " + quote(node.Value)
	default:
		return fmt.Sprintf("%s of type %s", quote(node.Value), plain(tag))
	}
}
