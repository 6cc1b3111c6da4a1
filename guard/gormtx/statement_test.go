// SPDX-License-Identifier: Apache-2.0

package gormtx

import (
	"errors"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// What is said of a statement by its text alone.
func TestCheck(t *testing.T) {
	me := "acme"
	for _, c := range []struct {
		sql  string
		args []any
		want error // nil: may be made under the admission of acme
	}{
		// Not writes to a tenant table.
		{`SELECT * FROM notes FOR UPDATE`, nil, nil},
		{`SELECT 'DELETE FROM notes'`, nil, nil},
		{`SELECT replace(value, 'a', 'b'), "update" FROM notes`, nil, nil},
		{`-- DELETE FROM notes` + "\nSELECT 1", nil, nil},
		{`SELECT $tag$ ; DELETE FROM notes $tag$`, nil, nil},
		{`INSERT INTO settings (key) VALUES (?)`, []any{"k"}, nil},
		{`CREATE TABLE notes (tenant text, "delete" text)`, nil, nil},
		{`CREATE INDEX i ON notes (tenant, update)`, nil, nil},
		{`INSERT INTO x (a) SELECT 1 ON CONFLICT DO UPDATE SET a = 1`, nil, nil},

		// Good ones.
		{`INSERT INTO "notes" ("tenant","key") VALUES ($1,$2),($3,$4) ON CONFLICT ("tenant","key") DO UPDATE SET "key"="excluded"."key" RETURNING *`, []any{me, "k", me, "l"}, nil},
		{`INSERT INTO notes VALUES (?, ?)`, []any{cells.TenantID(me), "k"}, nil},
		{`INSERT INTO notes (tenant, key) VALUES ('acme', now())`, nil, nil},
		{`INSERT INTO notes (tenant, key) SELECT tenant, key FROM old`, nil, nil}, // each row is looked at by the database
		{"UPDATE `notes` SET `value`=? WHERE `tenant` = ? AND `key` = ?", []any{"v", me, "k"}, nil},
		{`UPDATE notes AS n SET value = $2 WHERE n.tenant = $1 AND (key = 'a' OR key = 'b')`, []any{me, "v"}, nil},
		{`UPDATE public.notes SET value = 1 FROM other WHERE (notes.tenant = 'acme' AND other.id = notes.id)`, nil, nil},
		{`UPDATE notes SET tenant = ?, value = ? WHERE tenant = ?`, []any{me, 1, &me}, nil},
		{`DELETE FROM "notes" WHERE ("notes"."tenant","notes"."key") = ($1,$2)`, []any{me, "k"}, nil},
		{`DELETE FROM notes WHERE (tenant, key) IN ((?,?),(?,?))`, []any{me, "k", me, "l"}, nil},
		{`DELETE FROM notes WHERE tenant IN (?) AND key LIKE 'a%' RETURNING key`, []any{[]byte(me)}, nil},
		{`DELETE FROM Notes WHERE "Tenant" = $1`, []any{me}, nil},
		{`DELETE FROM notes WHERE $1::text = tenant`, []any{me}, nil},
		{`WITH gone AS (DELETE FROM notes WHERE tenant = $1 RETURNING 1) SELECT count(*) FROM gone`, []any{me}, nil},
		{`DELETE FROM notes WHERE tenant = 'acme'; DELETE FROM notes WHERE tenant = 'acme' AND key = 'x'`, nil, nil},

		// No tenant.
		{`INSERT INTO notes (key) VALUES (?)`, []any{"k"}, ErrNoTenantCondition},
		{`UPDATE notes SET value = 1`, nil, ErrNoTenantCondition},
		{`UPDATE notes SET value = 1 WHERE key = ?`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant = ? OR 1 = 1`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE NOT tenant = ?`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE NOT (tenant = ?)`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant NOT IN (?)`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant <> ?`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant = ? IS NOT TRUE`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant = $1 || 'x'`, []any{me}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant IN (SELECT tenant FROM other)`, nil, ErrNoTenantCondition},
		{`DELETE FROM notes USING other WHERE other.tenant = ?`, []any{me}, ErrNoTenantCondition},
		{`UPDATE notes SET value = (SELECT 1 WHERE tenant = 'acme')`, nil, ErrNoTenantCondition},
		{`UPDATE notes SET value = ' WHERE tenant = ''acme''' `, nil, ErrNoTenantCondition},
		{`DELETE FROM notes -- WHERE tenant = 'acme'`, nil, ErrNoTenantCondition},
		{`EXPLAIN ANALYZE DELETE FROM notes`, nil, ErrNoTenantCondition},
		{`WITH gone AS (DELETE FROM notes RETURNING tenant) SELECT 1 FROM gone WHERE tenant = 'acme'`, nil, ErrNoTenantCondition},
		{`SELECT 1; DELETE FROM ONLY "notes"`, nil, ErrNoTenantCondition},
		{`DELETE FROM "NOTES"`, nil, ErrNoTenantCondition},
		{`MERGE INTO notes USING x ON true WHEN MATCHED THEN DELETE`, nil, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant = ?`, []any{7}, ErrNoTenantCondition},
		{`DELETE FROM notes WHERE tenant = ?`, nil, ErrNoTenantCondition},

		// Another tenant.
		{`INSERT INTO notes (tenant, key) VALUES (?, ?)`, []any{"globex", "k"}, cells.ErrFenced},
		{`INSERT INTO notes (tenant, key) VALUES (?, ?), (?, ?)`, []any{me, "k", "globex", "k"}, cells.ErrFenced},
		{`INSERT INTO notes (tenant, key) VALUES (lower(?), 'k')`, []any{me}, cells.ErrFenced},
		{`INSERT INTO notes VALUES (?, ?)`, []any{"globex", "k"}, cells.ErrFenced},
		{`UPDATE notes SET value = 1 WHERE tenant = ?`, []any{"globex"}, cells.ErrFenced},
		{`UPDATE notes SET tenant = ? WHERE tenant = ?`, []any{"globex", me}, cells.ErrFenced},
		{`DELETE FROM notes WHERE tenant IN (?, ?)`, []any{me, "globex"}, cells.ErrFenced},
		{`DELETE FROM notes WHERE (tenant, key) IN ((?,?),(?,?))`, []any{me, "k", "globex", "l"}, cells.ErrFenced},
		{`TRUNCATE TABLE notes`, nil, cells.ErrFenced},
		{`INSERT OR REPLACE INTO notes (tenant, key) VALUES ('acme', 'k')`, nil, cells.ErrFenced},
		{`REPLACE INTO notes (tenant, key) VALUES ('acme', 'k')`, nil, cells.ErrFenced},

		// Not to be read, or not the service's.
		{`/* /* */ DELETE FROM notes WHERE tenant = 'acme' --*/`, nil, cells.ErrFenced},
		{`UPDATE [notes] SET value = 1 WHERE tenant = 'acme'`, nil, cells.ErrFenced},
		{`DELETE FROM "Cell_Outbox"`, nil, cells.ErrFenced},
		{`DELETE FROM cell_outbox WHERE tenant = 'acme'`, nil, cells.ErrFenced},
	} {
		p := &Plugin{columns: map[string]string{"notes": "tenant"}, outbox: []guard.Table{{Name: "cell_outbox", TenantColumn: "tenant"}}}
		err := p.check(writes(c.sql), guard.Admission{Tenant: "acme"}, false, c.args)
		if !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s %v: %v, want %v", c.sql, c.args, err, c.want)
		}
		if c.want == cells.ErrFenced && errors.Is(err, ErrNoTenantCondition) {
			t.Errorf("%s: is said to have no condition: %v", c.sql, err)
		}
	}
}

func TestCheckWithoutAdmission(t *testing.T) {
	p := &Plugin{columns: map[string]string{"notes": "tenant"}}
	for sql, want := range map[string]error{
		`INSERT INTO notes (tenant) VALUES ('acme')`: guard.ErrNoAdmission,
		`UPDATE notes SET a = 1 WHERE tenant = ''`:   guard.ErrNoAdmission,
		`DELETE FROM notes`:                          guard.ErrNoAdmission,
		`INSERT INTO settings (key) VALUES ('k')`:    nil,
		`SELECT * FROM notes WHERE tenant = 'acme'`:  nil,
		`SAVEPOINT s`: nil,
		`ALTER TABLE notes ADD COLUMN x text DEFAULT ''`: nil,
	} {
		if err := p.check(writes(sql), guard.Admission{}, false, nil); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", sql, err, want)
		}
	}
}

// Whatever the text is, it is looked at to its end.
func FuzzWrites(f *testing.F) {
	for _, s := range []string{`DELETE FROM a WHERE ((b`, `INSERT INTO a VALUES (`, `UPDATE a SET`, `$x$`, `'`, `/*`, `e'\`, `WITH a AS (DELETE FROM b)))`} {
		f.Add(s)
	}
	p := &Plugin{columns: map[string]string{"a": "b"}}
	f.Fuzz(func(_ *testing.T, s string) {
		_ = p.check(writes(s), guard.Admission{Tenant: "acme"}, false, []any{"acme"})
	})
}
