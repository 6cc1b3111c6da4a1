// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

var (
	errCut  = fmt.Errorf("%w: the network is cut", cells.ErrUnavailable)
	errLost = fmt.Errorf("%w: the answer was lost", cells.ErrUnavailable)
)

// luck is a source of decisions that several goroutines share.
type luck struct {
	mu sync.Mutex // guards r
	r  *rand.Rand
}

func newLuck(seed uint64) *luck { return &luck{r: rand.New(rand.NewPCG(seed, 0x5eed))} }

func (l *luck) n(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.IntN(n)
}

func (l *luck) percent(p int) bool { return l.n(100) < p }

// cuts says who cannot reach whom: drivers and cells, by name.
type cuts struct {
	mu  sync.Mutex // guards off
	off map[[2]string]bool
}

func (c *cuts) set(a, b string, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off[[2]string{a, b}], c.off[[2]string{b, a}] = cut, cut
}

func (c *cuts) between(a, b string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.off[[2]string{a, b}]
}

func (c *cuts) heal() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.off)
}

// shaky is the routing table as a driver reaches it: some calls do not arrive, some
// answers are lost.
type shaky struct {
	cells.RoutingTable
	d *driver
}

func (s shaky) Get(ctx context.Context, t cells.TenantID) (cells.TenantRoute, error) {
	if s.d.trouble(3) {
		return cells.TenantRoute{}, errLost
	}
	return s.RoutingTable.Get(ctx, t)
}

func (s shaky) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if s.d.trouble(3) {
		return cells.TenantRoute{}, errLost
	}
	r, err := s.RoutingTable.CompareAndSet(ctx, old, next)
	if err == nil && s.d.trouble(6) {
		return cells.TenantRoute{}, errLost
	}
	return r, err
}

// orders is what a driver asks of the cells. Each order may be lost, its answer may
// be, and it may arrive once more, late.
type orders struct{ d *driver }

func (o orders) send(ctx context.Context, to cells.CellID, what string, f func(ctx context.Context, p *process) error) error {
	w, d := o.d.w, o.d
	if w.cuts.between(d.name, string(to)) {
		return errCut
	}
	if d.trouble(3) {
		return errLost
	}
	c := w.cells[to]
	if d.trouble(8) || w.broken == StaleOpens { // which needs an order that comes late
		w.later(func(ctx context.Context) {
			w.note("late: %s at %s again", what, to)
			_ = c.call(ctx, f)
		})
	}
	err := c.call(ctx, f)
	if err == nil && d.trouble(4) {
		return errLost
	}
	return err
}

func (o orders) Close(ctx context.Context, f cells.FenceOrder) error {
	return o.send(ctx, f.Cell, fmt.Sprintf("close fence of %s at %d", f.Tenant, f.Epoch), func(ctx context.Context, p *process) error { return p.guard.CloseFence(ctx, f) })
}

func (o orders) Open(ctx context.Context, f cells.FenceOrder) error {
	return o.send(ctx, f.Cell, fmt.Sprintf("open fence of %s at %d", f.Tenant, f.Epoch), func(ctx context.Context, p *process) error { return p.openFence(ctx, f) })
}

func (o orders) Pause(ctx context.Context, b cells.BarrierOrder) (mark cells.EventSeq, err error) {
	err = o.send(ctx, b.Cell, fmt.Sprintf("pause events of %s at %d", b.Tenant, b.Epoch), func(ctx context.Context, p *process) (err error) {
		m, err := p.guard.PauseEvents(ctx, b)
		o.d.mu.Lock() // a late one may run beside it
		defer o.d.mu.Unlock()
		mark = m
		return err
	})
	o.d.mu.Lock()
	defer o.d.mu.Unlock()
	return mark, err
}

func (o orders) Start(ctx context.Context, b cells.BarrierOrder, mark cells.EventSeq) error {
	return o.send(ctx, b.Cell, fmt.Sprintf("start events of %s at %d", b.Tenant, b.Epoch), func(ctx context.Context, p *process) error { return p.guard.StartEvents(ctx, b, mark) })
}

