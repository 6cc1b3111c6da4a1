// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member/vitals"
)

// errCrash is what a driver dies of.
var errCrash = errors.New("crashed")

// world is everything that a driver works on, in memory: the records, the tenants'
// cells, the campaigns, the cells' versions and what is counted.
type world struct {
	rec       api.Rollout
	units     []api.RolloutUnit
	routes    map[string]cells.CellID
	campaigns map[api.CampaignID]*campaign
	wished    map[cells.CellID]string // versions that cells are to have
	has       map[cells.CellID]string // and that they have
	refuse    map[cells.CellID]bool   // cells that nobody upgrades
	health    string                  // good, bad or none
	outsiders map[string]bool         // tenants that somebody else moved or deleted
	clock     int64
	crashIn   int // hooks until the driver dies; 0 never
	steps     []string
}

type campaign struct {
	state api.CampaignState
	items []api.CampaignItem
}

func (w *world) clone() *world {
	c := *w
	c.rec.Waves = slices.Clone(w.rec.Waves)
	c.units = slices.Clone(w.units)
	c.routes, c.wished, c.has = maps.Clone(w.routes), maps.Clone(w.wished), maps.Clone(w.has)
	c.refuse, c.outsiders = maps.Clone(w.refuse), maps.Clone(w.outsiders)
	c.campaigns = map[api.CampaignID]*campaign{}
	for id, x := range w.campaigns {
		c.campaigns[id] = &campaign{state: x.state, items: slices.Clone(x.items)}
	}
	c.steps = nil
	return &c
}

const driverName = "d/1"

func (w *world) driver() *rollout.Driver {
	return &rollout.Driver{Store: w, Tenants: w, Versions: w, Totals: w.totals, Now: w.now, Name: driverName, Hook: func(_ context.Context, step string, _ api.RolloutID) error {
		w.steps = append(w.steps, step)
		if w.crashIn--; w.crashIn == 0 {
			return errCrash
		}
		return nil
	}}
}

// now never shows the same time twice: whatever waits has waited long enough.
func (w *world) now() time.Time {
	w.clock++
	return time.Unix(1000+10*w.clock, 0).UTC()
}

// counted is what both sides count in a window, as the health is.
func (w *world) counted() (canary, baseline vitals.Counts) {
	n := int64(1000)
	if w.health == "none" {
		n = 1
	}
	good := vitals.Counts{Requests: n}
	good.Latency[3] = n
	canary, baseline = good, good
	if w.health == "bad" {
		canary.Failed = n / 2
		canary.Latency[3] = n / 2
	}
	return canary, baseline
}

func (w *world) totals(context.Context) (rollout.Totals, error) {
	t := rollout.Totals{}
	for _, by := range []string{api.MeasuredByEdge, api.MeasuredByCell} {
		t[by] = map[cells.CellID]vitals.Counts{}
		if w.rec.Window == nil {
			continue
		}
		canary, baseline := w.counted()
		if c := w.rec.Window.Canary; len(c) > 0 {
			t[by][c[0]] = w.rec.Window.Mark[by].Canary.Plus(canary)
		}
		if b := w.rec.Window.Baseline; len(b) > 0 {
			t[by][b[0]] = w.rec.Window.Mark[by].Baseline.Plus(baseline)
		}
	}
	return t, nil
}

func (w *world) counts() {
	for i := range w.rec.Waves {
		w.rec.Waves[i].Counts = api.UnitCounts{}
	}
	for _, u := range w.units {
		c := &w.rec.Waves[u.Wave-1].Counts
		c.Total++
		*c.Of(u.State)++
	}
}

// The store.

func (w *world) Rollout(context.Context, api.RolloutID) (api.Rollout, error) { return w.rec, nil }

func (w *world) UpdateRollout(_ context.Context, _ api.RolloutID, fn func(*api.Rollout) error, _ *api.AuditEntry) (api.Rollout, error) {
	r := w.rec
	r.Waves = slices.Clone(r.Waves)
	if err := fn(&r); err != nil {
		return w.rec, err
	}
	r.Version++
	w.rec = r
	w.counts()
	return w.rec, nil
}

