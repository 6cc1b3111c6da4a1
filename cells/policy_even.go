// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sort"
)

// EvenSpreadPolicy spreads the tenants over the cells as evenly as their
// jurisdictions and the cells' limits of tenants allow, with as few moves as
// possible: no other plan has a smaller sum of the squares of the cells' tenants,
// and none that is as even has fewer moves. Where nothing stands in the way no cell
// has more than one tenant more than another. Closed cells among the cells keep
// their tenants and get none. Tenants in other cells, or in no known cell, are
// given to the emptiest cells.
func EvenSpreadPolicy(cells []CellID) Policy {
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		return evenSpread(f, cells), nil
	})
}

// DefaultTolerance is how far above the even share [EvenSpreadBy] lets a cell be.
const DefaultTolerance = 0.1

// EvenSpreadBy spreads a measure of the tenants over the cells: with as few moves
// as possible no cell shall have more than (1 + tolerance) times its even share.
// By MeasureTenants it is [EvenSpreadPolicy] and the tolerance is ignored; a
// tolerance of 0 means [DefaultTolerance]. Small fleets are searched until no plan
// with fewer moves exists; in large ones a cell gives away its heaviest tenants
// first, which is as few as possible whenever each of them finds a place.
func EvenSpreadBy(cells []CellID, by Measure, tolerance float64) Policy {
	if by == MeasureTenants {
		return EvenSpreadPolicy(cells)
	}
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		if err := by.Validate(); err != nil {
			return nil, err
		}
		if tolerance < 0 || tolerance > 100 || math.IsNaN(tolerance) {
			return nil, fmt.Errorf("%w: a tolerance of %v; want 0 to 100", ErrInvalid, tolerance)
		}
		if tolerance == 0 {
			tolerance = DefaultTolerance
		}
		return spreadBy(f, cells, by, tolerance), nil
	})
}

// even is an even spread by tenants while it is made. Cells are numbered by their
// place in list; a kind of tenants is a jurisdiction of the cells, or 0 for the
// tenants that may be anywhere.
type even struct {
	f    *FleetView
	r    *room
	at   []int          // the cells' numbers in r
	kind []int          // of each cell; 0: the cell has no jurisdiction
	of   map[int]int    // number in r -> cell
	by   map[string]int // jurisdiction -> kind
	shut map[int]bool   // numbers in r of closed cells, which keep what they have
	out  []Target

	pinned []int // tenants that stay in the cell, whatever is planned
	limit  []int // of tenants, the pinned ones included
	home   []int // movable tenants that may stay in the cell
	bound  []int // those of them that have a jurisdiction

	who   []tenantAt // the movable tenants
	total []int      // movable tenants of each kind
}

// tenantAt is a movable tenant: its number, its kind, and its cell if it may stay
// there, else -1.
type tenantAt struct{ i, kind, cell int }

func evenSpread(f *FleetView, cells []CellID) []Target {
	e := &even{f: f, r: newRoom(f), of: map[int]int{}, shut: map[int]bool{}, by: map[string]int{}, out: make([]Target, len(f.Tenants))}
	for _, c := range e.r.indexes(cells) {
		if e.r.cells[c].view.Closed {
			e.shut[c] = true
			continue
		}
		e.of[c] = len(e.at)
		e.at = append(e.at, c)
		kind := 0
		if j := e.r.cells[c].view.Jurisdiction; j != "" {
			if kind = e.by[j]; kind == 0 {
				kind = len(e.by) + 1
				e.by[j] = kind
			}
		}
		e.kind = append(e.kind, kind)
		limit := math.MaxInt32
		if l := e.r.cells[c].view.Limits.Tenants; l != nil && *l < int64(limit) {
			limit = int(*l)
		}
		e.limit = append(e.limit, limit)
	}
	n := len(e.at)
	e.pinned, e.home, e.bound = make([]int, n), make([]int, n), make([]int, n)
	e.total = make([]int, len(e.by)+1)
	e.sort()
	e.overflow()
	if n > 0 {
		e.assign(e.counts())
	}
	return e.out
}

// sort tells the movable tenants from those that stay.
func (e *even) sort() {
	for i := range e.f.Tenants {
		t := &e.f.Tenants[i]
		home := e.r.index(t.Cell)
		cell, listed := e.of[home]
		kind, served := 0, len(e.at) > 0
		if t.Jurisdiction != "" {
			kind = e.by[t.Jurisdiction]
			served = kind > 0
		}
		switch {
		case e.shut[home] && e.r.may(t, home) != outOfJurisdiction:
			continue
		case t.Pinned != "", !served:
			if t.Pinned == "" {
				e.out[i].Why = outOfJurisdiction.nowhere()
			}
			if listed {
				e.pinned[cell]++
			}
			continue
		case !listed || t.Jurisdiction != "" && e.kind[cell] != kind:
			cell = -1
		default:
			e.home[cell]++
			if kind > 0 {
				e.bound[cell]++
			}
		}
		e.who = append(e.who, tenantAt{i, kind, cell})
		e.total[kind]++
	}
}

