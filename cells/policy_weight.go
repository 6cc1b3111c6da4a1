// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"math"
	"slices"
	"sort"
)

// searchSteps bounds the search for a plan with fewer moves than the greedy one.
// It counts steps, not time, so that the answer is the same on every machine.
const searchSteps = 200_000

// spread is an even spread by weight while it is made.
type spread struct {
	f   *FleetView
	r   *room
	by  Measure
	at  []int // open cells among which is spread, as numbers in r
	own []bool
	// share is how much each cell of r may have at most; infinite for cells that are
	// not in at.
	share []float64
	// forced are the tenants that cannot stay where they are.
	forced []int
	out    []Target
}

func spreadBy(f *FleetView, list []CellID, by Measure, tolerance float64) []Target {
	s := &spread{f: f, r: newRoom(f), by: by, out: make([]Target, len(f.Tenants))}
	shut := map[int]bool{}
	for _, c := range s.r.indexes(list) {
		if s.r.cells[c].view.Closed {
			shut[c] = true
			continue
		}
		s.at = append(s.at, c)
	}
	s.own = make([]bool, len(s.r.cells))
	for _, c := range s.at {
		s.own[c] = true
	}
	for i := range f.Tenants {
		t := &f.Tenants[i]
		home := s.r.index(t.Cell)
		switch {
		case t.Pinned != "", home >= 0 && shut[home] && s.r.may(t, home) != outOfJurisdiction:
		case home < 0 || !s.own[home] || s.r.fits(t, home, true) != 0:
			s.out[i] = s.r.place(t, s.at, by)
			s.forced = append(s.forced, i)
		}
	}
	s.shares(tolerance)
	before := s.save()
	least := s.least()
	n := s.relieve()
	if over := s.over(); n > least || over {
		greedy := s.save()
		s.restore(before)
		most := n
		if over {
			most = math.MaxInt32 // any plan that keeps the shares is better
		}
		if !s.search(least, most) {
			s.restore(greedy)
		}
	}
	return s.out
}

// cellOf is the number of the cell that the tenant is to be in.
func (s *spread) cellOf(i int) int {
	if c := s.out[i].Cell; c != "" {
		return s.r.at[c]
	}
	return s.r.index(s.f.Tenants[i].Cell)
}

func (s *spread) save() []Target { return slices.Clone(s.out) }

func (s *spread) restore(out []Target) {
	for i := range out {
		if out[i].Cell != s.out[i].Cell {
			t := &s.f.Tenants[i]
			s.r.remove(t, s.cellOf(i))
			s.out[i] = out[i]
			s.r.add(t, s.cellOf(i))
		}
	}
	s.out = out
}

// shares fills the cells like connected vessels: those of a jurisdiction at least
// as high as the tenants need that may be nowhere else.
func (s *spread) shares(tolerance float64) {
	kinds := map[string][]int{}
	pinned := make([]float64, len(s.r.cells))
	need := map[string]float64{}
	all := 0.0
	for _, c := range s.at {
		j := s.r.cells[c].view.Jurisdiction
		kinds[j] = append(kinds[j], c)
	}
	for i := range s.f.Tenants {
		t := &s.f.Tenants[i]
		c := s.cellOf(i)
		if c < 0 || !s.own[c] {
			continue
		}
		w := s.by.Of(t)
		all += w
		if t.Pinned != "" {
			pinned[c] += w
		}
		if j := s.r.cells[c].view.Jurisdiction; j != "" && (t.Pinned != "" || t.Jurisdiction != "") {
			need[j] += w
		}
	}
	sum := func(list []int, level float64) (n float64) {
		for _, c := range list {
			n += max(pinned[c], level)
		}
		return n
	}
	level := func(n float64, f func(float64) float64) float64 {
		lo, hi := 0.0, max(all, n)
		for range 200 {
			mid := lo + (hi-lo)/2
			if f(mid) <= n {
				lo = mid
			} else {
				hi = mid
			}
		}
		return hi
	}
	names := make([]string, 0, len(kinds))
	for j := range kinds {
		names = append(names, j)
	}
	sort.Strings(names)
	common := level(all, func(l float64) (n float64) {
		for _, j := range names {
			n += max(need[j], sum(kinds[j], l))
		}
		return n
	})
	s.share = make([]float64, len(s.r.cells))
	for c := range s.share {
		s.share[c] = math.Inf(1)
	}
	for _, j := range names {
		own := common
		if j != "" {
			own = max(common, level(need[j], func(l float64) float64 { return sum(kinds[j], l) }))
		}
		for _, c := range kinds[j] {
			s.share[c] = max(pinned[c], own*(1+tolerance))
		}
	}
}

func (s *spread) excess(c int) float64 { return s.r.cells[c].weight(s.by) - s.share[c] }

func (s *spread) over() bool {
	return slices.ContainsFunc(s.at, func(c int) bool { return s.excess(c) > 0 })
}

// heaviest lists the movable tenants of each cell, the heaviest first.
func (s *spread) heaviest() [][]int {
	in := make([][]int, len(s.r.cells))
	for i := range s.f.Tenants {
		t := &s.f.Tenants[i]
		if c := s.cellOf(i); t.Pinned == "" && c >= 0 && s.own[c] && s.by.Of(t) > 0 {
			in[c] = append(in[c], i)
		}
	}
	for c := range in {
		slices.SortStableFunc(in[c], func(a, b int) int {
			x, y := s.by.Of(&s.f.Tenants[a]), s.by.Of(&s.f.Tenants[b])
			switch {
			case x > y:
				return -1
			case x < y:
				return 1
			}
			return 0
		})
	}
	return in
}

