// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// change is what has to be done to a fence: open or close it by the order.
type change struct {
	open  bool
	order cells.FenceOrder
}

// verdict says how a fence stands to its route.
type verdict uint8

const (
	fenceGood   verdict = iota
	fenceBehind         // the change brings it up to the route
	fenceAhead          // it knows of something newer than the route
	fenceLost           // there is none, and a move brought the tenant here
)

// compareFence decides what a fence of the cell must become by the tenant's route;
// f is nil when there is no row. The change is safe for whoever has read the
// route, whatever has become of it since.
func compareFence(cell cells.CellID, r *cells.TenantRoute, f *guard.Fence) (verdict, change) {
	raise := func(open bool, epoch, floor cells.Epoch, move cells.MoveID) (verdict, change) {
		return fenceBehind, change{open, cells.FenceOrder{Cell: cell, Tenant: r.TenantID, Epoch: epoch, Floor: floor, Move: move}}
	}
	var has cells.Epoch // of the row; below every order when there is none
	isOpen := f != nil && f.Open
	if f != nil {
		has = f.Epoch
	}
	if r.CellID == cell {
		switch r.State {
		case cells.StateActive, cells.StateCommitting:
			switch {
			case f == nil && r.DataMark != "":
				return fenceLost, change{}
			case f == nil || has < r.Epoch:
				move := r.MoveID
				if r.State == cells.StateActive {
					move = ""
				}
				return raise(true, r.Epoch, r.Floor, move)
			case has > r.Epoch || !isOpen:
				return fenceAhead, change{}
			}
		case cells.StateCopying:
			switch {
			case f == nil || has < r.Epoch:
				return raise(false, r.Epoch, 0, r.MoveID)
			case isOpen:
				return fenceAhead, change{}
			}
		case cells.StateDeleting, cells.StateDeleted:
			switch {
			case isOpen && has < r.Epoch:
				var move cells.MoveID
				for _, e := range r.Residue {
					if e.Cell == cell {
						move = e.Move
					}
				}
				return raise(false, r.Epoch, 0, move)
			case isOpen:
				return fenceAhead, change{}
			}
		}
		// While a cut has begun and the fence step has not, the source's fence is as
		// it was.
		return fenceGood, change{}
	}
	for _, e := range r.Residue {
		// That of the move under way says what must be if the move is given up.
		if e.Cell != cell || e.Move == r.MoveID {
			continue
		}
		if f == nil || has < e.Epoch {
			return raise(false, e.Epoch, 0, e.Move)
		}
	}
	if !isOpen {
		return fenceGood, change{}
	}
	// Another cell has r.Epoch, and this one does not know that it has lost.
	epoch, move := r.Epoch, cells.MoveID("")
	if m, ok := r.Move(); ok && (m.Target == cell || m.Source == cell) {
		// As the cut closes its source, and as Prepare claims its target.
		epoch, move = m.CloseEpoch(), m.ID
	}
	if has >= epoch {
		return fenceAhead, change{}
	}
	return raise(false, epoch, 0, move)
}

// concerns reports whether a fence of the cell may depend on the route.
func concerns(cell cells.CellID, r *cells.TenantRoute) bool {
	if r.CellID == cell || r.SourceCell == cell || r.TargetCell == cell {
		return true
	}
	for _, e := range r.Residue {
		if e.Cell == cell {
			return true
		}
	}
	return false
}

// routeChanged is called by the router, in order.
func (m *Member) routeChanged(old, next cells.TenantRoute) {
	m.expect(&old, &next)
	if m.opts.store != nil && (concerns(m.cfg.Cell, &old) || concerns(m.cfg.Cell, &next)) {
		m.dirty.add(next.TenantID, time.Now().Add(m.opts.settle))
	}
}

// dirtySet holds tenants whose fence is to be looked at, each once, when it is due.
type dirtySet struct {
	mu    sync.Mutex // guards due and queue
	due   map[cells.TenantID]time.Time
	queue []dirtyTenant // in the order of due
}

type dirtyTenant struct {
	tenant cells.TenantID
	due    time.Time
}

// add puts off the tenant to at, which is not before any earlier at.
func (d *dirtySet) add(t cells.TenantID, at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.due == nil {
		d.due = make(map[cells.TenantID]time.Time)
	}
	d.due[t] = at
	d.queue = append(d.queue, dirtyTenant{t, at})
}