func (w *world) RolloutUnits(_ context.Context, f rollout.UnitFilter) ([]api.RolloutUnit, error) {
	var out []api.RolloutUnit
	for _, u := range w.units {
		if u.Pos > f.After && (f.Wave == 0 || f.Wave == u.Wave) && (len(f.States) == 0 || slices.Contains(f.States, u.State)) && len(out) < f.Limit {
			out = append(out, u)
		}
	}
	return out, nil
}

func (w *world) ChangeUnits(_ context.Context, _ api.RolloutID, at time.Time, list []rollout.UnitChange) (int64, error) {
	var n int64
	for _, ch := range list {
		for i := range w.units {
			if u := &w.units[i]; u.Unit == ch.Unit && (u.State == ch.To || u.State.May(ch.To)) {
				u.State, u.Reason, u.At = ch.To, ch.Reason, at
				n++
			}
		}
	}
	w.counts()
	return n, nil
}

func (w *world) MoveUnits(_ context.Context, _ api.RolloutID, at time.Time, first, last int, from []api.UnitState, to api.UnitState, reason string) (int64, error) {
	var n int64
	for i := range w.units {
		u := &w.units[i]
		if u.Wave >= first && u.Wave <= last && slices.Contains(from, u.State) && u.State.May(to) {
			u.State, u.Reason, u.At = to, reason, at
			n++
		}
	}
	w.counts()
	return n, nil
}

func (w *world) AddUnits(_ context.Context, _ api.RolloutID, at time.Time, wave int, units []api.RolloutUnit) (int64, error) {
	var n int64
	for _, u := range units {
		if !slices.ContainsFunc(w.units, func(x api.RolloutUnit) bool { return x.Unit == u.Unit }) {
			w.units = append(w.units, api.RolloutUnit{Pos: int64(len(w.units) + 1), Unit: u.Unit, Home: u.Home, Wave: wave, State: api.UnitPending, At: at})
			n++
		}
	}
	w.counts()
	return n, nil
}

// The tenants.

func (w *world) Place(_ context.Context, r *api.Rollout, units []api.RolloutUnit, back bool) ([]rollout.Placement, error) {
	var out []rollout.Placement
	for _, u := range units {
		p := rollout.Placement{Unit: u.Unit}
		at, ok := w.routes[u.Unit]
		switch {
		case !ok:
			p.Fate = rollout.FateGone
		case back && string(at) == u.Home, !back && slices.Contains(r.New, at):
			p.Fate = rollout.FateThere
		case back && !slices.Contains(r.New, at), !back && !slices.Contains(r.Old, at):
			p.Fate = rollout.FateGone
		case back:
			p.Move.PlannedMove = api.PlannedMove{Tenant: cells.TenantID(u.Unit), From: at, To: cells.CellID(u.Home)}
		default:
			p.Move.PlannedMove = api.PlannedMove{Tenant: cells.TenantID(u.Unit), From: at, To: r.New[0]}
		}
		out = append(out, p)
	}
	return out, nil
}

func (w *world) Newcomers(_ context.Context, r *api.Rollout) ([]api.RolloutUnit, error) {
	var out []api.RolloutUnit
	for _, t := range slices.Sorted(maps.Keys(w.routes)) {
		if slices.Contains(r.Old, w.routes[t]) {
			out = append(out, api.RolloutUnit{Unit: t, Home: string(w.routes[t])})
		}
	}
	return out, nil
}

func (w *world) Campaign(_ context.Context, id api.CampaignID) (api.Campaign, error) {
	c := w.campaigns[id]
	if c == nil {
		return api.Campaign{}, cells.ErrNotFound
	}
	out := api.Campaign{ID: id, State: c.state}
	for _, it := range c.items {
		out.Counts.Total++
		*out.Counts.Of(it.State)++
	}
	return out, nil
}

func (w *world) Items(_ context.Context, id api.CampaignID, after int64, limit int) ([]api.CampaignItem, error) {
	var out []api.CampaignItem
	for _, it := range w.campaigns[id].items {
		if it.Pos > after && len(out) < limit {
			out = append(out, it)
		}
	}
	return out, nil
}

func (w *world) Create(_ context.Context, r *api.Rollout, moves []api.PlannedItem) error {
	if w.campaigns[r.Campaign] != nil {
		return nil
	}
	c := &campaign{state: api.CampaignPlanned}
	for i, m := range moves {
		c.items = append(c.items, api.CampaignItem{Pos: int64(i + 1), Tenant: m.Tenant, From: m.From, To: m.To, State: api.ItemPending})
	}
	w.campaigns[r.Campaign] = c
	return nil
}

