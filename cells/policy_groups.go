// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sort"
)

// BlastRadiusPolicy takes the tenants of each group apart, so that no cell has two
// of them, with the fewest moves for each group. Tenants without a group, and those
// of groups that are apart already, stay; a group with more tenants than there are
// cells for it is spread as far as it goes.
func BlastRadiusPolicy(cells []CellID) Policy {
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		out := make([]Target, len(f.Tenants))
		f.GroupMax = 0 // this is what takes them apart
		r := newRoom(f)
		at := r.indexes(cells)
		for _, g := range groupsOf(f) {
			if g.crowded(f, r, at) {
				g.apart(f, r, at, out)
			}
		}
		return out, nil
	})
}

// group is the tenants of one group, by number, in order.
type group struct {
	name    string
	tenants []int
}

// groupsOf lists the groups by name.
func groupsOf(f *FleetView) []group {
	at := map[string]int{}
	var out []group
	for i := range f.Tenants {
		name := f.Tenants[i].Group
		if name == "" {
			continue
		}
		k, ok := at[name]
		if !ok {
			k = len(out)
			at[name] = k
			out = append(out, group{name: name})
		}
		out[k].tenants = append(out[k].tenants, i)
	}
	sort.Slice(out, func(a, b int) bool { return out[a].name < out[b].name })
	return out
}

// crowded reports whether two of the tenants share a cell, or one is in no cell.
func (g group) crowded(f *FleetView, r *room, at []int) bool {
	seen := make(map[int]bool, len(g.tenants))
	for _, i := range g.tenants {
		c := r.index(f.Tenants[i].Cell)
		if c < 0 || seen[c] {
			return true
		}
		seen[c] = true
	}
	return false
}

// apart gives each tenant of the group a cell of its own: a matching of tenants
// and cells that serves as many tenants as possible, moves as few of them as
// possible, and prefers cells with fewer tenants.
func (g group) apart(f *FleetView, r *room, at []int, out []Target) {
	// Cells outside of the list can be stayed in.
	spots := slices.Clone(at)
	var movable []int
	taken := map[int]bool{}
	for _, i := range g.tenants {
		t := &f.Tenants[i]
		home := r.index(t.Cell)
		if t.Pinned != "" {
			taken[home] = true
			continue
		}
		if home >= 0 && !slices.Contains(spots, home) {
			spots = append(spots, home)
		}
		movable = append(movable, i)
	}
	for _, i := range movable {
		r.remove(&f.Tenants[i], r.index(f.Tenants[i].Cell))
	}
	const never = math.MaxInt64 / 4
	cost := func(k, s int) int64 {
		t, c := &f.Tenants[movable[k]], spots[s]
		home := r.index(t.Cell) == c
		switch {
		case taken[c], r.fits(t, c, home) != 0, !home && s >= len(at):
			return never
		case home:
			return 0
		}
		return 1<<40 + min(r.cells[c].holds.Tenants, 1<<30)
	}
	match := assignment(len(movable), len(spots), never, cost)
	for k, i := range movable {
		t := &f.Tenants[i]
		home := r.index(t.Cell)
		s := match[k]
		switch {
		case s < 0:
			r.add(t, home)
			out[i].Why = groupThere.nowhere()
		default:
			r.add(t, spots[s])
			if spots[s] != home {
				out[i].Cell = r.cells[spots[s]].view.Cell
			}
		}
	}
}

// assignment gives each of n persons at most one of m places, no place twice: as
// many as possible, then as cheaply as possible. A cost of never forbids. It
// returns the place of each, or -1. The first persons go before the later ones
// where not all can be served at the same cost.
func assignment(n, m int, never int64, cost func(person, place int) int64) []int {
	match, holder := make([]int, n), make([]int, m)
	for k := range match {
		match[k] = -1
	}
	for s := range holder {
		holder[s] = -1
	}
	for range n {
		// The cheapest way to serve one more: along places whose holders step aside.
		person := make([]int64, n) // cost to free the person from its place
		place := make([]int64, m)
		via := make([]int, m) // who would take the place
		for k := range person {
			person[k] = never
			if match[k] < 0 {
				person[k] = 0
			}
		}
		for s := range place {
			place[s] = never
		}
		for changed := true; changed; {
			changed = false
			for k := range person {
				if person[k] >= never {
					continue
				}
				for s := range place {
					c := cost(k, s)
					if c >= never || match[k] == s || person[k]+c >= place[s] {
						continue
					}
					place[s], via[s], changed = person[k]+c, k, true
					if h := holder[s]; h >= 0 {
						if d := place[s] - cost(h, s); d < person[h] {
							person[h] = d
						}
					}
				}
			}
		}
		end := -1
		for s := range place {
			if holder[s] < 0 && place[s] < never && (end < 0 || place[s] < place[end]) {
				end = s
			}
		}
		if end < 0 {
			break
		}
		for s := end; s >= 0; {
			k := via[s]
			before := match[k]
			match[k], holder[s] = s, k
			s = before
		}
	}
	return match
}

