// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"maps"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member/vitals"
)

// What was counted before an upgrade, and arrives behind it, is not the new version's:
// the wave bakes only when all of it must be there.
func TestUpgradeWaitsForCounts(t *testing.T) {
	w := newWorld(api.ByUpgrade, []float64{50, 100}, "c1", "c2")
	const lag = 10 * time.Minute // the world's clock goes on by ten seconds at each look
	var changed time.Time
	d := w.driver()
	d.Lag, d.Elapsed = lag, func() time.Duration { return time.Duration(w.now().Unix()) * time.Second }
	for range 500 {
		if _, err := d.Step(t.Context(), w.rec.ID); err != nil {
			t.Fatal(err)
		}
		maps.Copy(w.has, w.wished)
		if w.rec.Waves[0].Counts.Changed == 1 && changed.IsZero() {
			changed = time.Unix(1000+10*w.clock, 0)
		}
		if w.rec.State == api.RolloutBaking {
			break
		}
	}
	if w.rec.State != api.RolloutBaking || changed.IsZero() {
		t.Fatalf("%s, changed at %v", w.rec.State, changed)
	}
	if waited := w.rec.Window.Since.Sub(changed); waited < lag-time.Minute || waited > lag+time.Minute {
		t.Errorf("it bakes %v after the last change, want about %v", waited, lag)
	}
}

// A cell may take as long as was said, whatever the clock does meanwhile; one that takes
// over begins to count anew.
func TestUpgradeTimesOutBesideTheClock(t *testing.T) {
	const timeout = 10 * time.Minute
	for _, jump := range []time.Duration{0, time.Hour, -time.Hour} {
		w := newWorld(api.ByUpgrade, []float64{50, 100}, "c1", "c2")
		w.rec.Settings.ChangeTimeout = timeout
		var ran time.Duration
		offset := time.Duration(0)
		driver := func() *rollout.Driver {
			d := w.driver()
			d.Now = func() time.Time { return w.now().Add(offset) }
			d.Elapsed = func() time.Duration { return ran }
			return d
		}
		step := func(d *rollout.Driver) api.UnitState {
			t.Helper()
			if _, err := d.Step(t.Context(), w.rec.ID); err != nil {
				t.Fatal(err)
			}
			return w.units[0].State
		}
		d := driver()
		for step(d) != api.UnitChanging {
		}
		step(d)
		offset = jump
		for ; ran < timeout; ran += time.Minute {
			if s := step(d); s != api.UnitChanging {
				t.Fatalf("jump of %v: %s after %v", jump, s, ran)
			}
		}
		d = driver() // it was killed, and another takes over
		for end := ran + timeout; ran < end; ran += time.Minute {
			if s := step(d); s != api.UnitChanging {
				t.Fatalf("jump of %v: %s after %v, and a new driver", jump, s, ran)
			}
		}
		offset = 0
		if s := step(d); s != api.UnitFailed {
			t.Errorf("jump of %v: %s after %v", jump, s, ran)
		}
	}
}

// A clock that was ahead when the cell was changed does not make its wave wait.
func TestUpgradeLagBesideTheClock(t *testing.T) {
	w := newWorld(api.ByUpgrade, []float64{50, 100}, "c1", "c2")
	offset, ran := time.Hour, time.Duration(0)
	d := w.driver()
	d.Lag, d.Now, d.Elapsed = time.Second, func() time.Time { return w.now().Add(offset) }, func() time.Duration { return ran }
	for range 50 {
		if _, err := d.Step(t.Context(), w.rec.ID); err != nil {
			t.Fatal(err)
		}
		maps.Copy(w.has, w.wished)
		if w.rec.Waves[0].Counts.Changed == 1 {
			offset = 0
			ran += 100 * time.Millisecond
		}
		if w.rec.State == api.RolloutBaking {
			break
		}
	}
	if w.rec.State != api.RolloutBaking || ran < time.Second {
		t.Errorf("%s after %v", w.rec.State, ran)
	}
}

// The last wave is compared with whichever is more: what the old version is counted to
// do now, or what was counted beside the wave before.
func TestLastWaveReference(t *testing.T) {
	count := func(n int64) vitals.Counts { return vitals.Counts{Requests: n} }
	for _, x := range []struct {
		what           string
		wave           int
		state          api.RolloutState
		late, before   int64
		want           int64
		wantsReference bool
	}{
		{"late reports of the old version", 2, api.RolloutBaking, 300, 5000, 5000, true},
		{"an old version that goes on", 2, api.RolloutBaking, 6000, 5000, 6000, false},
		{"too little of both", 2, api.RolloutBaking, 50, 40, 40, true},
		{"a wave with others beside it", 1, api.RolloutBaking, 300, 5000, 300, false},
		{"a wave that is not there yet", 2, api.RolloutChanging, 300, 5000, 300, false},
	} {
		r := api.Rollout{State: x.state, Wave: x.wave, Waves: make([]api.RolloutWave, 2),
			Settings:  api.RolloutSettings{Health: api.HealthRule{MinRequests: 100, MeasuredBy: []string{api.MeasuredByEdge}}},
			Reference: &api.HealthReference{Wave: 1, Counts: map[string]vitals.Counts{api.MeasuredByEdge: count(x.before)}},
			Window:    &api.HealthWindow{Canary: []cells.CellID{"new"}, Baseline: []cells.CellID{"old"}, Mark: map[string]api.HealthPair{api.MeasuredByEdge: {}}}}
		list := rollout.Compare(&r, rollout.Totals{api.MeasuredByEdge: {"new": count(1000), "old": count(x.late)}})
		if len(list) != 1 || list[0].Baseline.Requests != x.want || (list[0].Reference != "") != x.wantsReference {
			t.Errorf("%s: %+v", x.what, list)
		}
	}
}
