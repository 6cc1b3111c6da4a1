// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member/vitals"
)

// Comparison is what one of those who measure counted of both sides.
type Comparison struct {
	By               string
	Canary, Baseline vitals.Counts
	// Reference says of which time the baseline is when it is not of the same; "".
	Reference string
	// Before is what the waves before have cost.
	Before api.HealthSpent
}

// slowShare is the share of requests that lie above the 99th percentile.
const slowShare = 0.01

// Judge applies the rule to what was counted since a moment. It is pure. The rule is
// normalised. With errorsOnly latency is not looked at, and nothing is found to be
// healthy: for times in which the change itself is under way.
//
// What was not measured, or too little, is never healthy: every one that the rule
// names must have a comparison with MinRequests on both sides, and as many latencies.
// Bad health is found as soon as one of them shows it.
func Judge(rule *api.HealthRule, list []Comparison, since, at time.Time, errorsOnly bool) api.Verdict {
	v := api.Verdict{Health: api.Healthy, At: at, Since: since, Measured: []api.HealthMeasure{}}
	var bad, missing, good []string
	for _, by := range rule.MeasuredBy {
		i := slices.IndexFunc(list, func(c Comparison) bool { return c.By == by })
		if i < 0 {
			missing = append(missing, fmt.Sprintf("%s: nothing was measured", by))
			continue
		}
		m, b, u, g := judge(rule, &list[i], errorsOnly)
		v.Measured = append(v.Measured, m)
		bad, missing, good = append(bad, b...), append(missing, u...), append(good, g...)
	}
	switch {
	case len(bad) > 0:
		v.Health = api.Unhealthy
	case len(missing) > 0 || len(v.Measured) == 0:
		v.Health = api.HealthUnknown
	case errorsOnly:
		v.Health = api.HealthUnknown
		missing = append(missing, "the change is under way")
	}
	v.Reasons = slices.Concat(bad, missing, good)
	if len(v.Reasons) == 0 {
		v.Reasons = []string{"nobody measures"}
	}
	return v
}

func sample(c *vitals.Counts) api.Sample {
	return api.Sample{Requests: c.Requests, Failed: c.Failed, Refused: c.Refused, Rate: c.Rate(), P50: c.Latency.Quantile(0.5), P99: c.Latency.Quantile(0.99)}
}

// judge judges what one of them measured.
func judge(rule *api.HealthRule, c *Comparison, errorsOnly bool) (m api.HealthMeasure, bad, missing, good []string) {
	m = api.HealthMeasure{By: c.By, Health: api.Healthy, Canary: sample(&c.Canary), Baseline: sample(&c.Baseline), Reference: c.Reference}
	say := func(format string, args ...any) string { return c.By + ": " + fmt.Sprintf(format, args...) }
	m.Excess = max(float64(c.Canary.Bad())-float64(c.Canary.Requests)*c.Baseline.Rate(), 0)
	m.Spent = c.Before.Excess + m.Excess
	if n := c.Before.Requests + c.Canary.Requests; rule.Exceeded(m.Spent, n) {
		bad = append(bad, say("%.0f errors more than the old version would have had, of %d requests: the error budget of %s is used up", m.Spent, n, rule.Budget))
	}
	enough := c.Canary.Requests >= rule.MinRequests && c.Baseline.Requests >= rule.MinRequests
	if !enough {
		missing = append(missing, say("%d requests to the new version and %d to the old one; %d of each are needed", c.Canary.Requests, c.Baseline.Requests, rule.MinRequests))
	} else {
		m.ErrorSigma = proportions(c.Canary.Bad(), c.Canary.Requests, c.Baseline.Bad(), c.Baseline.Requests)
		words := say("errors %s of %d, before %s of %d (%.1f standard errors)", percent(m.Canary.Rate), c.Canary.Requests, percent(m.Baseline.Rate), c.Baseline.Requests, m.ErrorSigma)
		if m.Canary.Rate-m.Baseline.Rate > rule.ErrorFloor && m.ErrorSigma >= rule.Sigma {
			bad = append(bad, words)
		} else {
			good = append(good, words)
		}
	}
	if enough && !errorsOnly && rule.LatencyRatio >= 0 {
		b, u, g := latency(rule, c, &m)
		bad, missing, good = append(bad, b...), append(missing, u...), append(good, g...)
	}
	switch {
	case len(bad) > 0:
		m.Health = api.Unhealthy
	case len(missing) > 0 || errorsOnly:
		m.Health = api.HealthUnknown
	}
	return m, bad, missing, good
}

// latency compares the 99th percentiles: the canary's is bad when it is above the
// limit, and when so many of its requests are certainly above it that it is no chance.
func latency(rule *api.HealthRule, c *Comparison, m *api.HealthMeasure) (bad, missing, good []string) {
	nc, nb := c.Canary.Latency.Total(), c.Baseline.Latency.Total()
	if nc < rule.MinRequests || nb < rule.MinRequests {
		return nil, []string{fmt.Sprintf("%s: latencies of %d requests to the new version and of %d to the old one; %d of each are needed", c.By, nc, nb, rule.MinRequests)}, nil
	}
	m.LatencyLimit = max(time.Duration(float64(m.Baseline.P99)*rule.LatencyRatio), m.Baseline.P99+rule.LatencyFloor)
	m.Slow = c.Canary.Latency.Above(m.LatencyLimit)
	m.LatencySigma = (float64(m.Slow) - slowShare*float64(nc)) / math.Sqrt(float64(nc)*slowShare*(1-slowShare))
	words := fmt.Sprintf("%s: 99th percentile %v, before %v; %d of %d took longer than the limit of %v (%.1f standard errors)", c.By,
		m.Canary.P99.Round(time.Microsecond), m.Baseline.P99.Round(time.Microsecond), m.Slow, nc, m.LatencyLimit.Round(time.Microsecond), m.LatencySigma)
	if m.Canary.P99 > m.LatencyLimit && m.LatencySigma >= rule.Sigma {
		return []string{words}, nil, nil
	}
	return nil, nil, []string{words}
}

// proportions is the difference of two shares, x1 of n1 and x2 of n2, in standard
// errors of the two together; 0 when there is nothing to tell apart.
func proportions(x1, n1, x2, n2 int64) float64 {
	p := float64(x1+x2) / float64(n1+n2)
	se := math.Sqrt(p * (1 - p) * (1/float64(n1) + 1/float64(n2)))
	if se == 0 || math.IsNaN(se) {
		return 0
	}
	return (float64(x1)/float64(n1) - float64(x2)/float64(n2)) / se
}

func percent(f float64) string { return fmt.Sprintf("%.2f%%", 100*f) }
