// SPDX-License-Identifier: Apache-2.0

package cells

import "fmt"

// The explorer's model of what surrounds Next: one tenant, up to three cells with
// a fence, an event relay and rows each, drivers that sleep and wake with stale
// reads, and orders that are delivered late, in any order and any number of times.
// Everything that was ever sent stays deliverable, which is also what any number
// of further sleeping drivers could do: they can only repeat orders.

const (
	maxXCells   = 3
	maxXDrivers = 2
)

var xcellNames = [maxXCells]CellID{"a", "b", "c"}

func xcellIndex(c CellID) int { return int(c[0] - 'a') }

// xcell is a cell's database as far as the protocol sees it.
type xcell struct {
	exists, open bool
	epoch, floor uint8
	move         uint8 // who closed the fence
	// since is the lowest epoch since which the fence has been open without a break.
	since uint8
	// rows: the cell holds rows of the tenant. value is the last write that they
	// include (one register stands for all rows).
	rows  bool
	value uint8
	// pos is one more than how far the import of the move that holds the fence has
	// come; 0: nothing of it is here. merged: rows were imported over older ones.
	pos    uint8
	merged bool
	// gone: the rows that the fence's move left here were removed.
	gone bool
	// seq is the last event number given out; barrier the epoch of the last event order.
	seq, barrier uint8
	paused       bool
}

// xdriver is a driver: the row that it read, which of the row's effects it has
// seen succeed, and what they gave.
type xdriver struct {
	snap       uint16
	done, mark uint8
}

// xstate is one state of the whole. It is comparable; rows and orders are kept as
// numbers.
type xstate struct {
	row     uint16
	cells   [maxXCells]xcell
	drivers [maxXDrivers]xdriver
	sent    xset // the orders that were ever sent
	// wid is the number of writes acknowledged ever; exp the last one of this life
	// (0: none), expSeq the last event number of it.
	wid, exp, expSeq uint8
	moves, deletes   uint8
}

// xset is a set of up to 256 order numbers.
type xset [4]uint64

func (s *xset) add(i uint8)      { s[i/64] |= 1 << (i % 64) }
func (s *xset) has(i uint8) bool { return s[i/64]&(1<<(i%64)) != 0 }

type xorderKind uint8

const (
	xOpen xorderKind = iota
	xClose
	xPause
	xStart
	xImport
	xDiscard
	// xReturn brings what the owner has, during an undo window, to the cell that keeps
	// its rows; xAdopt makes that cell the target of the undo.
	xReturn
	xAdopt
)

// xorder is an order to a cell.
type xorder struct {
	kind         xorderKind
	cell         uint8
	epoch, floor uint8
	move         uint8
	arg          uint8 // import, return: the value read; start: the mark; adopt: the move undone
}

func (o xorder) String() string {
	names := [...]string{"open", "close", "pause", "start", "import", "discard", "return", "adopt"}
	return fmt.Sprintf("%s(%s epoch=%d floor=%d move=m%d arg=%d)", names[o.kind], xcellNames[o.cell], o.epoch, o.floor, o.move, o.arg)
}

// xrules are the rules that a mutation breaks. The zero value is the protocol.
type xrules struct {
	openBeforeDecide     bool // order the target open before the commit is written
	rollbackAfterCommit  bool // an error after the commit rolls back
	importUnguarded      bool // imports do not look at the fence
	importUnordered      bool // imports do not look at how far the import is
	importWrongMove      bool // imports only look at the fence's epoch being closed
	removeUnguarded      bool // removals do not look at the fence
	floorKept            bool // an open order's floor counts although the fence was closed
	fenceTakesOlder      bool // fences do not compare epochs
	casIgnoresRevision   bool // a write succeeds if the row's state is the expected one
	adoptsOther          bool // a conflict counts as success if the row's state is the wanted one
	skipFence            bool // commit without closing the source
	skipPause            bool // commit without the event mark
	beginOverResidue     bool // a move goes to a cell that still holds rows
	claimRestartsEpoch   bool // re-creation starts at epoch 1
	memberOpensAny       bool // members open their fence whatever the row's state
	memberSkipsStart     bool // members open from COMMITTING without starting events
	claimOverResidue     bool // a deleted tenant is placed over its old rows
	rollbackSameEpoch    bool // a rollback goes back to the epoch that it had
	removedBeforeDiscard bool // the entry is dropped before the rows are
	returnUnguarded      bool // returns do not look at the fence
	returnAfterRemoval   bool // returns do not look whether the rows are still there
	removeHeld           bool // held rows are removed
	undoAfterClose       bool // a move is undone although its window is closed
	undoCopiesOver       bool // an undo does not adopt what is there
}

// apply delivers an order to its cell; ok is what the cell answers.
func (s *xstate) apply(o xorder, ru *xrules) (ok bool) {
	c := &s.cells[o.cell]
	switch o.kind {
	case xOpen:
		return c.openFence(o, ru)
	case xClose:
		return c.closeFence(o, ru)
	case xPause:
		if o.epoch < c.barrier || (c.open || c.epoch != o.epoch) && !ru.skipFence {
			return false
		}
		c.barrier, c.paused = o.epoch, true
		return true
	case xStart:
		if o.epoch < c.barrier || o.epoch < c.epoch {
			return false
		}
		c.barrier, c.paused = o.epoch, false
		c.seq = max(c.seq, o.arg)
		return true
	case xImport:
		held := c.exists && !c.open && c.epoch == o.epoch && c.move == o.move
		if ru.importWrongMove {
			held = c.exists && !c.open
		}
		if !held && !ru.importUnguarded {
			return false
		}
		if o.arg+1 < c.pos && !ru.importUnordered {
			return true // applied already
		}
		c.merged = c.merged || c.rows && c.pos == 0
		c.rows, c.value, c.pos = true, o.arg, o.arg+1
		return true
	case xReturn:
		if (!c.exists || c.open || c.epoch != o.epoch || c.move != o.move) && !ru.returnUnguarded || c.gone && !ru.returnAfterRemoval {
			return false
		}
		if o.arg+1 >= c.pos {
			c.rows, c.value, c.pos = true, o.arg, o.arg+1
		}
		return true
	case xAdopt:
		return c.adopt(o, ru)
	case xDiscard:
		if !c.exists || c.epoch < o.epoch {
			c.closeFence(o, ru)
		}
		if (c.open || c.epoch != o.epoch) && !ru.removeUnguarded {
			return false
		}
		// The counter and the relay's state go with the rows.
		c.rows, c.value, c.seq, c.paused, c.gone = false, 0, 0, false, true
		return true
	}
	panic("order")
}

