// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/cloister-dev/cloister/cells"
)

// metrics are the member's. They name no tenant.
type metrics struct {
	admissions *prometheus.CounterVec
	fences     *prometheus.CounterVec
	steps      *prometheus.HistogramVec
	all        []prometheus.Collector
	registry   prometheus.Registerer
}

func newMetrics(m *Member) *metrics {
	gauge := func(name, help string, f func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f)
	}
	x := &metrics{
		admissions: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cell_member_requests_total",
			Help: "Requests at the gates over HTTP, by outcome: admitted, or the code of the answer."}, []string{"outcome"}),
		fences: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cell_member_fence_orders_total",
			Help: "Orders to this cell's fences, by who gave them, what they were and how they ended."}, []string{"by", "op", "outcome"}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "cell_member_step_seconds",
			Help:    "How long the agent's steps took.",
			Buckets: []float64{.001, .005, .02, .1, .5, 2, 10, 60, 600, 3600}}, []string{"step", "outcome"}),
	}
	x.all = []prometheus.Collector{x.admissions, x.fences, x.steps,
		gauge("cell_member_in_flight", "Admissions that are not done.", func() float64 { return float64(m.gates.Total()) }),
		gauge("cell_member_ready", "1 while the process may be sent requests.", func() float64 {
			if ready, _ := m.Ready(); ready {
				return 1
			}
			return 0
		}),
		gauge("cell_member_heartbeat_age_seconds", "How long ago the directory took a heartbeat; -1 when it never has.", func() float64 {
			at := m.lastBeat.Load()
			if at == 0 {
				return -1
			}
			return time.Since(time.Unix(0, at)).Seconds()
		}),
		gauge("cell_member_routes_age_seconds", "How long ago the view of the routes was complete.", func() float64 { return m.router.Status().Age.Seconds() }),
		gauge("cell_member_routes_revision", "The revision of the view of the routes.", func() float64 { return float64(m.router.Status().Revision) }),
	}
	return x
}

// register registers everything at r, or nothing; a nil r keeps them unregistered.
func (x *metrics) register(r prometheus.Registerer, more ...prometheus.Collector) error {
	if r == nil {
		return nil
	}
	x.registry = r
	x.all = append(x.all, more...)
	for i, c := range x.all {
		if err := r.Register(c); err != nil {
			x.all = x.all[:i]
			x.unregister()
			return err
		}
	}
	return nil
}

func (x *metrics) unregister() {
	if x.registry == nil {
		return
	}
	for _, c := range x.all {
		x.registry.Unregister(c)
	}
	x.registry = nil
}

func (x *metrics) admitted(code string) {
	if code == "" {
		code = "admitted"
	}
	x.admissions.WithLabelValues(code).Inc()
}

func (x *metrics) fenced(by, op string, err error) {
	x.fences.WithLabelValues(by, op, outcome(err)).Inc()
}

func (x *metrics) step(name string, begun time.Time, err error) {
	x.steps.WithLabelValues(name, outcome(err)).Observe(time.Since(begun).Seconds())
}

// outcome is one of a closed list.
func outcome(err error) string {
	if err == nil {
		return "ok"
	}
	if errors.Is(err, context.Canceled) {
		return "cancelled"
	}
	if errors.Is(err, cells.ErrClosed) {
		return "unavailable"
	}
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return k.kind
		}
	}
	return "error"
}