func (w *world) order(id api.CampaignID, to api.CampaignState, from ...api.CampaignState) error {
	if c := w.campaigns[id]; slices.Contains(from, c.state) {
		c.state = to
	}
	return nil
}

func (w *world) Run(_ context.Context, _ *api.Rollout, id api.CampaignID) error {
	return w.order(id, api.CampaignRunning, api.CampaignPlanned)
}

func (w *world) Hold(_ context.Context, _ *api.Rollout, id api.CampaignID) error {
	return w.order(id, api.CampaignPaused, api.CampaignRunning)
}

func (w *world) End(_ context.Context, _ *api.Rollout, id api.CampaignID, _ bool) error {
	return w.order(id, api.CampaignAborting, api.CampaignPlanned, api.CampaignRunning, api.CampaignPaused)
}

// goOn is what a campaign does by itself: it makes its next move, well or not, or ends.
// It reports whether there was anything to do.
func (w *world) goOn(id api.CampaignID, well bool) bool {
	c := w.campaigns[id]
	switch c.state {
	case api.CampaignRunning:
		for i := range c.items {
			it := &c.items[i]
			if it.State != api.ItemPending {
				continue
			}
			switch at, ok := w.routes[string(it.Tenant)]; {
			case !ok || at != it.From:
				it.State, it.Reason = api.ItemSkipped, "not there any more"
			case !well:
				it.State, it.Reason = api.ItemFailed, "rolled back"
			default:
				it.State = api.ItemMoved
				w.routes[string(it.Tenant)] = it.To
			}
			return true
		}
		c.state = api.CampaignDone
	case api.CampaignAborting:
		for i := range c.items {
			if c.items[i].State == api.ItemPending {
				c.items[i].State = api.ItemSkipped
			}
		}
		c.state = api.CampaignAborted
	default:
		return false
	}
	return true
}

// The versions.

func (w *world) SetVersion(_ context.Context, cell cells.CellID, version string) error {
	if w.refuse[cell] {
		return fmt.Errorf("%w: nobody upgrades %s", cells.ErrInvalid, cell)
	}
	w.wished[cell] = version
	return nil
}

func (w *world) CellVersion(_ context.Context, cell cells.CellID) (string, int, int, error) {
	if w.has[cell] != w.wished[cell] {
		return "", 1, 2, nil
	}
	return w.has[cell], 2, 2, nil
}

// newWorld starts a rollout by move of tenants from cell a to cell b, or by upgrade of
// cells.
func newWorld(by string, waves []float64, names ...string) *world {
	w := &world{routes: map[string]cells.CellID{}, campaigns: map[api.CampaignID]*campaign{}, wished: map[cells.CellID]string{}, has: map[cells.CellID]string{},
		refuse: map[cells.CellID]bool{}, outsiders: map[string]bool{}, health: "good"}
	set := api.RolloutSettings{Version: "v2", From: "v1", By: by, Waves: waves, Canary: names[:1], Bake: 1, Patience: 1, ChangeTimeout: api.MaxBake}
	if err := set.Normalize(); err != nil {
		panic(err)
	}
	set.Health.LatencyRatio = -1
	rec := api.Rollout{ID: "ro-1", Settings: set, Actor: "alice"}
	var units []api.RolloutUnit
	for _, n := range names {
		if by == api.ByMove {
			w.routes[n] = "a"
			units = append(units, api.RolloutUnit{Unit: n, Home: "a"})
			continue
		}
		rec.Old = append(rec.Old, cells.CellID(n))
		w.wished[cells.CellID(n)], w.has[cells.CellID(n)] = "v1", "v1"
		units = append(units, api.RolloutUnit{Unit: n, Home: "v1"})
	}
	if by == api.ByMove {
		rec.Old, rec.New = []cells.CellID{"a"}, []cells.CellID{"b"}
	}
	w.units, rec.Waves = rollout.Waves(&set, units)
	var err error
	if rec, err = rollout.Next(rec, rollout.Event{Kind: rollout.Start, At: w.now()}); err != nil {
		panic(err)
	}
	rec.Driver = driverName
	w.rec = rec
	w.counts()
	return w
}
