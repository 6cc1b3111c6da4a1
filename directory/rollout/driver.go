// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// Driver does the work of rollouts. Everything that it knows is in the store: two
// drivers at once, or one that was killed anywhere, do no harm.
type Driver struct {
	Store   Store
	Tenants Tenants
	// Versions; nil refuses rollouts by upgrade.
	Versions Versions
	// Totals reads what was counted so far.
	Totals func(ctx context.Context) (Totals, error)
	// Lag is how long it takes at most, as a rule, until what was counted is in the
	// totals: by upgrade a wave bakes only so long after its last cell was changed.
	Lag time.Duration
	// Now is the clock: it decides for how long something bakes and when it is tried
	// again, and nothing else.
	Now func() time.Time
	// Elapsed tells how long a cell's change and the lag behind it take: it never goes back
	// and never jumps. Nil is this process's own.
	Elapsed func() time.Duration
	// Name is the driver's, as the store has it in Rollout.Driver; Audit makes entries of
	// its own, nil makes none.
	Name  string
	Audit func(action string, r *api.Rollout) api.AuditEntry
	// Hook, unless nil, is called after each persisted step; an error ends the round.
	Hook func(ctx context.Context, step string, id api.RolloutID) error

	mu    sync.Mutex
	waits map[api.RolloutID]map[wait]time.Duration // guarded by mu; since when something is waited for
}

// wait names something that is waited for: what happened to a unit, when.
type wait struct {
	unit string
	at   int64
}

var began = time.Now()

// waited is for how long this driver has known of what happened to a unit at a time. A
// driver that takes over begins anew: it waits longer, never shorter.
func (d *Driver) waited(id api.RolloutID, unit string, at time.Time) time.Duration {
	now := time.Since(began)
	if d.Elapsed != nil {
		now = d.Elapsed()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.waits == nil {
		d.waits = map[api.RolloutID]map[wait]time.Duration{}
	}
	m := d.waits[id]
	if m == nil {
		m = map[wait]time.Duration{}
		d.waits[id] = m
	}
	key := wait{unit, at.UnixMicro()}
	since, ok := m[key]
	if !ok {
		m[key], since = now, now
	}
	return now - since
}

func (d *Driver) forget(id api.RolloutID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.waits, id)
}

// Waits between two looks.
const (
	lookMoves = 250 * time.Millisecond
	lookCells = 250 * time.Millisecond
	lookLeast = 20 * time.Millisecond
	lookMost  = 2 * time.Second
	page      = api.MaxPage
)

// Step does the next thing that there is to do for a rollout, and says when to look
// again. ErrNotDriver: there is nothing to do any more.
func (d *Driver) Step(ctx context.Context, id api.RolloutID) (time.Duration, error) {
	r, err := d.Store.Rollout(ctx, id)
	if err != nil {
		return 0, err
	}
	if r.Driver != d.Name || r.State.Final() {
		d.forget(id)
		return 0, ErrNotDriver
	}
	wait, err := d.step(ctx, &r)
	if errors.Is(err, ErrNoChange) || errors.Is(err, ErrRefused) {
		// It has changed since it was read, by an operator or another driver.
		return lookLeast, nil
	}
	return wait, err
}

func (d *Driver) step(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	switch r.State {
	case api.RolloutObserving, api.RolloutBaking:
		return d.judge(ctx, r)
	case api.RolloutChanging:
		if r.Settings.By == api.ByUpgrade {
			return d.upgrade(ctx, r)
		}
		if wait, err := d.judge(ctx, r); err != nil || wait == 0 {
			return wait, err
		}
		return d.change(ctx, r)
	case api.RolloutReturning:
		if r.Settings.By == api.ByUpgrade {
			return d.downgrade(ctx, r)
		}
		return d.giveBack(ctx, r)
	}
	return 0, fmt.Errorf("%w: rollout %s is in state %q", cells.ErrInvalid, r.ID, r.State)
}

func (d *Driver) hook(ctx context.Context, step string, id api.RolloutID) error {
	if d.Hook == nil {
		return nil
	}
	return d.Hook(ctx, step, id)
}

// next persists an event.
func (d *Driver) next(ctx context.Context, id api.RolloutID, ev Event) (api.Rollout, error) {
	ev.At = d.Now().UTC()
	var audit *api.AuditEntry
	apply := func(r *api.Rollout) error {
		if r.Driver != d.Name {
			return ErrNotDriver
		}
		n, err := Next(*r, ev)
		if err == nil {
			*r = n
		}
		return err
	}
	if d.Audit != nil {
		now, err := d.Store.Rollout(ctx, id)
		if err != nil {
			return now, err
		}
		if err := apply(&now); err != nil {
			return now, err
		}
		e := d.Audit("rollout."+string(ev.Kind), &now)
		audit = &e
	}
	r, err := d.Store.UpdateRollout(ctx, id, apply, audit)
	if err != nil {
		return r, err
	}
	return r, d.hook(ctx, string(ev.Kind), id)
}

