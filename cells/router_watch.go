// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cloister-dev/cloister/cells/internal/packed"
)

const (
	watchBackoffMin = 50 * time.Millisecond
	watchBackoffMax = 5 * time.Second
	// watchLogEvery is how often an outage of the table is logged.
	watchLogEvery = time.Minute
	// coldStart bounds the first read of the table when there is a snapshot to
	// start from instead.
	coldStart = 3 * time.Second
)

// errBehind: the table has news that the watch did not deliver.
var errBehind = fmt.Errorf("%w: the watch delivers nothing although the table has changed", ErrUnavailable)

// firstLoad fills the view from the table or else from the snapshot.
func (r *Router) firstLoad(ctx context.Context) error {
	if r.cfg.snapshotPath == "" {
		return r.relist(ctx)
	}
	lctx, cancel := context.WithTimeout(ctx, coldStart)
	err := r.relist(lctx)
	cancel()
	if err == nil || ctx.Err() != nil {
		return err
	}
	r.status.broke(err)
	if serr := r.loadSnapshot(); serr != nil {
		return fmt.Errorf("the table cannot be read (%w) and neither can the snapshot: %w", err, serr)
	}
	r.cfg.log.Warn("cells: the table cannot be read; started from the last known good routes",
		"revision", r.view.revision(), "age", r.age(), "err", err)
	return nil
}

// relist reads the whole table. Rows that the view has and the table no longer
// lists, although it is as new as them, were removed behind everybody's back: no
// table does that. They become tombstones here, so that such a tenant does not
// fall to the default cell while another cell may still hold it open.
func (r *Router) relist(ctx context.Context) error {
	begun := time.Now()
	known := r.view.size() > 0
	seen := packed.New()
	var first Revision
	var opts ListOptions
	for n := 0; ; n++ {
		page, err := r.table.List(ctx, opts)
		if err != nil {
			return err
		}
		if n == 0 {
			first = page.Revision
			if have := r.view.revision(); first < have {
				return fmt.Errorf("%w: the table is at revision %d and was at %d: was it restored from a backup?", ErrInvalid, first, have)
			}
		}
		for _, route := range page.Routes {
			if known {
				seen.Put(string(route.TenantID), packed.Record{})
			}
			_ = r.observe(route)
		}
		if page.Next == "" {
			break
		}
		if page.Next <= opts.After {
			return fmt.Errorf("%w: the table's list does not advance after %q", ErrInvalid, opts.After)
		}
		opts.After = page.Next
	}
	if known {
		r.buryVanished(seen, first)
	}
	r.view.advance(first)
	r.refreshed(begun)
	r.loaded.Store(true)
	r.status.fromTable()
	r.markDirty()
	return nil
}

func (r *Router) buryVanished(seen *packed.Table, first Revision) {
	var gone []*TenantRoute // few, if any
	r.view.each(func(cur *TenantRoute) bool {
		if _, ok := seen.Get(string(cur.TenantID)); !ok && cur.Revision <= first && cur.State != StateDeleted {
			gone = append(gone, cur)
		}
		return true
	})
	for _, cur := range gone {
		tomb := &TenantRoute{
			TenantID: cur.TenantID, State: StateDeleted, CellID: cur.CellID, Epoch: cur.Epoch, Floor: cur.Floor,
			Reason: "the row is gone from the table", Revision: first,
		}
		r.cfg.log.Error("cells: a tenant's row is gone from the table; it counts as deleted here",
			"tenant", cur.TenantID, "cell", cur.CellID, "epoch", cur.Epoch, "was", cur.State.String())
		if _, err := r.view.put(tomb, true, r.changed); err != nil {
			r.status.refuse(err)
		}
	}
}

