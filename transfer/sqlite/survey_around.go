// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// kind judges what sort of table it is, and lists what it asks of its rows.
func (t *table) kind(ctx context.Context, tx *sql.Tx, info *transfer.TableInfo, say func(cells.Finding)) error {
	var kind string
	var without, strict bool
	if err := tx.QueryRowContext(ctx, "SELECT type, wr, strict FROM pragma_table_list WHERE schema = 'main' AND name = ? COLLATE NOCASE", t.Name).Scan(&kind, &without, &strict); err != nil {
		return err
	}
	if kind != "table" {
		say(cells.Finding{Code: transfer.FindVirtual, Blocking: true, Message: "it is a " + kind + " table: nothing sees its changes", Fix: "take it off the list, and let the service make it anew from tables that are listed"})
	}
	if without {
		info.Rules = append(info.Rules, "WITHOUT ROWID")
	}
	if strict {
		info.Rules = append(info.Rules, "STRICT")
	}
	if err := t.tenantType(ctx, tx, say); err != nil {
		return err
	}
	rules, err := t.asks(ctx, tx)
	info.Rules = append(info.Rules, rules...)
	slices.Sort(info.Rules)
	info.Rules = slices.Compact(info.Rules)
	return err
}

// asks lists indexes, foreign keys and columns that may not be NULL. CHECK constraints
// and collations are only in the table's text; see checks.
func (t *table) asks(ctx context.Context, tx *sql.Tx) ([]string, error) {
	out, err := texts(ctx, tx, `SELECT iif(l."unique", 'UNIQUE ', '') || 'INDEX (' || (SELECT group_concat(coalesce(i.name, 'an expression') || ' COLLATE ' || i.coll || iif(i."desc", ' DESC', ''), ', ' ORDER BY i.seqno)
		FROM pragma_index_xinfo(l.name) AS i WHERE i.key) || ')' || iif(l.partial, ' WHERE ' || substr(m.sql, instr(upper(m.sql), ' WHERE ') + 7), '')
		FROM pragma_index_list(?1) AS l LEFT JOIN sqlite_master AS m ON m.type = 'index' AND m.name = l.name WHERE l.origin <> 'pk'
		UNION ALL SELECT 'FOREIGN KEY (' || group_concat(f."from", ', ' ORDER BY f.seq) || ') REFERENCES ' || f."table" || ' (' || group_concat(coalesce(f."to", ''), ', ' ORDER BY f.seq) || ') ON DELETE ' || f.on_delete || ' ON UPDATE ' || f.on_update
		FROM pragma_foreign_key_list(?1) AS f GROUP BY f.id, f."table", f.on_delete, f.on_update
		UNION ALL SELECT name || ' NOT NULL' FROM pragma_table_xinfo(?1) WHERE "notnull"`, t.Name)
	if err != nil {
		return nil, err
	}
	text, err := t.text(ctx, tx)
	return append(out, checks(text)...), err
}

// text is the statement that the table was made with.
func (t *table) text(ctx context.Context, q querier) (text string, err error) {
	err = q.QueryRowContext(ctx, "SELECT coalesce(max(sql), '') FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE", t.Name).Scan(&text)
	return text, err
}

var spaces = regexp.MustCompile(`\s+`)

// checks finds the CHECK constraints in a table's text.
func checks(text string) (out []string) {
	for rest := text; ; {
		at := strings.Index(strings.ToUpper(rest), "CHECK")
		if at < 0 {
			return out
		}
		rest = rest[at+len("CHECK"):]
		body := strings.TrimLeft(rest, " \t\r\n")
		if !strings.HasPrefix(body, "(") {
			continue
		}
		if n := closing(body); n > 0 {
			out = append(out, "CHECK "+spaces.ReplaceAllString(body[:n], " "))
			rest = body[n:]
		}
	}
}