// take returns the tenants that are due.
func (d *dirtySet) take(now time.Time) []cells.TenantID {
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []cells.TenantID
	n := 0
	for ; n < len(d.queue) && !d.queue[n].due.After(now); n++ {
		q := d.queue[n]
		if d.due[q.tenant].Equal(q.due) {
			delete(d.due, q.tenant)
			out = append(out, q.tenant)
		}
	}
	d.queue = d.queue[n:]
	if len(d.queue) == 0 {
		d.queue = nil
	}
	return out
}

func (m *Member) isReconciled() bool {
	select {
	case <-m.reconciled:
		return true
	default:
		return false
	}
}

// errLost: the claim of a move's target is in the store that the rows were brought
// to. A store without it is another one.
var errLost = fmt.Errorf("%w: a move brought the tenant to this cell, and the store knows nothing of it: it was lost, or is not the cell's; restore it", cells.ErrUnavailable)

// openForAdmission is the gates' opener.
func (m *Member) openForAdmission(ctx context.Context, o cells.FenceOrder) error {
	select {
	case <-m.reconciled:
	case <-m.life.Done():
		return errLeaving
	case <-ctx.Done():
		return fmt.Errorf("%w: the fences are not reconciled yet", cells.ErrUnavailable)
	}
	// Nearly always the driver of the move, or another process, was here before.
	f, err := m.opts.store.Keeper.Fence(ctx, o.Tenant)
	if err == nil && f.Open && f.Epoch == o.Epoch {
		return nil
	}
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return err
	}
	r := m.router.Lookup(o.Tenant).Route
	if errors.Is(err, cells.ErrNotFound) && r.DataMark != "" {
		return errLost
	}
	// The mark belongs to the route that the order was made from.
	if r.State != 0 && (r.CellID != m.cfg.Cell || r.Epoch != o.Epoch) {
		return fmt.Errorf("%w: the tenant's route has moved on from epoch %d", cells.ErrUnavailable, o.Epoch)
	}
	err = m.openFence(ctx, o, r.EventMark)
	m.metrics.fenced("admission", "open", err)
	return err
}

// openFence opens a fence as a driver does: first the tenant's events start after
// the mark that the route records, then writes are let in. Without the first a
// cell that was opened by its own process could number an event twice.
func (m *Member) openFence(ctx context.Context, o cells.FenceOrder, mark cells.EventSeq) error {
	k := m.opts.store.Keeper
	b := cells.BarrierOrder{Cell: o.Cell, Tenant: o.Tenant, Epoch: o.Epoch, Move: o.Move}
	if err := k.StartEvents(ctx, b, mark); err != nil {
		return err
	}
	return k.OpenFence(ctx, o)
}

const (
	fencePage = 1000
	// reconcilers bounds how many fences are changed at a time.
	reconcilers = 4
	dirtyPoll   = 100 * time.Millisecond
)

// reconcile brings all fences up to the routes, then keeps them so until Close.
func (m *Member) reconcile() {
	if m.opts.store == nil {
		close(m.reconciled)
		m.wake()
		<-m.life.Done()
		return
	}
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		m.setReason("the fences are being reconciled")
		err := m.reconcileAll(m.life)
		if err == nil {
			break
		}
		if m.life.Err() != nil {
			return
		}
		m.log.Warn("member: the fences cannot be reconciled yet; trying again", "in", wait, "err", err)
		m.setReason("the fences cannot be reconciled: " + err.Error())
		if !m.sleep(wait) {
			return
		}
	}
	close(m.reconciled)
	m.wake()
	m.wg.Go(m.probeStore)
	if m.opts.store.Relay != nil {
		m.wg.Go(m.relay)
	}
	poll := time.NewTicker(min(dirtyPoll, max(m.opts.settle, 10*time.Millisecond)))
	defer poll.Stop()
	next := time.Now().Add(m.opts.sweep)
	for {
		select {
		case <-m.life.Done():
			return
		case <-poll.C:
		}
		for _, t := range m.dirty.take(time.Now()) {
			if err := m.reconcileTenant(m.life, t); err != nil && m.life.Err() == nil {
				m.log.Warn("member: a fence could not be reconciled; trying again", "tenant", t, "err", err)
				m.dirty.add(t, time.Now().Add(max(m.opts.settle, time.Second)))
			}
		}
		now := time.Now()
		if m.distrust.Load() && m.router.Status().Source == cells.SourceTable {
			next = now
		}
		if now.Before(next) {
			continue
		}
		next = now.Add(m.opts.sweep)
		if err := m.reconcileAll(m.life); err != nil && m.life.Err() == nil {
			m.log.Warn("member: the fences could not be reconciled; trying again", "err", err)
			next = now.Add(min(m.opts.sweep, 5*time.Second))
		}
		m.wake()
	}
}

