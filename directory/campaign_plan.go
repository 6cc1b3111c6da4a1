// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// planTime bounds the making of a plan: a million tenants are read for it.
const planTime = 5 * time.Minute

// fleetView is what plans are made of: every tenant, every cell.
type fleetView struct {
	tenants []cells.TenantView
	at      map[cells.TenantID]int
	cells   []cells.CellView
	open    []cells.CellID
	// unmeasured counts the tenants that nobody has measured.
	unmeasured int
}

// view reads the whole fleet.
func (s *Server) view(ctx context.Context) (*fleetView, error) {
	v := &fleetView{at: map[cells.TenantID]int{}}
	list, _, err := s.store.Cells(ctx)
	if err != nil {
		return nil, err
	}
	for i := range list {
		c := &list[i]
		v.cells = append(v.cells, c.View())
		if c.Open() {
			v.open = append(v.open, c.ID)
		}
	}
	opts := cells.ListOptions{Limit: 10000}
	for {
		page, err := s.table.List(ctx, opts)
		if err != nil {
			return nil, err
		}
		for i := range page.Routes {
			if r := &page.Routes[i]; r.Exists() {
				v.at[r.TenantID] = len(v.tenants)
				v.tenants = append(v.tenants, cells.ViewOf(r))
			}
		}
		if page.Next == "" {
			break
		}
		opts.After = page.Next
	}
	return v, s.measure(ctx, v)
}

// measure adds what is known of the tenants beside their routes.
func (s *Server) measure(ctx context.Context, v *fleetView) error {
	v.unmeasured = len(v.tenants)
	const page = 10000
	after := cells.TenantID("")
	for {
		list, err := s.store.Facts(ctx, after, page)
		if err != nil {
			return err
		}
		for _, f := range list {
			if i, ok := v.at[f.Tenant]; ok {
				t := &v.tenants[i]
				t.Group, t.Jurisdiction, t.Rows, t.Bytes = f.Group, f.Jurisdiction, f.Rows, f.Bytes
				if !f.MeasuredAt.IsZero() {
					v.unmeasured--
				}
			}
		}
		if len(list) < page {
			break
		}
		after = list[len(list)-1].Tenant
	}
	for t, load := range s.members.loads() {
		if i, ok := v.at[t]; ok {
			v.tenants[i].Load = load
		}
	}
	return nil
}

// loads sums up the requests a second that live processes report of tenants.
func (m *members) loads() map[cells.TenantID]float64 {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[cells.TenantID]float64{}
	for _, st := range m.live {
		if st.lapsed(now, m) {
			continue
		}
		for _, l := range st.hb.Busiest {
			if l.PerSecond > 0 { // not NaN either
				out[l.Tenant] += l.PerSecond
			}
		}
	}
	return out
}

// plan makes the plan that was asked for.
func (s *Server) plan(ctx context.Context, req *api.CampaignRequest) (api.Campaign, []api.PlannedItem, error) {
	v, err := s.view(ctx)
	if err != nil {
		return api.Campaign{}, nil, err
	}
	c := api.Campaign{Name: req.Name, State: api.CampaignPlanned, Policy: req.Policy, Settings: req.Settings, Actor: req.Actor, OperationID: req.OperationID}
	if req.Policy == nil {
		items, err := v.check(ctx, req.Moves)
		return c, items, err
	}
	policy, err := req.Policy.Policy(v.open)
	if err != nil {
		return c, nil, err
	}
	for _, id := range req.Policy.Named() {
		if !slices.ContainsFunc(v.cells, func(c cells.CellView) bool { return c.Cell == id }) {
			return c, nil, unknownCell(id)
		}
	}
	p, err := cells.PlanFromPolicy(ctx, v.tenants, policy, &cells.PlanOptions{Cells: v.cells, GroupMax: req.Policy.GroupMax,
		MaxMoves: req.Policy.MaxMoves, Seed: req.Policy.Seed})
	if err != nil {
		return c, nil, err
	}
	if m := req.Policy.Measure(); m == cells.MeasureRows || m == cells.MeasureBytes {
		c.Unmeasured = v.unmeasured
	}
	c.StaysTotal = len(p.Stays)
	c.Stays = p.Stays[:min(len(p.Stays), api.MaxStays)]
	items := make([]api.PlannedItem, 0, len(p.Moves))
	for _, m := range p.Moves {
		t := &v.tenants[v.at[m.TenantID]]
		items = append(items, api.PlannedItem{PlannedMove: api.PlannedMove{Tenant: m.TenantID, From: m.FromCell, To: m.ToCell}, Rows: t.Rows, Bytes: t.Bytes})
	}
	return c, items, bounded(len(items))
}

func bounded(n int) error {
	if n > api.MaxCampaignMoves {
		return bad("a campaign has at most %d moves, this one has %d", api.MaxCampaignMoves, n)
	}
	return nil
}

