// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Client calls the memory API of one tenant through an edge. Safe for concurrent use.
type Client struct {
	Base   string // of the edge, as http://127.0.0.1:8080
	Tenant string
	// Header names the tenant to the edge; "" means X-Tenant.
	Header string
	HTTP   *http.Client
}

// NewHTTPClient returns a client with enough idle connections for n callers. It
// never retries by itself and follows no redirect.
func NewHTTPClient(n int) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			MaxIdleConns: 2 * n, MaxIdleConnsPerHost: 2 * n, IdleConnTimeout: time.Minute, DisableCompression: true,
			DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Item is an answer of the memory API.
type Item struct {
	Namespace string          `json:"namespace"`
	Key       string          `json:"key"`
	Value     json.RawMessage `json:"value"`
	Version   int64           `json:"version"`
	EventSeq  uint64          `json:"event_seq"`
	Epoch     uint64          `json:"epoch"`
	Cell      string          `json:"cell"`
	Deleted   bool            `json:"deleted"`
}

// StatusError is an answer that is not a success.
type StatusError struct {
	Status int
	Code   string
	Detail string
	Body   string
	// Version is the memory's present one in a VERSION_CONFLICT.
	Version int64
}

// Error implements error.
func (e *StatusError) Error() string {
	return fmt.Sprintf("status %d %s %s", e.Status, e.Code, e.Detail)
}

func (c *Client) request(ctx context.Context, method, path string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, body)
	if err != nil {
		return nil, err
	}
	h := c.Header
	if h == "" {
		h = "X-Tenant"
	}
	req.Header.Set(h, c.Tenant)
	return req, nil
}

// Call posts in as JSON and decodes the answer into out (which may be nil). An
// answer that is not a success is a *StatusError; any other error means that
// the outcome is unknown.
func (c *Client) Call(ctx context.Context, op string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := c.request(ctx, http.MethodPost, "/v1/memory."+op, bytes.NewReader(b))
	if err != nil {
		return err
	}
	req.GetBody = nil // the transport must not send it twice
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		se := &StatusError{Status: resp.StatusCode, Body: string(data[:min(len(data), 500)])}
		_ = json.Unmarshal(data, se)
		se.Status = resp.StatusCode
		return se
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

// Set writes one memory; ifVersion < 0 writes without a condition.
func (c *Client) Set(ctx context.Context, ns, key string, value any, ifVersion int64) (Item, error) {
	in := map[string]any{"namespace": ns, "key": key, "value": value}
	if ifVersion >= 0 {
		in["if_version"] = ifVersion
	}
	var it Item
	err := c.Call(ctx, "set", in, &it)
	return it, err
}

// Get reads one memory.
func (c *Client) Get(ctx context.Context, ns, key string) (Item, error) {
	var it Item
	err := c.Call(ctx, "get", map[string]any{"namespace": ns, "key": key}, &it)
	return it, err
}

// History returns all versions of a memory, newest first.
func (c *Client) History(ctx context.Context, ns, key string) ([]Item, error) {
	var all []Item
	before := int64(0)
	for {
		var p struct {
			Items  []Item
			Before int64
		}
		err := c.Call(ctx, "history", map[string]any{"namespace": ns, "key": key, "before": before, "limit": 1000}, &p)
		if se, ok := err.(*StatusError); ok && se.Status == http.StatusNotFound {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, p.Items...)
		if p.Before == 0 {
			return all, nil
		}
		before = p.Before
	}
}

// Fill writes rows memories of size bytes each into a namespace, in bulk.
func (c *Client) Fill(ctx context.Context, ns string, rows, size int, done func(int)) error {
	const per = 500
	pad := strings.Repeat("x", max(0, size-30))
	for i := 0; i < rows; i += per {
		var items []map[string]any
		for j := i; j < min(rows, i+per); j++ {
			items = append(items, map[string]any{"namespace": ns, "key": fmt.Sprintf("row-%08d", j), "value": map[string]any{"n": j, "pad": pad}})
		}
		if err := c.Call(ctx, "bulk_set", map[string]any{"items": items}, nil); err != nil {
			return fmt.Errorf("fill at row %d: %w", i, err)
		}
		done(min(rows, i+per))
	}
	return nil
}

// Event is one event of the tenant's stream.
type Event struct {
	Seq   uint64 `json:"event_seq"`
	Epoch uint64 `json:"epoch"`
	Cell  string `json:"cell"`
	ID    string `json:"id"`
	Type  string `json:"type"`
}

// Stream follows the tenant's events after a sequence number, reconnecting with
// Last-Event-ID as a browser does, until ctx ends or on returns an error.
// Reconnections are counted through again.
func (c *Client) Stream(ctx context.Context, after uint64, on func(Event) error, again func(err error)) error {
	for {
		err := c.streamOnce(ctx, &after, on)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var stop *stopError
		if e, ok := err.(*stopError); ok {
			stop = e
			return stop.err
		}
		if again != nil {
			again(err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

type stopError struct{ err error }

func (s *stopError) Error() string { return s.err.Error() }

func (c *Client) streamOnce(ctx context.Context, after *uint64, on func(Event) error) error {
	req, err := c.request(ctx, http.MethodGet, "/v1/events", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Last-Event-ID", strconv.FormatUint(*after, 10))
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
		return &StatusError{Status: resp.StatusCode, Body: string(b)}
	}
	sc := bufio.NewScanner(resp.Body)
	sc.Buffer(make([]byte, 64<<10), 16<<20)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue
		}
		var e Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return &stopError{err}
		}
		if err := on(e); err != nil {
			return &stopError{err}
		}
		*after = e.Seq
	}
	return sc.Err()
}
