// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/vitals"
)

// RolloutWave is one wave. Waves are numbered from 1.
type RolloutWave struct {
	Percent float64    `json:"percent"`
	Counts  UnitCounts `json:"counts"`
	// StartedAt is when its change began (last), BakedAt when its change was complete,
	// EndedAt when it was found to be healthy, or was returned.
	StartedAt time.Time `json:"started_at,omitzero"`
	BakedAt   time.Time `json:"baked_at,omitzero"`
	EndedAt   time.Time `json:"ended_at,omitzero"`
	// Verdict is the one that decided it.
	Verdict *Verdict `json:"verdict,omitempty"`
}

// HealthWindow is what is compared: the requests to two groups of cells since a
// moment.
type HealthWindow struct {
	Since    time.Time      `json:"since"`
	Canary   []cells.CellID `json:"canary"`
	Baseline []cells.CellID `json:"baseline"`
	// Mark are the totals at Since, by who measured.
	Mark map[string]HealthPair `json:"mark,omitempty"`
}

// HealthPair are the counts of two groups.
type HealthPair struct {
	Canary   vitals.Counts `json:"canary"`
	Baseline vitals.Counts `json:"baseline"`
}

// HealthReference is what the old version was last measured to be, for windows in
// which nothing of it is left.
type HealthReference struct {
	// Wave is the one that it was measured beside; 0: before the first.
	Wave   int                      `json:"wave"`
	Counts map[string]vitals.Counts `json:"counts"`
}

// Rollout is the record of a rollout.
type Rollout struct {
	ID    RolloutID    `json:"id"`
	Name  string       `json:"name,omitempty"`
	State RolloutState `json:"state"`
	// Paused: nothing is begun and no wave follows; bad health still returns the wave.
	Paused bool `json:"paused,omitempty"`
	// Reason says why it was paused, is returning, was halted or aborted.
	Reason   string          `json:"reason,omitempty"`
	Settings RolloutSettings `json:"settings"`
	// Old and New are the cells of the two versions. By upgrade New is empty: Old get
	// the new version.
	Old []cells.CellID `json:"old"`
	New []cells.CellID `json:"new,omitempty"`
	// Wave is the present one, from 1; 0 while it is observing.
	Wave  int           `json:"wave"`
	Waves []RolloutWave `json:"waves"`
	// Window is what is compared now; nil when nothing is.
	Window    *HealthWindow    `json:"window,omitempty"`
	Reference *HealthReference `json:"reference,omitempty"`
	// Spent is what the waves that are over have cost, by who measured: what
	// Settings.Health.Budget counts.
	Spent map[string]HealthSpent `json:"spent,omitempty"`
	// Verdict is the last one that decided something.
	Verdict *Verdict `json:"verdict,omitempty"`
	// ReturnFrom is the first of the waves that are being returned, or were; 0: none.
	// Then they are returned up to Wave. Bad: because of their health.
	ReturnFrom int  `json:"return_from,omitempty"`
	Bad        bool `json:"bad,omitempty"`
	// Kept: it was aborted and what was changed keeps the new version.
	Kept bool `json:"kept,omitempty"`
	// Attempt numbers the campaigns. Campaign is the one that is to be made, or is being
	// made; "" when there is none. Back: it returns tenants. Drop: it is to be ended, and
	// another one goes on.
	Attempt  int        `json:"attempt,omitempty"`
	Campaign CampaignID `json:"campaign,omitempty"`
	Back     bool       `json:"back,omitempty"`
	Drop     bool       `json:"drop,omitempty"`
	// Trouble says why units are not returned yet.
	Trouble string `json:"trouble,omitempty"`
	// RetryAt is when units that could not be returned are tried again.
	RetryAt time.Time `json:"retry_at,omitzero"`
	// ResumedAt is when it was last resumed: patience begins anew.
	ResumedAt time.Time `json:"resumed_at,omitzero"`

	Actor       string    `json:"actor"`
	RunBy       string    `json:"run_by,omitempty"`
	OperationID string    `json:"operation_id,omitempty"`
	RequestID   string    `json:"request_id,omitempty"`
	CreatedAt   time.Time `json:"created_at"`
	FinishedAt  time.Time `json:"finished_at,omitzero"`
	UpdatedAt   time.Time `json:"updated_at,omitzero"`
	// Driver is the directory that drives it; "" when none does. Seq orders rollouts by
	// creation; Version counts the record's changes. Read-only.
	Driver  string `json:"driver,omitempty"`
	Seq     int64  `json:"seq"`
	Version int64  `json:"version"`

	// Now is how the window looks, BakeLeft how much of the bake time is left, and
	// Moves the campaign's progress; made when the record is read, and not stored.
	Now      *Verdict        `json:"now,omitempty"`
	BakeLeft time.Duration   `json:"bake_left,omitempty"`
	Moves    *CampaignCounts `json:"moves,omitempty"`
}

