// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Client is a [cells.RoutingTable] that another process serves. Safe for
// concurrent use.
type Client struct {
	http      http.Client
	base      string // scheme, host and path before Path
	baseErr   error
	timeout   time.Duration
	heartbeat time.Duration

	life context.Context // ends with Close
	end  context.CancelFunc

	mu     sync.Mutex // guards closed against going.Add
	closed bool
	going  sync.WaitGroup // the readers of watches
}

var _ cells.RoutingTable = (*Client)(nil)

// ClientOption configures a Client.
type ClientOption func(*Client)

// WithTimeout bounds each get, list and compare-and-set, and the begin of a watch;
// 10 s by default. A shorter deadline of the context counts as well.
func WithTimeout(d time.Duration) ClientOption { return func(c *Client) { c.timeout = d } }

// WithHeartbeat sets how often the server is to give a sign of its connection
// during a watch, 50 ms to 1 min; 2 s by default. After three without one the
// watch fails with [cells.ErrUnavailable].
func WithHeartbeat(d time.Duration) ClientOption {
	return func(c *Client) { c.heartbeat = min(max(d, minHeartbeat), maxHeartbeat) }
}

// NewClient uses the table that a [Handler] serves below base, for instance
// https://directory.example:7001. Of hc it takes transport and cookies, not its
// timeout (a watch lasts) nor its way with redirects (none is followed, since a
// compare-and-set must not be sent twice); nil is a client with defaults. A
// malformed base surfaces on use, as [cells.ErrInvalid].
func NewClient(hc *http.Client, base string, opts ...ClientOption) *Client {
	c := &Client{base: strings.TrimRight(base, "/"), timeout: 10 * time.Second, heartbeat: 2 * time.Second}
	if hc != nil {
		c.http.Transport, c.http.Jar = hc.Transport, hc.Jar
	}
	c.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		c.baseErr = fmt.Errorf("%w: base url of the routing table: want http(s)://host[:port]", cells.ErrInvalid)
	}
	for _, o := range opts {
		o(c)
	}
	c.life, c.end = context.WithCancel(context.Background())
	return c
}

// Close ends every watch and every later call with [cells.ErrClosed]. The
// transport's idle connections stay its owner's. It may be called again.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.end()
	c.going.Wait()
	return nil
}

var errClientClosed = fmt.Errorf("%w: table", cells.ErrClosed)

func (c *Client) begin(ctx context.Context) error {
	if c.life.Err() != nil {
		return errClientClosed
	}
	if ctx.Err() != nil {
		return endOf(ctx)
	}
	return c.baseErr
}

