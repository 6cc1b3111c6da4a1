// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

//go:embed schema.sql
var schemaSQL string

// schemaVersion grows with each change of schema.sql. A process never replaces
// what a newer one has installed.
const schemaVersion = 1

// Install implements [guard.Keeper]. It creates the guard's schema and the
// triggers on the given tables and their partitions. Adding a trigger waits for
// the table's writers, in tries of one second so that it never holds up others
// for longer; what is in place already is not touched.
//
// [cells.ErrInvalid] when a table is missing, or its tenant column is missing, is no
// text or is no part of the primary key.
func (c *core) Install(ctx context.Context, tables []guard.Table) error {
	if err := c.offSearchPath(ctx); err != nil {
		return err
	}
	if err := c.installSchema(ctx); err != nil {
		return fmt.Errorf("guard/postgres: install schema %s: %w", c.schema, err)
	}
	own := []protected{
		{Table: guard.Table{Name: c.schema + ".outbox", TenantColumn: "tenant"}, relay: "DELETE"},
		{Table: guard.Table{Name: c.schema + ".outbox_published", TenantColumn: "tenant"}, relay: "INSERT UPDATE DELETE"},
	}
	for _, t := range tables {
		own = append(own, protected{Table: t})
	}
	for _, t := range own {
		if err := c.protect(ctx, t); err != nil {
			return fmt.Errorf("guard/postgres: protect table %s: %w", t.Name, err)
		}
	}
	return nil
}

// offSearchPath refuses a schema that names without a schema are looked up in. A
// role of the same name has it on its path by default: the service's tables are
// made in public before the guard is installed, and a second, empty set of them in
// the guard's schema the next time.
func (c *core) offSearchPath(ctx context.Context) error {
	var on bool
	err := c.b.row(ctx, `SELECT EXISTS (SELECT FROM unnest(string_to_array(current_setting('search_path'), ',')) AS p
		WHERE replace(btrim(p, ' "'), '$user', current_user) = $1)`, []any{c.schema}, &on)
	if err != nil {
		return fmt.Errorf("guard/postgres: reading the search path: %w", unavailable(err))
	}
	if on {
		return fmt.Errorf("%w: guard/postgres: schema %q is on the search path of this role, so the service's own tables could land in it; connect as a role of another name, take the schema off the path, or choose another with WithSchema",
			cells.ErrInvalid, c.schema)
	}
	return nil
}

