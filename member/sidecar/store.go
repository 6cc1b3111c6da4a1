// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "modernc.org/sqlite" // the database/sql driver "sqlite"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	guardpg "github.com/cloister-dev/cloister/guard/postgres"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
	"github.com/cloister-dev/cloister/member"
	"github.com/cloister-dev/cloister/transfer"
	transferpg "github.com/cloister-dev/cloister/transfer/postgres"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"
)

// keeper is what both guards are.
type keeper interface {
	guard.Keeper
	guard.RelayStore
	Close()
}

// store is the service's database as the sidecar has it.
type store struct {
	member.Store
	closers []func() error
}

func (s *store) close() (err error) {
	for i := len(s.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, s.closers[i]())
	}
	return err
}

// openStore opens the database, waits until the service has made its tables, puts
// the guard there and opens what moves rows.
func openStore(ctx context.Context, c *Config) (_ *store, err error) {
	s := &store{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	open := s.openPostgres
	if c.Engine == SQLite {
		open = s.openSQLite
	}
	g, mover, err := open(c)
	if err != nil {
		return nil, err
	}
	if err := install(ctx, c, g); err != nil {
		return nil, err
	}
	m, closeStore, err := mover(ctx)
	if err != nil {
		return nil, err
	}
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() { defer close(done); _ = m.Run(life) }()
	s.closers = append(s.closers, closeStore, m.Close, func() error { stop(); <-done; return nil })
	s.Store = member.Store{Keeper: g, Agent: m, Tables: c.Tables, Engine: c.Engine}
	if c.Publisher != nil {
		r, err := guard.NewRelay(guard.RelayConfig{Store: g, Publisher: c.Publisher, Logger: c.Log})
		if err != nil {
			return nil, err
		}
		s.Relay = r
	}
	return s, nil
}

// install puts the guard into the database, again until the tables are there.
func install(ctx context.Context, c *Config, g guard.Keeper) error {
	ctx, cancel := context.WithTimeout(ctx, c.StartTimeout)
	defer cancel()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	var last error // what the wait is for
	for {
		err := g.Install(ctx, c.Tables)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil && last != nil:
			return fmt.Errorf("sidecar: the service's tables: %w", last)
		case !errors.Is(err, cells.ErrInvalid) && !errors.Is(err, cells.ErrUnavailable):
			return fmt.Errorf("sidecar: %w", err)
		case last == nil:
			c.Log.Info("sidecar: waiting for the service's tables", "err", err)
		}
		last = err
		select {
		case <-ctx.Done():
			return fmt.Errorf("sidecar: the service's tables: %w", last)
		case <-tick.C:
		}
	}
}

type openMover func(ctx context.Context) (*transfer.Mover, func() error, error)

func (s *store) openPostgres(c *Config) (keeper, openMover, error) {
	pool, err := pgxpool.New(context.Background(), c.DSN)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: sidecar: the DSN: %w", cells.ErrInvalid, err)
	}
	s.closers = append(s.closers, func() error { pool.Close(); return nil })
	g, err := guardpg.New(pool, guardpg.WithCell(c.Member.Cell), guardpg.WithLogger(c.Log))
	if err != nil {
		return nil, nil, err
	}
	s.closers = append(s.closers, func() error { g.Close(); return nil })
	return g, func(ctx context.Context) (*transfer.Mover, func() error, error) {
		st, err := transferpg.Open(ctx, transferpg.Config{Pool: pool, Keeper: g, Admit: g.AdmitClosed, Tables: c.Tables})
		if err != nil {
			return nil, nil, err
		}
		return transfer.New(st, st, transfer.WithLogger(c.Log)), st.Close, nil
	}, nil
}

func (s *store) openSQLite(c *Config) (keeper, openMover, error) {
	q := url.Values{"_pragma": {"journal_mode(WAL)", "busy_timeout(10000)", "synchronous(FULL)"}, "_txlock": {"immediate"}}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: c.DSN}).EscapedPath()+"?"+q.Encode())
	if err != nil {
		return nil, nil, err
	}
	s.closers = append(s.closers, db.Close)
	g, err := guardsqlite.New(db, guardsqlite.WithCell(c.Member.Cell), guardsqlite.WithLogger(c.Log))
	if err != nil {
		return nil, nil, err
	}
	s.closers = append(s.closers, func() error { g.Close(); return nil })
	return g, func(ctx context.Context) (*transfer.Mover, func() error, error) {
		st, err := transfersqlite.Open(ctx, transfersqlite.Config{Path: c.DSN, Keeper: g, Admit: g.AdmitClosed, Tables: c.Tables})
		if err != nil {
			return nil, nil, err
		}
		return transfer.New(st, st, transfer.WithLogger(c.Log)), st.Close, nil
	}, nil
}
