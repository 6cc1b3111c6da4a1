// SPDX-License-Identifier: Apache-2.0

package tabletest

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/cloister-dev/cloister/cells"
)

var concurrentCases = []Case{
	{"Claimers", func(tb TB, h Harness) { f := start(tb, h); f.claimers(f.table) }},
	{"Counter", func(tb TB, h Harness) { f := start(tb, h); f.counter(f.table) }},
	{"Linearizable", func(tb TB, h Harness) { f := start(tb, h); f.linearizable(f.table) }},
	{"Converge", func(tb TB, h Harness) { f := start(tb, h); f.converge(f.table) }},
}

var anotherCases = []Case{
	{"AnotherSees", anotherSees},
	{"AnotherClaimers", func(tb TB, h Harness) { f := start(tb, h); f.claimers(f.others(3)...) }},
	{"AnotherCounter", func(tb TB, h Harness) { f := start(tb, h); f.counter(f.others(3)...) }},
	{"AnotherLinearizable", func(tb TB, h Harness) { f := start(tb, h); f.linearizable(f.others(2)...) }},
	{"AnotherConverge", func(tb TB, h Harness) { f := start(tb, h); f.converge(f.others(2)...) }},
	{"AnotherCloses", anotherCloses},
}

// others returns the table and n more handles on its store.
func (f *fix) others(n int) []cells.RoutingTable {
	all := []cells.RoutingTable{f.table}
	for range n {
		all = append(all, f.h.Another(f.TB, f.table))
	}
	return all
}

// claimers lets 64 claim one tenant at once, each for a cell of its own.
func (f *fix) claimers(tables ...cells.RoutingTable) {
	f.Helper()
	const n = 64
	for round := range 3 {
		id := tenantN(round)
		gate := make(chan struct{})
		rows := make([]cells.TenantRoute, n)
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Add(1)
			go func() {
				defer wg.Done()
				<-gate
				rows[i], errs[i] = tables[i%len(tables)].CompareAndSet(f.ctx, 0, active(id, cells.CellID(fmt.Sprintf("cell-%d", i)), 1))
			}()
		}
		close(gate)
		wg.Wait()
		winner := -1
		for i, err := range errs {
			switch {
			case err == nil && winner >= 0:
				f.Fatalf("both %s and %s claimed %s", rows[winner].CellID, rows[i].CellID, id)
			case err == nil:
				winner = i
			case !errors.Is(err, cells.ErrConflict):
				f.Fatalf("claimer %d: %v, want ErrConflict", i, err)
			}
		}
		if winner < 0 {
			f.Fatalf("nobody claimed %s", id)
		}
		for _, t := range tables {
			f.same("what the winner got", f.on(t).get(id), rows[winner])
		}
	}
}

