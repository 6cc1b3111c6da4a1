// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

func TestRefuse(t *testing.T) {
	n := func(v int64) *int64 { return &v }
	l := func(v float64) *float64 { return &v }
	for name, tc := range map[string]struct {
		cell   CellView
		tenant TenantView
		in     Occupancy
		want   error
	}{
		"nothing bounds":                 {CellView{}, TenantView{Rows: 1 << 60}, Occupancy{Tenants: 1 << 60}, nil},
		"closed":                         {CellView{Closed: true}, TenantView{}, Occupancy{}, ErrNoRoom},
		"same jurisdiction":              {CellView{Jurisdiction: "eu"}, TenantView{Jurisdiction: "eu"}, Occupancy{}, nil},
		"other jurisdiction":             {CellView{Jurisdiction: "us"}, TenantView{Jurisdiction: "eu"}, Occupancy{}, ErrJurisdiction},
		"no jurisdiction":                {CellView{}, TenantView{Jurisdiction: "eu"}, Occupancy{}, ErrJurisdiction},
		"anywhere":                       {CellView{Jurisdiction: "us"}, TenantView{}, Occupancy{}, nil},
		"jurisdiction before the limits": {CellView{Closed: true, Limits: Limits{Tenants: n(0)}}, TenantView{Jurisdiction: "eu"}, Occupancy{}, ErrJurisdiction},
		"the last tenant":                {CellView{Limits: Limits{Tenants: n(2)}}, TenantView{}, Occupancy{Tenants: 1}, nil},
		"one tenant too many":            {CellView{Limits: Limits{Tenants: n(2)}}, TenantView{}, Occupancy{Tenants: 2}, ErrNoRoom},
		"rows to the limit":              {CellView{Limits: Limits{Rows: n(10)}}, TenantView{Rows: 4}, Occupancy{Rows: 6}, nil},
		"rows beyond it":                 {CellView{Limits: Limits{Rows: n(10)}}, TenantView{Rows: 5}, Occupancy{Rows: 6}, ErrNoRoom},
		"unmeasured into a full cell":    {CellView{Limits: Limits{Rows: n(10)}}, TenantView{}, Occupancy{Rows: 10}, ErrNoRoom},
		"unmeasured with room for a row": {CellView{Limits: Limits{Rows: n(10)}}, TenantView{}, Occupancy{Rows: 9}, nil},
		"bytes to the limit":             {CellView{Limits: Limits{Bytes: n(10)}}, TenantView{Bytes: 4}, Occupancy{Bytes: 6}, nil},
		"bytes beyond it":                {CellView{Limits: Limits{Bytes: n(10)}}, TenantView{Bytes: 5}, Occupancy{Bytes: 6}, ErrNoRoom},
		"load to the limit":              {CellView{Limits: Limits{Load: l(10)}}, TenantView{Load: 4}, Occupancy{Load: 6}, nil},
		"load beyond it":                 {CellView{Limits: Limits{Load: l(10)}}, TenantView{Load: 4.5}, Occupancy{Load: 6}, ErrNoRoom},
		"idle into a busy cell":          {CellView{Limits: Limits{Load: l(10)}}, TenantView{}, Occupancy{Load: 10}, ErrNoRoom},
		"a limit of nothing":             {CellView{Limits: Limits{Load: l(0)}}, TenantView{}, Occupancy{}, ErrNoRoom},
	} {
		if err := tc.cell.Refuse(&tc.tenant, tc.in); !errors.Is(err, tc.want) || (err == nil) != (tc.want == nil) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
}

// A plan of one move is made exactly if the cell does not refuse the tenant.
func TestPlansRefuseTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		small := rapid.Int64Range(0, 6)
		maybe := func(name string) *int64 {
			if rapid.Bool().Draw(t, name+" bound") {
				v := small.Draw(t, name)
				return &v
			}
			return nil
		}
		j := rapid.SampledFrom([]string{"", "eu", "us"})
		cell := CellView{Cell: "b", Jurisdiction: j.Draw(t, "cell's"), Closed: rapid.IntRange(0, 5).Draw(t, "closed") == 0,
			Limits: Limits{Tenants: maybe("tenants"), Rows: maybe("rows"), Bytes: maybe("bytes")}}
		if v := maybe("load"); v != nil {
			f := float64(*v)
			cell.Limits.Load = &f
		}
		draw := func(id TenantID, at CellID) TenantView {
			return TenantView{Tenant: id, Cell: at, Jurisdiction: j.Draw(t, "its"), Rows: small.Draw(t, "its rows"), Bytes: small.Draw(t, "its bytes"),
				Load: float64(small.Draw(t, "its load"))}
		}
		mover := draw("mover", "a")
		all := []TenantView{mover}
		var in Occupancy
		for i := range rapid.IntRange(0, 3).Draw(t, "others") {
			o := draw(TenantID(rune('k'+i)), "b")
			all = append(all, o)
			in.Tenants, in.Rows, in.Bytes, in.Load = in.Tenants+1, in.Rows+o.Rows, in.Bytes+o.Bytes, in.Load+o.Load
		}
		plan, err := PlanFromPolicy(context.Background(), all, PolicyFunc(func(_ context.Context, f *FleetView) ([]Target, error) {
			out := make([]Target, len(f.Tenants))
			for i := range f.Tenants {
				if f.Tenants[i].Tenant == "mover" {
					out[i].Cell = "b"
				}
			}
			return out, nil
		}), &PlanOptions{Cells: []CellView{{Cell: "a"}, cell}})
		if err != nil {
			t.Fatal(err)
		}
		refused := cell.Refuse(&mover, in)
		if (len(plan.Moves) == 1) != (refused == nil) {
			t.Fatalf("the cell says %v, the plan is %+v", refused, plan)
		}
	})
}
