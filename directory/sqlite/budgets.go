// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Budgets implements [directory.Store].
func (s *Store) Budgets() cells.BudgetStore { return budgets{s} }

type budgets struct{ s *Store }

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func budgetEntries(ctx context.Context, q queryer, tenant cells.TenantID) ([]cells.BudgetEntry, error) {
	rows, err := q.QueryContext(ctx, `SELECT move, at, pause, reserved FROM budgets WHERE tenant = ? ORDER BY at, move`, tenant)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out []cells.BudgetEntry
	for rows.Next() {
		e := cells.BudgetEntry{Tenant: tenant}
		var at, pause int64
		if err := rows.Scan(&e.Move, &at, &pause, &e.Reserved); err != nil {
			return nil, err
		}
		e.At, e.Pause = fromMicros(at), time.Duration(pause)
		out = append(out, e)
	}
	return out, rows.Err()
}

// Entries implements [cells.BudgetStore].
func (b budgets) Entries(ctx context.Context, tenant cells.TenantID) ([]cells.BudgetEntry, error) {
	out, err := budgetEntries(ctx, b.s.read, tenant)
	return out, translate("budget", err)
}

// Update implements [cells.BudgetStore].
func (b budgets) Update(ctx context.Context, tenant cells.TenantID, change func([]cells.BudgetEntry) ([]cells.BudgetEntry, error)) error {
	return b.s.tx(ctx, "budget", func(tx *sql.Tx) error {
		old, err := budgetEntries(ctx, tx, tenant)
		if err != nil {
			return err
		}
		next, err := change(old)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM budgets WHERE tenant = ?`, tenant); err != nil {
			return err
		}
		for _, e := range next {
			if e.Tenant != tenant {
				return fmt.Errorf("%w: budget entry of tenant %s among those of %s", cells.ErrInvalid, e.Tenant, tenant)
			}
			_, err := tx.ExecContext(ctx, `INSERT INTO budgets (tenant, move, at, pause, reserved) VALUES (?, ?, ?, ?, ?)`,
				e.Tenant, e.Move, micros(e.At), int64(e.Pause), e.Reserved)
			if err != nil {
				return err
			}
		}
		return nil
	})
}
