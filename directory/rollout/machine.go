// SPDX-License-Identifier: Apache-2.0

package rollout

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member/vitals"
)

// machine changes a record that is its own.
type machine struct{ *api.Rollout }

func (m machine) byMove() bool { return m.Settings.By == api.ByMove }

// last reports whether nothing of the old version is left behind the present wave.
func (m machine) last() bool { return m.Wave >= len(m.Waves) }

// window begins to compare two groups.
func (m machine) window(ev *Event, canary, baseline []cells.CellID) {
	w := &api.HealthWindow{Since: ev.At, Canary: slices.Clone(canary), Baseline: slices.Clone(baseline), Mark: map[string]api.HealthPair{}}
	for _, by := range m.Settings.Health.MeasuredBy {
		w.Mark[by] = api.HealthPair{Canary: ev.Totals.of(by, canary), Baseline: ev.Totals.of(by, baseline)}
	}
	m.Window = w
}

func (m machine) start(ev *Event) {
	m.enter(1, ev)
}

// enter begins a wave. Before a last one that nothing was compared before, the old
// version is measured: nothing of it will be left.
func (m machine) enter(wave int, ev *Event) {
	if wave == len(m.Waves) && m.Reference == nil {
		m.State = api.RolloutObserving
		m.window(ev, nil, m.Old)
		return
	}
	m.State, m.Wave, m.Window = api.RolloutChanging, wave, nil
	m.Current().StartedAt = ev.At
	if m.byMove() {
		m.window(ev, m.New, m.Old)
	}
}

// onward begins the next wave, or ends the rollout.
func (m machine) onward(ev *Event) {
	m.Current().EndedAt = ev.At
	if m.last() {
		m.State, m.Window, m.Driver, m.FinishedAt = api.RolloutDone, nil, "", ev.At
		return
	}
	m.enter(m.Wave+1, ev)
}

// Compare says what was counted in the window of a rollout until the totals were read.
func Compare(r *api.Rollout, t Totals) []Comparison {
	if r.Window == nil {
		return nil
	}
	var out []Comparison
	for _, by := range r.Settings.Health.MeasuredBy {
		mark, ok := r.Window.Mark[by]
		if _, measured := t[by]; !ok || !measured {
			continue
		}
		c := Comparison{By: by, Canary: t.of(by, r.Window.Canary).Minus(mark.Canary), Baseline: t.of(by, r.Window.Baseline).Minus(mark.Baseline), Before: r.Spent[by]}
		if r.State == api.RolloutBaking && r.Wave >= len(r.Waves) && r.Reference != nil {
			// What still arrives of the old version's last seconds is no better than it.
			if ref, ok := r.Reference.Counts[by]; ok && c.Baseline.Requests < max(ref.Requests, r.Settings.Health.MinRequests) {
				c.Baseline, c.Reference = ref, "before anything had changed"
				if r.Reference.Wave > 0 {
					c.Reference = fmt.Sprintf("with wave %d", r.Reference.Wave)
				}
			}
		}
		out = append(out, c)
	}
	return out
}

// Look judges a rollout by the totals of a moment; nil when nothing is compared.
func Look(r *api.Rollout, t Totals, at time.Time) *api.Verdict {
	if r.Window == nil || r.State != api.RolloutBaking && r.State != api.RolloutChanging {
		return nil
	}
	v := Judge(&r.Settings.Health, Compare(r, t), r.Window.Since, at, r.State == api.RolloutChanging)
	return &v
}

