// SPDX-License-Identifier: Apache-2.0

package tabletest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

var watchCases = []Case{
	{"WatchFromStart", watchFromStart},
	{"WatchFromRevision", watchFromRevision},
	{"WatchLive", watchLive},
	{"WatchInterleaved", watchInterleaved},
	{"WatchSignOfLife", watchSignOfLife},
	{"WatchResume", watchResume},
	{"WatchContext", watchContext},
	{"WatchClose", watchClose},
	{"WatchAhead", watchAhead},
	{"WatchMany", watchMany},
	{"WatchBacklog", watchBacklog},
}

func watchFromStart(tb TB, h Harness) {
	f := start(tb, h)
	var last cells.Revision
	for i := range 6 {
		last = f.cas(0, active(tenantN(i), "a", 1)).Revision
	}
	s := f.watch(0)
	s.reach(last)
	f.sameView("a watch from the start", s.rows)
}

func watchFromRevision(tb TB, h Harness) {
	f := start(tb, h)
	old := f.cas(0, active("old", "a", 1))
	from := f.cas(0, active("from", "a", 1))
	s := f.watch(from.Revision)
	first := f.cas(0, active("new", "a", 1))
	second := f.cas(old.Revision, old)
	s.reach(second.Revision)
	if len(s.rows) != 2 {
		f.Fatalf("a watch from revision %d reported %+v", from.Revision, s.seen)
	}
	f.same("the first change", s.rows["new"], first)
	f.same("the second change", s.rows["old"], second)
}

func watchLive(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	s := f.watch(r.Revision)
	for range 10 {
		type outcome struct {
			up  cells.RouteUpdate
			err error
		}
		got := make(chan outcome, 1)
		go func() {
			for {
				up, err := s.next()
				if err != nil || len(up.Routes) > 0 {
					got <- outcome{up, err}
					return
				}
			}
		}()
		r = f.cas(r.Revision, r)
		o := <-got // bounded by next's patience or, with signs of life, by the case's context
		if o.err != nil {
			f.Fatalf("%v", o.err)
		}
		f.same("the change", o.up.Routes[0], r)
	}
}

// Many changes of few tenants: in order, and the last one of every tenant.
func watchInterleaved(tb TB, h Harness) {
	f := start(tb, h)
	live := f.watch(0)
	rows := make([]cells.TenantRoute, 4)
	for i := range rows {
		rows[i] = active(tenantN(i), "a", 1)
	}
	var last cells.Revision
	for i := range 40 {
		k := (i * i) % len(rows)
		rows[k] = f.cas(rows[k].Revision, rows[k])
		last = rows[k].Revision
	}
	live.reach(last)
	late := f.watch(0)
	late.reach(last)
	f.sameView("a live watch", live.rows)
	f.sameView("a late watch", late.rows)
}

// A watch of a table that does not change says that it is alive.
func watchSignOfLife(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	s := f.watch(r.Revision)
	for range 2 {
		up, err := s.next()
		if err != nil {
			f.Fatalf("no sign of life: %v", err)
		}
		if len(up.Routes) != 0 || up.Revision < r.Revision {
			f.Fatalf("without a change the watch reported %+v", up)
		}
	}
	r = f.cas(r.Revision, r)
	s.reach(r.Revision)
	f.same("the change after signs of life", s.rows["t"], r)
}

// A watch that is dropped after every update and begun again from there misses
// nothing.
func watchResume(tb TB, h Harness) {
	f := start(tb, h)
	var wg sync.WaitGroup
	errs := make(chan error, 3)
	for w := range 3 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 20 {
				if err := f.bump(tenantN(w*5 + i%5)); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	finished := make(chan struct{})
	go func() { wg.Wait(); close(finished) }()
	rows := make(map[cells.TenantID]cells.TenantRoute)
	var at cells.Revision
	step := func() {
		s := f.watch(at)
		if _, err := s.next(); err != nil {
			f.Fatalf("%v", err)
		}
		for id, r := range s.rows {
			rows[id] = r
		}
		at = s.at
		_ = s.w.Close()
	}
	for done := false; !done; {
		select {
		case <-finished:
			done = true
		default:
			step()
		}
	}
	select {
	case err := <-errs:
		f.Fatalf("%v", err)
	default:
	}
	for end := f.list(cells.ListOptions{Limit: 1}).Revision; at < end; {
		step()
	}
	f.sameView("watches begun again", rows)
}

func watchContext(tb TB, h Harness) {
	f := start(tb, h)
	s := f.watch(0)
	ctx, cancel := context.WithCancel(f.ctx)
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := s.w.Next(ctx); err != nil {
				done <- err
				return
			}
		}
	}()
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			f.Fatalf("Next with a context that ended: %v, want context.Canceled", err)
		}
	case <-time.After(f.h.Patience):
		f.Fatalf("Next goes on after its context ended")
	}
}

