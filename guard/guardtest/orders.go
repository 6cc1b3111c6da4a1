// SPDX-License-Identifier: Apache-2.0

package guardtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

func testOrders(e *env) {
	type step struct {
		verb  string // "open", "close"
		epoch cells.Epoch
		floor cells.Epoch
		move  cells.MoveID
		want  error
		after string // "open floor-epoch" or "closed epoch move"
	}
	cases := []struct {
		name  string
		steps []step
	}{
		{"a claim of a tenant served without a route keeps its admissions", []step{
			{verb: "open", epoch: 1, floor: 0, after: "open 0-1"},
		}},
		{"a claim of a new tenant", []step{
			{verb: "open", epoch: 1, floor: 1, after: "open 1-1"},
			{verb: "open", epoch: 1, floor: 1, after: "open 1-1"},
		}},
		{"a move away", []step{
			{verb: "open", epoch: 1, floor: 1, after: "open 1-1"},
			{verb: "close", epoch: 2, move: "m", after: "closed 2 m"},
			{verb: "close", epoch: 2, move: "m", after: "closed 2 m"},
			{verb: "close", epoch: 2, move: "other", want: cells.ErrStaleOrder, after: "closed 2 m"},
			{verb: "open", epoch: 2, floor: 2, want: cells.ErrStaleOrder, after: "closed 2 m"},
			{verb: "open", epoch: 1, floor: 1, want: cells.ErrStaleOrder, after: "closed 2 m"},
			{verb: "close", epoch: 1, move: "m", want: cells.ErrStaleOrder, after: "closed 2 m"},
		}},
		{"a move given up before its fence step keeps admissions", []step{
			{verb: "open", epoch: 5, floor: 5, after: "open 5-5"},
			{verb: "open", epoch: 7, floor: 5, move: "m", after: "open 5-7"},
			{verb: "open", epoch: 7, floor: 7, after: "open 5-7"},
			{verb: "open", epoch: 9, floor: 7, after: "open 7-9"},
		}},
		{"a move given up after its fence step does not", []step{
			{verb: "open", epoch: 5, floor: 5, after: "open 5-5"},
			{verb: "close", epoch: 6, move: "m", after: "closed 6 m"},
			{verb: "open", epoch: 7, floor: 5, move: "m", after: "open 7-7"},
			{verb: "close", epoch: 6, move: "m", want: cells.ErrStaleOrder, after: "open 7-7"},
			{verb: "close", epoch: 7, move: "m", want: cells.ErrStaleOrder, after: "open 7-7"},
		}},
		{"a floor that the fence has not reached", []step{
			{verb: "open", epoch: 3, floor: 3, after: "open 3-3"},
			{verb: "open", epoch: 9, floor: 6, after: "open 9-9"},
		}},
		{"a fence closed first", []step{
			{verb: "close", epoch: 4, move: "m", after: "closed 4 m"},
			{verb: "close", epoch: 6, move: "n", after: "closed 6 n"},
			{verb: "open", epoch: 5, floor: 5, want: cells.ErrStaleOrder, after: "closed 6 n"},
			{verb: "open", epoch: 7, floor: 0, after: "open 7-7"},
		}},
		{"orders at epoch 0", []step{
			{verb: "close", epoch: 0, want: cells.ErrStaleOrder},
			{verb: "open", epoch: 0},
		}},
		{"a floor above the epoch", []step{{verb: "open", epoch: 2, floor: 3, want: cells.ErrInvalid}}},
		{"a malformed move", []step{{verb: "close", epoch: 2, move: "a b", want: cells.ErrInvalid}}},
	}
	for _, c := range cases {
		tenant := newTenant()
		for i, s := range c.steps {
			p := []Process{e.a, e.b}[i%2]
			o := cells.FenceOrder{Tenant: tenant, Epoch: s.epoch, Floor: s.floor, Move: s.move}
			do := p.OpenFence
			if s.verb == "close" {
				do = p.CloseFence
			}
			err := do(e.ctx, o)
			if !errors.Is(err, s.want) {
				e.Errorf("%s: step %d, %s at %d: %v, want %v", c.name, i, s.verb, s.epoch, err, s.want)
			}
			f, err := p.Fence(e.ctx, tenant)
			got := fmt.Sprintf("open %d-%d", f.Floor, f.Epoch)
			switch {
			case errors.Is(err, cells.ErrNotFound):
				got = ""
			case err != nil:
				e.Fatalf("fence: %v", err)
			case !f.Open:
				got = fmt.Sprintf("closed %d %s", f.Epoch, f.Move)
			}
			if got != s.after {
				e.Errorf("%s: after step %d the fence is %q, want %q", c.name, i, got, s.after)
			}
		}
	}
	e.wantErr(e.a.OpenFence(e.ctx, cells.FenceOrder{Tenant: "no good", Epoch: 1}), cells.ErrInvalid, "an order for a malformed tenant")
	e.wantErr(e.a.OpenFence(e.ctx, cells.FenceOrder{Tenant: "t", Epoch: 1 << 63}), cells.ErrInvalid, "an epoch that is too large")
}

// model is a fence as the design describes it, written down once more.
type model struct {
	epoch, floor cells.Epoch
	open         bool
	move         cells.MoveID
}