// HealthSpent is what canaries have cost.
type HealthSpent struct {
	Requests int64   `json:"requests"`
	Excess   float64 `json:"excess"`
}

// Counts sums up the waves.
func (r *Rollout) Counts() UnitCounts {
	var c UnitCounts
	for i := range r.Waves {
		c = c.Plus(r.Waves[i].Counts)
	}
	return c
}

// Current returns the present wave, or nil.
func (r *Rollout) Current() *RolloutWave {
	if r.Wave < 1 || r.Wave > len(r.Waves) {
		return nil
	}
	return &r.Waves[r.Wave-1]
}

// Cells are all cells that the rollout is about.
func (r *Rollout) Cells() []cells.CellID {
	return append(append([]cells.CellID(nil), r.Old...), r.New...)
}

// RolloutCampaign is the id of a rollout's campaign.
func RolloutCampaign(id RolloutID, attempt int) CampaignID {
	return CampaignID(fmt.Sprintf("%s-%d", id, attempt))
}

// RolloutUnit is one tenant or cell of a rollout.
type RolloutUnit struct {
	Pos  int64  `json:"pos"`
	Unit string `json:"unit"`
	Wave int    `json:"wave"`
	// Home is what it returns to: the tenant's cell, or the cell's version.
	Home   string    `json:"home"`
	State  UnitState `json:"state"`
	Reason string    `json:"reason,omitempty"`
	// At is when it got its state.
	At time.Time `json:"at,omitzero"`
}

// RolloutRequest is the body of POST PathRollouts.
type RolloutRequest struct {
	Name     string          `json:"name,omitempty"`
	Settings RolloutSettings `json:"settings"`
	// DryRun answers the waves and starts nothing.
	DryRun bool   `json:"dry_run,omitempty"`
	Actor  string `json:"actor,omitempty"`
	// OperationID makes a retry safe: the same id answers the same rollout.
	OperationID string `json:"operation_id,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *RolloutRequest) Normalize() error {
	if err := checkText("name", r.Name, MaxText); err != nil {
		return err
	}
	if err := r.Settings.Normalize(); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, r.OperationID)
}

// RolloutPlan answers a RolloutRequest: the rollout, and with DryRun its first MaxPage
// units.
type RolloutPlan struct {
	Rollout Rollout       `json:"rollout"`
	Units   []RolloutUnit `json:"units,omitempty"`
}

// RolloutOrder is the body of POST PathRollouts/{id}/pause, resume and abort.
type RolloutOrder struct {
	Actor  string `json:"actor,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Skip, with resume: the units that have failed are left as they are. Without it they
	// are tried again.
	Skip bool `json:"skip,omitempty"`
	// Keep, with abort: what was changed keeps the new version. Without it everything is
	// returned.
	Keep bool `json:"keep,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (o *RolloutOrder) Normalize() error {
	if err := checkText("reason", o.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&o.Actor, "")
}

// RolloutList answers GET PathRollouts, newest first.
type RolloutList struct {
	Rollouts []Rollout `json:"rollouts"`
	Next     int64     `json:"next,omitempty"`
}

// RolloutUnits answers GET PathRollouts/{id}/units, in order. Next is the `after` of
// the next page, 0 when this is the last.
type RolloutUnits struct {
	Units []RolloutUnit `json:"units"`
	Next  int64         `json:"next,omitempty"`
}
