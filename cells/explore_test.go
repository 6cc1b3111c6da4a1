// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"
)

// xconfig bounds an exploration.
type xconfig struct {
	name    string
	cells   int
	drivers int
	moves   uint8
	writes  uint8
	deletes uint8
	// fallback: the tenant starts without a row and is served by cell a at epoch 0.
	// Otherwise, with deletes, it starts without a row; without, in cell a.
	fallback bool
	// undo: moves have undo windows, and undos count as moves.
	undo bool
	// settle checks in every state that one driver alone reaches a home (I6).
	settle bool
	// deep leaves out the checks of single rows: only cells and clients count.
	deep bool
}

type explorer struct {
	cfg    xconfig
	rules  xrules
	rows   []TenantRoute
	orders []xorder
	order  map[xorder]uint8
	owed   map[uint16][]xorder
	nexts  map[xcasKey]uint16
	seed   maphash.Seed
	seen   map[uint64]struct{}
	states []xstate
	parent []int32
	label  []string
	acts   map[string]int
}

type violation struct {
	err   error
	trace []string
}

func (v *violation) Error() string {
	return fmt.Sprintf("%v, in %d steps:\n  %s", v.err, len(v.trace), strings.Join(v.trace, "\n  "))
}

func (x *explorer) rowID(r TenantRoute) uint16 {
	for i := range x.rows {
		if reflect.DeepEqual(x.rows[i], r) {
			return uint16(i)
		}
	}
	if len(x.rows) == math.MaxUint16 {
		panic("too many rows")
	}
	x.rows = append(x.rows, r)
	return uint16(len(x.rows) - 1)
}

func (x *explorer) send(s *xstate, o xorder) {
	i, ok := x.order[o]
	if !ok {
		i = uint8(len(x.orders))
		if len(x.orders) == 256 {
			panic("too many orders")
		}
		x.order[o] = i
		x.orders = append(x.orders, o)
	}
	s.sent.add(i)
}

var xdeadline = time.Unix(1, 0)

func xmove(n uint8) MoveID { return MoveID(fmt.Sprintf("m%d", n)) }

func xmoveNum(m MoveID) uint8 {
	if m == "" {
		return 0
	}
	return m[1] - '0'
}

func (x *explorer) initial() xstate {
	var s xstate
	var row TenantRoute
	switch {
	case x.cfg.fallback:
		s.cells[0] = xcell{exists: true, open: true}
	case x.cfg.deletes == 0:
		row, _, _ = Next(TenantRoute{}, Event{Kind: EventClaim, Tenant: "t", Cell: "a"})
		s.cells[0] = xcell{exists: true, open: true, epoch: 1, floor: 1, since: 1}
	}
	s.row = x.rowID(row)
	for i := range s.drivers {
		s.drivers[i].snap = s.row
	}
	return s
}

// explore visits every reachable state. It returns the first violation found, in
// a breadth-first order, so with one of the shortest traces.
func explore(cfg xconfig, rules xrules) (int, map[string]int, error) {
	x := &explorer{cfg: cfg, rules: rules, order: map[xorder]uint8{}, owed: map[uint16][]xorder{}, nexts: map[xcasKey]uint16{}, seed: maphash.MakeSeed(),
		seen: map[uint64]struct{}{}, acts: map[string]int{}}
	start := x.initial()
	x.seen[maphash.Comparable(x.seed, start)] = struct{}{}
	x.states, x.parent, x.label = []xstate{start}, []int32{-1}, []string{"start"}
	for i := 0; i < len(x.states); i++ {
		s := x.states[i]
		var bad error
		x.successors(s, func(label func() string, act string, n xstate) {
			if bad != nil {
				return
			}
			h := maphash.Comparable(x.seed, n)
			_, old := x.seen[h]
			if old {
				return
			}
			x.acts[act]++
			err := n.check(x)
			if err == nil && !cfg.deep {
				err = s.checkStep(&n, x)
			}
			if err == nil && cfg.settle {
				err = x.settles(n)
			}
			x.seen[h] = struct{}{}
			x.states = append(x.states, n)
			x.parent = append(x.parent, int32(i))
			x.label = append(x.label, label())
			if err != nil {
				bad = x.violation(err)
			}
		})
		if bad != nil {
			return i, x.acts, bad
		}
	}
	return len(x.states), x.acts, nil
}

