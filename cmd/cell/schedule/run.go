// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Result is what came of a schedule.
type Result struct {
	Seed uint64
	// Moved counts the attempts at moves that were decided, Undone the undos that were
	// carried out, Crashes the processes that were ended.
	Moved, Undone, Crashes int
	Acked                  int
	// Wrong says what must not be; empty when all is well.
	Wrong []string
	// Log is what was done, in order.
	Log []string
}

// points are where a transfer may die.
var points = []string{"aligned", "applied", "batch", "captured", "claimed", "compared", "final", "finished", "prepared", "verified"}

// Broken names a rule that a world is made to break, so that tests can see that
// schedules notice it.
type Broken string

const (
	// NoFinish: the last changes are not carried to the target.
	NoFinish Broken = "no finish"
	// NoRemoval: what the loser of a cut holds is taken for removed.
	NoRemoval Broken = "no removal"
	// StaleOpens: fences open at any epoch that an order names.
	StaleOpens Broken = "stale opens"
)

// Run runs the schedule of a seed in a folder of its own below dir. The error is
// about the machine; what the schedule found is in the result. broken is "" for the
// real thing.
func Run(ctx context.Context, dir string, seed uint64, broken Broken) (*Result, error) {
	dir, err := os.MkdirTemp(dir, "schedule-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	w, err := newWorld(ctx, dir, broken)
	if err != nil {
		return nil, err
	}
	defer w.close()
	s := &schedule{w: w, luck: newLuck(seed), res: &Result{Seed: seed}}
	if err := s.run(ctx); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s.res.Log = w.log
	return s.res, nil
}

type schedule struct {
	w       *world
	luck    *luck
	res     *Result
	drivers []*driver
	books   []*books
	moves   int
	undone  atomic.Int64
}

func (s *schedule) run(ctx context.Context) error {
	ctx, stopAll := context.WithCancel(ctx)
	defer stopAll()
	w := s.w
	for i := range 2 {
		s.drivers = append(s.drivers, w.driver(ctx, fmt.Sprintf("driver-%d", i), newLuck(s.res.Seed*31+uint64(i))))
	}
	w.calm.Store(true)
	for i := range 2 {
		s.place(ctx, &books{tenant: cells.TenantID(fmt.Sprintf("moving-%d", i)), moved: true}, w.names[i])
	}
	for _, c := range w.names {
		s.place(ctx, &books{tenant: cells.TenantID("bystander-" + string(c))}, c)
	}
	w.calm.Store(false)
	writing, stop := context.WithCancel(ctx)
	defer stop()
	var clients sync.WaitGroup
	for _, b := range s.books {
		for i := range 2 {
			clients.Go(func() { w.hammer(writing, b, i) })
		}
	}
	for range 6 + s.luck.n(8) {
		s.act(ctx)
		s.until(ctx, int64(s.luck.n(60)))
	}
	settled := s.settle(ctx)
	s.until(ctx, 5)
	stop()
	clients.Wait()
	// Whatever is still on its way arrives when all is over.
	w.deliver(ctx, 1<<20)
	w.wg.Wait()
	s.res.Undone = int(s.undone.Load())
	if settled {
		s.check(ctx)
	}
	return nil
}

func (s *schedule) place(ctx context.Context, b *books, cell cells.CellID) {
	s.books = append(s.books, b)
	if err := s.drivers[0].ctrl.Assign(ctx, b.tenant, cell, "schedule"); err != nil {
		s.wrong("place %s: %v", b.tenant, err)
	}
	if _, err := s.w.edge.Wait(ctx, b.tenant, 0); err != nil { // the edge has heard of it
		s.wrong("place %s: %v", b.tenant, err)
	}
}

func (s *schedule) wrong(format string, args ...any) {
	s.res.Wrong = append(s.res.Wrong, fmt.Sprintf(format, args...))
}

// until waits for that many more acknowledged writes, or a moment.
func (s *schedule) until(ctx context.Context, n int64) {
	want := s.w.acked.Load() + n
	ctx, cancel := context.WithTimeout(ctx, 60*time.Millisecond)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for s.w.acked.Load() < want {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// act does one thing.
func (s *schedule) act(ctx context.Context) {
	w := s.w
	d := s.drivers[s.luck.n(len(s.drivers))]
	t := s.books[s.luck.n(2)].tenant
	c := w.cells[w.names[s.luck.n(len(w.names))]]
	other := w.names[s.luck.n(len(w.names))]
	switch n := s.luck.n(100); {
	case n < 40:
		s.moves++
		id := cells.MoveID(fmt.Sprintf("mv-%d-%d", s.res.Seed, s.moves))
		plan := cells.MovePlan{TenantID: t, ToCell: c.id, MoveID: id, Actor: d.name, Force: true}
		if s.luck.percent(60) {
			plan.UndoWindow = time.Hour
		}
		undo := s.luck.percent(50)
		d.do(fmt.Sprintf("move %s of %s to %s, window %s", id, t, c.id, plan.UndoWindow), func(ctx context.Context) error {
			res, err := d.ctrl.Run(ctx, plan)
			if err != nil {
				return err
			}
			w.note("%s: %s is in %s at %d", d.name, t, res.Route.CellID, res.Route.Epoch)
			if undo && plan.UndoWindow > 0 {
				s.until(ctx, 20)
				return s.undo(ctx, d, t, cells.MoveID("undo-"+string(id)))
			}
			return nil
		})
	case n < 44:
		s.moves++
		id := cells.MoveID(fmt.Sprintf("undo-%d-%d", s.res.Seed, s.moves))
		d.do(fmt.Sprintf("undo %s of %s", id, t), func(ctx context.Context) error { return s.undo(ctx, d, t, id) })
	case n < 47:
		d.do("tend "+string(t), func(ctx context.Context) error { _, err := d.ctrl.Tend(ctx, t); return err })
	case n < 48:
		d.do("close the window of "+string(t), func(ctx context.Context) error { _, err := d.ctrl.CloseWindow(ctx, t, "schedule", d.name); return err })
	case n < 51:
		d.do("resume "+string(t), func(ctx context.Context) error { _, err := d.ctrl.Resume(ctx, t); return err })
	case n < 54:
		d.do("roll back "+string(t), func(ctx context.Context) error { return d.ctrl.Rollback(ctx, t, "schedule") })
	case n < 62:
		w.note("%s crashes", c.id)
		s.res.Crashes++
		c.crash()
		s.restart(ctx, c)
	case n < 73:
		point := points[s.luck.n(len(points))]
		w.note("%s is to die at %s", c.id, point)
		if p := c.process(); p != nil {
			p.dieAt(point)
		}
	case n < 78:
		w.note("%s is stopped", d.name)
		d.end(errStopped)
		for i := range s.drivers {
			if s.drivers[i] == d {
				s.drivers[i] = w.driver(ctx, fmt.Sprintf("%s'", d.name), newLuck(s.res.Seed*77+uint64(s.luck.n(1000))))
			}
		}
	case n < 84:
		w.note("%s and %s are cut off", c.id, other)
		w.cuts.set(string(c.id), string(other), true)
	case n < 88:
		w.note("%s and %s are cut off", d.name, c.id)
		w.cuts.set(d.name, string(c.id), true)
	case n < 92:
		w.note("all are connected")
		w.cuts.heal()
	case n < 95:
		jump := []time.Duration{time.Hour, -time.Hour, 0}[s.luck.n(3)]
		w.note("%s has a clock that is %s ahead", d.name, jump)
		d.clock.Store(int64(jump))
	default:
		w.deliver(ctx, 3)
	}
	for _, c := range w.cells {
		if c.process() == nil && s.luck.percent(60) {
			s.restart(ctx, c)
		}
	}
}

func (s *schedule) undo(ctx context.Context, d *driver, t cells.TenantID, id cells.MoveID) error {
	_, err := d.ctrl.Undo(ctx, cells.MovePlan{TenantID: t, MoveID: id, Actor: d.name, Force: true})
	s.w.note("%s: undo %s of %s: %v", d.name, id, t, err)
	if err == nil {
		s.undone.Add(1)
	}
	return err
}

func (s *schedule) restart(ctx context.Context, c *cell) {
	if err := c.start(ctx); err != nil {
		s.wrong("%s does not start again: %v", c.id, err)
	}
	s.w.note("%s is up", c.id)
}

// revive starts what is dead.
func (s *schedule) revive(ctx context.Context) {
	for _, c := range s.w.cells {
		if c.process() == nil {
			s.restart(ctx, c)
		}
	}
}

// ends reports whether everything comes to its end that the drivers have begun. What was
// about to die when all was healed is started again: what is decided waits for it.
func (s *schedule) ends(ctx context.Context) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.w.wg.Wait()
	}()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		s.revive(ctx)
		select {
		case <-done:
			return true
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
	}
}

// settle heals everything and resumes until there is nothing left to do.
func (s *schedule) settle(ctx context.Context) bool {
	w := s.w
	w.note("everything is healed")
	w.calm.Store(true)
	w.cuts.heal()
	for _, d := range s.drivers {
		d.clock.Store(0)
	}
	for _, c := range w.cells {
		if p := c.process(); p != nil {
			p.dieAt("")
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if !s.ends(ctx) {
		s.wrong("what the drivers have begun does not come to its end")
		return false
	}
	d := s.drivers[0]
	for _, b := range s.books {
		for {
			r, err := w.table.Get(ctx, b.tenant)
			if err == nil && r.State == cells.StateActive && r.MoveID == "" && len(r.Residue) == 0 {
				s.res.Moved += int(r.Epoch-1) / 2
				break
			}
			s.revive(ctx)
			var rerr error
			if _, held := r.Held(); held {
				_, rerr = d.ctrl.CloseWindow(ctx, b.tenant, "the schedule is over", d.name)
			} else {
				_, rerr = d.ctrl.Resume(ctx, b.tenant)
			}
			if ctx.Err() != nil {
				s.wrong("%s does not settle: route %+v, %v, last error %v", b.tenant, r, err, rerr)
				return false
			}
			s.until(ctx, 1)
		}
	}
	return true
}
