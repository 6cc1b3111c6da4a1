// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// results is what is printed, as JSON with --json.
type results struct {
	Machine     string            `json:"machine"`
	Kind        string            `json:"kind"`
	Rounds      int               `json:"rounds"`
	Requests    int               `json:"requests"`
	Connections int               `json:"connections"`
	Versions    map[string]string `json:"versions"`
	Cases       []caseResult      `json:"cases"`
}

type caseResult struct {
	Case  string       `json:"case"`
	Peers []peerResult `json:"peers"`
}

// peerResult holds medians over the rounds.
type peerResult struct {
	Peer      string  `json:"peer"`
	CPUMicros float64 `json:"cpu_us_per_request"`
	CPUMin    float64 `json:"cpu_us_min"`
	CPUMax    float64 `json:"cpu_us_max"`
	Rate      float64 `json:"requests_per_second"`
	MBPerCPU  float64 `json:"mb_per_cpu_second,omitempty"`
	P50Micros float64 `json:"p50_us"`
	P99Micros float64 `json:"p99_us"`
	EdgeCPU   float64 `json:"edge_cpu_ratio,omitempty"` // the edge's CPU by this one's: median of the rounds' ratios
	EdgeP99   float64 `json:"edge_p99_ratio,omitempty"`
	samples   []sample
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// median of what f says of each of n rounds.
func median(n int, f func(i int) float64) float64 {
	if n == 0 {
		return 0
	}
	v := make([]float64, n)
	for i := range v {
		v[i] = f(i)
	}
	slices.Sort(v)
	if n%2 == 1 {
		return v[n/2]
	}
	return (v[n/2-1] + v[n/2]) / 2
}

// finish computes the medians.
func (c *caseResult) finish() {
	var edge []sample
	for _, p := range c.Peers {
		if p.Peer == "edge" {
			edge = p.samples
		}
	}
	for k := range c.Peers {
		p := &c.Peers[k]
		s, n := p.samples, len(p.samples)
		p.CPUMicros = median(n, func(i int) float64 { return micros(s[i].cpu) })
		p.Rate = median(n, func(i int) float64 { return s[i].rate })
		p.MBPerCPU = median(n, func(i int) float64 { return s[i].mbCPU })
		p.P50Micros = median(n, func(i int) float64 { return micros(s[i].p50) })
		p.P99Micros = median(n, func(i int) float64 { return micros(s[i].p99) })
		least := slices.MinFunc(s, func(a, b sample) int { return int(a.cpu - b.cpu) })
		most := slices.MaxFunc(s, func(a, b sample) int { return int(a.cpu - b.cpu) })
		p.CPUMin, p.CPUMax = micros(least.cpu), micros(most.cpu)
		if edge != nil && p.Peer != "edge" {
			p.EdgeCPU = median(n, func(i int) float64 { return float64(edge[i].cpu) / float64(s[i].cpu) })
			p.EdgeP99 = median(n, func(i int) float64 { return float64(edge[i].p99) / float64(s[i].p99) })
		}
	}
}

func (r *results) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// writeTable writes Markdown.
func (r *results) writeTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s; %d rounds of %d requests, %d at a time; %d tenants in %d cells", r.Machine, r.Rounds, r.Requests, r.Connections, tenants, cellCount)
	for _, name := range []string{"nginx", "haproxy"} {
		if v := r.Versions[name]; v != "" {
			fmt.Fprintf(&b, "; %s %s", name, v)
		}
	}
	b.WriteString(".\nMedians of the rounds; CPU of the proxy's processes for each request, and the least and most of the rounds.\n\n")
	b.WriteString("| case | proxy | CPU us/request | least to most | edge's CPU / its | requests/s | p50 us | p99 us | edge's p99 / its | MB per CPU second |\n|---|---|---|---|---|---|---|---|---|---|\n")
	for _, c := range r.Cases {
		for _, p := range c.Peers {
			ratio, p99, mb := "", "", ""
			if p.EdgeCPU > 0 {
				ratio, p99 = fmt.Sprintf("%.2f", p.EdgeCPU), fmt.Sprintf("%.2f", p.EdgeP99)
			}
			if p.MBPerCPU > 0 {
				mb = fmt.Sprintf("%.0f", p.MBPerCPU)
			}
			fmt.Fprintf(&b, "| %s | %s | %.1f | %.1f to %.1f | %s | %.0f | %.0f | %.0f | %s | %s |\n",
				c.Case, p.Peer, p.CPUMicros, p.CPUMin, p.CPUMax, ratio, p.Rate, p.P50Micros, p.P99Micros, p99, mb)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