func (x *explorer) violation(err error) error {
	v := &violation{err: err}
	for i := int32(len(x.states) - 1); i > 0; i = x.parent[i] {
		v.trace = append(v.trace, fmt.Sprintf("%s => %s", x.label[i], describe(x.rows[x.states[i].row])))
	}
	slices.Reverse(v.trace)
	return v
}

// yield is given a successor; its label is made only when it is new.
type yield func(label func() string, act string, n xstate)

func (x *explorer) successors(s xstate, emit yield) {
	for i := range x.cfg.drivers {
		x.driver(s, i, emit)
	}
	// Late orders: everything that was ever sent may arrive now, again.
	for b := range x.orders {
		if !s.sent.has(uint8(b)) {
			continue
		}
		n := s
		o := x.orders[b]
		n.apply(o, &x.rules)
		emit(func() string { return "late " + o.String() }, "late", n)
	}
	// Clients: whoever is open takes writes.
	for i := range x.cfg.cells {
		if !s.cells[i].open || s.wid == x.cfg.writes {
			continue
		}
		n := s
		c := &n.cells[i]
		n.wid++
		n.exp, c.value, c.rows = n.wid, n.wid, true
		n.expSeq++
		c.seq++
		emit(func() string { return fmt.Sprintf("write %d at %s", n.wid, xcellNames[i]) }, "write", n)
	}
	x.member(s, emit)
}

// member is a process of the row's cell that has just read the row and orders its
// own fence open, as every process may for ACTIVE and COMMITTING rows.
func (x *explorer) member(s xstate, emit yield) {
	r := x.rows[s.row]
	if r.State == 0 || r.State != StateActive && r.State != StateCommitting && !x.rules.memberOpensAny {
		return
	}
	n := s
	if r.State == StateCommitting && !x.rules.memberSkipsStart {
		st := xorder{kind: xStart, cell: uint8(xcellIndex(r.CellID)), epoch: uint8(r.Epoch), arg: uint8(r.EventMark), move: xmoveNum(r.MoveID)}
		if !n.apply(st, &x.rules) {
			return
		}
		x.send(&n, st)
	}
	o := xorder{kind: xOpen, cell: uint8(xcellIndex(r.CellID)), epoch: uint8(r.Epoch), floor: uint8(r.Floor)}
	x.send(&n, o)
	emit(func() string { return "member sends " + o.String() }, "member-send", n)
	n.apply(o, &x.rules)
	emit(func() string { return "member " + o.String() }, "member", n)
}

// due lists the orders that a driver gives for a row, in order. The value that an
// import carries is filled in when it is sent.
func (x *explorer) due(row uint16) []xorder {
	if out, ok := x.owed[row]; ok {
		return out
	}
	r := x.rows[row]
	m, base := xmoveNum(r.MoveID), uint8(r.Base)
	var out []xorder
	for _, e := range Effects(r) {
		o := xorder{cell: uint8(xcellIndex(e.Cell)), epoch: uint8(e.Fence.Epoch), move: m}
		switch e.Kind {
		case EffectPrepare:
			claim := xorder{kind: xClose, cell: o.cell, epoch: base + 1, floor: base + 1, move: m}
			if r.Undoes != "" {
				claim = xorder{kind: xAdopt, cell: o.cell, epoch: base + 1, floor: base + 1, move: m, arg: xmoveNum(r.Undoes)}
			}
			out = append(out, claim, xorder{kind: xImport, cell: o.cell, epoch: base + 1, move: m})
		case EffectCloseFence:
			if x.rules.skipFence && r.State == StateCopying {
				continue
			}
			o.kind, o.floor, o.move = xClose, uint8(e.Fence.Floor), xmoveNum(e.Fence.Move)
			out = append(out, o)
		case EffectPauseEvents:
			if x.rules.skipPause {
				continue
			}
			o.kind, o.epoch = xPause, uint8(e.Barrier.Epoch)
			out = append(out, o)
		case EffectFinish:
			out = append(out, xorder{kind: xImport, cell: o.cell, epoch: base + 1, move: m})
			if x.rules.openBeforeDecide {
				out = append(out, xorder{kind: xOpen, cell: o.cell, epoch: base + 2, floor: base + 2, move: m})
			}
		case EffectStartEvents:
			if r.State != StateCommitting {
				continue
			}
			o.kind, o.epoch, o.arg = xStart, uint8(e.Barrier.Epoch), uint8(e.Mark)
			out = append(out, o)
		case EffectOpenFence:
			if r.State != StateCommitting {
				continue // the member does it
			}
			o.kind, o.floor = xOpen, uint8(e.Fence.Floor)
			out = append(out, o)
		}
	}
	x.owed[row] = out
	return out
}

