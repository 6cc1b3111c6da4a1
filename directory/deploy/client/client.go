// SPDX-License-Identifier: Apache-2.0

// Package client calls a router's own paths: [Operator] with the operator credential,
// [Cell] with a cell's, [Lookup] with none. Errors are those of package
// directory/client: a refusal of the router is a [*cells.Answer], and a change whose
// answer is missing, is not the router's, or is BACKEND_UNAVAILABLE is an
// [client.UnknownOutcomeError]: it may have been made. Every call here is safe to
// repeat; a rotation's and an attach's repetition says what the first one did. Nothing
// is repeated by this package, but [Lookup] for a pace that it is told to wait for.
//
// The operator credential goes over https, or http to a loopback address, at the
// router's root: a path would be one that the router takes to a cell. A cell's goes to
// the address that its configuration names, over http too.
package client

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
)

// Operator is an operator's client of a router. Safe for concurrent use.
type Operator struct{ c *client.Client }

// New returns an operator's client of the router at base, http(s)://host[:port]. The
// error wraps [cells.ErrInvalid] and never contains the credential.
func New(base, cred string, opts ...client.Option) (*Operator, error) {
	if err := credential.Operator.Check(cred); err != nil {
		return nil, fmt.Errorf("%w: operator %w", cells.ErrInvalid, err)
	}
	c, err := client.New(base, cred, opts...)
	return &Operator{c}, err
}

// CloseIdleConnections frees connections that are not in use.
func (o *Operator) CloseIdleConnections() { o.c.CloseIdleConnections() }

func (o *Operator) get(ctx context.Context, path string, q url.Values, out any) error {
	_, err := o.c.Do(ctx, client.Call{Method: http.MethodGet, Path: wire.PathOperator + path, Query: q}, out)
	return err
}

func (o *Operator) change(ctx context.Context, cell cells.CellID, action string, body any) (out deploy.Cell, err error) {
	if err := cell.Validate(); err != nil {
		return out, err
	}
	_, err = o.c.Do(ctx, client.Call{Method: http.MethodPost, Path: wire.PathOperator + "/cells/" + string(cell) + "/" + action, Body: body}, &out)
	return out, err
}

// Directory returns all cells.
func (o *Operator) Directory(ctx context.Context) (out deploy.View, err error) {
	return out, o.get(ctx, "/directory", nil, &out)
}

// Register registers a cell, or checks a rerun. PROBE_BUSY and PROBE_UNREACHABLE may
// pass; NO_CELL before the first cell; CONFLICT says what contradicts.
func (o *Operator) Register(ctx context.Context, cell cells.CellID, r wire.Register) (deploy.Cell, error) {
	return o.change(ctx, cell, "register", r)
}

// Limit closes, opens and bounds a cell.
func (o *Operator) Limit(ctx context.Context, cell cells.CellID, r wire.Limit) (deploy.Cell, error) {
	return o.change(ctx, cell, "limit", r)
}

// Credential rotates a cell's credential.
func (o *Operator) Credential(ctx context.Context, cell cells.CellID, r wire.Credential) (deploy.Cell, error) {
	return o.change(ctx, cell, "credential", r)
}

// Attach makes the directory's transaction of an attach.
func (o *Operator) Attach(ctx context.Context, cell cells.CellID, r wire.Attach) (deploy.Cell, error) {
	return o.change(ctx, cell, "attach", r)
}

// Held places further tenants that the first cell holds, while it is attached.
func (o *Operator) Held(ctx context.Context, cell cells.CellID, r wire.Held) (deploy.Cell, error) {
	return o.change(ctx, cell, "held", r)
}

// RaiseMode records a mode that is about to be raised.
func (o *Operator) RaiseMode(ctx context.Context, cell cells.CellID, r wire.Mode) (deploy.Cell, error) {
	return o.change(ctx, cell, "mode", r)
}

// Serve ends an attach.
func (o *Operator) Serve(ctx context.Context, cell cells.CellID, r wire.Serve) (deploy.Cell, error) {
	return o.change(ctx, cell, "serve", r)
}

// Config changes a cell's configuration in two steps.
func (o *Operator) Config(ctx context.Context, cell cells.CellID, r wire.Config) (deploy.Cell, error) {
	return o.change(ctx, cell, "config", r)
}

// Addresses replaces a cell's addresses.
func (o *Operator) Addresses(ctx context.Context, cell cells.CellID, r wire.Addresses) (deploy.Cell, error) {
	return o.change(ctx, cell, "addresses", r)
}

