// SPDX-License-Identifier: Apache-2.0

package member

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/vitals"
)

const (
	// loadWindow is over about which time a tenant's load is averaged.
	loadWindow = time.Minute
	// leastLoad is the load below which a tenant is not reported, per second.
	leastLoad = 0.05
)

// served counts how a request went, for comparisons of versions.
func (m *Member) served(s cells.Served) {
	o, took := vitals.OfCode(s.Answer), s.Took
	switch {
	case s.Gone:
		return
	case s.Answer != "":
	case s.Status > 0:
		o = vitals.OfStatus(s.Status)
	default:
		o = vitals.OfGRPC(int(s.GRPC))
	}
	if s.Stream {
		took = -1
	}
	m.vitals.Observe(m.cfg.Cell, m.cfg.Version, o, took)
}

// busiest turns counts of admissions into loads: an average that forgets what is
// older than about loadWindow. Used by one goroutine.
type busiest struct {
	last time.Time
	of   map[cells.TenantID]tenantRate
}

type tenantRate struct {
	count uint64
	rate  float64
}

// sample takes the counts at a time and returns the busiest tenants.
func (b *busiest) sample(now time.Time, counts func(func(cells.TenantID, uint64))) []TenantLoad {
	passed := now.Sub(b.last)
	if b.of == nil {
		b.of = map[cells.TenantID]tenantRate{}
		b.last = now
		counts(func(t cells.TenantID, n uint64) { b.of[t] = tenantRate{count: n} })
		return nil
	}
	if passed <= 0 {
		passed = time.Millisecond
	}
	b.last = now
	keep := math.Exp(-passed.Seconds() / loadWindow.Seconds())
	next := make(map[cells.TenantID]tenantRate, len(b.of))
	var out []TenantLoad
	counts(func(t cells.TenantID, n uint64) {
		r := b.of[t]
		if n < r.count { // the gate was dropped meanwhile
			r.count = 0
		}
		r.rate = keep*r.rate + (1-keep)*float64(n-r.count)/passed.Seconds()
		r.count = n
		next[t] = r
		if r.rate >= leastLoad {
			out = append(out, TenantLoad{Tenant: t, PerSecond: r.rate})
		}
	})
	b.of = next
	slices.SortFunc(out, func(a, b TenantLoad) int {
		switch {
		case a.PerSecond > b.PerSecond:
			return -1
		case a.PerSecond < b.PerSecond:
			return 1
		}
		return strings.Compare(string(a.Tenant), string(b.Tenant))
	})
	return out[:min(len(out), MaxBusiest)]
}
