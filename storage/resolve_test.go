package storage

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	cstorage "go.podman.io/storage"
)

// indexOf makes an index of an image for this platform and one for another.
func indexOf(ours, other v1.Image) v1.ImageIndex {
	return mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: ours, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}},
	)
}

// record makes an image record without layers.
func record(tb testing.TB, root *Root, id string, names ...string) {
	tb.Helper()
	config := []byte(`{"author":"` + id + `"}`)
	configDigest := digest.FromBytes(config)
	manifest := []byte(`{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":` +
		`{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"` + configDigest.String() + `","size":` +
		strconv.Itoa(len(config)) + `},"layers":[]}`)
	_, err := root.store.CreateImage(id, names, "", "{}", &cstorage.ImageOptions{
		BigData: []cstorage.ImageBigDataOption{
			{Key: cstorage.ImageDigestBigDataKey, Data: manifest, Digest: digest.FromBytes(manifest)},
			{Key: configDigest.String(), Data: config, Digest: configDigest},
		},
	})
	require.NoError(tb, err)
}

func id(prefix string) string {
	return prefix + strings.Repeat("0", 64-len(prefix))
}

func TestResolve(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	write(t, opt.RegistriesConf, fmt.Sprintf(`
unqualified-search-registries = [%q, "second.example"]
[aliases]
"aliased" = %q
`, reg.host, reg.host+"/lib/app"))
	root := open(t, opt)

	app, other, latest := imageOf(t, "app"), imageOf(t, "other"), imageOf(t, "latest")
	index := indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x"))))
	appDigest, err := app.Digest()
	require.NoError(t, err)
	indexDigest := reg.push(t, "lib/app:1", index)
	reg.push(t, "other:2", other)
	reg.push(t, "latest:latest", latest)
	for _, ref := range []string{"lib/app:1", "other:2", "latest:latest"} {
		_, err := root.Pull(t.Context(), reg.host+"/"+ref, PullOptions{})
		require.NoError(t, err)
	}
	appID, otherID, latestID := imageID(t, app), imageID(t, other), imageID(t, latest)

	twinA, twinB := id("abc1"), id("abc2")
	hexName, single := id("5ead"), id("fade")
	record(t, root, twinA, "localhost/local:latest")
	record(t, root, twinB, "second.example/local:latest")
	record(t, root, hexName, "localhost/fade:latest", "localhost/abc:latest")
	record(t, root, single, "second.example/found:latest")

	for name, tc := range map[string]struct {
		ref  string
		want string
		err  error
		// podman says something else here, for the reason given.
		podman string
	}{
		"tag":                           {ref: reg.host + "/other:2", want: otherID},
		"no tag is latest":              {ref: reg.host + "/latest", want: latestID},
		"no tag, no latest":             {ref: reg.host + "/other", err: ErrNotFound},
		"unknown tag":                   {ref: reg.host + "/other:3", err: ErrNotFound},
		"unknown repository":            {ref: reg.host + "/nothing:2", err: ErrNotFound},
		"digest of the index":           {ref: reg.host + "/lib/app@" + indexDigest.String(), want: appID},
		"digest of the instance":        {ref: reg.host + "/lib/app@" + appDigest.String(), want: appID},
		"digest in another repository":  {ref: reg.host + "/other@" + appDigest.String(), err: ErrNotFound, podman: "podman ignores the repository beside a digest"},
		"unknown digest":                {ref: reg.host + "/lib/app@sha256:" + id("1"), err: ErrNotFound},
		"tag and digest":                {ref: reg.host + "/lib/app:1@" + indexDigest.String(), want: appID},
		"other tag and digest":          {ref: reg.host + "/lib/app:9@" + indexDigest.String(), want: appID},
		"short name with tag":           {ref: "other:2", want: otherID},
		"short name with path":          {ref: "lib/app:1", want: appID},
		"short name with digest":        {ref: "lib/app@" + appDigest.String(), want: appID},
		"short name of second registry": {ref: "found", want: single},
		"localhost before registries":   {ref: "local", want: twinA},
		"alias":                         {ref: "aliased:1", want: appID},
		"alias with digest":             {ref: "aliased@" + indexDigest.String(), want: appID},
		"alias without such a tag":      {ref: "aliased:2", err: ErrNotFound},
		"id":                            {ref: otherID, want: otherID},
		"sha256: and id":                {ref: "sha256:" + otherID, want: otherID},
		"sha256: and manifest digest":   {ref: appDigest.String(), err: ErrNotFound},
		"sha256: and unknown":           {ref: "sha256:" + id("2"), err: ErrNotFound},
		"unknown id":                    {ref: id("3"), err: ErrNotFound},
		"id prefix":                     {ref: otherID[:12], want: otherID},
		"id prefix of three":            {ref: "fad", want: single},
		"id prefix before short name":   {ref: "fade", want: single, podman: "podman takes the name first"},
		"two characters are a name":     {ref: "fa", err: ErrNotFound, podman: "podman takes any prefix"},
		"ambiguous prefix with name":    {ref: "abc", want: hexName},
		"longer prefix":                 {ref: "abc2", want: twinB},
		"upper case":                    {ref: "Other:2", err: ErrInvalidReference},
		"empty":                         {ref: "", err: ErrInvalidReference},
		"spaces":                        {ref: "a b", err: ErrInvalidReference},
		"bad tag":                       {ref: reg.host + "/other:", err: ErrInvalidReference},
		"bad digest":                    {ref: reg.host + "/other@sha256:12", err: ErrInvalidReference},
		"transport":                     {ref: "docker://" + reg.host + "/other:2", err: ErrInvalidReference, podman: "podman strips transports"},
		"path upwards":                  {ref: "../../etc/passwd", err: ErrInvalidReference},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := root.Resolve(t.Context(), tc.ref)
			if tc.err != nil {
				require.ErrorIs(t, err, tc.err)
				assert.Contains(t, err.Error(), fmt.Sprintf("%q", tc.ref))
			} else {
				require.NoError(t, err)
				assert.Equal(t, tc.want, got.ID)
			}
			if tc.podman != "" {
				return
			}
			out, err := podman(t, opt, "image", "inspect", "--format", "{{.ID}}", tc.ref)
			if tc.err != nil {
				require.Error(t, err, "podman found %s", out)
			} else {
				require.NoError(t, err)
				assert.Equal(t, tc.want, out)
			}
		})
	}
}

