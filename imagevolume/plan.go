package imagevolume

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/ocihold/ocihold/imagevolume/hostmount"
	"github.com/ocihold/ocihold/imagevolume/request"
)

// Mount is a bind mount that a container gets.
type Mount struct {
	// Source is a directory or file on the host, Destination one in the container.
	Source, Destination string
	// Options are mount options of the OCI runtime specification.
	Options []string
}

// content is what a volume shows: parts of images of one root, each of which
// lies over those before it. Equal contents are one mount. Its JSON is what a key
// has a hash of, so what is not there must not be in it.
type content struct {
	root  string
	Parts []part `json:"parts"`
	// IDMap is how the pod's user namespace maps ids; "" where it has none.
	IDMap string `json:"idMap,omitempty"`
	// room names the room for what is written; "" where it is read-only. size is
	// how much that is, in bytes.
	room string
	size int64
}

// part is what an image has: all of it, or some of its layers, or what is at a
// path of it.
type part struct {
	ImageID    string   `json:"id"`
	MediaTypes []string `json:"mediaTypes,omitempty"` // sorted, each once
	SubPath    string   `json:"subPath,omitempty"`
}

// contentOf describes what sources show by the IDs of the images that are there
// for them.
func contentOf(root string, sources []request.Source, ids []string) content {
	c := content{root: root}
	for i, s := range sources {
		types := slices.Sorted(slices.Values(s.MediaTypes))
		c.Parts = append(c.Parts, part{ImageID: ids[i], MediaTypes: slices.Compact(types), SubPath: s.SubPath})
	}
	return c
}

// identify returns the IDs, out of known ones, of the images whose content, in a
// pod whose user namespace maps ids so, the key names, by source; nil where that is
// none.
func identify(key, idMap string, sources []request.Source, known []string) []string {
	k := parseKey(key)
	if len(k.ids) != len(sources) {
		return nil
	}
	if len(k.ids[0]) == fullID {
		known = k.ids
	}
	ids := make([]string, len(sources))
	var fits func(i int) bool
	fits = func(i int) bool {
		if i == len(ids) {
			c := contentOf(k.root, sources, ids)
			c.IDMap, c.room = idMap, k.room
			return c.key() == key
		}
		for _, ids[i] = range known {
			if strings.HasPrefix(ids[i], k.ids[i]) && fits(i+1) {
				return true
			}
		}
		return false
	}
	if !fits(0) {
		return nil
	}
	return ids
}

// base is the content that has a part at its path.
func (c content) base(p part) content {
	p.SubPath = ""
	return content{root: c.root, Parts: []part{p}, IDMap: c.IDMap}
}

// key names the content.
func (c content) key() string {
	if p := c.Parts[0]; len(c.Parts) == 1 && p.MediaTypes == nil && p.SubPath == "" && c.room == "" && c.IDMap == "" {
		return wholeKey(Image{Root: c.root, ID: p.ImageID})
	}
	description, err := json.Marshal(c)
	if err != nil {
		panic(err) // text can be written
	}
	hash := sha256.Sum256(description)
	names := make([]string, len(c.Parts))
	for i, p := range c.Parts {
		names[i] = p.ImageID[:shortID]
	}
	key := inRoot(c.root, strings.Join(names, "+")+"~"+hex.EncodeToString(hash[:])[:shortID])
	if c.room != "" {
		key += "-" + c.room
	}
	return key
}

// step is one mount on the host on the way to a content: of layers of an image,
// or of parts of the mounts of steps before it.
type step struct {
	key    string
	layers part
	parts  []hostmount.Part
	size   int64 // of the room for what is written; 0 where it is read-only
}

// plan says which mounts make the content; that of the last step is it.
func (c content) plan() ([]step, error) {
	last := step{key: c.key(), size: c.size}
	if len(last.key) > hostmount.MaxKey {
		return nil, fmt.Errorf("the name of handler %s and those of %d images are too long for the name of a mount; use fewer images", c.root, len(c.Parts))
	}
	var steps []step
	for _, p := range slices.Backward(c.Parts) {
		base := c.base(p)
		key := base.key()
		if !slices.ContainsFunc(steps, func(s step) bool { return s.key == key }) {
			steps = append(steps, step{key: key, layers: base.Parts[0]})
		}
		// What lies under itself cannot be seen, and the kernel refuses it.
		if upper := (hostmount.Part{Key: key, Path: p.SubPath}); !slices.Contains(last.parts, upper) {
			last.parts = append(last.parts, upper)
		}
	}
	if last.key == steps[0].key {
		return steps, nil
	}
	return append(steps, last), nil
}

// planMount says how a container gets the volume whose content is mounted on
// the host at source. Every flag is named: an OCI runtime resets on a bind what
// is not, whatever the mount at source has.
func planMount(v request.Volume, source string) Mount {
	options := []string{"bind", "rprivate", "ro", "nosuid", "nodev"}
	if v.Scratch != "" {
		options[2] = "rw"
	}
	if !v.Exec {
		options = append(options, "noexec")
	}
	return Mount{Source: source, Destination: v.MountPath, Options: options}
}