// ShuffleShardPolicy keeps each group's tenants in n of the cells, which a hash of
// the group chooses: two groups share all of their cells only by rare chance, and a
// cell that is added or taken away changes the cells of few groups. A tenant
// without a group is a group of its own. Groups whose tenants have different
// jurisdictions have n cells in each.
func ShuffleShardPolicy(cells []CellID, n int) Policy {
	cells = slices.Clone(cells)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := checkCells(cells); err != nil {
			return nil, err
		}
		if n < 1 || n > len(cells) {
			return nil, fmt.Errorf("%w: shards of %d cells out of %d", ErrInvalid, n, len(cells))
		}
		r := newRoom(f)
		at := r.indexes(cells)
		hashes := make([]uint64, len(at)) // of the cells' names, whatever their order
		for k := range cells {
			hashes[k] = mix(0, string(cells[k]))
		}
		type key struct{ group, jurisdiction string }
		shards := map[key][]int{}
		counts := map[key]map[int]int{} // tenants of the group in each of its cells
		keyOf := func(t *TenantView) key {
			if t.Group == "" {
				return key{"\x00" + string(t.Tenant), t.Jurisdiction}
			}
			return key{t.Group, t.Jurisdiction}
		}
		for i := range f.Tenants {
			t := &f.Tenants[i]
			k := keyOf(t)
			if shards[k] == nil {
				shards[k] = shard(mix(f.Seed, k.group), hashes, r, at, t, n)
				counts[k] = map[int]int{}
			}
			counts[k][r.index(t.Cell)]++
		}
		out := make([]Target, len(f.Tenants))
		for i := range f.Tenants {
			t := &f.Tenants[i]
			k := keyOf(t)
			home := r.index(t.Cell)
			if slices.Contains(shards[k], home) {
				continue
			}
			if t.Pinned != "" {
				out[i].Why = t.Pinned
				continue
			}
			best, why := -1, outOfJurisdiction
			for _, c := range shards[k] {
				if o := r.fits(t, c, false); o != 0 {
					why = max(why, o)
					continue
				}
				if best < 0 || counts[k][c] < counts[k][best] || counts[k][c] == counts[k][best] && r.emptier(c, best, MeasureTenants) {
					best = c
				}
			}
			if best < 0 {
				out[i].Why = why.nowhere()
				continue
			}
			counts[k][home]--
			counts[k][best]++
			r.remove(t, home)
			r.add(t, best)
			out[i].Cell = r.cells[best].view.Cell
		}
		return out, nil
	})
}

// shard is the n cells of a group with the highest hashes, among those that the
// tenant's jurisdiction allows. hashes are those of the cells of at.
func shard(group uint64, hashes []uint64, r *room, at []int, t *TenantView, n int) []int {
	out := make([]int, 0, n+1)
	ranks := make([]uint64, 0, n+1)
	for k, c := range at {
		if r.may(t, c) == outOfJurisdiction {
			continue
		}
		h := scatter(group ^ hashes[k])
		i := len(out)
		for i > 0 && ranks[i-1] < h {
			i--
		}
		if i < n {
			out, ranks = slices.Insert(out, i, c), slices.Insert(ranks, i, h)
			if len(out) > n {
				out, ranks = out[:n], ranks[:n]
			}
		}
	}
	return out
}

// HotOptions says who is hot and what becomes of it.
type HotOptions struct {
	// By is what is measured; MeasureTenants is refused. A tenant is hot if it has at
	// least Above, which is positive.
	By    Measure
	Above float64
	// Dedicated are the cells for hot tenants; PerCell bounds how many each gets,
	// 0 means one.
	Dedicated []CellID
	PerCell   int
	// Others are cells for tenants that are not hot. With Dedicated they get those
	// that are in its cells; without, those that share a cell with a hot tenant.
	Others []CellID
}