// overflow takes out the tenants for which there is no room: those from outside
// first, which stay there, then those in cells that are above their limit already.
func (e *even) overflow() {
	room := make([]int, len(e.total)) // for each kind, in its cells
	for c := range e.at {
		room[e.kind[c]] += max(0, e.limit[c]-e.pinned[c])
	}
	all := 0
	for k := range room {
		all += room[k]
	}
	rest := all
	for k := 1; k < len(e.total); k++ {
		if over := e.total[k] - room[k]; over > 0 {
			e.drop(k, over)
		}
		rest -= e.total[k]
	}
	if over := e.total[0] - rest; over > 0 {
		e.drop(0, over)
	}
}

// drop leaves over tenants of the kind where they are.
func (e *even) drop(kind, over int) {
	stay := func(w tenantAt) {
		over--
		e.total[kind]--
		e.out[w.i].Why = tenantsFull.nowhere()
	}
	var kept []tenantAt
	for k := len(e.who) - 1; k >= 0; k-- {
		if w := e.who[k]; w.kind == kind && w.cell < 0 && over > 0 {
			stay(w)
			continue
		}
		kept = append(kept, e.who[k])
	}
	slices.Reverse(kept)
	e.who, kept = kept, nil
	for k := len(e.who) - 1; k >= 0; k-- {
		w := e.who[k]
		if w.kind == kind && w.cell >= 0 && over > 0 && e.home[w.cell]+e.pinned[w.cell] > e.limit[w.cell] {
			stay(w)
			e.home[w.cell]--
			if kind > 0 {
				e.bound[w.cell]--
			}
			// It stays beyond the limit, and takes nobody's room.
			e.pinned[w.cell]++
			e.limit[w.cell]++
			continue
		}
		kept = append(kept, w)
	}
	slices.Reverse(kept)
	e.who = kept
}

// filled is how many tenants a cell has when it is filled up to a level.
func (e *even) filled(c, level int) int {
	return max(e.pinned[c], min(e.limit[c], level))
}

// level is the highest one at which sum does not exceed n; sum grows with it.
func level(n int, sum func(level int) int) int {
	return sort.Search(n+1, func(l int) bool { return sum(l+1) > n })
}

// counts says how many tenants each cell shall have: the cells are filled like
// connected vessels, those of a jurisdiction at least as high as its tenants need.
// Where the last tenants do not fill a whole level, they go to the cells that would
// otherwise have to give some away.
func (e *even) counts() []int {
	kinds := len(e.total)
	cellsOf := make([][]int, kinds)
	need := make([]int, kinds) // tenants that cannot be outside the kind's cells
	all := 0
	for c := range e.at {
		k := e.kind[c]
		cellsOf[k] = append(cellsOf[k], c)
		need[k] += e.pinned[c]
		all += e.pinned[c]
	}
	for k := range kinds {
		all += e.total[k]
		if k > 0 {
			need[k] += e.total[k]
		}
	}
	sumOf := func(k, level int) (n int) {
		for _, c := range cellsOf[k] {
			n += e.filled(c, level)
		}
		return n
	}
	base := make([]int, kinds)
	for k := 1; k < kinds; k++ {
		base[k] = level(need[k], func(l int) int { return sumOf(k, l) })
	}
	sum := func(l int) (n int) {
		n = sumOf(0, l)
		for k := 1; k < kinds; k++ {
			n += max(need[k], sumOf(k, l))
		}
		return n
	}
	common := level(all, sum)
	n := make([]int, len(e.at))
	least := make([]int, kinds) // of the last tenants, how many a kind needs
	var pool []int
	last := all - sum(common)
	for k := range kinds {
		own := max(common, base[k])
		for _, c := range cellsOf[k] {
			n[c] = e.filled(c, own)
		}
		if k > 0 && base[k] >= common {
			least[k] = need[k] - sumOf(k, base[k])
		}
		if k > 0 && base[k] > common {
			e.raise(n, base[k], cellsOf[k], least, least[k])
			continue
		}
		if k > 0 && base[k] == common {
			last += least[k]
		}
		pool = append(pool, cellsOf[k]...)
	}
	slices.Sort(pool)
	e.raise(n, common, pool, least, last)
	return n
}

