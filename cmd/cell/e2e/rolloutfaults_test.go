// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// The operations of rollouts. All tenants of cell-a take part, so that others are in
// use in cell-b and in a cell that has nothing to do with it.
var (
	rolloutForward = &operation{
		name: "rollout", title: "A rollout by move, in two waves", tenants: 2, home: "cell-a",
		cells: rolloutCells, others: []cells.CellID{"cell-b", "cell-c"},
		actions: []string{"rollout " + rollout.StepTaken, "rollout " + string(rollout.Open), "rollout " + string(rollout.Closed), "rollout " + string(rollout.Settled), "rollout " + string(rollout.Judged)},
		steps: []cells.Step{rolloutStep(rollout.StepTaken), rolloutStep(rollout.StepUnits), rolloutStep(rollout.Open), rolloutStep(rollout.StepCreated), rolloutStep(rollout.StepRun),
			rolloutHeld, rolloutStep(rollout.Closed), rolloutStep(rollout.Settled), rolloutStep(rollout.Judged)},
		ask: func(r *run) {
			r.startRollout(300 * time.Millisecond)
			if r.step == rolloutHeld {
				r.underWay()
				r.orderRollout("paused", func() (api.Rollout, error) {
					return r.cl.PauseRollout(r.t.Context(), r.rollout, api.RolloutOrder{Actor: "test"})
				})
				r.haltAt(r.step, campaignBegun)
			}
		},
		settle: settleRollout,
		after:  leaveSource,
	}
	rolloutReturn = &operation{
		name: "return", title: "The return of a rollout's first wave", tenants: 2, home: "cell-a", stays: true,
		cells: rolloutCells, others: []cells.CellID{"cell-b", "cell-c"},
		actions: []string{"rollout " + string(rollout.Abort), "rollout " + string(rollout.Returned)},
		steps: []cells.Step{rolloutEnded, rolloutStep(rollout.StepUnits), rolloutStep(rollout.Open), rolloutStep(rollout.StepCreated), rolloutStep(rollout.StepRun),
			rolloutStep(rollout.Closed), rolloutStep(rollout.Returned)},
		ready: func(r *run) {
			if r.step == rolloutEnded {
				return
			}
			r.startRollout(time.Hour)
			r.inState(r.rollout, api.RolloutBaking)
		},
		ask: func(r *run) {
			if r.step == rolloutEnded {
				r.startRollout(time.Hour)
				r.underWay()
			}
			r.orderRollout("aborted", func() (api.Rollout, error) {
				return r.cl.AbortRollout(r.t.Context(), r.rollout, api.RolloutOrder{Actor: "test"})
			})
			if r.step == rolloutEnded {
				r.haltAt(r.step, campaignBegun)
			}
		},
		settle: settleRollout,
		after:  leaveSource,
	}
)

var rolloutCells = []fleet.Cell{{Name: "cell-a", Version: "v1"}, {Name: "cell-b", Version: "v2"}, {Name: "cell-c", Version: "v3"}}

func rolloutStep[S ~string](s S) cells.Step { return cells.Step("rollout-" + string(s)) }

const (
	// rolloutHeld and rolloutEnded follow an operator's order while tenants are moved.
	rolloutHeld  cells.Step = "rollout-" + rollout.StepHeld
	rolloutEnded cells.Step = "rollout-" + rollout.StepEnded

	campaignBegun cells.Step = "campaign-begin"
)

// startRollout starts one of version v2 over the run's tenants, whose return undoes
// what can be undone.
func (r *run) startRollout(bake time.Duration) {
	r.t.Helper()
	set := api.RolloutSettings{Version: "v2", From: "v1", By: api.ByMove, Waves: []float64{50, 100}, Canary: r.names[:1], Bake: bake, Patience: time.Minute, Force: true, UndoWindow: "0s",
		Health: api.HealthRule{MinRequests: 10, LatencyRatio: -1}}
	if r.op.stays {
		set.UndoWindow = "1h"
	}
	if r.step == rolloutHeld || r.step == rolloutEnded {
		r.haltAt(rolloutStep(rollout.StepRun), campaignBegun)
	}
	started := r.askRollout(set)
	if n := started.Counts().Total; n != int64(len(r.names)) {
		r.t.Fatalf("a rollout of %d tenants", n)
	}
}

