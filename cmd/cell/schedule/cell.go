// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"sync"

	_ "modernc.org/sqlite" // the driver

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/transfer"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"
)

const schema = `CREATE TABLE IF NOT EXISTS items (tenant TEXT NOT NULL, k TEXT NOT NULL, v TEXT NOT NULL, PRIMARY KEY (tenant, k)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (tenant TEXT NOT NULL PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;`

var tables = []guard.Table{{Name: "items", TenantColumn: "tenant"}, {Name: "totals", TenantColumn: "tenant"}}

// cell is one cell: a file, and a process while it is up.
type cell struct {
	w    *world
	id   cells.CellID
	path string

	mu sync.Mutex // guards p
	p  *process
}

// process is one life of a cell's process.
type process struct {
	c      *cell
	life   context.Context
	end    context.CancelCauseFunc
	wg     sync.WaitGroup // what runs in it
	db     *sql.DB
	guard  *guardsqlite.Guard
	store  *transfersqlite.Store
	mover  *transfer.Mover
	router *cells.Router
	gates  *cells.Gates

	mu      sync.Mutex // guards what follows
	crashAt string     // the point of a transfer at which it dies
	down    bool
}

var errCrashed = fmt.Errorf("%w: the process is down", cells.ErrUnavailable)

func (c *cell) start(ctx context.Context) (err error) {
	p := &process{c: c}
	p.life, p.end = context.WithCancelCause(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	q := url.Values{"_pragma": {"journal_mode(WAL)", "busy_timeout(10000)", "synchronous(OFF)"}, "_txlock": {"immediate"}}
	if p.db, err = sql.Open("sqlite", "file:"+(&url.URL{Path: c.path}).EscapedPath()+"?"+q.Encode()); err != nil {
		return err
	}
	if _, err = p.db.ExecContext(ctx, schema); err != nil {
		return err
	}
	if p.guard, err = guardsqlite.New(p.db, guardsqlite.WithCell(c.id)); err != nil {
		return err
	}
	if err = p.guard.Install(ctx, tables); err != nil {
		return err
	}
	if p.store, err = transfersqlite.Open(ctx, transfersqlite.Config{Path: c.path, Keeper: p.guard, Admit: p.guard.AdmitClosed, Tables: tables}); err != nil {
		return err
	}
	p.mover = transfer.New(p.store, p.store, transfer.WithRemoveBatch(20), transfer.WithFault(p.fault))
	p.router = cells.NewRouter(c.w.table)
	if err = p.router.Start(ctx); err != nil {
		return err
	}
	p.gates = cells.NewGates(c.id, p.router, cells.WithOpener(p.open), cells.WithGateLogger(slog.New(slog.DiscardHandler)))
	c.mu.Lock()
	c.p = p
	c.mu.Unlock()
	return nil
}

// process returns the cell's process, nil while it is down.
func (c *cell) process() *process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.p
}

// dieAt has the process die at a point of a transfer; "" is nowhere.
func (p *process) dieAt(point string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.crashAt = point
}

// open is what a process does before the first admission at an epoch.
func (p *process) open(ctx context.Context, o cells.FenceOrder) error {
	r := p.router.Lookup(o.Tenant).Route
	if r.CellID != p.c.id || r.Epoch != o.Epoch {
		return cells.ErrUnavailable
	}
	if err := p.guard.StartEvents(ctx, cells.BarrierOrder{Cell: o.Cell, Tenant: o.Tenant, Epoch: o.Epoch}, r.EventMark); err != nil {
		return err
	}
	return p.guard.OpenFence(ctx, o)
}

// openFence carries out an order.
func (p *process) openFence(ctx context.Context, o cells.FenceOrder) error {
	err := p.guard.OpenFence(ctx, o)
	if p.c.w.broken == StaleOpens && errors.Is(err, cells.ErrStaleOrder) {
		_, err = p.db.ExecContext(ctx, "UPDATE cell_fence SET is_open = 1, epoch = ?2, floor = ?2, move = '' WHERE tenant = ?1", string(o.Tenant), int64(o.Epoch))
	}
	return err
}

// fault is called at each point of a transfer.
func (p *process) fault(point string) error {
	p.mu.Lock()
	die := p.crashAt == point
	p.mu.Unlock()
	if die {
		p.c.w.note("%s dies at %s", p.c.id, point)
		p.c.w.wg.Go(p.c.crash)
		return errCrashed
	}
	return nil
}

// enter counts what runs in the process, so that its files are closed after it.
func (p *process) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return false
	}
	p.wg.Add(1)
	return true
}

// call runs f in the cell's process, as a request that arrives over the network: it
// ends with the process or with its caller.
func (c *cell) call(ctx context.Context, f func(ctx context.Context, p *process) error) error {
	p := c.process()
	if p == nil || !p.enter() {
		return errCrashed
	}
	defer p.wg.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.life, func() { cancel(errCrashed) })()
	err := f(ctx, p)
	if p.life.Err() != nil && err != nil {
		return errors.Join(errCrashed, err)
	}
	return err
}

// crash ends the process, whatever it is doing.
func (c *cell) crash() {
	c.mu.Lock()
	p := c.p
	c.p = nil
	c.mu.Unlock()
	if p != nil {
		p.close()
	}
}

func (p *process) close() {
	p.mu.Lock()
	p.down = true
	p.mu.Unlock()
	p.end(errCrashed)
	p.wg.Wait()
	if p.router != nil {
		_ = p.router.Close()
	}
	if p.mover != nil {
		_ = p.mover.Close()
	}
	if p.store != nil {
		_ = p.store.Close()
	}
	if p.guard != nil {
		p.guard.Close()
	}
	if p.db != nil {
		_ = p.db.Close()
	}
}
