package storage

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// private makes the registry ask for a password.
func (r *testRegistry) private(user, password string) {
	r.setFault(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		if u, p, _ := req.BasicAuth(); u != user || p != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, req)
	})
}

// authFile is the content of one with credentials for the registry.
func (r *testRegistry) authFile(user, password string) string {
	return fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host, base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
}

func assertProven(t *testing.T, root *Root, id, namespace string, want bool) {
	t.Helper()
	proven, err := root.Proven(t.Context(), id, namespace)
	require.NoError(t, err)
	assert.Equal(t, want, proven, "for namespace %q", namespace)
}

func TestPullProvesAccess(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", imageOf(t, "one"))
	caller := &Auth{Username: "user", Password: "secret"}
	for name, tc := range map[string]struct {
		public   bool
		nodes    string // password in the node's auth file
		opt      PullOptions
		apart    bool // the options' auth file has the password
		want     access
		onlyTeam bool
		nobody   bool
	}{
		"public":                    {public: true, opt: PullOptions{Namespace: "team"}, want: access{Anonymous: true}},
		"node's credentials":        {nodes: "secret", opt: PullOptions{Namespace: "team"}, want: access{Node: true}},
		"node's for no pod":         {nodes: "secret", want: access{Node: true}},
		"a pod's credentials":       {opt: PullOptions{Auth: caller, Namespace: "team"}, want: access{Namespaces: []string{"team"}}, onlyTeam: true},
		"a pod's beside the node's": {nodes: "secret", opt: PullOptions{Auth: caller, Namespace: "team"}, want: access{Namespaces: []string{"team"}}, onlyTeam: true},
		"a pod's auth file":         {apart: true, opt: PullOptions{Namespace: "team"}, want: access{Namespaces: []string{"team"}}, onlyTeam: true},
		"credentials of no pod":     {opt: PullOptions{Auth: caller}, nobody: true},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			if tc.nodes != "" {
				write(t, opt.AuthFile, reg.authFile("user", tc.nodes))
			}
			if tc.apart {
				tc.opt.AuthFile = t.TempDir() + "/auth.json"
				write(t, tc.opt.AuthFile, reg.authFile("user", "secret"))
			}
			root := open(t, opt)
			reg.private("user", "secret")
			if tc.public {
				reg.setFault(nil)
			}
			image, err := root.Pull(t.Context(), reg.host+"/app:1", tc.opt)
			require.NoError(t, err)

			tc.want.Version = accessVersion
			known, err := root.access(image.ID)
			require.NoError(t, err)
			assert.Equal(t, tc.want, known)
			assertProven(t, root, image.ID, "team", !tc.nobody)
			assertProven(t, root, image.ID, "other", !tc.nobody && !tc.onlyTeam)
			assertProven(t, root, image.ID, "", !tc.nobody && !tc.onlyTeam)
		})
	}
}

// Proofs add up, through pulls that write the image's record anew.
func TestProofsAddUp(t *testing.T) {
	reg := newRegistry(t)
	app := imageOf(t, "one", "two")
	reg.push(t, "app:1", app)
	reg.push(t, "index:1", indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x")))))
	reg.private("user", "secret")
	opt := testOptions(t)
	root := open(t, opt)
	as := func(namespace string) PullOptions {
		return PullOptions{Auth: &Auth{Username: "user", Password: "secret"}, Namespace: namespace}
	}
	first, err := root.Pull(t.Context(), reg.host+"/app:1", as("b"))
	require.NoError(t, err)
	reg.take()
	_, err = root.Pull(t.Context(), reg.host+"/app:1", as("a"))
	require.NoError(t, err)
	assertManifestRequests(t, reg, 1)
	again, err := root.Pull(t.Context(), reg.host+"/index:1", as("c"))
	require.NoError(t, err)
	require.Equal(t, first.ID, again.ID)
	_, err = root.Pull(t.Context(), reg.host+"/app:1", PullOptions{Auth: &Auth{Username: "user", Password: "wrong"}, Namespace: "d"})
	require.ErrorIs(t, err, ErrUnauthorized)
	known, err := root.access(first.ID)
	require.NoError(t, err)
	assert.Equal(t, access{Version: accessVersion, Namespaces: []string{"a", "b", "c"}}, known)

	write(t, opt.AuthFile, reg.authFile("user", "secret"))
	_, err = root.Pull(t.Context(), reg.host+"/app:1", PullOptions{})
	require.NoError(t, err)
	_, err = root.Pull(t.Context(), reg.host+"/app:1", as("d"))
	require.NoError(t, err)
	known, err = root.access(first.ID)
	require.NoError(t, err)
	assert.Equal(t, access{Version: accessVersion, Node: true, Namespaces: []string{"a", "b", "c", "d"}}, known)

	require.NoError(t, deleteImage(opt, first.ID))
	_, err = root.Proven(t.Context(), first.ID, "a")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = root.Pull(t.Context(), reg.host+"/app:1", as("b"))
	require.NoError(t, err)
	assertProven(t, root, first.ID, "a", false)
}

func TestProofsAtTheSameTime(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", imageOf(t, "one"))
	root := open(t, testOptions(t))
	image, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{Auth: &Auth{Username: "user"}})
	require.NoError(t, err)
	const callers = 50
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			_, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{Auth: &Auth{Username: "user"}, Namespace: fmt.Sprint(i)})
			assert.NoError(t, err)
		})
	}
	all.Wait()
	for i := range callers {
		assertProven(t, root, image.ID, fmt.Sprint(i), true)
	}
}

