// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"slices"
	"time"
)

// Next is the whole protocol: given a tenant's route and an event, it returns the
// route to be written and what has to be done once it is written. It is pure: no
// clock, no I/O, no randomness; the arguments are not changed and the result
// shares no memory with them. A tenant without a row is the zero TenantRoute.
//
// It is total: every pair of a route and an event gives either a route or a
// refusal. Refusals wrap [ErrNotApplicable] (the route is in a state in which the
// event makes no sense), [ErrOtherMove] (the route belongs to another move),
// [ErrElsewhere] (a claim lost) or [ErrInvalid] (the route or the event is
// malformed); the returned route is then the one given.
//
// An event that has already taken effect is recognised by its move and the
// route's state: the route comes back unchanged (its Stamp is not the event's),
// with the effects of the state, and nothing has to be written.
//
// The route that Next returns is a decision only after a compare-and-set from
// the row that Next was given has succeeded, and its effects may be performed
// only then.
func Next(route TenantRoute, ev Event) (TenantRoute, []Effect, error) {
	if err := CheckRoute(route); err != nil {
		return route, nil, err
	}
	if err := ev.check(); err != nil {
		return route, nil, err
	}
	if route.State != 0 && route.Epoch > maxNumber-4 {
		return route, nil, fmt.Errorf("%w: tenant %s has used up its epochs", ErrInvalid, route.TenantID)
	}
	next, changed, err := transition(route.Clone(), ev)
	if err != nil {
		return route, nil, fmt.Errorf("%s at %s: %w", ev.Kind, describe(route), err)
	}
	if changed {
		next.Stamp = ev.Stamp
		next.UpdatedAt = ev.At
		if ev.Actor != "" {
			next.Actor = ev.Actor
		}
	}
	return next, Effects(next), nil
}

func describe(r TenantRoute) string {
	if r.State == 0 {
		return "ABSENT"
	}
	s := fmt.Sprintf("%s(%s,%d)", r.State, r.CellID, r.Epoch)
	if r.MoveID != "" {
		s += " of move " + string(r.MoveID)
	}
	return s
}

func notApplicable(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNotApplicable, fmt.Sprintf(format, args...))
}

// transition changes r, which it owns. changed is false when the event has taken
// effect before.
func transition(r TenantRoute, ev Event) (_ TenantRoute, changed bool, _ error) {
	switch ev.Kind {
	case EventClaim:
		return claim(r, ev)
	case EventDelete:
		return deleteRoute(r, ev)
	case EventDeleted:
		return deleted(r, ev)
	case EventRemoved:
		return removed(r, ev)
	case EventWindowClosed:
		return windowClosed(r, ev)
	case EventBegin:
		return begin(r, ev)
	case EventOpened:
		return opened(r, ev)
	}

	// What is left belongs to a move that has begun and is not decided, or says
	// again what was decided.
	if r.MoveID != ev.Move {
		if r.MoveID != "" {
			return r, false, fmt.Errorf("%w: %s", ErrOtherMove, r.MoveID)
		}
		return r, false, notApplicable("move %s is not in progress", ev.Move)
	}
	switch ev.Kind {
	case EventQuiesce:
		return quiesce(r, ev)
	case EventGatesClosed:
		return gatesClosed(r)
	case EventDrained:
		return drained(r)
	case EventCommit:
		return commit(r, ev)
	case EventRollback:
		return rollback(r, ev)
	}
	return r, false, fmt.Errorf("%w: event kind %d", ErrInvalid, uint8(ev.Kind))
}

func claim(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	sameOp := ev.OperationID != "" && ev.OperationID == r.OperationID
	switch {
	case r.State == 0:
		if ev.Cell != ev.Fallback && ev.Fallback != "" {
			return r, false, &ElsewhereError{Route: TenantRoute{TenantID: ev.Tenant, CellID: ev.Fallback}}
		}
		r = TenantRoute{TenantID: ev.Tenant, Epoch: 1, Floor: 1}
		if ev.Cell == ev.Fallback {
			r.Floor = 0
		}
	case r.TenantID != ev.Tenant:
		return r, false, fmt.Errorf("%w: the row is tenant %s's, not %s's", ErrInvalid, r.TenantID, ev.Tenant)
	case r.Exists():
		if sameOp || r.CellID == ev.Cell {
			return r, false, nil
		}
		return r, false, &ElsewhereError{Route: r}
	case r.State == StateDeleting:
		return r, false, notApplicable("the tenant is being deleted")
	default: // StateDeleted
		if sameOp {
			return r, false, notApplicable("operation %s placed the tenant before it was deleted", ev.OperationID)
		}
		if i := residueOf(r, ev.Cell); i >= 0 {
			return r, false, notApplicable("cell %s still holds rows of move %s", ev.Cell, r.Residue[i].Move)
		}
		r.Epoch++
		r.Floor = r.Epoch
	}
	r.State = StateActive
	r.CellID = ev.Cell
	r.OperationID = ev.OperationID
	r.Reason = ""
	r.EventMark, r.DataMark = 0, ""
	return r, true, nil
}