func (m *model) openAt(epoch, floor cells.Epoch) bool {
	if epoch == m.epoch {
		return m.open
	}
	if epoch < m.epoch {
		return false
	}
	switch {
	case !m.open || m.epoch < floor:
		m.floor = epoch
	case floor > m.floor:
		m.floor = floor
	}
	m.epoch, m.open = epoch, true
	return true
}

func (m *model) closeAt(epoch cells.Epoch, move cells.MoveID) bool {
	if epoch == m.epoch {
		return !m.open && m.move == move
	}
	if epoch < m.epoch {
		return false
	}
	m.epoch, m.open, m.move = epoch, false, move
	return true
}

func (m *model) admits(epoch cells.Epoch) bool { return m.open && m.floor <= epoch && epoch <= m.epoch }

// testOrdersModel gives random orders, many of them late or repeated, and
// compares fences and admissions with the model.
func testOrdersModel(e *env) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		tenant, m := newTenant(), &model{open: true}
		var log []string
		for range 15 {
			epoch := cells.Epoch(max(0, int(m.epoch)+rnd.IntN(5)-1))
			floor := cells.Epoch(rnd.IntN(int(epoch) + 1))
			move := cells.MoveID([]string{"m", "n"}[rnd.IntN(2)])
			var err error
			var want bool
			if rnd.IntN(2) == 0 {
				log = append(log, fmt.Sprintf("open %d floor %d", epoch, floor))
				want = m.openAt(epoch, floor)
				err = e.a.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: epoch, Floor: floor})
			} else {
				log = append(log, fmt.Sprintf("close %d %s", epoch, move))
				want = m.closeAt(epoch, move)
				err = e.b.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: epoch, Move: move})
			}
			if (err == nil) != want || err != nil && !errors.Is(err, cells.ErrStaleOrder) {
				e.Fatalf("%v: %v; the model accepts: %t", log, err, want)
			}
			ask := cells.Epoch(rnd.IntN(int(m.epoch) + 2))
			err = e.a.InTx(e.as(tenant, ask), e.h.Isolations[0], func(context.Context, Tx) error { return nil })
			if (err == nil) != m.admits(ask) || err != nil && !errors.Is(err, cells.ErrFenced) {
				e.Fatalf("%v: admission at %d: %v; the model admits: %t", log, ask, err, m.admits(ask))
			}
		}
	}
}

// testOrdersConcurrent gives the orders of several moves at the same time, each
// of them more than once; the fence only rises, and ends at the highest.
func testOrdersConcurrent(e *env) {
	for range 5 {
		tenant := newTenant()
		e.open(tenant, 1)
		var mu sync.Mutex
		last := guard.Fence{}
		look := func() error {
			mu.Lock()
			defer mu.Unlock()
			f, err := e.a.Fence(e.ctx, tenant)
			if err != nil {
				return err
			}
			if f.Epoch < last.Epoch || f.Epoch == last.Epoch && f.Open != last.Open {
				e.Errorf("the fence went from %+v to %+v", last, f)
			}
			last = f
			return nil
		}
		err := group(12, func(i int) error {
			n := cells.Epoch(2 + 2*(i/2))
			p := []Process{e.a, e.b}[i%2]
			for _, err := range []error{
				p.CloseFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: n, Move: "m"}),
				look(),
				p.OpenFence(e.ctx, cells.FenceOrder{Tenant: tenant, Epoch: n + 1, Floor: n + 1}),
				look(),
			} {
				if err != nil && !errors.Is(err, cells.ErrStaleOrder) {
					return err
				}
			}
			return nil
		})
		e.must(err, "orders at the same time")
		if f := e.fence(tenant); f.Epoch != 13 || !f.Open {
			e.Errorf("after all orders the fence is %+v, want open at 13", f)
		}
	}
}

func testList(e *env) {
	var want []cells.TenantID
	for i := range 7 {
		tenant := cells.TenantID(fmt.Sprintf("list-%d", i))
		e.open(tenant, cells.Epoch(i+1))
		want = append(want, tenant)
	}
	var got []cells.TenantID
	for after := cells.TenantID(""); ; {
		page, err := e.a.Fences(e.ctx, after, 3)
		e.must(err, "list")
		for _, f := range page {
			if f.Epoch != cells.Epoch(len(got)+1) || !f.Open {
				e.Errorf("listed %+v", f)
			}
			got = append(got, f.Tenant)
		}
		if len(page) < 3 {
			break
		}
		after = page[len(page)-1].Tenant
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		e.Errorf("listed %v, want %v", got, want)
	}
	_, err := e.a.Fence(e.ctx, "nobody")
	e.wantErr(err, cells.ErrNotFound, "the fence of an unknown tenant")
	for _, t := range e.a.MovedTables() {
		if t.Name == "" || t.TenantColumn == "" {
			e.Errorf("moved table %+v", t)
		}
	}
	e.must(e.a.Install(e.ctx, []guard.Table{Table}), "install again")
	err = e.a.Install(e.ctx, []guard.Table{{Name: "missing", TenantColumn: "tenant"}})
	e.wantErr(err, cells.ErrInvalid, "install with a table that is missing")
	err = e.a.Install(e.ctx, []guard.Table{{Name: Table.Name, TenantColumn: "value"}})
	e.wantErr(err, cells.ErrInvalid, "install with a tenant column outside of the key")
}
