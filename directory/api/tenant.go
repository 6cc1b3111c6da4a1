// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// PlacementRequest is the body of POST PathPlacements.
type PlacementRequest struct {
	Tenant cells.TenantID `json:"tenant"`
	// Cell to place it in; "" lets the directory choose the open cell with the
	// fewest tenants. A cell that places for itself must name itself or nothing.
	Cell cells.CellID `json:"cell,omitempty"`
	// OperationID makes a retry answer what the first call was answered. "" makes
	// each request a new operation.
	OperationID string `json:"operation_id,omitempty"`
	Actor       string `json:"actor,omitempty"`
	// New says that nobody has ever served the tenant, the default cell included.
	// Otherwise the directory asks the default cell before it places the tenant
	// elsewhere. If it is wrong, what the default cell has written is left behind.
	New bool `json:"new,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *PlacementRequest) Normalize() error {
	if err := r.Tenant.Validate(); err != nil {
		return err
	}
	if r.Cell != "" {
		if err := r.Cell.Validate(); err != nil {
			return err
		}
	}
	return normalizeAsked(&r.Actor, r.OperationID)
}

// Placement answers a PlacementRequest: the winner, whoever asked first.
type Placement struct {
	Tenant cells.TenantID `json:"tenant"`
	Cell   cells.CellID   `json:"cell"`
	// Created: this operation placed the tenant. False: it was placed already, and
	// Cell is where, which may differ from the cell asked for.
	Created bool `json:"created"`
	// OperationID of this request, made by the directory if it was "".
	OperationID string            `json:"operation_id"`
	Route       cells.TenantRoute `json:"route"`
}

// TenantList answers GET PathTenants, in tenant order, tombstones left out unless
// asked for with ?deleted=1.
type TenantList struct {
	Routes   []cells.TenantRoute `json:"routes"`
	Revision cells.Revision      `json:"revision"`
	Next     cells.TenantID      `json:"next,omitempty"`
}

// Tenant answers GET PathTenants/{tenant}.
type Tenant struct {
	Tenant cells.TenantID `json:"tenant"`
	// Route is nil when the tenant has no row.
	Route *cells.TenantRoute `json:"route,omitempty"`
	// DefaultCell serves the tenant when it has no route; "" when there is none.
	DefaultCell cells.CellID `json:"default_cell,omitempty"`
	// Move is the tenant's latest move, if there is one.
	Move *Move `json:"move,omitempty"`
	// Facts are what policies know of the tenant; nil if that is nothing.
	Facts *TenantFacts `json:"facts,omitempty"`
	// Window is how far the cell that the tenant came from is behind, while its last
	// move can be undone; nil when it cannot, or when this directory has not looked yet.
	Window *UndoWindow `json:"window,omitempty"`
}

// UndoWindow is what a directory has seen of an open undo window.
type UndoWindow struct {
	Move  cells.MoveID `json:"move"`
	Cell  cells.CellID `json:"cell"`  // keeps the rows
	Until time.Time    `json:"until"` // when it closes by itself
	// At is when changes were last brought, Lag how old what was not brought could be
	// then, Changes how many were brought by this directory.
	At      time.Time     `json:"at,omitzero"`
	Lag     time.Duration `json:"lag"`
	Changes int64         `json:"changes"`
	// Failures counts the rounds since At that failed, Error says why the last one did.
	Failures int    `json:"failures,omitempty"`
	Error    string `json:"error,omitempty"`
}

// CloseWindowRequest is the body of POST PathTenants/{tenant}/window/close. The
// answer is the tenant's route.
type CloseWindowRequest struct {
	Reason string `json:"reason,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *CloseWindowRequest) Normalize() error {
	if r.Reason == "" {
		r.Reason = "an operator closed it"
	}
	if err := checkText("reason", r.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// Deleted answers DELETE PathTenants/{tenant}. Done is false (and the status 202)
// when the route is DELETING and the directory goes on in the background.
type Deleted struct {
	Route cells.TenantRoute `json:"route"`
	Done  bool              `json:"done"`
	Error string            `json:"error,omitempty"`
}

// AuditEntry is one change and who asked for it.
type AuditEntry struct {
	Seq int64     `json:"seq"`
	At  time.Time `json:"at"`
	// Peer is the authenticated caller: "operator", "cell/<name>", "directory/<name>".
	Peer string `json:"peer"`
	// Actor is who the caller said it acted for.
	Actor     string         `json:"actor"`
	RequestID string         `json:"request_id"`
	Action    string         `json:"action"`
	Tenant    cells.TenantID `json:"tenant,omitempty"`
	Cell      cells.CellID   `json:"cell,omitempty"`
	Move      cells.MoveID   `json:"move,omitempty"`
	// Detail is a JSON object with what changed.
	Detail json.RawMessage `json:"detail,omitempty"`
}

// AuditList answers GET PathAudit, newest first. Next is the `after` of the next
// page, 0 when this is the last.
type AuditList struct {
	Entries []AuditEntry `json:"entries"`
	Next    int64        `json:"next,omitempty"`
}
