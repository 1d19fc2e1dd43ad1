// Package proxy stands between clients and a real registry and spoils what
// passes: it cuts, stalls and alters response bodies, answers with a status of
// its own, and counts requests. With no rules set it changes nothing.
//
// A [Server] serves clients with Handler and its control interface with
// Control; a [Client] talks to that control interface from another process.
// Rules are tried in the order they were added; the first that applies decides.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"sync"
)

// Rule says which requests are spoilt, and how. Of Status, Cut, Stall and Flip
// exactly one is set.
type Rule struct {
	// Method is the HTTP method, "" for any.
	Method string `json:"method,omitempty"`
	// Path is a regular expression that some part of the URL path must match.
	Path string `json:"path,omitempty"`
	// Skip is the number of matching requests that pass untouched first.
	Skip int `json:"skip,omitempty"`
	// Times is the number of requests to spoil; 0 means all.
	Times int `json:"times,omitempty"`

	// Status is answered without asking the registry.
	Status int `json:"status,omitempty"`
	// Cut closes the connection after this many bytes of the body; with 0 not
	// even the header is sent.
	Cut *int64 `json:"cut,omitempty"`
	// Stall sends nothing more after this many bytes of the body, until the
	// client leaves or the rules are cleared.
	Stall *int64 `json:"stall,omitempty"`
	// Flip inverts the body's byte at this offset.
	Flip *int64 `json:"flip,omitempty"`
}

// Validate checks that the rule does exactly one thing and that Path compiles.
func (r Rule) Validate() error {
	n := 0
	for _, set := range []bool{r.Status != 0, r.Cut != nil, r.Stall != nil, r.Flip != nil} {
		if set {
			n++
		}
	}
	if n != 1 {
		return errors.New("a rule sets exactly one of status, cut, stall and flip")
	}
	if _, err := regexp.Compile(r.Path); err != nil {
		return fmt.Errorf("path of a rule: %w", err)
	}
	return nil
}

// rule is a Rule with what has become of it.
type rule struct {
	Rule
	path   *regexp.Regexp
	seen   int
	spoilt int
}

// Server is the proxy. It is made by [New].
type Server struct {
	reverse *httputil.ReverseProxy

	mu       sync.Mutex
	rules    []*rule
	released chan struct{} // closed when the rules are cleared
	counts   map[string]int
}

// hit is a rule that a request has met, and what ends its stall: the clearing of
// the rules that it was one of.
type hit struct {
	*Rule
	released <-chan struct{}
}

type hitKey struct{}

// New returns a proxy before the registry that listens on the unix socket.
// scheme is what clients use, "http" or "https".
func New(socket, scheme string) *Server {
	s := &Server{released: make(chan struct{}), counts: map[string]int{}}
	s.reverse = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "registry"})
			r.Out.Host = r.In.Host
			r.Out.Header.Set("X-Forwarded-Proto", scheme)
		},
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", socket)
			},
			DisableCompression: true,
		},
		FlushInterval:  -1, // what precedes a cut or stall must reach the client
		ModifyResponse: s.spoil,
	}
	return s
}

// Handler serves the clients of the registry.
func (s *Server) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		met, ok := s.match(r)
		if ok && met.Status != 0 {
			http.Error(w, http.StatusText(met.Status), met.Status)
			return
		}
		if ok {
			r = r.WithContext(context.WithValue(r.Context(), hitKey{}, met))
		}
		s.reverse.ServeHTTP(w, r)
	})
}

func (s *Server) match(r *http.Request) (met hit, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[r.Method+" "+r.URL.Path]++
	for _, c := range s.rules {
		if (c.Method != "" && c.Method != r.Method) || !c.path.MatchString(r.URL.Path) {
			continue
		}
		c.seen++
		if c.seen <= c.Skip || (c.Times > 0 && c.spoilt >= c.Times) {
			continue
		}
		c.spoilt++
		return hit{&c.Rule, s.released}, true
	}
	return hit{}, false
}

func (s *Server) spoil(resp *http.Response) error {
	if met, ok := resp.Request.Context().Value(hitKey{}).(hit); ok {
		resp.Body = &spoiltBody{ReadCloser: resp.Body, hit: met, client: resp.Request.Context()}
	}
	return nil
}

// CloseIdle closes the connections to the registry that no request uses.
func (s *Server) CloseIdle() { s.reverse.Transport.(*http.Transport).CloseIdleConnections() }

// add appends a rule.
func (s *Server) add(r Rule) error {
	if err := r.Validate(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = append(s.rules, &rule{Rule: r, path: regexp.MustCompile(r.Path)})
	return nil
}

// clear drops all rules and lets stalled bodies go on.
func (s *Server) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = nil
	close(s.released)
	s.released = make(chan struct{})
}

func (s *Server) counted() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.counts)
}

func (s *Server) resetCounts() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.counts)
}

var errCut = errors.New("connection cut by rule")

// spoiltBody is a response body with a rule applied to it.
type spoiltBody struct {
	io.ReadCloser
	hit

	client  context.Context //nolint:containedctx // the life of one request's body
	offset  int64
	stalled bool
}

func (b *spoiltBody) Read(p []byte) (int, error) {
	limit := b.Cut
	if b.Stall != nil && !b.stalled {
		limit = b.Stall
	}
	if limit != nil {
		left := *limit - b.offset
		if left <= 0 {
			if b.Cut != nil {
				return 0, errCut
			}
			b.stalled = true
			select {
			case <-b.client.Done():
				return 0, b.client.Err()
			case <-b.released:
			}
			return b.Read(p)
		}
		p = p[:min(int64(len(p)), left)]
	}
	n, err := b.ReadCloser.Read(p)
	if f := b.Flip; f != nil && *f >= b.offset && *f < b.offset+int64(n) {
		p[*f-b.offset] ^= 0xff
	}
	b.offset += int64(n)
	return n, err
}