// raise gives one more tenant to as many of the pool's cells at the level as there
// are last ones, each
// kind its least first. It takes those that save most moves.
func (e *even) raise(n []int, level int, pool, least []int, last int) {
	lack := make([]int, len(least)) // bound tenants of a kind for which there is no open place
	for k := 1; k < len(lack); k++ {
		lack[k] = e.lack(n, k)
	}
	raised := map[int]bool{}
	gain := func(c int) int {
		m, k := n[c]-e.pinned[c], e.kind[c]
		short := k > 0 && lack[k] > 0
		switch {
		case e.bound[c] > m && short:
			return 2
		case e.home[c] > m:
			return 1
		case short:
			return 1
		}
		return 0
	}
	best := func(kind int) int {
		b := -1
		for _, c := range pool {
			if raised[c] || n[c] != level || e.limit[c] <= level || kind > 0 && e.kind[c] != kind {
				continue
			}
			if b < 0 || gain(c) > gain(b) {
				b = c
			}
		}
		return b
	}
	up := func(c int) {
		m, k := n[c]-e.pinned[c], e.kind[c]
		if k > 0 && (e.bound[c] > m || e.home[c] <= m) {
			lack[k]--
		}
		n[c]++
		raised[c] = true
		last--
	}
	kinds := map[int]bool{}
	for _, c := range pool {
		kinds[e.kind[c]] = true
	}
	for k := 1; k < len(least); k++ {
		for ; kinds[k] && least[k] > 0; least[k]-- {
			if c := best(k); c >= 0 {
				up(c)
			}
		}
	}
	for last > 0 {
		c := best(0)
		if c < 0 {
			return
		}
		up(c)
	}
}

// lack is how many tenants of the kind find no open place in its cells, because
// tenants that may be anywhere are in them.
func (e *even) lack(n []int, kind int) int {
	lack, homes := e.total[kind], 0
	for c := range e.at {
		if e.kind[c] != kind {
			continue
		}
		m := n[c] - e.pinned[c]
		homes += min(m, e.bound[c]) // stay
		lack -= max(0, m-e.home[c]) // open places
	}
	return lack - homes
}

// assign says who stays and where the others go.
func (e *even) assign(n []int) {
	open := make([]int, len(e.at))
	for c := range open {
		open[c] = n[c] - e.pinned[c]
	}
	stays := make([]bool, len(e.who))
	keep := func(bound bool) {
		for k, w := range e.who {
			if w.cell >= 0 && (w.kind > 0) == bound && open[w.cell] > 0 {
				open[w.cell]--
				stays[k] = true
			}
		}
	}
	keep(true)
	keep(false)
	// Tenants that may be anywhere make room for those that may not.
	lack := make([]int, len(e.total))
	for k, w := range e.who {
		if w.kind > 0 && !stays[k] {
			lack[w.kind]++
		}
	}
	for c := range open {
		if k := e.kind[c]; k > 0 {
			lack[k] -= open[c]
		}
	}
	for k := len(e.who) - 1; k >= 0; k-- {
		w := e.who[k]
		if w.kind == 0 && stays[k] {
			if j := e.kind[w.cell]; j > 0 && lack[j] > 0 {
				lack[j]--
				stays[k] = false
				open[w.cell]++
			}
		}
	}
	for k, w := range e.who {
		if !stays[k] {
			e.r.remove(&e.f.Tenants[w.i], e.r.index(e.f.Tenants[w.i].Cell))
		}
	}
	settle := func(bound bool) {
		next := make([]int, len(e.total))
		for k, w := range e.who {
			if stays[k] || (w.kind > 0) != bound {
				continue
			}
			t := &e.f.Tenants[w.i]
			first, chosen := -1, -1
			for c := next[w.kind]; c < len(open); c++ {
				if open[c] == 0 || w.kind > 0 && e.kind[c] != w.kind {
					if c == next[w.kind] {
						next[w.kind]++
					}
					continue
				}
				if first < 0 {
					first = c
				}
				if e.r.fits(t, e.at[c], false) == 0 {
					chosen = c
					break
				}
			}
			if chosen < 0 {
				chosen = first
			}
			if chosen < 0 {
				e.out[w.i].Why = tenantsFull.nowhere()
				continue
			}
			open[chosen]--
			e.r.add(t, e.at[chosen])
			e.out[w.i].Cell = e.r.cells[e.at[chosen]].view.Cell
		}
	}
	settle(true)
	settle(false)
}
