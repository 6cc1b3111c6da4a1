// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// drawFleet draws a small fleet: cells with and without jurisdictions and limits,
// tenants in them and elsewhere.
func drawFleet(rt *rapid.T, cellsMax, tenantsMax int, limits bool) (*FleetView, []CellID) {
	f := &FleetView{Seed: rapid.Uint64().Draw(rt, "seed")}
	var list []CellID
	juris := []string{"", "eu", "us"}
	n := rapid.IntRange(1, cellsMax).Draw(rt, "cells")
	for i := range n {
		c := CellView{Cell: CellID(fmt.Sprintf("c%d", i)), Jurisdiction: rapid.SampledFrom(juris).Draw(rt, "jurisdiction")}
		if limits && rapid.IntRange(0, 2).Draw(rt, "limited") == 0 {
			l := int64(rapid.IntRange(0, 4).Draw(rt, "limit"))
			c.Limits.Tenants = &l
		}
		if limits && rapid.IntRange(0, 4).Draw(rt, "rows limited") == 0 {
			l := int64(rapid.IntRange(0, 20).Draw(rt, "rows"))
			c.Limits.Rows = &l
		}
		c.Closed = limits && rapid.IntRange(0, 7).Draw(rt, "closed") == 0
		f.Cells = append(f.Cells, c)
		list = append(list, c.Cell)
	}
	for i := range rapid.IntRange(0, tenantsMax).Draw(rt, "tenants") {
		t := TenantView{Tenant: TenantID(fmt.Sprintf("t%02d", i)), Jurisdiction: rapid.SampledFrom([]string{"", "", "eu", "us"}).Draw(rt, "of")}
		t.Cell = CellID(fmt.Sprintf("c%d", rapid.IntRange(0, n).Draw(rt, "at"))) // one that is not among the cells too
		t.Group = rapid.SampledFrom([]string{"", "g", "h"}).Draw(rt, "group")
		t.Rows = int64(rapid.IntRange(0, 9).Draw(rt, "weight"))
		t.Load = float64(t.Rows)
		if limits && rapid.IntRange(0, 9).Draw(rt, "pinned") == 0 {
			t.Pinned = "pinned"
		}
		f.Tenants = append(f.Tenants, t)
	}
	return f, list
}

func (f *FleetView) clone() *FleetView {
	c := *f
	c.Cells, c.Tenants = slices.Clone(f.Cells), slices.Clone(f.Tenants)
	return &c
}

// policiesOn are all policies with some settings.
func policiesOn(list []CellID) map[string]Policy {
	out := map[string]Policy{
		"round robin": RoundRobinPolicy(list), "even": EvenSpreadPolicy(list), "even rows": EvenSpreadBy(list, MeasureRows, 0.2),
		"groups": BlastRadiusPolicy(list), "shuffle": ShuffleShardPolicy(list, (len(list)+1)/2),
		"hot": IsolateHotPolicy(HotOptions{By: MeasureLoad, Above: 6, Dedicated: list[:1], Others: list[1:]}),
	}
	if len(list) > 1 {
		out["drain"] = DrainPolicy(list[:1], list[1:])
		out["away from hot"] = IsolateHotPolicy(HotOptions{By: MeasureRows, Above: 6, Others: list})
	}
	return out
}

// Whatever the policy: jurisdictions, closed cells and limits hold at every moment
// of the plan, nobody is moved twice, who stays against the policy's wish is named,
// and the plan does not depend on the order of its input.
func TestPlansKeepConstraints(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f, list := drawFleet(rt, 4, 12, true)
		opts := &PlanOptions{Cells: f.Cells, Seed: f.Seed, GroupMax: rapid.IntRange(0, 2).Draw(rt, "group max")}
		for name, policy := range policiesOn(list) {
			plan, err := PlanFromPolicy(t.Context(), f.Tenants, policy, opts)
			if err != nil {
				rt.Fatalf("%s: %v", name, err)
			}
			checkPlan(rt, name, f, opts, plan)
			mixed := f.clone()
			rng := rand.New(rand.NewPCG(f.Seed, 1))
			rng.Shuffle(len(mixed.Tenants), func(i, j int) { mixed.Tenants[i], mixed.Tenants[j] = mixed.Tenants[j], mixed.Tenants[i] })
			rng.Shuffle(len(mixed.Cells), func(i, j int) { mixed.Cells[i], mixed.Cells[j] = mixed.Cells[j], mixed.Cells[i] })
			again, err := PlanFromPolicy(t.Context(), mixed.Tenants, policy, &PlanOptions{Cells: mixed.Cells, Seed: f.Seed, GroupMax: opts.GroupMax})
			if err != nil || !reflect.DeepEqual(plan, again) {
				rt.Errorf("%s: the plan depends on the order of its input:\n%+v\n%+v %v", name, plan, again, err)
			}
		}
	})
}