func watchClose(tb TB, h Harness) {
	f := start(tb, h)
	s := f.watch(0)
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := s.w.Next(f.ctx); err != nil {
				done <- err
				return
			}
		}
	}()
	if err := s.w.Close(); err != nil {
		f.Fatalf("Close: %v", err)
	}
	select {
	case err := <-done:
		if !errors.Is(err, cells.ErrClosed) {
			f.Fatalf("Next of a closed watch: %v, want ErrClosed", err)
		}
	case <-time.After(f.h.Patience):
		f.Fatalf("Next goes on after Close")
	}
	if err := s.w.Close(); err != nil {
		f.Fatalf("Close again: %v", err)
	}
	if _, err := s.w.Next(f.ctx); !errors.Is(err, cells.ErrClosed) {
		f.Fatalf("Next after Close: %v, want ErrClosed", err)
	}
	// The table does not mind.
	f.cas(0, active("t", "a", 1))
}

// A revision that the table has not reached (it was restored from an older copy)
// is answered by ErrCompacted, not by waiting.
func watchAhead(tb TB, h Harness) {
	f := start(tb, h)
	r := f.cas(0, active("t", "a", 1))
	f.compacted(r.Revision + 1000)
}

func (f *fix) compacted(from cells.Revision) {
	f.Helper()
	w, err := f.table.Watch(f.ctx, from)
	if err == nil {
		ctx, cancel := context.WithTimeout(f.ctx, f.h.Patience)
		defer cancel()
		_, err = w.Next(ctx)
		_ = w.Close()
	}
	if !errors.Is(err, cells.ErrCompacted) {
		f.Fatalf("a watch from revision %d: %v, want ErrCompacted", from, err)
	}
}

func watchCompacted(tb TB, h Harness) {
	f := start(tb, h)
	first := f.cas(0, active("t1", "a", 1))
	second := f.cas(0, active("t2", "a", 1))
	behind := f.watch(0)
	h.Compact(tb, f.table)
	f.compacted(0)
	f.compacted(first.Revision)
	// A watch that was left behind may have fetched the changes already; it may not
	// pass over them.
	if err := behind.until(second.Revision); err == nil {
		f.sameView("a watch that was left behind", behind.rows)
	} else if !errors.Is(err, cells.ErrCompacted) {
		f.Fatalf("a watch that was left behind: %v, want ErrCompacted", err)
	}
	p := f.list(cells.ListOptions{})
	if len(p.Routes) != 2 || p.Revision < second.Revision {
		f.Fatalf("after compaction the table lists %+v", p)
	}
	s := f.watch(p.Revision)
	third := f.cas(second.Revision, second)
	s.reach(third.Revision)
	f.same("the change after compaction", s.rows["t2"], third)
}

func watchMany(tb TB, h Harness) {
	f := start(tb, h)
	const n = 20
	var streams []*stream
	for range n {
		streams = append(streams, f.watch(0))
	}
	var last cells.Revision
	for i := range 5 {
		last = f.cas(0, active(tenantN(i), "a", 1)).Revision
	}
	errs := make(chan error, n)
	for _, s := range streams {
		go func() { errs <- s.until(last) }()
	}
	for range n {
		if err := <-errs; err != nil {
			f.Fatalf("%v", err)
		}
	}
	for _, s := range streams {
		f.sameView("one of many watches", s.rows)
	}
}

func watchBacklog(tb TB, h Harness) {
	f := start(tb, h)
	s := f.watch(0)
	var last cells.Revision
	for i := range f.h.Backlog {
		last = f.cas(0, active(tenantN(i), "a", 1)).Revision
	}
	s.reach(last)
	f.sameView("a watch that catches up", s.rows)
}