// counter adds up concurrent changes of one row: none may be lost.
func (f *fix) counter(tables ...cells.RoutingTable) {
	f.Helper()
	const workers, each = 8, 15
	var wg sync.WaitGroup
	errs := make(chan error, workers)
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			g := f.on(tables[w%len(tables)])
			for range each {
				if err := g.bump("t"); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	wg.Wait()
	select {
	case err := <-errs:
		f.Fatalf("%v", err)
	default:
	}
	if got := f.get("t").EventMark; got != workers*each {
		f.Fatalf("%d changes were acknowledged, the row counts %d", workers*each, got)
	}
}

// What the model of a row takes and gives.
type rowInput struct {
	get  bool
	old  cells.Revision
	mark cells.EventSeq
}

type rowOutput struct {
	revision cells.Revision
	mark     cells.EventSeq
	conflict bool
}

type rowState struct {
	revision cells.Revision
	mark     cells.EventSeq
}

var rowModel = porcupine.Model{
	Init: func() any { return rowState{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(rowState), input.(rowInput), output.(rowOutput)
		switch {
		case in.get:
			return out.revision == s.revision && out.mark == s.mark, s
		case out.conflict:
			return in.old != s.revision, s
		}
		return in.old == s.revision && out.revision > s.revision, rowState{out.revision, in.mark}
	},
	Equal: func(a, b any) bool { return a == b },
}

// linearizable checks a history of reads and swaps of one row against a register.
func (f *fix) linearizable(tables ...cells.RoutingTable) {
	f.Helper()
	const workers, each = 6, 25
	begin := time.Now()
	histories := make([][]porcupine.Operation, workers)
	errs := make(chan error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			t := tables[w%len(tables)]
			var known cells.Revision
			for i := range each {
				in := rowInput{get: i%3 == 0, old: known, mark: cells.EventSeq(1 + w*1000 + i)}
				op := porcupine.Operation{ClientId: w, Input: in, Call: int64(time.Since(begin))}
				var out rowOutput
				var r cells.TenantRoute
				var err error
				if in.get {
					r, err = t.Get(f.ctx, "t")
				} else {
					next := active("t", "a", 1)
					next.EventMark = in.mark
					r, err = t.CompareAndSet(f.ctx, in.old, next)
				}
				op.Return = int64(time.Since(begin))
				switch {
				case err == nil:
					out = rowOutput{revision: r.Revision, mark: r.EventMark}
					known = r.Revision
				case in.get && errors.Is(err, cells.ErrNotFound):
				case errors.Is(err, cells.ErrConflict):
					out.conflict = true
				default:
					errs <- err
					return
				}
				op.Output = out
				histories[w] = append(histories[w], op)
			}
		}()
	}
	wg.Wait()
	select {
	case err := <-errs:
		f.Fatalf("%v", err)
	default:
	}
	var history []porcupine.Operation
	for _, h := range histories {
		history = append(history, h...)
	}
	switch porcupine.CheckOperationsTimeout(rowModel, history, f.h.Patience) {
	case porcupine.Illegal:
		f.Fatalf("a history of %d reads and swaps of one row is not linearizable", len(history))
	case porcupine.Unknown:
		f.Logf("the check of the history did not finish in %s", f.h.Patience)
	}
}

// converge lets writers of different tenants commit in any order while watches
// follow: each ends with exactly what the table holds. A revision that becomes
// visible after a higher one would be missed.
func (f *fix) converge(tables ...cells.RoutingTable) {
	f.Helper()
	const writers, each = 8, 20
	stop := make(chan struct{})
	var streams []*stream
	follow := make(chan error, len(tables))
	for _, t := range tables {
		s := f.on(t).watch(0)
		streams = append(streams, s)
		go func() {
			for {
				select {
				case <-stop:
					follow <- nil
					return
				default:
				}
				if _, err := s.next(); err != nil {
					follow <- err
					return
				}
			}
		}()
	}
	var wg sync.WaitGroup
	errs := make(chan error, writers)
	for w := range writers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			g := f.on(tables[w%len(tables)])
			for i := range each {
				if err := g.bump(tenantN(w*3 + i%3)); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	wg.Wait()
	close(stop)
	f.cas(0, active("last", "a", 1)) // wakes whoever waits
	for range tables {
		if err := <-follow; err != nil {
			f.Fatalf("%v", err)
		}
	}
	select {
	case err := <-errs:
		f.Fatalf("%v", err)
	default:
	}
	end := f.list(cells.ListOptions{Limit: 1}).Revision
	for _, s := range streams {
		s.reach(end)
		f.sameView("a watch beside writers", s.rows)
		if got := s.rows[tenantN(0)].EventMark; got == 0 {
			f.Fatalf("the watch ends with an event mark of 0")
		}
	}
}

func anotherSees(tb TB, h Harness) {
	f := start(tb, h)
	g := f.on(h.Another(tb, f.table))
	g.absent("t")
	s := g.watch(0)
	r := f.cas(0, active("t", "a", 1))
	f.same("the other handle's Get", g.get("t"), r)
	g.refuse(cells.ErrConflict, 0, active("t", "b", 1), "claimed through the other handle")
	s.reach(r.Revision)
	f.same("the other handle's watch", s.rows["t"], r)
	r2 := g.cas(r.Revision, r)
	f.refuse(cells.ErrConflict, r.Revision, r, "changed through the other handle")
	f.same("the first handle's Get", f.get("t"), r2)
	if p := f.list(cells.ListOptions{}); p.Revision < r2.Revision || len(p.Routes) != 1 {
		f.Fatalf("the first handle lists %+v", p)
	}
}

func anotherCloses(tb TB, h Harness) {
	f := start(tb, h)
	other := h.Another(tb, f.table)
	s := f.watch(0)
	r := f.on(other).cas(0, active("t", "a", 1))
	if err := closeTable(other); err != nil {
		f.Fatalf("Close of the other handle: %v", err)
	}
	r = f.cas(r.Revision, r)
	s.reach(r.Revision)
	f.same("after the other handle was closed", f.get("t"), r)
}

func reopen(tb TB, h Harness) {
	f := start(tb, h)
	want := full("full")
	want = f.cas(0, want)
	r := f.cas(0, active("t", "a", 1))
	r.State, r.Epoch, r.Floor = cells.StateDeleted, 2, 2
	r = f.cas(r.Revision, r)
	for range 3 {
		f = f.on(h.Reopen(tb, f.table))
		f.same("after reopening", f.get("full"), want)
		f.same("after reopening", f.get("t"), r)
		f.refuse(cells.ErrConflict, 0, active("t", "b", 9), "after reopening")
		s := f.watch(0)
		s.reach(max(r.Revision, want.Revision))
		f.sameView("a watch after reopening", s.rows)
		if p := f.list(cells.ListOptions{}); p.Revision < r.Revision {
			f.Fatalf("revision %d after reopening, it was %d", p.Revision, r.Revision)
		}
		next := f.cas(r.Revision, r)
		if next.Revision <= max(r.Revision, want.Revision) {
			f.Fatalf("revision %d after reopening, want above %d", next.Revision, r.Revision)
		}
		r = next
	}
}
