// SPDX-License-Identifier: Apache-2.0

package cells

import "fmt"

// EffectKind says what has to be done.
type EffectKind uint8

// The effects. All of them are idempotent.
const (
	// EffectOpenFence: Fence. Open the fence of Fence.Cell.
	EffectOpenFence EffectKind = iota + 1
	// EffectCloseFence: Fence. Close it; wait for who was admitted below.
	EffectCloseFence
	// EffectPauseEvents: Barrier. Stop the relay; gives the EventMark of the commit.
	EffectPauseEvents
	// EffectStartEvents: Barrier, Mark. Number on after Mark and publish.
	EffectStartEvents
	// EffectPrepare: Move. Copy and catch up while the source serves.
	EffectPrepare
	// EffectCloseGates: Cell. Edges hold, gates close; they see it in the route.
	EffectCloseGates
	// EffectDrain: Cell. Wait until no live process of Cell has the tenant in flight.
	EffectDrain
	// EffectFinish: Move. Apply the last changes and verify; gives the DataMark.
	EffectFinish
	// EffectDiscard: Residue. Remove the loser's rows. May be done any time later.
	EffectDiscard
	// EffectReturn: Residue. Apply at the entry's Cell what was committed at its Back.
	// To be done again and again while the entry is held.
	EffectReturn
)

var effectNames = [...]string{
	EffectOpenFence: "open-fence", EffectCloseFence: "close-fence", EffectPauseEvents: "pause-events",
	EffectStartEvents: "start-events", EffectPrepare: "prepare", EffectCloseGates: "close-gates",
	EffectDrain: "drain", EffectFinish: "finish", EffectDiscard: "discard",
	EffectReturn: "return",
}

// String returns the effect's name, as scripts write it.
func (k EffectKind) String() string {
	if k == 0 || int(k) >= len(effectNames) {
		return fmt.Sprintf("EffectKind(%d)", uint8(k))
	}
	return effectNames[k]
}

// Effect is one thing to do after a route has been written. Which fields count
// depends on Kind.
type Effect struct {
	Kind    EffectKind
	Cell    CellID
	Fence   FenceOrder
	Barrier BarrierOrder
	Mark    EventSeq
	Move    MoveRef
	Residue Residue
}

// String describes the effect on one line.
func (e Effect) String() string {
	switch e.Kind {
	case EffectOpenFence:
		return fmt.Sprintf("%s %s epoch=%d floor=%d", e.Kind, e.Cell, e.Fence.Epoch, e.Fence.Floor)
	case EffectCloseFence:
		return fmt.Sprintf("%s %s epoch=%d", e.Kind, e.Cell, e.Fence.Epoch)
	case EffectPauseEvents:
		return fmt.Sprintf("%s %s epoch=%d", e.Kind, e.Cell, e.Barrier.Epoch)
	case EffectStartEvents:
		return fmt.Sprintf("%s %s epoch=%d mark=%d", e.Kind, e.Cell, e.Barrier.Epoch, e.Mark)
	case EffectReturn:
		return fmt.Sprintf("%s %s from=%s epoch=%d move=%s", e.Kind, e.Cell, e.Residue.Back, e.Residue.Epoch, e.Residue.Move)
	case EffectDiscard:
		return fmt.Sprintf("%s %s epoch=%d move=%s", e.Kind, e.Cell, e.Residue.Epoch, e.Residue.Move)
	}
	return fmt.Sprintf("%s %s", e.Kind, e.Cell)
}

// Effects lists what may have to be done for a route as it stands, in order: what
// a driver does that finds the route after a crash. All of it is idempotent, and
// a driver that has been overtaken can do no harm with it: fences refuse orders
// that are not newer than they are.
func Effects(r TenantRoute) []Effect {
	m, _ := r.Move()
	fence := func(k EffectKind, move MoveID) Effect {
		return Effect{Kind: k, Cell: r.CellID, Fence: FenceOrder{
			Cell: r.CellID, Tenant: r.TenantID, Epoch: r.Epoch, Floor: r.Floor, Move: move}}
	}
	barrier := func(k EffectKind) Effect {
		return Effect{Kind: k, Cell: r.CellID, Mark: r.EventMark, Barrier: BarrierOrder{
			Cell: r.CellID, Tenant: r.TenantID, Epoch: r.Epoch, Move: r.MoveID}}
	}
	var out []Effect
	switch r.State {
	case StateActive:
		if r.MoveID != "" {
			out = append(out, Effect{Kind: EffectPrepare, Cell: r.TargetCell, Move: m})
			break
		}
		// The events of a tenant that was placed where it had lost a cut before are
		// still paused there.
		out = append(out, barrier(EffectStartEvents), fence(EffectOpenFence, ""))
	case StateQuiescing:
		out = append(out, Effect{Kind: EffectCloseGates, Cell: r.CellID, Move: m})
	case StateDraining:
		out = append(out, Effect{Kind: EffectDrain, Cell: r.CellID, Move: m})
	case StateCopying:
		pause := barrier(EffectPauseEvents)
		pause.Mark = 0
		out = append(out, fence(EffectCloseFence, r.MoveID), pause,
			Effect{Kind: EffectFinish, Cell: r.TargetCell, Move: m})
	case StateCommitting:
		out = append(out, barrier(EffectStartEvents), fence(EffectOpenFence, r.MoveID))
	case StateDeleting:
		var move MoveID
		if i := residueOf(r, r.CellID); i >= 0 {
			move = r.Residue[i].Move
		}
		pause := barrier(EffectPauseEvents)
		pause.Mark, pause.Barrier.Move = 0, move
		out = append(out, fence(EffectCloseFence, move), pause)
	}
	if e, ok := r.Held(); ok {
		out = append(out, Effect{Kind: EffectReturn, Cell: e.Cell, Residue: e})
	}
	if r.State == StateActive && r.MoveID == "" || r.State == StateDeleted {
		for _, e := range r.Reclaimable() {
			out = append(out, Effect{Kind: EffectDiscard, Cell: e.Cell, Residue: e})
		}
	}
	return out
}
