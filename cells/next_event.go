// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"fmt"
	"time"
)

// EventKind says what happened, or what is asked for.
type EventKind uint8

// The events. The comment names the fields of Event that count, besides Stamp,
// At and Actor, and the step that the event makes.
const (
	// EventClaim places a tenant that has no row, or a tombstone: Tenant, Cell,
	// OperationID, Fallback. ABSENT -> ACTIVE(Cell,1); DELETED(N) -> ACTIVE(Cell,N+1).
	EventClaim EventKind = iota + 1
	// EventBegin starts preparing a move: Move, Cell (the target), From (the source,
	// "" for any), OwnsData, UndoWindow, Undoes. ACTIVE(A,N) -> ACTIVE(A,N) with MoveID.
	// With Undoes the target is the cell whose entry is held by that move; otherwise
	// a window that is open closes.
	EventBegin
	// EventQuiesce starts the cut: Move, Deadline. ACTIVE(A,N) -> QUIESCING(A,N).
	EventQuiesce
	// EventGatesClosed: Move. The gates are told. QUIESCING(A,N) -> DRAINING(A,N).
	EventGatesClosed
	// EventDrained: Move. Nothing is in flight. DRAINING(A,N) -> COPYING(A,N+1).
	EventDrained
	// EventCommit decides for the target: Move, EventMark, DataMark. The source's fence
	// is closed at N+1 and the target has everything.
	// COPYING(A,N+1) -> COMMITTING(B,N+2).
	EventCommit
	// EventRollback decides for the source: Move, Reason. From ACTIVE with a move,
	// QUIESCING, DRAINING or COPYING -> COMMITTING(A,N+2).
	EventRollback
	// EventOpened: Move, Epoch. The fence is open. COMMITTING(X,N+2) -> ACTIVE(X,N+2).
	EventOpened
	// EventRemoved drops an entry of Residue whose rows are gone: Cell, Epoch, Move.
	EventRemoved
	// EventDelete removes a tenant: Epoch (the one it is served at), OwnsData and then
	// Move (an id for the removal). ACTIVE(A,N) -> DELETING(A,N+1).
	EventDelete
	// EventDeleted: Epoch. The fence is closed. DELETING(A,N) -> DELETED(A,N).
	EventDeleted
	// EventWindowClosed ends the time in which a move can be undone: Cell, Epoch and
	// Move of the held entry, Reason. The entry becomes an ordinary one: its rows may
	// be removed. It races an undo's EventBegin: one of the two is written.
	EventWindowClosed
)

var eventNames = [...]string{
	EventClaim: "claim", EventBegin: "begin", EventQuiesce: "quiesce", EventGatesClosed: "gates-closed",
	EventDrained: "drained", EventCommit: "commit", EventRollback: "rollback", EventOpened: "opened",
	EventRemoved: "removed", EventDelete: "delete", EventDeleted: "deleted",
	EventWindowClosed: "window-closed",
}

// String returns the event's name, as scripts write it.
func (k EventKind) String() string {
	if k == 0 || int(k) >= len(eventNames) {
		return fmt.Sprintf("EventKind(%d)", uint8(k))
	}
	return eventNames[k]
}

// MaxUndoWindow bounds an undo window: a year.
const MaxUndoWindow = 366 * 24 * time.Hour

// Event is the input of [Next]. Which fields count depends on Kind; the others
// are ignored.
type Event struct {
	Kind   EventKind
	Tenant TenantID
	Move   MoveID
	// Cell is the cell to claim, the target to move to, or the cell of a residue.
	Cell CellID
	// From is the cell that a move expects the tenant in; "" expects nothing.
	From CellID
	// Fallback, for EventClaim: the cell that serves tenants without a row, at
	// epoch 0, or "". A claim for it keeps epoch 0 good (Floor 0); a claim for
	// another cell is refused: that is a move.
	Fallback CellID
	// Epoch is the one that the event is about.
	Epoch Epoch
	// Deadline bounds the cut. It is written, never compared.
	Deadline time.Time
	// EventMark and DataMark are what the commit records.
	EventMark EventSeq
	DataMark  string
	// OwnsData: cells own their data, so the loser of a move holds rows that have to
	// be removed.
	OwnsData bool
	// UndoWindow, with OwnsData: for how long the move may be undone after its commit.
	UndoWindow time.Duration
	// Undoes is the move that a move takes back, or "".
	Undoes      MoveID
	OperationID string
	Reason      string

	// Actor, if set, At and Stamp are written to the row when it changes.
	Actor string
	At    time.Time
	Stamp string
}

