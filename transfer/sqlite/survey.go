// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Survey implements transfer.Source and transfer.Sink.
func (s *Store) Survey(ctx context.Context, tenant cells.TenantID) (transfer.Survey, error) {
	out := transfer.Survey{Engine: "sqlite"}
	err := s.reading(ctx, func(tx *sql.Tx) error {
		if err := tx.QueryRowContext(ctx, "SELECT sqlite_version()").Scan(&out.Version); err != nil {
			return err
		}
		for _, t := range s.tables {
			u, err := load(ctx, tx, t)
			if errors.Is(err, cells.ErrNotFound) {
				out.Findings = append(out.Findings, cells.Finding{Code: transfer.FindTableMissing, Table: t.Name, Blocking: true,
					Message: "the table is listed and does not exist", Fix: "run the service's migrations, or take it off the list"})
				continue
			}
			if err != nil {
				return err
			}
			info, findings, err := u.survey(ctx, tx, tenant)
			if err != nil {
				return err
			}
			out.Tables = append(out.Tables, info)
			out.Findings = append(out.Findings, findings...)
		}
		if err := s.unlisted(ctx, tx, &out); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, "SELECT move FROM cell_transfer_capture WHERE tenant = ?1 UNION SELECT move FROM cell_transfer_import WHERE tenant = ?1", tenant)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var m cells.MoveID
			if err := rows.Scan(&m); err != nil {
				return err
			}
			out.Moves = append(out.Moves, m)
		}
		return rows.Err()
	})
	if err != nil {
		return out, err
	}
	shape := make([]any, 0, 2*len(out.Tables))
	for _, t := range out.Tables {
		shape = append(shape, t.Table, t.Columns, t.Key)
	}
	text, err := json.Marshal(shape)
	if err != nil {
		return out, err
	}
	sum := sha256.Sum256(text)
	out.Fingerprint = hex.EncodeToString(sum[:])
	return out, nil
}

