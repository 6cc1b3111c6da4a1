// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

// fault is something that happens while a driver stands at a step of an operation
// that brings tenants from cell-a to cell-b. It returns what ends it.
type fault struct {
	name string
	// store is the engine that it is for; "" is any.
	store string
	// hurts is the cell whose other tenants may see failures; "" is none.
	hurts cells.CellID
	// harmless: whatever the step, the operation ends as it was asked to.
	harmless bool
	// late: it begins before the driver goes on and ends a while after.
	late bool
	// disk: it takes a disk of the target's own. Once it is over, a move that has failed of
	// it must succeed.
	disk bool
	// only says which operations it is for; nil is all.
	only  func(op *operation) bool
	begin func(e *env, n *network) (end func())
}

// faultLasts is how long a fault that ends by itself lasts: longer than the
// heartbeats of a process may stay away (2 s).
const faultLasts = 2500 * time.Millisecond

func killFault(name, process string, hurts cells.CellID) fault {
	return fault{name: name, hurts: hurts, begin: func(e *env, _ *network) func() { e.kill(process); return func() {} }}
}

// killCell kills every process of a cell.
func killCell(name string, cell cells.CellID) fault {
	return fault{name: name, hurts: cell, begin: func(e *env, _ *network) func() { e.killCell(cell); return func() {} }}
}

func byMoves(f fault) fault {
	f.only = func(op *operation) bool { return !op.upgrades }
	return f
}

func cutFault(name, a, b string) fault {
	return fault{name: name, late: true, begin: func(_ *env, n *network) func() { return n.cut(a, b) }}
}

func harmless(f fault) fault {
	f.harmless = true
	return f
}

func clockFault(name, offset string) fault {
	return fault{name: name, late: true, begin: func(e *env, _ *network) func() {
		if err := os.WriteFile(e.clock, []byte(offset), 0o644); err != nil {
			e.t.Error(err)
		}
		return func() { _ = os.Remove(e.clock) }
	}}
}

func postgresFault(name, cell string) fault {
	return fault{name: name, store: fleet.StorePostgres, hurts: cells.CellID(cell), begin: func(e *env, _ *network) func() {
		c := e.Cluster(cell)
		if err := c.Kill(); err != nil {
			e.t.Error(err)
		}
		if err := c.Restart(context.WithoutCancel(e.t.Context())); err != nil {
			e.t.Error(err)
		}
		return func() {}
	}}
}

// faults of the matrix. Every driver is in the directory: to kill one is to
// kill the other.
var faults = []fault{
	harmless(killFault("kill directory and driver", "directory", "")),
	killCell("kill source", "cell-a"),
	killCell("kill target", "cell-b"),
	byMoves(cutFault("cut source-target", "cell-a", "cell-b")),
	cutFault("cut driver-source", "directory", "cell-a"),
	cutFault("cut driver-target", "directory", "cell-b"),
	harmless(cutFault("cut edge-directory", "edge", "directory")),
	{name: "disk full on target", hurts: "cell-b", late: true, disk: true, begin: func(e *env, _ *network) func() {
		return fillDisk(e.t, diskOf(e.Layout, e.Info.Store))
	}},
	postgresFault("crash of source's Postgres", "cell-a"),
	postgresFault("crash of target's Postgres", "cell-b"),
	clockFault("clock an hour ahead, then back", "1h"),
	clockFault("clock an hour behind, then back", "-1h"),
	{name: "kill provisioner", harmless: true, only: func(op *operation) bool { return op.upgrades }, begin: func(e *env, _ *network) func() {
		e.InterruptProvisioner()
		return func() {}
	}},
}

// hits says whether a fault can happen to an operation on a store.
func (f *fault) hits(op *operation, store string) bool {
	return (f.store == "" || f.store == store) && (f.only == nil || f.only(op))
}

// wanted says whether a list of parts of names names the fault; "" names all.
func (f *fault) wanted(names string) bool {
	if names == "" {
		return true
	}
	return slices.ContainsFunc(strings.Split(names, ","), func(part string) bool {
		return part != "" && strings.Contains(strings.ReplaceAll(f.name, " ", "-"), part)
	})
}