// The image is in the root a moment before what its pull proves is kept on it. Nobody is refused, or asks the registry,
// for that.
func TestProvenWaitsForThePull(t *testing.T) {
	reg := newRegistry(t)
	app := imageOf(t, "one")
	reg.push(t, "app:1", app)
	reg.push(t, "other:1", app)
	root := open(t, testOptions(t))
	image, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{Auth: &Auth{Username: "user"}})
	require.NoError(t, err)
	assertProven(t, root, image.ID, "team", false)

	// The same image under another manifest, whose config does not come yet.
	reg.push(t, "app:1", mutate.Annotations(app, map[string]string{"example.com/again": "yes"}).(v1.Image))
	stalled, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	reg.setFault(func(w http.ResponseWriter, req *http.Request, next http.Handler) {
		if strings.Contains(req.URL.Path, "/blobs/sha256:"+image.ID) {
			close(stalled)
			<-goOn
		}
		next.ServeHTTP(w, req)
	})
	var calls sync.WaitGroup
	calls.Go(func() {
		_, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{})
		assert.NoError(t, err)
	})
	<-stalled
	left, leave := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer leave()
	_, err = root.Proven(left, image.ID, "team")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	calls.Go(func() { assertProven(t, root, image.ID, "team", true) })
	release()
	calls.Wait()
	reg.setFault(nil)
	require.Empty(t, root.arriving.running)

	// A pull under a name that the image does not have proves nothing before its end.
	root = open(t, testOptions(t))
	_, err = root.Pull(t.Context(), reg.host+"/other:1", PullOptions{Auth: &Auth{Username: "user"}})
	require.NoError(t, err)
	end := root.arriving.add(image.ID, reg.host+"/app:1")
	defer end()
	assertProven(t, root, image.ID, "team", false)
}

