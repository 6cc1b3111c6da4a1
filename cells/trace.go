// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"sync"
	"time"
)

// The actions of a trace, named as in spec/CellMove.tla. The first twelve write a
// tenant's row; the others are orders that a cell has carried out, or had before.
const (
	ActionClaim        = "Claim"
	ActionBegin        = "Begin"
	ActionQuiesce      = "Quiesce"
	ActionGatesClosed  = "GatesClosed"
	ActionDrained      = "Drained"
	ActionCommit       = "Commit"
	ActionRollback     = "Rollback"
	ActionOpened       = "Opened"
	ActionRemoved      = "Removed"
	ActionDelete       = "Delete"
	ActionDeleted      = "Deleted"
	ActionWindowClosed = "WindowClosed"

	ActionRead        = "Read" // a row as somebody read it; its writer is not traced
	ActionCloseFence  = "CloseFence"
	ActionOpenFence   = "OpenFence"
	ActionPauseEvents = "PauseEvents"
	ActionStartEvents = "StartEvents"
	ActionDiscard     = "Discard"
	ActionReturn      = "Return"
)

var rowActions = map[EventKind]string{
	EventClaim: ActionClaim, EventBegin: ActionBegin, EventQuiesce: ActionQuiesce, EventGatesClosed: ActionGatesClosed,
	EventDrained: ActionDrained, EventCommit: ActionCommit, EventRollback: ActionRollback, EventOpened: ActionOpened,
	EventRemoved: ActionRemoved, EventDelete: ActionDelete, EventDeleted: ActionDeleted,
	EventWindowClosed: ActionWindowClosed,
}

// TraceEvent is one line of a trace: a row that was written or seen, or an order
// that was carried out.
type TraceEvent struct {
	At     time.Time `json:"at"`
	By     string    `json:"by,omitempty"`
	Tenant TenantID  `json:"tenant"`
	Action string    `json:"action"`
	// Old is the revision that Row replaced; nil when that is not known.
	Old *Revision    `json:"old,omitempty"`
	Row *TenantRoute `json:"row,omitempty"`

	Cell  CellID `json:"cell,omitempty"`
	Epoch Epoch  `json:"epoch,omitempty"`
	Floor Epoch  `json:"floor,omitempty"`
	Move  MoveID `json:"move,omitempty"`

	// Campaign is set in lines of a directory's campaigns, which have a form of their own.
	Campaign string `json:"campaign,omitempty"`
	// Rollout is the same of rollouts.
	Rollout string `json:"rollout,omitempty"`
}

// ActionOf names the action of the protocol that makes next of old; a zero old is
// a tenant without a row. The error wraps [ErrInvalid] when there is none: then
// the row was not written by the protocol. Stamps, revisions and what is for
// people are not looked at.
func ActionOf(old, next TenantRoute) (string, error) {
	for _, ev := range guesses(old, next) {
		got, _, err := Next(old, ev)
		if err == nil && got.Stamp == ev.Stamp && sameRow(got, next) {
			return rowActions[ev.Kind], nil
		}
	}
	return "", fmt.Errorf("%w: nothing makes %s of %s", ErrInvalid, describe(next), describe(old))
}

const guessStamp = "guess"

// guesses are the events that may have made next of old.
func guesses(old, next TenantRoute) []Event {
	ev := Event{Tenant: next.TenantID, Move: next.MoveID, Epoch: next.Epoch, EventMark: next.EventMark, DataMark: next.DataMark,
		Deadline: next.Deadline, OperationID: next.OperationID, Reason: next.Reason, Cell: next.CellID, Stamp: guessStamp}
	kind := func(k EventKind, change func(*Event)) Event {
		e := ev
		e.Kind = k
		if change != nil {
			change(&e)
		}
		return e
	}
	var out []Event
	for _, e := range old.Residue {
		out = append(out, Event{Kind: EventRemoved, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move, Stamp: guessStamp})
		if e.Held() {
			out = append(out, Event{Kind: EventWindowClosed, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move, Stamp: guessStamp})
		}
	}
	fallback := func(e *Event) {
		if next.Floor == 0 {
			e.Fallback = next.CellID
		}
	}
	deleting := func(e *Event) {
		e.Epoch = old.Epoch
		if i := residueOf(next, next.CellID); i >= 0 {
			e.OwnsData, e.Move = true, next.Residue[i].Move
		}
	}
	target := func(e *Event) { e.Cell = next.TargetCell }
	owning := func(e *Event) {
		e.Cell, e.OwnsData, e.UndoWindow, e.Undoes = next.TargetCell, true, next.UndoWindow, next.Undoes
	}
	opening := func(e *Event) {
		e.Move = old.MoveID
		if held, ok := next.Held(); ok { // the window is counted from when the row was written
			e.At = held.Until.Add(-old.UndoWindow)
		}
	}
	return append(out, kind(EventClaim, fallback), kind(EventBegin, target), kind(EventBegin, owning), kind(EventQuiesce, nil),
		kind(EventGatesClosed, nil), kind(EventDrained, nil), kind(EventCommit, nil), kind(EventRollback, nil),
		kind(EventOpened, opening), kind(EventDelete, deleting), kind(EventDeleted, nil))
}

