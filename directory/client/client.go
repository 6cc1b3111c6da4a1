// SPDX-License-Identifier: Apache-2.0

package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

const (
	maxAnswer = 64 << 20
	// DefaultTimeout bounds a call whose context has no deadline; watches have none.
	DefaultTimeout = 45 * time.Second
)

// UnknownOutcomeError: a change was sent and may have been made.
type UnknownOutcomeError struct {
	// Op is what was asked for, as a method and a path.
	Op string
	// Operation is the operation id of the request, or "". Sending the same request
	// with it again tells what became of the first.
	Operation string
	Err       error
}

// Error implements error.
func (e *UnknownOutcomeError) Error() string {
	s := fmt.Sprintf("%s: the change may have been made: %v", e.Op, e.Err)
	if e.Operation != "" {
		return s + "; the same request again, with operation id " + e.Operation + ", tells"
	}
	return s + "; look before you ask again"
}

// Unwrap returns the cause.
func (e *UnknownOutcomeError) Unwrap() error { return e.Err }

// Client is an operator's client. Safe for concurrent use.
type Client struct {
	base       string
	credential string
	plain      bool // http to anywhere
	http       *http.Client
}

// Option adjusts [New].
type Option func(*Client)

// WithHTTPClient uses h instead of the client's own, for a private CA. It must not
// follow redirects or have a timeout.
func WithHTTPClient(h *http.Client) Option { return func(c *Client) { c.http = h } }

// WithPlainHTTP also takes http to any address: for callers inside a deployment's own
// network whose credential is not an operator's.
func WithPlainHTTP() Option { return func(c *Client) { c.plain = true } }

// New returns a client of the operator listener at base: http(s)://host[:port],
// without a path; http only for a loopback address. The error wraps
// [cells.ErrInvalid] and never contains the credential.
func New(base, credential string, opts ...Option) (*Client, error) {
	if credential == "" {
		return nil, fmt.Errorf("%w: the credential is empty", cells.ErrInvalid)
	}
	return Anonymous(base, append([]Option{func(c *Client) { c.credential = credential }}, opts...)...)
}

// Anonymous returns a client that sends no credential, for what wants none. The error
// wraps [cells.ErrInvalid].
func Anonymous(base string, opts ...Option) (*Client, error) {
	c := &Client{}
	for _, o := range opts {
		o(c)
	}
	var err error
	if c.base, err = checkBase(base, c.plain || c.credential == ""); err != nil {
		return nil, err
	}
	if strings.ContainsAny(c.credential, " \t\r\n") {
		return nil, fmt.Errorf("%w: the credential has white space", cells.ErrInvalid)
	}
	if c.http == nil {
		t := &http.Transport{ // no proxy: the credential goes to the directory and nowhere else
			DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			TLSHandshakeTimeout: 5 * time.Second, IdleConnTimeout: 30 * time.Second, ForceAttemptHTTP2: true,
		}
		c.http = &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	return c, nil
}

// CloseIdleConnections frees connections that are not in use.
func (c *Client) CloseIdleConnections() { c.http.CloseIdleConnections() }

func checkBase(base string, plain bool) (string, error) {
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil ||
		strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return "", fmt.Errorf("%w: the directory's address is http(s)://host[:port], without a path", cells.ErrInvalid)
	}
	if u.Scheme == "http" && !plain && !loopback(u.Hostname()) {
		return "", fmt.Errorf("%w: the operator credential is sent over https, or over http to a loopback address; %q is neither",
			cells.ErrInvalid, u.Host)
	}
	return u.Scheme + "://" + u.Host, nil
}

func loopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}

// request is one call.
type request struct {
	method, path string
	query        url.Values
	body         any
	operation    string
}

func (r *request) changes() bool { return r.method != http.MethodGet }

func (r *request) op() string { return r.method + " " + r.path }

// Call is one call of an interface that keeps to this package's rules for errors: see
// the package's documentation. Operation names it in an [UnknownOutcomeError].
type Call struct {
	Method, Path string
	Query        url.Values
	Body         any
	Operation    string
}

// Do makes a call and decodes the answer into out. It returns the status.
func (c *Client) Do(ctx context.Context, q Call, out any) (int, error) {
	return c.call(ctx, request{method: q.Method, path: q.Path, query: q.Query, body: q.Body, operation: q.Operation}, out)
}

// call sends a request and decodes the answer into out. It returns the status.
func (c *Client) call(ctx context.Context, r request, out any) (int, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, DefaultTimeout)
		defer cancel()
	}
	resp, err := c.send(ctx, r)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err == nil {
		err = json.Unmarshal(body, out)
	}
	if err != nil {
		return resp.StatusCode, r.unknown(fmt.Errorf("%w: reading the answer: %w", cells.ErrUnavailable, err))
	}
	return resp.StatusCode, nil
}

// unknown is err, or for a change that was sent an UnknownOutcomeError.
func (r *request) unknown(err error) error {
	if !r.changes() {
		return err
	}
	return &UnknownOutcomeError{Op: r.op(), Operation: r.operation, Err: err}
}