func (m machine) judged(ev *Event) error {
	if m.Window != nil && (m.Window.Since.After(ev.At) || m.ResumedAt.After(ev.At)) {
		m.rewound(ev)
		return nil
	}
	switch m.State {
	case api.RolloutObserving:
		return m.observed(ev)
	case api.RolloutChanging, api.RolloutBaking:
	default:
		return ErrNoChange
	}
	v := Look(m.Rollout, ev.Totals, ev.At)
	if v == nil {
		return ErrNoChange
	}
	if v.Health == api.Unhealthy {
		m.Verdict, m.Current().Verdict = v, v
		m.Bad, m.Paused = true, false
		from := m.Wave
		if m.Settings.Return == api.ReturnAll {
			from = 1
		}
		m.turn(from, strings.Join(v.Reasons, "; "))
		return nil
	}
	if m.State != api.RolloutBaking || m.Paused {
		return ErrNoChange
	}
	over := m.Window.Since.Add(m.Settings.Bake)
	switch {
	case v.Health == api.Healthy && !ev.At.Before(over):
		m.Verdict, m.Current().Verdict = v, v
		m.settleAccounts(Compare(m.Rollout, ev.Totals))
		m.onward(ev)
		return nil
	case v.Health == api.HealthUnknown && m.impatient(over, ev.At):
		m.Verdict = v
		m.hold("the new version cannot be judged: " + strings.Join(v.Reasons, "; "))
		return nil
	}
	return ErrNoChange
}

// rewound takes note of a clock that has gone back: what began in its future begins
// now, with what was counted kept, or it would last for as long as the clock was wrong.
func (m machine) rewound(ev *Event) {
	w := *m.Window
	if w.Since.After(ev.At) {
		w.Since = ev.At
	}
	if m.ResumedAt.After(ev.At) {
		m.ResumedAt = ev.At
	}
	m.Window = &w
}

// impatient reports whether data has been missing for too long.
func (m machine) impatient(over, at time.Time) bool {
	if m.ResumedAt.After(over) {
		over = m.ResumedAt
	}
	return !at.Before(over.Add(m.Settings.Patience))
}

// settleAccounts keeps what the wave has cost, and what the old version was measured
// to be.
func (m machine) settleAccounts(list []Comparison) {
	spent, ref := maps.Clone(m.Spent), &api.HealthReference{Wave: m.Wave, Counts: map[string]vitals.Counts{}}
	if spent == nil {
		spent = map[string]api.HealthSpent{}
	}
	for i := range list {
		c := &list[i]
		x := spent[c.By]
		x.Requests += c.Canary.Requests
		x.Excess += max(float64(c.Canary.Bad())-float64(c.Canary.Requests)*c.Baseline.Rate(), 0)
		spent[c.By] = x
		if c.Reference == "" {
			ref.Counts[c.By] = c.Baseline
		}
	}
	m.Spent = spent
	if len(ref.Counts) == len(m.Settings.Health.MeasuredBy) {
		m.Reference = ref
	}
}

// observed ends the observation of the old version once there is enough of it.
func (m machine) observed(ev *Event) error {
	if m.Paused {
		return ErrNoChange
	}
	rule, enough := &m.Settings.Health, true
	ref := &api.HealthReference{Counts: map[string]vitals.Counts{}}
	for _, by := range rule.MeasuredBy {
		c := ev.Totals.of(by, m.Window.Baseline).Minus(m.Window.Mark[by].Baseline)
		ref.Counts[by] = c
		enough = enough && c.Requests >= rule.MinRequests && (rule.LatencyRatio < 0 || c.Latency.Total() >= rule.MinRequests)
	}
	switch {
	case enough:
		ref.Wave = m.Wave
		m.Reference = ref
		m.enter(m.Wave+1, ev)
		return nil
	case m.impatient(m.Window.Since.Add(m.Settings.Bake), ev.At):
		m.hold(fmt.Sprintf("the old version has too few requests to compare with: fewer than %d", rule.MinRequests))
		return nil
	}
	return ErrNoChange
}

func (m machine) hold(reason string) { m.Paused, m.Reason = true, reason }

// turn begins to return waves.
func (m machine) turn(from int, reason string) {
	m.State, m.Window, m.ReturnFrom, m.Reason = api.RolloutReturning, nil, from, reason
	m.Drop, m.RetryAt = m.Campaign != "", time.Time{}
}