// judge looks at what was counted; wait 0 says that this has changed something.
func (d *Driver) judge(ctx context.Context, r *api.Rollout) (time.Duration, error) {
	t, err := d.Totals(ctx)
	if err != nil {
		return 0, err
	}
	ev := Event{Kind: Judged, At: d.Now().UTC(), Totals: t}
	wait := min(max(r.Settings.Bake/20, lookLeast), lookMost)
	if _, err := Next(*r, ev); errors.Is(err, ErrNoChange) {
		return wait, nil
	} else if err != nil {
		return wait, err
	}
	_, err = d.next(ctx, r.ID, ev)
	if errors.Is(err, ErrNoChange) {
		return wait, nil
	}
	return 0, err
}

// settle says that every unit of the wave has its result.
func (d *Driver) settle(ctx context.Context, r *api.Rollout, canary, baseline []cells.CellID) (time.Duration, error) {
	if r.Paused {
		return lookMost, nil
	}
	t, err := d.Totals(ctx)
	if err != nil {
		return 0, err
	}
	_, err = d.next(ctx, r.ID, Event{Kind: Settled, Totals: t, Canary: canary, Baseline: baseline})
	return 0, err
}

func (d *Driver) moveUnits(ctx context.Context, r *api.Rollout, first, last int, from []api.UnitState, to api.UnitState, reason string) (int64, error) {
	n, err := d.Store.MoveUnits(ctx, r.ID, d.Now().UTC(), first, last, from, to, reason)
	if err == nil && n > 0 {
		err = d.hook(ctx, StepUnits, r.ID)
	}
	return n, err
}

func (d *Driver) changeUnits(ctx context.Context, r *api.Rollout, list []UnitChange) error {
	for len(list) > 0 {
		n := min(len(list), page)
		if _, err := d.Store.ChangeUnits(ctx, r.ID, d.Now().UTC(), list[:n]); err != nil {
			return err
		}
		if err := d.hook(ctx, StepUnits, r.ID); err != nil {
			return err
		}
		list = list[n:]
	}
	return nil
}

// units reads all units of the filter.
func (d *Driver) units(ctx context.Context, f UnitFilter) ([]api.RolloutUnit, error) {
	f.Limit = page
	var out []api.RolloutUnit
	for {
		list, err := d.Store.RolloutUnits(ctx, f)
		if err != nil {
			return nil, err
		}
		out = append(out, list...)
		if len(list) < page {
			return out, nil
		}
		f.After = list[len(list)-1].Pos
	}
}

// Order carries out what an operator asks for: Pause, Resume or Abort. With skip a
// resume leaves the units that have failed as they are; without it they are tried
// again. ErrNoChange comes with the record.
func Order(ctx context.Context, s Store, id api.RolloutID, ev Event, skip bool, audit *api.AuditEntry) (api.Rollout, error) {
	if ev.Kind == Resume {
		r, err := s.Rollout(ctx, id)
		if err != nil {
			return r, err
		}
		if _, err := Next(r, ev); err != nil {
			return r, err
		}
		// Before the rollout goes on, so that it does not stop for them again.
		to, reason := api.UnitPending, "to be tried again"
		byUpgrade := r.Settings.By == api.ByUpgrade // then some of its processes may have changed
		switch {
		case skip && byUpgrade:
			to, reason = api.UnitReturning, "left by "+ev.Actor
		case skip:
			to, reason = api.UnitLeft, "left by "+ev.Actor
		case byUpgrade:
			to = api.UnitChanging
		}
		if r.State == api.RolloutChanging {
			if _, err := s.MoveUnits(ctx, id, ev.At, r.Wave, r.Wave, []api.UnitState{api.UnitFailed}, to, reason); err != nil {
				return r, err
			}
		}
	}
	r, err := s.UpdateRollout(ctx, id, func(r *api.Rollout) error {
		n, err := Next(*r, ev)
		if err == nil {
			*r = n
		}
		return err
	}, audit)
	if errors.Is(err, ErrNoChange) {
		now, readErr := s.Rollout(ctx, id)
		return now, errors.Join(err, readErr)
	}
	return r, err
}

// brief cuts a reason that is shown beside others.
func brief(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > 300 {
		s = strings.ToValidUTF8(s[:300], "") + "..."
	}
	return s
}