// Drain of a cell without a process has nobody to wait for.
func (o orders) Drain(ctx context.Context, r cells.TenantRoute) error {
	if o.d.w.cells[r.CellID].process() == nil {
		return nil
	}
	return o.send(ctx, r.CellID, fmt.Sprintf("drain %s at %d", r.TenantID, r.Epoch), func(ctx context.Context, p *process) error {
		// A message that comes after another route is of no use.
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return p.gates.Drain(ctx, r)
	})
}

func (o orders) Preflight(ctx context.Context, m cells.MoveRef) (out cells.Preflight, err error) {
	src, err := o.d.w.source(m).Survey(ctx, m.Tenant)
	if err != nil {
		return out, err
	}
	err = o.d.w.cells[m.Target].call(ctx, func(ctx context.Context, p *process) error {
		dst, err := p.mover.Survey(ctx, m.Tenant)
		out = transfer.Compare(m, src, dst)
		return err
	})
	return out, err
}

func (o orders) Prepare(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (out cells.Prediction, err error) {
	err = o.send(ctx, m.Target, fmt.Sprintf("prepare %s", m.Tenant), func(ctx context.Context, p *process) error {
		_, err := p.mover.Prepare(ctx, m, o.d.w.source(m), nil)
		return err
	})
	return out, err
}

func (o orders) Finish(ctx context.Context, m cells.MoveRef, progress func(cells.Progress)) (mark string, err error) {
	if o.d.w.broken == NoFinish {
		return string(transfer.MakePosition(1)), nil
	}
	err = o.send(ctx, m.Target, fmt.Sprintf("finish %s", m.Tenant), func(ctx context.Context, p *process) error {
		got, err := p.mover.Finish(ctx, m, o.d.w.source(m), nil)
		o.d.mu.Lock()
		defer o.d.mu.Unlock()
		mark = got
		return err
	})
	o.d.mu.Lock()
	defer o.d.mu.Unlock()
	return mark, err
}

func (o orders) Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error {
	if o.d.w.broken == NoRemoval {
		return nil
	}
	if r.Back != "" && !r.Held() {
		err := o.send(ctx, r.Back, fmt.Sprintf("free the way back of %s", r.Move), func(ctx context.Context, p *process) error { return p.mover.Free(ctx, tenant, r.Move) })
		if err != nil {
			return err
		}
	}
	return o.send(ctx, r.Cell, fmt.Sprintf("remove %s at %d", tenant, r.Epoch), func(ctx context.Context, p *process) error {
		return p.mover.Discard(ctx, tenant, r, nil)
	})
}

// Return makes orders a [cells.Returner].
func (o orders) Return(ctx context.Context, tenant cells.TenantID, r cells.Residue) (out cells.Returned, err error) {
	m, ok := r.Return(tenant)
	if !ok {
		return out, cells.ErrInvalid
	}
	err = o.send(ctx, r.Cell, fmt.Sprintf("bring back %s to %s", r.Move, r.Cell), func(ctx context.Context, p *process) error {
		_, err := p.mover.Return(ctx, m, o.d.w.source(m))
		return err
	})
	return out, err
}

// source is a move's source as its target reaches it.
func (w *world) source(m cells.MoveRef) transfer.Source {
	return farSource{w: w, from: m.Target, at: w.cells[m.Source]}
}

type farSource struct {
	w    *world
	from cells.CellID
	at   *cell
}

// reach calls the source if the two cells reach each other.
func (s farSource) reach(ctx context.Context, f func(ctx context.Context, src transfer.Source) error) error {
	if s.cut() {
		return errCut
	}
	return s.at.call(ctx, func(ctx context.Context, p *process) error { return f(ctx, p.store) })
}

func (s farSource) cut() bool { return s.w.cuts.between(string(s.from), string(s.at.id)) }

func (s farSource) Survey(ctx context.Context, t cells.TenantID) (out transfer.Survey, err error) {
	err = s.reach(ctx, func(ctx context.Context, src transfer.Source) (err error) { out, err = src.Survey(ctx, t); return err })
	return out, err
}

func (s farSource) Begin(ctx context.Context, m cells.MoveRef) (out transfer.Position, err error) {
	err = s.reach(ctx, func(ctx context.Context, src transfer.Source) (err error) { out, err = src.Begin(ctx, m); return err })
	return out, err
}

func (s farSource) Kept(ctx context.Context, m cells.MoveRef) (out transfer.Position, err error) {
	err = s.reach(ctx, func(ctx context.Context, src transfer.Source) (err error) { out, err = src.Kept(ctx, m); return err })
	return out, err
}

func (s farSource) Adopt(ctx context.Context, m cells.MoveRef) (out transfer.Position, err error) {
	err = s.reach(ctx, func(ctx context.Context, src transfer.Source) (err error) { out, err = src.Adopt(ctx, m); return err })
	return out, err
}

func (s farSource) Head(ctx context.Context, m cells.MoveRef) (out transfer.Position, err error) {
	err = s.reach(ctx, func(ctx context.Context, src transfer.Source) (err error) { out, err = src.Head(ctx, m); return err })
	return out, err
}

func (s farSource) Applied(ctx context.Context, m cells.MoveRef, pos transfer.Position) error {
	return s.reach(ctx, func(ctx context.Context, src transfer.Source) error { return src.Applied(ctx, m, pos) })
}

func (s farSource) Check(ctx context.Context, m cells.MoveRef, l transfer.Limits) (out transfer.Health, err error) {
	err = s.reach(ctx, func(ctx context.Context, src transfer.Source) (err error) {
		out, err = src.Check(ctx, m, l)
		return err
	})
	return out, err
}

func (s farSource) Release(ctx context.Context, m cells.MoveRef) error {
	return s.reach(ctx, func(ctx context.Context, src transfer.Source) error { return src.Release(ctx, m) })
}

func (s farSource) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	return s.reach(ctx, func(ctx context.Context, src transfer.Source) error {
		return src.Changes(ctx, m, from, s.passing(yield))
	})
}

