// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Sharer is a Cell whose store shares what moves of a group need.
type Sharer interface {
	// Slots is how many captures of changes the database holds for all moves.
	Slots(ctx context.Context) (int, error)
	// Temporary is how many it holds besides, for as long as a view is made.
	Temporary(ctx context.Context) (int, error)
}

const group = transfer.GroupID("campaign-1")

// crowd is some tenants of the first cell that move together, each with a world of its
// own over the same cells, and its writers.
type crowd struct {
	w     *world
	each  []*world
	loads []*load
	ctx   context.Context
	src   transfer.Source
}

// newCrowd makes n tenants that hold rows and are written to.
func newCrowd(tb TB, h Harness, n int) *crowd {
	tb.Helper()
	w := newWorld(tb, h)
	c := &crowd{w: w, ctx: transfer.ContextWithGroup(tb.Context(), group), src: w.src(w.a)}
	for i := range n {
		own := *w
		own.tenant = cells.TenantID(fmt.Sprintf("crowd:%d", i))
		own.open(w.a, own.tenant, base)
		own.fill(40 + 30*i)
		c.each = append(c.each, &own)
		c.loads = append(c.loads, own.hammer(1, 20))
	}
	return c
}

func (c *crowd) move(i int) cells.MoveRef { return c.each[i].move(cells.MoveID(fmt.Sprintf("m%d", i))) }

// all runs f for some members at once.
func (c *crowd) all(which []int, f func(i int) error) {
	c.w.tb.Helper()
	errs := make([]error, len(which))
	var wg sync.WaitGroup
	for n, i := range which {
		wg.Go(func() {
			if err := f(i); err != nil {
				errs[n] = fmt.Errorf("member %d: %w", i, err)
			}
		})
	}
	wg.Wait()
	c.w.must(errors.Join(errs...))
}

func (c *crowd) prepare(v *transfer.Mover, which ...int) {
	c.w.tb.Helper()
	c.all(which, func(i int) error {
		_, err := v.Prepare(c.ctx, c.move(i), c.src, nil)
		return err
	})
}

// finish cuts a member over and compares.
func (c *crowd) finish(v *transfer.Mover, i int) {
	c.w.tb.Helper()
	w, m := c.each[i], c.move(i)
	c.loads[i].reach(10)
	_, err := w.cut(v, m, c.src)
	w.must(err)
	c.loads[i].end()
	c.loads[i].kept(w.same())
	w.commit(m)
}

// slots fails unless the members are captured by that many slots; it passes a store that
// shares nothing.
func (c *crowd) slots(cell Cell, want int) {
	c.w.tb.Helper()
	s, ok := cell.(Sharer)
	if !ok {
		return
	}
	n, err := s.Slots(c.w.tb.Context())
	c.w.must(err)
	if n != want {
		c.w.tb.Errorf("%s holds %d slots, want %d", cell.ID(), n, want)
	}
}

// shared fails unless the store says that n members share member i's capture.
func (c *crowd) shared(i, want int) {
	c.w.tb.Helper()
	health, err := c.src.Check(c.w.tb.Context(), c.move(i), transfer.Limits{})
	c.w.must(err)
	if _, ok := c.w.a.(Sharer); ok && health.Shared != want {
		c.w.tb.Errorf("member %d: %d moves share its capture, want %d", i, health.Shared, want)
	}
}

// cleaned removes what is left of members that were committed and fails if anything stays.
func (c *crowd) cleaned(which ...int) {
	c.w.tb.Helper()
	for _, i := range which {
		m := c.move(i)
		c.each[i].discard(c.w.a, cells.Residue{Cell: c.w.a.ID(), Epoch: m.CloseEpoch(), Move: m.ID})
	}
	c.w.sweep()
	c.w.clean(c.w.a)
	c.w.clean(c.w.b)
	c.w.bystandersUntouched()
}

// testGroup moves tenants together, some of which come when others are already read.
func testGroup(tb TB, h Harness) {
	c := newCrowd(tb, h, 5)
	v := h.agent(tb, c.w.b)
	c.prepare(v, 0, 1, 2)
	c.slots(c.w.a, 1)
	c.shared(1, 3)
	c.prepare(v, 3, 4)
	c.slots(c.w.a, 1)
	c.shared(4, 5)
	for i := range 5 {
		c.finish(v, i)
	}
	c.w.gone(c.w.a)
	c.cleaned(0, 1, 2, 3, 4)
}

