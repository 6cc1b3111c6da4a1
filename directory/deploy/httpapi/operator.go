// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/directory/internal/web"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/internal/hostname"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// operatorOnly lets operators through.
func (h *Handler) operatorOnly(e endpoint) endpoint {
	return func(r *request) (int, any, error) {
		if len(h.operator) == 0 {
			return 0, nil, noOperator()
		}
		if !credential.Among(credential.Presented(r.Header), h.operator) {
			return 0, nil, unauthenticated()
		}
		r.peer = "operator"
		return e(r)
	}
}

func noOperator() error {
	return &cells.Answer{Code: cells.CodeNoOperatorCredential,
		Detail: "set the SHA-256 of an operator credential in the router's configuration and restart it"}
}

// ruleOf makes the rule of a change of a cell out of its request.
type ruleOf[T any] func(r *request, cell cells.CellID, req *T) (deploy.Rule, error)

// change serves a change of a cell. actor says for whom it is made, limit bounds the
// body.
func change[T any](h *Handler, action string, limit int64, actor func(*T) string, rule ruleOf[T]) endpoint {
	return h.operatorOnly(func(r *request) (int, any, error) {
		cell := cells.CellID(r.PathValue("cell"))
		var req T
		if err := web.Decode(r.w, r.Request, &req, limit, true); err != nil {
			return 0, nil, err
		}
		if err := cell.Validate(); err != nil {
			return 0, nil, err
		}
		if err := checkActor(actor(&req)); err != nil {
			return 0, nil, err
		}
		f, err := rule(r, cell, &req)
		if err != nil {
			return 0, nil, err
		}
		detail := any(req)
		if limit > wire.MaxBody {
			detail = struct{}{} // each tenant has an entry of its own
		}
		c, err := h.cfg.Store.Change(r.Context(), cell, f, r.audit("cell."+action, actor(&req), detail))
		if err != nil {
			return 0, nil, err
		}
		h.cells.drop()
		return http.StatusOK, c, nil
	})
}

func (h *Handler) operatorRoutes() {
	t := 6 * h.cfg.Timeout
	post := func(action string, e endpoint) { h.handle("POST "+wire.PathOperator+"/cells/{cell}/"+action, t, e) }
	h.handle("GET "+wire.PathOperator+"/directory", t, h.operatorOnly(func(r *request) (int, any, error) {
		v, err := h.cfg.Store.Read(r.Context())
		if v.Cells == nil {
			v.Cells = []deploy.Cell{}
		}
		return http.StatusOK, v, err
	}))
	h.handle("GET "+wire.PathOperator+"/placements", t, h.operatorOnly(h.placements))
	if h.cfg.Audit != nil {
		h.handle("GET "+wire.PathOperator+"/audit", t, h.operatorOnly(h.audit))
	}
	post("register", change(h, "register", wire.MaxBody, func(q *wire.Register) string { return q.Actor }, h.register))
	post("addresses", change(h, "addresses", wire.MaxBody, func(q *wire.Addresses) string { return q.Actor }, h.addresses))
	post("limit", change(h, "limit", wire.MaxBody, func(q *wire.Limit) string { return q.Actor },
		func(_ *request, _ cells.CellID, q *wire.Limit) (deploy.Rule, error) {
			return deploy.Limit(q.Closed, q.PlacementsMax), nil
		}))
	post("credential", change(h, "credential", wire.MaxBody, func(q *wire.Credential) string { return q.Actor },
		func(_ *request, _ cells.CellID, q *wire.Credential) (deploy.Rule, error) {
			switch {
			case q.Action == wire.Next:
				return deploy.NextCredential(q.SHA256), nil
			case q.SHA256 == "" && (q.Action == wire.Finish || q.Action == wire.Revert):
				return deploy.EndCredential(q.Action == wire.Finish), nil
			}
			return nil, web.Bad("action is next with sha256, finish or revert")
		}))
	post("attach", change(h, "attach", wire.MaxHeld, func(q *wire.Attach) string { return q.Actor },
		func(_ *request, _ cells.CellID, q *wire.Attach) (deploy.Rule, error) {
			if q.Current == nil {
				return nil, web.Bad("current is missing")
			}
			return deploy.Attach(deploy.Attachment{Current: *q.Current, Next: q.Next, KeysFP: q.KeysFP, Upstream: q.Upstream, Bots: q.Bots, Tenants: q.Tenants}), nil
		}))
	post("held", change(h, "held", wire.MaxHeld, func(q *wire.Held) string { return q.Actor },
		func(_ *request, _ cells.CellID, q *wire.Held) (deploy.Rule, error) {
			return deploy.PlaceHeld(q.Tenants), nil
		}))
	post("mode", change(h, "mode", wire.MaxBody, func(q *wire.Mode) string { return q.Actor },
		func(_ *request, _ cells.CellID, q *wire.Mode) (deploy.Rule, error) {
			return deploy.RaiseMode(q.Mode), nil
		}))
	post("serve", change(h, "serve", wire.MaxBody, func(q *wire.Serve) string { return q.Actor },
		func(*request, cells.CellID, *wire.Serve) (deploy.Rule, error) { return deploy.Serve(), nil }))
	post("config", change(h, "config", wire.MaxBody, func(q *wire.Config) string { return q.Actor },
		func(_ *request, _ cells.CellID, q *wire.Config) (deploy.Rule, error) {
			switch {
			case q.Value == nil:
				return nil, web.Bad("value is missing")
			case q.Action == wire.Next:
				return deploy.NextConfig(*q.Value), nil
			case q.Action == wire.Finish, q.Action == wire.Revert:
				return deploy.EndConfig(*q.Value, q.Action == wire.Finish), nil
			}
			return nil, web.Bad("action is next, finish or revert")
		}))
	h.handle("POST "+wire.PathOperator+"/repoint", t, h.operatorOnly(h.repoint))
}