func checkPlan(rt *rapid.T, name string, f *FleetView, opts *PlanOptions, plan CampaignPlan) {
	at := map[TenantID]*TenantView{}
	in := map[CellID]map[TenantID]bool{}
	for i := range f.Tenants {
		v := &f.Tenants[i]
		at[v.Tenant] = v
		if in[v.Cell] == nil {
			in[v.Cell] = map[TenantID]bool{}
		}
		in[v.Cell][v.Tenant] = true
	}
	views := map[CellID]CellView{}
	for _, c := range f.Cells {
		views[c.Cell] = c
		if in[c.Cell] == nil {
			in[c.Cell] = map[TenantID]bool{}
		}
	}
	seen := map[TenantID]bool{}
	rows := int64(0)
	for _, m := range plan.Moves {
		v, to := at[m.TenantID], views[m.ToCell]
		switch {
		case seen[m.TenantID], v == nil, v.Cell != m.FromCell, m.FromCell == m.ToCell, v.Pinned != "":
			rt.Fatalf("%s: move %+v of %+v", name, m, v)
		case to.Closed, v.Jurisdiction != "" && v.Jurisdiction != to.Jurisdiction:
			rt.Fatalf("%s: %s may not go to %+v", name, m.TenantID, to)
		}
		seen[m.TenantID] = true
		rows += v.Rows
		delete(in[m.FromCell], m.TenantID)
		in[m.ToCell][m.TenantID] = true
		var n, r, g int64
		for t := range in[m.ToCell] {
			n++
			r += at[t].Rows
			if v.Group != "" && at[t].Group == v.Group {
				g++
			}
		}
		if l := to.Limits.Tenants; l != nil && n > *l {
			rt.Fatalf("%s: %s is the tenant %d of %s, which holds %d", name, m.TenantID, n, m.ToCell, *l)
		}
		if l := to.Limits.Rows; l != nil && v.Rows > 0 && r > *l {
			rt.Fatalf("%s: %s brings %s to %d rows, it holds %d", name, m.TenantID, m.ToCell, r, *l)
		}
		if opts.GroupMax > 0 && int(g) > opts.GroupMax {
			rt.Fatalf("%s: %s is the tenant %d of its group in %s", name, m.TenantID, g, m.ToCell)
		}
	}
	for _, s := range plan.Stays {
		if seen[s.Tenant] || s.Why == "" || s.Cell != at[s.Tenant].Cell {
			rt.Fatalf("%s: stays %+v", name, s)
		}
		seen[s.Tenant] = true
	}
	if rows != plan.Rows {
		rt.Errorf("%s: %d rows, want %d", name, plan.Rows, rows)
	}
}

// eachAssignment visits every assignment of the tenants to cells that jurisdictions
// and limits of tenants allow.
func eachAssignment(f *FleetView, list []CellID, visit func(at []int, moves int)) {
	used := make([]int, len(list))
	at := make([]int, len(f.Tenants))
	for i := range f.Tenants {
		at[i] = -1
	}
	var rec func(i, moves int)
	rec = func(i, moves int) {
		if i == len(f.Tenants) {
			visit(at, moves)
			return
		}
		t := &f.Tenants[i]
		for c := range list {
			v := &f.Cells[c]
			if t.Jurisdiction != "" && t.Jurisdiction != v.Jurisdiction || v.Limits.Tenants != nil && used[c] >= int(*v.Limits.Tenants) {
				continue
			}
			cost := 1
			if t.Cell == list[c] {
				cost = 0
			}
			used[c]++
			at[i] = c
			rec(i+1, moves+cost)
			used[c]--
		}
	}
	rec(0, 0)
}

