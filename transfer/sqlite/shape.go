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

// A table is told from one of the same name that was made after it by its number in
// sqlite_master: a new entry gets a number above all that are there, so the number of
// a dropped table comes back only if nothing that is younger has stayed. markView is
// something younger that stays. VACUUM numbers anew and so looks like a change.
const markView = "cell_transfer_mark"

// pin makes markView younger than the listed tables.
func (s *Store) pin(ctx context.Context, tx *sql.Tx) error {
	var mark, youngest int64
	if err := tx.QueryRowContext(ctx, "SELECT coalesce(max(rowid), 0) FROM sqlite_master WHERE name = ?", markView).Scan(&mark); err != nil {
		return err
	}
	for _, t := range s.tables {
		var n int64
		if err := tx.QueryRowContext(ctx, "SELECT coalesce(max(rowid), 0) FROM sqlite_master WHERE type = 'table' AND name = ?", t.Name).Scan(&n); err != nil {
			return err
		}
		youngest = max(youngest, n)
	}
	if mark > youngest {
		return nil
	}
	if _, err := tx.ExecContext(ctx, "DROP VIEW IF EXISTS "+markView); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, "CREATE VIEW "+markView+" AS SELECT 1 AS one")
	return err
}

// shape reads the shape of the listed tables. At a source the capture's own triggers
// are part of it: without them changes are lost.
func (s *Store) shape(ctx context.Context, q querier, source bool) (transfer.Shape, error) {
	out := transfer.Shape{}
	for _, t := range s.tables {
		rows, err := q.QueryContext(ctx, `SELECT rowid, type, name, coalesce(sql, '') FROM sqlite_master
			WHERE tbl_name = ?1 COLLATE NOCASE AND (type = 'table' OR type = 'trigger') ORDER BY rowid`, t.Name)
		if err != nil {
			return nil, err
		}
		sum := sha256.New()
		found := false
		for rows.Next() {
			var id int64
			var kind, name, text string
			if err := rows.Scan(&id, &kind, &name, &text); err != nil {
				rows.Close()
				return nil, err
			}
			capture := strings.HasPrefix(name, "cell_transfer_")
			if kind == "trigger" && strings.HasPrefix(name, "cell_") && !(capture && source) {
				continue
			}
			found = found || kind == "table"
			fmt.Fprintf(sum, "%d %s %s %d %s\n", id, kind, name, len(text), text)
		}
		rows.Close()
		if err := rows.Err(); err != nil {
			return nil, err
		}
		if found {
			out[t.Name] = hex.EncodeToString(sum.Sum(nil)[:12])
		}
	}
	others, err := s.likely(ctx, q)
	for _, name := range others {
		out[name] = "not listed"
	}
	return out, err
}

// likely are the tables that are not listed and look like a tenant's: by a tenant
// column, or by a foreign key to a listed table.
func (s *Store) likely(ctx context.Context, q querier) ([]string, error) {
	names := func(list []string) (string, error) { b, err := json.Marshal(list); return string(b), err }
	var listed, columns []string
	for _, t := range s.tables {
		listed, columns = append(listed, t.Name), append(columns, t.TenantColumn)
	}
	tables, err := names(listed)
	if err != nil {
		return nil, err
	}
	cols, err := names(columns)
	if err != nil {
		return nil, err
	}
	stay, err := names(append(listed, s.cfg.Stay...))
	if err != nil {
		return nil, err
	}
	rows, err := q.QueryContext(ctx, `SELECT name FROM sqlite_master AS m WHERE type = 'table' AND name NOT LIKE 'cell\_%' ESCAPE '\' AND name NOT LIKE 'sqlite\_%' ESCAPE '\'
		AND NOT EXISTS (SELECT 1 FROM json_each(?3) AS l WHERE l.value = m.name COLLATE NOCASE)
		AND (EXISTS (SELECT 1 FROM pragma_table_info(m.name) AS c JOIN json_each(?2) AS l ON l.value = c.name COLLATE NOCASE)
			OR EXISTS (SELECT 1 FROM pragma_foreign_key_list(m.name) AS k JOIN json_each(?1) AS l ON l.value = k."table" COLLATE NOCASE))`, tables, cols, stay)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		out = append(out, name)
	}
	return out, rows.Err()
}

// captured fails unless the move's changes are being logged and the tables are what
// they were when that began.
func (s *Store) captured(ctx context.Context, tx *sql.Tx, m cells.MoveRef) error {
	var text, ended string
	err := tx.QueryRowContext(ctx, "SELECT shape, ended FROM cell_transfer_capture WHERE move = ? AND released = 0", m.ID).Scan(&text, &ended)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("%w: transfer/sqlite: changes of move %s are not captured here", cells.ErrNotApplicable, m.ID)
	}
	if err != nil {
		return err
	}
	if ended != "" {
		return fmt.Errorf("%w: %s", transfer.ErrRetention, ended)
	}
	return s.unchanged(ctx, tx, text, m)
}

// unchanged compares with a recorded shape; one of an older build is "".
func (s *Store) unchanged(ctx context.Context, tx *sql.Tx, text string, m cells.MoveRef) error {
	if text == "" {
		return nil
	}
	var then transfer.Shape
	if err := json.Unmarshal([]byte(text), &then); err != nil {
		return fmt.Errorf("transfer/sqlite: recorded shape: %w", err)
	}
	now, err := s.shape(ctx, tx, true)
	if err != nil {
		return err
	}
	return then.Same(now, m.Source)
}

// begin records the shape of the tables when an import begins, and compares with it
// when the import is taken up again.
func (i *imp) begin(ctx context.Context, tx *sql.Tx) error {
	if i.state.Shape != nil {
		return i.held(ctx, tx)
	}
	err := i.s.pin(ctx, tx)
	if err == nil {
		i.state.Shape, err = i.s.shape(ctx, tx, false)
	}
	if err != nil {
		return err
	}
	text, err := json.Marshal(i.state.Shape)
	if err == nil {
		_, err = tx.ExecContext(ctx, "UPDATE cell_transfer_import SET state = json_set(state, '$.shape', json(?)) WHERE move = ?", string(text), i.m.ID)
	}
	return err
}

// held fails unless the target's tables are what they were when the import was begun.
func (i *imp) held(ctx context.Context, q querier) error {
	now, err := i.s.shape(ctx, q, false)
	if err != nil {
		return err
	}
	return i.state.Shape.Same(now, i.m.Target)
}

// explain says that the schema has changed if that is why an import failed.
func (i *imp) explain(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, cells.ErrStaleOrder) || errors.Is(err, cells.ErrUnavailable) || errors.Is(err, transfer.ErrOvertaken) || errors.Is(err, transfer.ErrSchemaChanged) {
		return err
	}
	if serr := i.held(context.WithoutCancel(ctx), i.s.read); errors.Is(serr, transfer.ErrSchemaChanged) {
		return fmt.Errorf("%w: %w", serr, err)
	}
	return err
}
