// SPDX-License-Identifier: Apache-2.0

package httpapi

import (
	"container/list"
	"context"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/deploy"
)

// cellCache remembers the cells. One caller reads at a time; the others wait for it, at
// most their own time.
type cellCache struct {
	read          func(context.Context) (deploy.View, error)
	keep, timeout time.Duration

	mu      sync.Mutex
	view    deploy.View   // guarded by mu
	known   bool          // a view was read; guarded by mu
	at      time.Time     // when its read began; guarded by mu
	failed  time.Time     // when a read failed last; guarded by mu
	reading chan struct{} // closed when the read under way ends; nil when none is; guarded by mu
	err     error         // of the last read; guarded by mu
}

// retryAfter is how long a cache that has something waits after a read that failed.
const retryAfter = time.Second

// last returns what was read last, whatever its age.
func (c *cellCache) last() (deploy.View, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view, c.known
}

// drop makes the next get read.
func (c *cellCache) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = time.Time{}
}

// get returns a view that is young enough, or the last one if it cannot be read now.
func (c *cellCache) get(ctx context.Context) (deploy.View, error) {
	for {
		c.mu.Lock()
		now := time.Now()
		if c.known && (now.Sub(c.at) < c.keep || now.Sub(c.failed) < retryAfter) {
			defer c.mu.Unlock()
			return c.view, nil
		}
		wait := c.reading
		if wait == nil {
			c.reading = make(chan struct{})
			c.mu.Unlock()
			return c.refresh(ctx, now)
		}
		c.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			if v, ok := c.last(); ok {
				return v, nil
			}
			return deploy.View{}, context.Cause(ctx)
		}
		c.mu.Lock()
		if err := c.err; err != nil && !c.known {
			c.mu.Unlock()
			return deploy.View{}, err
		}
		c.mu.Unlock()
	}
}

// refresh reads, and ends the read that get has begun. It does not end with the
// caller's request: others wait for it too.
func (c *cellCache) refresh(ctx context.Context, began time.Time) (deploy.View, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.timeout)
	defer cancel()
	v, err := c.read(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.reading)
	c.reading, c.err = nil, err
	if err == nil {
		c.view, c.known, c.at, c.failed = v, true, began, time.Time{}
		return v, nil
	}
	c.failed = time.Now()
	if c.known {
		return c.view, nil
	}
	return deploy.View{}, err
}

// tenantCache remembers where tenants are placed: those that were asked for last.
type tenantCache struct {
	max  int
	keep time.Duration // of a movable directory's

	mu    sync.Mutex
	order *list.List                       // of *placed, last used first; guarded by mu
	by    map[cells.TenantID]*list.Element // guarded by mu
}

type placed struct {
	tenant cells.TenantID
	cell   cells.CellID
	until  time.Time // zero is for ever
}

func newTenantCache(max int, keep time.Duration) *tenantCache {
	return &tenantCache{max: max, keep: keep, order: list.New(), by: map[cells.TenantID]*list.Element{}}
}

func (c *tenantCache) get(t cells.TenantID) (cells.CellID, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.by[t]
	if e == nil {
		return "", false
	}
	p := e.Value.(*placed)
	if !p.until.IsZero() && time.Now().After(p.until) {
		c.order.Remove(e)
		delete(c.by, t)
		return "", false
	}
	c.order.MoveToFront(e)
	return p.cell, true
}

func (c *tenantCache) put(t cells.TenantID, cell cells.CellID, kind deploy.Kind) {
	p := &placed{tenant: t, cell: cell}
	if kind == deploy.Movable {
		p.until = time.Now().Add(c.keep)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.by[t]; e != nil {
		e.Value = p
		c.order.MoveToFront(e)
		return
	}
	for len(c.by) >= c.max {
		last := c.order.Back()
		delete(c.by, last.Value.(*placed).tenant)
		c.order.Remove(last)
	}
	c.by[t] = c.order.PushFront(p)
}