// No plan is more even, and none that is as even has fewer moves: compared with
// every possible assignment.
func TestEvenSpreadIsBest(t *testing.T) {
	compared := 0
	rapid.Check(t, func(rt *rapid.T) {
		f, list := drawFleet(rt, 3, 7, true)
		for i := range f.Cells { // what the promise does not speak of
			f.Cells[i].Closed, f.Cells[i].Limits.Rows = false, nil
		}
		for i := range f.Tenants {
			f.Tenants[i].Pinned = ""
		}
		best, fewest := math.MaxInt, 0
		eachAssignment(f, list, func(at []int, moves int) {
			n, squares := make([]int, len(list)), 0
			for _, c := range at {
				n[c]++
			}
			for _, x := range n {
				squares += x * x
			}
			if squares < best || squares == best && moves < fewest {
				best, fewest = squares, moves
			}
		})
		got := evenSpread(f.clone(), list)
		if best == math.MaxInt {
			return // no assignment of all of them exists
		}
		compared++
		n, squares, moves := map[CellID]int{}, 0, 0
		for i, g := range got {
			if g.Why != "" {
				rt.Fatalf("%s stays (%s), though all of them have a place", f.Tenants[i].Tenant, g.Why)
			}
			c := f.Tenants[i].Cell
			if g.Cell != "" {
				c = g.Cell
			}
			if c != f.Tenants[i].Cell {
				moves++
			}
			n[c]++
		}
		for _, x := range n {
			squares += x * x
		}
		if squares != best || moves != fewest {
			rt.Errorf("squares %d with %d moves, possible are %d with %d: %v", squares, moves, best, fewest, got)
		}
	})
	if compared == 0 {
		t.Error("nothing was compared")
	}
}

// Where the search ends, no plan keeps the shares with fewer moves.
func TestEvenSpreadByIsBest(t *testing.T) {
	compared := 0
	rapid.Check(t, func(rt *rapid.T) {
		f, list := drawFleet(rt, 3, 7, true)
		for i := range f.Cells {
			f.Cells[i].Closed, f.Cells[i].Limits = false, Limits{}
		}
		for i := range f.Tenants {
			f.Tenants[i].Pinned = ""
		}
		const tolerance = 0.25
		s := &spread{f: f, r: newRoom(f), by: MeasureRows, out: make([]Target, len(f.Tenants))}
		for i := range f.Tenants { // tenants that no cell of the list may have do not count
			for _, c := range s.r.indexes(list) {
				if s.r.may(&f.Tenants[i], c) == 0 {
					f.Tenants[i].Pinned = "x"
				}
			}
		}
		keep := f.Tenants[:0]
		for _, v := range f.Tenants {
			if v.Pinned == "x" {
				v.Pinned = ""
				keep = append(keep, v)
			}
		}
		f.Tenants = keep
		got := spreadBy(f.clone(), list, MeasureRows, tolerance)
		// The shares, as the policy sees them: from any placement in the list.
		s = &spread{f: f, r: newRoom(f), by: MeasureRows, out: slices.Clone(got), at: nil}
		s.at = s.r.indexes(list)
		s.own = make([]bool, len(s.r.cells))
		for _, c := range s.at {
			s.own[c] = true
		}
		s.shares(tolerance)
		fewest := math.MaxInt
		eachAssignment(f, list, func(at []int, moves int) {
			w := make([]float64, len(list))
			for i, c := range at {
				w[c] += float64(f.Tenants[i].Rows)
			}
			for c := range w {
				if w[c] > s.share[c] {
					return
				}
			}
			fewest = min(fewest, moves)
		})
		w, moves := make([]float64, len(s.r.cells)), 0
		for i, g := range got {
			c := f.Tenants[i].Cell
			if g.Cell != "" {
				c = g.Cell
				moves++
			}
			w[s.r.index(c)] += float64(f.Tenants[i].Rows)
		}
		if fewest == math.MaxInt {
			return
		}
		compared++
		for _, c := range s.at {
			if w[c] > s.share[c] {
				rt.Fatalf("%s has %v, its share is %v, and %d moves would do: %+v", list[c], w[c], s.share[c], fewest, got)
			}
		}
		if moves > fewest {
			rt.Errorf("%d moves, %d are enough: %+v", moves, fewest, got)
		}
	})
	if compared == 0 {
		t.Error("nothing was compared")
	}
}

