// SPDX-License-Identifier: Apache-2.0

package directory_test

import (
	"testing"
	"time"

	"github.com/cloister-dev/cloister/directory/api"
)

// tracedRollouts makes a rollout that gets to its end and one that is aborted after
// its first wave, and returns the lines of the trace.
func tracedRollouts(t *testing.T) []map[string]any {
	t.Helper()
	s := newState(t)
	d := s.start(t, nil)
	d.cell("a", api.CellSpec{Version: "v1"})
	d.cell("b", api.CellSpec{Version: "v2"})
	d.cell("c", api.CellSpec{Version: "v3"})
	d.crowd("a", 0, 2)
	s.traffic(t, "", "a", "b", "c")
	set := api.RolloutSettings{Version: "v2", From: "v1", By: api.ByMove, Waves: []float64{50, 100}, Bake: 100 * time.Millisecond, Patience: time.Minute}
	if r := d.untilRollout(d.rollout(set), "the rollout ends", over); r.State != api.RolloutDone {
		t.Fatalf("%s: %s", r.State, r.Reason)
	}
	set.Version, set.From, set.Bake = "v3", "v2", time.Hour
	id := d.rollout(set)
	d.untilRollout(id, "the wave bakes", func(r *api.Rollout) bool { return r.State == api.RolloutBaking })
	if _, err := d.cl.AbortRollout(ctxOf(t), id, api.RolloutOrder{Actor: "bob"}); err != nil {
		t.Fatal(err)
	}
	if r := d.untilRollout(id, "the rollout ends", over); r.State != api.RolloutAborted || r.Waves[0].Counts.Returned != 1 {
		t.Fatalf("%s: %+v", r.State, r.Waves)
	}
	rep, err := s.traced()
	if err != nil {
		t.Fatal(err)
	}
	for action, want := range map[string]int{"start": 2, "open": 4, "closed": 4, "settled": 3, "judged": 2, "abort": 1, "returned": 1} {
		if rep.RolloutActions[action] != want {
			t.Errorf("%d of %s, want %d", rep.RolloutActions[action], action, want)
		}
	}
	if rep.Rollouts != 2 || rep.RolloutGaps != 0 || rep.RolloutActions["taken"] < 2 || rep.RolloutActions["units"] == 0 || rep.Campaigns != 4 {
		t.Errorf("%+v", rep)
	}
	return s.lines(t)
}

// A trace of rollouts that is changed is noticed.
func TestRolloutTraceMutations(t *testing.T) {
	whole := tracedRollouts(t)
	nth := func(action string, n int) int {
		for i, l := range whole {
			if l["rollout_action"] != action {
				continue
			}
			if n--; n == 0 {
				return i
			}
		}
		t.Fatalf("no %s", action)
		return 0
	}
	// alter changes a field of the record before or after a line's change.
	alter := func(i int, mark, field string, v any) func([]map[string]any) []map[string]any {
		return func(ls []map[string]any) []map[string]any {
			ls[i][mark].(map[string]any)[field] = v
			return ls
		}
	}
	line := func(i int, field string, v any) func([]map[string]any) []map[string]any {
		return func(ls []map[string]any) []map[string]any {
			ls[i][field] = v
			return ls
		}
	}
	// without leaves of lines that they were there.
	without := func(is ...int) func([]map[string]any) []map[string]any {
		return func(ls []map[string]any) []map[string]any {
			for _, i := range is {
				ls[i] = map[string]any{"rollout": ls[i]["rollout"], "rollout_action": "units"}
			}
			return ls
		}
	}
	const before, after = "rollout_before", "rollout_after"
	done := nth("judged", 2)
	campaign := whole[nth("open", 1)][after].(map[string]any)["campaign"]
	mutations(t, whole, map[string]mutation{
		"an event that does not fit":          {"by settled", line(nth("judged", 1), "rollout_action", "settled")},
		"a state that nothing leads to":       {"by Other", line(nth("judged", 1), "rollout_action", "Other")},
		"a wave that is left out":             {"from wave 1 to 3", alter(nth("judged", 1), after, "wave", 3)},
		"more waves than there are":           {"in wave 2 of 1", alter(nth("judged", 1), after, "waves", 1)},
		"through before it is":                {"is through with", alter(nth("settled", 1), before, "current", map[string]int{"total": 1, "changing": 1})},
		"done with units behind":              {"it is DONE in wave 2", alter(done, before, "counts", map[string]int{"total": 2, "failed": 1, "changed": 1})},
		"done in the first wave":              {"it is DONE in wave 1", alter(done, before, "wave", 1)},
		"returned while something returns":    {"it is ABORTED with", alter(nth("returned", 1), before, "counts", map[string]int{"total": 2, "returning": 1})},
		"halted without bad health":           {"was not found to be worse", alter(nth("returned", 1), after, "state", "HALTED")},
		"a change of one that is over":        {"it is DONE", alter(done, before, "state", "DONE")},
		"driven by somebody else":             {"the driver is", line(nth("open", 1), "by", "d2/X")},
		"a campaign while there is one":       {"was opened as attempt", alter(nth("open", 1), before, "campaign", "x-1")},
		"the same number again":               {"was opened as attempt", alter(nth("open", 1), before, "attempt", 1)},
		"begun while it is paused":            {"nothing is to be begun", alter(nth("open", 2), before, "paused", true)},
		"back in a wave that changes":         {"back: true", alter(nth("open", 1), after, "back", true)},
		"closed without one":                  {"was closed, ", alter(nth("closed", 1), before, "campaign", "")},
		"a campaign that comes with no event": {"makes campaign", alter(nth("settled", 1), after, "campaign", "x-1")},
		"two transactions of one version":     {"written twice", line(nth("settled", 1), "rollout_version", whole[nth("closed", 1)]["rollout_version"])},
		"another state than it was left in":   {"finds", alter(nth("judged", 1), before, "bad", true)},
		"made and never opened":               {"never opened", without(nth("open", 1))},
		"closed before it is over": {"is not over", func(ls []map[string]any) []map[string]any {
			var out []map[string]any
			for _, l := range ls {
				if l["campaign"] == campaign && l["rollout"] == nil && l["action"] == "Finish" && l["to"] == "DONE" {
					continue
				}
				out = append(out, l)
			}
			return out
		}},
	})
}
