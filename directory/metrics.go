// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// metrics name cells, states and codes, never tenants.
type metrics struct {
	answers     *prometheus.CounterVec
	placements  *prometheus.CounterVec
	moves       *prometheus.CounterVec
	steps       *prometheus.CounterVec
	pause       prometheus.Histogram
	deletions   prometheus.Counter
	takeovers   prometheus.Counter
	storeErrors prometheus.Counter
	watchBreaks prometheus.Counter

	s        *Server
	liveDesc *prometheus.Desc
	tenDesc  *prometheus.Desc
	runDesc  *prometheus.Desc
	winDesc  *prometheus.Desc
	lagDesc  *prometheus.Desc
	returns  *prometheus.CounterVec
	openDesc *prometheus.Desc
	ageDesc  *prometheus.Desc

	rolloutSteps  *prometheus.CounterVec
	rolloutsEnded *prometheus.CounterVec
	rollDesc      *prometheus.Desc
	heldDesc      *prometheus.Desc
}

const ns = "cell_directory_"

func newMetrics(s *Server) (*metrics, *prometheus.Registry) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: ns + name, Help: help})
	}
	vec := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: ns + name, Help: help}, []string{label})
	}
	m := &metrics{
		s:          s,
		answers:    vec("refusals_total", "Requests that were refused, by the code of the answer.", "code"),
		placements: vec("placements_total", "Placement requests, by result: created, existing, refused.", "result"),
		moves:      vec("moves_total", "Moves that ended here, by state.", "state"),
		steps:      vec("steps_total", "Persisted steps of moves made here.", "step"),
		pause: prometheus.NewHistogram(prometheus.HistogramOpts{Name: ns + "move_pause_seconds", Help: "Measured pause of committed moves.",
			Buckets: []float64{.005, .01, .025, .05, .1, .15, .25, .5, 1, 2.5, 5, 10}}),
		deletions:     counter("deletions_total", "Tenants deleted here."),
		takeovers:     counter("takeovers_total", "Moves taken over from a driver that showed no sign of life."),
		storeErrors:   counter("store_errors_total", "Background work that the store failed."),
		watchBreaks:   counter("route_watch_breaks_total", "Times that the watch of the routes broke."),
		liveDesc:      prometheus.NewDesc(ns+"members", "Live processes, by cell and readiness.", []string{"cell", "ready"}, nil),
		tenDesc:       prometheus.NewDesc(ns+"tenants", "Tenants counted in each cell's quota.", []string{"cell"}, nil),
		winDesc:       prometheus.NewDesc(ns+"undo_windows", "Moves that can be undone now.", nil, nil),
		lagDesc:       prometheus.NewDesc(ns+"return_age_seconds", "Time since changes were last brought back, of the undo window that has waited longest.", nil, nil),
		returns:       vec("returns_total", "Rounds of changes that were brought back, by result: done, failed, closed.", "result"),
		runDesc:       prometheus.NewDesc(ns+"moves_running", "Moves driven here now, waiting ones included.", nil, nil),
		rolloutSteps:  vec("rollout_steps_total", "Persisted steps of rollouts made here.", "step"),
		rolloutsEnded: vec("rollouts_ended_total", "Rollouts that ended here, by state.", "state"),
		rollDesc:      prometheus.NewDesc(ns+"rollouts", "Rollouts driven here now, by state.", []string{"state"}, nil),
		heldDesc:      prometheus.NewDesc(ns+"rollouts_paused", "Rollouts driven here that are paused: by an operator, for units that have failed, or for lack of data.", nil, nil),
		openDesc:      prometheus.NewDesc(ns+"routes_unfinished", "Routes that something is unfinished about.", nil, nil),
		ageDesc:       prometheus.NewDesc(ns+"routes_age_seconds", "Time since the watch of the routes was last heard.", nil, nil),
	}
	r := prometheus.NewRegistry()
	r.MustRegister(m.answers, m.placements, m.moves, m.steps, m.pause, m.deletions, m.returns, m.takeovers, m.storeErrors, m.watchBreaks, m.rolloutSteps, m.rolloutsEnded, m,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if s.cfg.Channel != nil {
		r.MustRegister(s.cfg.Channel)
	}
	return m, r
}

func (m *metrics) refused(c cells.Code) { m.answers.WithLabelValues(string(c)).Inc() }

func (m *metrics) step(ev cells.StepEvent) { m.steps.WithLabelValues(string(ev.Step)).Inc() }

func (m *metrics) concluded(rec api.Move) {
	state := rec.State
	if state == api.MoveCleaning {
		state = api.MoveCommitted
	}
	m.moves.WithLabelValues(string(state)).Inc()
	if rec.Served() && rec.State != api.MoveRolledBack && rec.Pause > 0 {
		m.pause.Observe(rec.Pause.Seconds())
	}
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.liveDesc, m.tenDesc, m.runDesc, m.winDesc, m.lagDesc, m.openDesc, m.ageDesc, m.rollDesc, m.heldDesc} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := map[[2]string]int{}
	for _, c := range m.s.fleet.list() {
		gauge(m.tenDesc, float64(c.Tenants), string(c.ID))
		count[[2]string{string(c.ID), "true"}] = 0
		count[[2]string{string(c.ID), "false"}] = 0
	}
	for _, x := range m.s.members.list() {
		if !x.Live {
			continue
		}
		ready := "false"
		if x.Ready {
			ready = "true"
		}
		count[[2]string{string(x.Cell), ready}]++
	}
	for k, n := range count {
		gauge(m.liveDesc, float64(n), k[0], k[1])
	}
	states, paused := map[api.RolloutState]int{}, 0
	for _, r := range m.s.rolls.driven() {
		if r.State.Final() {
			continue
		}
		states[r.State]++
		if r.Paused {
			paused++
		}
	}
	for _, st := range api.RolloutStates {
		if !st.Final() {
			gauge(m.rollDesc, float64(states[st]), string(st))
		}
	}
	gauge(m.heldDesc, float64(paused))
	m.s.exec.mu.Lock()
	running := len(m.s.exec.running)
	m.s.exec.mu.Unlock()
	gauge(m.runDesc, float64(running))
	windows, oldest := m.s.exec.windowAges()
	gauge(m.winDesc, float64(windows))
	gauge(m.lagDesc, oldest.Seconds())
	_, age, open := m.s.follow.position()
	gauge(m.openDesc, float64(open))
	gauge(m.ageDesc, age.Seconds())
}
