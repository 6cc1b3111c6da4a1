// SPDX-License-Identifier: Apache-2.0

package rollout_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member/vitals"
)

func ruleOf(mod func(*api.HealthRule)) *api.HealthRule {
	r := api.HealthRule{MeasuredBy: []string{api.MeasuredByEdge}}
	if mod != nil {
		mod(&r)
	}
	if err := r.Normalize(); err != nil {
		panic(err)
	}
	return &r
}

// counts makes n requests of which some are bad; slow of the others take 300 ms, the
// rest 5 ms.
func counts(n, failed, refused, slow int64) vitals.Counts {
	c := vitals.Counts{Requests: n, Failed: failed, Refused: refused}
	var fast, late vitals.Histogram
	fast.Add(5 * time.Millisecond)
	late.Add(300 * time.Millisecond)
	for i := range c.Latency {
		c.Latency[i] = fast[i]*(n-failed-refused-slow) + late[i]*slow
	}
	return c
}

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name             string
		rule             func(*api.HealthRule)
		canary, baseline vitals.Counts
		before           api.HealthSpent
		changing         bool
		want             api.Health
		says             string
	}{
		{name: "the same", canary: counts(1000, 1, 0, 0), baseline: counts(9000, 9, 0, 0), want: api.Healthy},
		{name: "no requests at all", want: api.HealthUnknown, says: "0 requests"},
		{name: "no requests to the new version", baseline: counts(9000, 0, 0, 0), want: api.HealthUnknown},
		{name: "no requests to the old one", canary: counts(9000, 0, 0, 0), want: api.HealthUnknown},
		{name: "one too few", canary: counts(199, 0, 0, 0), baseline: counts(9000, 0, 0, 0), want: api.HealthUnknown},
		{name: "just enough", canary: counts(200, 0, 0, 0), baseline: counts(200, 0, 0, 0), want: api.Healthy},
		{name: "everything fails, too few", canary: counts(199, 199, 0, 0), baseline: counts(9000, 0, 0, 0), want: api.HealthUnknown},
		{name: "everything fails", canary: counts(200, 200, 0, 0), baseline: counts(9000, 0, 0, 0), want: api.Unhealthy, says: "errors 100.00% of 200, before 0.00%"},
		{name: "everything is refused", canary: counts(200, 0, 200, 0), baseline: counts(9000, 0, 0, 0), want: api.Unhealthy},
		{name: "everything fails on both sides", canary: counts(1000, 1000, 0, 0), baseline: counts(1000, 1000, 0, 0), want: api.HealthUnknown, says: "latencies of 0"},
		{name: "the old one is worse", canary: counts(1000, 10, 0, 0), baseline: counts(1000, 500, 0, 0), want: api.Healthy},
		{name: "significant and below the floor", canary: counts(1_000_000, 4900, 0, 0), baseline: counts(1_000_000, 0, 0, 0), want: api.Healthy},
		{name: "at the floor", canary: counts(1_000_000, 5000, 0, 0), baseline: counts(1_000_000, 0, 0, 0), want: api.Healthy},
		{name: "just above the floor", canary: counts(1_000_000, 5001, 0, 0), baseline: counts(1_000_000, 0, 0, 0), want: api.Unhealthy},
		{name: "above the floor, by chance", canary: counts(210, 3, 0, 0), baseline: counts(2000, 4, 0, 0), want: api.Healthy},
		{name: "above the floor, hardly by chance", canary: counts(200, 8, 0, 0), baseline: counts(2000, 4, 0, 0), want: api.Unhealthy},
		{name: "slow", canary: counts(1000, 0, 0, 40), baseline: counts(9000, 0, 0, 9), want: api.Unhealthy, says: "took longer"},
		{name: "slow on both sides", canary: counts(1000, 0, 0, 40), baseline: counts(9000, 0, 0, 360), want: api.Healthy},
		{name: "a few slow ones", canary: counts(1000, 0, 0, 12), baseline: counts(9000, 0, 0, 9), want: api.Healthy},
		{name: "slow while it changes", canary: counts(1000, 0, 0, 40), baseline: counts(9000, 0, 0, 9), changing: true, want: api.HealthUnknown, says: "under way"},
		{name: "errors while it changes", canary: counts(1000, 100, 0, 0), baseline: counts(9000, 9, 0, 0), changing: true, want: api.Unhealthy},
		{name: "slow, and nobody looks", rule: func(r *api.HealthRule) { r.LatencyRatio = -1 }, canary: counts(1000, 0, 0, 40), baseline: counts(9000, 0, 0, 9), want: api.Healthy},
		{name: "only streams", canary: vitals.Counts{Requests: 1000}, baseline: vitals.Counts{Requests: 1000}, want: api.HealthUnknown, says: "latencies"},
		{name: "only streams, and nobody looks", rule: func(r *api.HealthRule) { r.LatencyRatio = -1 }, canary: vitals.Counts{Requests: 1000}, baseline: vitals.Counts{Requests: 1000}, want: api.Healthy},
		{name: "the budget is kept", rule: func(r *api.HealthRule) { r.Budget = "5" }, canary: counts(1000, 5, 0, 0), baseline: counts(9000, 0, 0, 0), want: api.Healthy},
		{name: "the budget is used up", rule: func(r *api.HealthRule) { r.Budget = "5" }, canary: counts(1000, 6, 0, 0), baseline: counts(9000, 0, 0, 0), want: api.Unhealthy, says: "error budget of 5"},
		{name: "the budget is used up, whatever the sample", rule: func(r *api.HealthRule) { r.Budget = "5" }, canary: counts(10, 6, 0, 0), want: api.Unhealthy},
		{name: "by all waves together", rule: func(r *api.HealthRule) { r.Budget = "5" }, canary: counts(1000, 3, 0, 0), baseline: counts(9000, 0, 0, 0), before: api.HealthSpent{Requests: 1000, Excess: 3}, want: api.Unhealthy},
		{name: "a share is of no fewer than are needed", rule: func(r *api.HealthRule) { r.Budget = "1%" }, canary: counts(10, 2, 0, 0), want: api.HealthUnknown},
		{name: "what the old one fails too costs nothing", rule: func(r *api.HealthRule) { r.Budget = "5" }, canary: counts(1000, 100, 0, 0), baseline: counts(9000, 900, 0, 0), want: api.Healthy},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := time.Unix(1000, 0)
			v := rollout.Judge(ruleOf(c.rule), []rollout.Comparison{{By: api.MeasuredByEdge, Canary: c.canary, Baseline: c.baseline, Before: c.before}}, at, at, c.changing)
			if v.Health != c.want || len(v.Measured) != 1 || v.Measured[0].Health != c.want || len(v.Reasons) == 0 || !strings.Contains(strings.Join(v.Reasons, "; "), c.says) {
				t.Errorf("%s: %+v", v.Health, v)
			}
		})
	}
}