// testGroupAnew reads members anew: their runs end and are taken up again, so that what
// was read and not applied has to come once more.
func testGroupAnew(tb TB, h Harness) {
	c := newCrowd(tb, h, 3)
	for range 3 {
		c.prepare(h.agent(tb, c.w.b, transfer.WithFollow(0), transfer.WithTouchedLimit(5)), 0, 1, 2)
		for _, l := range c.loads {
			l.reach(20)
		}
	}
	c.slots(c.w.a, 1)
	v := h.agent(tb, c.w.b)
	for i := range 3 {
		c.finish(v, i)
	}
	c.w.gone(c.w.a)
	c.cleaned(0, 1, 2)
}

// testGroupRolledBack rolls one member back; the others go on.
func testGroupRolledBack(tb TB, h Harness) {
	c := newCrowd(tb, h, 3)
	ctx := tb.Context()
	v := h.agent(tb, c.w.b)
	c.prepare(v, 0, 1, 2)
	m := c.move(1)
	c.loads[1].end()
	c.w.must(c.w.a.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.Base, Move: m.ID}))
	c.w.must(v.Discard(ctx, m.Tenant, cells.Residue{Cell: c.w.b.ID(), Epoch: m.OpenEpoch(), Move: m.ID}, nil))
	c.w.must(h.agent(tb, c.w.a).SweepTenant(ctx, c.each[0].tenant)) // another one's move goes on
	c.shared(0, 3)
	c.w.must(h.agent(tb, c.w.a).SweepTenant(ctx, m.Tenant))
	c.slots(c.w.a, 1)
	c.shared(0, 2)
	if d := c.each[1].dump(c.w.b); len(d) > 0 {
		tb.Errorf("%d rows of the member that was rolled back are left", len(d))
	}
	c.finish(v, 0)
	c.finish(v, 2)
	c.w.gone(c.w.a)
	c.cleaned(0, 2)
}

// testGroupStalled has a member whose target takes nothing; others move meanwhile.
func testGroupStalled(tb TB, h Harness) {
	c := newCrowd(tb, h, 3)
	v := h.agent(tb, c.w.b)
	c.prepare(v, 0)
	c.loads[0].reach(20)
	m := c.move(0)
	pos, err := c.src.Begin(c.ctx, m)
	c.w.must(err)
	ctx, cancel := context.WithCancel(tb.Context())
	stuck, ended := make(chan struct{}), make(chan struct{})
	var once sync.Once
	go func() {
		defer close(ended)
		_ = c.src.Changes(ctx, m, pos, func(transfer.Batch) error {
			once.Do(func() { close(stuck) })
			<-ctx.Done()
			return context.Cause(ctx)
		})
	}()
	tb.Cleanup(func() { cancel(); <-ended })
	select {
	case <-stuck:
	case <-time.After(10 * time.Second):
		tb.Fatalf("the member that stalls hears of no change")
	}
	moved := make(chan struct{})
	var ferr []string
	another := h.agent(tb, c.w.b) // stays open: what it releases behind Finish is looked for below
	go func() {
		defer close(moved)
		// Recorded, so that a store that waits for the slowest fails here and does not hang.
		ferr = record(tb, "others", func(tb TB) {
			o := *c
			own := *c.w
			own.tb, o.w = tb, &own
			o.each = append([]*world(nil), c.each...)
			for i := 1; i < 3; i++ {
				e := *c.each[i]
				e.tb, o.each[i] = tb, &e
			}
			o.prepare(another, 1, 2)
			o.finish(another, 1)
			o.finish(another, 2)
		})
	}()
	select {
	case <-moved:
	case <-time.After(15 * time.Second):
		cancel()
		<-moved
		tb.Fatalf("the others wait for the member that stalls")
	}
	if len(ferr) > 0 {
		tb.Fatalf("the others: %s", ferr[0])
	}
	cancel()
	<-ended
	v = h.agent(tb, c.w.b)
	c.prepare(v, 0)
	c.finish(v, 0)
	c.w.gone(c.w.a)
	c.cleaned(0, 1, 2)
}