// register looks at the cell before it is registered.
func (h *Handler) register(r *request, cell cells.CellID, q *wire.Register) (deploy.Rule, error) {
	host, err := hostname.Normalize(q.Host)
	if err != nil {
		return nil, web.Bad("host: %v", err)
	}
	reg := deploy.Registration{First: host == h.cfg.SharedHost, Host: host, ProbeURL: q.ProbeURL, Stores: q.Stores,
		CredentialHash: q.CredentialSHA256, Bots: q.Bots, Found: q.Found}
	if reg.First {
		if q.ProbeURL != "" {
			return nil, web.Bad("the first cell's probe address is the router's own configuration, not an argument")
		}
		reg.Aliases, reg.Upstream, reg.ProbeURL = h.cfg.Aliases, h.cfg.Upstream, h.cfg.UpstreamProbe
	}
	rule := deploy.Register(reg)
	v, err := h.cfg.Store.Read(r.Context())
	if err != nil {
		return nil, err
	}
	if _, err := deploy.Apply(&v, cell, r.now, rule); err != nil {
		return nil, err // before the cell is looked at
	}
	return rule, h.look(r, reg.ProbeURL, reg.Upstream, q.Stores, q.Nonces)
}

// look reads the probe listener, and the main port of the first cell's upstream.
func (h *Handler) look(r *request, probeURL, upstream string, want deploy.Stores, nonces map[stores.Kind]stores.Nonce) error {
	if h.cfg.Prober == nil {
		return &cells.Answer{Code: cells.CodeProbeUnreachable, Detail: "this router cannot read probe listeners"}
	}
	if len(nonces) == 0 {
		return web.Bad("nonces are missing")
	}
	id := stores.DeploymentID(want.DeploymentID)
	err := h.cfg.Prober.Check(r.Context(), probeURL, probe.Want{Deployment: id, Location: stores.Location{Bucket: want.Bucket, Prefix: want.Prefix}, Nonces: nonces})
	if err != nil || upstream == "" {
		return probing(err)
	}
	got, err := h.cfg.Prober.DeploymentID(r.Context(), upstream)
	if err == nil && got != id {
		err = fmt.Errorf("%w: the deployment behind the shared host, at %s, is %s, not %s", probe.ErrRefused, upstream, got, id)
	}
	return probing(err)
}

