// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"time"
)

// refreshTimeout bounds one read of a row from the table.
const refreshTimeout = 5 * time.Second

// flight is one read of a tenant's row that several callers share.
type flight struct {
	done  chan struct{} // closed when route and err are set
	route TenantRoute
	err   error
	next  *flight // the read that begins when this one ends; guarded by Router.mu
}

// Refresh reads the tenant's row from the table, tells it to the view and returns
// it. The read begins after the call, and at most one read of a tenant runs at a
// time: callers that come while it runs share the next one. Errors are those of
// [RoutingTable.Get], the cause of ctx, [ErrClosed], and [ErrInvalid] for a row that
// the view refused to believe.
func (r *Router) Refresh(ctx context.Context, tenant TenantID) (TenantRoute, error) {
	if err := tenant.Validate(); err != nil {
		return TenantRoute{}, err
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return TenantRoute{}, ErrClosed
	}
	f := r.flights[tenant]
	switch {
	case f == nil:
		f = &flight{done: make(chan struct{})}
		r.flights[tenant] = f
		r.wg.Go(func() { r.fly(tenant, f) })
	case f.next == nil:
		f.next = &flight{done: make(chan struct{})}
		f = f.next
	default:
		f = f.next
	}
	r.mu.Unlock()
	select {
	case <-f.done:
		return f.route.Clone(), f.err
	case <-ctx.Done():
		return TenantRoute{}, context.Cause(ctx)
	}
}

// fly reads the row for f, and then for those that came while it read.
func (r *Router) fly(tenant TenantID, f *flight) {
	for f != nil {
		f.route, f.err = r.readThrough(tenant)
		r.mu.Lock()
		next := f.next
		if next == nil {
			delete(r.flights, tenant)
		} else {
			r.flights[tenant] = next
		}
		r.mu.Unlock()
		close(f.done)
		f = next
	}
}

func (r *Router) readThrough(tenant TenantID) (TenantRoute, error) {
	ctx, cancel := context.WithTimeout(r.life, refreshTimeout)
	defer cancel()
	route, err := r.table.Get(ctx, tenant)
	if err != nil {
		if r.life.Err() != nil {
			err = ErrClosed
		}
		return TenantRoute{}, err
	}
	return route, r.observe(route.Clone())
}