// Each group is as far apart as can be, with the fewest moves.
func TestBlastRadiusIsBest(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f, list := drawFleet(rt, 4, 6, false)
		for i := range f.Tenants {
			f.Tenants[i].Group = "g"
			if rapid.IntRange(0, 3).Draw(rt, "unlisted") > 0 && f.Tenants[i].Cell == CellID(fmt.Sprintf("c%d", len(list))) {
				f.Tenants[i].Cell = list[0]
			}
		}
		got, err := BlastRadiusPolicy(list).Targets(t.Context(), f.clone())
		if err != nil {
			rt.Fatal(err)
		}
		// All ways to keep, move, or leave: tenants alone in a cell count.
		type score struct{ alone, moves int }
		best := score{-1, 0}
		n := len(f.Tenants)
		taken := map[CellID]bool{}
		var rec func(i, alone, moves int)
		rec = func(i, alone, moves int) {
			if i == n {
				if alone > best.alone || alone == best.alone && moves < best.moves {
					best = score{alone, moves}
				}
				return
			}
			v := &f.Tenants[i]
			rec(i+1, alone, moves) // it finds no cell of its own
			for _, c := range append(slices.Clone(list), v.Cell) {
				view := CellView{}
				for _, x := range f.Cells {
					if x.Cell == c {
						view = x
					}
				}
				if taken[c] || v.Jurisdiction != "" && view.Jurisdiction != v.Jurisdiction {
					continue
				}
				taken[c] = true
				m := 1
				if c == v.Cell {
					m = 0
				}
				rec(i+1, alone+1, moves+m)
				taken[c] = false
			}
		}
		rec(0, 0, 0)
		crowded := map[CellID]int{}
		for _, v := range f.Tenants {
			crowded[v.Cell]++
		}
		together := false
		for _, k := range crowded {
			together = together || k > 1
		}
		if !together { // apart already: nobody moves, not even out of a wrong jurisdiction
			for _, g := range got {
				if g.Cell != "" {
					rt.Fatalf("needless %+v", got)
				}
			}
			return
		}
		have := score{}
		for _, g := range got {
			if g.Cell != "" {
				have.moves++
			}
			if g.Why == "" {
				have.alone++
			}
		}
		if have != best {
			rt.Errorf("%+v, possible is %+v: %+v", have, best, got)
		}
	})
}

func TestShuffleShards(t *testing.T) {
	var list []CellID
	for i := range 10 {
		list = append(list, CellID(fmt.Sprintf("c%d", i)))
	}
	f := &FleetView{Seed: 7}
	for i := range 600 {
		f.Tenants = append(f.Tenants, TenantView{Tenant: TenantID(fmt.Sprintf("t%03d", i)), Group: fmt.Sprintf("g%d", i/6), Cell: list[i%10]})
	}
	place := func(list []CellID) map[TenantID]CellID {
		got, err := ShuffleShardPolicy(list, 3).Targets(t.Context(), f.clone())
		if err != nil {
			t.Fatal(err)
		}
		at := map[TenantID]CellID{}
		for i, g := range got {
			at[f.Tenants[i].Tenant] = f.Tenants[i].Cell
			if g.Cell != "" {
				at[f.Tenants[i].Tenant] = g.Cell
			}
		}
		return at
	}
	cellsOf := func(at map[TenantID]CellID) map[string]map[CellID]int {
		out := map[string]map[CellID]int{}
		for _, v := range f.Tenants {
			if out[v.Group] == nil {
				out[v.Group] = map[CellID]int{}
			}
			out[v.Group][at[v.Tenant]]++
		}
		return out
	}
	at := place(list)
	shards := map[string]int{}
	for g, in := range cellsOf(at) {
		if len(in) > 3 {
			t.Errorf("group %s is in %d cells", g, len(in))
		}
		shards[fmt.Sprint(in)]++
	}
	if len(shards) < 50 {
		t.Errorf("100 groups share %d shards", len(shards))
	}
	// Where they are now is where they stay.
	for i := range f.Tenants {
		f.Tenants[i].Cell = at[f.Tenants[i].Tenant]
	}
	if again := place(list); !reflect.DeepEqual(at, again) {
		t.Error("a second plan moves tenants")
	}
	// A cell more concerns about 3 of 11 groups.
	moved := 0
	for tenant, c := range place(append(list, "c99")) {
		if c != at[tenant] {
			moved++
		}
	}
	if moved == 0 || moved > 150 {
		t.Errorf("an added cell moves %d of 600 tenants", moved)
	}
}