// Each of those who measure is judged: one of them is enough for bad health, none may
// be missing for good.
func TestJudgeBoth(t *testing.T) {
	rule := ruleOf(func(r *api.HealthRule) { r.MeasuredBy = nil })
	good := rollout.Comparison{Canary: counts(1000, 0, 0, 0), Baseline: counts(1000, 0, 0, 0)}
	bad := rollout.Comparison{Canary: counts(1000, 400, 0, 0), Baseline: counts(1000, 0, 0, 0)}
	by := func(c rollout.Comparison, who string) rollout.Comparison { c.By = who; return c }
	at := time.Unix(1000, 0)
	for _, c := range []struct {
		list []rollout.Comparison
		want api.Health
	}{
		{[]rollout.Comparison{by(good, "edge"), by(good, "cell")}, api.Healthy},
		{[]rollout.Comparison{by(good, "edge"), by(bad, "cell")}, api.Unhealthy},
		{[]rollout.Comparison{by(bad, "edge"), by(good, "cell")}, api.Unhealthy},
		{[]rollout.Comparison{by(good, "edge")}, api.HealthUnknown},
		{[]rollout.Comparison{by(bad, "cell")}, api.Unhealthy},
		{[]rollout.Comparison{by(good, "edge"), by(rollout.Comparison{}, "cell")}, api.HealthUnknown},
		{nil, api.HealthUnknown},
	} {
		if v := rollout.Judge(rule, c.list, at, at, false); v.Health != c.want {
			t.Errorf("%+v: want %s", v, c.want)
		}
	}
}

