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

// planOf runs an EXPLAIN with settings, in a transaction that is rolled back.
func planOf(t *testing.T, pool *pgxpool.Pool, settings, query string, args ...any) []string {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), settings); err != nil {
		t.Fatal(err)
	}
	rows, err := tx.Query(t.Context(), query, args...)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

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
		items.digestKeysSQL(false, "big"),
		items.digestKeysSQL(true, "big"),
		"UPDATE " + items.sql() + " AS t SET v = 'y' FROM " + source + " WHERE " + items.onKey(),
		"DELETE FROM " + items.sql() + " AS t USING " + source + " WHERE " + items.onKey(),
	} {
		args := []any{keys}
		if strings.Contains(q, "$2") {
			args = append(args, make([]int32, len(keys)))
		}
		plan := planOf(t, pool, planning, "EXPLAIN "+q, args...)
		var good bool
		for _, line := range plan {
			good = good || strings.Contains(line, "Index Cond:") && strings.Contains(line, "(tenant = ") && strings.Contains(line, "(k = ")
		}
		if !good {
			t.Errorf("keys are not looked up by the key:\n%s\n%s", q, strings.Join(plan, "\n"))
		}
	}
}

// TestSettledKeysAreLookedUp: the table of changed keys has just been filled, and its
// statistics may be those of an empty one, or of another move's thousand keys.
func TestSettledKeysAreLookedUp(t *testing.T) {
	ctx := t.Context()
	pool, err := pgxpool.New(ctx, pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	s := &Store{pool: pool, schema: "cell"}
	exec := func(qs ...string) {
		t.Helper()
		for _, q := range qs {
			if _, err := pool.Exec(ctx, s.q(q)); err != nil {
				t.Fatalf("%v, in: %s", err, q)
			}
		}
	}
	exec("CREATE SCHEMA cell")
	if err := s.install(ctx); err != nil {
		t.Fatal(err)
	}
	exec("ALTER TABLE @s.transfer_key SET (autovacuum_enabled = false)")
	for _, statistics := range []string{"of an empty table", "of one move"} {
		if statistics == "of one move" {
			exec("INSERT INTO @s.transfer_key SELECT 'old', 't', 'items', decode(md5(i::text), 'hex') FROM generate_series(1, 1000) AS i")
		}
		exec("ANALYZE @s.transfer_key", "INSERT INTO @s.transfer_key SELECT 'new', 't', 'items', decode(md5(i::text), 'hex') FROM generate_series(1, 20000) AS i")
		var keys [][]byte
		if err := pool.QueryRow(ctx, s.q("SELECT array_agg(key) FROM @s.transfer_key WHERE move = 'new'")).Scan(&keys); err != nil {
			t.Fatal(err)
		}
		plan := planOf(t, pool, planning+"; SET LOCAL enable_seqscan = off", "EXPLAIN (ANALYZE, TIMING OFF) "+s.q(settleSQL), "new", "items", keys)
		text := strings.Join(plan, "\n")
		if strings.Contains(text, "Nested Loop") && !strings.Contains(text, "(key = ") {
			t.Errorf("statistics %s:\n%s", statistics, text)
		}
		for _, line := range plan {
			if strings.Contains(line, "Removed by") && !strings.Contains(line, ": 0") {
				t.Errorf("statistics %s: rows are read in vain:\n%s", statistics, text)
			}
		}
		exec("DELETE FROM @s.transfer_key", "VACUUM @s.transfer_key")
	}
}