func TestResolveAmbiguous(t *testing.T) {
	root := open(t, testOptions(t))
	record(t, root, id("abc1"))
	record(t, root, id("abc2"))
	_, err := root.Resolve(t.Context(), "abc")
	require.ErrorIs(t, err, ErrAmbiguous)
	record(t, root, id("1"), id("abc3"))
	_, err = root.Resolve(t.Context(), id("abc3"))
	require.ErrorIs(t, err, ErrNotFound, "an id is never taken for a name")
	got, err := root.Resolve(t.Context(), "abc1")
	require.NoError(t, err)
	assert.Equal(t, id("abc1"), got.ID)
}

func TestResolveSeesOtherProcesses(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "a")
	reg.push(t, "a:1", img)
	opt := testOptions(t)
	root := open(t, opt)
	_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	require.NoError(t, deleteImage(opt, imageID(t, img)))
	_, err = root.Resolve(t.Context(), reg.host+"/a:1")
	require.ErrorIs(t, err, ErrNotFound)
}

func TestImagesLeavesBadRecordsOut(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a", "b"))
	opt := testOptions(t)
	root := open(t, opt)
	good, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)

	record(t, root, id("1"), "registry.example/no-tag")
	_, err = root.store.CreateImage(id("2"), []string{"registry.example/no-manifest:1"}, "", "", nil)
	require.NoError(t, err)
	record(t, root, id("3"), "Not A Name")
	record(t, root, "short", "registry.example/short:1")

	images, errs := root.Images(t.Context())
	require.Len(t, images, 1)
	assert.Equal(t, good, images[0])
	require.Len(t, errs, 4)
	text := errors.Join(errs...).Error()
	for _, err := range errs {
		require.ErrorIs(t, err, ErrBadRecord)
	}
	for _, want := range []string{id("1"), "registry.example/no-tag", "neither a tag nor a digest", id("2"), "no manifest", id("3"), "Not A Name", "short"} {
		assert.Contains(t, text, want)
	}

	_, err = root.Resolve(t.Context(), id("2"))
	require.ErrorIs(t, err, ErrBadRecord)
}

func TestImagesWithMissingLayer(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	reg.push(t, "b:1", imageOf(t, "b"))
	root := open(t, testOptions(t))
	a, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	b, err := root.Pull(t.Context(), reg.host+"/b:1", PullOptions{})
	require.NoError(t, err)
	recordA, err := root.store.Image(a.ID)
	require.NoError(t, err)

	_, err = readRecord(recordA, func(string) (*cstorage.Layer, error) { return nil, cstorage.ErrLayerUnknown })
	require.ErrorIs(t, err, ErrBadRecord)
	assert.Contains(t, err.Error(), recordA.TopLayer)

	images, errs := root.Images(t.Context())
	assert.Empty(t, errs)
	assert.ElementsMatch(t, []Image{a, b}, images)
	assert.Positive(t, a.Size)
	assert.Contains(t, a.Digests, a.Digest)
}

func FuzzResolve(f *testing.F) {
	root := open(f, testOptions(f))
	record(f, root, id("abc1"), "localhost/a:latest")
	record(f, root, id("abc2"), "registry.example/b:1")
	for _, seed := range []string{"", "a", "abc", "abc1", id("abc1"), "registry.example/b:1", "b@sha256:" + id("1"), "sha256:" + id("abc1"), "A", "a:b:c", "[::1]:5000/a", "\x00"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, ref string) {
		image, err := root.Resolve(t.Context(), ref)
		switch {
		case err == nil:
			assert.True(t, image.ID == id("abc1") || image.ID == id("abc2"))
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrInvalidReference), errors.Is(err, ErrAmbiguous):
		default:
			t.Fatal(err)
		}
	})
}
