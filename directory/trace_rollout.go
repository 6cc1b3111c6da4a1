// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// RolloutTrace is one line of a trace: one transaction of the store that changed a
// rollout or its units. Its action is the kind of the event ([rollout.Kind]), or the
// step that has none ([rollout.StepTaken], [rollout.StepUnits]).
type RolloutTrace struct {
	At      time.Time     `json:"at"`
	By      string        `json:"by,omitempty"`
	Rollout api.RolloutID `json:"rollout"`
	Action  string        `json:"rollout_action"`
	// Version is the record's after the change; 0 where it is not known.
	Version int64 `json:"rollout_version,omitempty"`
	// Before and After are the record before and after a change of the whole; nil where
	// units were changed or the driver.
	Before *RolloutMark `json:"rollout_before,omitempty"`
	After  *RolloutMark `json:"rollout_after,omitempty"`
}

// RolloutMark is what a trace keeps of a rollout's record.
type RolloutMark struct {
	State      api.RolloutState `json:"state"`
	Wave       int              `json:"wave"`
	Waves      int              `json:"waves"`
	Paused     bool             `json:"paused,omitempty"`
	Bad        bool             `json:"bad,omitempty"`
	Kept       bool             `json:"kept,omitempty"`
	ReturnFrom int              `json:"return_from,omitempty"`
	Attempt    int              `json:"attempt,omitempty"`
	Campaign   api.CampaignID   `json:"campaign,omitempty"`
	Back       bool             `json:"back,omitempty"`
	Driver     string           `json:"driver,omitempty"`
	// Current are the counts of the present wave, Counts those of all.
	Current api.UnitCounts `json:"current,omitzero"`
	Counts  api.UnitCounts `json:"counts,omitzero"`
}

func markOf(r *api.Rollout) *RolloutMark {
	m := &RolloutMark{State: r.State, Wave: r.Wave, Waves: len(r.Waves), Paused: r.Paused, Bad: r.Bad, Kept: r.Kept, ReturnFrom: r.ReturnFrom,
		Attempt: r.Attempt, Campaign: r.Campaign, Back: r.Back, Driver: r.Driver, Counts: r.Counts()}
	if w := r.Current(); w != nil {
		m.Current = w.Counts
	}
	return m
}

// rolloutLine writes a line about a rollout.
func (t *tracedStore) rolloutLine(l RolloutTrace) {
	l.At, l.By = time.Now(), t.by
	if b, err := json.Marshal(l); err == nil {
		_, _ = t.w.Write(append(b, '\n')) // what is missing is found when it is checked
	}
}

func (t *tracedStore) CreateRollout(ctx context.Context, r api.Rollout, units []api.RolloutUnit, a api.AuditEntry) (api.Rollout, bool, error) {
	rec, created, err := t.Store.CreateRollout(ctx, r, units, a)
	if err == nil && created {
		t.rolloutLine(RolloutTrace{Rollout: rec.ID, Action: string(rollout.Start), Version: rec.Version, After: markOf(&rec)})
	}
	return rec, created, err
}

func (t *tracedStore) UpdateRollout(ctx context.Context, id api.RolloutID, fn func(*api.Rollout) error, a *api.AuditEntry) (api.Rollout, error) {
	l := RolloutTrace{Rollout: id, Action: actionOther}
	if a != nil {
		l.Action = strings.TrimPrefix(a.Action, "rollout.")
	}
	r, err := t.Store.UpdateRollout(ctx, id, func(r *api.Rollout) error {
		l.Before = markOf(r)
		return fn(r)
	}, a)
	if err == nil {
		l.Version, l.After = r.Version, markOf(&r)
		t.rolloutLine(l)
	}
	return r, err
}

func (t *tracedStore) unitsLine(id api.RolloutID, n int64, err error) {
	if err == nil && n > 0 {
		t.rolloutLine(RolloutTrace{Rollout: id, Action: rollout.StepUnits})
	}
}

func (t *tracedStore) ChangeUnits(ctx context.Context, id api.RolloutID, at time.Time, list []rollout.UnitChange) (int64, error) {
	n, err := t.Store.ChangeUnits(ctx, id, at, list)
	t.unitsLine(id, n, err)
	return n, err
}

func (t *tracedStore) MoveUnits(ctx context.Context, id api.RolloutID, at time.Time, first, last int, from []api.UnitState, to api.UnitState, reason string) (int64, error) {
	n, err := t.Store.MoveUnits(ctx, id, at, first, last, from, to, reason)
	t.unitsLine(id, n, err)
	return n, err
}

func (t *tracedStore) AddUnits(ctx context.Context, id api.RolloutID, at time.Time, wave int, units []api.RolloutUnit) (int64, error) {
	n, err := t.Store.AddUnits(ctx, id, at, wave, units)
	t.unitsLine(id, n, err)
	return n, err
}

func (t *tracedStore) TakeRollout(ctx context.Context, seen RolloutBeat, driver string) (bool, error) {
	ok, err := t.Store.TakeRollout(ctx, seen, driver)
	if err == nil && ok {
		t.rolloutLine(RolloutTrace{Rollout: seen.ID, Action: rollout.StepTaken})
	}
	return ok, err
}