// send sends a request and returns an answer of the directory with status 2xx.
func (c *Client) send(ctx context.Context, r request) (*http.Response, error) {
	var body io.Reader
	if r.body != nil {
		b, err := json.Marshal(r.body)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		body = bytes.NewReader(b)
	}
	target := c.base + r.path
	if len(r.query) > 0 {
		target += "?" + r.query.Encode()
	}
	var sent atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	req, err := http.NewRequestWithContext(ctx, r.method, target, body)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	if c.credential != "" {
		req.Header.Set("Authorization", "Bearer "+c.credential)
	}
	req.Header.Set("Accept", api.ContentJSON)
	if body != nil {
		req.Header.Set("Content-Type", api.ContentJSON)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		err = fmt.Errorf("directory: %w: %w", cells.ErrUnavailable, err)
		if sent.Load() {
			err = r.unknown(err)
		}
		return nil, err
	}
	if resp.StatusCode >= 200 && resp.StatusCode <= 299 && fromDirectory(resp) {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }()
	a, ok := cells.ReadProblem(resp)
	switch {
	case !ok:
		return nil, r.unknown(fmt.Errorf("%w: %s answered %s, which is no answer of a directory", cells.ErrUnavailable, c.base, resp.Status))
	case a.Code == cells.CodeBackendUnavailable:
		return nil, r.unknown(a)
	}
	return nil, a
}

func fromDirectory(resp *http.Response) bool {
	t := resp.Header.Get("Content-Type")
	return resp.Header.Get(api.HeaderRequestID) != "" && (t == api.ContentJSON || t == api.ContentNDJSON)
}

func page(after string, limit int) url.Values {
	q := url.Values{}
	if after != "" && after != "0" {
		q.Set("after", after)
	}
	if limit > 0 {
		q.Set("limit", strconv.Itoa(limit))
	}
	return q
}

func set(q url.Values, name, value string) {
	if value != "" {
		q.Set(name, value)
	}
}

// Cells lists the registered cells in order of their ids.
func (c *Client) Cells(ctx context.Context) ([]api.Cell, error) {
	var out api.CellList
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathCells}, &out)
	return out.Cells, err
}

// Cell returns one cell; NOT_FOUND when it is not registered.
func (c *Client) Cell(ctx context.Context, id cells.CellID) (api.Cell, error) {
	var out api.Cell
	if err := id.Validate(); err != nil {
		return out, err
	}
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathCells + "/" + string(id)}, &out)
	return out, err
}

// PutCell registers a cell or replaces what is registered. CONFLICT when a host, alias
// or issuer belongs to another cell, when another cell is the default one, and
// when spec.Revision is set and not the cell's.
func (c *Client) PutCell(ctx context.Context, id cells.CellID, spec api.CellSpec) (api.Cell, error) {
	var out api.Cell
	if err := id.Validate(); err != nil {
		return out, err
	}
	_, err := c.call(ctx, request{method: http.MethodPut, path: api.PathCells + "/" + string(id), body: spec}, &out)
	return out, err
}

// TenantQuery selects a page of tenants.
type TenantQuery struct {
	Cell cells.CellID
	// After is TenantList.Next of the page before.
	After cells.TenantID
	Limit int
	// Deleted keeps tombstones in the list.
	Deleted bool
}

// Tenants lists routes in tenant order.
func (c *Client) Tenants(ctx context.Context, q TenantQuery) (api.TenantList, error) {
	var out api.TenantList
	v := page(string(q.After), q.Limit)
	set(v, "cell", string(q.Cell))
	if q.Deleted {
		v.Set("deleted", "1")
	}
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathTenants, query: v}, &out)
	return out, err
}

func tenantPath(t cells.TenantID) (string, error) {
	return api.PathTenants + "/" + url.PathEscape(string(t)), t.Validate()
}

// Tenant returns a tenant's route and its last move; UNKNOWN_TENANT when it has no
// route and there is no default cell.
func (c *Client) Tenant(ctx context.Context, t cells.TenantID) (api.Tenant, error) {
	var out api.Tenant
	path, err := tenantPath(t)
	if err == nil {
		_, err = c.call(ctx, request{method: http.MethodGet, path: path}, &out)
	}
	return out, err
}

// DeleteTenant removes a tenant. Done is false in the answer when the directory
// goes on with it in the background.
func (c *Client) DeleteTenant(ctx context.Context, t cells.TenantID, actor string) (api.Deleted, error) {
	var out api.Deleted
	path, err := tenantPath(t)
	if err == nil {
		v := url.Values{}
		set(v, "actor", actor)
		_, err = c.call(ctx, request{method: http.MethodDelete, path: path, query: v}, &out)
	}
	return out, err
}

// Place gives a tenant a cell, or tells which one it has: compare Cell with what
// was asked for.
func (c *Client) Place(ctx context.Context, r api.PlacementRequest) (api.Placement, error) {
	var out api.Placement
	_, err := c.call(ctx, request{method: http.MethodPost, path: api.PathPlacements, body: r, operation: r.OperationID}, &out)
	return out, err
}

// Members lists the processes that were heard and have not lapsed.
func (c *Client) Members(ctx context.Context) ([]api.Member, error) {
	var out api.MemberList
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathMembers}, &out)
	return out.Members, err
}

// AuditQuery selects a page of the audit.
type AuditQuery struct {
	Tenant cells.TenantID
	// After is AuditList.Next of the page before.
	After int64
	Limit int
}

// Audit lists changes, newest first.
func (c *Client) Audit(ctx context.Context, q AuditQuery) (api.AuditList, error) {
	var out api.AuditList
	v := page(strconv.FormatInt(q.After, 10), q.Limit)
	set(v, "tenant", string(q.Tenant))
	_, err := c.call(ctx, request{method: http.MethodGet, path: api.PathAudit, query: v}, &out)
	return out, err
}

// ErrWatchBroken: a watch ended before its end. Watch again.
var ErrWatchBroken = errors.New("client: the watch broke")
