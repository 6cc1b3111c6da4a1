// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Holdings implements [transfer.Sink].
func (s *Store) Holdings(ctx context.Context, limit int) ([]transfer.Holding, error) {
	var out []transfer.Holding
	err := s.reading(ctx, func(tx *sql.Tx) error {
		for _, t := range s.tables {
			u, err := load(ctx, tx, t)
			if errors.Is(err, cells.ErrNotFound) {
				continue // a table that is not there holds nothing
			}
			if err != nil {
				return err
			}
			found, err := u.holdings(ctx, tx, limit)
			if err != nil {
				return err
			}
			out = append(out, found...)
		}
		return nil
	})
	return out, err
}

func (t *table) holdings(ctx context.Context, tx *sql.Tx, limit int) ([]transfer.Holding, error) {
	rows, err := tx.QueryContext(ctx, fmt.Sprintf("SELECT DISTINCT %s FROM %s LIMIT ?", quote(t.TenantColumn), quote(t.Name)), limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []transfer.Holding
	for rows.Next() {
		h := transfer.Holding{Table: t.Name}
		if err := rows.Scan(&h.Tenant); err != nil {
			return nil, err
		}
		out = append(out, h)
	}
	return out, rows.Err()
}