// TestFaultMatrix puts each fault at each step of each operation, on both stores,
// while the tenants and others are used. By default it visits a part that is spread
// over all of them; with CELL_FAULTS=all it visits everything, or the operations that
// CELL_FAULTS_OPS lists, with the faults of which CELL_FAULTS_ONLY has parts of the names
// ("disk-full,kill") on the store that CELL_FAULTS_STORE names, and writes what it saw to
// the file that CELL_FAULTS_OUT names.
func TestFaultMatrix(t *testing.T) {
	all := os.Getenv("CELL_FAULTS") == "all"
	if testing.Short() && !all {
		t.Skip("takes a minute")
	}
	ops := chosen(t, operations, os.Getenv("CELL_FAULTS_OPS"))
	only := os.Getenv("CELL_FAULTS_STORE")
	if only != "" && only != fleet.StoreSQLite && only != fleet.StorePostgres {
		t.Fatalf("CELL_FAULTS_STORE: there is no store %q", only)
	}
	var rep report
	for s, store := range []string{fleet.StoreSQLite, fleet.StorePostgres} {
		if only != "" && only != store {
			continue
		}
		t.Run(store, func(t *testing.T) {
			start := func(t *testing.T, op *operation) (*env, *network) { return faultFleet(t, store, op) }
			if !all {
				shared := map[string]func() (*env, *network){}
				for _, op := range ops {
					if shared[op.fleet()] == nil {
						shared[op.fleet()] = sync.OnceValues(func() (*env, *network) { return faultFleet(t, store, op) })
					}
				}
				start = func(_ *testing.T, op *operation) (*env, *network) { return shared[op.fleet()]() }
			}
			for o, op := range ops {
				if !all && !op.visited(s, o) {
					continue
				}
				t.Run(op.name, func(t *testing.T) {
					defer rep.write(t)
					owners := map[string]cells.CellID{}
					e, n := start(t, op) // in a long run each has its own: what is left of others fills disks
					for i, f := range faults {
						if !f.hits(op, store) || !f.wanted(os.Getenv("CELL_FAULTS_ONLY")) {
							continue
						}
						if f.disk && !mounted(diskOf(e.Layout, store)) {
							t.Logf("LEFT OUT: %s: a small disk cannot be mounted here (it takes root, and the right to mount)", f.name)
							continue
						}
						for j, step := range op.steps {
							if all || op.sampled(s, o, i, j) {
								t.Run(fmt.Sprintf("%s/%s", f.name, step), func(t *testing.T) {
									rep.rows = append(rep.rows, e.in(t).faultAt(n, op, f, store, step, owners))
								})
							}
						}
					}
					if !t.Failed() {
						e.in(t).nothingLeft(owners)
					}
				})
			}
		})
	}
}

// sampled says whether the suite visits a step with a fault.
func (op *operation) sampled(store, number, fault, step int) bool {
	here := (5*fault+7*store+2+number)%len(op.steps) == step
	if op.rare || !faults[fault].hits(op, []string{fleet.StoreSQLite, fleet.StorePostgres}[store]) {
		return false
	}
	if op.cells != nil { // a fleet costs seconds
		return here && store == 0 && fault == number%3
	}
	if op.name == "move" {
		return here && fault > 2 // kills have a test of their own
	}
	return here && (fault+number+3*store)%6 == 0
}

// visited says whether the suite visits any of its steps on a store.
func (op *operation) visited(store, number int) bool {
	for f := range faults {
		for s := range op.steps {
			if op.sampled(store, number, f, s) {
				return true
			}
		}
	}
	return false
}

// bystanders are the cells in which other tenants are in use.
func (op *operation) bystanders() []cells.CellID {
	if op.others != nil {
		return op.others
	}
	return []cells.CellID{"cell-a", "cell-b"}
}

// fleet names what an operation needs a fleet of.
func (op *operation) fleet() string { return fmt.Sprint(op.cells) }

func other(cell cells.CellID) string { return "other" + string(cell[4:]) }

// chosen are the operations that a list of names names; "" is all.
func chosen(t *testing.T, all []*operation, names string) (out []*operation) {
	if names == "" {
		return all
	}
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(all, func(op *operation) bool { return op.name == name })
		if i < 0 {
			t.Fatalf("CELL_FAULTS_OPS: there is no operation %q", name)
		}
		out = append(out, all[i])
	}
	return out
}

// faultFleet starts a fleet for an operation, whose network can be cut and whose target
// has a small disk.
func faultFleet(t *testing.T, store string, op *operation) (*env, *network) {
	dir, err := os.MkdirTemp("", "cell-faults-")
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		size := map[string]int{fleet.StoreSQLite: 1200, fleet.StorePostgres: 800}[store]
		if err := mountDisk(t, diskOf(fleet.Layout{Dir: filepath.Join(dir, "state")}, store), size); err != nil {
			t.Logf("no small disk: %v", err)
		}
	}
	n := &network{t: t}
	t.Cleanup(n.close)
	e := startIn(t, dir, fleet.Config{Store: store, Cells: slices.Clone(op.cells)}, func(o *fleet.Options) { o.Via = n.via })
	n.mu.Lock()
	n.procs = func() map[string]int {
		out := map[string]int{}
		for _, name := range e.Procs.Names() {
			out[name] = e.Procs.Proc(name).PID()
		}
		return out
	}
	n.mu.Unlock()
	for _, cell := range op.bystanders() {
		e.tenant(other(cell), string(cell))
	}
	return e, n
}

// diskOf is where the data of the target are.
func diskOf(l fleet.Layout, store string) string {
	if store == fleet.StorePostgres {
		return l.Postgres("cell-b")
	}
	return l.Cell("cell-b")
}

