package storage

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// noise is content that does not compress to nothing.
func noise(size int) string {
	var out bytes.Buffer
	for i := 0; out.Len() < size; i++ {
		out.WriteString(digest.FromString(fmt.Sprint(i)).Encoded())
	}
	return out.String()[:size]
}

func TestPull(t *testing.T) {
	reg := newRegistry(t)
	opt := testOptions(t)
	write(t, opt.RegistriesConf, fmt.Sprintf("short-name-mode = \"enforcing\"\nunqualified-search-registries = [\"127.0.0.1:1\", %q]\n[aliases]\n\"alias\" = %q\n", reg.host, reg.host+"/lib/app"))
	app := imageOf(t, "one", "two")
	appDigest, err := app.Digest()
	require.NoError(t, err)
	index := indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x"))))
	indexDigest := reg.push(t, "lib/app:1", index)
	reg.push(t, "lib/app:latest", app)

	for name, tc := range map[string]struct {
		ref, wantName string
		digests       []digest.Digest
	}{
		"tag":                   {reg.host + "/lib/app:1", reg.host + "/lib/app:1", []digest.Digest{digest.Digest(indexDigest.String())}},
		"no tag":                {reg.host + "/lib/app", reg.host + "/lib/app:latest", nil},
		"digest of the index":   {reg.host + "/lib/app@" + indexDigest.String(), reg.host + "/lib/app@" + indexDigest.String(), []digest.Digest{digest.Digest(indexDigest.String())}},
		"digest of the image":   {reg.host + "/lib/app@" + appDigest.String(), reg.host + "/lib/app@" + appDigest.String(), nil},
		"tag and digest":        {reg.host + "/lib/app:1@" + appDigest.String(), reg.host + "/lib/app@" + appDigest.String(), nil},
		"short name":            {"lib/app:1", reg.host + "/lib/app:1", nil},
		"alias":                 {"alias:1", reg.host + "/lib/app:1", nil},
		"short name and digest": {"lib/app@" + appDigest.String(), reg.host + "/lib/app@" + appDigest.String(), nil},
	} {
		t.Run(name, func(t *testing.T) {
			opt := opt
			opt.GraphRoot, opt.RunRoot = filepath.Join(t.TempDir(), "root"), filepath.Join(t.TempDir(), "run")
			root := open(t, opt)
			got, err := root.Pull(t.Context(), tc.ref, PullOptions{})
			require.NoError(t, err)
			assert.Equal(t, imageID(t, app), got.ID)
			assert.Equal(t, []string{tc.wantName}, got.Names)
			assert.Contains(t, got.Digests, digest.Digest(appDigest.String()))
			assert.Subset(t, got.Digests, tc.digests)
			assert.False(t, got.Leased)

			again, err := root.Resolve(t.Context(), tc.ref)
			require.NoError(t, err)
			assert.Equal(t, got, again)
			assert.Equal(t, digest.Digest(appDigest.String()), got.Digest)
			images, errs := root.Images(t.Context())
			assert.Empty(t, errs)
			assert.Equal(t, []Image{got}, images)

			dirs, err := root.LowerDirs(t.Context(), got.ID, nil)
			require.NoError(t, err)
			require.Len(t, dirs, 2)
			content, err := os.ReadFile(filepath.Join(dirs[0], "file-1"))
			require.NoError(t, err)
			assert.Equal(t, "two", string(content))
			assertNoDownloads(t, opt)
		})
	}
}

func assertNoDownloads(tb testing.TB, opt Options) {
	tb.Helper()
	left, err := filepath.Glob(filepath.Join(opt.TempDir, "*", "*"))
	require.NoError(tb, err)
	assert.Empty(tb, left, "temporary files are gone")
}