// sameRow compares what the protocol decides.
func sameRow(a, b TenantRoute) bool {
	norm := func(r TenantRoute) TenantRoute {
		r = CanonicalRoute(r)
		r.Actor, r.Reason, r.Stamp, r.UpdatedAt, r.Revision = "", "", "", time.Time{}, 0
		return r
	}
	return reflect.DeepEqual(norm(a), norm(b))
}

// Tracer writes a trace as JSON lines. Safe for concurrent use; several tracers'
// output may be joined in any order.
type Tracer struct {
	by  string
	now func() time.Time

	mu   sync.Mutex // guards what follows
	enc  *json.Encoder
	err  error
	seen map[TenantID]Revision // the row that was last written down as read
}

// NewTracer returns a tracer that writes to w, which must not be written to by
// others meanwhile. by names the process in each line.
func NewTracer(w io.Writer, by string) *Tracer {
	return &Tracer{by: by, now: time.Now, enc: json.NewEncoder(w), seen: map[TenantID]Revision{}}
}

// Err returns the first error of the writer.
func (t *Tracer) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

func (t *Tracer) put(ev TraceEvent) {
	ev.By, ev.At = t.by, t.now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if ev.Action == ActionRead {
		if ev.Row.Revision == t.seen[ev.Tenant] {
			return
		}
		t.seen[ev.Tenant] = ev.Row.Revision
	}
	if err := t.enc.Encode(ev); err != nil && t.err == nil {
		t.err = err
	}
}

// Observe traces the steps of a controller; give it to [WithObserver].
func (t *Tracer) Observe(ev StepEvent) {
	if ev.Progress != nil || ev.Err != nil {
		return
	}
	if ev.Step.Wrote() {
		t.put(TraceEvent{Tenant: ev.Tenant, Action: ActionRead, Row: &ev.Route})
		return
	}
	for _, e := range Effects(ev.Route) {
		switch {
		case ev.Step == StepFence && e.Kind == EffectCloseFence:
			t.order(ActionCloseFence, e.Fence)
		case ev.Step == StepOpen && e.Kind == EffectOpenFence:
			t.order(ActionOpenFence, e.Fence)
		case ev.Step == StepEvents && e.Kind == EffectPauseEvents:
			t.order(ActionPauseEvents, FenceOrder{Cell: e.Cell, Tenant: ev.Tenant, Epoch: e.Barrier.Epoch, Move: e.Barrier.Move})
		case ev.Step == StepStart && e.Kind == EffectStartEvents:
			t.order(ActionStartEvents, FenceOrder{Cell: e.Cell, Tenant: ev.Tenant, Epoch: e.Barrier.Epoch, Move: e.Barrier.Move})
		}
	}
	if e, ok := ev.Route.Held(); ok && ev.Step == StepReturn {
		t.order(ActionReturn, FenceOrder{Cell: e.Cell, Tenant: ev.Tenant, Epoch: e.Epoch, Move: e.Move})
	}
	for _, e := range ev.Route.Residue {
		if ev.Step == StepDiscard && e.Move == ev.Move.ID {
			t.order(ActionDiscard, FenceOrder{Cell: e.Cell, Tenant: ev.Tenant, Epoch: e.Epoch, Move: e.Move})
		}
	}
}

func (t *Tracer) order(action string, o FenceOrder) {
	t.put(TraceEvent{Tenant: o.Tenant, Action: action, Cell: o.Cell, Epoch: o.Epoch, Floor: o.Floor, Move: o.Move})
}

// Table returns a table that traces every row that is written through it, with
// the revision that it replaced, and every row that is read.
func (t *Tracer) Table(table RoutingTable) RoutingTable { return tracedTable{table, t} }

type tracedTable struct {
	RoutingTable
	t *Tracer
}

func (x tracedTable) Get(ctx context.Context, tenant TenantID) (TenantRoute, error) {
	r, err := x.RoutingTable.Get(ctx, tenant)
	if err == nil {
		x.t.put(TraceEvent{Tenant: tenant, Action: ActionRead, Row: &r})
	}
	return r, err
}

func (x tracedTable) CompareAndSet(ctx context.Context, old Revision, next TenantRoute) (TenantRoute, error) {
	r, err := x.RoutingTable.CompareAndSet(ctx, old, next)
	if err == nil {
		x.t.put(TraceEvent{Tenant: r.TenantID, Action: "CompareAndSet", Old: &old, Row: &r})
	}
	return r, err
}

// Fencer returns a fencer that traces the orders that succeed.
func (t *Tracer) Fencer(f Fencer) Fencer { return tracedFencer{f, t} }

type tracedFencer struct {
	f Fencer
	t *Tracer
}

func (x tracedFencer) Close(ctx context.Context, o FenceOrder) error {
	err := x.f.Close(ctx, o)
	if err == nil {
		x.t.order(ActionCloseFence, o)
	}
	return err
}

func (x tracedFencer) Open(ctx context.Context, o FenceOrder) error {
	err := x.f.Open(ctx, o)
	if err == nil {
		x.t.order(ActionOpenFence, o)
	}
	return err
}
