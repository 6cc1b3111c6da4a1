// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// UnitFilter selects units of a rollout, in order of their numbers.
type UnitFilter struct {
	Rollout api.RolloutID
	// Wave; 0 is all. States; none is all.
	Wave   int
	States []api.UnitState
	// After is the Pos of the last unit of the page before; 0 starts at the first.
	After int64
	// Limit; 0 means api.DefaultPage.
	Limit int
}

// UnitChange gives a unit another state, if [api.UnitState.May] lets it; one that it
// has already gets the reason.
type UnitChange struct {
	Unit   string
	To     api.UnitState
	Reason string
}

// Store is what a driver needs of the records. The rules of directory.Store for
// errors and audit entries hold.
type Store interface {
	// Rollout returns a record. cells.ErrNotFound.
	Rollout(ctx context.Context, id api.RolloutID) (api.Rollout, error)
	// UpdateRollout changes a record by fn, alone among all writers, and raises its
	// Version. fn must be pure: it may run more than once. An error of fn is returned
	// and changes nothing. ID, Seq, Old, New and the waves' counts cannot be changed;
	// Driver can only be given up (""). A final record holds its cells no longer. A nil
	// audit writes none.
	UpdateRollout(ctx context.Context, id api.RolloutID, fn func(*api.Rollout) error, audit *api.AuditEntry) (api.Rollout, error)
	// RolloutUnits lists units.
	RolloutUnits(ctx context.Context, f UnitFilter) ([]api.RolloutUnit, error)
	// ChangeUnits changes units in one transaction, and keeps the waves' counts. What a
	// unit may not become is left out; it reports how many were changed.
	ChangeUnits(ctx context.Context, id api.RolloutID, at time.Time, list []UnitChange) (int64, error)
	// MoveUnits gives all units of the waves first to last that are in one of the states
	// another state and reason, as far as they may, and reports how many there were.
	MoveUnits(ctx context.Context, id api.RolloutID, at time.Time, first, last int, from []api.UnitState, to api.UnitState, reason string) (int64, error)
	// AddUnits adds units to a wave, PENDING, under new numbers; those whose name is
	// there already are left out. It reports how many were added.
	AddUnits(ctx context.Context, id api.RolloutID, at time.Time, wave int, units []api.RolloutUnit) (int64, error)
}

// Fate is what is to be done with a unit of a rollout by move.
type Fate uint8

const (
	// FateMove: it is to be moved, as Move says.
	FateMove Fate = iota
	// FateThere: it is where it should be.
	FateThere
	// FateGone: it was deleted, or is in a cell that has nothing to do with the rollout.
	FateGone
	// FateStuck: there is no place for it, for Reason.
	FateStuck
)

// Placement says what is to be done with a unit.
type Placement struct {
	Unit   string
	Fate   Fate
	Move   api.PlannedItem
	Reason string
}

// Tenants moves tenants between cells; the directory's campaigns do.
type Tenants interface {
	// Place decides about units, in their order: where they are to be moved, to cells of
	// the new version with jurisdiction and capacity as hard constraints, or back home.
	Place(ctx context.Context, r *api.Rollout, units []api.RolloutUnit, back bool) ([]Placement, error)
	// Newcomers lists the tenants of the old version's cells.
	Newcomers(ctx context.Context, r *api.Rollout) ([]api.RolloutUnit, error)
	// Campaign returns a campaign's record. cells.ErrNotFound.
	Campaign(ctx context.Context, id api.CampaignID) (api.Campaign, error)
	// Items lists a campaign's items behind a number.
	Items(ctx context.Context, id api.CampaignID, after int64, limit int) ([]api.CampaignItem, error)
	// Create records the campaign r.Campaign, planned; again is no harm. With r.Back the
	// moves are undone where that is possible, whatever their tenants' budgets.
	Create(ctx context.Context, r *api.Rollout, moves []api.PlannedItem) error
	// Run, Hold and End start, pause and abort a campaign; nothing if that has no
	// meaning any more. End with rollback gives up the moves that are not decided.
	Run(ctx context.Context, r *api.Rollout, id api.CampaignID) error
	Hold(ctx context.Context, r *api.Rollout, id api.CampaignID) error
	End(ctx context.Context, r *api.Rollout, id api.CampaignID, rollback bool) error
}

// Versions gives cells versions; the provisioners do.
type Versions interface {
	// SetVersion says which version the cell is to have; again is no harm. ErrNotFound:
	// nobody provisions the cell.
	SetVersion(ctx context.Context, cell cells.CellID, version string) error
	// CellVersion returns the version that all of the cell's processes have ("" when they
	// have several or it is not known), how many are ready, and how many there are to be.
	CellVersion(ctx context.Context, cell cells.CellID) (version string, ready, total int, err error)
}

// Steps at which [Driver.Hook] is called, each after it was persisted; beside the
// kinds of events.
const (
	StepTaken   = "taken"   // this directory drives it
	StepUnits   = "units"   // units have other states
	StepCreated = "created" // the campaign is recorded
	StepRun     = "run"     // the campaign runs
	StepHeld    = "held"    // the campaign is paused
	StepEnded   = "ended"   // the campaign is aborted
	StepOrdered = "ordered" // a cell is to have another version
)

// ErrNotDriver: somebody else drives the rollout, or nobody needs to.
var ErrNotDriver = errors.New("rollout: not the driver")
