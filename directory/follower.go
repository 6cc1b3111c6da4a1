// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// home is what the ledger was last told of a tenant.
type home struct {
	cell   cells.CellID
	exists bool
}

// openRoute is a route that something is unfinished about.
type openRoute struct {
	row   cells.TenantRoute
	since time.Time // when this process first saw it at that revision
}

// follower reads the whole table, watches it, settles the ledger and remembers
// which routes are unfinished. When the watch breaks it starts over.
type follower struct {
	s *Server

	homes map[cells.TenantID]home // used by run only

	mu       sync.Mutex
	open     map[cells.TenantID]openRoute // guarded by mu
	revision cells.Revision               // guarded by mu
	listed   bool                         // guarded by mu; a whole list was read at least once
	broken   string                       // guarded by mu; why the watch does not stand, or ""
	heard    time.Time                    // guarded by mu; last news or sign of life
}

func newFollower(s *Server) *follower {
	return &follower{s: s, homes: map[cells.TenantID]home{}, open: map[cells.TenantID]openRoute{}, broken: "not read yet"}
}

func (f *follower) run(ctx context.Context) {
	const shortest, longest = 50 * time.Millisecond, 5 * time.Second
	wait := shortest
	for ctx.Err() == nil {
		began := time.Now()
		err := f.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		f.mu.Lock()
		f.broken = "the watch of the routes broke"
		f.mu.Unlock()
		f.s.log.Warn("routes not followed; reading them again", "err", err)
		f.s.metrics.watchBreaks.Inc()
		if time.Since(began) > longest {
			wait = shortest
		}
		if !sleep(ctx, wait) {
			return
		}
		wait = min(2*wait, longest)
	}
}

// follow reads all routes and then every change, until something breaks.
func (f *follower) follow(ctx context.Context) error {
	from, err := f.list(ctx)
	if err != nil {
		return err
	}
	w, err := f.s.table.Watch(ctx, from)
	if err != nil {
		return err
	}
	defer func() { _ = w.Close() }()
	f.mu.Lock()
	f.listed, f.broken = true, ""
	f.mu.Unlock()
	for {
		u, err := w.Next(ctx)
		if err != nil {
			return err
		}
		if err := f.take(ctx, u.Routes, u.Revision); err != nil {
			return err
		}
	}
}

func (f *follower) list(ctx context.Context) (cells.Revision, error) {
	var from cells.Revision
	opts := cells.ListOptions{Limit: 1000}
	seen := map[cells.TenantID]bool{}
	for {
		page, err := f.s.table.List(ctx, opts)
		if err != nil {
			return 0, err
		}
		if opts.After == "" {
			from = page.Revision
		}
		for i := range page.Routes {
			seen[page.Routes[i].TenantID] = true
		}
		if err := f.take(ctx, page.Routes, from); err != nil {
			return 0, err
		}
		if page.Next == "" {
			break
		}
		opts.After = page.Next
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for t := range f.open {
		if !seen[t] {
			delete(f.open, t)
		}
	}
	return from, nil
}

// unfinishedRoute reports whether somebody has to do something about the row.
func unfinishedRoute(r *cells.TenantRoute) bool {
	return r.MoveID != "" || r.Moving() || r.State == cells.StateDeleting || len(r.Residue) > 0
}

// take settles the ledger for routes that came or moved, and remembers the rest.
func (f *follower) take(ctx context.Context, rows []cells.TenantRoute, rev cells.Revision) error {
	var moved []cells.TenantRoute
	now := time.Now()
	f.mu.Lock()
	for i := range rows {
		r := &rows[i]
		if h, ok := f.homes[r.TenantID]; !ok || h != homeOf(r) {
			moved = append(moved, *r)
		}
		old, was := f.open[r.TenantID]
		switch {
		case was && old.row.Revision >= r.Revision:
		case unfinishedRoute(r):
			f.open[r.TenantID] = openRoute{row: r.Clone(), since: now}
		default:
			delete(f.open, r.TenantID)
		}
	}
	f.revision, f.heard = max(f.revision, rev), now
	f.mu.Unlock()
	if len(moved) == 0 {
		return nil
	}
	if err := f.s.settle(ctx, moved...); err != nil {
		return fmt.Errorf("settling the ledger: %w", err)
	}
	for i := range moved {
		f.homes[moved[i].TenantID] = homeOf(&moved[i])
	}
	return nil
}

func homeOf(r *cells.TenantRoute) home {
	if r.State == cells.StateDeleted {
		return home{}
	}
	return home{cell: r.CellID, exists: true}
}

// unfinished returns the routes that were unfinished when last seen.
func (f *follower) unfinished() []openRoute {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]openRoute, 0, len(f.open))
	for _, o := range f.open {
		out = append(out, o)
	}
	return out
}

// forget drops a route that turned out to be finished.
func (f *follower) forget(tenant cells.TenantID, rev cells.Revision) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o, ok := f.open[tenant]; ok && o.row.Revision <= rev {
		delete(f.open, tenant)
	}
}

// behind says why the routes are not known, or "".
func (f *follower) behind() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.listed {
		return "not read yet"
	}
	return f.broken
}

func (f *follower) position() (rev cells.Revision, age time.Duration, open int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.heard.IsZero() {
		age = time.Since(f.heard)
	}
	return f.revision, age, len(f.open)
}
