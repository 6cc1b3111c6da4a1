// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"path/filepath"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// The operations of rollouts by upgrade: cell-a is the first wave, cell-b the last, and
// another tenant is in use in a cell that has nothing to do with them. No tenant moves;
// one has arrived when its cell has the new version. The versions are v1 and v2, in turns.
var (
	upgradeForward = &operation{
		name: "rollout-upgrade", title: "A rollout by upgrade, in two waves", upgrades: true,
		tenants: 2, homes: []cells.CellID{"cell-a", "cell-b"}, cells: upgradeCells, others: []cells.CellID{"cell-c"},
		actions: []string{"rollout " + rollout.StepTaken, "rollout " + rollout.StepUnits, "rollout " + string(rollout.Settled), "rollout " + string(rollout.Judged)},
		steps: []cells.Step{rolloutStep(rollout.StepTaken), rolloutStep(rollout.StepUnits), rolloutStep(rollout.StepOrdered),
			rolloutStep(rollout.Settled), rolloutStep(rollout.Judged)},
		ready:   func(r *run) { r.pickVersions() },
		ask:     func(r *run) { r.startUpgrade(300 * time.Millisecond) },
		settle:  settleUpgrade,
		reached: hasNewVersion,
		after:   evenVersions,
	}
	upgradeReturn = &operation{
		name: "return-upgrade", title: "The return of the first wave of a rollout by upgrade", upgrades: true, rare: true,
		tenants: 2, homes: []cells.CellID{"cell-a", "cell-b"}, stays: true, cells: upgradeCells, others: []cells.CellID{"cell-c"},
		actions: []string{"rollout " + string(rollout.Abort), "rollout " + string(rollout.Returned)},
		steps:   []cells.Step{rolloutStep(rollout.StepUnits), rolloutStep(rollout.StepOrdered), rolloutStep(rollout.Returned)},
		ready: func(r *run) {
			r.pickVersions()
			r.startUpgrade(time.Hour)
			r.inState(r.rollout, api.RolloutBaking)
		},
		ask: func(r *run) {
			r.orderRollout("aborted", func() (api.Rollout, error) {
				return r.cl.AbortRollout(r.t.Context(), r.rollout, api.RolloutOrder{Actor: "test"})
			})
		},
		settle:  settleUpgrade,
		reached: hasNewVersion,
		after:   evenVersions,
	}
)

var upgradeCells = []fleet.Cell{{Name: "cell-a", Version: "v1"}, {Name: "cell-b", Version: "v1"}, {Name: "cell-c", Version: "v3"}}

// upgraded are the cells of a rollout by upgrade.
var upgraded = []cells.CellID{"cell-a", "cell-b"}

// versionOf waits until the cell is as it should be, and returns its version.
func (r *run) versionOf(cell cells.CellID) (version string) {
	r.t.Helper()
	r.eventually(string(cell)+" is as it should be", 90*time.Second, func() bool {
		p, err := r.cl.ProvisionedCell(r.t.Context(), cell, false)
		version = p.Status.Version
		return err == nil && p.Progress.Reached
	})
	return version
}

// pickVersions has the run go from the version that the cells have to the other one.
func (r *run) pickVersions() {
	r.t.Helper()
	memory := []string{filepath.Join(bin, "memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}", "-v"}
	r.eventually("the other version is known", 20*time.Second, func() bool {
		_, err := r.cl.PutVersion(r.t.Context(), "v2", api.VersionRequest{Command: memory, Actor: "test", Replace: true})
		return err == nil
	})
	r.from, r.to = "v1", "v2"
	if r.versionOf("cell-a") == "v2" {
		r.from, r.to = r.to, r.from
	}
}

// startUpgrade starts a rollout of both cells.
func (r *run) startUpgrade(bake time.Duration) {
	r.t.Helper()
	set := api.RolloutSettings{Version: r.to, From: r.from, By: api.ByUpgrade, Waves: []float64{50, 100}, Canary: []string{"cell-a"},
		Bake: bake, Patience: time.Minute, ChangeTimeout: 20 * time.Second, Health: api.HealthRule{MinRequests: 10, LatencyRatio: -1}}
	r.askRollout(set)
}

func hasNewVersion(r *run, cell cells.CellID) bool { return r.versionOf(cell) == r.to }

// settleUpgrade waits for the end of the run's rollout. Its units must say which version
// the cells have.
func settleUpgrade(r *run) map[string]bool {
	units, _ := r.rolloutOver(4*time.Minute, len(upgraded))
	changed := map[cells.CellID]bool{}
	for _, u := range units {
		changed[cells.CellID(u.Unit)] = u.State == api.UnitChanged
		if v := r.versionOf(cells.CellID(u.Unit)); (v == r.to) != changed[cells.CellID(u.Unit)] || v != r.from && v != r.to {
			r.t.Errorf("%s is %s and has version %q; it was to get %s", u.Unit, u.State, v, r.to)
		}
	}
	out := map[string]bool{}
	for i, name := range r.names {
		out[name] = changed[r.op.homeOf(i)]
	}
	return out
}

// evenVersions gives both cells the same version: the next rollout is of both.
func evenVersions(r *run, _ map[string]cells.CellID) {
	want := r.versionOf("cell-a")
	for _, cell := range upgraded {
		if r.versionOf(cell) == want {
			continue
		}
		if _, err := r.cl.UpgradeCell(r.t.Context(), cell, api.UpgradeRequest{Version: want, Actor: "test"}); err != nil {
			r.t.Fatal(err)
		}
		if v := r.versionOf(cell); v != want {
			r.t.Errorf("%s has version %s", cell, v)
		}
	}
}
