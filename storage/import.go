package storage

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/docker"
	dockerarchive "go.podman.io/image/v5/docker/archive"
	"go.podman.io/image/v5/docker/reference"
	ociarchive "go.podman.io/image/v5/oci/archive"
	"go.podman.io/image/v5/oci/layout"
	"go.podman.io/image/v5/pkg/compression"
	"go.podman.io/image/v5/types"
)

// ImportOptions say how to import.
type ImportOptions struct {
	// Name is the name to import by, normalized as Docker does, with "latest" where it has no tag. Where the file has
	// that name, it says which of its images is meant. Empty means the only name that the file has.
	Name string
	// Progress is as that of PullOptions.
	Progress func(Progress)
}

// Import makes sure that the root has the image in a file or directory, for the root's platform, and returns it. from
// is the path of a docker-archive or an oci-archive, compressed or not, or of an OCI layout's directory; which of them
// is seen from what is there, or said by "docker-archive:", "oci-archive:" or "oci:" before the path.
//
// It comes in only if a pull by its name might bring it in: the signature policy is asked about that name. Where that
// asks for signatures the image is refused, as archives carry none.
//
// An import proves access to the image for every namespace, as a pull with the node's credentials does; see
// [Root.Proven].
//
// It returns ErrNotFound where no image fits the name or the platform, ErrInvalidReference where the name is missing or
// cannot be right, ErrSignature, ErrUnsupported, ErrDigestMismatch, ErrDiskFull or ErrClosed. After an error the
// image is not visible.
func (r *Root) Import(ctx context.Context, from string, opt ImportOptions) (Image, error) {
	image, err := r.importFrom(ctx, from, opt)
	r.tellPulled()
	if err != nil {
		return Image{}, fmt.Errorf("import %s: %w", from, err)
	}
	r.recordAccess(image.ID, access{Node: true}) // the node had it: there may be no registry to ask
	return image, nil
}

func (r *Root) importFrom(ctx context.Context, from string, opt ImportOptions) (_ Image, err error) {
	if err := r.usable(ctx); err != nil {
		return Image{}, err
	}
	var want reference.Named
	if opt.Name != "" {
		if want, err = importName(opt.Name); err != nil {
			return Image{}, err
		}
	}
	sys := r.sys
	archive, err := openArchive(from, &sys)
	if err != nil {
		return Image{}, err
	}
	chosen, named, err := archive.choose(want)
	if err != nil {
		return Image{}, errors.Join(err, archive.close())
	}
	// The key is this call's own: a transfer that others had joined would lose its archive when this one leaves.
	key := fmt.Sprintf("%s\nimport %p", named, &archive)
	return r.pulls.do(ctx, key, opt.Progress, func(ctx context.Context, report func(Progress)) (_ Image, err error) {
		defer func() { err = errors.Join(err, archive.close()) }()
		image, err := r.bring(ctx, named, &sys, report, func(known knows) (*source, error) {
			return openImport(ctx, chosen, named, &sys, known)
		})
		r.suspect(err)
		return image, classifyImport(err)
	})
}

// importName returns the full name that the text of an option stands for.
func importName(text string) (reference.Named, error) {
	named, err := parseName(text)
	if err != nil {
		return nil, err
	}
	if _, ok := named.(reference.Digested); ok {
		return nil, fmt.Errorf("%w: %s has a digest: an import needs a name with a tag", ErrInvalidReference, text)
	}
	return reference.TagNameOnly(named), nil
}

// archive is an opened file or directory with images.
type archive struct {
	images []archived
	close  func() error
}

// archived is one image in an archive.
type archived struct {
	types.ImageReference

	names []reference.Named
}

// choose returns the image that want means and its name; where want is nil, the only one by its only name.
func (a archive) choose(want reference.Named) (archived, reference.Named, error) {
	var names []string
	var only reference.Named
	for _, image := range a.images {
		for _, n := range image.names {
			if want != nil && n.String() == want.String() {
				return image, want, nil
			}
			names, only = union(names, []string{n.String()}), n
		}
	}
	has := "it has " + strings.Join(names, ", ")
	switch {
	case len(a.images) == 0:
		return archived{}, nil, fmt.Errorf("%w: there is no image in it", ErrNotFound)
	case want != nil && len(a.images) > 1:
		return archived{}, nil, fmt.Errorf("%w: %d images are in it and none is named %s: %s", ErrNotFound, len(a.images), want, has)
	case want != nil:
		return a.images[0], want, nil
	case len(names) == 0:
		return archived{}, nil, fmt.Errorf("%w: it has no name: say which to import it by", ErrInvalidReference)
	case len(names) > 1 || len(a.images) > 1:
		return archived{}, nil, fmt.Errorf("%w: more than one image or name is in it: say which to import: %s", ErrInvalidReference, has)
	}
	return a.images[0], only, nil
}