func TestJudgeProperties(t *testing.T) {
	side := rapid.Custom(func(t *rapid.T) vitals.Counts {
		n := rapid.Int64Range(0, 5000).Draw(t, "n")
		failed := rapid.Int64Range(0, n).Draw(t, "failed")
		refused := rapid.Int64Range(0, n-failed).Draw(t, "refused")
		return counts(n, failed, refused, rapid.Int64Range(0, n-failed-refused).Draw(t, "slow"))
	})
	at := time.Unix(1000, 0)
	judge := func(rule *api.HealthRule, canary, baseline vitals.Counts) api.Verdict {
		return rollout.Judge(rule, []rollout.Comparison{{By: api.MeasuredByEdge, Canary: canary, Baseline: baseline}}, at, at, false)
	}
	order := map[api.Health]int{api.Healthy: 0, api.HealthUnknown: 1, api.Unhealthy: 2}
	rapid.Check(t, func(t *rapid.T) {
		rule := ruleOf(func(r *api.HealthRule) { r.Budget = rapid.SampledFrom([]string{"none", "50", "1%"}).Draw(t, "budget") })
		a, b := side.Draw(t, "canary"), side.Draw(t, "baseline")
		v := judge(rule, a, b)
		if (a.Requests < rule.MinRequests || b.Requests < rule.MinRequests) && v.Health == api.Healthy {
			t.Fatalf("healthy by %d and %d requests", a.Requests, b.Requests)
		}
		if same := judge(rule, b, b); same.Health == api.Unhealthy {
			t.Fatalf("worse than itself: %+v", same)
		}
		if m := v.Measured[0]; math.IsNaN(m.ErrorSigma) || math.IsNaN(m.LatencySigma) || math.IsNaN(m.Excess) || m.Excess < 0 {
			t.Fatalf("%+v", m)
		}
		// A request that fails in place of one that was answered makes nothing better.
		worse := a
		for i := range worse.Latency {
			if worse.Latency[i] > 0 {
				worse.Latency[i]--
				worse.Failed++
				break
			}
		}
		if w := judge(rule, worse, b); order[w.Health] < order[v.Health] && !latencyOnly(v) {
			t.Fatalf("%s became %s by a failure: %v", v.Health, w.Health, w.Reasons)
		}
		// What comes back from both sides at once tells no more than its shares.
		if v.Health == api.Healthy && judge(rule, a, a).Health != api.Healthy {
			t.Fatalf("healthy beside another, and not beside itself")
		}
	})
}

// latencyOnly reports whether only latency was found to be bad, or missing: a request
// that fails has none, so that there are fewer slow ones.
func latencyOnly(v api.Verdict) bool {
	for _, r := range v.Reasons {
		if strings.Contains(r, "99th percentile") || strings.Contains(r, "latencies") {
			return true
		}
	}
	return false
}

func TestHealthRuleRefuses(t *testing.T) {
	for _, r := range []api.HealthRule{
		{MinRequests: 9}, {ErrorFloor: -1}, {ErrorFloor: 1}, {ErrorFloor: math.NaN()}, {Sigma: 0.5}, {Sigma: 11}, {LatencyRatio: 0.5}, {LatencyRatio: math.Inf(1)},
		{LatencyFloor: -1}, {Budget: "x"}, {Budget: "0"}, {Budget: "101%"}, {Budget: "-1"}, {MeasuredBy: []string{"x"}}, {MeasuredBy: []string{"edge", "edge"}},
	} {
		if err := r.Normalize(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}
