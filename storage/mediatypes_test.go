package storage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMatchMediaType(t *testing.T) {
	const layer, model = "application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.cncf.model.weight.v1.raw"
	for pattern, want := range map[string][2]bool{
		"*":                    {true, true},
		"*model*":              {false, true},
		"application*gzip":     {true, false},
		"application/*.tar":    {false, false},
		"application?vnd.oci*": {true, false},
		"*[+.][a-r]*":          {true, true},
		"*.[!v]*.tar+*":        {true, false},
		layer:                  {true, false},
		"APPLICATION/*":        {false, false},
		"":                     {false, false},
	} {
		for i, mediaType := range []string{layer, model} {
			got, err := matchMediaType(pattern, mediaType)
			require.NoError(t, err)
			assert.Equal(t, want[i], got, "%s and %s", pattern, mediaType)
		}
	}
	_, err := matchMediaType("a[", layer)
	require.Error(t, err)
}

func TestLowerDirsOfMediaTypes(t *testing.T) {
	reg := newRegistry(t)
	image := imageOf(t, "a", "b", "c")
	layers, err := image.Layers()
	require.NoError(t, err)
	docker, err := mutate.Append(imageOf(t), mutate.Addendum{Layer: layers[0], MediaType: types.DockerLayer},
		mutate.Addendum{Layer: layers[1], MediaType: types.OCILayer}, mutate.Addendum{Layer: layers[2], MediaType: types.DockerLayer})
	require.NoError(t, err)
	reg.push(t, "a:1", docker)
	root := open(t, testOptions(t))
	pulled, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	all, err := root.LowerDirs(t.Context(), pulled.ID, nil)
	require.NoError(t, err)
	require.Len(t, all, 3)

	for _, tc := range []struct {
		patterns []string
		want     []string
	}{
		{[]string{"*"}, all},
		{[]string{"*docker*"}, []string{all[0], all[2]}},
		{[]string{"none", "*oci*"}, all[1:2]},
		{[]string{"*oci*", "*layer*", "*"}, all},
	} {
		dirs, err := root.LowerDirs(t.Context(), pulled.ID, tc.patterns)
		require.NoError(t, err)
		assert.Equal(t, tc.want, dirs, "%q", tc.patterns)
	}
	assert.FileExists(t, filepath.Join(all[0], "file-2"), "the topmost first")
	_, err = root.LowerDirs(t.Context(), pulled.ID, []string{"*model*", "*.txt"})
	require.ErrorIs(t, err, ErrNoSuchLayer)
	require.ErrorContains(t, err, `media types "*model*", "*.txt"; it has "application/vnd.docker.image.rootfs.diff.tar.gzip", "application/vnd.oci.image.layer.v1.tar+gzip"`)
	_, err = root.LowerDirs(t.Context(), pulled.ID, []string{"a["})
	require.Error(t, err)

	require.NoError(t, os.RemoveAll(filepath.Dir(all[1])))
	_, err = root.LowerDirs(t.Context(), pulled.ID, []string{"*docker*"})
	require.ErrorIs(t, err, ErrBadRecord)
}
