// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"time"
)

// FenceOrder asks a cell's database to change a tenant's fence. Orders are
// idempotent; an order that is not newer than the fence is refused with
// [ErrStaleOrder] (the same order again succeeds).
type FenceOrder struct {
	Cell   CellID   `json:"cell"`
	Tenant TenantID `json:"tenant"`
	Epoch  Epoch    `json:"epoch"`
	// Floor, for Open: the lowest epoch at which admissions stay good if the fence
	// has been open, without a break, since that epoch. Otherwise Epoch counts.
	Floor Epoch `json:"floor"`
	// Move is the move that the order belongs to, or "".
	Move MoveID `json:"move,omitempty"`
}

// Fencer is the storage fence (L3) of every cell, as a move's driver sees it.
type Fencer interface {
	// Close closes the fence at Epoch. After it returns nil, no transaction
	// admitted below Epoch can commit any more, at any isolation level.
	Close(ctx context.Context, o FenceOrder) error
	// Open opens the fence at Epoch. It is called only after the route has given
	// Epoch to Cell.
	Open(ctx context.Context, o FenceOrder) error
}

// BarrierOrder asks a cell's event relay to stop or start a tenant's events.
type BarrierOrder struct {
	Cell   CellID   `json:"cell"`
	Tenant TenantID `json:"tenant"`
	Epoch  Epoch    `json:"epoch"`
	Move   MoveID   `json:"move,omitempty"`
}

// EventBarrier is the event fence (L4) of every cell.
type EventBarrier interface {
	// Pause stops publication of the tenant's events at the cell and returns the
	// last event_seq that is committed there. After it returns nothing of the
	// tenant is published from that cell until Start. The fence is closed when it
	// is called, so the mark is final.
	Pause(ctx context.Context, o BarrierOrder) (EventSeq, error)
	// Start lets the cell number on after mark and publish what is not yet published.
	Start(ctx context.Context, o BarrierOrder, mark EventSeq) error
}

// Drainer waits for the processes of a route's cell.
type Drainer interface {
	// Drain returns nil once each live process of route.CellID has closed its gate
	// for the tenant at route.Epoch and has nothing of it in flight. It returns
	// when the context ends; which processes still hold it back is in the error.
	Drain(ctx context.Context, route TenantRoute) error
}

// DataMover carries one tenant's rows between cells that own their data. All
// steps are idempotent and resumable: a driver may repeat any of them after a
// crash, and another driver may be repeating them at the same time.
type DataMover interface {
	// Preflight finds what the move would lose or break, without changing anything.
	Preflight(ctx context.Context, m MoveRef) (Preflight, error)
	// Prepare copies and catches up while the source serves. It returns once the
	// remaining lag is small enough for a cut, with the predicted pause.
	Prepare(ctx context.Context, m MoveRef, progress func(Progress)) (Prediction, error)
	// Finish applies the source's last changes and verifies both sides. It is
	// called after the source's fence is closed at m.CloseEpoch().
	Finish(ctx context.Context, m MoveRef, progress func(Progress)) (mark string, err error)
	// Discard removes the rows that the loser of a cut still holds, in bounded
	// batches, and verifies that they are gone. It runs only while the fence of
	// r.Cell is closed at exactly r.Epoch (it raises it to that if it is lower,
	// and refuses with [ErrStaleOrder] if it is higher).
	Discard(ctx context.Context, tenant TenantID, r Residue, progress func(Progress)) error
}

// Returner is what a [DataMover] is that can keep a way back for moves with an undo
// window: it begins to capture the target's changes for m.Back() in Prepare, fixes
// their first position in Finish, when nobody writes, and adopts the way back of
// m.Undoes as the beginning of m. Discard frees what r.Back captures.
type Returner interface {
	// Return applies at r.Cell what has been committed at r.Back so far, and returns.
	// Idempotent, bounded by ctx, safe from several processes. [ErrReturnLost] when
	// the changes are gone for good; [ErrStaleOrder] when the fence of r.Cell has
	// passed r.Epoch or its rows are being removed. Nothing is applied then.
	Return(ctx context.Context, tenant TenantID, r Residue) (Returned, error)
}

// Returned is what one round of a way back did.
type Returned struct {
	// Changes that were applied.
	Changes int64 `json:"changes"`
	// Lag is the age of the oldest change that is not applied, at most: the time from
	// when the position that was reached was asked for. What was committed since then
	// comes with the next round.
	Lag time.Duration `json:"lag"`
}

// Comparison is one comparison of a table's rows at both ends of a move, which found
// them equal: one that does not ends the move.
type Comparison struct {
	Table string `json:"table"`
	// Position in the source's changes that both sides were at.
	Position string `json:"position"`
	// Whole: all rows of the tenant were compared. Otherwise those of Keys keys that had
	// changed since the comparison before.
	Whole bool  `json:"whole,omitempty"`
	Keys  int64 `json:"keys,omitempty"`
	// Rows were found, with digest Sum, on each side. The digest covers every column and
	// does not depend on order.
	Rows int64  `json:"rows"`
	Sum  string `json:"sum"`
}

// Prover is what a [DataMover] may offer besides: a Finish that also returns what was
// compared on the way to it, for the receipt of the move.
type Prover interface {
	FinishProved(ctx context.Context, m MoveRef, progress func(Progress)) (mark string, compared []Comparison, err error)
}

// Preflight is what a dry run finds.
type Preflight struct {
	Findings []Finding `json:"findings"`
	Rows     int64     `json:"rows"`
	Bytes    int64     `json:"bytes"`
	// Copy is the estimated duration of the snapshot; Pause of the cut.
	Copy  time.Duration `json:"copy"`
	Pause time.Duration `json:"pause"`
}

// Blocked reports whether a finding forbids the move.
func (p Preflight) Blocked() bool {
	for _, f := range p.Findings {
		if f.Blocking {
			return true
		}
	}
	return false
}

// Finding is one thing that a preflight has to say, with what to do about it.
type Finding struct {
	Code     string `json:"code"`
	Cell     CellID `json:"cell,omitempty"`
	Table    string `json:"table,omitempty"`
	Message  string `json:"message"`
	Fix      string `json:"fix"`
	Blocking bool   `json:"blocking"`
	// Note: good to know; nothing is lost or broken, and nothing has to be done.
	Note bool `json:"note,omitempty"`
}

// FindingBudget is the code of a finding that the tenant's budget does not allow the pause.
const FindingBudget = "budget"

// Severity is "blocking": the move is refused; "warning": something may be lost or
// break unless the fix is made; or "note".
func (f Finding) Severity() string {
	switch {
	case f.Blocking:
		return "blocking"
	case f.Note:
		return "note"
	}
	return "warning"
}

// Prediction is what a prepared move expects of its cut.
type Prediction struct {
	Pause time.Duration `json:"pause"`
	// LagChanges is the number of changes not yet applied, WriteRate in changes
	// per second at the source.
	LagChanges int64   `json:"lag_changes"`
	WriteRate  float64 `json:"write_rate"`
}

// Progress is how far a step is. Total is an estimate and 0 when unknown.
type Progress struct {
	Phase string `json:"phase"` // snapshot, catchup, verify, final, remove
	Table string `json:"table,omitempty"`
	Done  int64  `json:"done"`
	Total int64  `json:"total"`
	Bytes int64  `json:"bytes"`
	// Left is the estimated time left; 0 when unknown.
	Left time.Duration `json:"left,omitempty"`
	// Waiting is what the step waits for, for people; "" while it goes on.
	Waiting string `json:"waiting,omitempty"`
}