func endOf(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == nil || errors.Is(cause, err) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// Get implements [cells.RoutingTable].
func (c *Client) Get(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	if err := c.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	if err := tenant.Validate(); err != nil {
		return cells.TenantRoute{}, err
	}
	ref := "/" + url.PathEscape(string(tenant))
	if tenant == "." || tenant == ".." { // whatever lies between would take them for path steps
		ref = "?tenant=" + string(tenant)
	}
	var r cells.TenantRoute
	if err := c.call(ctx, http.MethodGet, ref, nil, &r); err != nil {
		return cells.TenantRoute{}, err
	}
	if r.TenantID != tenant {
		return cells.TenantRoute{}, fmt.Errorf("%w: asked for %s, the remote table answers with %q", cells.ErrUnavailable, tenant, r.TenantID)
	}
	return r, checkRow(&r)
}

// checkRow refuses a row that no table would hold.
func checkRow(r *cells.TenantRoute) error {
	if err := cells.ValidateRoute(*r); err != nil {
		return fmt.Errorf("remote table: %w", err)
	}
	if r.Revision == 0 {
		return fmt.Errorf("%w: remote table: row of %s without a revision", cells.ErrInvalid, r.TenantID)
	}
	return nil
}

// List implements [cells.RoutingTable]. A page may hold fewer rows than Limit
// although more follow.
func (c *Client) List(ctx context.Context, opts cells.ListOptions) (cells.RoutePage, error) {
	if err := c.begin(ctx); err != nil {
		return cells.RoutePage{}, err
	}
	if err := opts.Validate(); err != nil {
		return cells.RoutePage{}, err
	}
	q := url.Values{"limit": {strconv.Itoa(opts.PageSize())}}
	if opts.After != "" {
		q.Set("after", string(opts.After))
	}
	if opts.Cell != "" {
		q.Set("cell", string(opts.Cell))
	}
	var p page
	if err := c.call(ctx, http.MethodGet, "?"+q.Encode(), nil, &p); err != nil {
		return cells.RoutePage{}, err
	}
	last := opts.After
	for i := range p.Routes {
		if err := checkRow(&p.Routes[i]); err != nil {
			return cells.RoutePage{}, err
		}
		if p.Routes[i].TenantID <= last {
			return cells.RoutePage{}, fmt.Errorf("%w: remote table: page out of order at %s", cells.ErrInvalid, p.Routes[i].TenantID)
		}
		last = p.Routes[i].TenantID
	}
	if p.Next != "" && (len(p.Routes) == 0 || p.Next != last) {
		return cells.RoutePage{}, fmt.Errorf("%w: remote table: a page that ends at %q goes on after %q", cells.ErrInvalid, last, p.Next)
	}
	if len(p.Routes) == 0 {
		p.Routes = nil
	}
	return cells.RoutePage{Routes: p.Routes, Revision: p.Revision, Next: p.Next}, nil
}

// CompareAndSet implements [cells.RoutingTable]. It is sent once.
func (c *Client) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if err := c.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	next = cells.CanonicalRoute(next)
	if err := cells.ValidateRoute(next); err != nil {
		return cells.TenantRoute{}, err
	}
	body, err := json.Marshal(swapBody{Old: old, Route: next})
	if err != nil {
		return cells.TenantRoute{}, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	var r cells.TenantRoute
	if err := c.call(ctx, http.MethodPost, "", body, &r); err != nil {
		return cells.TenantRoute{}, err
	}
	if r.TenantID != next.TenantID || r.Revision <= old || r.Stamp != next.Stamp {
		return cells.TenantRoute{}, fmt.Errorf("%w: the remote table answers a change of %s with another row", cells.ErrUnavailable, next.TenantID)
	}
	return r, nil
}

// call makes one request and decodes its answer.
func (c *Client) call(ctx context.Context, method, ref string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	res, err := c.send(ctx, method, ref, body)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if err := wantType(res, typeJSON); err != nil {
		return err
	}
	b, err := readBounded(res.Body, maxAnswer)
	if err != nil {
		return c.failed(ctx, err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("%w: remote table: answer: %v", cells.ErrUnavailable, err)
	}
	return nil
}

// send returns the answer if it is a good one, else the error that it tells.
func (c *Client) send(ctx context.Context, method, ref string, body []byte) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		// Not a bytes.Reader by itself: without GetBody the transport cannot send the
		// body again on another connection.
		r = io.MultiReader(bytes.NewReader(body))
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+Path+ref, r)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", cells.ErrInvalid, err)
	}
	if body != nil {
		req.ContentLength = int64(len(body))
		req.Header.Set("Content-Type", typeJSON)
		req.Header.Set(HeaderWire, wireVersion)
	}
	req.Header.Set("Accept", typeJSON+", "+typeNDJSON+", "+typeProblem)
	res, err := c.http.Do(req)
	if err != nil {
		return nil, c.failed(ctx, err)
	}
	if res.StatusCode == http.StatusOK {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }()
	b, err := readBounded(res.Body, 64<<10)
	var f failure
	if err == nil && wantType(res, typeProblem) == nil && json.Unmarshal(b, &f) == nil && f.Code != "" {
		return nil, f.err()
	}
	return nil, fmt.Errorf("%w: remote table: %s answers %s", cells.ErrUnavailable, c.base, res.Status)
}

func wantType(res *http.Response, want string) error {
	if got, _, err := mime.ParseMediaType(res.Header.Get("Content-Type")); err != nil || got != want {
		return fmt.Errorf("%w: remote table: an answer of type %q, want %s", cells.ErrUnavailable, res.Header.Get("Content-Type"), want)
	}
	return nil
}

func readBounded(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("an answer of more than %d bytes", limit)
	}
	return b, err
}

// failed translates an error of the transport. The caller's context comes first;
// the client's own timeout is the server being unavailable.
func (c *Client) failed(ctx context.Context, err error) error {
	if c.life.Err() != nil {
		return errClientClosed
	}
	// url.Error repeats the URL, which holds nothing secret but says nothing new.
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	if ctx.Err() != nil {
		return &endedError{endOf(ctx), err}
	}
	return fmt.Errorf("%w: remote table: %v", cells.ErrUnavailable, err)
}

// endedError is a request that ended with its context, the caller's or that of the
// client's timeout.
type endedError struct{ end, err error }

func (e *endedError) Error() string   { return fmt.Sprintf("remote table: %v: %v", e.end, e.err) }
func (e *endedError) Unwrap() []error { return []error{cells.ErrUnavailable, e.end} }