func (c *xcell) openFence(o xorder, ru *xrules) bool {
	switch {
	case !c.exists:
		*c = xcell{exists: true, open: true, epoch: o.epoch, floor: o.floor, since: o.floor,
			rows: c.rows, value: c.value, seq: c.seq, barrier: c.barrier, paused: c.paused}
		return true
	case o.epoch == c.epoch:
		return c.open
	case o.epoch < c.epoch && !ru.fenceTakesOlder:
		return false
	}
	switch {
	case c.open && c.epoch >= o.floor:
		c.floor = max(c.floor, o.floor)
	case ru.floorKept:
		c.floor = o.floor
	default:
		c.floor = o.epoch
	}
	if !c.open {
		c.since = o.epoch
	}
	c.open, c.epoch, c.move, c.pos, c.gone = true, o.epoch, 0, 0, false
	return true
}

// adopt claims the cell for an undo: the rows of the move that it undoes are where
// it begins, if they are there.
func (c *xcell) adopt(o xorder, ru *xrules) bool {
	mine, pos, gone := c.exists && !c.open && c.move == o.arg, c.pos, c.gone
	before := c.epoch
	if !c.closeFence(xorder{cell: o.cell, epoch: o.epoch, floor: o.epoch, move: o.move}, ru) {
		return false
	}
	if c.epoch != before && mine && !ru.undoCopiesOver {
		c.pos = max(pos, 1)
		c.merged = c.merged || gone // changes would be applied to nothing
	}
	return true
}

func (c *xcell) closeFence(o xorder, ru *xrules) bool {
	switch {
	case c.exists && o.epoch == c.epoch:
		return !c.open && c.move == o.move
	case c.exists && o.epoch < c.epoch && !ru.fenceTakesOlder:
		return false
	}
	c.exists, c.open, c.epoch, c.floor, c.move, c.pos, c.gone = true, false, o.epoch, o.epoch, o.move, 0, false
	return true
}

// check tests the invariants that can be seen in one state.
func (s *xstate) check(x *explorer) error {
	row := x.rows[s.row]
	open := -1
	for i := range x.cfg.cells {
		c := &s.cells[i]
		if c.merged {
			return fmt.Errorf("I2: rows came to cell %s over those of an earlier time", xcellNames[i])
		}
		if !c.open {
			continue
		}
		if open >= 0 {
			return fmt.Errorf("I1: cells %s (epoch %d) and %s (epoch %d) are both open", xcellNames[open], s.cells[open].epoch, xcellNames[i], c.epoch)
		}
		open = i
		if c.floor < c.since {
			return fmt.Errorf("I1: cell %s admits epoch %d, it was closed before epoch %d", xcellNames[i], c.floor, c.since)
		}
		if Epoch(c.epoch) > row.Epoch || Epoch(c.epoch) == row.Epoch && row.State != 0 && row.CellID != xcellNames[i] {
			return fmt.Errorf("I1: cell %s is open at epoch %d, the row is %s", xcellNames[i], c.epoch, describe(row))
		}
		if c.value != s.exp {
			return fmt.Errorf("I2: cell %s is open with write %d, write %d was acknowledged", xcellNames[i], c.value, s.exp)
		}
		if c.seq != s.expSeq {
			return fmt.Errorf("I4: cell %s is open and would number on from event %d, %d were given out", xcellNames[i], c.seq, s.expSeq)
		}
		for j := range x.cfg.cells {
			if o := &s.cells[j]; j != i && x.cfg.deletes == 0 && o.rows && !o.paused && o.seq > 0 && Epoch(c.epoch) == row.Epoch {
				return fmt.Errorf("I4: cell %s may publish while %s is open", xcellNames[j], xcellNames[i])
			}
		}
	}
	return nil
}

// checkStep tests what can be seen in two successive states.
func (s *xstate) checkStep(n *xstate, x *explorer) error {
	a, b := x.rows[s.row], x.rows[n.row]
	if a.State == StateCommitting && s.row != n.row && (b.State != StateActive || b.CellID != a.CellID || b.Epoch != a.Epoch) {
		return fmt.Errorf("I5: %s became %s", describe(a), describe(b))
	}
	if b.Epoch < a.Epoch {
		return fmt.Errorf("I3: the epoch went from %d to %d", a.Epoch, b.Epoch)
	}
	if b.Epoch == a.Epoch && b.CellID != a.CellID && a.State != 0 {
		return fmt.Errorf("I3: epoch %d went from %s to %s", a.Epoch, a.CellID, b.CellID)
	}
	for i := range x.cfg.cells {
		if n.cells[i].epoch < s.cells[i].epoch {
			return fmt.Errorf("I3: the fence of %s went from %d to %d", xcellNames[i], s.cells[i].epoch, n.cells[i].epoch)
		}
	}
	return nil
}