// openArchive opens what is at from and lists the images.
func openArchive(from string, sys *types.SystemContext) (archive, error) {
	kind, path, ok := strings.Cut(from, ":")
	if !ok || !slices.Contains([]string{dockerarchive.Transport.Name(), ociarchive.Transport.Name(), layout.Transport.Name()}, kind) {
		kind, path = "", from
	}
	info, err := os.Stat(path)
	if err != nil {
		return archive{}, err
	}
	if info.IsDir() {
		if kind != "" && kind != layout.Transport.Name() {
			return archive{}, fmt.Errorf("%w: a directory is no %s", ErrUnsupported, kind)
		}
		index, err := os.ReadFile(filepath.Join(path, ispec.ImageIndexFile))
		if err != nil {
			return archive{}, fmt.Errorf("%w: no OCI layout: %w", ErrUnsupported, err)
		}
		return listIndex(index, func(name string, i int) (types.ImageReference, error) {
			if name != "" {
				return layout.NewReference(path, name)
			}
			return layout.NewIndexReference(path, i)
		})
	}
	if kind == layout.Transport.Name() {
		return archive{}, fmt.Errorf("%w: a file is no OCI layout", ErrUnsupported)
	}
	if kind != dockerarchive.Transport.Name() {
		index, docker, err := scanTar(path)
		if err != nil {
			return archive{}, err
		}
		if index != nil {
			return listIndex(index, func(name string, _ int) (types.ImageReference, error) { return ociarchive.NewReference(path, name) })
		}
		if kind != "" || !docker {
			return archive{}, fmt.Errorf("%w: it has neither an index.json, as an oci-archive has, nor, if it may be a docker-archive, a manifest.json", ErrUnsupported)
		}
	}
	return listDockerArchive(path, sys)
}

// maxIndex is the most that is read of an index.json: containers/image takes no larger manifests.
const maxIndex = 4 << 20

// scanTar returns the index.json of an oci-archive, and whether there is the manifest.json of a docker-archive. Files of
// `docker save` have both.
func scanTar(path string) (index []byte, docker bool, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, false, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	// A tar reader that can seek need not read the layers.
	var content io.Reader = file
	plain, compressed, err := compression.AutoDecompress(file)
	if err != nil {
		return nil, false, err
	}
	defer func() { err = errors.Join(err, plain.Close()) }()
	if compressed {
		content = plain
	} else if _, err := file.Seek(0, io.SeekStart); err != nil {
		return nil, false, err
	}
	entries := tar.NewReader(content)
	for {
		entry, err := entries.Next()
		switch {
		case errors.Is(err, io.EOF):
			return index, docker, nil
		case err != nil:
			return nil, false, fmt.Errorf("read it as a tar file: %w", err)
		}
		switch filepath.Clean(entry.Name) {
		case ispec.ImageIndexFile:
			if index, err = io.ReadAll(io.LimitReader(entries, maxIndex)); err != nil {
				return nil, false, fmt.Errorf("read %s: %w", entry.Name, err)
			}
		case "manifest.json":
			docker = true
		}
	}
}

// containerdName is how Docker and containerd note an image's full name in an index.json.
const containerdName = "io.containerd.image.name"

// listIndex lists the images of an index.json.
func listIndex(content []byte, ref func(name string, i int) (types.ImageReference, error)) (archive, error) {
	var index ispec.Index
	if err := json.Unmarshal(content, &index); err != nil {
		return archive{}, fmt.Errorf("parse %s: %w", ispec.ImageIndexFile, err)
	}
	list := archive{close: func() error { return nil }}
	for i, entry := range index.Manifests {
		refName := entry.Annotations[ispec.AnnotationRefName]
		image, err := ref(refName, i)
		if err != nil {
			return archive{}, err
		}
		list.images = append(list.images, archived{image, indexNames(entry.Annotations[containerdName], refName)})
	}
	return list, nil
}

// indexNames returns the name that an entry of an index.json has. A reference name may be a tag alone, which is none.
func indexNames(full, refName string) []reference.Named {
	if full == "" && strings.ContainsAny(refName, ":/") {
		full = refName
	}
	named, err := importName(full)
	if err != nil {
		return nil
	}
	return []reference.Named{named}
}

func listDockerArchive(path string, sys *types.SystemContext) (archive, error) {
	reader, err := dockerarchive.NewReader(sys, path)
	if err != nil {
		return archive{}, err
	}
	images, err := reader.List()
	if err != nil {
		return archive{}, errors.Join(err, reader.Close())
	}
	list := archive{close: reader.Close}
	for _, refs := range images {
		image := archived{ImageReference: refs[0]}
		for _, ref := range refs {
			if named := ref.DockerReference(); named != nil {
				image.names = append(image.names, named)
			}
		}
		list.images = append(list.images, image)
	}
	return list, nil
}

// openImport opens an archived image as one of that name.
func openImport(ctx context.Context, image archived, named reference.Named, sys *types.SystemContext, known knows) (*source, error) {
	as, err := docker.NewReference(named)
	if err != nil {
		return nil, err
	}
	opened, err := image.NewImageSource(ctx, sys)
	if err != nil {
		return nil, err
	}
	return readSource(ctx, &source{ImageSource: renamedSource{opened, as}, local: true}, sys, known)
}

// renamedSource is an image in a file that the signature policy takes for one of a registry.
type renamedSource struct {
	types.ImageSource

	as types.ImageReference
}

func (s renamedSource) Reference() types.ImageReference { return s.as }

// classifyImport adds the package's error that says what has to change.
func classifyImport(err error) error {
	switch {
	case err == nil:
		return nil
	case isSignature(err):
		return fmt.Errorf("%w: %w: see policy.json", ErrSignature, err)
	case isDiskFull(err):
		return fmt.Errorf("%w: %w", ErrDiskFull, err)
	case isDigestMismatch(err):
		return fmt.Errorf("%w: %w", ErrDigestMismatch, err)
	}
	return err
}