func TestRepull(t *testing.T) {
	reg := newRegistry(t)
	app := imageOf(t, "one", "two")
	index := indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x"))))
	indexDigest := reg.push(t, "index:1", index)
	imageDigest := reg.push(t, "image:1", app)
	root := open(t, testOptions(t))

	for name, ref := range map[string]string{
		"image by tag":    "/image:1",
		"index by tag":    "/index:1",
		"image by digest": "/image@" + imageDigest.String(),
		"index by digest": "/index@" + indexDigest.String(),
	} {
		t.Run(name, func(t *testing.T) {
			first, err := root.Pull(t.Context(), reg.host+ref, PullOptions{})
			require.NoError(t, err)
			reg.take()
			progressed := false
			again, err := root.Pull(t.Context(), reg.host+ref, PullOptions{Progress: func(Progress) { progressed = true }})
			require.NoError(t, err)
			assert.Equal(t, first, again)
			requests := reg.take()
			require.Len(t, requests, 1)
			assert.Contains(t, requests[0], "/manifests/")
			assert.False(t, progressed)
		})
	}

	t.Run("first pull asks for each thing once", func(t *testing.T) {
		fresh := open(t, testOptions(t))
		_, err := fresh.Pull(t.Context(), reg.host+"/image:1", PullOptions{})
		require.NoError(t, err)
		requests := reg.take()
		assert.Len(t, slices.Compact(slices.Sorted(slices.Values(requests))), len(requests), "%q", requests)
	})

	t.Run("moved tag", func(t *testing.T) {
		moved := imageOf(t, "one", "three")
		reg.push(t, "image:1", moved)
		got, err := root.Pull(t.Context(), reg.host+"/image:1", PullOptions{})
		require.NoError(t, err)
		assert.Equal(t, imageID(t, moved), got.ID)
		old, err := root.Resolve(t.Context(), imageID(t, app))
		require.NoError(t, err)
		assert.NotContains(t, old.Names, reg.host+"/image:1")
	})

	t.Run("new index, same image", func(t *testing.T) {
		other := indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("another s390x"))))
		d := reg.push(t, "index:1", other)
		got, err := root.Pull(t.Context(), reg.host+"/index:1", PullOptions{})
		require.NoError(t, err)
		assert.Equal(t, imageID(t, app), got.ID)
		assert.Contains(t, got.Digests, digest.Digest(d.String()))
	})

	t.Run("policy now rejects it", func(t *testing.T) {
		opt := testOptions(t)
		strict := open(t, opt)
		_, err := strict.Pull(t.Context(), reg.host+"/index:1", PullOptions{})
		require.NoError(t, err)
		write(t, opt.SignaturePolicy, `{"default":[{"type":"reject"}]}`)
		_, err = strict.Pull(t.Context(), reg.host+"/index:1", PullOptions{})
		require.ErrorIs(t, err, ErrSignature)
	})
}

func TestPullProgress(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, noise(1<<20), noise(2<<20))
	reg.push(t, "a:1", img)
	layers, err := img.Layers()
	require.NoError(t, err)
	var total int64
	for _, l := range layers {
		size, err := l.Size()
		require.NoError(t, err)
		total += size
	}
	var got []Progress
	_, err = open(t, testOptions(t)).Pull(t.Context(), reg.host+"/a:1", PullOptions{Progress: func(p Progress) { got = append(got, p) }})
	require.NoError(t, err)
	require.NotEmpty(t, got)
	assert.Equal(t, Progress{Total: total, Phase: PhaseDownloading}, got[0])
	assert.Equal(t, Progress{Done: total, Total: total, Phase: PhaseStoring}, got[len(got)-1])
	assert.True(t, slices.IsSortedFunc(got, func(a, b Progress) int { return int(a.Done - b.Done) }))
}

func TestConcurrentPulls(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, noise(100_000), noise(200_000))
	reg.push(t, "a:1", img)
	root := open(t, testOptions(t))
	allIn := make(chan struct{})
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-allIn
		}
		next.ServeHTTP(w, r)
	})
	var joined, wg sync.WaitGroup
	for range 20 {
		joined.Add(1)
		wg.Go(func() {
			var once sync.Once
			got, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{Progress: func(Progress) { once.Do(joined.Done) }})
			assert.NoError(t, err)
			assert.Equal(t, imageID(t, img), got.ID)
		})
	}
	joined.Wait() // each has been told of the transfer, late ones too
	close(allIn)
	wg.Wait()
	requests := reg.take()
	assert.Len(t, requests, 4, "manifest, config and two layers: %q", requests)
}

