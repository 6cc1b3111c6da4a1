// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// viewShards is how many locks the writers of a view share. Readers take none.
const viewShards = 64

// view is what one process knows of the routes. Reading it takes no lock. For
// one tenant it only goes forward: a row replaces another only if its revision is
// higher, and only if it breaks no invariant with it. Entries are never removed,
// so a pointer to one stays good.
type view struct {
	entries sync.Map // TenantID -> *viewEntry
	seed    maphash.Seed
	shards  [viewShards]viewShard
	rows    atomic.Int64
	// rev is the revision up to which the view has every change.
	rev atomic.Uint64
}

type viewEntry struct {
	// route is replaced, never changed in place.
	route atomic.Pointer[TenantRoute]
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

func (v *view) init() { v.seed = maphash.MakeSeed() }

func (v *view) shard(t TenantID) *viewShard {
	return &v.shards[maphash.String(v.seed, string(t))%viewShards]
}

// entry returns the tenant's entry, or nil.
func (v *view) entry(t TenantID) *viewEntry {
	if e, ok := v.entries.Load(t); ok {
		return e.(*viewEntry)
	}
	return nil
}

// get returns the tenant's row, or nil. It is shared: the caller must not change it.
func (v *view) get(t TenantID) *TenantRoute {
	if e := v.entry(t); e != nil {
		return e.route.Load()
	}
	return nil
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
// not write to the view. The view keeps next. The error wraps [ErrInvalid] when
// next is newer and yet breaks an invariant: then nothing is changed. With same,
// next also replaces a row of its own revision.
func (v *view) put(next *TenantRoute, same bool, changed func(old, next *TenantRoute)) (bool, error) {
	s := v.shard(next.TenantID)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := v.entry(next.TenantID)
	var old *TenantRoute
	if e != nil {
		old = e.route.Load()
	}
	if old != nil {
		switch {
		case next.Revision < old.Revision || next.Revision == old.Revision && !same:
			return false, nil
		case next.Epoch < old.Epoch:
			return false, fmt.Errorf("%w: tenant %s is at epoch %d in revision %d, and was at epoch %d in revision %d",
				ErrInvalid, next.TenantID, next.Epoch, next.Revision, old.Epoch, old.Revision)
		case next.Epoch == old.Epoch && next.CellID != old.CellID:
			return false, fmt.Errorf("%w: tenant %s has epoch %d in cell %s in revision %d, and in cell %s in revision %d",
				ErrInvalid, next.TenantID, next.Epoch, next.CellID, next.Revision, old.CellID, old.Revision)
		}
		e.route.Store(next)
	} else {
		e = &viewEntry{}
		e.route.Store(next)
		v.entries.Store(next.TenantID, e)
		v.rows.Add(1)
	}
	if changed != nil {
		changed(old, next)
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

// each calls f with every row until it returns false.
func (v *view) each(f func(*TenantRoute) bool) {
	v.entries.Range(func(_, e any) bool { return f(e.(*viewEntry).route.Load()) })
}
