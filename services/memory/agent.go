// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"errors"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/transfer"
	transferpg "github.com/cloister-dev/cloister/transfer/postgres"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"

	guardpg "github.com/cloister-dev/cloister/guard/postgres"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
)

// Agent returns what moves tenants' rows into and out of this store, and what
// ends it. In the background it frees what moves that are over have left. A nil log
// is silence.
func (s *Store) Agent(ctx context.Context, log *slog.Logger) (transfer.Agent, func() error, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	logged := transfer.WithLogger(log)
	open := s.postgresAgent
	if g, ok := s.guard.(*guardsqlite.Guard); ok {
		open = func(ctx context.Context, o ...transfer.Option) (*transfer.Mover, func() error, error) {
			return s.sqliteAgent(ctx, g, o...)
		}
	}
	mover, closeStore, err := open(ctx, logged)
	if err != nil {
		return nil, nil, err
	}
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() { defer close(done); _ = mover.Run(life) }()
	return mover, func() error {
		stop()
		<-done
		return errors.Join(mover.Close(), closeStore())
	}, nil
}

func (s *Store) sqliteAgent(ctx context.Context, g *guardsqlite.Guard, o ...transfer.Option) (*transfer.Mover, func() error, error) {
	st, err := transfersqlite.Open(ctx, transfersqlite.Config{Path: s.dsn, Keeper: g, Admit: g.AdmitClosed, Tables: Tables})
	if err != nil {
		return nil, nil, err
	}
	return transfer.New(st, st, o...), st.Close, nil
}

func (s *Store) postgresAgent(ctx context.Context, o ...transfer.Option) (*transfer.Mover, func() error, error) {
	cfg, err := pgxpool.ParseConfig(s.dsn)
	if err != nil {
		return nil, nil, err
	}
	if s.checked {
		tenancypg.Mark(cfg.ConnConfig, "")
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, nil, err
	}
	g, err := guardpg.New(pool)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	closePool := func() error { g.Close(); pool.Close(); return nil }
	st, err := transferpg.Open(ctx, transferpg.Config{Pool: pool, Keeper: s.guard, Admit: g.AdmitClosed, Tables: Tables})
	if err != nil {
		return nil, nil, errors.Join(err, closePool())
	}
	return transfer.New(st, st, o...), func() error { return errors.Join(st.Close(), closePool()) }, nil
}
