// SPDX-License-Identifier: Apache-2.0

package tabletest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// TB is what a case needs of [testing.TB]. Fatalf does not return.
type TB interface {
	Helper()
	Context() context.Context
	Cleanup(func())
	TempDir() string
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
}

// Harness says how to make the table under test. Only Open is required; a case
// that needs a function that is nil is left out.
type Harness struct {
	// Open returns a table on a new, empty store. It releases both with tb.Cleanup.
	Open func(tb TB) cells.RoutingTable
	// Another returns one more handle on the store of t, as another process would
	// have it. It is released with tb.Cleanup.
	Another func(tb TB, t cells.RoutingTable) cells.RoutingTable
	// Reopen closes t and returns a new handle on its store. Nil: not durable.
	Reopen func(tb TB, t cells.RoutingTable) cells.RoutingTable
	// Compact makes t forget every change up to its present revision. Nil: the table
	// can be watched from every revision that it has had.
	Compact func(tb TB, t cells.RoutingTable)
	// Backlog is how many rows a watch has to catch up with at once; 0 means 1200.
	Backlog int
	// Patience bounds the wait for something that must happen; 0 means 20 s.
	Patience time.Duration
}

// Case is one requirement.
type Case struct {
	Name string
	Run  func(tb TB, h Harness)
}

// Cases returns the cases that apply to h, each of which opens its own table.
func Cases(h Harness) []Case {
	all := [][]Case{rowCases, listCases, watchCases, concurrentCases}
	if h.Another != nil {
		all = append(all, anotherCases)
	}
	if h.Reopen != nil {
		all = append(all, []Case{{"Reopen", reopen}})
	}
	if h.Compact != nil {
		all = append(all, []Case{{"WatchCompacted", watchCompacted}})
	}
	var out []Case
	for _, cs := range all {
		out = append(out, cs...)
	}
	return out
}

// Run runs every case as a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range Cases(h) {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, h) })
	}
}

// fix is a case at work: its table, and a context that ends with the case.
type fix struct {
	TB
	h     Harness
	ctx   context.Context
	table cells.RoutingTable
}

func start(tb TB, h Harness) *fix {
	tb.Helper()
	if h.Patience == 0 {
		h.Patience = 20 * time.Second
	}
	if h.Backlog == 0 {
		h.Backlog = 1200
	}
	ctx, cancel := context.WithTimeout(tb.Context(), 6*h.Patience)
	tb.Cleanup(cancel)
	return &fix{TB: tb, h: h, ctx: ctx, table: h.Open(tb)}
}

// on returns the same case with another handle.
func (f *fix) on(t cells.RoutingTable) *fix {
	g := *f
	g.table = t
	return &g
}

func active(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) cells.TenantRoute {
	return cells.TenantRoute{TenantID: tenant, State: cells.StateActive, CellID: cell, Epoch: epoch, Floor: epoch}
}

// full returns a row in which every field is set.
func full(tenant cells.TenantID) cells.TenantRoute {
	zone := time.FixedZone("", 3*3600)
	return cells.TenantRoute{
		TenantID: tenant, State: cells.StateCopying, CellID: "cell-a", Epoch: 8, Floor: 8,
		MoveID: "m-1", SourceCell: "cell-a", TargetCell: "cell-b", Base: 7,
		Deadline:  time.Date(2031, 2, 3, 4, 5, 6, 789012345, zone),
		EventMark: 1 << 40, DataMark: `0/16B3748 "quoted" \ ü`,
		Residue:     []cells.Residue{{Cell: "cell-c", Epoch: 6, Move: "m-0"}, {Cell: "cell-d", Epoch: 4, Move: "m-x"}},
		OperationID: "op/1 ü", Actor: "alice@example.org", Reason: "first line\nsecond\tline <&>  end",
		Stamp: "s-1", UpdatedAt: time.Date(2030, 1, 2, 3, 4, 5, 6, time.UTC),
	}
}

// cas must succeed.
func (f *fix) cas(old cells.Revision, next cells.TenantRoute) cells.TenantRoute {
	f.Helper()
	got, err := f.table.CompareAndSet(f.ctx, old, next)
	if err != nil {
		f.Fatalf("CompareAndSet(%d, %s %s): %v", old, next.TenantID, next.State, err)
	}
	if got.Revision <= old || got.Revision == 0 {
		f.Fatalf("CompareAndSet(%d, %s) gave revision %d, want a higher one", old, next.TenantID, got.Revision)
	}
	return got
}

// refuse must fail with want.
func (f *fix) refuse(want error, old cells.Revision, next cells.TenantRoute, why string) {
	f.Helper()
	got, err := f.table.CompareAndSet(f.ctx, old, next)
	if !errors.Is(err, want) {
		f.Fatalf("%s: CompareAndSet(%d, %q) = revision %d, %v; want %v", why, old, next.TenantID, got.Revision, err, want)
	}
}