func TestPullIsLeftByAll(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, noise(1<<20))
	reg.push(t, "a:1", img)
	opt := testOptions(t)
	root := open(t, opt)
	ctx, leave := context.WithCancel(t.Context())
	aborted := make(chan struct{})
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			next.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
		_, _ = w.Write(rec.Body.Bytes()[:min(1000, rec.Body.Len()-1)])
		w.(http.Flusher).Flush()
		leave()
		<-r.Context().Done()
		select {
		case aborted <- struct{}{}:
		default:
		}
	})
	_, err := root.Pull(ctx, reg.host+"/a:1", PullOptions{})
	require.ErrorIs(t, err, context.Canceled)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		root.pulls.mu.Lock()
		defer root.pulls.mu.Unlock()
		assert.Empty(c, root.pulls.running)
	}, 10*time.Second, 10*time.Millisecond)
	images, errs := root.Images(t.Context())
	assert.Empty(t, images)
	assert.Empty(t, errs)
	assert.Empty(t, layerIDs(t, root))
	assertNoDownloads(t, opt)

	reg.setFault(nil)
	got, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	assert.Equal(t, imageID(t, img), got.ID)
}

func TestCloseEndsPulls(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	opt := testOptions(t)
	root := open(t, opt)
	inBlob := make(chan struct{}, 10)
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			next.ServeHTTP(w, r)
			return
		}
		inBlob <- struct{}{}
		<-r.Context().Done()
	})
	failed := make(chan error)
	go func() {
		_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		failed <- err
	}()
	<-inBlob
	go func() { _ = root.Close() }()
	require.ErrorIs(t, <-failed, ErrClosed)
}

// fail answers paths that contain part with the status and body.
func fail(part string, status int, body string) func(http.ResponseWriter, *http.Request, http.Handler) {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, part) {
			next.ServeHTTP(w, r)
			return
		}
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
		}
		w.Header().Set("Retry-After", "0")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}
}

// alter passes paths that contain part on with their body changed.
func alter(part string, change func([]byte) []byte) func(http.ResponseWriter, *http.Request, http.Handler) {
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.Contains(r.URL.Path, part) {
			next.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		maps.Copy(w.Header(), rec.Header())
		body := rec.Body.Bytes()
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		w.WriteHeader(rec.Code)
		_, _ = w.Write(change(bytes.Clone(body)))
	}
}

