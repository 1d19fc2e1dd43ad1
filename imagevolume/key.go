package imagevolume

import (
	"regexp"
	"strings"
)

// The key of a mount is the only record of what it is that outlives this
// process: the kernel shows it for every process that has the mount. So each
// names its images:
//
//	[ROOT.]ID                  all of the image ID, in the host's own ID mapping
//	[ROOT.]SHORT+SHORT...~HASH else, with the first digits of each image's ID, and
//	                           those of a hash over the whole description, with the
//	                           ID mapping of the pod's user namespace
//	...~HASH-ROOM              a writable one, with the name of the room for what
//	                           is written
//
// Several images that have the first digits in common are all held by such a key.

// An image ID has fullID hexadecimal digits. shortID is how many of an image ID,
// and of a hash, are in a key that is not of all of one image.
const (
	fullID  = 64
	shortID = 16
)

var keyText = regexp.MustCompile(`^(?:(.+)\.)?(?:([0-9a-f]{64})|([0-9a-f]{16}(?:\+[0-9a-f]{16})*)~[0-9a-f]{16}(?:-([0-9a-f]{16}))?)$`)

// wholeKey is the key of an image's whole content.
func wholeKey(img Image) string { return inRoot(img.Root, img.ID) }

func inRoot(root, name string) string {
	if root == "" {
		return name
	}
	return root + "." + name
}

// keyed is what can be told from a key.
type keyed struct {
	root string
	ids  []string // image IDs, or the first digits of them
	room string   // "" where it is read-only
	// unknown says that it is not a key of this version's. It may be of any image.
	unknown bool
}

func parseKey(key string) keyed {
	match := keyText.FindStringSubmatch(key)
	switch {
	case match == nil:
		return keyed{unknown: true}
	case match[2] != "":
		return keyed{root: match[1], ids: match[2:3]}
	default:
		return keyed{root: match[1], ids: strings.Split(match[3], "+"), room: match[4]}
	}
}

// has reports whether the content of the key may be of the image.
func (k keyed) has(img Image) bool {
	return k.unknown || k.root == img.Root && k.hasID(img.ID)
}

// hasID is has for an image of that ID in whichever root.
func (k keyed) hasID(id string) bool {
	for _, short := range k.ids {
		if strings.HasPrefix(id, short) {
			return true
		}
	}
	return k.unknown
}

// keys are those of several mounts.
type keys map[string]keyed

func (ks keys) add(key string) {
	if _, ok := ks[key]; !ok {
		ks[key] = parseKey(key)
	}
}

// have reports whether one of the keys may be of the image.
func (ks keys) have(img Image) bool {
	for _, k := range ks {
		if k.has(img) {
			return true
		}
	}
	return false
}

// haveID is have for an image of that ID in whichever root.
func (ks keys) haveID(id string) bool {
	for _, k := range ks {
		if k.hasID(id) {
			return true
		}
	}
	return false
}
