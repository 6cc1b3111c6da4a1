// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"errors"

	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// change moves the wave's tenants to the new version.
func (d *Driver) change(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	if r.Campaign != "" {
		return d.campaign(ctx, r)
	}
	if r.Paused {
		return lookMost, nil
	}
	if r.Wave == len(r.Waves) {
		// Who came to the old version's cells meanwhile is of the last wave.
		list, err := d.Tenants.Newcomers(ctx, r)
		if err != nil {
			return 0, err
		}
		if len(list) > 0 {
			n, err := d.Store.AddUnits(ctx, r.ID, d.Now().UTC(), r.Wave, list)
			if err != nil {
				return 0, err
			}
			if n > 0 {
				return 0, d.hook(ctx, StepUnits, r.ID)
			}
		}
	}
	c := r.Current().Counts
	if c.Pending+c.Changing == 0 {
		return d.settle(ctx, r, nil, nil)
	}
	if c.Pending > 0 {
		_, err := d.moveUnits(ctx, r, r.Wave, r.Wave, []api.UnitState{api.UnitPending}, api.UnitChanging, "")
		return 0, err
	}
	_, err := d.next(ctx, r.ID, Event{Kind: Open})
	return 0, err
}

// giveBack moves tenants home.
func (d *Driver) giveBack(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	if r.Campaign != "" {
		return d.campaign(ctx, r)
	}
	if r.Kept {
		// What was under way has ended: it is where it is.
		if n, err := d.moveUnits(ctx, r, 1, len(r.Waves), []api.UnitState{api.UnitChanging}, api.UnitPending, "given up"); err != nil || n > 0 {
			return 0, err
		}
		list, err := d.units(ctx, UnitFilter{Rollout: r.ID, States: []api.UnitState{api.UnitReturning}})
		if err != nil {
			return 0, err
		}
		if len(list) > 0 {
			var changes []UnitChange
			for _, u := range list {
				changes = append(changes, UnitChange{Unit: u.Unit, To: api.UnitGone, Reason: "its return was given up"})
			}
			return 0, d.changeUnits(ctx, r, changes)
		}
		_, err = d.next(ctx, r.ID, Event{Kind: Returned})
		return 0, err
	}
	if n, err := d.moveUnits(ctx, r, r.ReturnFrom, r.Wave, []api.UnitState{api.UnitChanging, api.UnitChanged, api.UnitFailed}, api.UnitReturning, ""); err != nil || n > 0 {
		return 0, err
	}
	if r.Counts().Returning == 0 {
		_, err := d.next(ctx, r.ID, Event{Kind: Returned})
		return 0, err
	}
	if r.Paused {
		return lookMost, nil
	}
	// More than was set: the clock has gone back.
	if wait := r.RetryAt.Sub(d.Now()); wait > 0 && wait <= retryReturn {
		return min(wait, lookMost), nil
	}
	_, err := d.next(ctx, r.ID, Event{Kind: Open})
	return 0, err
}

// campaign brings the rollout's campaign to its end, and its results into the units.
func (d *Driver) campaign(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	c, err := d.Tenants.Campaign(ctx, r.Campaign)
	if errors.Is(err, cells.ErrNotFound) {
		if r.Drop || r.Paused {
			return d.close(ctx, r, nil)
		}
		return d.create(ctx, r)
	}
	if err != nil {
		return 0, err
	}
	var step string
	switch {
	case c.State == api.CampaignDone && c.Counts.Running == 0 && c.Counts.Pending == 0, c.State == api.CampaignAborted:
		if c.State == api.CampaignAborted && !r.Drop && !r.Paused && !r.Back {
			_, err := d.next(ctx, r.ID, Event{Kind: Stalled, Reason: "campaign " + string(c.ID) + " was aborted: " + c.Reason})
			return 0, err
		}
		return d.close(ctx, r, &c)
	case c.State == api.CampaignAborting:
		return lookMoves, nil
	case r.Drop:
		step, err = StepEnded, d.Tenants.End(ctx, r, c.ID, r.State == api.RolloutReturning && !r.Back)
	case r.Paused && c.State == api.CampaignRunning:
		step, err = StepHeld, d.Tenants.Hold(ctx, r, c.ID)
	case r.Paused:
		return lookMost, nil
	case c.State == api.CampaignPlanned:
		step, err = StepRun, d.Tenants.Run(ctx, r, c.ID)
	case c.State == api.CampaignPaused && r.Back:
		step, err = StepEnded, d.Tenants.End(ctx, r, c.ID, false)
	case c.State == api.CampaignPaused:
		_, err := d.next(ctx, r.ID, Event{Kind: Stalled, Reason: "campaign " + string(c.ID) + " is paused: " + c.Reason})
		return 0, err
	default:
		return lookMoves, nil
	}
	if err != nil {
		return 0, err
	}
	return lookLeast, d.hook(ctx, step, r.ID)
}