func TestPullFails(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, noise(300_000))
	imgDigest := reg.push(t, "a:1", img)
	layers, err := img.Layers()
	require.NoError(t, err)
	layer, err := layers[0].Digest()
	require.NoError(t, err)
	layerPath := "/blobs/" + layer.String()
	config, err := img.ConfigName()
	require.NoError(t, err)
	otherPlatform := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
		Add: imageWith(t, "s390x", layerOf(t, "f", []byte("x"))), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}},
	})
	reg.push(t, "s390x:1", otherPlatform)
	wrongDiffID := imageOf(t, "a")
	configFile, err := wrongDiffID.ConfigFile()
	require.NoError(t, err)
	configFile = configFile.DeepCopy()
	configFile.RootFS.DiffIDs[0] = layer
	wrongDiffID, err = mutate.ConfigFile(wrongDiffID, configFile)
	require.NoError(t, err)
	reg.push(t, "wrong-diffid:1", wrongDiffID)

	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	cut := func(b []byte) []byte { return b[:len(b)/2] }
	blobDigestOfOther := "/a@sha256:" + id("1")
	v2Error := func(code string) string {
		return fmt.Sprintf(`{"errors":[{"code":%q,"message":"says the registry"}]}`, code)
	}

	for name, tc := range map[string]struct {
		ref   string
		fault func(http.ResponseWriter, *http.Request, http.Handler)
		is    error
		text  []string
	}{
		"no such tag":              {ref: "/a:2", is: ErrNotFound},
		"no such repository":       {ref: "/b:1", is: ErrNotFound},
		"no such digest":           {ref: blobDigestOfOther, is: ErrNotFound},
		"404 without a body":       {fault: fail("/manifests/", 404, ""), is: ErrNotFound},
		"404 with an unknown code": {fault: fail("/manifests/", 404, `{"errors":[{"code":"UNKNOWN","message":"Not Found"}]}`), is: ErrNotFound},
		"404 in HTML":              {fault: fail("/manifests/", 404, "<html>"), is: ErrNotFound},
		"not for this platform":    {ref: "/s390x:1", is: ErrNotFound, text: []string{"amd64"}},
		"401":                      {fault: fail("/manifests/", 401, v2Error("UNAUTHORIZED")), is: ErrUnauthorized, text: []string{"auth file"}},
		"401 in HTML":              {fault: fail("/manifests/", 401, "<html>"), is: ErrUnauthorized},
		"401 at the ping":          {fault: fail("/v2/", 401, v2Error("UNAUTHORIZED")), is: ErrUnauthorized},
		"403":                      {fault: fail("/manifests/", 403, v2Error("DENIED")), is: ErrUnauthorized},
		"403 in HTML":              {fault: fail("/manifests/", 403, "<html>"), is: ErrUnauthorized},
		"401 for a layer":          {fault: fail(layerPath, 401, v2Error("UNAUTHORIZED")), is: ErrUnauthorized},
		"404 for a layer":          {fault: fail(layerPath, 404, v2Error("BLOB_UNKNOWN")), is: ErrNotFound},
		"429":                      {fault: fail("/manifests/", 429, v2Error("TOOMANYREQUESTS")), is: ErrRegistryUnavailable},
		"500":                      {fault: fail("/manifests/", 500, ""), is: ErrRegistryUnavailable},
		"503":                      {fault: fail("/manifests/", 503, v2Error("UNAVAILABLE")), is: ErrRegistryUnavailable},
		"502 for a layer":          {fault: fail(layerPath, 502, "<html>"), is: ErrRegistryUnavailable},
		"503 for the config":       {fault: fail("/blobs/"+config.String(), 503, ""), is: ErrRegistryUnavailable},
		"503 at the ping":          {fault: fail("/v2/", 503, ""), is: ErrRegistryUnavailable},
		"layer cut":                {fault: alter(layerPath, cut), is: ErrRegistryUnavailable},
		"config cut":               {fault: alter("/blobs/"+config.String(), cut), is: ErrRegistryUnavailable},
		"layer altered":            {fault: alter(layerPath, flip), is: ErrDigestMismatch},
		"config altered":           {fault: alter("/blobs/"+config.String(), flip), is: ErrDigestMismatch},
		"manifest altered":         {ref: "/a@" + imgDigest.String(), fault: alter("/manifests/", func(b []byte) []byte { return bytes.Replace(b, []byte("{"), []byte("{ "), 1)[:len(b)] }), is: ErrDigestMismatch},
		"diff id of another layer": {ref: "/wrong-diffid:1", is: ErrDigestMismatch},
		"manifest is no JSON":      {fault: alter("/manifests/", func(b []byte) []byte { return bytes.Repeat([]byte("x"), len(b)) }), text: []string{"parse the manifest"}},
		"schema 1": {fault: func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				next.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Type", string(types.DockerManifestSchema1Signed))
			_, _ = w.Write([]byte(`{"schemaVersion":1,"name":"a","tag":"1","architecture":"amd64","fsLayers":[],"history":[],"signatures":[]}`))
		}, is: ErrUnsupported, text: []string{"schema 1", "push it again"}},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			root := open(t, opt)
			ref := reg.host + "/a:1"
			if tc.ref != "" {
				ref = reg.host + tc.ref
			}
			reg.setFault(tc.fault)
			defer reg.setFault(nil)
			_, err := root.Pull(t.Context(), ref, PullOptions{})
			require.Error(t, err)
			t.Log(err)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			for _, want := range append(tc.text, ref) {
				assert.Contains(t, err.Error(), want)
			}
			for _, other := range []error{ErrNotFound, ErrUnauthorized, ErrRegistryUnavailable, ErrDigestMismatch, ErrUnsupported, ErrSignature, ErrDiskFull} {
				if other != tc.is { //nolint:errorlint // sentinels are compared with each other
					assert.NotErrorIs(t, err, other)
				}
			}
			images, errs := root.Images(t.Context())
			assert.Empty(t, images)
			assert.Empty(t, errs)
			assertNoDownloads(t, opt)

			reg.setFault(nil)
			_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.NoError(t, err, "the next pull succeeds")
		})
	}
}

