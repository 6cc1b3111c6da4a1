// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Holdings implements [transfer.Sink]. A table whose rows the agent's role may not all
// see is an error, and not an empty table.
func (s *Store) Holdings(ctx context.Context, limit int) ([]transfer.Holding, error) {
	var out []transfer.Holding
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		out = nil
		cat, err := s.load(ctx, tx)
		if err != nil {
			return err
		}
		for _, t := range cat.tables {
			if t.rowSecurity {
				return fmt.Errorf("%w: row security hides rows of %s from the agent", cells.ErrInvalid, t.Name)
			}
			rows, err := tx.Query(ctx, fmt.Sprintf("SELECT DISTINCT %s::text FROM %s LIMIT $1", pgx.Identifier{t.TenantColumn}.Sanitize(), t.sql()), limit)
			if err != nil {
				return err
			}
			tenants, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			for _, tenant := range tenants {
				out = append(out, transfer.Holding{Table: t.Name, Tenant: cells.TenantID(tenant)})
			}
		}
		return nil
	})
	if err != nil {
		return nil, translate(err)
	}
	return out, nil
}