// order returns the driver's next order, if it has one left.
func (x *explorer) nextOrder(s *xstate, d xdriver) (o xorder, ok bool) {
	due := x.due(d.snap)
	if int(d.done) >= len(due) {
		return o, false
	}
	o = due[d.done]
	if o.kind == xImport {
		o.arg = s.cells[xcellIndex(x.rows[d.snap].SourceCell)].value
	}
	return o, true
}

// perform has the driver give its next order and see the answer.
func (x *explorer) perform(n *xstate, i int, o xorder) bool {
	x.send(n, o)
	if !n.apply(o, &x.rules) {
		return false
	}
	r := x.rows[n.drivers[i].snap]
	switch {
	case o.kind == xPause:
		n.drivers[i].mark = n.cells[o.cell].seq
	case o.kind == xImport && r.State == StateCopying:
		// The end of an import is verified: both sides hold the same.
		if n.cells[o.cell].value != n.cells[xcellIndex(r.SourceCell)].value {
			return false
		}
	}
	n.drivers[i].done++
	return true
}

func (x *explorer) driver(s xstate, i int, emit yield) {
	d := s.drivers[i]
	who := fmt.Sprintf("driver %d ", i+1)
	if d.snap != s.row || d.done > 0 {
		n := s
		n.drivers[i] = xdriver{snap: s.row}
		emit(func() string { return who + "reads" }, "read", n)
	}
	r := x.rows[d.snap]
	if r.MoveID != "" && (r.State != StateCommitting || x.rules.rollbackAfterCommit) {
		x.cas(s, i, Event{Kind: EventRollback, Move: r.MoveID}, emit)
	}
	if o, ok := x.nextOrder(&s, d); ok {
		n := s
		x.send(&n, o)
		emit(func() string { return who + "sends, unanswered, " + o.String() }, "send", n)
		x.perform(&n, i, o)
		emit(func() string { return who + o.String() }, "effect", n)
		return
	}
	if ev, ok := forward(r, d); ok {
		x.cas(s, i, ev, emit)
		return
	}
	x.idle(s, i, emit)
}

// forward is the event that follows when a row's effects have been performed.
func forward(r TenantRoute, d xdriver) (Event, bool) {
	ev := Event{Move: r.MoveID, Epoch: r.Epoch, EventMark: EventSeq(d.mark), Deadline: xdeadline}
	switch {
	case r.Preparing():
		ev.Kind = EventQuiesce
	case r.State == StateQuiescing:
		ev.Kind = EventGatesClosed
	case r.State == StateDraining:
		ev.Kind = EventDrained
	case r.State == StateCopying:
		ev.Kind = EventCommit
	case r.State == StateCommitting:
		ev.Kind = EventOpened
	case r.State == StateDeleting:
		ev.Kind = EventDeleted
	default:
		return Event{}, false
	}
	return ev, true
}

