// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// What the rules and a [Store] refuse, beside the sentinels of package cells.
var (
	// ErrClosed: the cell takes no new tenant: not attached, closed, full, or the
	// caller's configuration is not the cell's. Returned by Place, and by changes that
	// place tenants.
	ErrClosed = errors.New("deploy: the cell takes no new tenants")
	// ErrCredential: the credential is not one of the cell's any more. Returned by Place.
	ErrCredential = errors.New("deploy: the credential is not the cell's")
	// ErrNoCell: no such cell is registered, or no first one.
	ErrNoCell = errors.New("deploy: no such cell is registered")
	// ErrPinned: the directory is pinned. Returned by Reserve and Repoint.
	ErrPinned = fmt.Errorf("%w: deploy: the directory is pinned, placements never change", cells.ErrConflict)
	// ErrPlacedElsewhere: a tenant that a change would place is in another cell. The
	// change is not made.
	ErrPlacedElsewhere = fmt.Errorf("%w: deploy: a tenant is placed in another cell", cells.ErrConflict)
)

// Call asks for the placement of one tenant.
type Call struct {
	Tenant cells.TenantID
	// Cell is the one that asks for itself, or that an operator names.
	Cell cells.CellID
	By   By
	// CredentialHash is that of the cell's credential that was presented; only for
	// ByCell.
	CredentialHash string
	// Fingerprint is the configuration of the process or command that asks; nil matches
	// nothing.
	Fingerprint *tenancy.Fingerprint
	Actor       string
	At          time.Time
}

// Repoint makes a placement follow a move.
type Repoint struct {
	Tenant   cells.TenantID
	From, To cells.CellID
	// Epoch of the route after the move, above the placement's. Not for Reserve.
	Epoch cells.Epoch
	Move  cells.MoveID
	At    time.Time
	// Undo: the tenant goes back to where it came from, closed or full as that may be.
	Undo bool
}

// PlacementFilter selects placements, in order of their tenants.
type PlacementFilter struct {
	Cell cells.CellID // "" is all
	// After is the last tenant of the page before.
	After cells.TenantID
	// Limit; 0 means api.DefaultPage.
	Limit int
}

// Change is a change of one cell, under the directory's lock.
type Change struct {
	Kind Kind
	At   time.Time
	// Others are all other cells, with both their values.
	Others []Cell
	// Cell is what the change makes of the cell; Exists says that it is registered.
	Cell   Cell
	Exists bool
	// Place are tenants to place in the cell in the same transaction. One that is
	// placed in another cell refuses the change ([ErrPlacedElsewhere]); Bound ones that
	// are placed nowhere refuse it if the cell is closed or its quota would be passed
	// ([ErrClosed]).
	Place []Claim
}

// Claim is a tenant that a change places.
type Claim struct {
	Tenant cells.TenantID
	Bound  bool
}

// Rule is a change: pure, since it may run more than once. An error is returned and
// changes nothing.
type Rule func(*Change) error

// Reader is the part of a [Store] that routers cache.
type Reader interface {
	// Read returns all cells at one moment.
	Read(ctx context.Context) (View, error)
}

// Store keeps the directory of deployments. Every implementation passes package
// deploytest. All methods are safe for concurrent use by several processes; what is
// passed and returned is the caller's.
//
// Errors: the sentinels of this package where named, [cells.ErrNotFound],
// [cells.ErrConflict], [cells.ErrInvalid], and [cells.ErrUnavailable] when the store
// could not be read or written; a change that ended so may have been made.
//
// Each change writes its audit entry in its transaction; one that changes nothing
// writes none.
type Store interface {
	Reader
	// Settle says what the directory is. The first call decides; another kind is
	// refused with ErrConflict from then on. A directory that was not settled is pinned.
	Settle(ctx context.Context, kind Kind, audit api.AuditEntry) error
	// Change applies the rule to a cell, alone among all changes of cells. It returns the
	// cell as it is then. Name, First, Stores, Placements, Revision and CreatedAt of a
	// cell that exists cannot be changed. The tenants that were placed are audited one
	// by one.
	Change(ctx context.Context, cell cells.CellID, rule Rule, audit api.AuditEntry) (Cell, error)
	// Place places a tenant, or answers where it is: created says which. ErrClosed,
	// ErrCredential, ErrNoCell for a tenant that is placed nowhere.
	Place(ctx context.Context, c Call, audit api.AuditEntry) (p Placement, created bool, err error)
	// Placement returns where a tenant is placed. ErrNotFound.
	Placement(ctx context.Context, tenant cells.TenantID) (Placement, error)
	// Placements lists.
	Placements(ctx context.Context, f PlacementFilter) ([]Placement, error)
	// Reserve keeps a place in To for a tenant whose move from From is about to begin,
	// in a movable directory: it counts in both cells until Repoint or Release. A repeated
	// one changes nothing. ErrPinned; ErrNotFound; ErrConflict when the placement is not in
	// From, or another move has a place for the tenant; ErrNoCell and ErrClosed of the
	// target, whose quota holds.
	Reserve(ctx context.Context, r Repoint, audit api.AuditEntry) error
	// Release gives the place up that the move has; without one nothing is changed.
	Release(ctx context.Context, tenant cells.TenantID, move cells.MoveID, audit api.AuditEntry) error
	// Repoint changes a placement of a movable directory, and takes the place that the
	// move has. A repeated one changes nothing. ErrPinned; ErrNotFound; ErrConflict when the
	// placement is not in From, its epoch is not below, or another move has a place; for a
	// move that has none ErrNoCell and ErrClosed of the target, whose quota holds.
	Repoint(ctx context.Context, r Repoint, audit api.AuditEntry) (Placement, error)
}
