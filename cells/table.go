// SPDX-License-Identifier: Apache-2.0

package cells

import "context"

// RoutingTable stores the routes. Its compare-and-set is the only place where
// ownership is decided. Every implementation passes the suite of package
// tabletest; all methods are safe for concurrent use.
type RoutingTable interface {
	// Get returns the tenant's row, tombstones included. The caller owns the
	// result. Errors: [ErrNotFound] when there is no row, [ErrUnavailable] (wrapped)
	// when the store could not be read.
	Get(ctx context.Context, tenant TenantID) (TenantRoute, error)

	// CompareAndSet writes next if the tenant's row is at revision old (0: there
	// is no row) and returns it with its new Revision. It refuses with
	// [ErrConflict] when the row is at another revision, and with [ErrInvalid]
	// when next would break an invariant that can be seen from the two rows: a
	// lower epoch, or the same epoch for another cell.
	// After any other error the outcome is unknown: the caller reads the row and
	// compares Stamp.
	CompareAndSet(ctx context.Context, old Revision, next TenantRoute) (TenantRoute, error)

	// List returns rows in tenant order, tombstones included, and the revision
	// that the page is at least as new as: watching from the first page's
	// Revision misses no change.
	List(ctx context.Context, opts ListOptions) (RoutePage, error)

	// Watch reports each change with a revision above from, in order, at least
	// the last one of every tenant. It fails with [ErrCompacted] when the table
	// no longer knows what changed since from: list again, then watch from there.
	Watch(ctx context.Context, from Revision) (RouteWatcher, error)
}

// ListOptions selects a page of routes.
type ListOptions struct {
	// After is the last tenant of the page before; "" starts at the first.
	After TenantID
	// Limit bounds the page; 0 means 1000, larger than 10000 means 10000.
	Limit int
	// Cell, if set, keeps only the routes whose CellID, SourceCell or TargetCell it is.
	Cell CellID
}

// RoutePage is one page of a list. The caller owns it.
type RoutePage struct {
	Routes []TenantRoute
	// Revision of the table when the page was read.
	Revision Revision
	// Next is the After of the next page; "" when this is the last.
	Next TenantID
}

// RouteWatcher yields changes. It is used by one goroutine; Close may be called
// from any.
type RouteWatcher interface {
	// Next blocks until there are changes or a sign of life, or until the context
	// or the watch ends. It returns an error (never a silent end) when the watch
	// is broken; the caller watches again from the last revision it has seen.
	Next(ctx context.Context) (RouteUpdate, error)
	// Close releases the watch; a Next that is waiting returns [ErrClosed].
	Close() error
}

// RouteUpdate is a step of a watch: the view now includes every change up to
// Revision. Routes may be empty: then it says that the watch is alive and how
// far it is. The caller owns it.
type RouteUpdate struct {
	Routes   []TenantRoute
	Revision Revision
}
