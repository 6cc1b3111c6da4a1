// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

// What a [Store] refuses, beside the sentinels of package cells.
var (
	// ErrNoCell: no such cell is registered, or none at all. Returned by Reserve
	// and CreateMove.
	ErrNoCell = errors.New("directory: no cell is registered")
	// ErrCellClosed: the cell is closed or not yet serving, or a limit of it is reached; or
	// no cell is left that takes the tenant. Returned by Reserve and CreateMove, which
	// return [cells.ErrJurisdiction] for one cell that the tenant may not be in.
	ErrCellClosed = errors.New("directory: cell takes no new tenants")
	// ErrOperationReused: the operation id was used for a different request.
	// Returned by Reserve and CreateMove.
	ErrOperationReused = errors.New("directory: operation id was used for another request")
	// ErrMoveActive: the tenant has a move that is not decided. Returned by CreateMove.
	ErrMoveActive = errors.New("directory: the tenant has a move already")
)

// Kinds of operations; one operation id belongs to one kind.
const (
	OperationPlacement = "placement"
	OperationMove      = "move"
)

// Operation is a caller's id for something that must happen once.
type Operation struct {
	ID   string
	Kind string
	// Tenant and Cell are those of the request: the same id with others is refused.
	Tenant cells.TenantID
	Cell   cells.CellID
}

// PlacementState is how far a ledger row is.
type PlacementState string

// A RESERVED row counts as a tenant of its cell while its claim is made. PLACED
// follows a route that exists.
const (
	PlacementReserved PlacementState = "RESERVED"
	PlacementPlaced   PlacementState = "PLACED"
)

// LedgerRow is one tenant in the ledger that bounds placements.
type LedgerRow struct {
	Tenant      cells.TenantID
	Cell        cells.CellID
	State       PlacementState
	OperationID string
	Actor       string
	// Revision of the route that the row reflects: for RESERVED the one that the
	// claim has seen (0: no row) and is conditional on.
	Revision  cells.Revision
	CreatedAt time.Time
}

// Reservation asks for a place in a cell.
type Reservation struct {
	Tenant cells.TenantID
	// Cell; "" chooses the one with the fewest tenants among those that take the tenant,
	// by id among equals.
	Cell      cells.CellID
	Operation Operation
	Actor     string
	// Live, unless nil, are the cells that may be chosen when Cell is "": those with a
	// process that serves.
	Live []cells.CellID
	// Seen is the revision of the tenant's route (a tombstone), 0 if there is none.
	// A ledger row that reflects an older revision is overtaken and replaced.
	Seen cells.Revision
	At   time.Time
}

// Settlement tells the ledger what a route says.
type Settlement struct {
	Tenant   cells.TenantID
	Revision cells.Revision
	// Exists: the tenant is placed in Cell. False: it has a tombstone (or is about to).
	Exists bool
	Cell   cells.CellID
	At     time.Time
}

// MoveFilter selects moves, newest first.
type MoveFilter struct {
	Tenant cells.TenantID // "" is all
	State  api.MoveState  // "" is all
	// Unfinished keeps the records that are not final, or still have residue.
	Unfinished bool
	// After is the Seq of the last record of the page before; 0 starts at the newest.
	After int64
	// Limit; 0 means api.DefaultPage.
	Limit int
}

// AuditFilter selects audit entries, newest first.
type AuditFilter struct {
	Tenant cells.TenantID
	After  int64
	Limit  int
}

// MemberRow is a process as the directories remember it.
type MemberRow struct {
	Heartbeat member.Heartbeat
	// Beat grows while some directory hears the process; that it grew, not when, is
	// what another directory goes by.
	Beat int64
	// SeenAt is for people.
	SeenAt time.Time
}