func (ev Event) check() error {
	if ev.Kind == 0 || int(ev.Kind) >= len(eventNames) {
		return fmt.Errorf("%w: event kind %d", ErrInvalid, uint8(ev.Kind))
	}
	var errs [3]error
	switch ev.Kind {
	case EventClaim:
		errs[0], errs[1] = ev.Tenant.Validate(), ev.Cell.Validate()
		if ev.Fallback != "" {
			errs[2] = ev.Fallback.Validate()
		}
	case EventBegin:
		errs[0], errs[1] = ev.Move.Validate(), ev.Cell.Validate()
		if ev.From != "" {
			errs[2] = ev.From.Validate()
		}
		switch {
		case ev.UndoWindow < 0 || ev.UndoWindow > MaxUndoWindow:
			errs[1] = fmt.Errorf("%w: undo window of %v, want 0 to %v", ErrInvalid, ev.UndoWindow, MaxUndoWindow)
		case ev.Undoes != "" && (ev.Undoes == ev.Move || !ev.OwnsData):
			errs[1] = fmt.Errorf("%w: move %s undoes %s", ErrInvalid, ev.Move, ev.Undoes)
		case ev.Undoes != "":
			errs[2] = errors.Join(errs[2], ev.Undoes.Validate())
		}
	case EventQuiesce:
		errs[0] = ev.Move.Validate()
		if ev.Deadline.IsZero() {
			errs[1] = fmt.Errorf("%w: a cut needs a deadline", ErrInvalid)
		}
	case EventGatesClosed, EventDrained, EventCommit, EventRollback, EventOpened:
		errs[0] = ev.Move.Validate()
	case EventRemoved, EventWindowClosed:
		errs[0], errs[1] = ev.Move.Validate(), ev.Cell.Validate()
	case EventDelete:
		if ev.OwnsData {
			errs[0] = ev.Move.Validate()
		}
	}
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("event %s: %w", ev.Kind, err)
		}
	}
	return nil
}

// ElsewhereError is how a claim is refused: it carries the winner. It wraps
// [ErrElsewhere].
type ElsewhereError struct {
	// Route is the tenant's row. Its State is 0 when the tenant has no row and is
	// served by CellID for that reason.
	Route TenantRoute
}

// Error implements error.
func (e *ElsewhereError) Error() string {
	if e.Route.State == 0 {
		return fmt.Sprintf("%v: tenant %s is served by the default cell %s; move it", ErrElsewhere, e.Route.TenantID, e.Route.CellID)
	}
	return fmt.Sprintf("%v: tenant %s is in cell %s", ErrElsewhere, e.Route.TenantID, e.Route.CellID)
}

// Unwrap returns [ErrElsewhere].
func (e *ElsewhereError) Unwrap() error { return ErrElsewhere }

// CheckRoute reports whether a row can have been written by the protocol: beyond
// [ValidateRoute] it compares the state with the move's epochs and cells. The
// zero route (no row) is good. The error wraps [ErrInvalid].
func CheckRoute(r TenantRoute) error {
	if r.State == 0 {
		if r.TenantID != "" || r.CellID != "" || r.Epoch != 0 || r.MoveID != "" || len(r.Residue) > 0 {
			return fmt.Errorf("%w: route of tenant %q has no state", ErrInvalid, r.TenantID)
		}
		return nil
	}
	if err := ValidateRoute(r); err != nil {
		return err
	}
	if err := checkProtocol(r); err != nil {
		return fmt.Errorf("%w: route of tenant %q: %w", ErrInvalid, r.TenantID, err)
	}
	return nil
}

func checkProtocol(r TenantRoute) error {
	for i, e := range r.Residue {
		if e.Epoch > r.Epoch && (r.MoveID == "" || e.Move != r.MoveID) {
			return fmt.Errorf("residue at epoch %d, above %d", e.Epoch, r.Epoch)
		}
		if e.Held() && (r.State != StateActive || r.MoveID != "" || e.Back != r.CellID || e.Undoes != "") {
			return fmt.Errorf("the residue of cell %s is held, its changes would come from %q", e.Cell, e.Back)
		}
		for _, o := range r.Residue[:i] {
			if o.Held() && e.Held() {
				return fmt.Errorf("cells %s and %s are both held", o.Cell, e.Cell)
			}
			if o.Cell == e.Cell {
				return fmt.Errorf("two residues in cell %s", e.Cell)
			}
		}
	}
	if r.MoveID == "" {
		if r.UndoWindow != 0 || r.Undoes != "" {
			return errors.New("an undo without a move")
		}
		return nil
	}
	if r.UndoWindow < 0 || r.UndoWindow > MaxUndoWindow || r.Undoes == r.MoveID {
		return fmt.Errorf("undo window of %v, undoes %q", r.UndoWindow, r.Undoes)
	}
	epoch, cell := r.Base, r.SourceCell
	switch r.State {
	case StateCopying:
		epoch = r.Base + 1
	case StateCommitting:
		epoch, cell = r.Base+2, r.CellID
	}
	if r.Epoch != epoch || r.CellID != cell {
		return fmt.Errorf("%s at (%s,%d) in a move from (%s,%d)", r.State, r.CellID, r.Epoch, r.SourceCell, r.Base)
	}
	return nil
}