// passing ends a stream at the next batch when the network is cut.
func (s farSource) passing(yield func(transfer.Batch) error) func(transfer.Batch) error {
	return func(b transfer.Batch) error {
		if s.cut() {
			return errCut
		}
		return yield(b)
	}
}

func (s farSource) View(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	return s.view(ctx, func(ctx context.Context, src transfer.Source) (transfer.View, error) { return src.View(ctx, m) })
}

func (s farSource) Final(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	return s.view(ctx, func(ctx context.Context, src transfer.Source) (transfer.View, error) { return src.Final(ctx, m) })
}

// view opens a view that keeps its process from closing its files under it.
func (s farSource) view(ctx context.Context, open func(context.Context, transfer.Source) (transfer.View, error)) (transfer.View, error) {
	p := s.at.process()
	if s.cut() || p == nil || !p.enter() {
		return nil, errCut
	}
	v, err := open(ctx, p.store)
	if err != nil {
		p.wg.Done()
		return nil, err
	}
	f := &farView{View: v, s: s, p: p}
	f.stop = context.AfterFunc(p.life, func() { _ = f.Close() })
	return f, nil
}

type farView struct {
	transfer.View
	s    farSource
	p    *process
	stop func() bool
	mu   sync.Mutex // held while the view is used
	gone bool
}

// use runs f while the view is there.
func (v *farView) use(f func() error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.gone || v.s.cut() {
		return transfer.ErrViewLost
	}
	return f()
}

func (v *farView) Changes(ctx context.Context, from transfer.Position, yield func(transfer.Batch) error) error {
	return v.use(func() error { return v.View.Changes(ctx, from, v.s.passing(yield)) })
}

func (v *farView) Rows(ctx context.Context, table string, after []byte, yield func(transfer.Batch) error) error {
	return v.use(func() error { return v.View.Rows(ctx, table, after, v.s.passing(yield)) })
}

func (v *farView) Digests(ctx context.Context, sets []transfer.KeySet) (out []transfer.Digest, err error) {
	err = v.use(func() error { out, err = v.View.Digests(ctx, sets); return err })
	return out, err
}

func (v *farView) Fetch(ctx context.Context, set transfer.KeySet, yield func(transfer.Batch) error) error {
	return v.use(func() error { return v.View.Fetch(ctx, set, v.s.passing(yield)) })
}

func (v *farView) Close() error {
	v.stop()
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.gone {
		return nil
	}
	v.gone = true
	err := v.View.Close()
	v.p.wg.Done()
	return err
}
