package imagevolume

import (
	"strings"

	"github.com/ocihold/ocihold/imagevolume/request"
)

// Mount is a bind mount that a container gets.
type Mount struct {
	// Source is a directory on the host, Destination one in the container.
	Source, Destination string
	// Options are mount options of the OCI runtime specification.
	Options []string
}

// key names the content of a volume: all of an image's layers, in the host's own
// ID mapping, are the image in its root. The ID alone is the key in CRI-O's root.
func key(img Image) string {
	if img.Root == "" {
		return img.ID
	}
	return img.Root + "." + img.ID
}

// imageOf is the inverse of key.
func imageOf(key string) Image {
	if i := strings.LastIndexByte(key, '.'); i >= 0 {
		return Image{Root: key[:i], ID: key[i+1:]}
	}
	return Image{ID: key}
}

// planMount says how a container gets the volume whose content is mounted on
// the host at source. Every flag is named: an OCI runtime resets on a bind what
// is not, whatever the mount at source has.
func planMount(v request.Volume, source string) Mount {
	options := []string{"bind", "rprivate", "ro", "nosuid", "nodev"}
	if !v.Exec {
		options = append(options, "noexec")
	}
	return Mount{Source: source, Destination: v.MountPath, Options: options}
}