func deleteRoute(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	switch r.State {
	case 0:
		return r, false, notApplicable("the tenant has no row")
	case StateDeleting, StateDeleted:
		if r.Epoch != ev.Epoch+1 {
			return r, false, notApplicable("epoch %d was not deleted", ev.Epoch)
		}
		return r, false, nil
	case StateActive:
	default:
		return r, false, fmt.Errorf("%w: %s", ErrOtherMove, r.MoveID)
	}
	if r.MoveID != "" {
		return r, false, fmt.Errorf("%w: %s", ErrOtherMove, r.MoveID)
	}
	if r.Epoch != ev.Epoch {
		return r, false, notApplicable("the tenant is at epoch %d, not %d", r.Epoch, ev.Epoch)
	}
	r.State = StateDeleting
	r.Epoch++
	r.Floor = r.Epoch
	release(r.Residue)
	if ev.OwnsData {
		r.Residue = append(r.Residue, Residue{Cell: r.CellID, Epoch: r.Epoch, Move: ev.Move})
	}
	return r, true, nil
}

func deleted(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	switch r.State {
	case StateDeleting:
		if r.Epoch != ev.Epoch {
			break
		}
		r.State = StateDeleted
		return r, true, nil
	case StateDeleted:
		if r.Epoch == ev.Epoch {
			return r, false, nil
		}
	}
	return r, false, notApplicable("epoch %d is not being deleted", ev.Epoch)
}

func removed(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	if r.State == 0 {
		return r, false, notApplicable("the tenant has no row")
	}
	i := slices.IndexFunc(r.Residue, Residue{Cell: ev.Cell, Epoch: ev.Epoch, Move: ev.Move}.same)
	if i < 0 {
		return r, false, nil
	}
	if r.Residue[i].Held() {
		return r, false, notApplicable("cell %s keeps its rows: move %s can still be undone", ev.Cell, ev.Move)
	}
	if !reclaimable(r, r.Residue[i]) {
		return r, false, notApplicable("the entry of cell %s belongs to what is going on", ev.Cell)
	}
	r.Residue = slices.Delete(r.Residue, i, i+1)
	if len(r.Residue) == 0 {
		r.Residue = nil
	}
	return r, true, nil
}

// windowClosed lets go of a held entry. Whoever asks again, or asks for an entry that
// is not held (any more), has what he wants.
func windowClosed(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	i := slices.IndexFunc(r.Residue, Residue{Cell: ev.Cell, Epoch: ev.Epoch, Move: ev.Move}.same)
	switch {
	case i < 0:
		return r, false, notApplicable("cell %s holds nothing of move %s", ev.Cell, ev.Move)
	case !r.Residue[i].Held():
		return r, false, nil
	}
	r.Residue[i].Until = time.Time{}
	r.Reason = ev.Reason
	return r, true, nil
}

// release lets go of every entry: what follows makes going back impossible.
func release(es []Residue) {
	for i := range es {
		es[i].Until = time.Time{}
	}
}

func begin(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	if r.MoveID == ev.Move {
		if r.TargetCell != ev.Cell || r.Undoes != ev.Undoes || ev.From != "" && r.SourceCell != ev.From {
			return r, false, fmt.Errorf("%w: move %s goes from %s to %s", ErrInvalid, r.MoveID, r.SourceCell, r.TargetCell)
		}
		return r, false, nil
	}
	if r.MoveID != "" {
		return r, false, fmt.Errorf("%w: %s", ErrOtherMove, r.MoveID)
	}
	if r.State != StateActive {
		return r, false, notApplicable("the tenant is not active")
	}
	if ev.From != "" && ev.From != r.CellID {
		return r, false, notApplicable("the tenant is in cell %s, not %s", r.CellID, ev.From)
	}
	if ev.Cell == r.CellID {
		return r, false, notApplicable("the tenant is in cell %s already", r.CellID)
	}
	kept := -1
	for i, e := range r.Residue {
		switch {
		case e.Cell == ev.Cell && ev.Undoes != "" && e.Held() && e.Move == ev.Undoes:
			kept = i
		case e.Cell == ev.Cell:
			return r, false, notApplicable("cell %s still holds rows of move %s", ev.Cell, e.Move)
		case e.Move == ev.Move:
			return r, false, notApplicable("move %s has ended", ev.Move)
		}
	}
	if ev.Undoes != "" && kept < 0 {
		return r, false, notApplicable("move %s cannot be undone: cell %s does not keep its rows (any more)", ev.Undoes, ev.Cell)
	}
	release(r.Residue)
	if kept >= 0 {
		r.Residue = slices.Delete(r.Residue, kept, kept+1)
	}
	r.MoveID, r.Undoes = ev.Move, ev.Undoes
	r.SourceCell, r.TargetCell = r.CellID, ev.Cell
	r.Base = r.Epoch
	r.EventMark, r.DataMark = 0, ""
	r.Reason = ""
	if ev.OwnsData {
		// From now on the target may hold rows. Until the move is over the entry says
		// what is to be removed if it is rolled back.
		e := Residue{Cell: ev.Cell, Epoch: r.Base + 2, Move: ev.Move}
		if ev.Undoes != "" {
			e.Back, e.Undoes = r.CellID, ev.Undoes
		}
		r.Residue = append(r.Residue, e)
		r.UndoWindow = ev.UndoWindow
	}
	return r, true, nil
}

