package storage

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPullWithCredentials(t *testing.T) {
	reg := newRegistry(t)
	var refs []string
	for i := range 8 {
		refs = append(refs, reg.host+fmt.Sprintf("/a%d:1", i))
		reg.push(t, fmt.Sprintf("a%d:1", i), imageOf(t, fmt.Sprint("content ", i)))
	}
	users := []*Auth{{Username: "u1", Password: "good"}, {Username: "u2", Password: "good"}, {Username: "u3", Password: "bad"}, nil}
	var mu sync.Mutex
	manifests := make(map[string]int) // by user and path
	arrived, answer := make(chan struct{}, 100), make(chan struct{})
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		user, password, _ := r.BasicAuth()
		if password != "good" {
			fail("", http.StatusUnauthorized, "")(w, r, next)
			return
		}
		if strings.Contains(r.URL.Path, "/manifests/") {
			mu.Lock()
			manifests[user+" "+r.URL.Path]++
			mu.Unlock()
			arrived <- struct{}{}
			<-answer
		}
		next.ServeHTTP(w, r)
	})
	root := open(t, testOptions(t))
	var wg sync.WaitGroup
	for _, auth := range users {
		for _, ref := range refs {
			wg.Go(func() {
				_, err := root.Pull(t.Context(), ref, PullOptions{Auth: auth})
				if auth != nil && auth.Password == "good" {
					assert.NoError(t, err)
					return
				}
				assert.ErrorIs(t, err, ErrUnauthorized)
				assert.NotContains(t, fmt.Sprint(err), "bad")
			})
		}
	}
	for range 16 {
		<-arrived
	}
	for _, ref := range refs { // these share
		wg.Go(func() {
			_, err := root.Pull(t.Context(), ref, PullOptions{Auth: &Auth{Username: "u1", Password: "good"}})
			assert.NoError(t, err)
		})
	}
	require.Eventually(t, func() bool {
		root.pulls.mu.Lock()
		defer root.pulls.mu.Unlock()
		waiters := 0
		for _, fl := range root.pulls.running {
			waiters += len(fl.waiters)
		}
		return waiters == 24
	}, 10*time.Second, time.Millisecond)
	close(answer)
	wg.Wait()
	assert.Len(t, manifests, 16)
	for what, n := range manifests {
		assert.Equal(t, 1, n, what)
	}

	for name, auth := range map[string]*Auth{"bad": {Username: "u1", Password: "bad"}, "none": nil} {
		_, err := root.Pull(t.Context(), refs[0], PullOptions{Auth: auth})
		require.ErrorIs(t, err, ErrUnauthorized, "%s credentials do not get an image that is there", name)
	}
	secret := &Auth{Username: "u", Password: "hush", IdentityToken: "hush", RegistryToken: "hush"}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		assert.NotContains(t, fmt.Sprintf(verb, secret), "hush")
		assert.NotContains(t, fmt.Sprintf(verb, *secret), "hush")
		assert.NotContains(t, fmt.Sprintf(verb, PullOptions{Auth: secret}), "hush")
	}
}

