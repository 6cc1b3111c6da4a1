// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// announcer collects the tenants whose events this process has just committed.
// A NOTIFY inside the writers' transactions would make all their commits take
// turns, in the whole server. One of its own, for what has gathered meanwhile,
// costs the writers nothing.
type announcer struct {
	mu      sync.Mutex // guards the fields below
	pending map[cells.TenantID]struct{}
	running bool
}

// announce wakes this process's waiters at once, and those of others soon.
func (c *core) announce(tenant cells.TenantID) {
	c.hub.Wake(tenant)
	c.ann.mu.Lock()
	defer c.ann.mu.Unlock()
	if c.ann.pending == nil {
		c.ann.pending = map[cells.TenantID]struct{}{}
	}
	c.ann.pending[tenant] = struct{}{}
	if !c.ann.running {
		c.ann.running = c.hub.Go(c.notifyLoop)
	}
}

// notifyLoop sends what is pending until nothing is.
func (c *core) notifyLoop(ctx context.Context) {
	for {
		c.ann.mu.Lock()
		tenants := make([]string, 0, len(c.ann.pending))
		for t := range c.ann.pending {
			tenants = append(tenants, string(t))
		}
		clear(c.ann.pending)
		if len(tenants) == 0 {
			c.ann.running = false
		}
		c.ann.mu.Unlock()
		if len(tenants) == 0 {
			return
		}
		list, err := json.Marshal(tenants)
		if err == nil {
			nctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			err = c.b.exec(nctx, `SELECT pg_notify($1, t) FROM json_array_elements_text($2::json) t`, c.schema+"_outbox", string(list))
			cancel()
		}
		if err != nil && ctx.Err() == nil {
			c.log.Warn("guard: announcing events failed; other processes find them by polling", "error", err)
		}
	}
}
