// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/member/stores"
)

// tenantTable is a table with a tenant column.
type tenantTable struct {
	Schema, Name, Column string
}

func (t tenantTable) sql() string    { return pgx.Identifier{t.Schema, t.Name}.Sanitize() }
func (t tenantTable) column() string { return pgx.Identifier{t.Column}.Sanitize() }

// tenantTables finds them in the catalog: partitions are read through their roots,
// foreign tables are another server's.
func (s *Store) tenantTables(ctx context.Context, tx pgx.Tx) ([]tenantTable, error) {
	rows, err := tx.Query(ctx, `SELECT n.nspname::text, c.relname::text, a.attname::text
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't' AND NOT a.attisdropped AND a.attnum > 0
		AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\_%' AND n.nspname <> ALL ($1) AND a.attname = ANY ($2)
		ORDER BY 1, 2, 3`, s.own, s.columns)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[tenantTable])
}

// look runs fn for every table with a tenant column, on one snapshot of the primary,
// until fn says that it is done. A policy that hides rows from this role is an error
// instead.
func (s *Store) look(ctx context.Context, fn func(tx pgx.Tx, t tenantTable) (done bool, err error)) error {
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var standby bool
		if err := tx.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err != nil {
			return err
		}
		if standby {
			return errStandby
		}
		if _, err := tx.Exec(ctx, `SET LOCAL row_security = off`); err != nil {
			return err
		}
		tables, err := s.tenantTables(ctx, tx)
		if err != nil {
			return err
		}
		for _, t := range tables {
			done, err := fn(tx, t)
			if err != nil {
				return fmt.Errorf("table %s: %w", t.sql(), err)
			}
			if done {
				return nil
			}
		}
		return nil
	})
	return translate(ctx, err)
}

// Empty implements [stores.Store]: no table with a tenant column has a row of a
// tenant.
func (s *Store) Empty(ctx context.Context) (empty bool, holds string, err error) {
	err = s.look(ctx, func(tx pgx.Tx, t tenantTable) (bool, error) {
		var found bool
		q := fmt.Sprintf(`SELECT EXISTS (SELECT FROM %s WHERE %s IS NOT NULL AND %[2]s::text <> ALL ($1))`, t.sql(), t.column())
		if err := tx.QueryRow(ctx, q, stores.NonTenants).Scan(&found); err != nil {
			return false, err
		}
		if found {
			holds = "rows in " + t.sql()
		}
		return found, nil
	})
	return err == nil && holds == "", holds, err
}

// Tenants implements [stores.TenantLister].
func (s *Store) Tenants(ctx context.Context) ([]string, error) {
	var out []string
	err := s.look(ctx, func(tx pgx.Tx, t tenantTable) (bool, error) {
		q := fmt.Sprintf(`SELECT DISTINCT %s::text FROM %s WHERE %[1]s IS NOT NULL AND %[1]s::text <> ALL ($1)`, t.column(), t.sql())
		rows, err := tx.Query(ctx, q, stores.NonTenants)
		if err != nil {
			return false, err
		}
		some, err := pgx.CollectRows(rows, pgx.RowTo[string])
		out = append(out, some...)
		return false, err
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}