func (f *fix) get(tenant cells.TenantID) cells.TenantRoute {
	f.Helper()
	r, err := f.table.Get(f.ctx, tenant)
	if err != nil {
		f.Fatalf("Get(%s): %v", tenant, err)
	}
	return r
}

// absent requires that the tenant has no row.
func (f *fix) absent(tenant cells.TenantID) {
	f.Helper()
	if r, err := f.table.Get(f.ctx, tenant); !errors.Is(err, cells.ErrNotFound) {
		f.Fatalf("Get(%q) = %+v, %v; want ErrNotFound", tenant, r, err)
	}
}

// same requires that two rows are equal in every field; times as instants.
func (f *fix) same(what string, got, want cells.TenantRoute) {
	f.Helper()
	if g, w := cells.CanonicalRoute(got), cells.CanonicalRoute(want); !reflect.DeepEqual(g, w) {
		f.Fatalf("%s:\n got %+v\nwant %+v", what, g, w)
	}
}

func (f *fix) list(opts cells.ListOptions) cells.RoutePage {
	f.Helper()
	p, err := f.table.List(f.ctx, opts)
	if err != nil {
		f.Fatalf("List(%+v): %v", opts, err)
	}
	return p
}

// all lists every row, page by page, and the revision of the first page.
func (f *fix) all(limit int) (map[cells.TenantID]cells.TenantRoute, cells.Revision) {
	f.Helper()
	rows := make(map[cells.TenantID]cells.TenantRoute)
	page := f.list(cells.ListOptions{Limit: limit})
	rev := page.Revision
	for {
		for _, r := range page.Routes {
			rows[r.TenantID] = r
		}
		if page.Next == "" {
			return rows, rev
		}
		page = f.list(cells.ListOptions{Limit: limit, After: page.Next})
	}
}

// watch must succeed; the watch is closed with the case.
func (f *fix) watch(from cells.Revision) *stream {
	f.Helper()
	w, err := f.table.Watch(f.ctx, from)
	if err != nil {
		f.Fatalf("Watch(%d): %v", from, err)
	}
	f.Cleanup(func() { _ = w.Close() })
	return &stream{f: f, w: w, at: from, rows: make(map[cells.TenantID]cells.TenantRoute)}
}

// stream follows a watch and checks its order.
type stream struct {
	f    *fix
	w    cells.RouteWatcher
	at   cells.Revision // of the last update
	last cells.Revision // of the last row
	rows map[cells.TenantID]cells.TenantRoute
	seen []cells.TenantRoute
}

// next takes one update, which must come within the patience.
func (s *stream) next() (cells.RouteUpdate, error) {
	ctx, cancel := context.WithTimeout(s.f.ctx, s.f.h.Patience)
	defer cancel()
	up, err := s.w.Next(ctx)
	if err != nil {
		return up, fmt.Errorf("watch at revision %d: %w", s.at, err)
	}
	if up.Revision < s.at {
		return up, fmt.Errorf("watch went back from revision %d to %d", s.at, up.Revision)
	}
	for _, r := range up.Routes {
		switch {
		case r.Revision <= s.at:
			return up, fmt.Errorf("watch at revision %d repeated %s at %d", s.at, r.TenantID, r.Revision)
		case r.Revision <= s.last:
			return up, fmt.Errorf("watch reported %s at %d after %d", r.TenantID, r.Revision, s.last)
		case r.Revision > up.Revision:
			return up, fmt.Errorf("watch said revision %d and gave %s at %d", up.Revision, r.TenantID, r.Revision)
		}
		s.last = r.Revision
		s.rows[r.TenantID] = r
		s.seen = append(s.seen, r)
	}
	s.at = up.Revision
	return up, nil
}

// until follows until the view includes rev. It may be used by any goroutine.
func (s *stream) until(rev cells.Revision) error {
	deadline := time.Now().Add(s.f.h.Patience)
	for s.at < rev {
		if time.Now().After(deadline) {
			return fmt.Errorf("watch stays at revision %d, want %d", s.at, rev)
		}
		if _, err := s.next(); err != nil {
			return err
		}
	}
	return nil
}

// reach is until, failing the case.
func (s *stream) reach(rev cells.Revision) {
	s.f.Helper()
	if err := s.until(rev); err != nil {
		s.f.Fatalf("%v", err)
	}
}

// sameView requires that rows are exactly what the table lists.
func (f *fix) sameView(what string, rows map[cells.TenantID]cells.TenantRoute) {
	f.Helper()
	want, _ := f.all(0)
	for id, r := range want {
		got, ok := rows[id]
		if !ok {
			f.Fatalf("%s: %s at revision %d is missing", what, id, r.Revision)
		}
		f.same(what, got, r)
	}
	if len(rows) != len(want) {
		f.Fatalf("%s: %d rows, the table lists %d", what, len(rows), len(want))
	}
}

func closeTable(t cells.RoutingTable) error {
	if c, ok := t.(io.Closer); ok {
		return c.Close()
	}
	return nil
}
