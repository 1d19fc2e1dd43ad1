package storage

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestReadKeys(t *testing.T) {
	pemKey := func() string {
		key, err := rsa.GenerateKey(rand.Reader, 2048)
		require.NoError(t, err)
		return string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	}
	one, two := pemKey(), pemKey()
	for name, tc := range map[string]struct {
		files map[string]string
		link  bool
		keys  int
		text  string
	}{
		"none":          {},
		"one":           {files: map[string]string{"a.pem": one}, keys: 1},
		"below folders": {files: map[string]string{"a.pem": one, "b/c/d": two}, keys: 2},
		"no key":        {files: map[string]string{"a.pem": one, "b/README": "text"}, text: "b/README: "},
		"link":          {files: map[string]string{"a.pem": one}, link: true, text: "link.pem is a symbolic link"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, content := range tc.files {
				require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o700))
				write(t, filepath.Join(dir, file), content)
			}
			if tc.link {
				require.NoError(t, os.Symlink("a.pem", filepath.Join(dir, "link.pem")))
			}
			got, err := readKeys(dir)
			if tc.text != "" {
				require.ErrorContains(t, err, tc.text)
				return
			}
			require.NoError(t, err)
			assert.Len(t, got.Parameters["privkeys"], tc.keys)
			assert.Len(t, got.Parameters["privkeys-passwords"], tc.keys)
		})
	}
	for _, dir := range []string{"", filepath.Join(t.TempDir(), "absent")} {
		got, err := readKeys(dir)
		require.NoError(t, err)
		assert.Empty(t, got.Parameters)
	}
}
