// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

// TestKeysAreLookedUpByTheKey: statistics that were taken before the tenant came make
// every index that begins with the tenant look as good as the key's. Each key that a
// move looks up must still be found by all of its columns, or a cut takes seconds.
func TestKeysAreLookedUpByTheKey(t *testing.T) {
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for _, q := range []string{
		"CREATE TABLE items (tenant text, k text, n int, v text, PRIMARY KEY (tenant, k))",
		"CREATE INDEX other ON items (tenant, n)",
		"ALTER TABLE items SET (autovacuum_enabled = false)",
		"INSERT INTO items SELECT 't' || i % 5, 'k' || i, i, 'x' FROM generate_series(1, 100) AS i",
		"ANALYZE items",
		"INSERT INTO items SELECT 'big', 'k' || i, i, 'x' FROM generate_series(1, 50000) AS i",
	} {
		if _, err := pool.Exec(ctx, q); err != nil {
			t.Fatalf("%v, in: %s", err, q)
		}
	}
	s := &Store{pool: pool, tables: []guard.Table{{Name: "items", TenantColumn: "tenant"}}}
	cat, err := s.load(ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	items, err := cat.table("items")
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for i := range 500 {
		keys = append(keys, "k"+string(rune('0'+i%10)))
	}
	source := items.keyed(items.unnest(items.keyAt, 1), "big")
	for _, q := range []string{
		items.digestSQL(source + " JOIN " + items.sql() + " AS t ON " + items.onKey()),
		"UPDATE " + items.sql() + " AS t SET v = 'y' FROM " + source + " WHERE " + items.onKey(),
		"DELETE FROM " + items.sql() + " AS t USING " + source + " WHERE " + items.onKey(),
	} {
		tx, err := pool.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(ctx, planning); err != nil {
			t.Fatal(err)
		}
		rows, err := tx.Query(ctx, "EXPLAIN "+q, keys)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		_ = tx.Rollback(ctx)
		var good bool
		for _, line := range plan {
			good = good || strings.Contains(line, "Index Cond:") && strings.Contains(line, "(tenant = ") && strings.Contains(line, "(k = ")
		}
		if !good {
			t.Errorf("keys are not looked up by the key:\n%s\n%s", q, strings.Join(plan, "\n"))
		}
	}
}