// least is how many tenants have to leave at least, beside the forced ones and
// wherever those go, for every cell to keep its share: each gives its heaviest.
func (s *spread) least() int {
	forced := make(map[int]bool, len(s.forced))
	excess := make([]float64, len(s.r.cells))
	for _, c := range s.at {
		excess[c] = s.excess(c)
	}
	for _, i := range s.forced {
		forced[i] = true
		if c := s.cellOf(i); c >= 0 && s.own[c] {
			excess[c] -= s.by.Of(&s.f.Tenants[i])
		}
	}
	n := 0
	for c, list := range s.heaviest() {
		for _, i := range list {
			if excess[c] <= 0 {
				break
			}
			if !forced[i] {
				n++
				excess[c] -= s.by.Of(&s.f.Tenants[i])
			}
		}
	}
	return n
}

// relieve moves tenants out of the cells that have more than their share and
// returns how many moves that costs.
func (s *spread) relieve() int {
	n := 0
	in := s.heaviest()
	order := slices.Clone(s.at)
	slices.SortStableFunc(order, func(a, b int) int {
		switch x, y := s.excess(a), s.excess(b); {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return 0
	})
	for _, c := range order {
		list, next := in[c], 0
		tried := 0
		for s.excess(c) > 0 && next < len(list) && tried < 2*len(list) {
			tried++
			// The lightest that is enough, else the heaviest.
			k := next
			if over := s.excess(c); s.by.Of(&s.f.Tenants[list[next]]) >= over {
				k = next + sort.Search(len(list)-next, func(d int) bool { return s.by.Of(&s.f.Tenants[list[next+d]]) < over }) - 1
			}
			i := list[k]
			to := s.lightest(i, c)
			if to < 0 && k != next { // a heavier one will not find a place either
				k, i = next, list[next]
			}
			copy(list[next+1:k+1], list[next:k])
			next++
			if to < 0 {
				continue
			}
			if s.out[i].Cell == "" {
				n++
			}
			t := &s.f.Tenants[i]
			s.r.remove(t, c)
			s.r.add(t, to)
			s.out[i] = Target{Cell: s.r.cells[to].view.Cell}
		}
	}
	return n
}

// lightest is the cell with the least weight that takes tenant i within its share,
// or, if none does, one that has less with it than cell c has now; -1 is none.
func (s *spread) lightest(i, c int) int {
	t := &s.f.Tenants[i]
	w := s.by.Of(t)
	best := -1
	for _, d := range s.at {
		if d == c || s.r.fits(t, d, s.r.index(t.Cell) == d) != 0 || best >= 0 && !s.r.emptier(d, best, s.by) {
			continue
		}
		best = d
	}
	if best >= 0 && s.r.cells[best].weight(s.by)+w > s.share[best] && s.r.cells[best].weight(s.by)+w >= s.r.cells[c].weight(s.by) {
		return -1
	}
	return best
}

// search looks for a plan that keeps all shares with at least least and fewer than
// most moves beside the forced ones, the fewest first. It reports whether it found
// one, which is then in out.
func (s *spread) search(least, most int) bool {
	forced := make(map[int]bool, len(s.forced))
	for _, i := range s.forced {
		forced[i] = true
		if s.out[i].Cell != "" {
			s.put(i, s.cellOf(i), s.r.index(s.f.Tenants[i].Cell), Target{})
		}
	}
	var movable []int
	for i := range s.f.Tenants {
		t := &s.f.Tenants[i]
		if c := s.cellOf(i); t.Pinned == "" && !forced[i] && c >= 0 && s.own[c] && s.by.Of(t) > 0 {
			movable = append(movable, i)
		}
	}
	steps := searchSteps
	var each func(i int, then func() bool) bool
	var try func(from, left int) bool
	each = func(i int, then func() bool) bool {
		t := &s.f.Tenants[i]
		home := s.r.index(t.Cell)
		for _, d := range s.at {
			if d == home || s.r.fits(t, d, false) != 0 {
				continue
			}
			old := s.out[i]
			s.put(i, home, d, Target{Cell: s.r.cells[d].view.Cell})
			if then() {
				return true
			}
			s.put(i, d, home, old)
			if steps < 0 {
				break
			}
		}
		return false
	}
	try = func(from, left int) bool {
		if steps--; steps < 0 {
			return false
		}
		if !s.over() {
			return true
		}
		for k := from; left > 0 && k < len(movable) && steps >= 0; k++ {
			if each(movable[k], func() bool { return try(k+1, left-1) }) {
				return true
			}
		}
		return false
	}
	var place func(k, left int) bool
	place = func(k, left int) bool {
		if k == len(s.forced) {
			return try(0, left)
		}
		return each(s.forced[k], func() bool { return place(k+1, left) })
	}
	for n := least; n < most && n <= len(movable) && steps > 0; n++ {
		if place(0, n) {
			return true
		}
	}
	return false
}

// put takes tenant i from a cell to another.
func (s *spread) put(i, from, to int, target Target) {
	t := &s.f.Tenants[i]
	s.r.remove(t, from)
	s.r.add(t, to)
	s.out[i] = target
}
