// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/forward"
	"github.com/cloister-dev/cloister/edge/rules"
	"github.com/cloister-dev/cloister/edge/topology"
)

// CellTable is the view of the cells that a router of deployments decides by;
// [*celltable.Watcher] is one. All of it answers from memory.
type CellTable interface {
	// Index is nil while nothing is known.
	Index() *rules.Index
	Age() time.Duration
	Changed() <-chan struct{}
	Status() celltable.Status
}

// Deployment makes a server the router in front of whole deployments.
type Deployment struct {
	// Table decides. The caller keeps it open for longer than the server runs.
	Table CellTable
	// Own serves the paths under /cells/, on every host; nil serves none. It is given
	// paths without any encoding or detour only. Its requests' RemoteAddr is the client's
	// address, as TrustedProxies have it. It is in front of the world.
	Own http.Handler
}

// DefaultConnectWait is how long a request to a deployment waits for it to take
// connections, unless [Config] says otherwise.
const DefaultConnectWait = time.Second

// NewDeployment makes a server that takes each request to a whole deployment, by the
// rules of package rules. Of cfg, Extractors, AdmissionKey and Witness stay empty;
// https upstreams are checked by the system's CAs unless Forward.TLS is set. Errors wrap
// [cells.ErrInvalid].
func NewDeployment(cfg Config, d Deployment) (*Server, error) {
	switch {
	case d.Table == nil:
		return nil, fmt.Errorf("%w: edge: no table of cells", cells.ErrInvalid)
	case len(cfg.Extractors) > 0 || len(cfg.AdmissionKey) > 0 || cfg.Witness != nil:
		return nil, fmt.Errorf("%w: edge: extractors, admission keys and witnesses are for tenants' routes", cells.ErrInvalid)
	}
	if cfg.ConnectWait == 0 {
		cfg.ConnectWait = DefaultConnectWait
	}
	if cfg.Forward.TLS == nil {
		system := &tls.Config{MinVersion: tls.VersionTLS12}
		cfg.Forward.TLS = func(cells.CellID) *tls.Config { return system }
	}
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	s, err := newServer(cfg, tableRoutes{d.Table}, tableTopology{d.Table}, nil)
	if err != nil {
		return nil, err
	}
	s.deploy = &d
	return s, nil
}

// own answers what is the router's, and reports whether it was that.
func (x *exchange) own() bool {
	d := x.s.deploy
	raw := x.in.URL.EscapedPath()
	if d == nil || d.Own == nil || !strings.HasPrefix(raw, "/cells/") || x.in.Method == http.MethodConnect {
		return false
	}
	if plain := path.Clean(raw); plain != strings.TrimSuffix(raw, "/") || strings.ContainsAny(raw, "%\\;") {
		return false // NOT_SERVED, as whatever is under /cells/ and nobody's
	}
	x.outcome, x.rule = outcomeOwn, string(rules.RuleOwn)
	r := x.in
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil && x.client.Addr != host {
		r = r.WithContext(r.Context())
		r.RemoteAddr = net.JoinHostPort(x.client.Addr, "0")
	}
	d.Own.ServeHTTP(&x.rec, r)
	return true
}

// ruleRequest is what the rules look at.
func ruleRequest(r *http.Request) rules.Request {
	return rules.Request{Method: r.Method, Host: r.Host, Path: r.URL.EscapedPath(), Authorization: r.Header["Authorization"]}
}

// decide finds the deployment that the request goes to.
func (x *exchange) decide() *cells.Answer {
	r := x.in
	table := x.s.deploy.Table
	index := table.Index()
	if index == nil {
		return &cells.Answer{Code: cells.CodeBackendUnavailable, Detail: "the directory was not read yet", RetryAfter: time.Second}
	}
	if r.URL.User != nil || r.URL.Opaque != "" {
		return &cells.Answer{Code: cells.CodeBadRequest, Detail: "the request's target is malformed", Age: table.Age()}
	}
	q := ruleRequest(r)
	if index.NeedsRevoked(q) {
		token, a := x.revoked()
		if a != nil {
			a.Age = table.Age()
			return a
		}
		q.Revoked = token
	}
	d := index.Decide(q)
	x.cell, x.rule = d.Cell, string(d.Rule)
	if d.Answer != "" {
		a := &cells.Answer{Code: d.Answer, Detail: d.Detail, Age: table.Age(), Err: d.Err}
		if d.Answer == cells.CodeBackendUnavailable {
			a.RetryAfter = time.Second
		}
		return a
	}
	x.to = &d
	return nil
}

// maxForm bounds the form of a revocation, in bytes.
const maxForm = 64 << 10