// idle is a driver whose row asks for nothing: it may begin something.
func (x *explorer) idle(s xstate, i int, emit yield) {
	r := x.rows[s.drivers[i].snap]
	x.window(s, i, emit)
	removable := r.Reclaimable()
	if x.rules.removeHeld {
		removable = r.Residue
	}
	for _, e := range removable {
		n := s
		ok := n.cells[xcellIndex(e.Cell)].rows
		if !x.rules.removedBeforeDiscard {
			o := xorder{kind: xDiscard, cell: uint8(xcellIndex(e.Cell)), epoch: uint8(e.Epoch), floor: uint8(e.Epoch), move: xmoveNum(e.Move)}
			x.send(&n, o)
			ok = n.apply(o, &x.rules)
			emit(func() string { return fmt.Sprintf("driver %d %v", i+1, o) }, "discard", n)
		}
		if ok {
			x.cas(n, i, Event{Kind: EventRemoved, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move}, emit)
		}
	}
	if r.State == StateActive {
		for c := range x.cfg.cells {
			if s.moves < x.cfg.moves {
				ev := Event{Kind: EventBegin, Move: xmove(s.moves + 1), Cell: xcellNames[c], OwnsData: true}
				if x.cfg.undo {
					ev.UndoWindow = time.Second
				}
				x.cas(s, i, ev, emit)
			}
		}
		if s.deletes < x.cfg.deletes {
			x.cas(s, i, Event{Kind: EventDelete, Epoch: r.Epoch, OwnsData: true, Move: MoveID(fmt.Sprintf("d%d", 9-s.deletes))}, emit)
		}
		return
	}
	for c := range x.cfg.cells {
		ev := Event{Kind: EventClaim, Tenant: "t", Cell: xcellNames[c]}
		if x.cfg.fallback {
			ev.Fallback = "a"
		}
		x.cas(s, i, ev, emit)
	}
}

// window is what a driver may do about a held entry: have the changes brought back,
// undo the move, or close the window.
func (x *explorer) window(s xstate, i int, emit yield) {
	r := x.rows[s.drivers[i].snap]
	e, ok := r.Held()
	if !ok && x.rules.undoAfterClose && r.State == StateActive {
		for _, e = range r.Residue {
			ok = ok || e.Back != ""
		}
	}
	if !ok {
		return
	}
	o := xorder{kind: xReturn, cell: uint8(xcellIndex(e.Cell)), epoch: uint8(e.Epoch), move: xmoveNum(e.Move), arg: s.cells[xcellIndex(e.Back)].value}
	n := s
	x.send(&n, o)
	emit(func() string { return fmt.Sprintf("driver %d sends, unanswered, %v", i+1, o) }, "send", n)
	n.apply(o, &x.rules)
	emit(func() string { return fmt.Sprintf("driver %d %v", i+1, o) }, "return", n)
	x.cas(s, i, Event{Kind: EventWindowClosed, Cell: e.Cell, Epoch: e.Epoch, Move: e.Move}, emit)
	if s.moves < x.cfg.moves {
		x.cas(s, i, Event{Kind: EventBegin, Move: xmove(s.moves + 1), Cell: e.Cell, OwnsData: true, Undoes: e.Move}, emit)
	}
}

type xcasKey struct {
	row uint16
	ev  Event
}

