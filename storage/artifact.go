package storage

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cstorage "go.podman.io/storage"
)

// artifactKey is the item of an image's big data that has the manifest of the artifact that the image was made of.
const artifactKey = "ocihold-artifact"

const (
	// maxBlobs is how many lower directories one overlay takes.
	maxBlobs = 500
	// maxName and maxPath are Linux's limits for a file's name and path, in bytes.
	maxName, maxPath = 255, 4095
	// maxDepth is how many directories a title may have: containers/storage takes long for many.
	maxDepth = 100
	// whiteout begins the names of files that stand for deleted ones.
	whiteout = ".wh."
)

// Annotations of a blob that name its file and say what it was like: OCI's, and those of ModelPack and of its draft.
const (
	modelPathAnnotation      = "org.cncf.model.filepath"
	modelFileAnnotation      = "org.cncf.model.file.metadata+json"
	modelDraftPathAnnotation = "org.cnai.model.filepath"
	modelDraftFileAnnotation = "org.cnai.model.file.metadata+json"
)

// parseArtifact reads an OCI manifest, which is nil if it is an image's and no artifact's: if its config is that of an image,
// unless it has an artifact type and blobs that cannot be an image's layers.
func parseArtifact(content []byte) (*ispec.Manifest, error) {
	m := &ispec.Manifest{}
	if err := json.Unmarshal(content, m); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidArtifact, err)
	}
	if m.Config.MediaType != ispec.MediaTypeImageConfig {
		return m, nil
	}
	if m.ArtifactType != "" && slices.ContainsFunc(m.Layers, func(l ispec.Descriptor) bool { return !isTar(l.MediaType) }) {
		return m, nil
	}
	return nil, nil //nolint:nilnil // no artifact is what it says
}

// blob is one blob of an artifact and the layer that it becomes: the files of an archive, or one file.
type blob struct {
	ispec.Descriptor

	// unpack says that it is an archive.
	unpack bool
	// name is that of its file; empty for an archive without a title. An archive has one for the case that it is none.
	name string
	// mode are permission bits.
	mode  int64
	mtime time.Time
}

// layerID is the id of the layer that the blob becomes on that parent. It says all that the content depends on, so that
// a layer that is there need not be made again.
func (b blob) layerID(parent string) string {
	return ourID("artifact layer", fmt.Sprintf("%s %s %t %q %o %d", parent, b.Digest, b.unpack, b.name, b.mode, b.mtime.Unix()))
}

// planBlobs says what becomes of an artifact's blobs, lowest first. It returns ErrInvalidArtifact for what cannot be files,
// and ErrUnsupported.
func planBlobs(m *ispec.Manifest, rules mediaTypes) ([]blob, error) {
	if len(m.Layers) > maxBlobs {
		return nil, fmt.Errorf("%w: it has %d blobs, and a volume takes %d: pack them into an archive", ErrUnsupported, len(m.Layers), maxBlobs)
	}
	var files names
	blobs := make([]blob, 0, len(m.Layers))
	for _, l := range m.Layers {
		b, err := planBlob(l, rules)
		if err == nil && !b.unpack {
			err = files.add(b)
		}
		if err != nil {
			return nil, fmt.Errorf("blob %s: %w", l.Digest, err)
		}
		blobs = append(blobs, b)
	}
	return blobs, nil
}

func planBlob(l ispec.Descriptor, rules mediaTypes) (blob, error) {
	if err := l.Digest.Validate(); err != nil {
		return blob{}, fmt.Errorf("%w: %w", ErrInvalidArtifact, err)
	}
	if l.Size < 0 {
		return blob{}, fmt.Errorf("%w: it has a size of %d bytes", ErrInvalidArtifact, l.Size)
	}
	if strings.HasSuffix(l.MediaType, "+encrypted") {
		return blob{}, fmt.Errorf("its media type is %q: encrypted artifacts are %w", l.MediaType, ErrUnsupported)
	}
	b := blob{Descriptor: l, unpack: rules.unpack(l.MediaType)}
	b.mode, b.mtime = fileOf(l.Annotations)
	title := titleOf(l.Annotations)
	var err error
	switch {
	case title != "":
		b.name, err = fileName(title)
	case !b.unpack:
		b.name = l.Digest.Algorithm().String() + "-" + l.Digest.Encoded()
	}
	return b, err
}

