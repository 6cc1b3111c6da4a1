// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"sync"
	"time"
)

// Sources of a view.
const (
	SourceTable    = "table"
	SourceSnapshot = "snapshot"
)

// RouterStatus says how good a router's view is.
type RouterStatus struct {
	// Revision is the one up to which the view has every change of the table.
	Revision Revision
	// Age is how long ago that was known to be the table's newest revision.
	Age time.Duration
	// Stale: nothing was loaded yet, or Age is above the bound of [WithStaleAfter],
	// or the view comes from the snapshot.
	Stale bool
	// Source is "table", "snapshot" (the table has not been read since the start),
	// or "" before the first load.
	Source string
	// Routes is the number of rows, tombstones included.
	Routes int
	// Watching: a watch on the table is open now.
	Watching bool
	// Breaks counts broken watches and failed reads, Relists how often the whole
	// table was read again because the watch could not go on from where it was.
	Breaks, Relists uint64
	// Refused counts rows that were not believed: malformed, or in conflict with
	// what is known (an epoch that falls, an epoch in two cells).
	Refused uint64
	// LastError is the last break's or refusal's, LastErrorAt when it was; for people.
	LastError   string
	LastErrorAt time.Time
	// SnapshotError is why the last attempt to write the snapshot failed, or "".
	SnapshotError string
	// SnapshotRevision is that of the snapshot as it was last written or read.
	SnapshotRevision Revision
}

// Status returns how good the view is now.
func (r *Router) Status() RouterStatus {
	s := r.status.get()
	s.Revision, s.Age, s.Routes = r.view.revision(), r.age(), r.view.size()
	s.Stale = s.Source != SourceTable || s.Age > r.cfg.staleAfter
	return s
}

// routerStatus is the part of the status that is not read on the request path.
type routerStatus struct {
	mu sync.Mutex // guards s
	s  RouterStatus
}

func (s *routerStatus) get() RouterStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.s
}

func (s *routerStatus) update(f func(*RouterStatus)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.s)
}

func (s *routerStatus) broke(err error) {
	s.update(func(st *RouterStatus) {
		st.Breaks++
		st.LastError, st.LastErrorAt = err.Error(), time.Now()
	})
}

func (s *routerStatus) refuse(err error) {
	s.update(func(st *RouterStatus) {
		st.Refused++
		st.LastError, st.LastErrorAt = err.Error(), time.Now()
	})
}

func (s *routerStatus) fromTable() { s.update(func(st *RouterStatus) { st.Source = SourceTable }) }
func (s *routerStatus) fromSnapshot() {
	s.update(func(st *RouterStatus) { st.Source = SourceSnapshot })
}
func (s *routerStatus) watching(b bool) { s.update(func(st *RouterStatus) { st.Watching = b }) }
func (s *routerStatus) relisted()       { s.update(func(st *RouterStatus) { st.Relists++ }) }

func (s *routerStatus) snapshot(rev Revision, err error) {
	s.update(func(st *RouterStatus) {
		st.SnapshotError = ""
		if err != nil {
			st.SnapshotError = err.Error()
			return
		}
		st.SnapshotRevision = rev
	})
}

// changeQueue carries changes to the function of WithOnChange, in order.
type changeQueue struct {
	mu      sync.Mutex // guards items and running
	items   []routeChange
	running bool
}

type routeChange struct{ old, next *TenantRoute }

// notify queues a change; it never blocks.
func (r *Router) notify(old, next *TenantRoute) {
	q := &r.changes
	q.mu.Lock()
	defer q.mu.Unlock()
	q.items = append(q.items, routeChange{old, next})
	if q.running {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		q.running = true
		r.wg.Go(r.deliver)
	}
}

func (r *Router) deliver() {
	q := &r.changes
	for {
		q.mu.Lock()
		items := q.items
		q.items = nil
		if len(items) == 0 || r.life.Err() != nil {
			q.running = false
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		for _, c := range items {
			if r.life.Err() != nil {
				break
			}
			var old TenantRoute
			if c.old != nil {
				old = c.old.Clone()
			}
			r.cfg.onChange(old, c.next.Clone())
		}
	}
}
