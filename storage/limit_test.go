package storage

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.podman.io/image/v5/types"
)

func TestMaxBytes(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	root := open(t, opt)
	app := imageOf(t, noise(4096), noise(8192))
	manifest, err := app.Manifest()
	require.NoError(t, err)
	var compressed int64
	for _, l := range manifest.Layers {
		compressed += l.Size
	}
	reg.push(t, "app:1", app)
	ref := reg.host + "/app:1"
	pull := func(limit int64) error {
		_, err := root.Pull(t.Context(), ref, PullOptions{Limit: Limit{limit, "max"}})
		return err
	}

	reg.take()
	require.ErrorIs(t, pull(compressed-1), ErrTooLarge)
	for _, request := range reg.take() {
		assert.NotContains(t, request, "/blobs/")
	}
	_, err = root.Resolve(t.Context(), ref)
	require.ErrorIs(t, err, ErrNotFound)

	const total = 2*3*tarBlock + 4096 + 8192 // with the header and the end of each archive
	require.ErrorIs(t, pull(total-1), ErrTooLarge, "unpacked")
	require.NoError(t, pull(total))
	require.ErrorIs(t, pull(total-1), ErrTooLarge, "it is there")
	require.NoError(t, pull(0))
	require.ErrorIs(t, root.CheckSize(t.Context(), imageID(t, app), Limit{total - 1, "max"}), ErrTooLarge)
	require.NoError(t, root.CheckSize(t.Context(), imageID(t, app), Limit{total, "max"}))
	require.ErrorIs(t, root.CheckSize(t.Context(), strings.Repeat("0", 64), Limit{1, "max"}), ErrNotFound)
}

func TestMaxBytesOfAnArtifact(t *testing.T) {
	reg := newRegistry(t)
	root := open(t, testOptions(t))
	d := reg.pushArtifact(t, "a", part{mediaType: "text/plain", title: "one", content: []byte(noise(600))},
		part{mediaType: "text/plain", title: "two", content: []byte(noise(400))})
	ref := reg.host + "/a@" + d.String()
	_, err := root.Pull(t.Context(), ref, PullOptions{Limit: Limit{999, "max"}})
	require.ErrorIs(t, err, ErrTooLarge)
	image, err := root.Pull(t.Context(), ref, PullOptions{Limit: Limit{1000, "max"}})
	require.NoError(t, err)
	require.NoError(t, root.CheckSize(t.Context(), image.ID, Limit{1000, "max"}))
	require.ErrorIs(t, root.CheckSize(t.Context(), image.ID, Limit{999, "max"}), ErrTooLarge)
}

func TestCheckSize(t *testing.T) {
	const most = int64(^uint64(0) >> 1)
	for name, tc := range map[string]struct {
		sizes []int64
		limit int64
		fault string
	}{
		"no limit":      {[]int64{most, most}, 0, ""},
		"as large":      {[]int64{60, 0, 40}, 100, ""},
		"larger":        {[]int64{60, 41}, 100, "its layers have more than 100B in all"},
		"overflow":      {[]int64{most, most, 2}, 100, "more than 100B"},
		"does not say":  {[]int64{-1}, 100, "does not say how large"},
		"no layers":     {nil, 1, ""},
		"at the limits": {[]int64{most}, most, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var layers []types.BlobInfo
			for _, size := range tc.sizes {
				layers = append(layers, types.BlobInfo{Size: size})
			}
			err := checkSize(layers, Limit{tc.limit, "max"})
			if tc.fault == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, ErrTooLarge)
			require.ErrorContains(t, err, tc.fault)
		})
	}
}

func TestNames(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	write(t, opt.RegistriesConf, fmt.Sprintf("unqualified-search-registries = [\"other.example\", %q]\n", reg.host))
	root := open(t, opt)
	app := imageOf(t, "app")
	d := reg.push(t, "lib/app:1", app).String()
	_, err := root.Pull(t.Context(), reg.host+"/lib/app:1", PullOptions{})
	require.NoError(t, err)
	id, own := imageID(t, app), reg.host+"/lib/app:1"

	for name, tc := range map[string]struct {
		ref           string
		pull, present []string
	}{
		"full name":  {own, []string{own}, []string{own}},
		"no tag":     {"other.example/a", []string{"other.example/a:latest"}, []string{"other.example/a:latest"}},
		"digest":     {"other.example/a:1@" + d, []string{"other.example/a@" + d}, []string{"other.example/a@" + d}},
		"short name": {"lib/app:1", []string{"other.example/lib/app:1", own}, []string{own}},
		"id":         {id, nil, []string{own}},
		// It may be the beginning of the ID, or a name.
		"beginning of an id": {id[:12], []string{"other.example/" + id[:12] + ":latest", reg.host + "/" + id[:12] + ":latest"}, []string{own}},
	} {
		t.Run(name, func(t *testing.T) {
			pull, err := root.PullNames(tc.ref)
			assert.Equal(t, tc.pull, pull)
			if tc.pull == nil {
				require.ErrorIs(t, err, ErrInvalidReference)
			}
			present, err := root.PresentNames(t.Context(), tc.ref, id)
			require.NoError(t, err)
			assert.Equal(t, tc.present, present)
		})
	}
}
