// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// errNoVersions: by upgrade needs somebody who gives cells versions.
var errNoVersions = fmt.Errorf("%w: nobody gives cells versions here", cells.ErrNotApplicable)

// at reports whether the whole cell has a version and serves; if not, what it shows.
func (d *Driver) at(ctx context.Context, cell cells.CellID, version string) (bool, string, error) {
	v, ready, total, err := d.Versions.CellVersion(ctx, cell)
	if errors.Is(err, cells.ErrNotFound) {
		return false, err.Error(), nil
	}
	if err != nil {
		return false, "", err
	}
	if v == version && total > 0 && ready >= total {
		return true, "", nil
	}
	if v == "" {
		v = "several versions"
	}
	return false, fmt.Sprintf("it has %s, %d of %d processes are ready", v, ready, total), nil
}

// order says which version a cell is to have. That nobody provisions the cell is for
// the unit to show, not a failure of the round.
func (d *Driver) order(ctx context.Context, r *api.Rollout, cell cells.CellID, version string) (string, error) {
	err := d.Versions.SetVersion(ctx, cell, version)
	if errors.Is(err, cells.ErrNotFound) || errors.Is(err, cells.ErrInvalid) {
		return err.Error(), nil
	}
	if err != nil {
		return "", err
	}
	return "", d.hook(ctx, StepOrdered, r.ID)
}

func (d *Driver) concurrency(r *api.Rollout) int { return max(r.Settings.Concurrency, 1) }

// upgrade gives the wave's cells the new version, a few at once, in their order.
func (d *Driver) upgrade(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	if d.Versions == nil {
		return 0, errNoVersions
	}
	list, err := d.units(ctx, UnitFilter{Rollout: r.ID, Wave: r.Wave, States: []api.UnitState{api.UnitPending, api.UnitChanging, api.UnitReturning}})
	if err != nil {
		return 0, err
	}
	if len(list) == 0 {
		canary, baseline, lag, err := d.groups(ctx, r)
		if err != nil {
			return 0, err
		}
		// What the old version's processes, or worse ones before them, have answered must
		// not arrive as the new one's.
		if lag > 0 {
			return min(lag, lookMost), nil
		}
		return d.settle(ctx, r, canary, baseline)
	}
	var changes []UnitChange
	busy := 0
	for i := range list {
		u := &list[i]
		if u.State == api.UnitReturning { // it is to be left
			ch, err := d.homewards(ctx, r, u)
			if err != nil {
				return 0, err
			}
			changes = append(changes, ch...)
		}
		if u.State != api.UnitChanging {
			continue
		}
		why, err := d.order(ctx, r, cells.CellID(u.Unit), r.Settings.Version)
		if err != nil {
			return 0, err
		}
		done, shows, err := d.at(ctx, cells.CellID(u.Unit), r.Settings.Version)
		switch {
		case err != nil:
			return 0, err
		case done:
			changes = append(changes, UnitChange{Unit: u.Unit, To: api.UnitChanged})
		case why != "":
			changes = append(changes, UnitChange{Unit: u.Unit, To: api.UnitFailed, Reason: brief(why)})
		case d.waited(r.ID, u.Unit, u.At) >= r.Settings.ChangeTimeout:
			changes = append(changes, UnitChange{Unit: u.Unit, To: api.UnitFailed,
				Reason: fmt.Sprintf("not upgraded within %v: %s", r.Settings.ChangeTimeout, shows)})
		default:
			busy++
		}
	}
	if len(changes) > 0 {
		return 0, d.changeUnits(ctx, r, changes)
	}
	if r.Paused {
		return lookCells, nil
	}
	for i := range list {
		if u := &list[i]; u.State == api.UnitPending && busy < d.concurrency(r) {
			changes = append(changes, UnitChange{Unit: u.Unit, To: api.UnitChanging})
			busy++
		}
	}
	if len(changes) == 0 {
		return lookCells, nil
	}
	return 0, d.changeUnits(ctx, r, changes)
}

// groups are the cells to compare, those that have the new version and those that have the
// old one, and how long what was counted before the last change may still arrive.
func (d *Driver) groups(ctx context.Context, r *api.Rollout) (canary, baseline []cells.CellID, lag time.Duration, _ error) {
	list, err := d.units(ctx, UnitFilter{Rollout: r.ID, States: []api.UnitState{api.UnitChanged, api.UnitPending, api.UnitReturned}})
	for _, u := range list {
		switch {
		case u.State == api.UnitChanged:
			canary = append(canary, cells.CellID(u.Unit))
			if u.Wave == r.Wave { // those of the waves before were changed long ago
				lag = max(lag, d.Lag-d.waited(r.ID, u.Unit, u.At))
			}
		case u.Wave > r.Wave || u.State == api.UnitReturned:
			baseline = append(baseline, cells.CellID(u.Unit))
		}
	}
	return canary, baseline, lag, err
}

// downgrade gives cells the version back that they had, all at once: none of them
// waits for one that cannot be returned.
func (d *Driver) downgrade(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	if d.Versions == nil {
		return 0, errNoVersions
	}
	if r.Kept {
		list, err := d.units(ctx, UnitFilter{Rollout: r.ID, States: []api.UnitState{api.UnitChanging, api.UnitReturning}})
		if err != nil {
			return 0, err
		}
		if len(list) == 0 {
			_, err := d.next(ctx, r.ID, Event{Kind: Returned})
			return 0, err
		}
		var changes []UnitChange
		for _, u := range list {
			to := api.UnitFailed
			if u.State == api.UnitReturning {
				to = api.UnitGone
			}
			changes = append(changes, UnitChange{Unit: u.Unit, To: to, Reason: "given up while its version was changed"})
		}
		return 0, d.changeUnits(ctx, r, changes)
	}
	if n, err := d.moveUnits(ctx, r, r.ReturnFrom, r.Wave, []api.UnitState{api.UnitChanging, api.UnitChanged, api.UnitFailed}, api.UnitReturning, ""); err != nil || n > 0 {
		return 0, err
	}
	list, err := d.units(ctx, UnitFilter{Rollout: r.ID, States: []api.UnitState{api.UnitReturning}})
	if err != nil {
		return 0, err
	}
	if len(list) == 0 {
		_, err := d.next(ctx, r.ID, Event{Kind: Returned})
		return 0, err
	}
	if r.Paused {
		return lookMost, nil
	}
	var changes []UnitChange
	for i := range list {
		ch, err := d.homewards(ctx, r, &list[i])
		if err != nil {
			return 0, err
		}
		changes = append(changes, ch...)
	}
	if len(changes) == 0 {
		return lookCells, nil
	}
	return lookLeast, d.changeUnits(ctx, r, changes)
}

// homewards gives a cell the version back that it had, and says what that has made of
// it.
func (d *Driver) homewards(ctx context.Context, r *api.Rollout, u *api.RolloutUnit) ([]UnitChange, error) {
	cell := cells.CellID(u.Unit)
	why, err := d.order(ctx, r, cell, u.Home)
	if err != nil {
		return nil, err
	}
	done, shows, err := d.at(ctx, cell, u.Home)
	if err != nil {
		return nil, err
	}
	if done {
		return []UnitChange{{Unit: u.Unit, To: api.UnitReturned}}, nil
	}
	if shows = brief(orElse(why, shows)); shows != u.Reason {
		return []UnitChange{{Unit: u.Unit, To: api.UnitReturning, Reason: shows}}, nil
	}
	return nil, nil
}
