// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// world is what a schedule happens to.
type world struct {
	broken Broken
	table  *cells.MemTable
	edge   *cells.Router // how clients find cells
	names  []cells.CellID
	cells  map[cells.CellID]*cell
	cuts   cuts
	calm   atomic.Bool // nothing is lost any more
	wg     sync.WaitGroup
	begun  time.Time

	acked atomic.Int64 // writes, of all tenants

	mu    sync.Mutex // guards what follows
	trace bytes.Buffer
	log   []string
	late  []func(ctx context.Context)
}

func newWorld(ctx context.Context, dir string, broken Broken) (*world, error) {
	w := &world{broken: broken, table: cells.NewMemTable(), names: []cells.CellID{"a", "b", "c"}, cells: map[cells.CellID]*cell{}, begun: time.Now()}
	w.cuts.off = map[[2]string]bool{}
	w.edge = cells.NewRouter(w.table)
	if err := w.edge.Start(ctx); err != nil {
		return nil, err
	}
	for _, id := range w.names {
		c := &cell{w: w, id: id, path: filepath.Join(dir, string(id)+".db")}
		w.cells[id] = c
		if err := c.start(ctx); err != nil {
			w.close()
			return nil, err
		}
	}
	return w, nil
}

func (w *world) close() {
	w.wg.Wait()
	for _, c := range w.cells {
		c.crash()
	}
	_ = w.edge.Close()
}

// note writes a line of the log.
func (w *world) note(format string, args ...any) {
	line := fmt.Sprintf("%7.1f ms  ", float64(time.Since(w.begun).Microseconds())/1000) + fmt.Sprintf(format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, line)
}

// later keeps a message that arrives when deliver is called.
func (w *world) later(f func(ctx context.Context)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.late = append(w.late, f)
}

// deliver lets the oldest n late messages arrive.
func (w *world) deliver(ctx context.Context, n int) {
	w.mu.Lock()
	n = min(n, len(w.late))
	due := w.late[:n:n]
	w.late = w.late[n:]
	w.mu.Unlock()
	for _, f := range due {
		w.wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			f(ctx)
		})
	}
}

// Write takes lines of the trace.
func (w *world) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.trace.Write(b)
}

// driver drives moves, until it is stopped.
type driver struct {
	w     *world
	name  string
	luck  *luck
	ctrl  *cells.MoveController
	ctx   context.Context
	end   context.CancelCauseFunc
	clock atomic.Int64 // nanoseconds that its clock is ahead

	mu sync.Mutex // guards answers that a late message may write again
}

var errStopped = errors.New("schedule: the driver was stopped")

// drainDeadline bounds cuts; a schedule is short.
const drainDeadline = 1500 * time.Millisecond

func (w *world) driver(ctx context.Context, name string, l *luck) *driver {
	d := &driver{w: w, name: name, luck: l}
	d.ctx, d.end = context.WithCancelCause(ctx)
	tracer := cells.NewTracer(w, name)
	d.ctrl = cells.NewMoveController(shaky{RoutingTable: tracer.Table(w.table), d: d},
		cells.WithFencer(tracer.Fencer(orders{d})), cells.WithEventBarrier(orders{d}), cells.WithDrainer(orders{d}), cells.WithDataMover(orders{d}),
		cells.WithObserver(tracer.Observe), cells.WithDrainDeadline(drainDeadline),
		cells.WithNow(func() time.Time { return time.Now().Add(time.Duration(d.clock.Load())) }))
	return d
}

// trouble decides whether something goes wrong, in that many of a hundred cases.
func (d *driver) trouble(percent int) bool { return !d.w.calm.Load() && d.luck.percent(percent) }

// do runs f in the background as a part of the driver.
func (d *driver) do(what string, f func(ctx context.Context) error) {
	d.w.note("%s: %s", d.name, what)
	d.w.wg.Go(func() {
		err := f(d.ctx)
		d.w.note("%s: %s: %v", d.name, what, err)
	})
}
