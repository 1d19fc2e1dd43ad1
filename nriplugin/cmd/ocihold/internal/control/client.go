package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/ocihold/ocihold/imagevolume"
	"github.com/ocihold/ocihold/storage"
)

// Client asks the daemon behind a socket. Its methods return ErrDown when there
// is none.
type Client struct{ http http.Client }

var _ Daemon = (*Client)(nil)

// NewClient returns a client of the daemon at socket.
func NewClient(socket string) *Client {
	return &Client{http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			conn, err := dialer.DialContext(ctx, "unix", socket)
			if err != nil {
				return nil, fmt.Errorf("%w: is 'ocihold run' started? %w", ErrDown, err)
			}
			return conn, nil
		},
	}}}
}

// Status asks how the daemon is.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, "/status")
}

// Volumes asks which volumes containers have.
func (c *Client) Volumes(ctx context.Context) ([]imagevolume.Status, error) {
	return get[[]imagevolume.Status](ctx, c, "/volumes")
}

// Images asks which images there are.
func (c *Client) Images(ctx context.Context) (Images, error) {
	return get[Images](ctx, c, "/images")
}

// DiskUse asks what the roots have on their disks.
func (c *Client) DiskUse(ctx context.Context) (DiskUse, error) {
	return get[DiskUse](ctx, c, "/df")
}

// Pull asks for a pull and passes its progress on.
func (c *Client) Pull(ctx context.Context, handler, ref string, progress func(storage.Progress)) (storage.Image, error) {
	return c.follow(ctx, "/pull?"+imageQuery(handler, ref), progress)
}

// Import asks for an import and passes its progress on.
func (c *Client) Import(ctx context.Context, handler, from, name string, progress func(storage.Progress)) (storage.Image, error) {
	return c.follow(ctx, "/import?"+url.Values{"handler": {handler}, "from": {from}, "name": {name}}.Encode(), progress)
}

// follow asks for an image to be brought and reads the events until the last.
func (c *Client) follow(ctx context.Context, path string, progress func(storage.Progress)) (storage.Image, error) {
	body, err := c.do(ctx, http.MethodPost, path)
	if err != nil {
		return storage.Image{}, err
	}
	defer body.Close()
	lines := json.NewDecoder(body)
	for {
		var event pullEvent
		if err := lines.Decode(&event); err != nil {
			return storage.Image{}, fmt.Errorf("the daemon went away meanwhile: %w", err)
		}
		switch {
		case event.Error != "":
			return storage.Image{}, errors.New(event.Error)
		case event.Image != nil:
			return *event.Image, nil
		case event.Progress != nil:
			progress(*event.Progress)
		}
	}
}

// Remove asks for a removal.
func (c *Client) Remove(ctx context.Context, handler, ref string) error {
	body, err := c.do(ctx, http.MethodPost, "/remove?"+imageQuery(handler, ref))
	if err != nil {
		return err
	}
	return body.Close()
}

// Collect asks for a collection.
func (c *Client) Collect(ctx context.Context, handler string, dryRun bool) (Collections, error) {
	return ask[Collections](ctx, c, http.MethodPost, "/collect?"+url.Values{"handler": {handler}, "dry_run": {strconv.FormatBool(dryRun)}}.Encode())
}

func imageQuery(handler, ref string) string {
	return url.Values{"handler": {handler}, "ref": {ref}}.Encode()
}

func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	return ask[T](ctx, c, http.MethodGet, path)
}

func ask[T any](ctx context.Context, c *Client, method, path string) (T, error) {
	var result T
	body, err := c.do(ctx, method, path)
	if err != nil {
		return result, err
	}
	defer body.Close()
	if err := json.NewDecoder(body).Decode(&result); err != nil {
		return result, fmt.Errorf("read the daemon's answer: %w", err)
	}
	return result, nil
}

func (c *Client) do(ctx context.Context, method, path string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, method, "http://ocihold"+path, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		if at, ok := errors.AsType[*url.Error](err); ok {
			err = at.Err
		}
		return nil, fmt.Errorf("ask the daemon: %w", err)
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("read the daemon's answer: %w", err)
	}
	return nil, errors.New(strings.TrimSpace(string(text)))
}
