package storage

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/containers/ocicrypt"
	encconfig "github.com/containers/ocicrypt/config"
	encutils "github.com/containers/ocicrypt/utils"
	"github.com/opencontainers/go-digest"
	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	"go.podman.io/image/v5/manifest"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// isEncrypted tells whether any of the layers is encrypted.
func isEncrypted(layers []types.BlobInfo) bool {
	return slices.ContainsFunc(layers, func(l types.BlobInfo) bool { return strings.HasSuffix(l.MediaType, "+encrypted") })
}

// unlock returns the keys that open every encrypted layer; nil where there is none. It returns ErrEncrypted where they
// do not.
func (r *Root) unlock(layers []types.BlobInfo) (*encconfig.DecryptConfig, error) {
	if !isEncrypted(layers) {
		return nil, nil //nolint:nilnil // no keys are what it takes
	}
	keys, err := readKeys(r.keysDir)
	if err != nil {
		return nil, fmt.Errorf("read the decryption keys in %s: %w", r.keysDir, err)
	}
	for _, l := range layers {
		if !isEncrypted([]types.BlobInfo{l}) {
			continue
		}
		if _, _, err := ocicrypt.DecryptLayer(keys, nil, ispec.Descriptor{Annotations: l.Annotations}, true); err != nil {
			return nil, fmt.Errorf("%w: layer %s: no key in %s (CRI-O's decryption_keys_path) opens it: put the image's private key there: %s",
				ErrEncrypted, l.Digest, r.keysDir, strings.Join(strings.Fields(err.Error()), " "))
		}
	}
	return keys, nil
}

// unlockPresent is unlock for an image in the root that was pulled from one of the manifests. Whoever asks for it must
// still have the keys.
func (r *Root) unlockPresent(imageID string, manifests []digest.Digest) error {
	switch record, err := r.resolveID(imageID); {
	case err != nil:
		return err
	case isOfArtifact(record):
		return nil // none is encrypted
	}
	for _, d := range manifests {
		blob, err := r.store.ImageBigData(imageID, manifestKey(d))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		mime := manifest.GuessMIMEType(blob)
		if manifest.MIMETypeIsMultiImage(mime) {
			continue
		}
		var s source
		if err := s.readManifest(blob, mime); err != nil {
			return err
		}
		if _, err := r.unlock(s.layers); err != nil {
			return err
		}
	}
	return nil
}

// manifestKey is the item of an image's big data that has a manifest.
func manifestKey(d digest.Digest) string {
	return cstorage.ImageDigestManifestBigDataNamePrefix + "-" + d.String()
}

// readKeys reads every file below the directory as a key, as CRI-O does. An absent directory has none.
func readKeys(dir string) (_ *encconfig.DecryptConfig, err error) {
	root, err := os.OpenRoot(dir)
	if dir == "" || errors.Is(err, fs.ErrNotExist) {
		return &encconfig.DecryptConfig{}, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	keys := &encconfig.DecryptConfig{Parameters: map[string][][]byte{}}
	err = fs.WalkDir(root.FS(), ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil || entry.IsDir():
			return err
		case entry.Type()&fs.ModeSymlink != 0:
			return fmt.Errorf("%s is a symbolic link, which is not followed: put the file itself there", path)
		}
		content, err := root.ReadFile(path)
		if err != nil {
			return err
		}
		sorted, err := encutils.SortDecryptionKeys(base64.StdEncoding.EncodeToString(content))
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for kind, values := range sorted {
			keys.Parameters[kind] = append(keys.Parameters[kind], values...)
		}
		return nil
	})
	return keys, err
}
