// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"

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
	st, err := transferpg.Open(ctx, transferpg.Config{URL: s.dsn, Keeper: s.guard, Tables: Tables})
	if err != nil {
		return nil, nil, err
	}
	return transfer.New(st, st), st.Close, nil
}

var _ Guard = (*guardpg.SQL)(nil)
