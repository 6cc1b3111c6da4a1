// SPDX-License-Identifier: Apache-2.0

package transfertest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// TB is what the suite needs of a test; *testing.T and *testing.B have it, and so
// has the recorder of [Mutants].
type TB interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
	Context() context.Context
	TempDir() string
	Cleanup(func())
	Name() string
}

// Exec runs one statement of a service's transaction. Parameters are ?1, ?2, ...
type Exec func(query string, args ...any) error

// Cell is one cell's database with the tables of [Schema], the guard installed
// over them, and the store under test.
type Cell interface {
	ID() cells.CellID
	Source() transfer.Source
	Sink() transfer.Sink
	Keeper() guard.Keeper
	// Write runs one transaction that is admitted for the tenant at the epoch, which
	// emits an event of the given type if it is not "".
	Write(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, event string, f func(Exec) error) error
	// Raw runs statements on a connection that the guard lets pass, as somebody at a
	// prompt who knows how would.
	Raw(ctx context.Context, tenant cells.TenantID, f func(Exec) error) error
	// Dump returns all rows of the tenant, by table and key, as text that two cells
	// of one engine write alike.
	Dump(ctx context.Context, tenant cells.TenantID) (map[string]string, error)
	// Leftovers names what moves have left in the database: slots, publications,
	// triggers, log entries, rows of the store's own tables.
	Leftovers(ctx context.Context) ([]string, error)
	// Spec is what [Harness.Reopen] opens the same database with in another process.
	Spec() string
}

// Loser is a Cell that can lose a capture, as a server does whose slot was dropped,
// or a database in which a table was made anew.
type Loser interface {
	LoseCapture(ctx context.Context, move cells.MoveID) error
}

// Options change a cell for one test.
type Options struct {
	// IgnoreFence lets the store write without the guard's check.
	IgnoreFence bool
}

// Harness makes cells of one engine.
type Harness struct {
	Engine string
	// New makes a cell with an empty database. It is freed by the test's cleanup.
	New func(tb TB, id cells.CellID, o Options) Cell
	// Reopen opens a database that another process made; nil if there is none to
	// reopen. The caller's process ends by being killed.
	Reopen func(ctx context.Context, id cells.CellID, spec string) (Cell, error)

	// what Mutants change
	sink   func(transfer.Sink) transfer.Sink
	source func(transfer.Source) transfer.Source
	cell   Options
}

func (h Harness) new(tb TB, id cells.CellID) Cell {
	tb.Helper()
	return h.New(tb, id, h.cell)
}

// agent makes a cell's agent, closed with the test.
func (h Harness) agent(tb TB, c Cell, opts ...transfer.Option) *transfer.Mover {
	sink, source := c.Sink(), c.Source()
	if h.sink != nil {
		sink = h.sink(sink)
	}
	if h.source != nil {
		source = h.source(source)
	}
	log := slog.New(slog.NewTextHandler(logTo{tb}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	v := transfer.New(source, sink, append([]transfer.Option{transfer.WithStepCost(0), transfer.WithLogger(log)}, opts...)...)
	tb.Cleanup(func() { _ = v.Close() })
	return v
}

// logTo writes an agent's log to the test's.
type logTo struct{ tb TB }

func (l logTo) Write(p []byte) (int, error) {
	l.tb.Logf("%s", p)
	return len(p), nil
}

// check is one test of the suite.
type check struct {
	name string
	f    func(tb TB, h Harness)
	// long ones are left out with -short, and of Mutants.
	long bool
}

// Run runs the whole suite.
func Run(t *testing.T, h Harness) {
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			if c.long && testing.Short() {
				t.Skip("long")
			}
			c.f(t, h)
		})
	}
}

// world is two cells, a tenant in the first, and bystanders in both.
type world struct {
	tb     TB
	h      Harness
	a, b   Cell
	tenant cells.TenantID
	others map[string]map[string]string // by cell and tenant: what must not change
}

const (
	tenant = cells.TenantID("org:7@x.example")
	base   = cells.Epoch(5)
)

// bystanders have ids near the tenant's: a filter that is too wide shows.
var bystanders = []cells.TenantID{"org:7@x.exampl", "org:7@x.example2", "Org:7@x.example"}

func newWorld(tb TB, h Harness) *world {
	tb.Helper()
	w := &world{tb: tb, h: h, a: h.new(tb, "cell-a"), b: h.new(tb, "cell-b"), tenant: tenant, others: map[string]map[string]string{}}
	w.open(w.a, w.tenant, base)
	for _, c := range []Cell{w.a, w.b} {
		for i, t := range bystanders {
			w.open(c, t, 1)
			w.must(c.Write(tb.Context(), t, 1, "seen", func(x Exec) error {
				for k := range 3 {
					if err := putItem(x, t, fmt.Sprintf("k%d", k), int64(i*100+k)); err != nil {
						return err
					}
				}
				return putPart(x, t, "k1", 1, "bystander")
			}))
			d, err := c.Dump(tb.Context(), t)
			w.must(err)
			w.others[string(c.ID())+" "+string(t)] = d
		}
	}
	return w
}

func (w *world) open(c Cell, t cells.TenantID, e cells.Epoch) {
	w.tb.Helper()
	w.must(c.Keeper().OpenFence(w.tb.Context(), cells.FenceOrder{Cell: c.ID(), Tenant: t, Epoch: e, Floor: e}))
}