// IsolateHotPolicy keeps hot tenants apart from the others: it moves them to
// dedicated cells, the hottest first, or, without dedicated cells, it moves the
// others away from them.
func IsolateHotPolicy(o HotOptions) Policy {
	o.Dedicated, o.Others = slices.Clone(o.Dedicated), slices.Clone(o.Others)
	return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
		if err := o.check(); err != nil {
			return nil, err
		}
		r := newRoom(f)
		out := make([]Target, len(f.Tenants))
		hot := o.hot(f)
		if len(o.Dedicated) > 0 {
			o.gather(f, r, hot, out)
			return out, nil
		}
		with := map[int]bool{} // cells that have a hot tenant
		for _, i := range hot {
			with[r.index(f.Tenants[i].Cell)] = true
		}
		o.evict(f, r, with, out)
		return out, nil
	})
}

func (o *HotOptions) check() error {
	if err := o.By.Validate(); err != nil {
		return err
	}
	if o.By == MeasureTenants || !(o.Above > 0) {
		return fmt.Errorf("%w: hot is a positive number of rows, bytes or requests a second", ErrInvalid)
	}
	if o.PerCell < 0 {
		return fmt.Errorf("%w: %d hot tenants a cell", ErrInvalid, o.PerCell)
	}
	if len(o.Dedicated) == 0 && len(o.Others) == 0 {
		return fmt.Errorf("%w: name cells for the hot tenants or for the others", ErrInvalid)
	}
	for _, list := range [][]CellID{o.Dedicated, o.Others} {
		if len(list) == 0 {
			continue
		}
		if err := checkCells(list); err != nil {
			return err
		}
	}
	for _, c := range o.Others {
		if slices.Contains(o.Dedicated, c) {
			return fmt.Errorf("%w: cell %s is for hot tenants and for others", ErrInvalid, c)
		}
	}
	return nil
}

func (o *HotOptions) is(t *TenantView) bool { return o.By.Of(t) >= o.Above }

// hot lists the hot tenants, the hottest first.
func (o *HotOptions) hot(f *FleetView) []int {
	var out []int
	for i := range f.Tenants {
		if o.is(&f.Tenants[i]) {
			out = append(out, i)
		}
	}
	sort.SliceStable(out, func(a, b int) bool { return o.By.Of(&f.Tenants[out[a]]) > o.By.Of(&f.Tenants[out[b]]) })
	return out
}

// gather moves the hot tenants to the dedicated cells, and the others out of them.
func (o *HotOptions) gather(f *FleetView, r *room, hot []int, out []Target) {
	at := r.indexes(o.Dedicated)
	dedicated := map[int]bool{}
	for _, c := range at {
		dedicated[c] = true
	}
	if len(o.Others) > 0 {
		o.evict(f, r, dedicated, out)
	}
	n := map[int]int{}
	for _, i := range hot {
		if c := r.index(f.Tenants[i].Cell); dedicated[c] {
			n[c]++
		}
	}
	limit := max(o.PerCell, 1)
	for _, i := range hot {
		t := &f.Tenants[i]
		home := r.index(t.Cell)
		if dedicated[home] && n[home] <= limit {
			continue
		}
		if t.Pinned != "" {
			out[i].Why = t.Pinned
			continue
		}
		best, why := -1, obstacle(0)
		for _, c := range at {
			if c == home || n[c] >= limit {
				continue
			}
			if x := r.fits(t, c, false); x != 0 {
				why = max(why, x)
			} else if best < 0 || n[c] < n[best] || n[c] == n[best] && r.emptier(c, best, o.By) {
				best = c
			}
		}
		if best < 0 {
			out[i].Why = "the dedicated cells have enough hot tenants"
			if why != 0 {
				out[i].Why = why.nowhere()
			}
			continue
		}
		n[home]--
		n[best]++
		r.remove(t, home)
		r.add(t, best)
		out[i].Cell = r.cells[best].view.Cell
	}
}

// evict moves the tenants that are not hot out of the cells of from.
func (o *HotOptions) evict(f *FleetView, r *room, from map[int]bool, out []Target) {
	var at []int
	for _, c := range r.indexes(o.Others) {
		if !from[c] {
			at = append(at, c)
		}
	}
	for i := range f.Tenants {
		t := &f.Tenants[i]
		if o.is(t) || !from[r.index(t.Cell)] {
			continue
		}
		if t.Pinned != "" {
			out[i].Why = t.Pinned
			continue
		}
		out[i] = r.place(t, at, o.By)
	}
}
