// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/directory/api"
)

// fault is something that happens while a driver stands at a step of a move from
// cell-a to cell-b. It returns what ends it.
type fault struct {
	name string
	// store is the engine that it is for; "" is any.
	store string
	// hurts is the cell whose other tenants may see failures; "" is none.
	hurts cells.CellID
	// late: it begins before the driver goes on and ends a while after.
	late  bool
	begin func(e *env, n *network) (end func())
}

// faultLasts is how long a fault that ends by itself lasts: longer than the
// heartbeats of a process may stay away (2 s).
const faultLasts = 2500 * time.Millisecond

func killFault(name, process string, hurts cells.CellID) fault {
	return fault{name: name, hurts: hurts, begin: func(e *env, _ *network) func() { e.kill(process); return func() {} }}
}

func cutFault(name, a, b string) fault {
	return fault{name: name, late: true, begin: func(_ *env, n *network) func() { return n.cut(a, b) }}
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

// faults of the matrix. The driver of a move is in the directory: to kill one is to
// kill the other.
var faults = []fault{
	killFault("kill directory and driver", "directory", ""),
	killFault("kill source", "cell-a-1", "cell-a"),
	killFault("kill target", "cell-b-1", "cell-b"),
	cutFault("cut source-target", "cell-a", "cell-b"),
	cutFault("cut driver-source", "directory", "cell-a"),
	cutFault("cut driver-target", "directory", "cell-b"),
	cutFault("cut edge-directory", "edge", "directory"),
	{name: "disk full on target", store: fleet.StoreSQLite, hurts: "cell-b", late: true, begin: func(e *env, _ *network) func() {
		return fillDisk(e.t, e.Layout.Cell("cell-b"))
	}},
	postgresFault("crash of source's Postgres", "cell-a"),
	postgresFault("crash of target's Postgres", "cell-b"),
	clockFault("clock an hour ahead, then back", "1h"),
	clockFault("clock an hour behind, then back", "-1h"),
}

// faultRow is what came of one fault at one step.
type faultRow struct {
	Store   string
	Step    cells.Step
	Fault   string
	End     api.MoveState
	Owner   cells.CellID
	Writes  int
	Lost    int // acknowledged and not found, or found twice, or never written
	Failed  int
	Events  int // gaps and repetitions
	Others  int
	Settled time.Duration
}

// TestFaultMatrix puts each fault at each step of a move, on both stores, while
// the tenant and others are used. By default it visits a part that is spread over
// both; with CELL_FAULTS=all it visits everything, and writes what it saw to
// the file that CELL_FAULTS_OUT names.
func TestFaultMatrix(t *testing.T) {
	all := os.Getenv("CELL_FAULTS") == "all"
	if testing.Short() && !all {
		t.Skip("takes a minute")
	}
	var rep report
	defer rep.write(t)
	for s, store := range []string{fleet.StoreSQLite, fleet.StorePostgres} {
		t.Run(store, func(t *testing.T) {
			e, n := faultFleet(t, store)
			for i, f := range faults {
				if f.store != "" && f.store != store {
					continue
				}
				if f.store == fleet.StoreSQLite && !mounted(e.Layout.Cell("cell-b")) {
					t.Logf("%s: left out, a small disk cannot be mounted here", f.name)
					continue
				}
				for j, step := range steps {
					if !all && (j != (5*i+7*s+2)%len(steps) || i < 3) { // kills have a test of their own
						continue
					}
					t.Run(fmt.Sprintf("%s/%s", f.name, step), func(t *testing.T) {
						rep.rows = append(rep.rows, e.in(t).faultAt(n, f, store, step))
					})
				}
			}
		})
	}
}

// faultFleet starts a fleet whose network can be cut and whose target has a small disk.
func faultFleet(t *testing.T, store string) (*env, *network) {
	dir, err := os.MkdirTemp("", "cell-faults-")
	if err != nil {
		t.Fatal(err)
	}
	if store == fleet.StoreSQLite && os.Geteuid() == 0 {
		smallDisk(t, filepath.Join(dir, "state", "cells", "cell-b"), 400)
	}
	n := &network{t: t}
	t.Cleanup(n.close)
	e := startIn(t, dir, fleet.Config{Store: store}, func(o *fleet.Options) { o.Via = n.via })
	n.mu.Lock()
	n.procs = func() map[string]int {
		out := map[string]int{}
		for _, name := range e.Procs.Names() {
			out[name] = e.Procs.Proc(name).PID()
		}
		return out
	}
	n.mu.Unlock()
	e.tenant("other-a", "cell-a")
	e.tenant("other-b", "cell-b")
	return e, n
}

func mounted(dir string) bool {
	b, err := os.ReadFile("/proc/mounts")
	return err == nil && strings.Contains(string(b), " "+dir+" tmpfs ")
}

var tenants sync.Mutex
var tenantNumber int

// faultAt moves a new tenant from cell-a to cell-b, lets the fault happen at the
// step, and checks what is left.
func (e *env) faultAt(n *network, f fault, store string, step cells.Step) faultRow {
	t := e.t
	tenants.Lock()
	tenantNumber++
	name := fmt.Sprintf("t%d", tenantNumber)
	tenants.Unlock()
	c := e.tenant(name, "cell-a")
	if err := c.Fill(t.Context(), "bulk", 100, 200, func(int) {}); err != nil {
		t.Fatal(err)
	}
	stop := e.hammer(&load.Hammer{Client: c, Clients: 3, Keys: 5, Pause: 3 * time.Millisecond})
	others := map[cells.CellID]func() load.Tally{}
	for _, cell := range []cells.CellID{"cell-a", "cell-b"} {
		o := &load.Client{Base: e.Info.Edge, Tenant: "other" + string(cell[4:]), HTTP: e.http}
		others[cell] = e.hammer(&load.Hammer{Client: o, Clients: 1, Keys: 3, Namespace: name, Pause: 5 * time.Millisecond})
	}
	e.haltAt(step)
	mv := e.startMove(name, "cell-b", name)
	e.waitHalted()
	end := f.begin(e, n)
	began := time.Now()
	e.release()
	if f.late {
		after := time.AfterFunc(faultLasts, end)
		t.Cleanup(func() {
			if after.Stop() {
				end()
			}
		})
	} else {
		end()
	}
	rec := e.settle(mv.ID)
	row := faultRow{Store: store, Step: step, Fault: f.name, End: rec.State, Owner: e.cellOf(name), Settled: time.Since(began)}
	tally := stop()
	mustBeClean(t, name, tally, f.hurts != "")
	row.Writes, row.Failed, row.Lost = tally.Writes, tally.Failed, tally.Lost+tally.Duplicated+tally.Phantom
	for cell, books := range others {
		o := books()
		mustBeClean(t, "other tenant in "+string(cell), o, f.hurts == cell)
		row.Lost += o.Lost + o.Duplicated + o.Phantom
		if f.hurts != cell {
			row.Others += o.Failed
		}
	}
	row.Events = e.eventsOf(c)
	if row.Events > 0 {
		t.Errorf("%d gaps or repetitions in the events", row.Events)
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
	ctx, cancel := context.WithTimeout(e.t.Context(), 30*time.Second)
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

// report collects rows and writes them as tables into the file that CELL_FAULTS_OUT
// names.
type report struct{ rows []faultRow }

func (r *report) write(t *testing.T) {
	path := os.Getenv("CELL_FAULTS_OUT")
	if path == "" || len(r.rows) == 0 {
		return
	}
	var b strings.Builder
	b.WriteString("<!-- Written by make faults. -->\n# Faults at every step\n\n")
	fmt.Fprintf(&b, "%s, %d runs. Each is a move of a tenant that three clients use, with one other tenant in use in each cell.\n", time.Now().UTC().Format(time.DateOnly), len(r.rows))
	r.table(&b, "Fault", func(x faultRow) string { return x.Store + ", " + x.Fault })
	r.table(&b, "Step", func(x faultRow) string { return string(x.Step) })
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		t.Error(err)
	}
}

// table writes one line for each group of rows, in order of first appearance.
func (r *report) table(b *strings.Builder, title string, group func(faultRow) string) {
	var names []string
	groups := map[string][]faultRow{}
	for _, x := range r.rows {
		g := group(x)
		if groups[g] == nil {
			names = append(names, g)
		}
		groups[g] = append(groups[g], x)
	}
	fmt.Fprintf(b, "\n| %s | runs | target owns | source owns | writes acknowledged | lost | events lost | failed | others failed | settled, median | settled, longest |\n|%s\n", title, strings.Repeat("---|", 11))
	for _, name := range names {
		var target, writes, lost, events, failed, others int
		var took []time.Duration
		for _, x := range groups[name] {
			if x.Owner == "cell-b" {
				target++
			}
			writes, lost, events, failed, others = writes+x.Writes, lost+x.Lost, events+x.Events, failed+x.Failed, others+x.Others
			took = append(took, x.Settled)
		}
		n := len(groups[name])
		fmt.Fprintf(b, "| %s | %d | %d | %d | %d | %d | %d | %d | %d | %s | %s |\n", name, n, target, n-target, writes, lost, events, failed, others,
			load.Percentile(took, 50).Round(10*time.Millisecond), load.Percentile(took, 100).Round(10*time.Millisecond))
	}
}