// follow keeps the view up to date until Close.
func (r *Router) follow() {
	backoff := watchBackoffMin
	listed := false    // the table was listed anew, and no watch has gone on from there yet
	var told time.Time // when a break was last logged
	for r.life.Err() == nil {
		progress, err := r.watchOnce(r.life)
		if r.life.Err() != nil {
			return
		}
		if progress {
			backoff, listed = watchBackoffMin, false
		}
		if errors.Is(err, ErrCompacted) && !listed {
			if err = r.relist(r.life); err == nil {
				listed = true
				r.status.relisted()
				r.cfg.log.Info("cells: the routes were listed anew", "revision", r.view.revision())
				continue
			}
			if r.life.Err() != nil {
				return
			}
		}
		r.status.broke(err)
		// An outage is told once and then once a minute, not with each attempt.
		if progress || told.IsZero() || time.Since(told) >= watchLogEvery {
			told = time.Now()
			r.cfg.log.Warn("cells: the watch on the routes broke; watching again",
				"revision", r.view.revision(), "age", r.age(), "in", backoff, "err", err)
		}
		t := time.NewTimer(jittered(backoff))
		select {
		case <-t.C:
		case <-r.life.Done():
			t.Stop()
			return
		}
		backoff, listed = min(2*backoff, watchBackoffMax), false
	}
}

type watchStep struct {
	update RouteUpdate
	err    error
}

// watchOnce follows one watch until it breaks. progress reports whether it
// delivered anything.
func (r *Router) watchOnce(ctx context.Context) (progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := r.table.Watch(ctx, r.view.revision())
	if err != nil {
		return false, err
	}
	r.status.watching(true)
	steps, done := make(chan watchStep), make(chan struct{})
	go func() {
		defer close(done)
		for {
			u, err := w.Next(ctx)
			select {
			case steps <- watchStep{u, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() {
		cancel()
		_ = w.Close()
		<-done
		r.status.watching(false)
	}()

	patience := r.cfg.staleAfter / 3
	quiet := time.NewTimer(patience)
	defer quiet.Stop()
	var behind Revision
	for {
		select {
		case <-ctx.Done():
			return progress, context.Cause(ctx)
		case s := <-steps:
			if s.err != nil {
				return progress, s.err
			}
			if err := r.apply(s.update); err != nil {
				return progress, err
			}
			progress, behind = true, 0
			quiet.Reset(patience)
		case <-quiet.C:
			// No sign of life: ask the table whether there is news.
			if behind > r.view.revision() {
				return progress, errBehind
			}
			next, err := r.probe(ctx, patience)
			if err != nil {
				return progress, err
			}
			if next > r.view.revision() {
				// Something has just changed, perhaps: it gets a moment to arrive.
				behind = next
				quiet.Reset(min(patience, time.Second))
				continue
			}
			progress = true
			quiet.Reset(patience)
		}
	}
}

// probe reads the table's revision; if it is the view's, the view is complete.
func (r *Router) probe(ctx context.Context, limit time.Duration) (Revision, error) {
	begun := time.Now()
	pctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	page, err := r.table.List(pctx, ListOptions{Limit: 1})
	if err != nil {
		return 0, fmt.Errorf("asking a quiet table for its revision: %w", err)
	}
	have := r.view.revision()
	switch {
	case page.Revision < have:
		return 0, fmt.Errorf("%w: the table is at revision %d and was at %d: was it restored from a backup?", ErrInvalid, page.Revision, have)
	case page.Revision == have:
		r.refreshed(begun)
		r.status.fromTable()
	}
	return page.Revision, nil
}

// apply takes one step of a watch into the view.
func (r *Router) apply(u RouteUpdate) error {
	if have := r.view.revision(); u.Revision < have {
		return fmt.Errorf("%w: the watch is at revision %d and the view at %d", ErrInvalid, u.Revision, have)
	}
	for _, route := range u.Routes {
		_ = r.observe(route)
	}
	r.view.advance(u.Revision)
	r.refreshed(time.Now())
	r.status.fromTable()
	return nil
}

// jittered returns a duration between d/2 and d.
func jittered(d time.Duration) time.Duration {
	return d/2 + rand.N(d/2+1)
}
