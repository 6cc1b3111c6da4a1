// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"slices"
	"strings"
)

// obstacle says why a tenant may not be put in a cell; 0 is nothing. Higher ones
// are worth more to be told.
type obstacle uint8

const (
	outOfJurisdiction obstacle = iota + 1
	cellClosed
	groupThere
	loadFull
	bytesFull
	rowsFull
	tenantsFull
)

// of says it of one cell.
func (o obstacle) of(c *CellView, t *TenantView) string {
	switch o {
	case outOfJurisdiction:
		return fmt.Sprintf("cell %s is not in jurisdiction %s", c.Cell, t.Jurisdiction)
	case cellClosed:
		return fmt.Sprintf("cell %s is closed", c.Cell)
	case groupThere:
		return fmt.Sprintf("cell %s has enough tenants of group %s", c.Cell, t.Group)
	case tenantsFull:
		return fmt.Sprintf("cell %s has room for no more tenants", c.Cell)
	case rowsFull:
		return fmt.Sprintf("cell %s has no room for its rows", c.Cell)
	case bytesFull:
		return fmt.Sprintf("cell %s has no room for its bytes", c.Cell)
	case loadFull:
		return fmt.Sprintf("cell %s has no room for its load", c.Cell)
	}
	return ""
}

// nowhere says it of all the cells that were tried.
func (o obstacle) nowhere() string {
	switch o {
	case outOfJurisdiction:
		return "no cell is in its jurisdiction"
	case cellClosed:
		return "every cell that it may be in is closed"
	case groupThere:
		return "every cell has enough tenants of its group"
	case tenantsFull:
		return "no cell has room for another tenant"
	case rowsFull:
		return "no cell has room for its rows"
	case bytesFull:
		return "no cell has room for its bytes"
	case loadFull:
		return "no cell has room for its load"
	}
	return "no cell takes it"
}

// Occupancy is what a cell holds, as far as it was measured.
type Occupancy struct {
	Tenants, Rows, Bytes int64
	Load                 float64
}

// Refuse says why the tenant may not be added to the cell, which holds what is given
// without it; nil if it may. Plans, single moves and placements ask nothing else. The
// error wraps [ErrJurisdiction] or [ErrNoRoom].
func (c *CellView) Refuse(t *TenantView, in Occupancy) error {
	switch o := c.obstacle(t, &in); o {
	case 0:
		return nil
	case outOfJurisdiction:
		return fmt.Errorf("%w: %s", ErrJurisdiction, o.of(c, t))
	default:
		return fmt.Errorf("%w: %s", ErrNoRoom, o.of(c, t))
	}
}

// obstacle is [CellView.Refuse] without words. A cell that is at a limit takes
// nobody, a tenant that nobody has measured neither.
func (c *CellView) obstacle(t *TenantView, in *Occupancy) obstacle {
	l := &c.Limits
	switch {
	case t.Jurisdiction != "" && t.Jurisdiction != c.Jurisdiction:
		return outOfJurisdiction
	case c.Closed:
		return cellClosed
	case l.Tenants != nil && in.Tenants+1 > *l.Tenants:
		return tenantsFull
	case l.Rows != nil && in.Rows+max(t.Rows, 1) > *l.Rows:
		return rowsFull
	case l.Bytes != nil && in.Bytes+max(t.Bytes, 1) > *l.Bytes:
		return bytesFull
	case l.Load != nil && (in.Load >= *l.Load || in.Load+t.Load > *l.Load):
		return loadFull
	}
	return 0
}

// room counts what is in each cell while a plan is made.
type room struct {
	fleet *FleetView
	at    map[CellID]int
	cells []cellRoom
}

type cellRoom struct {
	view   CellView
	holds  Occupancy
	groups map[string]int // only with FleetView.GroupMax
}

