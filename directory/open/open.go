// SPDX-License-Identifier: Apache-2.0

// Package open opens a directory's store by its address. It decides nothing: see the
// packages directory/sqlite and directory/postgres for what each one promises.
//
// A router has to start while its directory is down ([Deployments]): then each use of
// the store tries to open it, and fails with [cells.ErrUnavailable] until that
// succeeds. An address that is malformed, a store that this build cannot run on, and a
// database without a synchronous standby are errors at once.
package open

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/postgres"
	"github.com/cloister-dev/cloister/directory/sqlite"
)

// Help lists the addresses, for help texts.
const Help = "sqlite:PATH, postgres://…"

// Options of a store.
type Options struct {
	// AllowAsynchronous as in [postgres.Options]; it is for Postgres only.
	AllowAsynchronous bool
	Logger            *slog.Logger
}

// Store is a directory's store with its deployments.
type Store interface {
	directory.Store
	Deployments() deploy.Store
}

// Open opens the store at an address. The caller closes it. Errors wrap
// [cells.ErrInvalid] or [cells.ErrUnavailable].
func Open(ctx context.Context, address string, o Options) (Store, error) {
	scheme, path, _ := strings.Cut(address, ":")
	switch {
	case scheme == "sqlite" && path != "":
		return sqlite.Open(ctx, path)
	case scheme == "postgres" || scheme == "postgresql":
		return postgres.Open(ctx, address, postgres.Options{AllowAsynchronous: o.AllowAsynchronous, Logger: o.Logger})
	}
	return nil, fmt.Errorf("%w: a directory's store is one of %s", cells.ErrInvalid, Help)
}

// Lazy is a store of deployments that may not be open yet. Make it with [Deployments].
type Lazy struct {
	open func(context.Context) (Store, error)

	mu     sync.Mutex
	store  Store // nil until it is open; guarded by mu
	closed bool  // guarded by mu
}

var _ deploy.Store = (*Lazy)(nil)

// Deployments opens the deployments at an address, or will when they are used. The
// caller closes it. The error wraps [cells.ErrInvalid].
func Deployments(ctx context.Context, address string, o Options) (*Lazy, error) {
	l := &Lazy{open: func(ctx context.Context) (Store, error) { return Open(ctx, address, o) }}
	if _, err := l.get(ctx); err != nil && !errors.Is(err, cells.ErrUnavailable) {
		return nil, err
	}
	return l, nil
}

// get returns the store. Two callers may open it at once; one is kept.
func (l *Lazy) get(ctx context.Context) (Store, error) {
	l.mu.Lock()
	s, closed := l.store, l.closed
	l.mu.Unlock()
	switch {
	case closed:
		return nil, fmt.Errorf("%w: the directory's store is closed", cells.ErrUnavailable)
	case s != nil:
		return s, nil
	}
	s, err := l.open(ctx)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return nil, errors.Join(fmt.Errorf("%w: the directory's store is closed", cells.ErrUnavailable), s.Close())
	case l.store != nil:
		return l.store, s.Close()
	}
	l.store = s
	return s, nil
}

// Close closes the store if it was opened.
func (l *Lazy) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed = true; l.store == nil {
		return nil
	}
	return l.store.Close()
}

func use[T any](ctx context.Context, l *Lazy, f func(Store) (T, error)) (T, error) {
	s, err := l.get(ctx)
	if err != nil {
		return *new(T), err
	}
	return f(s)
}

// Ping reports whether the store is ready, its standbys included.
func (l *Lazy) Ping(ctx context.Context) error {
	_, err := use(ctx, l, func(s Store) (struct{}, error) { return struct{}{}, s.Ping(ctx) })
	return err
}

// Audit lists the audit.
func (l *Lazy) Audit(ctx context.Context, f directory.AuditFilter) ([]api.AuditEntry, error) {
	return use(ctx, l, func(s Store) ([]api.AuditEntry, error) { return s.Audit(ctx, f) })
}

// Read implements [deploy.Store].
func (l *Lazy) Read(ctx context.Context) (deploy.View, error) {
	return use(ctx, l, func(s Store) (deploy.View, error) { return s.Deployments().Read(ctx) })
}

// Settle implements [deploy.Store].
func (l *Lazy) Settle(ctx context.Context, kind deploy.Kind, audit api.AuditEntry) error {
	_, err := use(ctx, l, func(s Store) (struct{}, error) { return struct{}{}, s.Deployments().Settle(ctx, kind, audit) })
	return err
}

// Change implements [deploy.Store].
func (l *Lazy) Change(ctx context.Context, cell cells.CellID, rule deploy.Rule, audit api.AuditEntry) (deploy.Cell, error) {
	return use(ctx, l, func(s Store) (deploy.Cell, error) { return s.Deployments().Change(ctx, cell, rule, audit) })
}

// Place implements [deploy.Store].
func (l *Lazy) Place(ctx context.Context, c deploy.Call, audit api.AuditEntry) (p deploy.Placement, created bool, err error) {
	p, err = use(ctx, l, func(s Store) (p deploy.Placement, err error) {
		p, created, err = s.Deployments().Place(ctx, c, audit)
		return p, err
	})
	return p, created, err
}

// Placement implements [deploy.Store].
func (l *Lazy) Placement(ctx context.Context, tenant cells.TenantID) (deploy.Placement, error) {
	return use(ctx, l, func(s Store) (deploy.Placement, error) { return s.Deployments().Placement(ctx, tenant) })
}

// Placements implements [deploy.Store].
func (l *Lazy) Placements(ctx context.Context, f deploy.PlacementFilter) ([]deploy.Placement, error) {
	return use(ctx, l, func(s Store) ([]deploy.Placement, error) { return s.Deployments().Placements(ctx, f) })
}

// Reserve implements [deploy.Store].
func (l *Lazy) Reserve(ctx context.Context, r deploy.Repoint, audit api.AuditEntry) error {
	_, err := use(ctx, l, func(s Store) (struct{}, error) { return struct{}{}, s.Deployments().Reserve(ctx, r, audit) })
	return err
}

// Release implements [deploy.Store].
func (l *Lazy) Release(ctx context.Context, tenant cells.TenantID, move cells.MoveID, audit api.AuditEntry) error {
	_, err := use(ctx, l, func(s Store) (struct{}, error) {
		return struct{}{}, s.Deployments().Release(ctx, tenant, move, audit)
	})
	return err
}

// Repoint implements [deploy.Store].
func (l *Lazy) Repoint(ctx context.Context, r deploy.Repoint, audit api.AuditEntry) (deploy.Placement, error) {
	return use(ctx, l, func(s Store) (deploy.Placement, error) { return s.Deployments().Repoint(ctx, r, audit) })
}