func (c *core) installSchema(ctx context.Context) error {
	var version int
	known := c.b.row(ctx, c.q(`SELECT version FROM @s.meta`), nil, &version)
	if known == nil && version >= schemaVersion {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return c.inOrder(ctx, func(ctx context.Context, tx txn) error {
		if err := tx.exec(ctx, c.q(`SELECT pg_advisory_xact_lock(hashtextextended('@s.install', 0))`)); err != nil {
			return err
		}
		var there bool
		if err := tx.row(ctx, `SELECT to_regclass($1) IS NOT NULL`, []any{c.schema + ".meta"}, &there); err != nil {
			return err
		}
		if there {
			err := tx.row(ctx, c.q(`SELECT version FROM @s.meta`), nil, &version)
			if err != nil && !errors.Is(err, sql.ErrNoRows) || version >= schemaVersion {
				return err
			}
		}
		for _, stmt := range statements(c.q(schemaSQL)) {
			if err := tx.exec(ctx, stmt); err != nil {
				return fmt.Errorf("%w, in: %.60s", err, stmt)
			}
		}
		return tx.exec(ctx, c.q(`INSERT INTO @s.meta (version) VALUES ($1) ON CONFLICT (one) DO UPDATE SET version = EXCLUDED.version`), schemaVersion)
	})
}

// statements cuts a script at the semicolons that end a line outside of $$.
func statements(script string) []string {
	var out []string
	var cur strings.Builder
	quoted := false
	for line := range strings.Lines(script) {
		if strings.HasPrefix(line, "--") && cur.Len() == 0 || strings.TrimSpace(line) == "" && cur.Len() == 0 {
			continue
		}
		cur.WriteString(line)
		if strings.Count(line, "$$")%2 == 1 {
			quoted = !quoted
		}
		trimmed := strings.TrimSpace(line)
		if !quoted && (strings.HasSuffix(trimmed, ";") || trimmed == "$$") {
			out = append(out, strings.TrimSpace(cur.String()))
			cur.Reset()
		}
	}
	return out
}

type protected struct {
	guard.Table
	// relay names the operations that the relay may do as well.
	relay string
}

const triggerPrefix = "zz_cell_guard_"

// triggers returns the definitions by name.
func (c *core) triggers(t protected) map[string]string {
	col := pgx.Identifier{t.TenantColumn}.Sanitize()
	foreign := func(row, op string) string {
		key := fmt.Sprintf("((pg_current_xact_id()::text || ' ') || %s.%s::text)", row, col)
		cond := fmt.Sprintf("%s IS DISTINCT FROM current_setting('%s.admitted', true)", key, c.schema)
		if strings.Contains(t.relay, op) {
			cond += fmt.Sprintf(" AND %s IS DISTINCT FROM current_setting('%s.relay', true)", key, c.schema)
		}
		return "(" + cond + ")"
	}
	refuse := fmt.Sprintf("EXECUTE FUNCTION %s.refuse(%s)", c.schema, quoteLiteral(t.TenantColumn))
	return map[string]string{
		triggerPrefix + "insert":   "AFTER INSERT ON %s FOR EACH ROW WHEN (" + foreign("NEW", "INSERT") + ") " + refuse,
		triggerPrefix + "update":   "AFTER UPDATE ON %s FOR EACH ROW WHEN (" + foreign("NEW", "UPDATE") + " OR " + foreign("OLD", "UPDATE") + ") " + refuse,
		triggerPrefix + "delete":   "AFTER DELETE ON %s FOR EACH ROW WHEN (" + foreign("OLD", "DELETE") + ") " + refuse,
		triggerPrefix + "truncate": "BEFORE TRUNCATE ON %s FOR EACH STATEMENT " + refuse,
	}
}

func quoteLiteral(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// protect adds what is missing to a table and its partitions.
func (c *core) protect(ctx context.Context, t protected) error {
	if t.TenantColumn == "" {
		return fmt.Errorf("%w: no tenant column", cells.ErrInvalid)
	}
	if err := c.checkTable(ctx, t.Table); err != nil {
		return err
	}
	// The row triggers of a partitioned table are cloned to its partitions, the
	// statement's are not.
	var relations []string
	var roots []bool
	err := c.b.rows(ctx, `SELECT p.oid::regclass::text, p.oid = to_regclass($1)
		FROM (SELECT to_regclass($1)::oid AS oid UNION SELECT relid::oid FROM pg_partition_tree(to_regclass($1))) p ORDER BY 2 DESC, 1`,
		[]any{t.Name}, func(scan func(...any) error) error {
			var name string
			var root bool
			err := scan(&name, &root)
			relations, roots = append(relations, name), append(roots, root)
			return err
		})
	if err != nil {
		return translate(err)
	}
	for i, rel := range relations {
		if err := c.protectRelation(ctx, t, rel, roots[i]); err != nil {
			return err
		}
	}
	return nil
}

func (c *core) protectRelation(ctx context.Context, t protected, rel string, root bool) error {
	there := map[string]string{} // name -> enabled
	err := c.b.rows(ctx, `SELECT tgname::text, tgenabled::text FROM pg_trigger WHERE tgrelid = to_regclass($1) AND NOT tgisinternal`, []any{rel}, func(scan func(...any) error) error {
		var name, enabled string
		err := scan(&name, &enabled)
		there[name] = enabled
		return err
	})
	if err != nil {
		return translate(err)
	}
	for name, def := range c.triggers(t) {
		row := name != triggerPrefix+"truncate"
		if there[name] == "" && (root || !row) {
			if err := c.ddl(ctx, "CREATE TRIGGER "+name+" "+fmt.Sprintf(def, rel), "ALTER TABLE ONLY "+rel+" ENABLE ALWAYS TRIGGER "+name); err != nil {
				return err
			}
		} else if there[name] != "A" {
			if err := c.ddl(ctx, "ALTER TABLE ONLY "+rel+" ENABLE ALWAYS TRIGGER "+name); err != nil {
				return err
			}
		}
	}
	return nil
}

// ddl runs statements that lock a table, in short tries until ctx ends or the
// lock wait is over.
func (c *core) ddl(ctx context.Context, stmts ...string) error {
	ctx, cancel := context.WithTimeout(ctx, c.lockWait)
	defer cancel()
	for {
		tx, err := c.b.begin(ctx)
		if err != nil {
			return ended(ctx, unavailable(err))
		}
		err = tx.exec(ctx, `SET LOCAL lock_timeout = '1s'`)
		for _, s := range stmts {
			if err == nil {
				err = tx.exec(ctx, s)
			}
		}
		if err == nil {
			err = c.commit(ctx, tx)
		}
		tx.rollback(context.WithoutCancel(ctx))
		switch sqlState(err) {
		case "42710": // another process has just created it
			return nil
		case stateLockTimeout, stateDeadlock:
			select {
			case <-ctx.Done():
				return ended(ctx, translate(err))
			case <-time.After(100 * time.Millisecond):
				continue
			}
		}
		return ended(ctx, translate(err))
	}
}

func (c *core) checkTable(ctx context.Context, t guard.Table) error {
	var there, text, keyed bool
	err := c.b.row(ctx, `SELECT to_regclass($1) IS NOT NULL,
		EXISTS (SELECT FROM pg_attribute a JOIN pg_type y ON y.oid = a.atttypid WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND NOT a.attisdropped
			AND y.typcategory = 'S'),
		EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
			WHERE i.indrelid = to_regclass($1) AND i.indisprimary AND a.attname = $2)`, []any{t.Name, t.TenantColumn}, &there, &text, &keyed)
	switch {
	case err != nil:
		return translate(err)
	case !there:
		return fmt.Errorf("%w: there is no such table", cells.ErrInvalid)
	case !text:
		return fmt.Errorf("%w: there is no column %s of a text type", cells.ErrInvalid, t.TenantColumn)
	case !keyed:
		return fmt.Errorf("%w: column %s is no part of the primary key", cells.ErrInvalid, t.TenantColumn)
	}
	return nil
}
