// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/directory/internal/web"
	"github.com/cloister-dev/cloister/internal/credential"
)

// lookup answers the cell of a tenant to anybody.
func (h *Handler) lookup(r *request) (int, any, error) {
	address, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		address = r.RemoteAddr
	}
	if wait := h.lookups.Take(address); wait > 0 {
		return 0, nil, &cells.Answer{Code: cells.CodeRateLimited, RetryAfter: wait,
			Detail: fmt.Sprintf("at most %d lookups a minute", h.lookups.Burst())}
	}
	q, err := web.Query(r.Request, "tenant")
	if err != nil {
		return 0, nil, err
	}
	tenant := cells.TenantID(q["tenant"])
	if err := deploy.CheckTenant(tenant); err != nil {
		return 0, nil, &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error(), Err: err}
	}
	if cell, ok := h.tenants.get(tenant); ok {
		if v, ok := h.cells.last(); ok && v.Cell(cell) != nil {
			return http.StatusOK, wire.Lookup{Tenant: tenant, Cell: cell, Host: v.Cell(cell).Host}, nil
		}
	}
	v, err := h.cells.get(r.Context())
	if err != nil {
		return 0, nil, err
	}
	if v.First() == nil {
		return 0, nil, &cells.Answer{Code: cells.CodeNoCell, Detail: "no cell is registered yet; stay at the host you have"}
	}
	p, err := h.cfg.Store.Placement(r.Context(), tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return http.StatusOK, wire.Lookup{Tenant: tenant, Cell: v.First().Name, Host: v.First().Host}, nil
	}
	if err != nil {
		return 0, nil, err
	}
	if v.Cell(p.Cell) == nil { // registered since the cells were read
		h.cells.drop()
		if v, err = h.cells.get(r.Context()); err != nil {
			return 0, nil, err
		}
		if v.Cell(p.Cell) == nil {
			return 0, nil, fmt.Errorf("%w: the cells were not read again", cells.ErrUnavailable)
		}
	}
	h.tenants.put(tenant, p.Cell, v.Kind)
	return http.StatusOK, wire.Lookup{Tenant: tenant, Cell: p.Cell, Host: v.Cell(p.Cell).Host}, nil
}

// cellOf returns the cell whose credential was presented; nil if it is nobody's.
func (h *Handler) cellOf(r *request) (*deploy.Cell, string, error) {
	presented := credential.Presented(r.Header)
	if credential.Router.Check(presented) != nil {
		return nil, "", nil
	}
	v, err := h.cells.get(r.Context())
	if err != nil {
		return nil, "", err
	}
	sum := credential.Of(presented).String() // of 512 random bits: comparing it tells nothing
	for i := range v.Cells {
		if slices.Contains(v.Cells[i].Hashes(), sum) {
			return &v.Cells[i], sum, nil
		}
	}
	return nil, "", nil
}

// place is the placement API, for cells and for operators.
func (h *Handler) place(r *request) (int, any, error) {
	byOperator := len(h.operator) > 0 && credential.Among(credential.Presented(r.Header), h.operator)
	if len(h.operator) == 0 && credential.Operator.Check(credential.Presented(r.Header)) == nil {
		return 0, nil, noOperator()
	}
	call := deploy.Call{By: deploy.ByOperator, At: r.now}
	var caller *deploy.Cell
	if r.peer = "operator"; !byOperator {
		var err error
		if caller, call.CredentialHash, err = h.cellOf(r); err != nil {
			return 0, nil, err
		}
		if caller == nil {
			return 0, nil, unauthenticated()
		}
		call.By, r.peer = deploy.ByCell, "cell/"+string(caller.Name)
		if wait := h.places.Take(string(caller.Name)); wait > 0 {
			return 0, nil, &cells.Answer{Code: cells.CodeOverloaded, Cell: caller.Name, RetryAfter: wait,
				Detail: fmt.Sprintf("cell %s makes more than %d placement calls a minute", caller.Name, h.places.Burst())}
		}
	}
	var req wire.Place
	if err := web.Decode(r.w, r.Request, &req, wire.MaxBody, true); err != nil {
		return 0, nil, err
	}
	if err := deploy.CheckTenant(req.Tenant); err != nil {
		return 0, nil, &cells.Answer{Code: cells.CodeInvalidTenant, Detail: err.Error(), Err: err}
	}
	if err := errors.Join(req.Cell.Validate(), checkActor(req.Actor)); err != nil {
		return 0, nil, err
	}
	if caller != nil && caller.Name != req.Cell {
		return 0, nil, unauthenticated() // the credential is not that cell's
	}
	call.Tenant, call.Cell, call.Fingerprint, call.Actor = req.Tenant, req.Cell, req.Fingerprint, req.Actor
	if call.Actor == "" {
		call.Actor = r.peer
	}
	p, created, err := h.cfg.Store.Place(r.Context(), call, r.audit("placement", req.Actor, struct{}{}))
	if errors.Is(err, deploy.ErrCredential) {
		h.cells.drop()
	}
	if err != nil {
		return 0, nil, err
	}
	if v, ok := h.cells.last(); ok {
		h.tenants.put(p.Tenant, p.Cell, v.Kind)
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	return status, wire.Winner{Tenant: p.Tenant, Cell: p.Cell, DeploymentID: p.DeploymentID, Created: created}, nil
}

// state answers the first cell what the directory says of it, from the directory.
func (h *Handler) state(r *request) (int, any, error) {
	caller, _, err := h.cellOf(r)
	if err != nil {
		return 0, nil, err
	}
	if caller == nil || string(caller.Name) != r.PathValue("cell") {
		return 0, nil, unauthenticated()
	}
	v, err := h.cfg.Store.Read(r.Context())
	if err != nil {
		return 0, nil, err
	}
	c := v.First()
	if c == nil || c.Name != caller.Name {
		return 0, nil, &cells.Answer{Code: cells.CodeForbidden, Detail: "only the first cell reads its state here"}
	}
	return http.StatusOK, wire.CellState{Cell: c.Name, State: c.State, Mode: c.Mode}, nil
}

// checkActor bounds who a request says it acts for.
func checkActor(s string) error {
	if len(s) > 256 {
		return fmt.Errorf("%w: an actor has at most 256 bytes", cells.ErrInvalid)
	}
	for _, c := range s {
		if c < ' ' || c == 0x7f || c == '\uFFFD' {
			return fmt.Errorf("%w: the actor has a control character", cells.ErrInvalid)
		}
	}
	return nil
}