func (t *table) survey(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) (transfer.TableInfo, []cells.Finding, error) {
	info := transfer.TableInfo{Table: t.Table, Key: t.key}
	for _, c := range t.cols {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ})
	}
	for _, c := range t.gen {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ, Generated: true})
	}
	var out []cells.Finding
	find := func(blocking bool, code, message, fix string) {
		out = append(out, cells.Finding{Code: code, Table: t.Name, Message: message, Fix: fix, Blocking: blocking})
	}
	has := false
	nullable := false
	for _, c := range t.cols {
		has = has || c.name == t.TenantColumn
		for _, k := range t.key {
			nullable = nullable || k == c.name && !c.notNull
		}
	}
	switch {
	case !has:
		find(true, transfer.FindTenantNotInKey, "there is no column "+t.TenantColumn, "add it, as text, and make it part of the primary key")
		return info, out, nil
	case len(t.key) == 0:
		find(true, transfer.FindNoKey, "the table has no primary key", "declare one that begins with "+t.TenantColumn)
	case len(t.keys) == len(t.key):
		find(true, transfer.FindTenantNotInKey, fmt.Sprintf("the primary key (%s) lacks %s: keys of two tenants may collide in the other cell", strings.Join(t.key, ", "), t.TenantColumn),
			"make the primary key begin with "+t.TenantColumn)
	case len(t.keys) > maxKeys:
		find(true, transfer.FindNoKey, fmt.Sprintf("the primary key has %d columns", len(t.key)), fmt.Sprintf("use at most %d", maxKeys+1))
	}
	where := fmt.Sprintf(" FROM %s WHERE %s = ?", quote(t.Name), quote(t.TenantColumn))
	if err := tx.QueryRowContext(ctx, "SELECT count(*)"+where, tenant).Scan(&info.Rows); err != nil {
		return info, nil, err
	}
	var sizes []string
	for _, c := range t.cols {
		sizes = append(sizes, "coalesce(length(CAST("+quote(c.name)+" AS BLOB)), 0) + 2")
	}
	var mean float64
	if err := tx.QueryRowContext(ctx, "SELECT coalesce(avg(n), 0) FROM (SELECT "+strings.Join(sizes, " + ")+" AS n"+where+" LIMIT 200)", tenant).Scan(&mean); err != nil {
		return info, nil, err
	}
	info.Bytes = int64(mean * float64(info.Rows))
	if nullable && len(t.keys) > 0 {
		var conds []string
		for _, k := range t.keys {
			conds = append(conds, quote(k)+" IS NULL")
		}
		var bad bool
		if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1"+where+" AND ("+strings.Join(conds, " OR ")+"))", tenant).Scan(&bad); err != nil {
			return info, nil, err
		}
		if bad {
			find(true, transfer.FindNullKey, "rows have NULL in the primary key", "give them a key and declare the columns NOT NULL")
		}
	}
	names, err := texts(ctx, tx, "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ? AND name NOT LIKE 'cell\\_%' ESCAPE '\\'", t.Name)
	if err != nil {
		return info, nil, err
	}
	for _, n := range names {
		find(true, transfer.FindTrigger, "trigger "+n+" would run on every imported row", "drop it for the time of the move, or move its work into the service")
	}
	var create string
	if err := tx.QueryRowContext(ctx, "SELECT coalesce(max(sql), '') FROM sqlite_master WHERE type = 'table' AND name = ?", t.Name).Scan(&create); err != nil {
		return info, nil, err
	}
	if strings.Contains(strings.ToUpper(create), "AUTOINCREMENT") {
		find(false, transfer.FindSequence, "values of an AUTOINCREMENT column travel, the counter of the target is only raised by them", "make sure that the two cells cannot give out one value twice for a tenant")
	}
	refs, err := texts(ctx, tx, `SELECT DISTINCT "table" FROM pragma_foreign_key_list(?1) AS f WHERE NOT EXISTS (
		SELECT 1 FROM pragma_foreign_key_list(?1) AS g WHERE g.id = f.id AND g."from" = ?2)`, t.Name, t.TenantColumn)
	if err != nil {
		return info, nil, err
	}
	for _, r := range refs {
		find(false, transfer.FindForeignTenant, "a foreign key to "+r+" does not carry "+t.TenantColumn+": the row it refers to may stay behind",
			"put "+t.TenantColumn+" into the foreign key, or keep the same rows of "+r+" in every cell")
	}
	indexes, err := texts(ctx, tx, `SELECT l.name FROM pragma_index_list(?1) AS l WHERE l."unique" = 1 AND NOT EXISTS (SELECT 1 FROM pragma_index_info(l.name) AS i WHERE i.name = ?2)`, t.Name, t.TenantColumn)
	if err != nil {
		return info, nil, err
	}
	for _, n := range indexes {
		find(false, transfer.FindUnique, "unique index "+n+" does not carry "+t.TenantColumn+": a value may be taken by another tenant of the target", "put "+t.TenantColumn+" into the index")
	}
	return info, out, nil
}

// unlisted warns of tables that look like a tenant's and are not listed.
func (s *Store) unlisted(ctx context.Context, tx *sql.Tx, out *transfer.Survey) error {
	listed := map[string]bool{}
	columns := map[string]bool{}
	for _, t := range s.tables {
		listed[t.Name] = true
	}
	for _, t := range s.cfg.Tables {
		columns[t.TenantColumn] = true
	}
	for col := range columns {
		names, err := texts(ctx, tx, `SELECT m.name FROM sqlite_master AS m WHERE m.type = 'table' AND m.name NOT LIKE 'cell\_%' ESCAPE '\' AND m.name NOT LIKE 'sqlite\_%' ESCAPE '\'
			AND EXISTS (SELECT 1 FROM pragma_table_info(m.name) AS i WHERE i.name = ?) ORDER BY 1`, col)
		if err != nil {
			return err
		}
		for _, n := range names {
			if !listed[n] {
				out.Findings = append(out.Findings, cells.Finding{Code: transfer.FindUnlisted, Table: n,
					Message: "the table has a column " + col + " and is not listed: its rows stay behind", Fix: "list it, if its rows belong to tenants"})
			}
		}
	}
	return nil
}

func texts(ctx context.Context, tx *sql.Tx, q string, args ...any) ([]string, error) {
	rows, err := tx.QueryContext(ctx, q, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, rows.Err()
}