func mounted(dir string) bool {
	b, err := os.ReadFile("/proc/mounts")
	return err == nil && strings.Contains(string(b), " "+dir+" tmpfs ")
}

// faultAt carries out an operation, lets the fault happen at the step, and checks what
// is left.
func (e *env) faultAt(n *network, op *operation, f fault, store string, step cells.Step, owners map[string]cells.CellID) faultRow {
	t := e.t
	r := newRun(e, op, step)
	*e.traces = append(*e.traces, op.actions...)
	var stops []func() load.Tally
	for i, name := range r.names {
		c := e.tenant(name, string(op.homeOf(i)))
		rows, size := 100/op.tenants, 200
		if op.rows > 0 {
			rows, size = op.rows, op.size
		}
		if err := c.Fill(t.Context(), "bulk", rows, size, func(int) {}); err != nil {
			t.Fatal(err)
		}
		stops = append(stops, e.hammer(&load.Hammer{Client: c, Clients: max(1, 3/op.tenants), Keys: 5, Pause: 3 * time.Millisecond}))
	}
	others := map[cells.CellID]func() load.Tally{}
	for _, cell := range op.bystanders() {
		o := &load.Client{Base: e.Info.Edge, Tenant: other(cell), HTTP: e.http}
		others[cell] = e.hammer(&load.Hammer{Client: o, Clients: 1, Keys: 3, Namespace: r.id, Pause: 5 * time.Millisecond})
	}
	if op.ready != nil {
		op.ready(r)
	}
	e.haltAt(step)
	op.ask(r)
	if op.standing != nil {
		op.standing(r)
	} else {
		e.waitHalted(step)
	}
	over := make(chan struct{})
	undo := f.begin(e, n)
	end := func() {
		undo()
		close(over)
	}
	began := time.Now()
	e.release()
	if f.late {
		lasts := faultLasts
		if f.disk && op.lasts > 0 {
			lasts = op.lasts
		}
		after := time.AfterFunc(lasts, end)
		t.Cleanup(func() {
			if after.Stop() {
				end()
			}
		})
	} else {
		end()
	}
	settled := op.settle(r)
	row := faultRow{Op: op.name, Store: store, Step: step, Fault: f.name, Tenants: len(r.names), Settled: time.Since(began)}
	for i, name := range r.names {
		owner := e.cellOf(name)
		owners[name] = owner
		there := owner == "cell-b"
		if op.reached != nil {
			there = op.reached(r, owner)
		}
		if there {
			row.AtTarget++
		}
		if moved, ok := settled[name]; ok && moved != there {
			t.Errorf("%s is in %s, there: %v; by the records: %v", name, owner, there, moved)
		}
		if f.disk && op.again != nil && !there {
			<-over
			op.again(r, name)
			owners[name] = e.cellOf(name)
		}
		tally := stops[i]()
		mustBeClean(t, name, tally, f.hurts != "")
		row.Writes += tally.Writes
		row.Failed += tally.Failed
		row.Lost += tally.Lost + tally.Duplicated + tally.Phantom
	}
	for cell, books := range others {
		o := books()
		mustBeClean(t, "other tenant in "+string(cell), o, f.hurts == cell)
		row.Lost += o.Lost + o.Duplicated + o.Phantom
		if f.hurts != cell {
			row.Others += o.Failed
		}
	}
	if f.harmless && (row.AtTarget > 0) == op.stays || f.harmless && !op.stays && row.AtTarget < row.Tenants {
		t.Errorf("%d of %d tenants are where they were to go", row.AtTarget, row.Tenants)
	}
	for _, name := range r.names {
		row.Events += e.eventsOf(&load.Client{Base: e.Info.Edge, Tenant: name, HTTP: e.http})
	}
	if row.Events > 0 {
		t.Errorf("%d gaps or repetitions in the events", row.Events)
	}
	if op.after != nil {
		op.after(r, owners)
	}
	t.Logf("%+v", row)
	return row
}

// eventsOf reads all events of a tenant and counts what is missing or there twice.
func (e *env) eventsOf(c *load.Client) (wrong int) {
	e.t.Helper()
	last, err := c.Set(e.t.Context(), "end", "last", "done", -1)
	if err != nil {
		e.t.Fatalf("last write: %v", err)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), time.Minute)
	defer cancel()
	next, whole := uint64(1), errors.New("all are there")
	err = c.Stream(ctx, 0, func(ev load.Event) error {
		if ev.Seq != next {
			wrong++
		}
		if next = ev.Seq + 1; ev.Seq >= last.EventSeq {
			return whole
		}
		return nil
	}, nil)
	if !errors.Is(err, whole) {
		e.t.Errorf("events end at %d of %d: %v", next-1, last.EventSeq, err)
		wrong++
	}
	return wrong
}