// newRoom counts every tenant where it is.
func newRoom(f *FleetView) *room {
	r := &room{fleet: f, at: make(map[CellID]int, len(f.Cells))}
	for _, c := range f.Cells {
		r.at[c.Cell] = len(r.cells)
		r.cells = append(r.cells, cellRoom{view: c})
	}
	for i := range f.Tenants {
		t := &f.Tenants[i]
		r.add(t, r.index(t.Cell))
	}
	return r
}

// index returns the number of a cell; -1 for "". A cell that is not described
// gets a number of its own.
func (r *room) index(c CellID) int {
	if c == "" {
		return -1
	}
	i, ok := r.at[c]
	if !ok {
		i = len(r.cells)
		r.at[c] = i
		r.cells = append(r.cells, cellRoom{view: CellView{Cell: c}})
	}
	return i
}

func (r *room) indexes(list []CellID) []int {
	out := make([]int, len(list))
	for i, c := range list {
		out[i] = r.index(c)
	}
	return out
}

func (r *room) count(t *TenantView, c, n int) {
	if c < 0 {
		return
	}
	x := &r.cells[c]
	x.holds.Tenants += int64(n)
	x.holds.Rows += int64(n) * t.Rows
	x.holds.Bytes += int64(n) * t.Bytes
	x.holds.Load += float64(n) * t.Load
	if r.fleet.GroupMax > 0 && t.Group != "" {
		if x.groups == nil {
			x.groups = map[string]int{}
		}
		if x.groups[t.Group] += n; x.groups[t.Group] == 0 {
			delete(x.groups, t.Group)
		}
	}
}

func (r *room) add(t *TenantView, c int)    { r.count(t, c, 1) }
func (r *room) remove(t *TenantView, c int) { r.count(t, c, -1) }

// may says whether the tenant may ever be in the cell: the rules that no move
// changes.
func (r *room) may(t *TenantView, c int) obstacle {
	x := &r.cells[c].view
	return (&CellView{Jurisdiction: x.Jurisdiction, Closed: x.Closed}).obstacle(t, &Occupancy{})
}

// fits says what stands in the way of adding the tenant. home: it is there
// already, so that only its jurisdiction counts.
func (r *room) fits(t *TenantView, c int, home bool) obstacle {
	x := &r.cells[c]
	o := x.view.obstacle(t, &x.holds)
	switch {
	case home && o != outOfJurisdiction:
		return 0
	case o == 0 && !home && r.fleet.GroupMax > 0 && t.Group != "" && x.groups[t.Group] >= r.fleet.GroupMax:
		return groupThere
	}
	return o
}

// weight is what is in the cell by a measure.
func (x *cellRoom) weight(m Measure) float64 {
	switch m {
	case MeasureRows:
		return float64(x.holds.Rows)
	case MeasureBytes:
		return float64(x.holds.Bytes)
	case MeasureLoad:
		return x.holds.Load
	}
	return float64(x.holds.Tenants)
}

// place takes the tenant out of its cell and puts it in the emptiest of the cells
// that takes it; if there is none it stays.
func (r *room) place(t *TenantView, among []int, by Measure) Target {
	home, best, why := r.index(t.Cell), -1, obstacle(0)
	for _, c := range among {
		if c == home {
			continue
		}
		if o := r.fits(t, c, false); o != 0 {
			why = max(why, o)
			continue
		}
		if best < 0 || r.emptier(c, best, by) {
			best = c
		}
	}
	if best < 0 {
		return Target{Why: why.nowhere()}
	}
	r.remove(t, home)
	r.add(t, best)
	return Target{Cell: r.cells[best].view.Cell}
}

// emptier compares two cells by a measure, then by tenants.
func (r *room) emptier(a, b int, by Measure) bool {
	x, y := &r.cells[a], &r.cells[b]
	if wx, wy := x.weight(by), y.weight(by); wx != wy {
		return wx < wy
	}
	return x.holds.Tenants < y.holds.Tenants
}