// closing is the length of what is in brackets at the beginning of s; 0 if they are
// not closed. Brackets in quotes do not count.
func closing(s string) int {
	depth, quoted := 0, byte(0)
	for i := range len(s) {
		switch c := s[i]; {
		case quoted != 0:
			if c == quoted {
				quoted = 0
			}
		case c == '\'' || c == '"' || c == '`':
			quoted = c
		case c == '(':
			depth++
		case c == ')':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return 0
}

// tenantType judges the column that says whose a row is: an affinity that turns text
// into numbers, or a collation that takes different ids for equal, mixes tenants up.
func (t *table) tenantType(ctx context.Context, tx *sql.Tx, say func(cells.Finding)) error {
	at := slices.IndexFunc(t.cols, func(c column) bool { return c.name == t.TenantColumn })
	if at < 0 {
		return nil
	}
	typ := t.cols[at].typ
	if !isText(typ) && typ != "" && typ != "BLOB" {
		say(cells.Finding{Code: transfer.FindTenantType, Blocking: true, Message: fmt.Sprintf("column %s is %s: SQLite makes a number of a tenant's id that looks like one", t.TenantColumn, typ), Fix: "declare it TEXT"})
	}
	// The index of the primary key has the column's collation, unless it says otherwise.
	coll, err := texts(ctx, tx, `SELECT DISTINCT i.coll FROM pragma_index_list(?1) AS l, pragma_index_xinfo(l.name) AS i WHERE l.origin = 'pk' AND i.name = ?2 AND i.coll <> 'BINARY'`, t.Name, t.TenantColumn)
	if err != nil {
		return err
	}
	for _, c := range coll {
		say(cells.Finding{Code: transfer.FindTenantType, Blocking: true, Message: fmt.Sprintf("column %s has collation %s: ids of two tenants that differ may be equal there", t.TenantColumn, c), Fix: "declare it without a collation"})
	}
	return nil
}

// isText reports whether SQLite gives a column of that type text affinity.
func isText(typ string) bool {
	typ = strings.ToUpper(typ)
	return !strings.Contains(typ, "INT") && (strings.Contains(typ, "CHAR") || strings.Contains(typ, "CLOB") || strings.Contains(typ, "TEXT"))
}

// foreignKey is one of any table.
type foreignKey struct {
	from, to   string
	cols, refs []string
}

// on joins the two tables of the key, under the names c and p.
func (k foreignKey) on() string {
	out := make([]string, len(k.cols))
	for i := range k.cols {
		out[i] = "c." + quote(k.cols[i]) + " = p." + quote(k.refs[i])
	}
	return strings.Join(out, " AND ")
}

// others are the tables that are not listed and not the platform's.
func (s *Store) others(ctx context.Context, tx *sql.Tx) ([]string, error) {
	names, err := texts(ctx, tx, `SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'cell\_%' ESCAPE '\' AND name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY 1`)
	return slices.DeleteFunc(names, func(n string) bool { return s.listed(n) != nil }), err
}

// listed finds a listed table by its name, as SQLite compares names.
func (s *Store) listed(name string) *guard.Table {
	for i, t := range s.tables {
		if strings.EqualFold(t.Name, name) {
			return &s.tables[i]
		}
	}
	return nil
}

func foreignKeys(ctx context.Context, tx *sql.Tx, from string) (out []foreignKey, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT f.id, f."table", f."from", coalesce(f."to", (SELECT i.name FROM pragma_table_info(f."table") AS i WHERE i.pk = f.seq + 1), '')
		FROM pragma_foreign_key_list(?) AS f ORDER BY f.id, f.seq`, from)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	last := -1
	for rows.Next() {
		var id int
		var to, col, ref string
		if err := rows.Scan(&id, &to, &col, &ref); err != nil {
			return nil, err
		}
		if id != last {
			out, last = append(out, foreignKey{from: from, to: to}), id
		}
		k := &out[len(out)-1]
		k.cols, k.refs = append(k.cols, col), append(k.refs, ref)
	}
	return out, rows.Err()
}

// around judges what is beside the listed tables: foreign keys in and out, and tables
// that look like a tenant's.
func (s *Store) around(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, out *transfer.Survey) error {
	say := func(f cells.Finding) { out.Findings = append(out.Findings, f) }
	for _, t := range s.tables {
		keys, err := foreignKeys(ctx, tx, t.Name)
		if err != nil {
			return err
		}
		for _, k := range keys {
			if err := s.reference(ctx, tx, tenant, t, k, say); err != nil {
				return err
			}
		}
	}
	others, err := s.others(ctx, tx)
	if err != nil {
		return err
	}
	for _, name := range others {
		keys, err := foreignKeys(ctx, tx, name)
		if err != nil {
			return err
		}
		for _, k := range keys {
			p := s.listed(k.to)
			if p == nil {
				continue
			}
			holds, err := exists(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT 1 FROM %s AS c JOIN %s AS p ON %s WHERE p.%s = ?)", quote(name), quote(p.Name), k.on(), quote(p.TenantColumn)), tenant)
			if err != nil {
				return err
			}
			f := cells.Finding{Code: transfer.FindChild, Table: name, Blocking: holds, Message: "the table is not listed and refers to " + p.Name + ": rows that come would stay behind",
				Fix: "give it the column " + p.TenantColumn + " and a primary key that begins with it, and list it"}
			if holds {
				f.Message = "the table is not listed and has rows that refer to the tenant's rows in " + p.Name + ": they would be lost or stand in the way of the removal"
			}
			say(f)
		}
		if err := s.unlisted(ctx, tx, tenant, name, say); err != nil {
			return err
		}
	}
	return nil
}

// reference judges a foreign key of a listed table.
func (s *Store) reference(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, t guard.Table, k foreignKey, say func(cells.Finding)) error {
	p := s.listed(k.to)
	if p == nil {
		say(cells.Finding{Code: transfer.FindForeignTenant, Table: t.Name, Message: "a foreign key leads out of the tenant's own rows, to " + k.to + ", which is not listed: the row it refers to may be missing at the target",
			Fix: "keep the same rows of " + k.to + " in every cell, or list it with a tenant column"})
		return nil
	}
	for i, c := range k.cols {
		if c == t.TenantColumn && k.refs[i] == p.TenantColumn {
			return nil
		}
	}
	crosses, err := exists(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT 1 FROM %s AS c JOIN %s AS p ON %s WHERE c.%s = ?1 AND p.%s IS NOT ?1)",
		quote(t.Name), quote(p.Name), k.on(), quote(t.TenantColumn), quote(p.TenantColumn)), tenant)
	if err != nil {
		return err
	}
	f := cells.Finding{Code: transfer.FindForeignTenant, Table: t.Name, Message: "a foreign key to " + p.Name + " does not carry " + t.TenantColumn + ": a row may refer to another tenant's, which would be missing at the target",
		Fix: "put " + t.TenantColumn + " into the foreign key"}
	if crosses {
		f = cells.Finding{Code: transfer.FindCrossing, Table: t.Name, Blocking: true, Message: "rows of the tenant refer to rows of other tenants in " + p.Name + ", which stay behind", Fix: "give the tenant rows of its own to refer to; then " + f.Fix}
	}
	say(f)
	return nil
}

// unlisted judges a table that is not listed by its columns.
func (s *Store) unlisted(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, name string, say func(cells.Finding)) error {
	if slices.ContainsFunc(s.cfg.Stay, func(n string) bool { return strings.EqualFold(n, name) }) {
		return nil
	}
	seen := map[string]bool{}
	for _, t := range s.cfg.Tables {
		if seen[t.TenantColumn] {
			continue
		}
		seen[t.TenantColumn] = true
		types, err := texts(ctx, tx, "SELECT upper(type) FROM pragma_table_info(?) WHERE name = ? COLLATE NOCASE", name, t.TenantColumn)
		if err != nil {
			return err
		}
		for _, typ := range types {
			if !isText(typ) && typ != "" && typ != "BLOB" {
				say(cells.Finding{Code: transfer.FindTenantType, Table: name, Message: "the table is not listed and has a column " + t.TenantColumn + " of type " + typ + ": whether its rows are a tenant's cannot be told",
					Fix: "list the table with a column of text, or rename the column, or say that its rows stay"})
				continue
			}
			holds, err := exists(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT 1 FROM %s WHERE %s = ?)", quote(name), quote(t.TenantColumn)), tenant)
			if err != nil {
				return err
			}
			f := cells.Finding{Code: transfer.FindUnlisted, Table: name, Blocking: holds, Message: "the table has a column " + t.TenantColumn + " and is not listed: rows of the tenant would stay behind",
				Fix: "list it; or, if its rows are meant to stay behind, say so in the agent's configuration"}
			if holds {
				f.Message = "the table is not listed and holds rows of the tenant, by its column " + t.TenantColumn + ": they would stay behind"
			}
			say(f)
		}
	}
	return nil
}

func exists(ctx context.Context, tx *sql.Tx, q string, args ...any) (yes bool, err error) {
	err = tx.QueryRowContext(ctx, q, args...).Scan(&yes)
	return yes, err
}
