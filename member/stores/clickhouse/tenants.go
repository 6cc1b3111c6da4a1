// SPDX-License-Identifier: Apache-2.0

package clickhouse

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

// notStored are engines whose tables hold no rows of their own: what a view shows
// is in other tables, what a queue has would be taken by reading it.
var notStored = []string{"View", "MaterializedView", "LiveView", "WindowView", "Dictionary", "Null", "Kafka", "RabbitMQ", "NATS", "FileLog", "S3Queue", "AzureQueue"}

// stored reports whether a table of an engine can be read for its rows.
func stored(engine string) bool {
	return strings.HasSuffix(engine, "MergeTree") || slices.Contains([]string{"Log", "TinyLog", "StripeLog", "Memory", "Buffer", "Distributed", "Merge", "Join", "KeeperMap", "EmbeddedRocksDB"}, engine)
}

// tenantTable is a table with a tenant column.
type tenantTable struct{ name, column string }

// tenantTables finds them in the database. A table that nothing is known of is an
// error: it could hold a tenant's rows.
func (s *Store) tenantTables(ctx context.Context) ([]tenantTable, error) {
	rows, err := s.c.query(ctx, `SELECT table, name FROM system.columns WHERE database = currentDatabase() AND table != '`+reserved+`' AND name IN (`+literals(s.columns)+`) ORDER BY table, name`)
	if err != nil {
		return nil, err
	}
	engineRows, err := s.c.query(ctx, `SELECT name, engine FROM system.tables WHERE database = currentDatabase()`)
	if err != nil {
		return nil, err
	}
	engines := map[string]string{}
	for _, r := range engineRows {
		n, e, err := pair(r)
		if err != nil {
			return nil, err
		}
		engines[n] = e
	}
	var out []tenantTable
	for _, r := range rows {
		n, c, err := pair(r)
		if err != nil {
			return nil, err
		}
		switch e := engines[n]; {
		case slices.Contains(notStored, e):
		case stored(e):
			out = append(out, tenantTable{n, c})
		default:
			return nil, fmt.Errorf("%w: whether table %s of engine %q holds a tenant's rows cannot be told", cells.ErrInvalid, n, e)
		}
	}
	return out, nil
}

func pair(r []any) (a, b string, err error) {
	if len(r) == 2 {
		a, aok := r[0].(string)
		b, bok := r[1].(string)
		if aok && bok {
			return a, b, nil
		}
	}
	return "", "", fmt.Errorf("%w: a result of another shape", cells.ErrInvalid)
}

func (t tenantTable) where() string {
	return ` FROM ` + quoted(t.name) + ` WHERE ` + quoted(t.column) + ` IS NOT NULL AND toString(` + quoted(t.column) + `) NOT IN (` + literals(stores.NonTenants) + `)`
}

// Empty implements [stores.Store]: no table with a tenant column has a row of a
// tenant.
func (s *Store) Empty(ctx context.Context) (bool, string, error) {
	tables, err := s.tenantTables(ctx)
	if err != nil {
		return false, "", err
	}
	for _, t := range tables {
		rows, err := s.c.query(ctx, `SELECT 1 AS one`+t.where()+` LIMIT 1`)
		if err != nil {
			return false, "", fmt.Errorf("table %s: %w", t.name, err)
		}
		if len(rows) > 0 {
			return false, "rows in " + t.name, nil
		}
	}
	return true, "", nil
}

// Tenants implements [stores.TenantLister].
func (s *Store) Tenants(ctx context.Context) ([]string, error) {
	tables, err := s.tenantTables(ctx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, t := range tables {
		rows, err := s.c.query(ctx, `SELECT DISTINCT assumeNotNull(toString(`+quoted(t.column)+`)) AS t`+t.where())
		if err != nil {
			return nil, fmt.Errorf("table %s: %w", t.name, err)
		}
		some, err := column(rows)
		if err != nil {
			return nil, fmt.Errorf("table %s: %w", t.name, err)
		}
		out = append(out, some...)
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}
