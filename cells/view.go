// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cloister-dev/cloister/cells/internal/packed"
)

// viewShards is how many locks the writers of a view share. Readers take none.
const viewShards = 64

// view is what one process knows of the routes. Reading it takes no lock. For
// one tenant it only goes forward: a row replaces another only if its revision is
// higher, and only if it breaks no invariant with it. Tenants are never removed.
//
// What decides where a tenant's requests go is in rows, without a pointer for each
// tenant. Rows that say more (a move, residue, marks) are in wide as well, whole; see
// [view.plain]. A wide row is put there before rows says that it is wide, beside the
// one that rows still speaks of, and removed after rows no longer says so: a reader
// that finds neither version there has read a record that is over, and reads again.
type view struct {
	rows   *packed.Table
	wide   sync.Map // TenantID -> *wideRow
	cells  cellNames
	seed   maphash.Seed
	shards [viewShards]viewShard
	// bare: marks are not kept either. Set before the first row.
	bare bool
	// rev is the revision up to which the view has every change.
	rev atomic.Uint64
}

// wideRow is a row that is kept whole, and the one before it. Neither is changed.
type wideRow struct{ row, before *TenantRoute }

// kindWide in a record's kind, beside the state: the row is in wide.
const kindWide = 1 << 7

// placement is what a view says of a tenant without a look at wide. Two of one
// tenant are equal if nothing that decides has changed between them.
type placement struct {
	state    RouteState // 0: there is no row
	wide     bool
	cell     CellID
	epoch    Epoch
	floor    Epoch
	revision Revision
}

func (p *placement) exists() bool {
	return p.state != 0 && p.state != StateDeleting && p.state != StateDeleted
}

func (p *placement) moving() bool { return p.state >= StateQuiescing && p.state <= StateCommitting }

// admits reports whether an admission at the epoch is good in the cell.
func (p *placement) admits(cell CellID, epoch Epoch) bool {
	return p.state == StateActive && p.cell == cell && p.floor <= epoch && epoch <= p.epoch
}

// route is the row of a placement that is not wide.
func (p *placement) route(t TenantID) TenantRoute {
	return TenantRoute{TenantID: t, State: p.state, CellID: p.cell, Epoch: p.epoch, Floor: p.floor, Revision: p.revision}
}

type viewShard struct {
	mu sync.Mutex // guards waiters, and the writing of this shard's entries
	// waiters has a channel for each tenant that somebody waits for. It is closed
	// and dropped at the tenant's next change.
	waiters map[TenantID]*viewWaiter
	_       [40]byte // keeps neighbours off one cache line
}

type viewWaiter struct {
	changed chan struct{}
	users   int
}

func (v *view) init() {
	v.seed = maphash.MakeSeed()
	v.rows = packed.New()
	v.cells.init()
}

// size is the number of rows, tombstones included.
func (v *view) size() int { return v.rows.Len() }

func (v *view) shard(t TenantID) *viewShard {
	return &v.shards[maphash.String(v.seed, string(t))%viewShards]
}

// plain reports whether what the view keeps of a row in rows is enough: it is served
// or gone, no move and no residue is in it, and no marks, which whoever opens fences
// needs. Who placed it, when, and why it is as it is, is not kept.
func (v *view) plain(r *TenantRoute) bool {
	return (r.State == StateActive || r.State == StateDeleting || r.State == StateDeleted || r.State == 0) &&
		r.MoveID == "" && r.SourceCell == "" && r.TargetCell == "" && r.Base == 0 && r.UndoWindow == 0 && r.Undoes == "" &&
		r.Deadline.IsZero() && len(r.Residue) == 0 && (v.bare || r.EventMark == 0 && r.DataMark == "")
}

// find returns what decides for the tenant. It does not allocate.
func (v *view) find(t TenantID) placement {
	rec, ok := v.rows.Get(string(t))
	if !ok {
		return placement{}
	}
	return v.placement(rec)
}

func (v *view) placement(rec packed.Record) placement {
	return placement{
		state: RouteState(rec.Kind &^ kindWide), wide: rec.Kind&kindWide != 0, cell: v.cells.name(rec.Cell),
		epoch: Epoch(rec.Epoch), floor: Epoch(rec.Floor), revision: Revision(rec.Revision),
	}
}

// whole returns the row of a placement that is wide; nil if the placement is over.
func (v *view) whole(t TenantID, p *placement) *TenantRoute {
	e, ok := v.wide.Load(t)
	if !ok {
		return nil
	}
	for _, r := range [...]*TenantRoute{e.(*wideRow).row, e.(*wideRow).before} {
		if r != nil && r.Revision == p.revision && r.State == p.state {
			return r
		}
	}
	return nil
}