// create plans the campaign and records it. Tenants that need no move get their
// result.
func (d *Driver) create(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	f := UnitFilter{Rollout: r.ID, Wave: r.Wave, States: []api.UnitState{api.UnitChanging}}
	there, stuck := api.UnitChanged, api.UnitFailed
	if r.Back {
		f.Wave, f.States = 0, []api.UnitState{api.UnitReturning}
		there, stuck = api.UnitReturned, api.UnitReturning
	}
	units, err := d.units(ctx, f)
	if err != nil {
		return 0, err
	}
	list, err := d.Tenants.Place(ctx, r, units, r.Back)
	if err != nil {
		return 0, err
	}
	var changes []UnitChange
	var moves []api.PlannedItem
	var why string
	for i := range list {
		p := &list[i]
		switch p.Fate {
		case FateMove:
			moves = append(moves, p.Move)
		case FateThere:
			changes = append(changes, UnitChange{Unit: p.Unit, To: there})
		case FateGone:
			changes = append(changes, UnitChange{Unit: p.Unit, To: api.UnitGone, Reason: p.Reason})
		case FateStuck:
			changes = append(changes, UnitChange{Unit: p.Unit, To: stuck, Reason: p.Reason})
			why = p.Reason
		}
	}
	if err := d.changeUnits(ctx, r, changes); err != nil {
		return 0, err
	}
	if len(moves) == 0 {
		_, err := d.next(ctx, r.ID, Event{Kind: Closed, Again: why != "", Reason: d.again(r, why)})
		return 0, err
	}
	if err := d.Tenants.Create(ctx, r, moves); err != nil {
		return 0, err
	}
	return 0, d.hook(ctx, StepCreated, r.ID)
}

func (d *Driver) again(r *api.Rollout, why string) string {
	if why == "" || !r.Back {
		return ""
	}
	return "tried again: " + brief(why)
}

// close brings the results of a campaign that is over into the units. c is nil when
// it was never made.
func (d *Driver) close(ctx context.Context, r *api.Rollout, c *api.Campaign) (time.Duration, error) {
	why, left := "", false
	if c != nil {
		after := int64(0)
		for {
			list, err := d.Tenants.Items(ctx, c.ID, after, page)
			if err != nil {
				return 0, err
			}
			var changes []UnitChange
			for i := range list {
				it := &list[i]
				if ch, ok := resultOf(r, it); ok {
					changes = append(changes, ch)
				}
				if it.State != api.ItemMoved && it.State != api.ItemAlready {
					why, left = orElse(it.Reason, why), true
				}
			}
			if err := d.changeUnits(ctx, r, changes); err != nil {
				return 0, err
			}
			if len(list) < page {
				break
			}
			after = list[len(list)-1].Pos
		}
	}
	if !r.Back && r.State == api.RolloutChanging {
		// Those without a result are looked at again.
		if _, err := d.moveUnits(ctx, r, r.Wave, r.Wave, []api.UnitState{api.UnitChanging}, api.UnitPending, ""); err != nil {
			return 0, err
		}
	}
	_, err := d.next(ctx, r.ID, Event{Kind: Closed, Again: r.Back && left && !r.Drop, Reason: d.again(r, why)})
	return 0, err
}

func orElse(s, other string) string {
	if s != "" {
		return s
	}
	return other
}

// resultOf says what an item's result makes of its tenant. Items that were skipped
// say nothing certain: what became of the tenant is looked at by the next plan, unless
// that would look for ever.
func resultOf(r *api.Rollout, it *api.CampaignItem) (UnitChange, bool) {
	ch := UnitChange{Unit: string(it.Tenant), Reason: it.Reason}
	switch {
	case it.State == api.ItemMoved, it.State == api.ItemAlready:
		ch.To, ch.Reason = api.UnitChanged, ""
		if r.Back {
			ch.To = api.UnitReturned
		}
	case r.Back:
		ch.To = api.UnitReturning // with the reason
	case it.State == api.ItemFailed, it.State == api.ItemDeferred, it.State == api.ItemSkipped && !r.Drop && !r.Paused:
		ch.To = api.UnitFailed
	default:
		return ch, false
	}
	return ch, true
}