func (w *world) must(err error) {
	w.tb.Helper()
	if err != nil {
		w.tb.Fatalf("%v", err)
	}
}

func (w *world) move(id cells.MoveID) cells.MoveRef {
	return cells.MoveRef{ID: id, Tenant: w.tenant, Source: w.a.ID(), Target: w.b.ID(), Base: base}
}

func (w *world) write(f func(Exec) error) {
	w.tb.Helper()
	w.must(w.a.Write(w.tb.Context(), w.tenant, base, "", f))
}

// fill writes n items, each with a part now and then.
func (w *world) fill(n int) {
	w.tb.Helper()
	for at := 0; at < n; at += 1000 {
		w.write(func(x Exec) error {
			for k := at; k < min(n, at+1000); k++ {
				if err := putItem(x, w.tenant, fmt.Sprintf("k%05d", k), int64(k)); err != nil {
					return err
				}
				if k%4 == 0 {
					if err := putPart(x, w.tenant, fmt.Sprintf("k%05d", k), k%3, "filled"); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
}

func (w *world) dump(c Cell) map[string]string {
	w.tb.Helper()
	d, err := c.Dump(w.tb.Context(), w.tenant)
	w.must(err)
	return d
}

// close closes the source's fence and pauses its events, as a cut does.
func (w *world) close(m cells.MoveRef) {
	w.tb.Helper()
	ctx := w.tb.Context()
	w.must(w.a.Keeper().CloseFence(ctx, cells.FenceOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.CloseEpoch(), Move: m.ID}))
	_, err := w.a.Keeper().PauseEvents(ctx, cells.BarrierOrder{Cell: m.Source, Tenant: m.Tenant, Epoch: m.CloseEpoch(), Move: m.ID})
	w.must(err)
}

// same fails unless both cells hold the same rows of the tenant; it returns them.
func (w *world) same() map[string]string {
	w.tb.Helper()
	a, b := w.dump(w.a), w.dump(w.b)
	w.equal("rows at the target", a, b)
	return b
}

func (w *world) equal(what string, want, got map[string]string) {
	w.tb.Helper()
	var diff []string
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if g, ok := got[k]; !ok {
			diff = append(diff, fmt.Sprintf("missing %s", k))
		} else if g != want[k] {
			diff = append(diff, fmt.Sprintf("%s\n  is    %.300s\n  wants %.300s", k, g, want[k]))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[k]; !ok {
			diff = append(diff, fmt.Sprintf("too many %s = %.200s", k, got[k]))
		}
	}
	if len(diff) > 0 {
		w.tb.Fatalf("%s: %d differences of %d rows:\n%s", what, len(diff), len(want), strings.Join(diff[:min(len(diff), 5)], "\n"))
	}
}

// commit opens the target, as after the decision.
func (w *world) commit(m cells.MoveRef) {
	w.tb.Helper()
	w.must(w.b.Keeper().OpenFence(w.tb.Context(), cells.FenceOrder{Cell: m.Target, Tenant: m.Tenant, Epoch: m.OpenEpoch(), Floor: m.OpenEpoch(), Move: m.ID}))
}

// bystandersUntouched fails if a row of another tenant has changed in either cell.
func (w *world) bystandersUntouched() {
	w.tb.Helper()
	for _, c := range []Cell{w.a, w.b} {
		for _, t := range bystanders {
			d, err := c.Dump(w.tb.Context(), t)
			w.must(err)
			w.equal(fmt.Sprintf("tenant %s at %s", t, c.ID()), w.others[string(c.ID())+" "+string(t)], d)
		}
	}
}

// clean fails if moves have left something in the cell.
func (w *world) clean(c Cell) {
	w.tb.Helper()
	left, err := c.Leftovers(w.tb.Context())
	w.must(err)
	if len(left) > 0 {
		w.tb.Fatalf("%s still holds %s", c.ID(), strings.Join(left, ", "))
	}
}

// wantErr fails unless err is target.
func (w *world) wantErr(what string, err, target error) {
	w.tb.Helper()
	if !errors.Is(err, target) {
		w.tb.Fatalf("%s: %v, want %v", what, err, target)
	}
}

// gone waits until the cell holds nothing of moves: some of it is freed behind the call.
func (w *world) gone(c Cell) {
	w.tb.Helper()
	waitFor(w.tb, "nothing left of the move in "+string(c.ID()), func() (bool, string) {
		left, err := c.Leftovers(w.tb.Context())
		w.must(err)
		return len(left) == 0, strings.Join(left, ", ")
	})
}

// recorder is a TB that keeps the verdict.
type recorder struct {
	tb       TB
	name     string
	mu       sync.Mutex // guards what follows
	failures []string
	cleanups []func()
}

// record runs f and returns what it complained about.
func record(tb TB, name string, f func(TB)) []string {
	r := &recorder{tb: tb, name: name}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			r.mu.Lock()
			cs := r.cleanups
			r.mu.Unlock()
			for _, c := range slices.Backward(cs) {
				c()
			}
		}()
		f(r)
	}()
	<-done
	return r.failures
}

func (r *recorder) Helper()                  {}
func (r *recorder) Logf(string, ...any)      {}
func (r *recorder) Context() context.Context { return r.tb.Context() }
func (r *recorder) TempDir() string          { return r.tb.TempDir() }
func (r *recorder) Name() string             { return r.tb.Name() + "/" + r.name }

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}