func quiesce(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	switch r.State {
	case StateActive:
		r.State = StateQuiescing
		r.Deadline = ev.Deadline
		return r, true, nil
	case StateQuiescing, StateDraining, StateCopying:
		return r, false, nil
	}
	return r, false, notApplicable("the move is decided")
}

func gatesClosed(r TenantRoute) (TenantRoute, bool, error) {
	switch r.State {
	case StateQuiescing:
		r.State = StateDraining
		return r, true, nil
	case StateDraining, StateCopying:
		return r, false, nil
	}
	return r, false, notApplicable("no gates are closing")
}

func drained(r TenantRoute) (TenantRoute, bool, error) {
	switch r.State {
	case StateDraining:
		r.State = StateCopying
		r.Epoch = r.Base + 1
		r.Floor = r.Epoch
		return r, true, nil
	case StateCopying:
		return r, false, nil
	}
	return r, false, notApplicable("nothing is draining")
}

func commit(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	switch {
	case r.State == StateCopying:
		r.State = StateCommitting
		r.CellID = r.TargetCell
		r.Epoch = r.Base + 2
		r.Floor = r.Epoch
		r.EventMark, r.DataMark = ev.EventMark, ev.DataMark
		return r, true, nil
	case r.State == StateCommitting && r.CellID == r.TargetCell:
		return r, false, nil
	case r.State == StateCommitting:
		return r, false, notApplicable("the move was rolled back")
	}
	return r, false, notApplicable("the source is not fenced")
}

func rollback(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	switch {
	case r.State == StateCommitting && r.CellID == r.TargetCell:
		return r, false, notApplicable("the move is committed and only goes forward")
	case r.State == StateCommitting:
		return r, false, nil
	}
	// The source has been the one writer ever since Base unless its fence may have
	// been closed.
	r.Floor = r.Base
	if r.State == StateCopying {
		r.Floor = r.Base + 2
	}
	r.State = StateCommitting
	r.CellID = r.SourceCell
	r.Epoch = r.Base + 2
	r.Reason = ev.Reason
	return r, true, nil
}

func opened(r TenantRoute, ev Event) (TenantRoute, bool, error) {
	if r.State == StateActive && r.MoveID == "" && r.Epoch == ev.Epoch {
		return r, false, nil
	}
	if r.MoveID != ev.Move {
		if r.MoveID != "" {
			return r, false, fmt.Errorf("%w: %s", ErrOtherMove, r.MoveID)
		}
		return r, false, notApplicable("move %s is not in progress", ev.Move)
	}
	if r.State != StateCommitting || r.Epoch != ev.Epoch {
		return r, false, notApplicable("epoch %d is not being opened", ev.Epoch)
	}
	for i, e := range r.Residue {
		if e.Move != r.MoveID {
			continue
		}
		if r.CellID == r.TargetCell {
			e := Residue{Cell: r.SourceCell, Epoch: r.Base + 1, Move: r.MoveID}
			if r.UndoWindow > 0 {
				e.Back, e.Until = r.TargetCell, ev.At.Add(r.UndoWindow).Round(0).UTC()
			}
			r.Residue[i] = e
		}
	}
	r.State = StateActive
	r.MoveID = ""
	r.SourceCell, r.TargetCell = "", ""
	r.Base = 0
	r.UndoWindow, r.Undoes = 0, ""
	r.Deadline = time.Time{}
	return r, true, nil
}

// residueOf returns the index of the cell's entry, or -1.
func residueOf(r TenantRoute, cell CellID) int {
	return slices.IndexFunc(r.Residue, func(e Residue) bool { return e.Cell == cell })
}

// reclaimable reports whether the rows of entry e may be removed now: e must not be
// held, nor belong to a move or deletion that is still going on.
func reclaimable(r TenantRoute, e Residue) bool {
	if e.Held() || r.MoveID != "" && e.Move == r.MoveID {
		return false
	}
	return r.State != StateDeleting || e.Cell != r.CellID
}

// Reclaimable lists the cells whose leftover rows may be removed now: the
// entries of Residue that are not held and do not belong to a move or deletion in
// progress.
func (r *TenantRoute) Reclaimable() []Residue {
	var out []Residue
	for _, e := range r.Residue {
		if reclaimable(*r, e) {
			out = append(out, e)
		}
	}
	return out
}