// reconcileAll compares every fence with its route and every route with its fence.
func (m *Member) reconcileAll(ctx context.Context) error {
	fromSnapshot := m.router.Status().Source != cells.SourceTable
	fences := make(map[cells.TenantID]guard.Fence)
	for after := cells.TenantID(""); ; {
		page, err := m.opts.store.Keeper.Fences(ctx, after, fencePage)
		if err != nil {
			return err
		}
		for _, f := range page {
			fences[f.Tenant] = f
			after = f.Tenant
		}
		if len(page) < fencePage {
			break
		}
	}
	var work []cells.TenantID
	older := 0
	look := func(r *cells.TenantRoute) {
		var f *guard.Fence
		if row, ok := fences[r.TenantID]; ok {
			f = &row
		}
		v, c := compareFence(m.cfg.Cell, r, f)
		if v == fenceGood {
			return
		}
		work = append(work, r.TenantID)
		// A fence that was never here belongs to a tenant that was placed while no
		// process lived; one that is older than the routes say it was does not.
		if v == fenceBehind && (f != nil || c.order.Epoch > 1) {
			older++
		}
	}
	m.router.Each(func(r cells.TenantRoute) bool {
		if _, has := fences[r.TenantID]; has || concerns(m.cfg.Cell, &r) {
			look(&r)
		}
		return true
	})
	if fromSnapshot && older > 0 && m.distrust.CompareAndSwap(false, true) {
		m.log.Error("member: fences are older than the last known good routes; waiting for the directory", "fences", older)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(reconcilers)
	for _, t := range work {
		g.Go(func() error { return m.reconcileTenant(gctx, t) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if len(work) > 0 {
		m.log.Info("member: fences reconciled", "fences", len(fences), "looked_at", len(work), "older", older)
	}
	if !fromSnapshot {
		m.distrust.Store(false)
	}
	return nil
}

// reconcileTenant brings one fence up to the tenant's route. A fence that knows
// more than the route makes it read the route again; if it still does then, that
// is logged and left, because fences never go back.
func (m *Member) reconcileTenant(ctx context.Context, tenant cells.TenantID) error {
	k := m.opts.store.Keeper
	for try := 0; ; try++ {
		d := m.router.Lookup(tenant)
		if d.Route.State == 0 {
			return nil
		}
		var f *guard.Fence
		row, err := k.Fence(ctx, tenant)
		switch {
		case err == nil:
			f = &row
		case !errors.Is(err, cells.ErrNotFound):
			return err
		}
		v, c := compareFence(m.cfg.Cell, &d.Route, f)
		if v == fenceBehind {
			op := "close"
			if c.open {
				op, err = "open", m.openFence(ctx, c.order, d.Route.EventMark)
			} else {
				err = k.CloseFence(ctx, c.order)
			}
			m.metrics.fenced("reconcile", op, err)
			if err == nil {
				m.log.Info("member: fence reconciled", "tenant", tenant, "op", op, "epoch", c.order.Epoch, "route", d.Route.State.String(), "revision", d.Route.Revision)
				return nil
			}
			if !errors.Is(err, cells.ErrStaleOrder) {
				return err
			}
		}
		if v == fenceGood {
			return nil
		}
		if v == fenceLost {
			m.log.Error("member: the tenant is refused", "tenant", tenant, "err", errLost, "route_epoch", d.Route.Epoch)
			return nil
		}
		if try == 1 {
			m.log.Error("member: a fence is ahead of its route", "tenant", tenant, "fence", row.Epoch, "open", row.Open,
				"route", d.Route.State.String(), "route_cell", d.Route.CellID, "route_epoch", d.Route.Epoch)
			return nil
		}
		rctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		_, err = m.router.Refresh(rctx, tenant)
		cancel()
		if err != nil && !errors.Is(err, cells.ErrNotFound) {
			// The table cannot be read; the fence is on the safe side.
			return nil
		}
	}
}

// relay runs the store's relay until Close.
func (m *Member) relay() {
	for wait := 100 * time.Millisecond; m.life.Err() == nil; wait = min(2*wait, 5*time.Second) {
		begun := time.Now()
		err := m.opts.store.Relay.Run(m.life)
		if m.life.Err() != nil {
			return
		}
		if time.Since(begun) > time.Minute {
			wait = 100 * time.Millisecond
		}
		m.log.Error("member: the relay has stopped; starting it again", "in", wait, "err", err)
		if !m.sleep(wait) {
			return
		}
	}
}
