// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/transfer"
	transferpg "github.com/cloister-dev/cloister/transfer/postgres"
	transfersqlite "github.com/cloister-dev/cloister/transfer/sqlite"

	guardpg "github.com/cloister-dev/cloister/guard/postgres"
	guardsqlite "github.com/cloister-dev/cloister/guard/sqlite"
)

// Agent returns what moves tenants' rows into and out of this store, and what
// closes it.
func (s *Store) Agent(ctx context.Context) (transfer.Agent, func() error, error) {
	if g, ok := s.guard.(*guardsqlite.Guard); ok {
		st, err := transfersqlite.Open(ctx, transfersqlite.Config{Path: s.dsn, Keeper: g, Admit: g.AdmitClosed, Tables: Tables})
		if err != nil {
			return nil, nil, err
		}
		return transfer.New(st, st), st.Close, nil
	}
	pool, err := pgxpool.New(ctx, s.dsn)
	if err != nil {
		return nil, nil, err
	}
	g, err := guardpg.New(pool)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	closeAll := func() error { g.Close(); pool.Close(); return nil }
	st, err := transferpg.Open(ctx, transferpg.Config{Pool: pool, Keeper: s.guard, Admit: g.AdmitClosed, Tables: Tables})
	if err != nil {
		return nil, nil, errors.Join(err, closeAll())
	}
	return transfer.New(st, st), func() error { return errors.Join(st.Close(), closeAll()) }, nil
}
