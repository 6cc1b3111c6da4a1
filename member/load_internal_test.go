// SPDX-License-Identifier: Apache-2.0

package member

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

func TestBusiest(t *testing.T) {
	var b busiest
	counts := map[cells.TenantID]uint64{"old": 1_000_000}
	each := func(f func(cells.TenantID, uint64)) {
		for t, n := range counts {
			f(t, n)
		}
	}
	now := time.Unix(1000, 0)
	if got := b.sample(now, each); len(got) != 0 {
		t.Errorf("loads before anything passed: %v", got)
	}
	// What was counted before the first sample is no load.
	for range 600 { // five minutes
		now = now.Add(500 * time.Millisecond)
		counts["hot"] += 50
		counts["warm"]++
		for i := range 40 {
			counts[cells.TenantID(fmt.Sprintf("cool%02d", i))] += 1
		}
		b.sample(now, each)
	}
	got := b.sample(now, each)
	if len(got) != MaxBusiest || got[0].Tenant != "hot" || math.Abs(got[0].PerSecond-100) > 2 || math.Abs(got[1].PerSecond-2) > 0.1 {
		t.Errorf("loads %v", got)
	}
	// A gate that was dropped counts from 0 again; a quiet tenant is forgotten.
	counts["hot"] = 25
	now = now.Add(500 * time.Millisecond)
	if got = b.sample(now, each); got[0].PerSecond > 110 || got[0].PerSecond < 90 {
		t.Errorf("after a drop: %v", got[0])
	}
	for range 20 {
		now = now.Add(time.Minute)
		got = b.sample(now, each)
	}
	if len(got) != 0 {
		t.Errorf("load of nobody: %v", got)
	}
}
