// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/client"
)

// A version that fails a third of its requests is given to the first of three cells,
// found out by what the edge and the cells count, and taken back by a downgrade, with the
// directory killed on the way. Then a good one goes through all cells, with no failed
// request. Nobody loses a write.
func TestRolloutByUpgrade(t *testing.T) {
	e := start(t, fleet.Config{Store: fleet.StoreSQLite, Cells: []fleet.Cell{{Name: "cell-a"}, {Name: "cell-b"}, {Name: "cell-c"}}})
	memory := []string{filepath.Join(bin, "memory"), "--listen", "{listen}", "--store", "{store}", "--dsn", "{dsn}"}
	for name, more := range map[string][]string{"v2-bad": {"--fault-percent", "33"}, "v2": {"-v"}} {
		if _, err := e.cl.PutVersion(t.Context(), name, api.VersionRequest{Command: append(memory[:len(memory):len(memory)], more...), Actor: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	list := []string{"cell-a", "cell-b", "cell-c"}
	clients := map[string]*load.Client{}
	hammer := func(namespace string) map[string]func() load.Tally {
		out := map[string]func() load.Tally{}
		for cell, c := range clients {
			out[cell] = e.hammer(&load.Hammer{Client: c, Clients: 3, Keys: 3, Pause: 10 * time.Millisecond, Namespace: namespace})
		}
		return out
	}
	for i, cell := range list {
		clients[cell] = e.tenant(fmt.Sprintf("t%d", i), cell)
	}
	stops := hammer("bad")
	versions := func() map[string]string {
		out := map[string]string{}
		for _, cell := range list {
			p := e.provisioned(cells.CellID(cell))
			if !p.Progress.Reached {
				t.Errorf("%s: %+v", cell, p.Status)
			}
			out[cell] = p.Status.Version
		}
		return out
	}
	settings := api.RolloutSettings{Version: "v2-bad", From: "v1", By: api.ByUpgrade, Waves: []float64{30, 100}, Canary: []string{"cell-b"},
		Bake: time.Second, Patience: time.Minute, ChangeTimeout: time.Minute,
		Health: api.HealthRule{MinRequests: 50, LatencyFloor: 5 * time.Second}}
	began := time.Now()
	id := e.rollout(settings)
	e.inState(id, api.RolloutBaking, api.RolloutReturning, api.RolloutHalted)
	e.kill("directory")
	r := e.rolledOut(id, 90*time.Second)
	if r.State != api.RolloutHalted || r.Wave != 1 || r.Verdict == nil || r.Verdict.Health != api.Unhealthy || r.Waves[0].Counts.Returned != 1 || r.Waves[1].Counts.Pending != 2 {
		t.Fatalf("%s in wave %d: %s\n%+v", r.State, r.Wave, r.Reason, r.Waves)
	}
	t.Logf("halted after %v by %v", time.Since(began), r.Verdict.Reasons)
	if m := r.Verdict.Measured[0]; m.Canary.Failed == 0 || m.Canary.Rate < 0.1 || m.Baseline.Rate > 0.1 {
		t.Errorf("the numbers that decided it: %+v", m)
	}
	units, err := e.cl.RolloutUnits(t.Context(), id, client.UnitQuery{Wave: 1})
	if err != nil || len(units.Units) != 1 || units.Units[0].Unit != "cell-b" || units.Units[0].State != api.UnitReturned {
		t.Errorf("the first wave: %+v, %v", units.Units, err)
	}
	for cell, v := range versions() {
		if v != "v1" {
			t.Errorf("%s has %s", cell, v)
		}
	}
	for cell, stop := range stops {
		tally := stop()
		mustBeClean(t, cell, tally, cell == "cell-b")
		if cell == "cell-b" && tally.Failed == 0 {
			t.Error("the bad version failed nothing")
		}
	}

	// From here on nothing may fail.
	stops = hammer("good")
	settings.Version = "v2"
	began = time.Now()
	id = e.rollout(settings)
	r = e.rolledOut(id, 120*time.Second)
	if r.State != api.RolloutDone || r.Counts().Changed != 3 {
		t.Fatalf("%s in wave %d: %s\n%+v", r.State, r.Wave, r.Reason, r.Waves)
	}
	t.Logf("rolled out after %v", time.Since(began))
	if v := r.Waves[1].Verdict; v == nil || v.Health != api.Healthy || v.Measured[0].Reference == "" {
		t.Errorf("the last wave was judged %+v", v)
	}
	for cell, v := range versions() {
		if v != "v2" {
			t.Errorf("%s has %s", cell, v)
		}
	}
	for cell, stop := range stops {
		mustBeClean(t, cell, stop(), false)
	}
}
