package storage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A root of which a list was cut to nothing is refused, and what it has stays:
// read as a list of nothing, the next pull would make its layers anew.
func TestEmptyLists(t *testing.T) {
	for _, tc := range []struct {
		list       string
		imageStore bool // images have a directory of their own
	}{
		{"overlay-layers/layers.json", false},
		{"overlay-images/images.json", false},
		{"overlay-containers/containers.json", false},
		{"overlay-layers/layers.json", true},
		{"overlay-images/images.json", true},
	} {
		t.Run(fmt.Sprintf("%s %t", filepath.Base(tc.list), tc.imageStore), func(t *testing.T) {
			reg := newRegistry(t)
			reg.push(t, "a:1", imageOf(t, "a"))
			opt := testOptions(t)
			if tc.imageStore {
				opt.ImageStore = t.TempDir()
			}
			root, err := Open(opt)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, root.Close()) })
			image, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.NoError(t, err)
			require.NoError(t, root.Lease(t.Context(), image.ID))
			lowers, err := root.LowerDirs(t.Context(), image.ID, nil)
			require.NoError(t, err)
			before, err := os.Stat(lowers[0])
			require.NoError(t, err)

			file := filepath.Join(root.imageHome(), tc.list)
			content, err := os.ReadFile(file)
			require.NoError(t, err)
			require.NoError(t, os.Truncate(file, 0))
			_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.ErrorIs(t, err, ErrEmptyList)
			require.ErrorContains(t, err, file)
			_, errs := root.Images(t.Context())
			require.ErrorIs(t, errors.Join(errs...), ErrEmptyList)
			_, err = root.Leases(t.Context())
			require.ErrorIs(t, err, ErrEmptyList)
			require.ErrorIs(t, root.Release(t.Context(), image.ID), ErrEmptyList)

			require.NoError(t, os.WriteFile(file, content, 0o600))
			_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.NoError(t, err)
			after, err := os.Stat(lowers[0])
			require.NoError(t, err)
			assert.True(t, os.SameFile(before, after), "the layer was made anew")
		})
	}
}
