// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// maxKeys is the number of key columns, without the tenant's, that the change
// log has room for.
const maxKeys = 8

// table is a tenant table as this database has it.
type table struct {
	guard.Table
	cols []column // not generated, by name
	gen  []column // generated
	key  []string // the primary key in its order, tenant column included
	keys []string // the key without the tenant column
}

type column struct {
	name, typ string
	notNull   bool
}

func quote(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

func literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// querier is *sql.Tx or *sql.DB.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// load reads a table's shape; [cells.ErrNotFound] when there is no such table.
func load(ctx context.Context, q querier, t guard.Table) (*table, error) {
	rows, err := q.QueryContext(ctx, `SELECT name, upper(type), "notnull", pk, hidden FROM pragma_table_xinfo(?)`, t.Name)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := &table{Table: t}
	pk := map[int]string{}
	for rows.Next() {
		var c column
		var at, hidden int
		if err := rows.Scan(&c.name, &c.typ, &c.notNull, &at, &hidden); err != nil {
			return nil, err
		}
		if at > 0 {
			pk[at] = c.name
		}
		switch hidden {
		case 0:
			out.cols = append(out.cols, c)
		case 2, 3:
			out.gen = append(out.gen, c)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if len(out.cols) == 0 {
		return nil, fmt.Errorf("%w: table %s", cells.ErrNotFound, t.Name)
	}
	for i := 1; i <= len(pk); i++ {
		out.key = append(out.key, pk[i])
		if pk[i] != t.TenantColumn {
			out.keys = append(out.keys, pk[i])
		}
	}
	slices.SortFunc(out.cols, func(a, b column) int { return strings.Compare(a.name, b.name) })
	return out, nil
}

// usable loads a table that passes what a move needs of it.
func usable(ctx context.Context, q querier, t guard.Table) (*table, error) {
	out, err := load(ctx, q, t)
	if err != nil {
		return nil, err
	}
	if len(out.key) == 0 || len(out.keys) == len(out.key) || len(out.keys) > maxKeys {
		return nil, fmt.Errorf("%w: transfer/sqlite: table %s has no primary key that carries %s", cells.ErrInvalid, t.Name, t.TenantColumn)
	}
	return out, nil
}

// usables loads all of the store's tables, by name.
func (s *Store) usables(ctx context.Context, q querier) (map[string]*table, error) {
	out := map[string]*table{}
	for _, t := range s.tables {
		u, err := usable(ctx, q, t)
		if err != nil {
			return nil, err
		}
		out[t.Name] = u
	}
	return out, nil
}

func unknown(name string) error {
	return fmt.Errorf("%w: transfer/sqlite: table %q is not listed here", cells.ErrInvalid, name)
}

// exprs lists columns as expressions: a bare column would make the driver
// interpret the declared type.
func exprs(alias string, names []string) string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = "+" + alias + quote(n)
	}
	return strings.Join(out, ", ")
}

func quoted(prefix string, names []string) string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = prefix + quote(n)
	}
	return strings.Join(out, ", ")
}

func marks(n int) string { return strings.TrimSuffix(strings.Repeat("?, ", n), ", ") }

func (t *table) names() []string {
	out := make([]string, len(t.cols))
	for i, c := range t.cols {
		out[i] = c.name
	}
	return out
}

// keyIndex returns where the key's columns, tenant excluded, are among cols.
func (t *table) keyIndex() []int {
	out := make([]int, len(t.keys))
	for i, k := range t.keys {
		out[i] = slices.IndexFunc(t.cols, func(c column) bool { return c.name == k })
	}
	return out
}

// selectRows reads rows of the tenant in key order; the caller adds conditions.
func (t *table) selectRows(cond string) string {
	order := ""
	if len(t.keys) > 0 {
		order = " ORDER BY " + quoted("", t.keys)
	}
	return fmt.Sprintf("SELECT %s FROM %s WHERE %s = ?%s%s", exprs("", t.names()), quote(t.Name), quote(t.TenantColumn), cond, order)
}

// after is the condition for rows behind a key.
func (t *table) after() string {
	if len(t.keys) == 0 {
		return " AND 0"
	}
	return fmt.Sprintf(" AND (%s) > (%s)", quoted("", t.keys), marks(len(t.keys)))
}

// byKey is the condition for one key.
func (t *table) byKey() string {
	var b strings.Builder
	for _, k := range t.keys {
		b.WriteString(" AND " + quote(k) + " = ?")
	}
	return b.String()
}

// put inserts n rows, over those with the same key. Nothing else is replaced: a row
// that stands in the way of a unique value may be another tenant's.
func (t *table) put(n int) string {
	row := "(" + marks(len(t.cols)) + ")"
	sets := make([]string, len(t.cols))
	for i, c := range t.cols {
		sets[i] = quote(c.name) + " = excluded." + quote(c.name)
	}
	return fmt.Sprintf("INSERT INTO %s (%s) VALUES %s ON CONFLICT (%s) DO UPDATE SET %s", quote(t.Name), quoted("", t.names()),
		strings.TrimSuffix(strings.Repeat(row+", ", n), ", "), quoted("", t.key), strings.Join(sets, ", "))
}

func (t *table) remove() string {
	return fmt.Sprintf("DELETE FROM %s WHERE %s = ?%s", quote(t.Name), quote(t.TenantColumn), t.byKey())
}

// scanner reads rows of n raw values.
type scanner struct{ vals, ptrs []any }

func newScanner(n int) *scanner {
	s := &scanner{vals: make([]any, n), ptrs: make([]any, n)}
	for i := range s.vals {
		s.ptrs[i] = &s.vals[i]
	}
	return s
}

func (s *scanner) scan(rows *sql.Rows) ([]any, error) {
	err := rows.Scan(s.ptrs...)
	return s.vals, err
}

// triggerName names one of a table's three capture triggers.
func triggerName(t, op string) string {
	sum := sha256.Sum256([]byte(t))
	return "cell_transfer_" + hex.EncodeToString(sum[:6]) + "_" + op
}

// triggers returns the statements that write the table's changes into the log, by
// trigger name. They note keys only: the rows are read when they are asked for.
func (t *table) triggers() map[string]string {
	ks := make([]string, len(t.keys))
	for i := range ks {
		ks[i] = fmt.Sprintf("k%d", i+1)
	}
	note := func(row, and string) string {
		cols := append([]string{"tenant", "tbl"}, ks...)
		vals := []string{row + "." + quote(t.TenantColumn), literal(t.Name)}
		for _, k := range t.keys {
			vals = append(vals, row+"."+quote(k))
		}
		return fmt.Sprintf("INSERT INTO cell_transfer_log (%s) SELECT %s WHERE EXISTS (SELECT 1 FROM cell_transfer_capture WHERE tenant = %s.%s AND released = 0)%s;",
			strings.Join(cols, ", "), strings.Join(vals, ", "), row, quote(t.TenantColumn), and)
	}
	var differs []string
	for _, k := range t.key {
		differs = append(differs, fmt.Sprintf("OLD.%s IS NOT NEW.%s", quote(k), quote(k)))
	}
	out := map[string]string{}
	for op, body := range map[string]string{
		"insert": note("NEW", ""),
		"delete": note("OLD", ""),
		"update": note("OLD", "") + " " + note("NEW", " AND ("+strings.Join(differs, " OR ")+")"),
	} {
		name := triggerName(t.Name, op)
		out[name] = fmt.Sprintf("CREATE TRIGGER %s AFTER %s ON %s BEGIN %s END", name, strings.ToUpper(op), quote(t.Name), body)
	}
	return out
}