// Place places a tenant in the cell that r names, or tells where it is: compare Cell.
func (o *Operator) Place(ctx context.Context, r wire.Place) (wire.Winner, error) {
	return place(ctx, o.c, r)
}

func place(ctx context.Context, c *client.Client, r wire.Place) (out wire.Winner, err error) {
	_, err = c.Do(ctx, client.Call{Method: http.MethodPost, Path: wire.PathPlacements, Body: r}, &out)
	return out, err
}

// Placements lists a cell's tenants, or all for "", in their order.
func (o *Operator) Placements(ctx context.Context, cell cells.CellID, after cells.TenantID, limit int) (out wire.Placements, err error) {
	q := url.Values{"cell": {string(cell)}, "after": {string(after)}, "limit": {strconv.Itoa(limit)}}
	return out, o.get(ctx, "/placements", q, &out)
}

// Audit lists changes, newest first.
func (o *Operator) Audit(ctx context.Context, f client.AuditQuery) (out api.AuditList, err error) {
	q := url.Values{"tenant": {string(f.Tenant)}, "after": {strconv.FormatInt(f.After, 10)}, "limit": {strconv.Itoa(f.Limit)}}
	return out, o.get(ctx, "/audit", q, &out)
}

// Repoint makes a placement follow a move.
func (o *Operator) Repoint(ctx context.Context, r wire.Repoint) (out deploy.Placement, err error) {
	_, err = o.c.Do(ctx, client.Call{Method: http.MethodPost, Path: wire.PathOperator + "/repoint", Body: r, Operation: string(r.Move)}, &out)
	return out, err
}

// Cell is a cell's client of a router. Safe for concurrent use.
type Cell struct {
	c    *client.Client
	name cells.CellID
}

// NewCell returns the client of a cell's process: base and token are what its
// configuration says. The error wraps [cells.ErrInvalid] and never contains the token.
func NewCell(name cells.CellID, base, token string, opts ...client.Option) (*Cell, error) {
	if err := name.Validate(); err != nil {
		return nil, err
	}
	if err := credential.Router.Check(token); err != nil {
		return nil, fmt.Errorf("%w: router %w", cells.ErrInvalid, err)
	}
	c, err := client.New(base, token, append([]client.Option{client.WithPlainHTTP()}, opts...)...)
	return &Cell{c, name}, err
}

// CloseIdleConnections frees connections that are not in use.
func (c *Cell) CloseIdleConnections() { c.c.CloseIdleConnections() }

// Place places a tenant in this cell, or tells where it is. The caller compares both
// the winner's name and its deployment id with its own. Bound ctx with the cell's
// CELL_ROUTER_TIMEOUT_S: a call that is not answered in time is a failed one, and
// repeating it is safe.
func (c *Cell) Place(ctx context.Context, tenant cells.TenantID, f tenancy.Fingerprint) (wire.Winner, error) {
	return place(ctx, c.c, wire.Place{Tenant: tenant, Cell: c.name, Fingerprint: &f})
}

// State reads what the directory says of this cell, which must be the first one. Every
// error means that it cannot be read.
func (c *Cell) State(ctx context.Context) (out wire.CellState, err error) {
	_, err = c.c.Do(ctx, client.Call{Method: http.MethodGet, Path: wire.PathCells + "/" + string(c.name)}, &out)
	return out, err
}

// Lookup returns a tenant's cell. While the router refuses for its pace, it asks again
// after the time that it is told, for at most wait. NO_CELL means that there are no
// cells yet: stay at the host that you have.
func Lookup(ctx context.Context, base string, tenant cells.TenantID, wait time.Duration, opts ...client.Option) (out wire.Lookup, err error) {
	c, err := client.Anonymous(base, opts...)
	if err != nil {
		return out, err
	}
	defer c.CloseIdleConnections()
	end := time.Now().Add(wait)
	for {
		_, err = c.Do(ctx, client.Call{Method: http.MethodGet, Path: wire.PathLookup, Query: url.Values{"tenant": {string(tenant)}}}, &out)
		a := cells.AnswerOf(err)
		if a == nil || a.Code != cells.CodeRateLimited {
			return out, err
		}
		pause := max(a.RetryAfter, time.Second)
		if time.Now().Add(pause).After(end) {
			return out, err
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return out, context.Cause(ctx)
		case <-t.C:
		}
	}
}
