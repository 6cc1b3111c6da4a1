// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// rolledOut waits until a rollout is over, or stands still.
func (e *env) rolledOut(id api.RolloutID, within time.Duration) api.Rollout {
	e.t.Helper()
	var last api.Rollout
	e.eventually("rollout "+string(id)+" ends", within, func() bool {
		r, err := e.cl.Rollout(e.t.Context(), id)
		if err == nil {
			last = r
		}
		return err == nil && (r.State.Final() || r.Paused)
	})
	return last
}

// inState waits until a rollout is in one of the states.
func (e *env) inState(id api.RolloutID, states ...api.RolloutState) {
	e.t.Helper()
	e.eventually(fmt.Sprintf("rollout is %v", states), 60*time.Second, func() bool {
		r, err := e.cl.Rollout(e.t.Context(), id)
		return err == nil && slices.Contains(states, r.State)
	})
}

func (e *env) rollout(set api.RolloutSettings) api.RolloutID {
	e.t.Helper()
	out, err := e.cl.StartRollout(e.t.Context(), api.RolloutRequest{Settings: set, Actor: "test"})
	if err != nil {
		e.t.Fatal(err)
	}
	return out.Rollout.ID
}

// A version that fails a third of its requests is rolled out to the first tenants,
// found out by what the edge and the cells count, and taken back, with the directory
// killed while it bakes and while it returns. Then a good one goes all the way. Nobody
// loses a write.
func TestRolloutByMove(t *testing.T) {
	service := func(more ...string) fleet.Service {
		return fleet.Service{Command: append([]string{filepath.Join(bin, "memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}"}, more...)}
	}
	e := start(t, fleet.Config{Store: fleet.StoreSQLite, Cells: []fleet.Cell{
		{Name: "cell-a", Version: "v1"}, {Name: "cell-bad", Version: "v2-bad", Service: service("--fault-percent", "33")}, {Name: "cell-good", Version: "v2"},
	}})
	const tenants = 6
	var stops []func() load.Tally
	for i := range tenants {
		c := e.tenant(fmt.Sprintf("t%d", i), "cell-a")
		stops = append(stops, e.hammer(&load.Hammer{Client: c, Clients: 2, Keys: 3, Pause: 10 * time.Millisecond}))
	}
	settings := api.RolloutSettings{Version: "v2-bad", From: "v1", By: api.ByMove, Waves: []float64{30, 100}, Canary: []string{"t3"},
		Bake: 2 * time.Second, Patience: time.Minute, Force: true,
		Health: api.HealthRule{MinRequests: 100, LatencyFloor: 5 * time.Second}}
	dry, err := e.cl.StartRollout(t.Context(), api.RolloutRequest{Settings: settings, DryRun: true})
	if err != nil || len(dry.Units) != tenants || dry.Units[0].Unit != "t3" || dry.Rollout.Waves[0].Counts.Total != 2 {
		t.Fatalf("dry run %+v, %v", dry, err)
	}
	id := e.rollout(settings)
	if _, err := e.cl.StartRollout(t.Context(), api.RolloutRequest{Settings: settings}); err == nil {
		t.Error("a second rollout over the same cells is started")
	}
	e.inState(id, api.RolloutBaking, api.RolloutReturning, api.RolloutHalted)
	e.kill("directory")
	e.inState(id, api.RolloutReturning, api.RolloutHalted)
	e.kill("directory")
	r := e.rolledOut(id, 90*time.Second)
	if r.State != api.RolloutHalted || r.Wave != 1 || r.Verdict == nil || r.Verdict.Health != api.Unhealthy || r.Waves[0].Counts.Returned != 2 || r.Waves[1].Counts.Pending != 4 {
		t.Fatalf("%s in wave %d: %s\n%+v", r.State, r.Wave, r.Reason, r.Waves)
	}
	m := r.Verdict.Measured[0]
	t.Logf("halted by %v", r.Verdict.Reasons)
	if m.Canary.Failed == 0 || m.Canary.Rate < 0.1 || m.Baseline.Rate > 0.1 {
		t.Errorf("the numbers that decided it: %+v", m)
	}
	units, err := e.cl.RolloutUnits(t.Context(), id, client.UnitQuery{Wave: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range units.Units {
		moves, err := e.cl.Moves(t.Context(), client.MoveQuery{})
		if err != nil {
			t.Fatal(err)
		}
		undone := slices.ContainsFunc(moves.Moves, func(m api.Move) bool { return string(m.Tenant) == u.Unit && m.Undoes != "" })
		if u.State != api.UnitReturned || !undone {
			t.Errorf("%s is %s, undone: %v", u.Unit, u.State, undone)
		}
	}
	for i := range tenants {
		if at := e.cellOf(fmt.Sprintf("t%d", i)); at != "cell-a" {
			t.Errorf("t%d is in %s", i, at)
		}
	}

	settings.Version = "v2"
	id = e.rollout(settings)
	e.inState(id, api.RolloutBaking, api.RolloutDone)
	e.kill("directory")
	r = e.rolledOut(id, 120*time.Second)
	if r.State != api.RolloutDone || r.Counts().Changed != tenants {
		t.Fatalf("%s in wave %d: %s\n%+v", r.State, r.Wave, r.Reason, r.Waves)
	}
	if v := r.Waves[1].Verdict; v == nil || v.Health != api.Healthy || v.Measured[0].Reference == "" {
		t.Errorf("the last wave was judged %+v", v)
	}
	for i, stop := range stops {
		mustBeClean(t, fmt.Sprintf("t%d", i), stop(), true)
		if at := e.cellOf(fmt.Sprintf("t%d", i)); at != "cell-good" {
			t.Errorf("t%d is in %s", i, at)
		}
	}
}

// A version that only answers late is found out, too, and taken back.
func TestRolloutOfSlowVersion(t *testing.T) {
	slow := fleet.Service{Command: []string{filepath.Join(bin, "memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}", "--fault-delay", "500ms"}}
	e := start(t, fleet.Config{Store: fleet.StoreSQLite, Cells: []fleet.Cell{{Name: "cell-a", Version: "v1"}, {Name: "cell-slow", Version: "v2", Service: slow}}})
	var stops []func() load.Tally
	for i := range 2 {
		c := e.tenant(fmt.Sprintf("t%d", i), "cell-a")
		stops = append(stops, e.hammer(&load.Hammer{Client: c, Clients: 12, Keys: 12, Pause: 50 * time.Millisecond}))
	}
	id := e.rollout(api.RolloutSettings{Version: "v2", By: api.ByMove, Waves: []float64{50, 100}, Canary: []string{"t1"}, Bake: 2 * time.Second, Patience: time.Minute,
		Force: true, Health: api.HealthRule{MinRequests: 30, LatencyFloor: 100 * time.Millisecond, ErrorFloor: 0.5}})
	r := e.rolledOut(id, 60*time.Second)
	if r.State != api.RolloutHalted || r.Wave != 1 || r.Verdict == nil || r.Verdict.Health != api.Unhealthy || r.Waves[0].Counts.Returned != 1 {
		t.Fatalf("%s in wave %d: %s\n%+v", r.State, r.Wave, r.Reason, r.Waves)
	}
	t.Logf("halted by %v", r.Verdict.Reasons)
	bad := slices.ContainsFunc(r.Verdict.Measured, func(m api.HealthMeasure) bool {
		return m.Health == api.Unhealthy && m.Canary.P99 > m.LatencyLimit && m.Slow > 0 && m.Canary.Failed == 0
	})
	if !bad {
		t.Errorf("the numbers that decided it: %+v", r.Verdict.Measured)
	}
	for i, stop := range stops {
		mustBeClean(t, fmt.Sprintf("t%d", i), stop(), false)
		if at := e.cellOf(fmt.Sprintf("t%d", i)); at != "cell-a" {
			t.Errorf("t%d is in %s", i, at)
		}
	}
}
