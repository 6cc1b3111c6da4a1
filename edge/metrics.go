// SPDX-License-Identifier: Apache-2.0

package edge

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/cells"
)

// metrics are those of one server, in a registry of their own.
type metrics struct {
	registry     *prometheus.Registry
	requests     *prometheus.CounterVec
	duration     prometheus.Histogram
	held         prometheus.Histogram
	retries      *prometheus.CounterVec
	unrepeatable prometheus.Counter
	byDefault    prometheus.Counter
	rules        *prometheus.CounterVec
	fast, handed prometheus.Counter
}

func newMetrics(s *Server) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cell_edge_requests_total",
			Help: "Requests that ended, by the cell they were sent to and their outcome: forwarded, client_gone, cut, own, or the code of the answer."}, []string{"cell", "outcome"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "cell_edge_request_seconds",
			Help: "Time from the request's headers to the end of its answer, streams included.", Buckets: prometheus.ExponentialBuckets(0.0005, 2.5, 14)}),
		held: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "cell_edge_hold_seconds",
			Help: "Time that held requests waited, all their waits together.", Buckets: []float64{.005, .01, .025, .05, .1, .175, .25, .5, 1, 2.5, 5, 10, 15, 30}}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cell_edge_retries_total",
			Help: "Requests sent again because nothing of them had run, by the gate's code, or connect."}, []string{"reason"}),
		unrepeatable: prometheus.NewCounter(prometheus.CounterOpts{Name: "cell_edge_unrepeatable_total",
			Help: "Refusals of gates that were passed on because the body could not be sent again."}),
		byDefault: prometheus.NewCounter(prometheus.CounterOpts{Name: "cell_edge_default_requests_total",
			Help: "Requests of tenants without a route, sent to the default cell."}),
		rules: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cell_edge_rules_total",
			Help: "Requests in front of whole deployments, by the rule that decided: own, host, before, scim, issuer, first; none before the directory was read."}, []string{"rule"}),
	}
	m.fast = prometheus.NewCounter(prometheus.CounterOpts{Name: "cell_edge_fast_path_requests_total",
		Help: "Requests that the fast path carried out."})
	m.handed = prometheus.NewCounter(prometheus.CounterOpts{Name: "cell_edge_fast_path_handed_over_total",
		Help: "Connections that the fast path gave to net/http, at any of their requests."})
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	m.registry.MustRegister(m.requests, m.duration, m.held, m.retries, m.unrepeatable, m.byDefault, m.rules, m.fast, m.handed,
		gauge("cell_edge_held", "Requests that wait now.", func() float64 { n, _ := s.room.Held(); return float64(n) }),
		gauge("cell_edge_held_bytes", "Bytes that waiting requests count for.", func() float64 { _, b := s.room.Held(); return float64(b) }),
		gauge("cell_edge_active", "Requests that have not ended.", func() float64 { return float64(s.active.Load()) }),
		gauge("cell_edge_replay_bytes", "Bytes of bodies that are recorded now.", func() float64 { return float64(s.budget.Used()) }),
		gauge("cell_edge_routes", "Routes in the view.", func() float64 { return float64(s.routes.Status().Routes) }),
		gauge("cell_edge_routes_revision", "Revision of the view of the routes.", func() float64 { return float64(s.routes.Status().Revision) }),
		gauge("cell_edge_routes_age_seconds", "How long ago the view of the routes was known to be complete.", func() float64 { return s.routes.Status().Age.Seconds() }),
		gauge("cell_edge_routes_stale", "1 when the view of the routes is stale or comes from the snapshot.", func() float64 { return b2f(s.routes.Status().Stale) }),
		gauge("cell_edge_topology_cells", "Cells in the topology.", func() float64 { return float64(s.topo.Status().Cells) }),
		gauge("cell_edge_topology_age_seconds", "How long ago the topology was known to be the directory's.", func() float64 { return s.topo.Status().Age.Seconds() }),
		gauge("cell_edge_table_problems", "Rows of the directory's table of deployments that are malformed or contradict each other.", func() float64 {
			if s.deploy == nil {
				return 0
			}
			return float64(len(s.deploy.Table.Status().Problems))
		}),
		gauge("cell_edge_draining", "1 when the server is ending.", func() float64 { return b2f(s.draining.Load()) }),
	)
	return m
}

func b2f(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func (m *metrics) observe(x *exchange) {
	m.requests.WithLabelValues(string(x.cell), x.outcome).Inc()
	m.duration.Observe(time.Since(x.start).Seconds())
	if x.s.deploy != nil {
		rule := x.rule
		if rule == "" {
			rule = "none"
		}
		m.rules.WithLabelValues(rule).Inc()
	}
	if x.heldFor > 0 {
		m.held.Observe(x.heldFor.Seconds())
	}
	if x.rule == cells.RuleDefault && x.sent > 0 {
		m.byDefault.Inc()
	}
}
