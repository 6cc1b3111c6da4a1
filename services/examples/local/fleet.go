// SPDX-License-Identifier: Apache-2.0

package local

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	_ "modernc.org/sqlite" // the database/sql driver "sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
	"github.com/cloister-dev/cloister/edge/topology"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/transfer"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"
)

// Options say what runs in each cell. One of HTTP, GRPC and Run is set.
type Options struct {
	// Cells are their names; cell-a and cell-b.
	Cells []cells.CellID
	// HTTP returns the cell's service. It is given only requests that the cell's gate
	// has admitted.
	HTTP func(c *Cell) http.Handler
	// GRPC returns the cell's server, with the gates' interceptors in it.
	GRPC func(c *Cell) *grpc.Server
	// Run works in the cell's background until ctx ends.
	Run func(ctx context.Context, c *Cell)
	// Schema and Tables make the fleet stateful: each cell gets a SQLite database with
	// the schema, and a guard on the tables.
	Schema string
	Tables []guard.Table
}

// Cell is one cell of the fleet.
type Cell struct {
	ID     cells.CellID
	Router *cells.Router
	Gates  *cells.Gates
	// DB and Guard are nil in a stateless fleet.
	DB    *sql.DB
	Guard *sqlite.Guard

	mover *transfer.Mover
	ends  []func() error // in the order of their making
}

// Fleet is cells behind an edge.
type Fleet struct {
	// URL is the edge's; the tenant is in the header X-Tenant.
	URL string

	table *cells.MemTable
	ctrl  *cells.MoveController
	cells map[cells.CellID]*Cell
	dir   string
	ends  []func() error
}

// Start starts a fleet. Close it.
func Start(ctx context.Context, o Options) (_ *Fleet, err error) {
	if o.Cells == nil {
		o.Cells = []cells.CellID{"cell-a", "cell-b"}
	}
	f := &Fleet{table: cells.NewMemTable(), cells: map[cells.CellID]*Cell{}}
	f.ends = append(f.ends, f.table.Close)
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if f.dir, err = os.MkdirTemp("", "cell-example-"); err != nil {
		return nil, err
	}
	topo := topology.NewStatic(nil)
	for _, id := range o.Cells {
		c := &Cell{ID: id}
		f.cells[id] = c
		addr, err := f.start(ctx, c, o)
		if err != nil {
			return nil, fmt.Errorf("cell %s: %w", id, err)
		}
		if addr != "" {
			topo.Set(id, "http://"+addr)
		}
	}
	opts := []cells.ControllerOption{cells.WithDrainer(roles{f}), cells.WithControllerLogger(quiet), cells.WithDrainDeadline(10 * time.Second)}
	if o.Tables != nil {
		opts = append(opts, cells.WithFencer(roles{f}), cells.WithEventBarrier(roles{f}), cells.WithDataMover(roles{f}))
	}
	// Without a fencer and a data mover a move changes the route, and that is all.
	f.ctrl = cells.NewMoveController(f.table, opts...)
	return f, f.edge(ctx, topo)
}

var quiet = slog.New(slog.DiscardHandler)

