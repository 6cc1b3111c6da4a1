// SPDX-License-Identifier: Apache-2.0

package channel

import "github.com/prometheus/client_golang/prometheus"

var (
	descNotAfter = prometheus.NewDesc("cell_channel_certificate_not_after_seconds",
		"When this process's channel certificate ends, in seconds since 1970.", []string{"identity"}, nil)
	descCANotAfter = prometheus.NewDesc("cell_channel_ca_not_after_seconds",
		"When the fleet's CA certificate that lasts longest ends, in seconds since 1970.", nil, nil)
	descReloads = prometheus.NewDesc("cell_channel_reloads_total",
		"Changes of the channel's files, by outcome.", []string{"outcome"}, nil)
	descRefusals = prometheus.NewDesc("cell_channel_refusals_total",
		"Peers refused by this process after their chain was read, by reason.", []string{"reason"}, nil)
)

// Describe implements prometheus.Collector.
func (c *Channel) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descNotAfter, descCANotAfter, descReloads, descRefusals} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *Channel) Collect(ch chan<- prometheus.Metric) {
	st := c.current()
	ch <- prometheus.MustNewConstMetric(descNotAfter, prometheus.GaugeValue, float64(st.leaf.NotAfter.Unix()), st.self.String())
	last := st.anchors[0].NotAfter
	for _, a := range st.anchors {
		if a.NotAfter.After(last) {
			last = a.NotAfter
		}
	}
	ch <- prometheus.MustNewConstMetric(descCANotAfter, prometheus.GaugeValue, float64(last.Unix()))
	ch <- prometheus.MustNewConstMetric(descReloads, prometheus.CounterValue, float64(c.reloads.Load()), "taken")
	ch <- prometheus.MustNewConstMetric(descReloads, prometheus.CounterValue, float64(c.failures.Load()), "refused")
	for r, n := range c.refusals {
		ch <- prometheus.MustNewConstMetric(descRefusals, prometheus.CounterValue, float64(n.Load()), string(r))
	}
}