// check holds given moves against the present routes and the cells' rules. Every
// move that does not fit is named, the first of them in the answer.
func (v *fleetView) check(ctx context.Context, moves []api.PlannedMove) ([]api.PlannedItem, error) {
	if err := bounded(len(moves)); err != nil {
		return nil, err
	}
	wrong := &wrongMoves{}
	seen := map[cells.TenantID]bool{}
	targets := make(map[cells.TenantID]cells.CellID, len(moves))
	items := make([]api.PlannedItem, 0, len(moves))
	for _, m := range moves {
		i, ok := v.at[m.Tenant]
		known := slices.ContainsFunc(v.cells, func(c cells.CellView) bool { return c.Cell == m.To })
		switch {
		case m.Tenant.Validate() != nil:
			wrong.add("%q: %v", string(m.Tenant), m.Tenant.Validate())
		case seen[m.Tenant]:
			wrong.add("%s: listed twice", m.Tenant)
		case !ok:
			wrong.add("%s: the tenant has no route", m.Tenant)
		case m.From != v.tenants[i].Cell:
			wrong.add("%s: it is in %s, not in %q", m.Tenant, v.tenants[i].Cell, string(m.From))
		case m.To == m.From:
			wrong.add("%s: from %s to itself", m.Tenant, m.From)
		case !known:
			wrong.add("%s: cell %q is not registered", m.Tenant, string(m.To))
		default:
			targets[m.Tenant] = m.To
			items = append(items, api.PlannedItem{PlannedMove: m, Rows: v.tenants[i].Rows, Bytes: v.tenants[i].Bytes})
		}
		seen[m.Tenant] = true
	}
	p, err := cells.PlanFromPolicy(ctx, v.tenants, cells.PolicyFunc(func(_ context.Context, f *cells.FleetView) ([]cells.Target, error) {
		out := make([]cells.Target, len(f.Tenants))
		for i := range f.Tenants {
			out[i].Cell = targets[f.Tenants[i].Tenant]
		}
		return out, nil
	}), &cells.PlanOptions{Cells: v.cells})
	if err != nil {
		return nil, err
	}
	for _, st := range p.Stays {
		wrong.add("%s: %s", st.Tenant, st.Why)
	}
	return items, wrong.err()
}

// wrongMoves collects what is wrong with a plan.
type wrongMoves struct {
	first []string
	n     int
}

func (w *wrongMoves) add(format string, args ...any) {
	if w.n++; w.n <= 20 {
		w.first = append(w.first, fmt.Sprintf(format, args...))
	}
}

func (w *wrongMoves) err() error {
	if w.n == 0 {
		return nil
	}
	more := ""
	if w.n > len(w.first) {
		more = fmt.Sprintf("; and %d more", w.n-len(w.first))
	}
	return bad("%d moves of the plan do not fit: %s%s", w.n, strings.Join(w.first, "; "), more)
}

// present adds to a record what is made when it is read.
func (s *Server) present(ctx context.Context, c api.Campaign) api.Campaign {
	left := c.Counts.Pending + c.Counts.Running
	if c.State == api.CampaignRunning && c.Counts.Pending > 0 {
		if wait := s.campaignWait(&c, s.cfg.Now()); wait > 0 {
			c.Waiting = fmt.Sprintf("until %s", s.cfg.Now().Add(wait).UTC().Format(time.RFC3339))
		}
	}
	if left == 0 {
		return c
	}
	e, err := s.estimate(ctx, &c, left)
	if err != nil {
		s.log.Warn("no estimate", "campaign", c.ID, "err", err)
		return c
	}
	c.Estimate = e
	return c
}

// estimate tells from what the last moves have cost; nil if there were none.
func (s *Server) estimate(ctx context.Context, c *api.Campaign, left int64) (*api.CampaignEstimate, error) {
	last, err := s.store.Moves(ctx, MoveFilter{Limit: 50})
	if err != nil {
		return nil, err
	}
	var pauses, took []time.Duration
	for i := range last {
		m := &last[i]
		if !m.Served() || m.State == api.MoveRolledBack || m.State == api.MoveRefused || m.StartedAt.IsZero() || m.ServedAt.IsZero() {
			continue
		}
		pauses = append(pauses, m.Pause)
		took = append(took, max(m.ServedAt.Sub(m.StartedAt), 0))
	}
	if len(took) == 0 {
		return nil, nil
	}
	each := median(took)
	if c.Counts.Moved > 0 {
		each = c.Spent / time.Duration(c.Counts.Moved)
	}
	e := &api.CampaignEstimate{Moves: len(took), Pause: median(pauses)}
	e.PauseTotal = e.Pause * time.Duration(left)
	at := min(int64(c.Settings.Concurrency), left, int64(s.cfg.Moves))
	e.Left = time.Duration(float64(each) * float64(left) / float64(max(at, 1)))
	if n := c.Settings.PerHour; n > 0 {
		e.Left = max(e.Left, time.Duration(float64(time.Hour)/float64(n)*float64(max(c.Counts.Pending-1, 0))))
	}
	if sched, err := c.Settings.Schedule(); err == nil {
		if end, ok := sched.After(s.cfg.Now(), e.Left); ok {
			e.Ends = end.UTC()
		}
	}
	return e, s.overBudget(ctx, c, e)
}

// overBudget counts the tenants whose budget does not allow the usual pause.
func (s *Server) overBudget(ctx context.Context, c *api.Campaign, e *api.CampaignEstimate) error {
	if s.cfg.Budget == nil || c.State != api.CampaignPlanned || c.ID == "" {
		return nil
	}
	list, err := s.store.CampaignItems(ctx, ItemFilter{Campaign: c.ID, State: api.ItemPending, Limit: api.MaxBudgetChecks})
	if err != nil {
		return err
	}
	for i := range list {
		left, err := s.cfg.Budget.Remaining(ctx, list[i].Tenant)
		if err != nil {
			return err
		}
		if left < e.Pause {
			e.OverBudget++
		}
	}
	return nil
}

func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[len(d)/2]
}