func TestHotTenants(t *testing.T) {
	one := int64(1)
	views := []TenantView{
		{Tenant: "calm1", Cell: "a", Load: 1}, {Tenant: "calm2", Cell: "a", Load: 2}, {Tenant: "calm3", Cell: "h1"},
		{Tenant: "hot1", Cell: "a", Load: 90}, {Tenant: "hot2", Cell: "a", Load: 80}, {Tenant: "hot3", Cell: "b", Load: 70, Jurisdiction: "eu"},
	}
	opts := &PlanOptions{Cells: []CellView{{Cell: "h1", Limits: Limits{Tenants: &one}}, {Cell: "h2"}}}
	plan := func(o HotOptions) string {
		p, err := PlanFromPolicy(t.Context(), views, IsolateHotPolicy(o), opts)
		if err != nil {
			t.Fatal(err)
		}
		s := planText(p)
		for _, x := range p.Stays {
			s += fmt.Sprintf(" %s stays: %s", x.Tenant, x.Why)
		}
		return s
	}
	for _, c := range []struct {
		o    HotOptions
		want string
	}{
		{HotOptions{By: MeasureLoad, Above: 50, Dedicated: []CellID{"h1", "h2"}, Others: []CellID{"b"}},
			"calm3:h1->b hot1:a->h1 hot2:a->h2 hot3 stays: the dedicated cells have enough hot tenants"},
		{HotOptions{By: MeasureLoad, Above: 50, Dedicated: []CellID{"h1", "h2"}, PerCell: 2, Others: []CellID{"b"}},
			"calm3:h1->b hot1:a->h1 hot2:a->h2 hot3 stays: no cell is in its jurisdiction"},
		{HotOptions{By: MeasureLoad, Above: 85, Others: []CellID{"a", "b", "h2"}}, "calm1:a->h2 calm2:a->h2 hot2:a->h2"},
	} {
		if got := plan(c.o); got != c.want {
			t.Errorf("%+v:\n%s\nwant\n%s", c.o, got, c.want)
		}
	}
	for _, o := range []HotOptions{
		{By: MeasureTenants, Above: 1, Dedicated: []CellID{"a"}}, {By: MeasureLoad, Dedicated: []CellID{"a"}}, {By: MeasureLoad, Above: 1},
		{By: MeasureLoad, Above: math.NaN(), Dedicated: []CellID{"a"}}, {By: MeasureLoad, Above: 1, Dedicated: []CellID{"a"}, Others: []CellID{"a"}},
	} {
		if _, err := IsolateHotPolicy(o).Targets(t.Context(), &FleetView{}); !errors.Is(err, ErrInvalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// A move waits for the room that an earlier one makes; a ring of full cells stays.
func TestPlanMakesRoomFirst(t *testing.T) {
	one := int64(1)
	to := func(m map[TenantID]CellID) Policy {
		return PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
			out := make([]Target, len(f.Tenants))
			for i := range f.Tenants {
				out[i].Cell = m[f.Tenants[i].Tenant]
			}
			return out, nil
		})
	}
	views := []TenantView{{Tenant: "t1", Cell: "a"}, {Tenant: "t2", Cell: "b"}, {Tenant: "t3", Cell: "c"}}
	opts := &PlanOptions{Cells: []CellView{{Cell: "a", Limits: Limits{Tenants: &one}}, {Cell: "b", Limits: Limits{Tenants: &one}}, {Cell: "c", Limits: Limits{Tenants: &one}}}}
	p, err := PlanFromPolicy(t.Context(), views, to(map[TenantID]CellID{"t1": "b", "t2": "c", "t3": "d"}), opts)
	if got := planText(p); err != nil || got != "t3:c->d t2:b->c t1:a->b" || len(p.Stays) > 0 {
		t.Errorf("%s %+v %v", got, p.Stays, err)
	}
	p, err = PlanFromPolicy(t.Context(), views, to(map[TenantID]CellID{"t1": "b", "t2": "c", "t3": "a"}), opts)
	if err != nil || len(p.Moves) != 0 || len(p.Stays) != 3 || p.Stays[0].Why != "cell b has room for no more tenants" {
		t.Errorf("a ring: %+v %v", p, err)
	}
}

func TestPlanOfMovingTenants(t *testing.T) {
	rows := []TenantRoute{
		{TenantID: "t1", State: StateActive, CellID: "a", Epoch: 1, MoveID: "m", SourceCell: "a", TargetCell: "b", Base: 1},
		{TenantID: "t2", State: StateActive, CellID: "a", Epoch: 1},
	}
	p, err := PlanFromPolicy(t.Context(), rows, DrainPolicy([]CellID{"a"}, []CellID{"b"}), nil)
	if err != nil || planText(p) != "t2:a->b" || len(p.Stays) != 1 || p.Stays[0].Why != "it is being moved" {
		t.Errorf("%+v %v", p, err)
	}
	for name, policy := range map[string]Policy{
		"itself": DrainPolicy([]CellID{"a"}, []CellID{"a"}), "nowhere": DrainPolicy([]CellID{"a"}, nil), "nothing": DrainPolicy(nil, []CellID{"b"}),
		"no shards": ShuffleShardPolicy([]CellID{"a"}, 0), "more shards than cells": ShuffleShardPolicy([]CellID{"a"}, 2),
		"measure": EvenSpreadBy([]CellID{"a"}, "weight", 0), "tolerance": EvenSpreadBy([]CellID{"a"}, MeasureRows, -1),
	} {
		if _, err := PlanFromPolicy(t.Context(), rows, policy, nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What a plan for a million tenants costs: make bench-plan.
func BenchmarkPlan(b *testing.B) {
	const tenants, n = 1_000_000, 100
	var list []CellID
	var views []CellView
	rng := rand.New(rand.NewPCG(1, 2))
	juris := []string{"", "", "eu", "us"}
	limit := int64(20_000)
	for i := range n {
		list = append(list, CellID(fmt.Sprintf("c%03d", i)))
		views = append(views, CellView{Cell: list[i], Jurisdiction: juris[i%4], Limits: Limits{Tenants: &limit}})
	}
	fleet := make([]TenantView, tenants)
	for i := range fleet {
		c := int(math.Pow(rng.Float64(), 1.5) * n)
		fleet[i] = TenantView{Tenant: TenantID(fmt.Sprintf("t%07d", i)), Cell: list[c], Group: fmt.Sprintf("g%d", rng.IntN(tenants/4)),
			Rows: int64(math.Exp(rng.Float64() * 12)), Load: rng.ExpFloat64()}
		if j := views[c].Jurisdiction; j != "" && rng.IntN(2) == 0 {
			fleet[i].Jurisdiction = j
		}
	}
	for _, p := range []struct {
		name   string
		policy Policy
	}{
		{"round-robin", RoundRobinPolicy(list)}, {"even", EvenSpreadPolicy(list)}, {"even-rows", EvenSpreadBy(list, MeasureRows, 0)},
		{"groups", BlastRadiusPolicy(list)}, {"shuffle", ShuffleShardPolicy(list, 4)}, {"drain", DrainPolicy(list[:10], nil)},
		{"hot", IsolateHotPolicy(HotOptions{By: MeasureLoad, Above: 8, Dedicated: list[:10], PerCell: 50, Others: list[10:]})},
	} {
		b.Run(p.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				plan, err := PlanFromPolicy(b.Context(), fleet, p.policy, &PlanOptions{Cells: views})
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(len(plan.Moves)), "moves")
				b.ReportMetric(float64(len(plan.Stays)), "stays")
			}
		})
	}
}