func TestProve(t *testing.T) {
	reg := newRegistry(t)
	app := imageOf(t, "one")
	digest := reg.push(t, "app:1", app)
	reg.push(t, "index:1", indexOf(app, imageWith(t, "s390x", layerOf(t, "f", []byte("s390x")))))
	caller := &Auth{Username: "user", Password: "secret"}
	for _, ref := range []string{"app:1", "index:1", "app@" + digest.String()} {
		t.Run(ref, func(t *testing.T) {
			opt := testOptions(t)
			root := open(t, opt)
			reg.private("user", "secret")
			image, err := root.Pull(t.Context(), reg.host+"/"+ref, PullOptions{Auth: caller})
			require.NoError(t, err)

			err = root.Prove(t.Context(), image.ID)
			require.ErrorIs(t, err, ErrUnproven)
			require.ErrorIs(t, err, ErrUnauthorized)
			require.ErrorContains(t, err, reg.host)
			assertProven(t, root, image.ID, "team", false)

			// The tag's having moved does not matter, another image's being there does not help.
			write(t, opt.AuthFile, reg.authFile("user", "secret"))
			gone := func(w http.ResponseWriter, req *http.Request, next http.Handler) {
				if strings.Contains(req.URL.Path, "/manifests/sha256:") {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				next.ServeHTTP(w, req)
			}
			reg.setFault(gone)
			err = root.Prove(t.Context(), image.ID)
			require.ErrorIs(t, err, ErrUnproven)
			assertProven(t, root, image.ID, "team", false)

			reg.private("user", "secret")
			reg.take()
			require.NoError(t, root.Prove(t.Context(), image.ID))
			assertManifestRequests(t, reg, 1)
			assertProven(t, root, image.ID, "team", true)
			known, err := root.access(image.ID)
			require.NoError(t, err)
			assert.Equal(t, access{Version: accessVersion, Node: true}, known)
		})
	}
}

// An image is asked for in each repository that it has a name in, and only there.
func TestProveAsksEachRepository(t *testing.T) {
	private, public := newRegistry(t), newRegistry(t)
	app := imageOf(t, "one")
	private.push(t, "app:1", app)
	public.push(t, "app:1", app)
	root := open(t, testOptions(t))
	caller := &Auth{Username: "user", Password: "secret"}
	private.private("user", "secret")
	_, err := root.Pull(t.Context(), private.host+"/app:1", PullOptions{Auth: caller})
	require.NoError(t, err)
	image, err := root.Pull(t.Context(), public.host+"/app:1", PullOptions{Auth: caller})
	require.NoError(t, err)
	require.NoError(t, root.store.SetNames(image.ID, []string{private.host + "/app:1", private.host + "/app:2", public.host + "/app:1"}))
	private.take()
	require.NoError(t, root.Prove(t.Context(), image.ID))
	assertManifestRequests(t, private, 1)
	known, err := root.access(image.ID)
	require.NoError(t, err)
	assert.Equal(t, access{Version: accessVersion, Anonymous: true}, known)

	root = open(t, testOptions(t))
	image, err = root.Pull(t.Context(), public.host+"/app:1", PullOptions{Auth: caller})
	require.NoError(t, err)
	require.NoError(t, root.store.SetNames(image.ID, nil))
	public.take()
	err = root.Prove(t.Context(), image.ID)
	require.ErrorIs(t, err, ErrUnproven)
	require.ErrorContains(t, err, "no name")
	assert.Empty(t, public.take())

	_, err = root.Proven(t.Context(), strings.Repeat("0", 64), "team")
	require.ErrorIs(t, err, ErrNotFound)
	err = root.Prove(t.Context(), strings.Repeat("0", 64))
	require.ErrorIs(t, err, ErrNotFound)
	require.NotErrorIs(t, err, ErrUnproven)
}

// What cannot be read proves nothing, and is replaced.
func TestBadAccessRecord(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", imageOf(t, "one"))
	root := open(t, testOptions(t))
	image, err := root.Pull(t.Context(), reg.host+"/app:1", PullOptions{})
	require.NoError(t, err)
	assertProven(t, root, image.ID, "team", true)
	for _, content := range []string{"", "{", `{"anonymous":true}`, `{"version":2,"anonymous":true}`, `{"version":1,"namespaces":["team"],"anonymous":"true"}`} {
		require.NoError(t, root.store.SetImageBigData(image.ID, accessKey, []byte(content), nil))
		assertProven(t, root, image.ID, "team", false)
		require.NoError(t, root.Prove(t.Context(), image.ID))
		assertProven(t, root, image.ID, "team", true)
	}
}

// What a removal that was killed leaves proves nothing for the image when it is pulled again.
func TestProofOfAnImageThatWasThere(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "app:1", imageOf(t, "one"))
	reg.private("user", "secret")
	root := open(t, testOptions(t))
	as := func(namespace string) PullOptions {
		return PullOptions{Auth: &Auth{Username: "user", Password: "secret"}, Namespace: namespace}
	}
	image, err := root.Pull(t.Context(), reg.host+"/app:1", as("before"))
	require.NoError(t, err)
	file := filepath.Join(root.store.GraphRoot(), "overlay-images", image.ID, "="+base64.StdEncoding.EncodeToString([]byte(accessKey)))
	left, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NoError(t, root.deleteImage(image.ID))
	require.NoError(t, os.Mkdir(filepath.Dir(file), 0o700))
	write(t, file, string(left))
	_, err = root.Pull(t.Context(), reg.host+"/app:1", as("now"))
	require.NoError(t, err)
	assertProven(t, root, image.ID, "now", true)
	assertProven(t, root, image.ID, "before", false)
}

func assertManifestRequests(t *testing.T, reg *testRegistry, want int) {
	t.Helper()
	answered := 0
	for _, request := range reg.take() {
		assert.Contains(t, request, "/manifests/")
		answered++
	}
	assert.Equal(t, want, answered)
}