func (f *Fleet) start(ctx context.Context, c *Cell, o Options) (addr string, err error) {
	c.Router = cells.NewRouter(f.table, cells.WithRouterLogger(quiet))
	if err := c.Router.Start(ctx); err != nil {
		return "", err
	}
	c.ends = append(c.ends, c.Router.Close)
	gate := []cells.GateOption{cells.WithGateLogger(quiet)}
	if o.Tables != nil {
		if err := f.store(ctx, c, o); err != nil {
			return "", err
		}
		gate = append(gate, cells.WithOpener(c.Guard.OpenFence))
	}
	c.Gates = cells.NewGates(c.ID, c.Router, gate...)
	if o.Run != nil {
		life, stop := context.WithCancel(context.WithoutCancel(ctx))
		done := make(chan struct{})
		go func() { defer close(done); o.Run(life, c) }()
		c.ends = append(c.ends, func() error { stop(); <-done; return nil })
	}
	if o.HTTP == nil && o.GRPC == nil {
		return "", nil
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	done := make(chan struct{})
	if o.GRPC != nil {
		srv := o.GRPC(c)
		go func() { defer close(done); _ = srv.Serve(ln) }()
		c.ends = append(c.ends, func() error { srv.Stop(); <-done; return nil })
		return ln.Addr().String(), nil
	}
	srv := &http.Server{Handler: cells.HTTPMiddleware(c.Router, c.Gates)(o.HTTP(c)), Protocols: new(http.Protocols), ReadHeaderTimeout: 10 * time.Second}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	go func() { defer close(done); _ = srv.Serve(ln) }()
	c.ends = append(c.ends, func() error { err := srv.Close(); <-done; return err })
	return ln.Addr().String(), nil
}

// store opens the cell's database, its guard, and what moves rows.
func (f *Fleet) store(ctx context.Context, c *Cell, o Options) (err error) {
	path := filepath.Join(f.dir, string(c.ID)+".db")
	if c.DB, err = sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate"); err != nil {
		return err
	}
	c.ends = append(c.ends, c.DB.Close)
	if _, err := c.DB.ExecContext(ctx, o.Schema); err != nil {
		return err
	}
	if c.Guard, err = sqlite.New(c.DB, sqlite.WithCell(c.ID), sqlite.WithLogger(quiet)); err != nil {
		return err
	}
	c.ends = append(c.ends, func() error { c.Guard.Close(); return nil })
	if err := c.Guard.Install(ctx, o.Tables); err != nil {
		return err
	}
	st, err := transfersqlite.Open(ctx, transfersqlite.Config{Path: path, Keeper: c.Guard, Admit: c.Guard.AdmitClosed, Tables: o.Tables})
	if err != nil {
		return err
	}
	c.mover = transfer.New(st, st, transfer.WithLogger(quiet))
	c.ends = append(c.ends, func() error { return errors.Join(c.mover.Close(), st.Close()) })
	return nil
}

func (f *Fleet) edge(ctx context.Context, topo *topology.Static) error {
	view := cells.NewRouter(f.table, cells.WithRouterLogger(quiet))
	if err := view.Start(ctx); err != nil {
		return err
	}
	f.ends = append(f.ends, view.Close)
	s, err := edge.New(edge.Config{Addr: "127.0.0.1:0", AdminAddr: "-", Extractors: []extract.Spec{{Header: "X-Tenant"}}, Log: quiet}, view, topo)
	if err != nil {
		return err
	}
	if err := s.Listen(ctx); err != nil {
		return err
	}
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- s.Run(life) }()
	f.ends = append(f.ends, func() error { stop(); return <-done })
	f.URL = "http://" + s.Addr()
	return nil
}

// Close ends the fleet and removes its files.
func (f *Fleet) Close() error {
	var errs []error
	end := func(ends []func() error) {
		for i := len(ends) - 1; i >= 0; i-- {
			errs = append(errs, ends[i]())
		}
	}
	end(f.ends[1:])
	for _, c := range f.cells {
		end(c.ends)
	}
	end(f.ends[:1])
	return errors.Join(append(errs, os.RemoveAll(f.dir))...)
}

// Cell returns a cell, or nil.
func (f *Fleet) Cell(id cells.CellID) *Cell { return f.cells[id] }

// Place gives a tenant its first cell, and returns when that cell knows of it.
func (f *Fleet) Place(ctx context.Context, tenant cells.TenantID, cell cells.CellID) error {
	if err := f.ctrl.Assign(ctx, tenant, cell, "example"); err != nil {
		return err
	}
	_, err := f.cells[cell].Router.Refresh(ctx, tenant)
	return err
}

// Move moves a tenant and returns when it is served by the other cell.
func (f *Fleet) Move(ctx context.Context, tenant cells.TenantID, to cells.CellID) (cells.MoveResult, error) {
	row, err := f.table.Get(ctx, tenant)
	if err != nil {
		return cells.MoveResult{}, err
	}
	return f.ctrl.Run(ctx, cells.MovePlan{TenantID: tenant, FromCell: row.CellID, ToCell: to, Actor: "example", Force: true})
}