func TestPullWithRegistryToken(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Header.Get("Authorization") != "Bearer token" {
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+reg.host+`/token",service="registry"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
	root := open(t, testOptions(t))
	_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.ErrorIs(t, err, ErrUnauthorized)
	_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{Auth: &Auth{RegistryToken: "token"}})
	require.NoError(t, err)
}

func TestPullIsTriedAgain(t *testing.T) {
	img := imageOf(t, noise(100_000), noise(200_000), noise(300_000))
	layers, err := img.Layers()
	require.NoError(t, err)
	last, err := layers[2].Digest()
	require.NoError(t, err)
	lastPath := "/blobs/" + last.String()
	cut := alter("", func(b []byte) []byte { return b[:len(b)/2] })
	unavailable := fail("", http.StatusServiceUnavailable, "")
	hangUp := func(http.ResponseWriter, *http.Request, http.Handler) { panic(http.ErrAbortHandler) }

	for name, tc := range map[string]struct {
		part  string
		times int // that it fails
		fault func(http.ResponseWriter, *http.Request, http.Handler)
		fails bool
	}{
		"503 for the manifest":      {part: "/manifests/", times: 3, fault: unavailable},
		"503 for a layer":           {part: lastPath, times: 3, fault: unavailable},
		"503 for too long":          {part: lastPath, times: 4, fault: unavailable, fails: true},
		"layer cut":                 {part: lastPath, times: 5, fault: cut}, // containers/image asks twice an attempt
		"no answer to the manifest": {part: "/manifests/", times: 3, fault: hangUp},
		"no answer to a layer":      {part: lastPath, times: 3, fault: hangUp},
		"refused":                   {part: lastPath, times: 1, fault: fail("", http.StatusForbidden, ""), fails: true},
		"altered":                   {part: lastPath, times: 1, fault: alter("", func(b []byte) []byte { b[99] ^= 1; return b }), fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			reg := newRegistry(t)
			reg.push(t, "a:1", img)
			opt := testOptions(t)
			root := open(t, opt)
			var failed atomic.Int32
			reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if !strings.Contains(r.URL.Path, tc.part) || int(failed.Load()) == tc.times {
					next.ServeHTTP(w, r)
					return
				}
				if strings.Contains(r.URL.Path, "/blobs/") {
					// The layers before it are finished by then.
					assert.Eventually(t, func() bool { return len(layerIDs(t, root)) == 2 }, 10*time.Second, time.Millisecond)
				}
				failed.Add(1)
				tc.fault(w, r, next)
			})
			_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			assert.EqualValues(t, tc.times, failed.Load())
			assertNoDownloads(t, opt)
			if tc.fails {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			blobs := make(map[string]int)
			for _, request := range reg.take() {
				if strings.Contains(request, "/blobs/") && !strings.Contains(request, lastPath) {
					blobs[request]++
				}
			}
			for i := range 2 {
				d, err := layers[i].Digest()
				require.NoError(t, err)
				assert.Equal(t, 1, blobs["GET /v2/a/blobs/"+d.String()], "finished layers are reused: %v", blobs)
			}
		})
	}
}

func TestPullIsNotTriedAgainWhenLeft(t *testing.T) {
	reg := newRegistry(t)
	reg.push(t, "a:1", imageOf(t, "a"))
	opt := testOptions(t)
	waiting := make(chan struct{}, 10)
	log := quiet()
	log.SetLevel(logrus.DebugLevel)
	log.AddHook(onMessage{"pull is tried again", waiting})
	opt.Log = log
	root := open(t, opt)
	root.backoff = []time.Duration{time.Hour}
	reg.setFault(fail("/manifests/", http.StatusServiceUnavailable, ""))
	failed := make(chan error)
	go func() {
		_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
		failed <- err
	}()
	<-waiting
	require.NoError(t, root.Close())
	require.ErrorIs(t, <-failed, ErrClosed)
}

// onMessage tells of a log message.
type onMessage struct {
	message string
	seen    chan<- struct{}
}

func (onMessage) Levels() []logrus.Level { return logrus.AllLevels }

func (h onMessage) Fire(e *logrus.Entry) error {
	if e.Message == h.message {
		h.seen <- struct{}{}
	}
	return nil
}

func TestPullStalls(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, noise(300_000))
	reg.push(t, "a:1", img)
	layers, err := img.Layers()
	require.NoError(t, err)
	layer, err := layers[0].Digest()
	require.NoError(t, err)
	config, err := img.ConfigName()
	require.NoError(t, err)
	half := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		w.Header().Set("Content-Length", fmt.Sprint(rec.Body.Len()))
		_, _ = w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
	silent := func(_ http.ResponseWriter, r *http.Request, _ http.Handler) { <-r.Context().Done() }
	for name, tc := range map[string]struct {
		part  string
		fault func(http.ResponseWriter, *http.Request, http.Handler)
	}{
		"no answer to the ping":     {"/v2/", silent},
		"no answer to the manifest": {"/manifests/", silent},
		"no answer to the config":   {"/blobs/" + config.String(), silent},
		"no answer to the layer":    {"/blobs/" + layer.String(), silent},
		"layer stands still":        {"/blobs/" + layer.String(), half},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			opt.StallTimeout = 300 * time.Millisecond
			root := open(t, opt)
			reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if !strings.Contains(r.URL.Path, tc.part) {
					next.ServeHTTP(w, r)
					return
				}
				tc.fault(w, r, next)
			})
			defer reg.setFault(nil)
			_, err := root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.ErrorIs(t, err, ErrRegistryUnavailable)
			require.ErrorContains(t, err, "nothing came from the registry for 300ms")
			assertNoDownloads(t, opt)
			reg.setFault(nil)
			_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
			require.NoError(t, err)
		})
	}
}

func TestPullConcurrency(t *testing.T) {
	reg := newRegistry(t)
	for i := range 6 {
		reg.push(t, fmt.Sprintf("a%d:1", i), imageOf(t, fmt.Sprint(i), fmt.Sprint("more ", i)))
	}
	opt := testOptions(t)
	opt.PullConcurrency = 2
	root := open(t, opt)
	var mu sync.Mutex
	at := make(map[string]int) // open blob requests by repository
	most := 0
	reg.setFault(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		repository, _, ok := strings.Cut(r.URL.Path, "/blobs/")
		if ok {
			mu.Lock()
			at[repository]++
			most = max(most, len(at))
			mu.Unlock()
			time.Sleep(20 * time.Millisecond)
		}
		next.ServeHTTP(w, r)
		if ok {
			mu.Lock()
			if at[repository]--; at[repository] == 0 {
				delete(at, repository)
			}
			mu.Unlock()
		}
	})
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			_, err := root.Pull(t.Context(), fmt.Sprintf("%s/a%d:1", reg.host, i), PullOptions{})
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	assert.Equal(t, 2, most)
}
