// SPDX-License-Identifier: Apache-2.0

// Command jobs is a service that works in the background: a queue of jobs for each
// tenant, in its cell's database, and a worker in each cell. The worker takes an
// admission from the gate for every job, as a request would. When the tenant moves,
// the job that runs is cancelled, with the cause; nothing of it was written, and the
// other cell's worker begins it again. The fence keeps a job that does not notice
// from being written twice.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/services/examples/local"
)

const schema = `CREATE TABLE IF NOT EXISTS jobs (tenant TEXT NOT NULL, id INTEGER NOT NULL,
	done INTEGER NOT NULL DEFAULT 0, cell TEXT NOT NULL DEFAULT '', PRIMARY KEY (tenant, id))`

var tables = []guard.Table{{Name: "jobs", TenantColumn: "tenant"}}

// worker does the jobs of one cell.
type worker struct {
	cell *local.Cell
	// work does what a job is about; it ends early when ctx does.
	work func(ctx context.Context, tenant cells.TenantID, id int64) error

	interrupted atomic.Int64 // jobs that a move has ended
}

// run works until ctx ends.
func (w *worker) run(ctx context.Context) {
	idle := time.NewTicker(5 * time.Millisecond)
	defer idle.Stop()
	for ctx.Err() == nil {
		tenant, id, err := w.next(ctx)
		if err == nil {
			err = w.do(ctx, tenant, id)
		}
		if err != nil { // nothing to do, or not here: look again in a moment
			select {
			case <-ctx.Done():
			case <-idle.C:
			}
		}
	}
}

// next finds a job that is not done. It may be one of a tenant that has just left.
func (w *worker) next(ctx context.Context) (tenant cells.TenantID, id int64, err error) {
	err = w.cell.DB.QueryRowContext(ctx, `SELECT tenant, id FROM jobs WHERE done = 0 ORDER BY id LIMIT 1`).Scan(&tenant, &id)
	return tenant, id, err
}

// do does one job under an admission of its own, so that a move waits for one job
// and not for the queue.
func (w *worker) do(ctx context.Context, tenant cells.TenantID, id int64) error {
	a, err := w.cell.Gates.Admit(ctx, cells.AdmitRequest{Tenant: tenant, Internal: true, Label: "job"})
	if err != nil {
		return err // the tenant is on its way, or lives elsewhere
	}
	defer a.Done()
	ctx = a.Context()
	if err := w.work(ctx, tenant, id); err != nil {
		if errors.Is(context.Cause(ctx), cells.ErrGateClosed) {
			w.interrupted.Add(1)
		}
		return err
	}
	return w.cell.Guard.Write(ctx, func(ctx context.Context, tx *sqlite.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE jobs SET done = done + 1, cell = ? WHERE tenant = ? AND id = ?`, string(tx.Admission.Cell), string(tenant), id)
		if err != nil {
			return err
		}
		return tx.Emit(ctx, "job.done", map[string]int64{"id": id})
	})
}

// enqueue adds jobs in the tenant's cell, as a request of the tenant would.
func enqueue(ctx context.Context, c *local.Cell, tenant cells.TenantID, from, to int64) error {
	a, err := c.Gates.Admit(ctx, cells.AdmitRequest{Tenant: tenant, Internal: true, Label: "enqueue"})
	if err != nil {
		return err
	}
	defer a.Done()
	return c.Guard.Write(a.Context(), func(ctx context.Context, tx *sqlite.Tx) error {
		for id := from; id <= to; id++ {
			if _, err := tx.ExecContext(ctx, `INSERT INTO jobs (tenant, id) VALUES (?, ?)`, string(tenant), id); err != nil {
				return err
			}
		}
		return nil
	})
}

// tally counts the tenant's jobs in a cell.
func tally(ctx context.Context, db *sql.DB, tenant cells.TenantID) (left, once, more int, err error) {
	err = db.QueryRowContext(ctx, `SELECT coalesce(sum(done = 0), 0), coalesce(sum(done = 1), 0), coalesce(sum(done > 1), 0) FROM jobs WHERE tenant = ?`,
		string(tenant)).Scan(&left, &once, &more)
	return left, once, more, err
}

// takes is work that takes a while.
func takes(d time.Duration) func(context.Context, cells.TenantID, int64) error {
	return func(ctx context.Context, _ cells.TenantID, _ int64) error {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func run(ctx context.Context, out io.Writer, work func(context.Context, cells.TenantID, int64) error) error {
	workers := make(chan *worker, 2)
	f, err := local.Start(ctx, local.Options{Schema: schema, Tables: tables, Run: func(ctx context.Context, c *local.Cell) {
		w := &worker{cell: c, work: work}
		workers <- w
		w.run(ctx)
	}})
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Place(ctx, "acme", "cell-a"); err != nil {
		return err
	}
	const jobs = 60
	if err := enqueue(ctx, f.Cell("cell-a"), "acme", 1, jobs); err != nil {
		return err
	}
	wait := func(cell cells.CellID, enough func(left int) bool) error {
		for tick := time.NewTicker(2 * time.Millisecond); ; {
			left, _, _, err := tally(ctx, f.Cell(cell).DB, "acme")
			if err != nil || enough(left) {
				tick.Stop()
				return err
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				tick.Stop()
				return context.Cause(ctx)
			}
		}
	}
	for i, to := range []cells.CellID{"cell-b", "cell-a"} {
		from := []cells.CellID{"cell-a", "cell-b"}[i]
		if err := wait(from, func(left int) bool { return left <= jobs-20*(i+1) }); err != nil {
			return err
		}
		if _, err := f.Move(ctx, "acme", to); err != nil {
			return err
		}
	}
	if err := wait("cell-a", func(left int) bool { return left == 0 }); err != nil {
		return err
	}
	left, once, more, err := tally(ctx, f.Cell("cell-a").DB, "acme")
	if err != nil {
		return err
	}
	var interrupted int64
	for range 2 {
		interrupted += (<-workers).interrupted.Load()
	}
	fmt.Fprintf(out, "%d jobs done once, %d more than once, %d left; %d were interrupted by a move and done in the other cell\n", once, more, left, interrupted)
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, takes(20*time.Millisecond)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