func TestPullFailsWithoutRegistry(t *testing.T) {
	opt := testOptions(t)
	root := open(t, opt)
	_, err := root.Pull(t.Context(), "127.0.0.1:1/a:1", PullOptions{})
	require.ErrorIs(t, err, ErrRegistryUnavailable)
	assert.Contains(t, err.Error(), "127.0.0.1:1/a:1")

	for name, ref := range map[string]string{
		"id": id("1"), "empty": "", "upper case": "A", "short name without search registries": "a",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := root.Pull(t.Context(), ref, PullOptions{})
			require.ErrorIs(t, err, ErrInvalidReference)
		})
	}

	t.Run("every candidate is named", func(t *testing.T) {
		reg := newRegistry(t)
		opt := testOptions(t)
		write(t, opt.RegistriesConf, fmt.Sprintf("unqualified-search-registries = [\"127.0.0.1:1\", %q]\n", reg.host))
		_, err := open(t, opt).Pull(t.Context(), "a", PullOptions{})
		require.ErrorIs(t, err, ErrRegistryUnavailable)
		require.ErrorIs(t, err, ErrNotFound)
		assert.Contains(t, err.Error(), "127.0.0.1:1/a:latest")
		assert.Contains(t, err.Error(), reg.host+"/a:latest")
	})

	t.Run("policy", func(t *testing.T) {
		reg := newRegistry(t)
		reg.push(t, "a:1", imageOf(t, "a"))
		opt := testOptions(t)
		write(t, opt.SignaturePolicy, `{"default":[{"type":"reject"}]}`)
		_, err := open(t, opt).Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.ErrorIs(t, err, ErrSignature)
		require.NoError(t, os.Remove(opt.SignaturePolicy))
		_, err = open(t, opt).Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.ErrorContains(t, err, "signature policy")
	})

	t.Run("credentials", func(t *testing.T) {
		reg := newRegistry(t)
		reg.push(t, "a:1", imageOf(t, "a"))
		reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if user, password, _ := r.BasicAuth(); user != "user" || password != "secret" {
				fail("", http.StatusUnauthorized, "")(w, r, next)
				return
			}
			next.ServeHTTP(w, r)
		})
		opt := testOptions(t)
		root := open(t, opt)
		_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.ErrorIs(t, err, ErrUnauthorized)
		write(t, opt.AuthFile, fmt.Sprintf(`{"auths":{%q:{"auth":"dXNlcjpzZWNyZXQ="}}}`, reg.host))
		_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		require.NoError(t, err)
		assert.NotContains(t, fmt.Sprint(err), "secret")
	})

	t.Run("mirror", func(t *testing.T) {
		reg := newRegistry(t)
		reg.push(t, "mirrored/a:1", imageOf(t, "a"))
		opt := testOptions(t)
		write(t, opt.RegistriesConf, fmt.Sprintf("[[registry]]\nprefix = \"registry.example\"\nlocation = \"127.0.0.1:1\"\n[[registry.mirror]]\nlocation = %q\ninsecure = true\n", reg.host+"/mirrored"))
		root := open(t, opt)
		got, err := root.Pull(t.Context(), "registry.example/a:1", PullOptions{})
		require.NoError(t, err)
		assert.Equal(t, []string{"registry.example/a:1"}, got.Names)
		reg.take()
		_, err = root.Pull(t.Context(), "registry.example/a:1", PullOptions{})
		require.NoError(t, err)
		assert.Len(t, reg.take(), 1)
	})
}
