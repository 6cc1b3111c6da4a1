// SPDX-License-Identifier: Apache-2.0

package open

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cloister-dev/cloister/cells"
)

// Lazy is [Open] for a process that must start while its table cannot be reached:
// then each use of the table tries to open it, and fails with
// [cells.ErrUnavailable] until that succeeds. A malformed address is an error at
// once.
func Lazy(ctx context.Context, address string, opts ...Option) (Table, error) {
	t, err := Open(ctx, address, opts...)
	if err == nil {
		return t, nil
	}
	if !errors.Is(err, cells.ErrUnavailable) {
		return nil, err
	}
	return &lazy{open: func(ctx context.Context) (Table, error) { return Open(ctx, address, opts...) }}, nil
}

// lazy is a table that may not be open yet.
type lazy struct {
	open func(context.Context) (Table, error)

	mu     sync.Mutex // guards all below
	table  Table      // nil until it is open
	closed bool
}

// get returns the table. Two callers may open it at once; one is kept.
func (l *lazy) get(ctx context.Context) (Table, error) {
	l.mu.Lock()
	t, closed := l.table, l.closed
	l.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("%w: table", cells.ErrClosed)
	}
	if t != nil {
		return t, nil
	}
	t, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		_ = t.Close()
		return nil, fmt.Errorf("%w: table", cells.ErrClosed)
	case l.table != nil:
		_ = t.Close()
	default:
		l.table = t
	}
	return l.table, nil
}

// Get implements [cells.RoutingTable].
func (l *lazy) Get(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	t, err := l.get(ctx)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	return t.Get(ctx, tenant)
}

// CompareAndSet implements [cells.RoutingTable].
func (l *lazy) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	t, err := l.get(ctx)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	return t.CompareAndSet(ctx, old, next)
}

// List implements [cells.RoutingTable].
func (l *lazy) List(ctx context.Context, opts cells.ListOptions) (cells.RoutePage, error) {
	t, err := l.get(ctx)
	if err != nil {
		return cells.RoutePage{}, err
	}
	return t.List(ctx, opts)
}

// Watch implements [cells.RoutingTable].
func (l *lazy) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	t, err := l.get(ctx)
	if err != nil {
		return nil, err
	}
	return t.Watch(ctx, from)
}

// Close closes the table, if it is open.
func (l *lazy) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.table == nil {
		return nil
	}
	return l.table.Close()
}
