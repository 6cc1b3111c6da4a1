// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// survey is what one snapshot shows: the tenancy rows, and for each tenant the
// tables that have rows of it.
type survey struct {
	held map[string]bool
	data map[string][]string
}

func (s *Store) survey(ctx context.Context) (v survey, err error) {
	v = survey{held: map[string]bool{}, data: map[string][]string{}}
	err = s.inTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		held, err := texts(ctx, tx, s.q(`SELECT tenant FROM @s.tenancy`))
		if err != nil {
			return err
		}
		for _, t := range held {
			v.held[t] = true
		}
		tables, err := s.tables(ctx, tx)
		if err != nil {
			return err
		}
		for _, t := range tables {
			if t.part || t.kind == "f" {
				continue // its parent is read; a foreign table's rows are elsewhere
			}
			found, err := texts(ctx, tx, distinct(t))
			if err != nil {
				return fmt.Errorf("table %s: %w", t, err)
			}
			for _, tenant := range found {
				if !tenancy.Everybody(tenant) {
					v.data[tenant] = append(v.data[tenant], t.String())
				}
			}
		}
		return nil
	})
	if err != nil {
		return v, fmt.Errorf("tenancy: reading the tenants of every table: %w", err)
	}
	return v, nil
}

// distinct reads a table's tenants: from tenant to tenant along an index that leads
// with the column, so that a table of a few tenants and many rows is read quickly.
func distinct(t table) string {
	col, rel := pgx.Identifier{t.column}.Sanitize(), t.sql()
	if !t.indexed {
		return fmt.Sprintf("SELECT DISTINCT %s::text FROM %s WHERE %s IS NOT NULL", col, rel, col)
	}
	return fmt.Sprintf(`WITH RECURSIVE w AS (
		(SELECT %[1]s AS t FROM %[2]s WHERE %[1]s IS NOT NULL ORDER BY %[1]s LIMIT 1)
		UNION ALL SELECT (SELECT %[1]s FROM %[2]s WHERE %[1]s > w.t ORDER BY %[1]s LIMIT 1) FROM w WHERE w.t IS NOT NULL)
		SELECT t::text FROM w WHERE t IS NOT NULL`, col, rel)
}

func texts(ctx context.Context, q querier, query string) ([]string, error) {
	rows, err := q.Query(ctx, query)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// TenantsOfEveryTable implements [tenancy.Store].
func (s *Store) TenantsOfEveryTable(ctx context.Context) ([]string, error) {
	v, err := s.survey(ctx)
	if err != nil {
		return nil, err
	}
	for t := range v.held {
		v.data[t] = nil
	}
	return slices.Sorted(maps.Keys(v.data)), nil
}

// Unheld implements [tenancy.Store].
func (s *Store) Unheld(ctx context.Context) ([]tenancy.Unheld, error) {
	v, err := s.survey(ctx)
	if err != nil {
		return nil, err
	}
	var out []tenancy.Unheld
	for _, t := range slices.Sorted(maps.Keys(v.data)) {
		if !v.held[t] {
			out = append(out, tenancy.Unheld{Tenant: t, Tables: v.data[t]})
		}
	}
	return out, nil
}

// Empty implements [tenancy.Store].
func (s *Store) Empty(ctx context.Context) ([]cells.TenantID, error) {
	v, err := s.survey(ctx)
	if err != nil {
		return nil, err
	}
	var out []cells.TenantID
	for _, t := range slices.Sorted(maps.Keys(v.held)) {
		if len(v.data[t]) == 0 {
			out = append(out, cells.TenantID(t))
		}
	}
	return out, nil
}