// testGroupWindows keeps ways back of a group: one is taken, the others run out.
func testGroupWindows(tb TB, h Harness) {
	c := newCrowd(tb, h, 3)
	ctx := tb.Context()
	kept := func(i int) cells.MoveRef {
		m := c.move(i)
		m.Keep = true
		return m
	}
	v, back := h.agent(tb, c.w.b), h.agent(tb, c.w.a)
	c.all([]int{0, 1, 2}, func(i int) error {
		_, err := v.Prepare(c.ctx, kept(i), c.src, nil)
		return err
	})
	for i := range 3 {
		w := c.each[i]
		w.close(kept(i))
		c.loads[i].end()
		_, err := v.Finish(ctx, kept(i), c.src, nil)
		w.must(err)
		w.commit(kept(i))
	}
	c.slots(c.w.b, 1)
	if s, ok := c.w.b.(Sharer); ok {
		waitFor(tb, "no slot but that of the ways back at the owner", func() (bool, string) {
			n, err := s.Temporary(ctx)
			c.w.must(err)
			return n == 0, fmt.Sprintf("%d temporary ones", n)
		})
	}
	src := c.w.src(c.w.b)
	write := func(i, n int) {
		w := c.each[i]
		w.must(c.w.b.Write(ctx, w.tenant, kept(i).OpenEpoch(), "happened", func(x Exec) error { return putItem(x, w.tenant, "k00001", int64(n)) }))
	}
	for n := range 3 {
		for i := range 3 {
			write(i, 100+n)
		}
		c.all([]int{0, 1, 2}, func(i int) error {
			_, err := back.Return(ctx, kept(i).Back(), src)
			return err
		})
		for i := range 3 {
			c.each[i].same()
		}
		c.w.sweep()
		c.slots(c.w.a, 0)
		c.slots(c.w.b, 1)
	}
	// The first is taken back.
	m := kept(0)
	u := cells.MoveRef{ID: "u0", Tenant: m.Tenant, Source: m.Target, Target: m.Source, Base: m.OpenEpoch(), Undoes: m.ID}
	write(0, 1000)
	write(1, 1000)
	_, err := back.Prepare(ctx, u, src, nil)
	c.w.must(err)
	write(0, 1001)
	c.w.must(c.w.b.Keeper().CloseFence(ctx, cells.FenceOrder{Cell: u.Source, Tenant: u.Tenant, Epoch: u.CloseEpoch(), Move: u.ID}))
	_, err = c.w.b.Keeper().PauseEvents(ctx, cells.BarrierOrder{Cell: u.Source, Tenant: u.Tenant, Epoch: u.CloseEpoch(), Move: u.ID})
	c.w.must(err)
	_, err = back.Finish(ctx, u, src, nil)
	c.w.must(err)
	c.each[0].same()
	c.w.must(c.w.a.Keeper().OpenFence(ctx, cells.FenceOrder{Cell: u.Target, Tenant: u.Tenant, Epoch: u.OpenEpoch(), Floor: u.OpenEpoch(), Move: u.ID}))
	c.each[0].discard(c.w.b, cells.Residue{Cell: c.w.b.ID(), Epoch: u.CloseEpoch(), Move: u.ID})
	c.w.sweep()
	// The windows of the others close.
	for i := 1; i < 3; i++ {
		_, err := back.Return(ctx, kept(i).Back(), src)
		c.w.must(err)
		c.each[i].same()
		c.w.must(v.Free(ctx, kept(i).Tenant, kept(i).ID))
		c.each[i].discard(c.w.a, cells.Residue{Cell: c.w.a.ID(), Epoch: kept(i).CloseEpoch(), Move: kept(i).ID})
	}
	c.cleaned()
}

// testGroupKilled kills the process that reads for a group, while its members are
// prepared and again in their cuts; another process of the cell takes over.
func testGroupKilled(tb TB, h Harness) {
	if h.Reopen == nil {
		tb.Logf("databases of this harness cannot be opened by another process")
		return
	}
	c := newCrowd(tb, h, 3)
	var urls []string
	var processes []*exec.Cmd
	for range 4 {
		cmd := c.w.child("serve")
		out, err := cmd.StdoutPipe()
		c.w.must(err)
		c.w.must(cmd.Start())
		tb.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		line, err := bufio.NewReader(out).ReadString('\n')
		c.w.must(err)
		urls = append(urls, strings.TrimSpace(strings.TrimPrefix(line, "url ")))
		processes = append(processes, cmd)
	}
	var mu sync.Mutex // guards processes and seen
	seen := map[string]bool{}
	kill := func(point string) {
		mu.Lock()
		defer mu.Unlock()
		if !seen[point] && len(processes) > 1 {
			seen[point] = true
			c.w.must(processes[0].Process.Kill()) // as kill -9
			processes = processes[1:]
		}
	}
	src := transfer.NewRemoteSource(client(tb), urls)
	v := h.agent(tb, c.w.b, transfer.WithFault(func(p string) error {
		if p == "captured" || p == "batch" || p == "prepared" {
			kill(p)
		}
		return nil
	}))
	// In one process of the target each move has a source of its own.
	c.all([]int{0, 1, 2}, func(i int) error {
		_, err := v.Prepare(c.ctx, c.move(i), src, nil)
		return err
	})
	if len(processes) != 1 {
		tb.Errorf("%d processes are left", len(processes))
	}
	c.src = src
	for i := range 3 {
		c.finish(v, i)
	}
	c.w.gone(c.w.a)
	c.cleaned(0, 1, 2)
}
