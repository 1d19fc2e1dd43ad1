package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
)

// Control serves the control interface: POST and DELETE /rules, GET and DELETE
// /counts.
func (s *Server) Control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /rules", func(w http.ResponseWriter, r *http.Request) {
		var rule Rule
		dec := json.NewDecoder(r.Body)
		dec.DisallowUnknownFields()
		err := dec.Decode(&rule)
		if err == nil {
			err = s.add(rule)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	})
	mux.HandleFunc("DELETE /rules", func(http.ResponseWriter, *http.Request) { s.clear() })
	mux.HandleFunc("GET /counts", func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(s.counted())
	})
	mux.HandleFunc("DELETE /counts", func(http.ResponseWriter, *http.Request) { s.resetCounts() })
	return mux
}

// Client sets rules and reads counts of a running proxy.
type Client struct {
	http http.Client
}

// NewClient returns a client of the control interface on a unix socket.
func NewClient(socket string) *Client {
	return &Client{http: http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}}}
}

// Add appends a rule.
func (c *Client) Add(ctx context.Context, r Rule) error {
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return c.call(ctx, http.MethodPost, "/rules", body, nil)
}

// Clear drops all rules and lets stalled responses go on.
func (c *Client) Clear(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/rules", nil, nil)
}

// Counts returns how often each "METHOD path" was asked for since the start or
// the last ResetCounts.
func (c *Client) Counts(ctx context.Context) (map[string]int, error) {
	var counts map[string]int
	err := c.call(ctx, http.MethodGet, "/counts", nil, &counts)
	return counts, err
}

// ResetCounts forgets all counts.
func (c *Client) ResetCounts(ctx context.Context) error {
	return c.call(ctx, http.MethodDelete, "/counts", nil, nil)
}

func (c *Client) call(ctx context.Context, method, path string, body []byte, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://proxy"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("ask the registry proxy: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Errorf("ask the registry proxy: %s: %s", resp.Status, bytes.TrimSpace(text))
	}
	if into == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(into)
}
