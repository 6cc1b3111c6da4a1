// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"sync"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// A process is told of the tenants that moves bring to its cell, of others it is not.
func TestWarmUp(t *testing.T) {
	p := newPlane(t)
	var mu sync.Mutex // guards told
	var told []cells.TenantID
	m := p.join(t, p.config(t, "b"), WithWarmUp(func(_ context.Context, tenant cells.TenantID) error {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, tenant)
		return cells.ErrUnavailable // is logged, and ends nothing
	}))
	p.ready(t, m)
	moving := func(tenant cells.TenantID, move cells.MoveID, from, to cells.CellID) {
		base := cells.Epoch(1)
		if move == "m4" {
			base = 3
		}
		r := active(tenant, from, base)
		r.MoveID, r.SourceCell, r.TargetCell, r.Base = move, from, to, base
		p.put(t, r)
	}
	has := func(want ...cells.TenantID) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			if len(told) != len(want) {
				return false
			}
			for i := range want {
				if told[i] != want[i] {
					return false
				}
			}
			return true
		}
	}
	p.put(t, active("here", "b", 1))
	moving("elsewhere", "m0", "a", "c")
	moving("away", "m1", "b", "a")
	moving("comes", "m2", "a", "b")
	eventually(t, "the one that comes", has("comes"))
	p.put(t, active("comes", "a", 3)) // rolled back, and again
	moving("next", "m3", "a", "b")
	eventually(t, "the next one", has("comes", "next"))
	moving("comes", "m4", "a", "b")
	eventually(t, "the first one again", has("comes", "next", "comes"))
}
