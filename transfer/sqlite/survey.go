// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/disk"
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
		if err := s.around(ctx, tx, tenant, &out); err != nil {
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
	if free, total, err := disk.Space(filepath.Dir(s.cfg.Path)); err == nil {
		out.Disk = &transfer.Disk{Free: free, Total: total}
	}
	return out, out.Seal()
}

func (t *table) survey(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) (transfer.TableInfo, []cells.Finding, error) {
	info := transfer.TableInfo{Table: t.Table, Key: t.key}
	for _, c := range t.cols {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ})
	}
	var out []cells.Finding
	say := func(f cells.Finding) {
		f.Table = t.Name
		out = append(out, f)
	}
	find := func(blocking bool, code, message, fix string) {
		say(cells.Finding{Code: code, Message: message, Fix: fix, Blocking: blocking})
	}
	for _, c := range t.gen {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ, Generated: true})
		say(cells.Finding{Code: transfer.FindGenerated, Note: true, Message: "generated column " + c.name + " does not travel: the target computes it", Fix: "none needed if both cells compute it alike"})
	}
	if err := t.kind(ctx, tx, &info, say); err != nil {
		return info, nil, err
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
		say(cells.Finding{Code: transfer.FindSequence, Note: true, Message: "values of an AUTOINCREMENT column travel, and raise the counter of the target if they are higher",
			Fix: "none needed, unless values must be unique in all cells"})
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