// askRollout starts a rollout, which is the run's from then on.
func (r *run) askRollout(set api.RolloutSettings) (started api.Rollout) {
	r.t.Helper()
	r.eventually("the rollout is started", 20*time.Second, func() bool {
		out, err := r.cl.StartRollout(r.t.Context(), api.RolloutRequest{Settings: set, Actor: "test", OperationID: r.id})
		if a := cells.AnswerOf(err); a != nil && !a.Code.Retry() {
			r.t.Fatalf("rollout: %v", err)
		}
		started, r.rollout = out.Rollout, out.Rollout.ID
		return err == nil
	})
	return started
}

// underWay waits until the directory stands still with the first move begun and the
// rollout's driver behind the start of its campaign.
func (r *run) underWay() {
	r.t.Helper()
	r.waitHalted()
	r.eventually("the first move is begun", 30*time.Second, func() bool {
		ro, err := r.cl.Rollout(r.t.Context(), r.rollout)
		return err == nil && ro.Moves != nil && ro.Moves.Running > 0
	})
}

func (r *run) orderRollout(what string, order func() (api.Rollout, error)) {
	r.t.Helper()
	r.eventually("the rollout is "+what, 20*time.Second, func() bool {
		_, err := order()
		return err == nil
	})
}

// settleRollout waits for the end of the run's rollout. Its units must say where its
// tenants are, and no move may be left.
func settleRollout(r *run) map[string]bool {
	t := r.t
	units, stopped := r.rolloutOver(90*time.Second, len(r.names))
	if r.step == rolloutHeld && stopped == 0 {
		t.Error("the rollout has not stopped")
	}
	out := map[string]bool{}
	for _, u := range units {
		out[u.Unit] = u.State == api.UnitChanged
		r.eventually("no move of "+u.Unit+" is left", 60*time.Second, func() bool {
			list, err := r.cl.Moves(t.Context(), client.MoveQuery{Tenant: cells.TenantID(u.Unit)})
			return err == nil && !slices.ContainsFunc(list.Moves, func(m api.Move) bool { return !m.State.Final() || len(m.Residue) > 0 })
		})
	}
	return out
}

// rolloutOver waits for the end of the run's rollout, and resumes it whenever it has
// stopped. It must have so many units, in states that fit its end, and they are returned,
// with how often it was resumed.
func (r *run) rolloutOver(patience time.Duration, want int) (_ []api.RolloutUnit, stopped int) {
	r.t.Helper()
	t := r.t
	var ro api.Rollout
	r.eventually("the rollout is over", patience, func() bool {
		got, err := r.cl.Rollout(t.Context(), r.rollout)
		if err != nil {
			return false
		}
		if ro = got; ro.Paused {
			if _, err := r.cl.ResumeRollout(t.Context(), r.rollout, api.RolloutOrder{Actor: "test"}); err == nil {
				stopped++
				t.Logf("stopped: %s", ro.Reason)
			}
		}
		return ro.State.Final()
	})
	ends := []api.RolloutState{api.RolloutDone, api.RolloutHalted}
	if r.op.stays {
		ends = []api.RolloutState{api.RolloutAborted}
	}
	if !slices.Contains(ends, ro.State) {
		t.Errorf("the rollout is %s: %s", ro.State, ro.Reason)
	}
	units, err := r.cl.RolloutUnits(t.Context(), r.rollout, client.UnitQuery{Limit: 100})
	if err != nil || len(units.Units) != want {
		t.Fatalf("units %+v, %v", units, err)
	}
	for _, u := range units.Units {
		may := []api.UnitState{api.UnitPending, api.UnitReturned}
		if ro.State == api.RolloutDone || ro.State == api.RolloutHalted && u.Wave < ro.ReturnFrom {
			may = []api.UnitState{api.UnitChanged}
		}
		if !slices.Contains(may, u.State) {
			t.Errorf("%s of wave %d is %s in a rollout that is %s from wave %d: %s", u.Unit, u.Wave, u.State, ro.State, ro.ReturnFrom, u.Reason)
		}
	}
	if stopped > 0 || ro.State == api.RolloutHalted {
		t.Logf("%s, stopped %d times: %s", ro.State, stopped, ro.Reason)
	}
	return units.Units, stopped
}

// leaveSource brings what has ended in cell-a to another cell: the next rollout is of
// that one's tenants alone.
func leaveSource(r *run, owners map[string]cells.CellID) {
	for _, name := range r.names {
		if owners[name] != "cell-a" {
			continue
		}
		if m := r.env.settle(r.startMove(name, "cell-c", r.id+"-leaves-"+name).ID); m.State != api.MoveDone {
			r.t.Errorf("%s stays in cell-a: %s", name, m.Reason)
		}
		owners[name] = r.cellOf(name)
	}
}