// probing makes sure that a failed look is not taken for a change that may have been
// made.
func probing(err error) error {
	if err == nil || cells.AnswerOf(err) != nil || errors.Is(err, probe.ErrRefused) || errors.Is(err, cells.ErrInvalid) {
		return err
	}
	return &cells.Answer{Code: cells.CodeProbeUnreachable, Detail: err.Error(), Err: err}
}

// addresses replaces a later cell's probe address, or brings the first one's addresses
// to this router's.
func (h *Handler) addresses(r *request, cell cells.CellID, q *wire.Addresses) (deploy.Rule, error) {
	v, err := h.cfg.Store.Read(r.Context())
	if err != nil {
		return nil, err
	}
	c := v.Cell(cell)
	if c == nil {
		return nil, deploy.ErrNoCell
	}
	probeURL, upstream := q.ProbeURL, ""
	if c.First {
		if q.ProbeURL != "" {
			return nil, web.Bad("the first cell's probe address is the router's own configuration, not an argument")
		}
		probeURL, upstream = h.cfg.UpstreamProbe, h.cfg.Upstream
	}
	if probeURL, err = deploy.NormalProbeURL(probeURL); err != nil {
		return nil, err
	}
	return deploy.Addresses(probeURL, upstream), h.look(r, probeURL, upstream, c.Stores, q.Nonces)
}

func (h *Handler) placements(r *request) (int, any, error) {
	q, err := web.Query(r.Request, "cell", "after", "limit")
	if err != nil {
		return 0, nil, err
	}
	limit, err := web.Number(q["limit"], "limit", api.MaxPage)
	if err != nil {
		return 0, nil, err
	}
	if limit == 0 {
		limit = api.DefaultPage
	}
	list, err := h.cfg.Store.Placements(r.Context(), deploy.PlacementFilter{Cell: cells.CellID(q["cell"]), After: cells.TenantID(q["after"]), Limit: int(limit)})
	if err != nil {
		return 0, nil, err
	}
	out := wire.Placements{Placements: list}
	if out.Placements == nil {
		out.Placements = []deploy.Placement{}
	}
	if len(list) == int(limit) {
		out.Next = list[len(list)-1].Tenant
	}
	return http.StatusOK, out, nil
}

func (h *Handler) audit(r *request) (int, any, error) {
	q, err := web.Query(r.Request, "after", "limit", "tenant")
	if err != nil {
		return 0, nil, err
	}
	after, err := web.Number(q["after"], "after", 1<<62)
	if err != nil {
		return 0, nil, err
	}
	limit, err := web.Number(q["limit"], "limit", api.MaxPage)
	if err != nil {
		return 0, nil, err
	}
	if limit == 0 {
		limit = api.DefaultPage
	}
	list, err := h.cfg.Audit.Audit(r.Context(), directory.AuditFilter{Tenant: cells.TenantID(q["tenant"]), After: after, Limit: int(limit)})
	if err != nil {
		return 0, nil, err
	}
	out := api.AuditList{Entries: list}
	if out.Entries == nil {
		out.Entries = []api.AuditEntry{}
	}
	if len(list) == int(limit) {
		out.Next = list[len(list)-1].Seq
	}
	return http.StatusOK, out, nil
}

func (h *Handler) repoint(r *request) (int, any, error) {
	var q wire.Repoint
	if err := web.Decode(r.w, r.Request, &q, wire.MaxBody, true); err != nil {
		return 0, nil, err
	}
	for _, err := range []error{deploy.CheckTenant(q.Tenant), q.From.Validate(), q.To.Validate(), q.Move.Validate(), checkActor(q.Actor)} {
		if err != nil {
			return 0, nil, err
		}
	}
	p, err := h.cfg.Store.Repoint(r.Context(), deploy.Repoint{Tenant: q.Tenant, From: q.From, To: q.To, Epoch: q.Epoch, Move: q.Move, At: r.now},
		r.audit("placement.repoint", q.Actor, q))
	return http.StatusOK, p, err
}
