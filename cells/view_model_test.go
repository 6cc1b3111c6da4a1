// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// kept is what a view keeps of a row.
func kept(v *view, r TenantRoute) TenantRoute {
	if v.plain(&r) {
		return TenantRoute{TenantID: r.TenantID, State: r.State, CellID: r.CellID, Epoch: r.Epoch, Floor: r.Floor, Revision: r.Revision}
	}
	return r
}

func drawRoute(rt *rapid.T, tenant TenantID, rev Revision, least Epoch) *TenantRoute {
	r := &TenantRoute{
		TenantID: tenant, State: RouteState(rapid.IntRange(1, int(StateDeleted)).Draw(rt, "state")), CellID: rapid.SampledFrom([]CellID{"cell-a", "cell-b", "cell-c"}).Draw(rt, "cell"),
		Epoch: least + Epoch(rapid.IntRange(0, 2).Draw(rt, "up")), Revision: rev, Actor: "alice", Stamp: fmt.Sprint(rev), OperationID: "op",
	}
	r.Floor = r.Epoch - Epoch(rapid.IntRange(0, int(min(r.Epoch, 2))).Draw(rt, "below"))
	if r.Moving() || rapid.Bool().Draw(rt, "moves") && r.State == StateActive {
		r.MoveID, r.SourceCell, r.TargetCell, r.Base = "m", r.CellID, "cell-z", r.Epoch
	}
	if rapid.IntRange(0, 4).Draw(rt, "residue") == 0 {
		r.Residue = []Residue{{Cell: "cell-d", Epoch: r.Epoch, Move: "old"}}
	}
	if rapid.IntRange(0, 4).Draw(rt, "marked") == 0 {
		r.EventMark, r.DataMark = 7, "0/7"
	}
	return r
}

// Whatever rows come in whatever order, a view holds what a map of the newest good
// rows holds, as far as it keeps them.
func TestViewAsAMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var v view
		v.init()
		v.bare = rapid.Bool().Draw(rt, "bare")
		model := map[TenantID]TenantRoute{}
		rev := Revision(0)
		tenants := rapid.Map(rapid.IntRange(0, 5), func(n int) TenantID { return TenantID(fmt.Sprint("t", n)) })
		rt.Repeat(map[string]func(*rapid.T){
			"put": func(rt *rapid.T) {
				tenant := tenants.Draw(rt, "tenant")
				rev++
				was, there := model[tenant]
				at := rev - min(rev-1, Revision(rapid.IntRange(0, 3).Draw(rt, "late")))
				next := drawRoute(rt, tenant, at, max(was.Epoch, 1)-Epoch(rapid.IntRange(0, 1).Draw(rt, "falls")))
				same := rapid.Bool().Draw(rt, "same")
				newer := !there || at > was.Revision || same && at == was.Revision
				bad := there && (next.Epoch < was.Epoch || next.Epoch == was.Epoch && next.CellID != was.CellID)
				told := 0
				ok, err := v.put(next, same, func(p placement, old, now *TenantRoute) {
					told++
					if there != (p.state != 0) || there && !reflect.DeepEqual(kept(&v, was), orRoute(p, old, tenant)) || now != next {
						rt.Fatalf("told of %+v and %+v, was %+v", p, old, was)
					}
				})
				if ok != (newer && !bad) || (err != nil) != (newer && bad) || told > 0 != ok {
					rt.Fatalf("%t, %v, told %d times; newer %t, bad %t", ok, err, told, newer, bad)
				}
				if ok {
					model[tenant] = *next
				}
			},
			"": func(rt *rapid.T) {
				n := 0
				v.each(func(r *TenantRoute) bool {
					n++
					if want := kept(&v, model[r.TenantID]); !reflect.DeepEqual(*r, want) {
						rt.Fatalf("each gives %+v, want %+v", *r, want)
					}
					return true
				})
				if n != len(model) || v.size() != n {
					rt.Fatalf("%d rows, the view says %d, the map has %d", n, v.size(), len(model))
				}
				wide := 0
				v.wide.Range(func(any, any) bool { wide++; return true })
				for tenant, want := range model {
					if got := v.get(tenant); got == nil || !reflect.DeepEqual(*got, kept(&v, want)) {
						rt.Fatalf("%s is %+v, want %+v", tenant, got, kept(&v, want))
					}
					if !v.plain(&want) {
						wide--
					}
				}
				if wide != 0 {
					rt.Fatalf("%d rows more are kept whole than need be", wide)
				}
			},
		})
	})
}

func orRoute(p placement, old *TenantRoute, t TenantID) TenantRoute {
	if old != nil {
		return *old
	}
	return p.route(t)
}

// Readers beside a writer that turns rows from plain to wide and back see each
// tenant's revisions go forward, and every row whole.
func TestViewReadersBesideWriters(t *testing.T) {
	var v view
	v.init()
	const tenants, changes = 20, 6_000
	name := func(i int) TenantID { return TenantID(fmt.Sprint("t", i)) }
	row := func(i int, rev Revision) *TenantRoute {
		r := &TenantRoute{TenantID: name(i), State: StateActive, CellID: "cell-a", Epoch: Epoch(rev), Floor: Epoch(rev), Revision: rev}
		if rev%3 > 0 {
			r.EventMark, r.DataMark = EventSeq(rev), fmt.Sprint(rev)
		}
		return r
	}
	for i := range tenants {
		if _, err := v.put(row(i, 1), false, nil); err != nil {
			t.Fatal(err)
		}
	}
	var done atomic.Bool
	var readers, writers sync.WaitGroup
	for range 3 {
		readers.Go(func() {
			var seen [tenants]Revision
			for n := 0; !done.Load() || n < tenants; n++ {
				i := n % tenants
				got := v.get(name(i))
				if got == nil || got.Revision < seen[i] || !reflect.DeepEqual(*got, *row(i, got.Revision)) {
					t.Errorf("%s after revision %d: %+v", name(i), seen[i], got)
					return
				}
				seen[i] = got.Revision
				if p := v.find(name(i)); p.revision < seen[i] {
					t.Errorf("%s is at %d and was at %d", name(i), p.revision, seen[i])
					return
				}
			}
		})
	}
	for w := range 2 {
		writers.Go(func() {
			for n := range changes {
				i := (2*n + w) % tenants
				if ok, err := v.put(row(i, v.find(name(i)).revision+1), false, nil); !ok || err != nil {
					t.Error(ok, err)
					return
				}
			}
		})
	}
	writers.Wait()
	done.Store(true)
	readers.Wait()
}
