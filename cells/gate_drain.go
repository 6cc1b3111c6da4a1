// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// maxHolders bounds the admissions that a [DrainError] names.
const maxHolders = 8

// DrainError says what a drain still waited for when its context ended.
type DrainError struct {
	Tenant   TenantID
	Cell     CellID
	Epoch    Epoch
	InFlight int
	// Holders are the longest running, at most 8.
	Holders []Holder
	// Err is the cause of the context.
	Err error
}

// Holder is an admission that is not done.
type Holder struct {
	// Label is what the admission was asked for with: a path, a method, a job.
	Label string
	Epoch Epoch
	// Stream: its context was cancelled when the gate closed.
	Stream bool
	// For is how long it has been in flight.
	For time.Duration
}

// Error implements error.
func (e *DrainError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cells: drain of tenant %s in cell %s up to epoch %d: %d in flight", e.Tenant, e.Cell, e.Epoch, e.InFlight)
	for i, h := range e.Holders {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		kind := "request"
		if h.Stream {
			kind = "stream"
		}
		label := h.Label
		if label == "" {
			label = "unnamed"
		}
		fmt.Fprintf(&b, "%s%s %s for %s", sep, kind, label, h.For.Round(time.Millisecond))
	}
	if n := e.InFlight - len(e.Holders); n > 0 && len(e.Holders) > 0 {
		fmt.Fprintf(&b, " and %d more", n)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, " (%v)", e.Err)
	}
	return b.String()
}

// Unwrap returns the cause of the context that ended.
func (e *DrainError) Unwrap() error { return e.Err }

// Drain closes the tenant's gate at route's revision, tells the router about
// route, cancels the tenant's streams and jobs, and waits until nothing that was
// admitted at route.Epoch or below is in flight. After it returns nil, nothing
// will be, unless a newer route gives such an epoch back to the cell (a Floor
// below it).
//
// The gate opens again with a newer revision of the route that is ACTIVE here.
//
// It returns a [*DrainError] when ctx ends first (the gate stays closed),
// [ErrInvalid] for a route of another cell or without a revision, and
// [ErrStaleOrder] when a newer route has opened the epoch again.
func (g *Gates) Drain(ctx context.Context, route TenantRoute) error {
	if err := ValidateRoute(route); err != nil {
		return err
	}
	if route.CellID != g.cell {
		return fmt.Errorf("%w: drain of tenant %s in cell %s asked of cell %s", ErrInvalid, route.TenantID, route.CellID, g.cell)
	}
	if route.Revision == 0 {
		return fmt.Errorf("%w: drain of tenant %s by a route without a revision", ErrInvalid, route.TenantID)
	}
	g.router.Observe(route)
	if cur := g.router.view.find(route.TenantID); cur.revision > route.Revision &&
		cur.state == StateActive && cur.cell == g.cell && cur.floor <= route.Epoch {
		return fmt.Errorf("%w: drain of tenant %s at revision %d, which is served again since revision %d",
			ErrStaleOrder, route.TenantID, route.Revision, cur.revision)
	}
	for {
		t, d := g.closeGate(&route)
		if d == nil {
			return nil
		}
		select {
		case <-d.empty:
			// Look again: the route may have been handed in while it was ACTIVE.
		case <-ctx.Done():
			return g.giveUp(t, d, &route, context.Cause(ctx))
		}
	}
}

// closeGate closes the gate; d is nil when nothing is in flight.
func (g *Gates) closeGate(route *TenantRoute) (t *gate, d *drain) {
	for {
		t = g.gate(route.TenantID)
		t.mu.Lock()
		if !t.dropped {
			break
		}
		t.mu.Unlock()
	}
	defer t.mu.Unlock()
	t.closed = max(t.closed, route.Revision)
	g.endStreams(t, route.Epoch+1, route)
	n := 0
	for a := t.first; a != nil; a = a.next {
		if a.Epoch <= route.Epoch {
			n++
		}
	}
	if n == 0 {
		return t, nil
	}
	d = &drain{epoch: route.Epoch, left: n, empty: make(chan struct{})}
	t.drains = append(t.drains, d)
	return t, d
}

func (g *Gates) giveUp(t *gate, d *drain, route *TenantRoute, cause error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, o := range t.drains {
		if o == d {
			t.drains = append(t.drains[:i:i], t.drains[i+1:]...)
			break
		}
	}
	e := &DrainError{Tenant: route.TenantID, Cell: g.cell, Epoch: route.Epoch, Err: cause}
	now := time.Since(g.born)
	// The list is in the order of admission, newest first: the last ones seen have
	// been there longest.
	for a := t.first; a != nil; a = a.next {
		if a.Epoch > route.Epoch {
			continue
		}
		e.InFlight++
		if len(e.Holders) == maxHolders {
			copy(e.Holders, e.Holders[1:])
			e.Holders = e.Holders[:maxHolders-1]
		}
		e.Holders = append(e.Holders, Holder{Label: a.label, Epoch: a.Epoch, Stream: a.long != nil, For: now - a.begun})
	}
	if e.InFlight == 0 {
		return nil
	}
	return e
}
