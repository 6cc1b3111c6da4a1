// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// Budgets implements [directory.Store].
func (s *Store) Budgets() cells.BudgetStore { return budgets{s} }

type budgets struct{ s *Store }

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func budgetEntries(ctx context.Context, q queryer, tenant cells.TenantID) ([]cells.BudgetEntry, error) {
	rows, err := q.QueryContext(ctx, `SELECT move, at, pause, reserved, driver, seen, forced, actor FROM budgets WHERE tenant = ? ORDER BY at, move`, tenant)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out []cells.BudgetEntry
	for rows.Next() {
		e := cells.BudgetEntry{Tenant: tenant}
		var at int64
		var seen sql.NullInt64
		if err := rows.Scan(&e.Move, &at, &e.Pause, &e.Reserved, &e.Driver, &seen, &e.Forced, &e.Actor); err != nil {
			return nil, err
		}
		e.At, e.Seen, e.Reported = fromMicros(at), time.Duration(seen.Int64), seen.Valid
		out = append(out, e)
	}
	return out, rows.Err()
}

// Entries implements [cells.BudgetStore].
func (b budgets) Entries(ctx context.Context, tenant cells.TenantID) ([]cells.BudgetEntry, error) {
	out, err := budgetEntries(ctx, b.s.read, tenant)
	return out, b.s.translate("budget", err)
}

// Update implements [cells.BudgetStore].
func (b budgets) Update(ctx context.Context, tenant cells.TenantID, change func([]cells.BudgetEntry) ([]cells.BudgetEntry, error)) error {
	return b.s.tx(ctx, "budget", func(tx *Tx) error {
		old, err := budgetEntries(ctx, tx, tenant)
		if err != nil {
			return err
		}
		next, err := change(slices.Clone(old))
		if err != nil {
			return err
		}
		// What has not changed is left alone: a tenant may have moved often.
		for _, e := range old {
			if slices.Contains(next, e) {
				continue
			}
			if _, err := tx.ExecContext(ctx, `DELETE FROM budgets WHERE tenant = ? AND move = ?`, tenant, e.Move); err != nil {
				return err
			}
		}
		for _, e := range next {
			if e.Tenant != tenant {
				return fmt.Errorf("%w: budget entry of tenant %s among those of %s", cells.ErrInvalid, e.Tenant, tenant)
			}
			if slices.Contains(old, e) {
				continue
			}
			_, err := tx.ExecContext(ctx, `INSERT INTO budgets (tenant, move, at, pause, reserved, driver, seen, forced, actor) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)`,
				e.Tenant, e.Move, micros(e.At), int64(e.Pause), e.Reserved, int64(e.Driver),
				sql.NullInt64{Int64: int64(e.Seen), Valid: e.Reported}, e.Forced, e.Actor)
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// BudgetLimit implements [cells.BudgetLimits].
func (b budgets) BudgetLimit(ctx context.Context, tenant cells.TenantID) (limit cells.BudgetLimit, ok bool, err error) {
	err = b.s.read.QueryRowContext(ctx, `SELECT pause, tenant <> '' FROM budget_limits WHERE tenant IN ('', ?) ORDER BY tenant DESC LIMIT 1`, tenant).
		Scan(&limit.Pause, &limit.Own)
	if errors.Is(err, sql.ErrNoRows) {
		return cells.BudgetLimit{}, false, nil
	}
	return limit, err == nil, b.s.translate("budget limit", err)
}

// Limits implements [directory.Store].
func (s *Store) Limits(ctx context.Context) ([]api.BudgetLimit, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT tenant, pause, actor, at FROM budget_limits ORDER BY tenant`)
	if err != nil {
		return nil, s.translate("budget limits", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.BudgetLimit
	for rows.Next() {
		var l api.BudgetLimit
		var at int64
		if err := rows.Scan(&l.Tenant, &l.Pause, &l.Actor, &at); err != nil {
			return nil, s.translate("budget limits", err)
		}
		l.At = fromMicros(at)
		out = append(out, l)
	}
	return out, s.translate("budget limits", rows.Err())
}

// SetLimit implements [directory.Store].
func (s *Store) SetLimit(ctx context.Context, l api.BudgetLimit, audit api.AuditEntry) error {
	return s.tx(ctx, "budget limit", func(tx *Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO budget_limits (tenant, pause, actor, at) VALUES (?, ?, ?, ?)
			ON CONFLICT (tenant) DO UPDATE SET pause = excluded.pause, actor = excluded.actor, at = excluded.at`,
			l.Tenant, int64(l.Pause), l.Actor, micros(l.At))
		if err != nil {
			return err
		}
		return insertAudit(ctx, tx, audit)
	})
}

// RemoveLimit implements [directory.Store].
func (s *Store) RemoveLimit(ctx context.Context, tenant cells.TenantID, audit api.AuditEntry) error {
	return s.tx(ctx, "budget limit", func(tx *Tx) error {
		res, err := tx.ExecContext(ctx, `DELETE FROM budget_limits WHERE tenant = ?`, tenant)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("%w: tenant %q has no budget limit of its own", cells.ErrNotFound, tenant))
		}
		return insertAudit(ctx, tx, audit)
	})
}
