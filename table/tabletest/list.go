// SPDX-License-Identifier: Apache-2.0

package tabletest

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cloister-dev/cloister/cells"
)

var listCases = []Case{
	{"ListEmpty", listEmpty},
	{"ListPages", listPages},
	{"ListLimits", listLimits},
	{"ListCell", listCell},
	{"ListRevision", listRevision},
	{"ListWhileWriting", listWhileWriting},
}

func listEmpty(tb TB, h Harness) {
	f := start(tb, h)
	p := f.list(cells.ListOptions{})
	if len(p.Routes) != 0 || p.Next != "" {
		f.Fatalf("an empty table lists %+v", p)
	}
	s := f.watch(p.Revision)
	r := f.cas(0, active("t", "a", 1))
	if p.Revision >= r.Revision {
		f.Fatalf("the empty table had revision %d, its first change has %d", p.Revision, r.Revision)
	}
	s.reach(r.Revision)
	f.same("the first change", s.rows["t"], r)
}

// Tenants whose order differs between byte order and what databases like to sort by.
var ordered = []cells.TenantID{
	"-", ".", "..", "0", "00", "1", "10", "2", ":", "@", "A", "A-", "A.", "AA", "Aa", "B", "Z", "_", "a", "a-", "a-b", "a.", "a0",
	"a:", "a@", "aA", "a_", "aa", "ab", "b", "z",
}

func listPages(tb TB, h Harness) {
	f := start(tb, h)
	if !slices.IsSorted(ordered) {
		f.Fatalf("the case's tenants are not sorted")
	}
	for i := range ordered {
		f.cas(0, active(ordered[(i*7)%len(ordered)], "a", 1))
	}
	for _, limit := range []int{0, 1, 2, 3, len(ordered) - 1, len(ordered), len(ordered) + 1} {
		var got []cells.TenantID
		opts := cells.ListOptions{Limit: limit}
		for pages := 0; ; pages++ {
			p := f.list(opts)
			if limit > 0 && len(p.Routes) > limit {
				f.Fatalf("a page of %d rows, want at most %d", len(p.Routes), limit)
			}
			for _, r := range p.Routes {
				got = append(got, r.TenantID)
			}
			if p.Next == "" {
				break
			}
			if len(p.Routes) == 0 || p.Next != got[len(got)-1] || pages > len(ordered) {
				f.Fatalf("limit %d: page %d has %d rows and the next is after %q", limit, pages, len(p.Routes), p.Next)
			}
			opts.After = p.Next
		}
		if !slices.Equal(got, ordered) {
			f.Fatalf("limit %d lists\n%v, want\n%v", limit, got, ordered)
		}
	}
}

func listLimits(tb TB, h Harness) {
	f := start(tb, h)
	f.cas(0, active("b", "a", 1))
	f.cas(0, active("d", "a", 1))
	if _, err := f.table.List(f.ctx, cells.ListOptions{Limit: -1}); !errors.Is(err, cells.ErrInvalid) {
		f.Fatalf("a limit of -1: %v, want ErrInvalid", err)
	}
	for after, want := range map[cells.TenantID]int{"a": 2, "b": 1, "c": 1, "d": 0, "zz": 0} {
		if p := f.list(cells.ListOptions{After: after, Limit: 1 << 30}); len(p.Routes) != want || p.Next != "" {
			f.Fatalf("after %q: %d rows and next %q, want %d and none", after, len(p.Routes), p.Next, want)
		}
	}
}

