package imageservice

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"go.podman.io/image/v5/docker/reference"
)

// authFile is an auth file for one pull. The zero value is none.
type authFile struct {
	path string
	left string // where it was
}

// takeAuthFile takes the auth file that CRI-O's credential provider has left for the next pull of the image for a pod of
// the namespace: NAMESPACE-SHA256.json in CRI-O's namespaced_auth_dir, by the hash of the name without tag and digest. As
// CRI-O does, it moves the file into the folder in-use, for one pull only. The caller removes it or gives it back.
func (s *Service) takeAuthFile(namespace, image string) (authFile, error) {
	named, err := reference.ParseNormalizedNamed(image)
	if namespace == "" || s.authDir == "" || err != nil {
		return authFile{}, nil //nolint:nilerr // what is no name is refused later
	}
	name := fmt.Sprintf("%s-%x", namespace, sha256.Sum256([]byte(named.Name())))
	left := filepath.Join(s.authDir, name+".json")
	if _, err := os.Stat(left); errors.Is(err, fs.ErrNotExist) {
		return authFile{}, nil
	}
	used, err := moveApart(left, filepath.Join(s.authDir, "in-use"), name+"-*.json")
	if err != nil {
		return authFile{}, fmt.Errorf("take the auth file of namespace %q: %w", namespace, err)
	}
	return authFile{used, left}, nil
}

// giveBack leaves the file to CRI-O.
func (f authFile) giveBack() error {
	if f.path == "" {
		return nil
	}
	return os.Rename(f.path, f.left)
}

// remove removes the file, unless it was given back.
func (f authFile) remove() error {
	if err := os.Remove(f.path); f.path != "" && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// moveApart moves a file into a directory, under a new name of that pattern, which it returns.
func moveApart(file, dir, pattern string) (string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	apart, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return "", err
	}
	if err := errors.Join(apart.Close(), os.Rename(file, apart.Name())); err != nil {
		return "", errors.Join(err, os.Remove(apart.Name()))
	}
	return apart.Name(), nil
}