// cas has the driver write what Next makes of the row that it read.
func (x *explorer) cas(s xstate, i int, ev Event, emit yield) {
	from := s.drivers[i].snap
	if from != s.row {
		cur, read := x.rows[s.row], x.rows[from]
		if !x.rules.adoptsOther && (!x.rules.casIgnoresRevision || cur.State != read.State) {
			return
		}
	}
	key := xcasKey{from, ev}
	to, ok := x.nexts[key]
	if !ok {
		to = from
		if next, err := x.mutated(x.rows[from], ev); err == nil {
			to = x.rowID(next)
		}
		x.nexts[key] = to
	}
	if to == from {
		return
	}
	n := s
	n.drivers[i] = xdriver{snap: to}
	if from != s.row && x.rules.adoptsOther {
		if x.rows[s.row].State == x.rows[to].State && to != s.row {
			emit(func() string { return fmt.Sprintf("driver %d believes that it wrote %s", i+1, ev.Kind) }, "believe", n)
		}
		return
	}
	n.row = to
	switch ev.Kind {
	case EventBegin:
		n.moves++
	case EventDelete:
		n.deletes++
	case EventClaim:
		if c := &n.cells[xcellIndex(ev.Cell)]; ev.Fallback == "" {
			c.merged = c.rows
			n.exp, n.expSeq = 0, c.seq
		}
	}
	emit(func() string { return fmt.Sprintf("driver %d writes %s", i+1, ev.Kind) }, ev.Kind.String(), n)
}

// mutated is Next, but for the rules that are broken.
func (x *explorer) mutated(r TenantRoute, ev Event) (TenantRoute, error) {
	ru := &x.rules
	if ru.beginOverResidue && ev.Kind == EventBegin || ru.claimOverResidue && ev.Kind == EventClaim {
		r.Residue = slices.DeleteFunc(slices.Clone(r.Residue), func(e Residue) bool { return e.Cell == ev.Cell })
	}
	if ru.removeHeld && ev.Kind == EventRemoved || ru.undoAfterClose && ev.Undoes != "" {
		r = r.Clone()
		for i := range r.Residue {
			if e := &r.Residue[i]; ru.removeHeld {
				e.Until = time.Time{}
			} else if e.Move == ev.Undoes {
				e.Until = xdeadline
			}
		}
	}
	if ru.rollbackAfterCommit && ev.Kind == EventRollback && r.State == StateCommitting && r.CellID == r.TargetCell {
		r.CellID = r.SourceCell
		return r, nil
	}
	next, _, err := Next(r, ev)
	switch {
	case err != nil:
	case ru.rollbackSameEpoch && ev.Kind == EventRollback && r.State != StateCommitting:
		next = r
		next.State, next.Epoch, next.Floor = StateActive, r.Base, r.Base
		next.MoveID, next.SourceCell, next.TargetCell, next.Base = "", "", "", 0
		next.Residue = nil
	case ru.floorKept && ev.Kind == EventRollback && r.State == StateCopying:
		next.Floor = next.Base
	case ru.claimRestartsEpoch && ev.Kind == EventClaim:
		next.Epoch, next.Floor = 1, 1
	}
	return next, err
}

// settles checks that one driver alone, from here, finds the tenant one home.
func (x *explorer) settles(s xstate) error {
	const d = 0
	for range 64 {
		s.drivers[d] = xdriver{snap: s.row}
		failed := false
		for !failed {
			o, ok := x.nextOrder(&s, s.drivers[d])
			if !ok {
				break
			}
			failed = !x.perform(&s, d, o)
		}
		r := x.rows[s.row]
		ev, ok := forward(r, s.drivers[d])
		if failed {
			if r.State == StateCommitting || r.State == StateDeleting {
				return fmt.Errorf("I6: %s cannot be finished", describe(r))
			}
			ev = Event{Kind: EventRollback, Move: r.MoveID}
		} else if !ok {
			return x.home(s)
		}
		before := s.row
		x.cas(s, d, ev, func(_ func() string, _ string, n xstate) { s = n })
		if s.row == before {
			return fmt.Errorf("I6: stuck at %s", describe(r))
		}
	}
	return errors.New("I6: no end")
}

func (x *explorer) home(s xstate) error {
	r := x.rows[s.row]
	if r.State != StateActive {
		return nil
	}
	x.member(s, func(_ func() string, _ string, n xstate) { s = n })
	c := s.cells[xcellIndex(r.CellID)]
	if !c.open || Epoch(c.epoch) != r.Epoch || Epoch(c.floor) > r.Epoch {
		return fmt.Errorf("I6: the row is %s, its fence is at epoch %d, open: %t", describe(r), c.epoch, c.open)
	}
	return s.check(x)
}
