// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// sweeperState is what the sweeper remembers between its rounds; used by its
// goroutine only.
type sweeperState struct {
	moves    takeover[cells.MoveID]
	reserved map[cells.TenantID]heardRow
	retries  map[cells.TenantID]retryAt
}

type heardRow struct {
	revision cells.Revision
	at       time.Time
}

type retryAt struct {
	revision cells.Revision
	at       time.Time
	wait     time.Duration
}

func newSweeperState(s *Server) sweeperState {
	return sweeperState{moves: newTakeover[cells.MoveID](s), reserved: map[cells.TenantID]heardRow{},
		retries: map[cells.TenantID]retryAt{}}
}

// sweep looks for unfinished work whose driver has died, and does it.
func (e *executor) sweep(ctx context.Context) {
	e.s.sweepEvery(ctx, "moves", nil, e.sweepOnce)
}

func (e *executor) sweepOnce(ctx context.Context) error {
	err := errors.Join(e.sweepMoves(ctx), e.sweepReserved(ctx), e.endReceipts(ctx))
	e.sweepRoutes(ctx)
	return err
}

// sweepMoves shows that this process drives its moves, and takes over those whose
// drivers have shown no sign of life for a while. Which driver is right does not
// matter for safety.
func (e *executor) sweepMoves(ctx context.Context) error {
	if err := e.s.store.Beat(ctx, e.s.instance); err != nil {
		return err
	}
	beats, err := e.s.store.MoveBeats(ctx)
	if err != nil {
		return err
	}
	// One of this process that it does not drive was stopped here, or created just now.
	return e.sweeper.moves.look(beats, func(id cells.MoveID) bool { return e.tracker(id) != nil },
		func(b MoveBeat) error { return e.takeMove(ctx, b) })
}

func (e *executor) takeMove(ctx context.Context, seen MoveBeat) error {
	ok, err := e.s.store.TakeMove(ctx, seen, e.s.instance)
	if err != nil || !ok {
		return err
	}
	rec, err := e.s.store.Move(ctx, seen.ID)
	if err != nil {
		return err
	}
	e.s.log.Info("move taken over", "move", rec.ID, "tenant", rec.Tenant, "from", seen.Driver, "state", rec.State, "step", rec.Step)
	e.s.metrics.takeovers.Inc()
	e.start(rec)
	return nil
}

// sweepReserved finishes the claims whose makers have died.
func (e *executor) sweepReserved(ctx context.Context) error {
	st := &e.sweeper
	now := time.Now()
	known := map[cells.TenantID]bool{}
	var late []LedgerRow
	after := cells.TenantID("")
	for {
		list, err := e.s.store.Reserved(ctx, after, api.MaxPage)
		if err != nil {
			return err
		}
		for _, l := range list {
			known[l.Tenant] = true
			h, ok := st.reserved[l.Tenant]
			if !ok || h.revision != l.Revision {
				st.reserved[l.Tenant] = heardRow{revision: l.Revision, at: now}
			} else if now.Sub(h.at) >= e.s.cfg.TakeOver {
				late = append(late, l)
			}
		}
		if len(list) < api.MaxPage {
			break
		}
		after = list[len(list)-1].Tenant
	}
	for t := range st.reserved {
		if !known[t] {
			delete(st.reserved, t)
		}
	}
	if len(late) > 0 {
		work, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		e.s.finishReserved(work, late)
	}
	return nil
}

// sweepRoutes resumes what no record is driven for: deletions, what is left
// behind, and moves that were begun without this directory.
func (e *executor) sweepRoutes(ctx context.Context) {
	st := &e.sweeper
	now := time.Now()
	known := map[cells.TenantID]bool{}
	for _, o := range e.s.follow.unfinished() {
		tenant := o.row.TenantID
		known[tenant] = true
		if onlyHeld(&o.row) || now.Sub(o.since) < e.patience(&o.row) || e.driven(&o.row) {
			continue
		}
		r, ok := st.retries[tenant]
		if !ok || r.revision != o.row.Revision {
			r = retryAt{revision: o.row.Revision, wait: cleanFirst}
		}
		if now.Before(r.at) {
			continue
		}
		r.wait = min(2*r.wait, cleanLast)
		r.at = now.Add(r.wait)
		st.retries[tenant] = r
		e.tend(ctx, tenant)
	}
	for t := range st.retries {
		if !known[t] {
			delete(st.retries, t)
		}
	}
}

// patience is for how long an unfinished route may stand still before it is taken
// for abandoned. A move that is being prepared may do so for as long as a copy
// takes, and whoever prepares it elsewhere is not known here.
func (e *executor) patience(row *cells.TenantRoute) time.Duration {
	switch {
	case row.Preparing():
		return 12 * e.s.cfg.TakeOver
	case row.Moving() && row.State != cells.StateCommitting:
		return e.s.cfg.TakeOver + max(time.Until(row.Deadline), 0)
	}
	return e.s.cfg.TakeOver
}

// driven reports whether a record of this directory's store covers all that is
// unfinished: then its driver, here or elsewhere, does it.
func (e *executor) driven(row *cells.TenantRoute) bool {
	covered := e.sweeper.moves.knows
	switch {
	case row.State == cells.StateDeleting:
		return false
	case row.MoveID != "": // what else is left comes after the move
		return covered(row.MoveID)
	}
	for _, r := range row.Residue {
		if !r.Held() && !covered(r.Move) {
			return false
		}
	}
	return true
}

// tend resumes a route in the background.
func (e *executor) tend(ctx context.Context, tenant cells.TenantID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.tending[tenant] || ctx.Err() != nil {
		return
	}
	e.tending[tenant] = true
	e.s.wg.Go(func() {
		defer func() {
			e.mu.Lock()
			delete(e.tending, tenant)
			e.mu.Unlock()
		}()
		select {
		case e.sweeps <- struct{}{}:
			defer func() { <-e.sweeps }()
		case <-ctx.Done():
			return
		}
		res, err := e.resume(ctx, tenant)
		switch {
		case ctx.Err() != nil:
		case err != nil && !errors.Is(err, cells.ErrRolledBack):
			e.s.log.Warn("unfinished route not resumed; trying again", "tenant", tenant, "err", err)
		default:
			if !unfinishedRoute(&res.Route) && res.Route.Revision > 0 {
				e.s.follow.forget(tenant, res.Route.Revision)
			}
			e.s.log.Info("unfinished route resumed", "tenant", tenant, "state", res.Route.State)
		}
	})
}

// resume drives an unfinished route on. A move whose record is closed already was
// refused or given up when the outcome of its first write was not known: the write
// arrived late, and nobody wants the move any more.
func (e *executor) resume(ctx context.Context, tenant cells.TenantID) (cells.MoveResult, error) {
	row, err := e.s.table.Get(ctx, tenant)
	if err != nil {
		return cells.MoveResult{}, err
	}
	if row.Preparing() {
		rec, err := e.s.store.Move(ctx, row.MoveID)
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			return cells.MoveResult{}, err
		}
		if err == nil && rec.State.Final() {
			if err := e.controller().Rollback(ctx, tenant, "its record says "+string(rec.State)); err != nil {
				return cells.MoveResult{}, err
			}
		}
	}
	return e.controller().Resume(ctx, tenant)
}