// Store keeps the control plane's records. Every implementation passes the suite
// of package directorytest. All methods are safe for concurrent use by several
// processes. Values passed in and returned are owned by the caller.
//
// Errors: [cells.ErrNotFound], [cells.ErrConflict], [cells.ErrInvalid], the sentinels of this
// package where named, and [cells.ErrUnavailable] (wrapped) when the store could
// not be read or written; a change that ended so may have been made.
//
// Each method that takes an audit entry writes it in the transaction of the
// change, and writes nothing when nothing changed.
type Store interface {
	Accounts

	// Cells returns all cells in order of their ids, with their tenant counts, and a
	// revision that grows with every change of a cell.
	Cells(ctx context.Context) ([]api.Cell, int64, error)
	// PutCell creates or replaces a cell. ErrConflict: a host, alias or issuer
	// belongs to another cell, another cell is the default one, or spec.Revision is
	// neither 0 nor the cell's revision.
	PutCell(ctx context.Context, id cells.CellID, spec api.CellSpec, audit api.AuditEntry) (api.Cell, error)

	// Room returns what is known of a cell and of a tenant that is to be put there.
	// ErrNoCell.
	Room(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (Room, error)

	// Reserve gives the tenant a place in a cell, in one transaction: it looks at
	// the cell's [Room] and writes a RESERVED row. A tenant that has a row
	// already, not overtaken, gets that row and joined true, whatever the cell says.
	// ErrNoCell, ErrCellClosed, cells.ErrJurisdiction, ErrOperationReused.
	Reserve(ctx context.Context, r Reservation, audit api.AuditEntry) (row LedgerRow, joined bool, err error)
	// Settle brings ledger rows up to their routes. A settlement that is not newer
	// than its row changes nothing. Settling twice is the same as once.
	Settle(ctx context.Context, s []Settlement) error
	// Release removes a RESERVED row of that revision; its claim was refused for
	// good. Nothing happens if the row is not that.
	Release(ctx context.Context, tenant cells.TenantID, seen cells.Revision) error
	// Reserved lists RESERVED rows in tenant order, at most limit.
	Reserved(ctx context.Context, after cells.TenantID, limit int) ([]LedgerRow, error)

	// Answer returns what the operation was answered first, or nil. ErrOperationReused.
	Answer(ctx context.Context, op Operation) ([]byte, error)
	// SaveAnswer records the first answer; a later one is ignored. It returns the
	// one that is recorded.
	SaveAnswer(ctx context.Context, op Operation, answer []byte, at time.Time) ([]byte, error)

	// CreateMove records a move in state PREPARING, after looking at the target's [Room]
	// in the same transaction (of which [Waived] lets an undo pass a part); while the move is active it counts
	// as a tenant of the target. A repeated operation id answers the first record
	// and created false. A move of a campaign is recorded only while its item is RUNNING
	// and names it: ErrConflict. ErrNoCell, ErrCellClosed,
	// cells.ErrJurisdiction, ErrOperationReused, ErrMoveActive (the
	// record of the other move is returned with it).
	CreateMove(ctx context.Context, m api.Move, audit api.AuditEntry) (rec api.Move, created bool, err error)
	// Move returns a record. ErrNotFound.
	Move(ctx context.Context, id cells.MoveID) (api.Move, error)
	// Moves lists records.
	Moves(ctx context.Context, f MoveFilter) ([]api.Move, error)
	// UpdateMove changes a record by fn, alone among all writers, and raises its
	// Version. fn must be pure: it may run more than once. An error of fn is
	// returned and changes nothing. ID, Tenant, From, To and Seq cannot be changed.
	// A nil audit writes none.
	UpdateMove(ctx context.Context, id cells.MoveID, fn func(*api.Move) error, audit *api.AuditEntry) (api.Move, error)

	// MoveBeats returns the drivers of all unfinished moves.
	MoveBeats(ctx context.Context) ([]MoveBeat, error)
	// Beat raises the beats of the moves that driver drives.
	Beat(ctx context.Context, driver string) error
	// TakeMove makes driver the driver of the move if its beat is still seen; it
	// reports whether it did.
	TakeMove(ctx context.Context, seen MoveBeat, driver string) (bool, error)

	// SaveMembers writes processes and raises their beats.
	SaveMembers(ctx context.Context, rows []member.Heartbeat, at time.Time) error
	// RemoveMember forgets a process.
	RemoveMember(ctx context.Context, cell cells.CellID, instance string) error
	// Members returns all remembered processes.
	Members(ctx context.Context) ([]MemberRow, error)

	// Audit lists entries; AppendAudit adds one that belongs to no other change.
	Audit(ctx context.Context, f AuditFilter) ([]api.AuditEntry, error)
	AppendAudit(ctx context.Context, e api.AuditEntry) error

	CampaignStore
	RolloutStore

	ProvisionStore

	// Ping reports whether the store can be read.
	Ping(ctx context.Context) error
	// Close releases the store; unfinished calls fail.
	Close() error
}
