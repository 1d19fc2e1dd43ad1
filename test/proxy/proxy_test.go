package proxy_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/ocihold/ocihold/test/proxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var body = bytes.Repeat([]byte("0123456789"), 10_000)

// answer sends body.
func answer(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Host-Seen", r.Host)
	w.Header().Set("Proto-Seen", r.Header.Get("X-Forwarded-Proto"))
	_, _ = w.Write(body)
}

// serve runs a proxy before a server of body, and returns its URL and control.
func serve(t *testing.T) (string, *proxy.Client) {
	t.Helper()
	return serveFrom(t, answer)
}

func serveFrom(t *testing.T, answer http.HandlerFunc) (string, *proxy.Client) {
	t.Helper()
	listen := func(name string, h http.Handler) string {
		socket := filepath.Join(t.TempDir(), name)
		l, err := net.Listen("unix", socket)
		require.NoError(t, err)
		s := httptest.NewUnstartedServer(h)
		require.NoError(t, s.Listener.Close())
		s.Listener = l
		s.Start()
		t.Cleanup(s.Close)
		return socket
	}
	registry := listen("r", answer)
	p := proxy.New(registry, "https")
	clients := httptest.NewServer(p.Handler())
	t.Cleanup(clients.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	t.Cleanup(p.CloseIdle)
	return clients.URL, proxy.NewClient(listen("c", p.Control()))
}

func get(ctx context.Context, url string) (*http.Response, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	got, err := io.ReadAll(resp.Body)
	return resp, got, err
}

func TestWithoutRulesNothingChanges(t *testing.T) {
	url, _ := serve(t)
	resp, got, err := get(t.Context(), url+"/v2/x")
	require.NoError(t, err)
	assert.Equal(t, body, got)
	assert.Equal(t, url, "http://"+resp.Header.Get("Host-Seen"))
	assert.Equal(t, "https", resp.Header.Get("Proto-Seen"))
}

func TestRules(t *testing.T) {
	at := int64(12_345)
	altered := bytes.Clone(body)
	altered[at] ^= 0xff
	url, control := serve(t)
	for _, tt := range []struct {
		name   string
		rule   proxy.Rule
		status int
		body   []byte
		err    string
	}{
		{"status", proxy.Rule{Status: 503}, 503, []byte("Service Unavailable\n"), ""},
		{"cut", proxy.Rule{Cut: &at}, 200, body[:at], "unexpected EOF"},
		{"flip", proxy.Rule{Flip: &at}, 200, altered, ""},
		{"other method", proxy.Rule{Method: "PUT", Status: 503}, 200, body, ""},
		{"other path", proxy.Rule{Path: "^/v2/y", Status: 503}, 200, body, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.NoError(t, control.Add(t.Context(), tt.rule))
			resp, got, err := get(t.Context(), url+"/v2/x")
			require.NotNil(t, resp)
			assert.Equal(t, tt.status, resp.StatusCode)
			assert.Equal(t, tt.body, got)
			if tt.err == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.err)
			}
			require.NoError(t, control.Clear(t.Context()))
			_, got, err = get(t.Context(), url+"/v2/x")
			require.NoError(t, err)
			assert.Equal(t, body, got, "after clear")
		})
	}
}

func TestCutAtOnce(t *testing.T) {
	url, control := serve(t)
	require.NoError(t, control.Add(t.Context(), proxy.Rule{Cut: new(int64)}))
	_, _, err := get(t.Context(), url+"/")
	require.ErrorContains(t, err, "EOF")
}

func TestSkipAndTimes(t *testing.T) {
	url, control := serve(t)
	require.NoError(t, control.Add(t.Context(), proxy.Rule{Skip: 1, Times: 2, Status: 500}))
	var got []int
	for range 4 {
		resp, _, err := get(t.Context(), url+"/")
		require.NoError(t, err)
		got = append(got, resp.StatusCode)
	}
	assert.Equal(t, []int{200, 500, 500, 200}, got)
}

func TestStallEndsWithTheRules(t *testing.T) {
	url, control := serve(t)
	at := int64(500)
	require.NoError(t, control.Add(t.Context(), proxy.Rule{Stall: &at}))

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, got, err := get(ctx, url+"/")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.Equal(t, body[:at], got, "what precedes the stall arrives")

	done := make(chan []byte)
	go func() {
		_, got, _ := get(context.Background(), url+"/")
		done <- got
	}()
	require.Eventually(t, func() bool {
		counts, err := control.Counts(t.Context())
		return err == nil && counts["GET /"] == 2
	}, 5*time.Second, 10*time.Millisecond)
	require.NoError(t, control.Clear(t.Context()))
	assert.Equal(t, body, <-done, "a released response goes on")
}

// The registry may answer only after the rules that the request met are gone.
func TestClearBeforeTheAnswer(t *testing.T) {
	asked, goOn := make(chan struct{}), make(chan struct{})
	url, control := serveFrom(t, func(w http.ResponseWriter, r *http.Request) {
		close(asked)
		<-goOn
		answer(w, r)
	})
	require.NoError(t, control.Add(t.Context(), proxy.Rule{Stall: new(int64)}))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	done := make(chan error)
	go func() {
		_, got, err := get(ctx, url+"/")
		assert.Equal(t, body, got)
		done <- err
	}()
	<-asked
	require.NoError(t, control.Clear(t.Context()))
	close(goOn)
	require.NoError(t, <-done)
}

func TestCounts(t *testing.T) {
	url, control := serve(t)
	for _, path := range []string{"/a", "/b", "/a"} {
		_, _, err := get(t.Context(), url+path)
		require.NoError(t, err)
	}
	counts, err := control.Counts(t.Context())
	require.NoError(t, err)
	assert.Equal(t, map[string]int{"GET /a": 2, "GET /b": 1}, counts)
	require.NoError(t, control.ResetCounts(t.Context()))
	counts, err = control.Counts(t.Context())
	require.NoError(t, err)
	assert.Empty(t, counts)
}

func TestBadRulesAreRefused(t *testing.T) {
	_, control := serve(t)
	at := int64(1)
	for name, rule := range map[string]proxy.Rule{
		"nothing to do": {},
		"two things":    {Status: 500, Cut: &at},
		"path":          {Path: "(", Status: 500},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorContains(t, control.Add(t.Context(), rule), "400 Bad Request")
		})
	}
}