func listCell(tb TB, h Harness) {
	f := start(tb, h)
	move := func(id cells.TenantID, at, from, to cells.CellID) cells.TenantRoute {
		r := active(id, at, 3)
		r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", from, to, 3
		return r
	}
	f.cas(0, active("t1", "a", 1))
	f.cas(0, active("t2", "b", 1))
	f.cas(0, move("t3", "b", "b", "a"))
	f.cas(0, move("t4", "a", "a", "b"))
	f.cas(0, move("t5", "b", "b", "c"))
	f.cas(0, active("t6", "a-a", 1))
	committing := move("t7", "c", "a", "c")
	committing.State, committing.Epoch, committing.Floor = cells.StateCommitting, 5, 5
	f.cas(0, committing)
	for cell, want := range map[cells.CellID][]cells.TenantID{
		"a": {"t1", "t3", "t4", "t7"}, "b": {"t2", "t3", "t4", "t5"}, "c": {"t5", "t7"}, "a-a": {"t6"}, "d": nil,
	} {
		for _, limit := range []int{0, 1, 2, 4} {
			var got []cells.TenantID
			opts := cells.ListOptions{Cell: cell, Limit: limit}
			for range 10 {
				p := f.list(opts)
				for _, r := range p.Routes {
					got = append(got, r.TenantID)
				}
				if opts.After = p.Next; p.Next == "" {
					break
				}
			}
			if !slices.Equal(got, want) {
				f.Fatalf("cell %s, limit %d: %v, want %v", cell, limit, got, want)
			}
		}
	}
}

// The revision of a page is one that the table has had, and a watch from it
// misses nothing.
func listRevision(tb TB, h Harness) {
	f := start(tb, h)
	var rows []cells.TenantRoute
	for i := range 5 {
		rows = append(rows, f.cas(0, active(cells.TenantID(fmt.Sprintf("t%d", i)), "a", 1)))
	}
	for i := range rows {
		p := f.list(cells.ListOptions{Limit: 2})
		newest := cells.Revision(0)
		for _, r := range rows {
			newest = max(newest, r.Revision)
		}
		if p.Revision < newest {
			f.Fatalf("a page says revision %d after a change at %d", p.Revision, newest)
		}
		rows[i] = f.cas(rows[i].Revision, rows[i])
		if p.Revision >= rows[i].Revision {
			f.Fatalf("a page said revision %d before the change at %d", p.Revision, rows[i].Revision)
		}
		s := f.watch(p.Revision)
		s.reach(rows[i].Revision)
		f.same("the change after the page", s.rows[rows[i].TenantID], rows[i])
	}
}

// Listing page by page while rows change, and then watching from the first
// page's revision, ends with what the table holds.
func listWhileWriting(tb TB, h Harness) {
	f := start(tb, h)
	const tenants = 30
	for i := range tenants {
		f.cas(0, active(tenantN(2*i), "a", 1))
	}
	var wg sync.WaitGroup
	errs := make(chan error, 2)
	for w := range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range tenants {
				if err := f.bump(tenantN((i*7 + w*3) % (2 * tenants))); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	type view struct {
		rows map[cells.TenantID]cells.TenantRoute
		rev  cells.Revision
	}
	var views []view
	for range 5 {
		rows, rev := f.all(7)
		views = append(views, view{rows, rev})
	}
	wg.Wait()
	select {
	case err := <-errs:
		f.Fatalf("%v", err)
	default:
	}
	end := f.list(cells.ListOptions{Limit: 1}).Revision
	for _, v := range views {
		s := f.watch(v.rev)
		s.reach(end)
		for id, r := range s.rows {
			v.rows[id] = r
		}
		f.sameView(fmt.Sprintf("list at %d and watch", v.rev), v.rows)
	}
}

func tenantN(i int) cells.TenantID { return cells.TenantID(fmt.Sprintf("tenant-%04d", i)) }

// bump adds one to the tenant's EventMark, creating the row if there is none. It
// tries again after conflicts only.
func (f *fix) bump(id cells.TenantID) error {
	for {
		r, err := f.table.Get(f.ctx, id)
		if errors.Is(err, cells.ErrNotFound) {
			r = active(id, "a", 1)
		} else if err != nil {
			return fmt.Errorf("Get(%s): %w", id, err)
		}
		old := r.Revision
		r.EventMark++
		_, err = f.table.CompareAndSet(f.ctx, old, r)
		if err == nil {
			return nil
		}
		if !errors.Is(err, cells.ErrConflict) {
			return fmt.Errorf("CompareAndSet(%d, %s): %w", old, id, err)
		}
	}
}
