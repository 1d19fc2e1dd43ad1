// Package images makes images and artifacts for tests, and pushes them.
//
// A layer is a list of [Entry], written to its tar in the given order; an entry
// can be anything that a tar can hold. Everything is deterministic: the same
// input gives the same digests.
package images

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Entry is one member of a layer. The functions below make the usual ones.
type Entry struct {
	Path string
	// Type is a tar type flag (tar.TypeReg, …).
	Type byte
	// Mode holds permission bits with setuid (04000), setgid and sticky.
	Mode     int64
	UID, GID int
	// Content is a file's, or what Big generates.
	Content func() io.Reader
	Size    int64
	// Link is the target of a symbolic or hard link.
	Link         string
	Xattrs       map[string]string
	Major, Minor int64
}

// epoch is the time of every entry.
var epoch = time.Unix(1_700_000_000, 0)

// File is a regular file.
func File(name, content string, mode int64) Entry {
	return Entry{
		Path: name, Type: tar.TypeReg, Mode: mode, Size: int64(len(content)),
		Content: func() io.Reader { return strings.NewReader(content) },
	}
}

// Big is a file of size bytes that do not compress, made from the seed.
func Big(name string, size int64, seed uint64) Entry {
	return Entry{
		Path: name, Type: tar.TypeReg, Mode: 0o644, Size: size,
		Content: func() io.Reader {
			var key [32]byte
			copy(key[:], fmt.Sprintf("%d", seed))
			return io.LimitReader(rand.NewChaCha8(key), size)
		},
	}
}

// Dir is a directory.
func Dir(name string, mode int64) Entry {
	return Entry{Path: strings.TrimSuffix(name, "/") + "/", Type: tar.TypeDir, Mode: mode}
}

// Symlink is a symbolic link.
func Symlink(name, target string) Entry {
	return Entry{Path: name, Type: tar.TypeSymlink, Link: target, Mode: 0o777}
}

// Hardlink is another name of a file of the same layer. Its mode, owner and
// attributes are those of the file, as extracting it sets them once more.
func Hardlink(name string, file Entry) Entry {
	link := file
	link.Path, link.Type, link.Link, link.Size, link.Content = name, tar.TypeLink, file.Path, 0, nil
	return link
}

// CharDevice is a character device node.
func CharDevice(name string, major, minor int64) Entry {
	return Entry{Path: name, Type: tar.TypeChar, Mode: 0o666, Major: major, Minor: minor}
}

// FIFO is a named pipe.
func FIFO(name string) Entry { return Entry{Path: name, Type: tar.TypeFifo, Mode: 0o644} }

// Whiteout removes a path of the layers below.
func Whiteout(name string) Entry {
	dir, base := path.Split(name)
	return File(dir+".wh."+base, "", 0o644)
}

// Opaque hides what the layers below have in a directory.
func Opaque(dir string) Entry { return File(path.Join(dir, ".wh..wh..opq"), "", 0o644) }

// Owned gives an entry to a user and group.
func (e Entry) Owned(uid, gid int) Entry {
	e.UID, e.GID = uid, gid
	return e
}

// WithXattr adds an extended attribute ("user.x", "security.capability").
func (e Entry) WithXattr(key, value string) Entry {
	xattrs := map[string]string{key: value}
	maps.Copy(xattrs, e.Xattrs)
	e.Xattrs = xattrs
	return e
}

// Layer makes a gzipped OCI layer of entries.
func Layer(entries ...Entry) (v1.Layer, error) {
	layer, err := tarball.LayerFromOpener(piped(entries), tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, fmt.Errorf("make layer: %w", err)
	}
	return layer, nil
}

func write(w io.Writer, entries []Entry) error {
	tw := tar.NewWriter(w)
	for _, e := range entries {
		h := &tar.Header{
			Name: e.Path, Typeflag: e.Type, Mode: e.Mode, Uid: e.UID, Gid: e.GID, Size: e.Size, Linkname: e.Link,
			Devmajor: e.Major, Devminor: e.Minor, ModTime: epoch, Format: tar.FormatPAX,
		}
		for k, v := range e.Xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := tw.WriteHeader(h); err != nil {
			return fmt.Errorf("write %s: %w", e.Path, err)
		}
		if e.Content != nil {
			if _, err := io.Copy(tw, e.Content()); err != nil {
				return fmt.Errorf("write %s: %w", e.Path, err)
			}
		}
	}
	return tw.Close()
}

// Config is what an image's config says beyond its layers.
type Config struct {
	// Platform is os/arch[/variant]; "" is linux on this machine's architecture.
	Platform   string
	User       string
	Entrypoint []string
	Env        []string
	// Packing is Gzip unless it is said.
	Packing Packing
}

// Image makes an image of layers, lowest first.
func Image(config Config, layers ...[]Entry) (v1.Image, error) {
	if config.Platform == "" {
		config.Platform = hostPlatform
	}
	platform, err := v1.ParsePlatform(config.Platform)
	if err != nil {
		return nil, err
	}
	manifestType, configType := config.Packing.manifest()
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, manifestType), configType)
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{
		OS: platform.OS, Architecture: platform.Architecture, Variant: platform.Variant,
		Created: v1.Time{Time: epoch}, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{User: config.User, Entrypoint: config.Entrypoint, Env: config.Env},
	})
	if err != nil {
		return nil, err
	}
	for _, entries := range layers {
		layer, err := config.Packing.layer(entries)
		if err != nil {
			return nil, err
		}
		img, err = mutate.Append(img, layer)
		if err != nil {
			return nil, err
		}
	}
	return img, nil
}

// Index makes an image index of images for several platforms, or, of Docker's
// images, a manifest list.
func Index(imgs ...v1.Image) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	if len(imgs) > 0 {
		kind, err := imgs[0].MediaType()
		if err != nil {
			return nil, err
		}
		if kind == types.DockerManifestSchema2 {
			index = mutate.IndexMediaType(empty.Index, types.DockerManifestList)
		}
	}
	for _, img := range imgs {
		config, err := img.ConfigFile()
		if err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        img,
			Descriptor: v1.Descriptor{Platform: config.Platform()},
		})
	}
	return index, nil
}

// Pushable is what Push can push: an image, an artifact or an index.
type Pushable = remote.Taggable

// Push pushes to a registry that rt leads to, in plain HTTP. ref is a full name;
// auth may be authn.Anonymous.
func Push(ctx context.Context, ref string, content Pushable, rt http.RoundTripper, auth authn.Authenticator) error {
	tag, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		return err
	}
	opts := []remote.Option{remote.WithContext(ctx), remote.WithTransport(rt), remote.WithAuth(auth)}
	switch c := content.(type) {
	case v1.Image:
		err = remote.Write(tag, c, opts...)
	case v1.ImageIndex:
		err = remote.WriteIndex(tag, c, opts...)
	default:
		err = fmt.Errorf("it is a %T, neither image nor index", content)
	}
	if err != nil {
		return fmt.Errorf("push %s: %w", ref, err)
	}
	return nil
}

// program makes an entry of a program on this machine.
func program(file, name string) (Entry, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return Entry{}, err
	}
	return Entry{
		Path: name, Type: tar.TypeReg, Mode: 0o755, Size: int64(len(content)),
		Content: func() io.Reader { return bytes.NewReader(content) },
	}, nil
}