func (m machine) open() error {
	switch {
	case m.Campaign != "":
		return ErrNoChange
	case !m.byMove() || m.Paused || m.Kept || m.State != api.RolloutChanging && m.State != api.RolloutReturning:
		return refused("no campaign is begun")
	}
	m.Attempt++
	m.Campaign, m.Back, m.Drop = api.RolloutCampaign(m.ID, m.Attempt), m.State == api.RolloutReturning, false
	return nil
}

func (m machine) closed(ev *Event) error {
	if m.Campaign == "" {
		return ErrNoChange
	}
	if ev.Again && m.Back {
		m.RetryAt, m.Trouble = ev.At.Add(retryReturn), ev.Reason
	}
	m.Campaign, m.Back, m.Drop = "", false, false
	return nil
}

func (m machine) stalled(ev *Event) error {
	if m.Paused {
		return ErrNoChange
	}
	m.hold(ev.Reason)
	return nil
}

func (m machine) settled(ev *Event) error {
	w := m.Current()
	if m.State != api.RolloutChanging || m.Campaign != "" || w.Counts.Pending+w.Counts.Changing+w.Counts.Returning > 0 {
		return refused("wave %d is not through", m.Wave)
	}
	if m.Paused {
		return ErrNoChange
	}
	if n := w.Counts.Failed; n > 0 {
		m.hold(fmt.Sprintf("%d of %d of wave %d have not got the new version; resume tries them again, or leaves them with --skip", n, w.Counts.Total, m.Wave))
		return nil
	}
	w.BakedAt = ev.At
	if w.Counts.Changed == 0 { // there is nothing to judge
		m.onward(ev)
		return nil
	}
	m.State = api.RolloutBaking
	if m.byMove() {
		m.window(ev, m.New, m.Old)
	} else {
		m.window(ev, ev.Canary, ev.Baseline)
	}
	return nil
}

func (m machine) returned(ev *Event) error {
	if m.State != api.RolloutReturning || m.Campaign != "" {
		return refused("it is not being returned")
	}
	for i := range m.Waves {
		c := &m.Waves[i].Counts
		left := c.Changing + c.Returning
		if !m.Kept && i+1 >= m.ReturnFrom && i < m.Wave {
			left += c.Changed + c.Failed
		}
		if left > 0 {
			return refused("%d of wave %d are not through", left, i+1)
		}
		if !m.Kept && i+1 >= m.ReturnFrom && i < m.Wave {
			m.Waves[i].EndedAt = ev.At
		}
	}
	m.State, m.Paused, m.Trouble = api.RolloutAborted, false, ""
	if m.Bad && !m.Kept {
		m.State = api.RolloutHalted
	}
	m.Driver, m.FinishedAt = "", ev.At
	return nil
}

func (m machine) pause(ev *Event) error {
	if m.Paused {
		return ErrNoChange
	}
	m.Paused, m.RunBy = true, ev.Actor
	if m.State != api.RolloutReturning { // why it returns is more to know
		m.Reason = said(ev)
	}
	return nil
}

func said(ev *Event) string {
	if ev.Reason != "" {
		return ev.Reason
	}
	return "asked for by " + ev.Actor
}

func (m machine) resume(ev *Event) error {
	if !m.Paused {
		return ErrNoChange
	}
	m.Paused, m.RunBy, m.ResumedAt, m.RetryAt = false, ev.Actor, ev.At, time.Time{}
	if m.State != api.RolloutReturning {
		m.Reason = ""
	}
	m.Drop = m.Campaign != ""
	return nil
}

func (m machine) abort(ev *Event) error {
	if m.State == api.RolloutReturning && (m.Kept || !ev.Keep && m.ReturnFrom == 1) {
		return ErrNoChange
	}
	m.RunBy, m.Paused = ev.Actor, false
	if m.State == api.RolloutObserving {
		m.State, m.Window, m.Reason, m.Driver, m.FinishedAt = api.RolloutAborted, nil, said(ev), "", ev.At
		return nil
	}
	if ev.Keep {
		m.Kept = true
		m.turn(0, said(ev))
		return nil
	}
	reason := said(ev)
	if m.Bad {
		reason = m.Reason
	}
	m.turn(1, reason)
	return nil
}
