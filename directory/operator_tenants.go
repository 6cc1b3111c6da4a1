// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
)

func (s *Server) getTenants(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "cell", "after", "limit", "deleted")
	if err != nil {
		return 0, nil, err
	}
	limit, err := number(q["limit"], "limit", api.MaxPage)
	if err != nil {
		return 0, nil, err
	}
	if limit == 0 {
		limit = api.DefaultPage
	}
	opts := cells.ListOptions{After: cells.TenantID(q["after"]), Limit: int(limit), Cell: cells.CellID(q["cell"])}
	if opts.After != "" {
		if err := opts.After.Validate(); err != nil {
			return 0, nil, err
		}
	}
	if opts.Cell != "" {
		if err := opts.Cell.Validate(); err != nil {
			return 0, nil, err
		}
	}
	page, err := s.table.List(r.Context(), opts)
	if err != nil {
		return 0, nil, err
	}
	out := api.TenantList{Routes: []cells.TenantRoute{}, Revision: page.Revision, Next: page.Next}
	for _, row := range page.Routes {
		if row.State != cells.StateDeleted || q["deleted"] == "1" {
			out.Routes = append(out.Routes, row)
		}
	}
	return http.StatusOK, out, nil
}

func (s *Server) getTenant(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	tenant, err := tenantOf(r)
	if err != nil {
		return 0, nil, err
	}
	if _, err := query(r); err != nil {
		return 0, nil, err
	}
	out := api.Tenant{Tenant: tenant, DefaultCell: s.fleet.defaultCell()}
	row, err := s.table.Get(r.Context(), tenant)
	switch {
	case err == nil:
		out.Route = &row
	case errors.Is(err, cells.ErrNotFound):
		if out.DefaultCell == "" {
			return 0, nil, unknownTenant(tenant)
		}
	default:
		return 0, nil, err
	}
	out.Window = s.exec.window(&row)
	last, err := s.store.Moves(r.Context(), MoveFilter{Tenant: tenant, Limit: 1})
	if err != nil {
		return 0, nil, err
	}
	if len(last) == 1 {
		m := s.exec.current(last[0])
		out.Move = &m
	}
	f, err := s.store.TenantFacts(r.Context(), tenant)
	if err != nil {
		return 0, nil, err
	}
	f.Load = s.members.loads()[tenant]
	if f != (api.TenantFacts{Tenant: tenant}) {
		out.Facts = &f
	}
	return http.StatusOK, out, nil
}

func unknownTenant(t cells.TenantID) error {
	return &cells.Answer{Code: cells.CodeUnknownTenant, Tenant: t, Detail: "the tenant has no route and there is no default cell"}
}

func (s *Server) deleteTenant(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	tenant, err := tenantOf(r)
	if err != nil {
		return 0, nil, err
	}
	q, err := query(r, "actor")
	if err != nil {
		return 0, nil, err
	}
	req := api.PlacementRequest{Tenant: tenant, Actor: q["actor"]}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	if err := s.pinned(r.Context()); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	row, err := s.table.Get(ctx, tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return 0, nil, &cells.Answer{Code: cells.CodeUnknownTenant, Tenant: tenant, Detail: "the tenant has no route"}
	}
	if err != nil {
		return 0, nil, err
	}
	if row.State == cells.StateDeleted {
		return http.StatusOK, api.Deleted{Route: row, Done: true}, nil
	}
	// The audit comes first: it says that the deletion was asked for, and by whom.
	who := callerOf(ctx).as(req.Actor)
	e := who.audit("tenant.delete")
	e.Tenant, e.Cell = tenant, row.CellID
	if err := s.store.AppendAudit(ctx, e); err != nil {
		return 0, nil, err
	}
	derr := s.exec.controller().Delete(ctx, tenant, req.Actor)
	row, err = s.table.Get(ctx, tenant)
	if err != nil {
		return 0, nil, errors.Join(derr, err)
	}
	switch row.State {
	case cells.StateDeleted:
		if err := s.settle(ctx, row); err != nil {
			s.log.Warn("ledger not settled; the follower will", "tenant", tenant, "err", err)
		}
		s.metrics.deletions.Inc()
		return http.StatusOK, api.Deleted{Route: row, Done: true}, nil
	case cells.StateDeleting:
		out := api.Deleted{Route: row}
		if derr != nil {
			out.Error = derr.Error()
		}
		return http.StatusAccepted, out, nil
	}
	if derr == nil { // created again already
		return http.StatusOK, api.Deleted{Route: row, Done: true}, nil
	}
	return 0, nil, derr
}

func pinned() error {
	return &cells.Answer{Code: cells.CodeForbidden, Detail: "this directory is pinned: placements never change"}
}

// pinned says why nothing is moved here: the directory is pinned, or that of the
// deployments that are its cells.
func (s *Server) pinned(ctx context.Context) error {
	if s.cfg.Pinned {
		return pinned()
	}
	if s.cfg.Deployments == nil {
		return nil
	}
	v, err := s.cfg.Deployments.Read(ctx)
	if err == nil && len(v.Cells) > 0 && v.Kind != deploy.Movable {
		err = pinned()
	}
	return err
}

func (s *Server) postPlacement(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.PlacementRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, badTenant(req.Tenant, err)
	}
	return placed(s.place(r.Context(), req, callerOf(r.Context()).as(req.Actor)))
}

func placed(p api.Placement, err error) (int, any, error) {
	switch {
	case err != nil:
		return 0, nil, err
	case p.Created:
		return http.StatusCreated, p, nil
	}
	return http.StatusOK, p, nil
}

// badTenant gives a malformed tenant id its own code.
func badTenant(t cells.TenantID, err error) error {
	if t.Validate() != nil {
		return &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error(), Err: err}
	}
	return err
}