// titleOf returns the name that annotations give a blob. ModelPack's has the directories that the title may lack.
func titleOf(annotations map[string]string) string {
	for _, key := range []string{modelPathAnnotation, modelDraftPathAnnotation, ispec.AnnotationTitle} {
		if title := annotations[key]; title != "" {
			return title
		}
	}
	return ""
}

// fileOf returns the permissions and the time that annotations give a file. Those that cannot be read do not count: what
// a tool noted badly can still be used.
func fileOf(annotations map[string]string) (mode int64, mtime time.Time) {
	mode, mtime = 0o644, time.Unix(0, 0)
	if created, err := time.Parse(time.RFC3339, annotations[ispec.AnnotationCreated]); err == nil {
		mtime = created
	}
	for _, key := range []string{modelDraftFileAnnotation, modelFileAnnotation} {
		var noted struct {
			Mode    uint32    `json:"mode"`
			ModTime time.Time `json:"mtime"`
		}
		if json.Unmarshal([]byte(annotations[key]), &noted) != nil {
			continue
		}
		if bits := noted.Mode & 0o777; bits != 0 {
			mode = int64(bits)
		}
		if !noted.ModTime.IsZero() {
			mtime = noted.ModTime
		}
	}
	return mode, time.Unix(max(0, mtime.Unix()), 0)
}

// fileName returns the path that a title means, below the volume. It returns ErrInvalidArtifact for what does not stay
// there, or is no name of a file.
func fileName(title string) (string, error) {
	refuse := func(why string) (string, error) {
		return "", fmt.Errorf("%w: its title %.200q %s", ErrInvalidArtifact, title, why)
	}
	parts := strings.Split(title, "/")
	switch {
	case path.IsAbs(title):
		return refuse("is an absolute path")
	case slices.Contains(parts, ".."):
		return refuse(`has ".." in it`)
	case len(title) > maxPath:
		return refuse(fmt.Sprintf("is longer than %d bytes", maxPath))
	case len(parts) > maxDepth+1:
		return refuse(fmt.Sprintf("has more than %d directories", maxDepth))
	case strings.ContainsFunc(title, unicode.IsControl):
		return refuse("has control characters")
	}
	if last := parts[len(parts)-1]; last == "" || last == "." {
		return refuse("is that of a directory")
	}
	for _, part := range parts {
		if strings.HasPrefix(part, whiteout) {
			return refuse(fmt.Sprintf("has a name that begins with %q, which would delete files", whiteout))
		}
		if len(part) > maxName {
			return refuse(fmt.Sprintf("has a name longer than %d bytes", maxName))
		}
	}
	return path.Clean(title), nil
}

// names are those of an artifact's files, which must not be in each other's way.
type names struct {
	files map[string]digest.Digest
	dirs  map[string]string // and a file in each
}

// add returns ErrInvalidArtifact where the blob's file cannot be beside the others. The same blob twice by its digest is
// one file.
func (n *names) add(b blob) error {
	if n.files == nil {
		n.files, n.dirs = map[string]digest.Digest{}, map[string]string{}
	}
	if other, ok := n.files[b.name]; ok {
		if other == b.Digest && titleOf(b.Annotations) == "" {
			return nil
		}
		return fmt.Errorf("%w: two blobs are named %q", ErrInvalidArtifact, b.name)
	}
	if other, ok := n.dirs[b.name]; ok {
		return fmt.Errorf("%w: one blob is named %q, and another %q, which is below it", ErrInvalidArtifact, b.name, other)
	}
	for dir := range parents(b.name) {
		if _, ok := n.files[dir]; ok {
			return fmt.Errorf("%w: one blob is named %q, and another %q, which is below it", ErrInvalidArtifact, dir, b.name)
		}
		n.dirs[dir] = b.name
	}
	n.files[b.name] = b.Digest
	return nil
}

// parents calls yield with each directory on the way to the file, outermost first.
func parents(name string) func(yield func(dir string) bool) {
	return func(yield func(string) bool) {
		for i := range len(name) {
			if name[i] == '/' && !yield(name[:i]) {
				return
			}
		}
	}
}

// isOfArtifact tells whether the image was made of an artifact.
func isOfArtifact(record *cstorage.Image) bool {
	return slices.Contains(record.BigDataNames, artifactKey)
}