// revoked reads the token that a revocation names, which is in its body (RFC 7009). The
// body can still be forwarded. "" when there is none.
func (x *exchange) revoked() (string, *cells.Answer) {
	r := x.in
	bad := func(detail string, err error) (string, *cells.Answer) {
		return "", &cells.Answer{Code: cells.CodeBadRequest, Detail: detail, Err: err}
	}
	if r.ContentLength == 0 || r.Body == nil {
		return "", nil
	}
	types := r.Header["Content-Type"]
	if len(types) != 1 || len(r.Header["Content-Encoding"]) > 0 {
		return bad("a revocation is one form, which is not encoded", nil)
	}
	if kind, _, err := mime.ParseMediaType(types[0]); err != nil || kind != "application/x-www-form-urlencoded" {
		return "", nil // no revocation by RFC 7009
	}
	tooLarge := &cells.Answer{Code: cells.CodeTooLarge}
	if r.ContentLength > maxForm {
		return "", tooLarge
	}
	rc := http.NewResponseController(x.rec.w)
	_ = rc.SetReadDeadline(time.Now().Add(x.s.cfg.ReadHeaderTimeout))
	form, err := io.ReadAll(io.LimitReader(r.Body, maxForm+1))
	_ = rc.SetReadDeadline(time.Time{})
	switch {
	case err != nil:
		return bad("the body could not be read", err)
	case len(form) > maxForm:
		return "", tooLarge
	}
	r.Body = struct {
		io.Reader
		io.Closer
	}{bytes.NewReader(form), r.Body}
	values, err := url.ParseQuery(string(form))
	switch tokens := values["token"]; {
	case err != nil:
		return bad("the form is malformed", err)
	case len(tokens) > 1:
		return bad("the form names more than one token", nil)
	case len(tokens) == 1:
		return tokens[0], nil
	}
	return "", nil
}

// tableRoutes has no routes of tenants: it says how good the table of cells is.
type tableRoutes struct{ t CellTable }

func (r tableRoutes) Lookup(tenant cells.TenantID) cells.Decision {
	return cells.Decision{Tenant: tenant, Age: r.t.Age()}
}

func (r tableRoutes) Refresh(context.Context, cells.TenantID) (cells.TenantRoute, error) {
	return cells.TenantRoute{}, cells.ErrNotFound
}

func (r tableRoutes) Wait(ctx context.Context, _ cells.TenantID, _ cells.Revision) (cells.TenantRoute, error) {
	<-ctx.Done()
	return cells.TenantRoute{}, context.Cause(ctx)
}

func (r tableRoutes) Status() cells.RouterStatus {
	s := r.t.Status()
	return cells.RouterStatus{Age: s.Age, Stale: s.Stale, Source: s.Source, Breaks: s.Failures, LastError: s.LastError}
}

// tableTopology is each cell with its one address.
type tableTopology struct{ t CellTable }

var _ topology.View = tableTopology{}

func (v tableTopology) Upstreams(cell cells.CellID) []string {
	if x := v.t.Index(); x != nil {
		if u := x.Upstream(cell); u != "" {
			return []string{u}
		}
	}
	return nil
}

func (v tableTopology) Knows(cell cells.CellID) bool {
	x := v.t.Index()
	return x == nil || x.Knows(cell)
}

func (v tableTopology) Changed() <-chan struct{} { return v.t.Changed() }

func (v tableTopology) Status() topology.Status {
	s := v.t.Status()
	return topology.Status{Known: s.Known, Source: s.Source, Age: s.Age, Cells: s.Cells, Breaks: s.Failures, LastError: s.LastError}
}

// explainDeployment says where a request would go when whole deployments are the cells.
func (s *Server) explainDeployment(e *Explanation, r *http.Request) {
	e.State = "" // of a tenant's route
	index := s.deploy.Table.Index()
	if index == nil {
		e.Answer, e.Detail = cells.CodeBackendUnavailable, "the directory was not read yet"
		return
	}
	d := index.Decide(ruleRequest(r))
	e.Cell, e.Rule, e.Answer, e.Detail = d.Cell, string(d.Rule), d.Answer, d.Detail
	if d.Answer != "" && e.Detail == "" {
		e.Detail = d.Answer.Title()
		if d.Err != nil {
			e.Detail += ": " + d.Err.Error()
		}
	}
	if d.Upstream != "" {
		e.Upstreams = append(e.Upstreams, d.Upstream)
	}
	u := url.URL{}
	forward.SetPath(&u, r.URL, "", "")
	e.ForwardPath = u.EscapedPath()
}