// look returns the tenant's placement and, if it is wide, its row, which is shared. It
// does not allocate.
func (v *view) look(t TenantID) (placement, *TenantRoute) {
	for {
		p := v.find(t)
		if !p.wide {
			return p, nil
		}
		if r := v.whole(t, &p); r != nil {
			return p, r
		}
	}
}

// get returns the tenant's row, or nil. It is shared: the caller must not change it.
func (v *view) get(t TenantID) *TenantRoute {
	p, r := v.look(t)
	if r == nil && (p != placement{}) {
		row := p.route(t)
		r = &row
	}
	return r
}

// revision is the revision that the view is complete up to.
func (v *view) revision() Revision { return Revision(v.rev.Load()) }

// advance raises the revision that the view is complete up to.
func (v *view) advance(rev Revision) {
	for {
		cur := v.rev.Load()
		if uint64(rev) <= cur || v.rev.CompareAndSwap(cur, uint64(rev)) {
			return
		}
	}
}

// put makes next the tenant's row if it is newer than what is known. changed is
// called with the shard locked, in the order of the tenant's revisions; it must
// not write to the view. old is nil unless the row before was wide. The view may keep
// next. The error wraps [ErrInvalid] when
// next is newer and yet breaks an invariant: then nothing is changed. With same,
// next also replaces a row of its own revision.
func (v *view) put(next *TenantRoute, same bool, changed func(was placement, old, next *TenantRoute)) (bool, error) {
	s := v.shard(next.TenantID)
	s.mu.Lock()
	defer s.mu.Unlock()
	was, old := v.look(next.TenantID)
	if (was != placement{}) {
		switch {
		case next.Revision < was.revision || next.Revision == was.revision && !same:
			return false, nil
		case next.Epoch < was.epoch:
			return false, fmt.Errorf("%w: tenant %s is at epoch %d in revision %d, and was at epoch %d in revision %d",
				ErrInvalid, next.TenantID, next.Epoch, next.Revision, was.epoch, was.revision)
		case next.Epoch == was.epoch && next.CellID != was.cell:
			return false, fmt.Errorf("%w: tenant %s has epoch %d in cell %s in revision %d, and in cell %s in revision %d",
				ErrInvalid, next.TenantID, next.Epoch, next.CellID, next.Revision, was.cell, was.revision)
		}
	}
	rec := packed.Record{Kind: uint8(next.State), Cell: v.cells.number(next.CellID), Epoch: uint64(next.Epoch), Floor: uint64(next.Floor), Revision: uint64(next.Revision)}
	wide := !v.plain(next)
	if wide {
		rec.Kind |= kindWide
		e := &wideRow{row: next}
		if was.wide {
			e.before = old
		}
		v.wide.Store(next.TenantID, e)
	}
	v.rows.Put(string(next.TenantID), rec)
	if was.wide && !wide {
		v.wide.Delete(next.TenantID)
	}
	if changed != nil {
		changed(was, old, next)
	}
	if w := s.waiters[next.TenantID]; w != nil {
		delete(s.waiters, next.TenantID)
		close(w.changed)
	}
	return true, nil
}

// await returns a channel that is closed at the tenant's next change. leave must
// be called when the caller stops waiting.
func (v *view) await(t TenantID) (changed <-chan struct{}, leave func()) {
	s := v.shard(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.waiters[t]
	if w == nil {
		if s.waiters == nil {
			s.waiters = make(map[TenantID]*viewWaiter)
		}
		w = &viewWaiter{changed: make(chan struct{})}
		s.waiters[t] = w
	}
	w.users++
	return w.changed, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if w.users--; w.users == 0 && s.waiters[t] == w {
			delete(s.waiters, t)
		}
	}
}

// each calls f with every row until it returns false. Rows are the caller's, but for
// what they refer to.
func (v *view) each(f func(*TenantRoute) bool) {
	v.rows.Each(func(key string, rec packed.Record) bool {
		t, p := TenantID(key), v.placement(rec)
		row := p.route(t)
		if p.wide {
			r := v.whole(t, &p)
			if r == nil {
				r = v.get(t)
			}
			row = *r
		}
		return f(&row)
	})
}

// cellNames numbers the cells that rows name, so that a row has a small number. There
// are as many as cells ever were.
type cellNames struct {
	list    atomic.Pointer[[]CellID] // by number; only grows
	mu      sync.Mutex               // guards numbers
	numbers map[CellID]uint32
}

func (c *cellNames) init() {
	c.numbers = make(map[CellID]uint32)
	c.list.Store(new([]CellID))
}

func (c *cellNames) name(n uint32) CellID { return (*c.list.Load())[n] }

func (c *cellNames) number(name CellID) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok := c.numbers[name]
	if !ok {
		name = CellID(strings.Clone(string(name))) // not a part of what a row was read from
		list := append(slices.Clip(*c.list.Load()), name)
		n = uint32(len(list) - 1)
		c.numbers[name] = n
		c.list.Store(&list)
	}
	return n
}
