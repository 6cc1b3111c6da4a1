// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// HealthRule says what is held to be bad health. Package directory/rollout has the rule
// itself.
type HealthRule struct {
	// MinRequests is how many requests each side needs before it says anything; 0 means
	// 200.
	MinRequests int64 `json:"min_requests,omitempty"`
	// ErrorFloor is the difference between the two shares of errors up to which it is
	// not looked at; 0 means 0.005, half a percentage point.
	ErrorFloor float64 `json:"error_floor,omitempty"`
	// Sigma is how many standard errors a difference must have to be none of chance; 0
	// means 3.29, once in two thousand.
	Sigma float64 `json:"sigma,omitempty"`
	// LatencyRatio and LatencyFloor: the 99th percentile is bad when it is above the
	// baseline's by both this factor and this much; 0 means 1.5 and 50 ms. A negative
	// ratio does not look at latency.
	LatencyRatio float64       `json:"latency_ratio,omitempty"`
	LatencyFloor time.Duration `json:"latency_floor,omitempty"`
	// Budget is how many errors beyond the baseline's share the rollout may cost, all
	// waves together: a number like "500", a share of the canaries' requests like "0.2%",
	// or "none" (also ""). Once it is used up that is bad health.
	Budget string `json:"budget,omitempty"`
	// MeasuredBy lists who measures: MeasuredByEdge, MeasuredByCell; none means both. Each
	// of them is judged, and must find good health for it to be good.
	MeasuredBy []string `json:"measured_by,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (h *HealthRule) Normalize() error {
	if h.MinRequests == 0 {
		h.MinRequests = 200
	}
	if h.ErrorFloor == 0 {
		h.ErrorFloor = 0.005
	}
	if h.Sigma == 0 {
		h.Sigma = 3.29
	}
	if h.LatencyRatio == 0 {
		h.LatencyRatio = 1.5
	}
	if h.LatencyFloor == 0 {
		h.LatencyFloor = 50 * time.Millisecond
	}
	if h.Budget == "" {
		h.Budget = "none"
	}
	if len(h.MeasuredBy) == 0 {
		h.MeasuredBy = []string{MeasuredByEdge, MeasuredByCell}
	}
	bad := func(name string, v any) error { return fmt.Errorf("%w: %s is %v", cells.ErrInvalid, name, v) }
	finite := func(f float64) bool { return !math.IsNaN(f) && !math.IsInf(f, 0) }
	switch {
	case h.MinRequests < 10 || h.MinRequests > 1_000_000_000:
		return bad("min_requests", fmt.Sprintf("%d; want 10 or more", h.MinRequests))
	case !(h.ErrorFloor > 0 && h.ErrorFloor < 1):
		return bad("error_floor", h.ErrorFloor)
	case !(h.Sigma >= 1 && h.Sigma <= 10):
		return bad("sigma", fmt.Sprintf("%g; want 1 to 10", h.Sigma))
	case !finite(h.LatencyRatio) || h.LatencyRatio >= 0 && h.LatencyRatio < 1:
		return bad("latency_ratio", fmt.Sprintf("%g; want 1 or more, or a negative one", h.LatencyRatio))
	case h.LatencyFloor < 0 || h.LatencyFloor > time.Hour:
		return bad("latency_floor", h.LatencyFloor)
	case len(h.MeasuredBy) > 2 || len(h.MeasuredBy) == 2 && h.MeasuredBy[0] == h.MeasuredBy[1]:
		return bad("measured_by", h.MeasuredBy)
	}
	for _, m := range h.MeasuredBy {
		if m != MeasuredByEdge && m != MeasuredByCell {
			return bad("measured_by", fmt.Sprintf("%q; want %s or %s", m, MeasuredByEdge, MeasuredByCell))
		}
	}
	_, _, err := h.budget()
	return err
}

// budget returns the number, or the share, of errors; both 0 is no bound.
func (h *HealthRule) budget() (n, share float64, err error) {
	if h.Budget == "none" || h.Budget == "" {
		return 0, 0, nil
	}
	if text, ok := strings.CutSuffix(h.Budget, "%"); ok {
		if f, err := strconv.ParseFloat(text, 64); err == nil && f > 0 && f <= 100 {
			return 0, f / 100, nil
		}
	} else if n, err := strconv.ParseInt(h.Budget, 10, 64); err == nil && n > 0 {
		return float64(n), 0, nil
	}
	return 0, 0, fmt.Errorf("%w: error budget %q; want a number of requests, a percentage like 0.2%%, or none", cells.ErrInvalid, h.Budget)
}

// Exceeded reports whether so many errors beyond the baseline's share, of so many
// requests, are more than the budget. A share is taken of no fewer requests than
// MinRequests. The rule is normalised.
func (h *HealthRule) Exceeded(excess float64, requests int64) bool {
	n, share, err := h.budget()
	switch {
	case err != nil:
		return true
	case n > 0:
		return excess > n
	case share > 0:
		return excess > share*float64(max(requests, h.MinRequests))
	}
	return false
}

// Health is what a comparison finds.
type Health string

const (
	// Healthy: both sides were measured enough, and the new version is not worse.
	Healthy Health = "healthy"
	// Unhealthy: the new version is worse, or has used up the error budget.
	Unhealthy Health = "unhealthy"
	// HealthUnknown: too little was measured to say so. It never counts as healthy.
	HealthUnknown Health = "unknown"
)

// Verdict is a comparison with the numbers that decided it.
type Verdict struct {
	Health Health    `json:"health"`
	At     time.Time `json:"at"`
	Since  time.Time `json:"since"`
	// Reasons say in words what decided, worst first.
	Reasons []string `json:"reasons"`
	// Measured has one entry for each of those who measure.
	Measured []HealthMeasure `json:"measured"`
}

// HealthMeasure is what one of those who measure found.
type HealthMeasure struct {
	By     string `json:"by"`
	Health Health `json:"health"`
	Canary Sample `json:"canary"`
	// Baseline is of the same time, unless Reference says of which.
	Baseline Sample `json:"baseline"`
	// Reference says which earlier measure of the old version stands in for one of the
	// same time; "" when none does.
	Reference string `json:"reference,omitempty"`
	// ErrorSigma is the difference of the shares in standard errors; LatencySigma by how
	// many there are more slow requests than one in a hundred.
	ErrorSigma   float64 `json:"error_sigma"`
	LatencySigma float64 `json:"latency_sigma"`
	// LatencyLimit is what the canary's 99th percentile was compared with, and Slow how
	// many of its requests were certainly slower.
	LatencyLimit time.Duration `json:"latency_limit"`
	Slow         int64         `json:"slow"`
	// Excess is how many errors the canary has beyond the baseline's share; Spent that of
	// all waves.
	Excess float64 `json:"excess"`
	Spent  float64 `json:"spent"`
}

// Sample is what one side shows.
type Sample struct {
	Requests int64         `json:"requests"`
	Failed   int64         `json:"failed"`
	Refused  int64         `json:"refused"`
	Rate     float64       `json:"rate"`
	P50      time.Duration `json:"p50"`
	P99      time.Duration `json:"p99"`
}