// sequence makes the plan of the targets: every move finds room when it is made,
// after those before it. A move that finds none waits until others have left; what
// waits in the end stays.
func sequence(f *FleetView, targets []Target, opts *PlanOptions) CampaignPlan {
	r := newRoom(f)
	var plan CampaignPlan
	waiting := map[int][]int{} // target -> tenants that wait for room there
	stay := func(i int, to CellID, why string) {
		plan.Stays = append(plan.Stays, Stay{Tenant: f.Tenants[i].Tenant, Cell: f.Tenants[i].Cell, To: to, Why: why})
	}
	var free []int // cells that somebody has left
	move := func(i, to int) {
		t := &f.Tenants[i]
		from := r.index(t.Cell)
		r.remove(t, from)
		r.add(t, to)
		plan.Moves = append(plan.Moves, MovePlan{TenantID: t.Tenant, FromCell: t.Cell, ToCell: r.cells[to].view.Cell, Actor: opts.Actor, Force: opts.Force})
		plan.Rows += t.Rows
		plan.Bytes += t.Bytes
		if from >= 0 && len(waiting[from]) > 0 {
			free = append(free, from)
		}
	}
	// wake lets those go in that wait for a cell. limit bounds how many are tried, so
	// that one that does not fit holds up nobody for long.
	wake := func(c, limit int) {
		list := waiting[c]
		for k := 0; k < len(list) && limit > 0; limit-- {
			if i := list[k]; r.fits(&f.Tenants[i], c, false) == 0 {
				copy(list[1:k+1], list[:k]) // those before it keep their order
				list = list[1:]
				move(i, c)
				continue
			}
			if l := r.cells[c].view.Limits.Tenants; l != nil && r.cells[c].holds.Tenants >= *l {
				break
			}
			k++
		}
		waiting[c] = list
	}
	const tries, lastTries = 64, 4096
	for i := range f.Tenants {
		t, to := &f.Tenants[i], targets[i].Cell
		switch {
		case to == "" && targets[i].Why != "":
			stay(i, "", targets[i].Why)
			continue
		case to == "" || to == t.Cell:
			continue
		case t.Pinned != "":
			stay(i, to, t.Pinned)
			continue
		}
		c := r.index(to)
		switch o := r.fits(t, c, false); {
		case o == 0:
			move(i, c)
		case o == outOfJurisdiction || o == cellClosed:
			stay(i, to, o.of(&r.cells[c].view, t))
		default:
			waiting[c] = append(waiting[c], i)
		}
		for len(free) > 0 {
			c := free[0]
			free = free[1:]
			wake(c, tries)
		}
	}
	for before := -1; before != len(plan.Moves); {
		before = len(plan.Moves)
		for c := range r.cells {
			if len(waiting[c]) > 0 {
				wake(c, lastTries)
			}
			for len(free) > 0 {
				c := free[0]
				free = free[1:]
				wake(c, tries)
			}
		}
	}
	for c := range r.cells {
		for _, i := range waiting[c] {
			t := &f.Tenants[i]
			stay(i, r.cells[c].view.Cell, r.fits(t, c, false).of(&r.cells[c].view, t))
		}
	}
	slices.SortFunc(plan.Stays, func(a, b Stay) int { return strings.Compare(string(a.Tenant), string(b.Tenant)) })
	if opts.MaxMoves > 0 && len(plan.Moves) > opts.MaxMoves {
		plan.cut(f, opts.MaxMoves)
	}
	return plan
}

// cut keeps the first n moves.
func (p *CampaignPlan) cut(f *FleetView, n int) {
	kept := make(map[TenantID]bool, n)
	p.Moves = p.Moves[:n:n]
	for i := range p.Moves {
		kept[p.Moves[i].TenantID] = true
	}
	p.Rows, p.Bytes = 0, 0
	for i := range f.Tenants {
		if t := &f.Tenants[i]; kept[t.Tenant] {
			p.Rows += t.Rows
			p.Bytes += t.Bytes
		}
	}
}
