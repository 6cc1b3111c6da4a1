// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

const moveColumns = `seq, driver, version, doc`

func scanMove(row interface{ Scan(...any) error }) (api.Move, error) {
	var m api.Move
	var seq, version int64
	var driver, doc string
	if err := row.Scan(&seq, &driver, &version, &doc); err != nil {
		return m, err
	}
	if err := json.Unmarshal([]byte(doc), &m); err != nil {
		return m, fmt.Errorf("%w: move record %d: %w", cells.ErrInvalid, seq, err)
	}
	m.Seq, m.Driver, m.Version = seq, driver, version
	return m, nil
}

func unfinished(m *api.Move) bool { return !m.State.Final() || m.Removable() }

// CreateMove implements [directory.Store].
func (s *Store) CreateMove(ctx context.Context, m api.Move, audit api.AuditEntry) (rec api.Move, created bool, err error) {
	op := directory.Operation{ID: m.OperationID, Kind: directory.OperationMove, Tenant: m.Tenant, Cell: m.To}
	if m.Undoes != "" {
		op.Cell = ""
	}
	err = s.tx(ctx, "create move", func(tx *Tx) error {
		if op.ID != "" {
			first, err := firstMove(ctx, tx, op)
			if err != nil {
				return err
			}
			if first != nil {
				rec = *first
				return nil
			}
		}
		rec, err = scanMove(tx.QueryRowContext(ctx, `SELECT `+moveColumns+` FROM moves WHERE tenant = ? AND active = 1`, m.Tenant))
		if err == nil {
			return fmt.Errorf("%w: %s to cell %s, %s", directory.ErrMoveActive, rec.ID, rec.To, rec.State)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		if m.Campaign != "" {
			if err := itemNames(ctx, tx, &m); err != nil {
				return err
			}
		}
		if _, err := chooseCell(ctx, tx, m.To, m.Tenant, nil); err != nil && !directory.Waived(&m, err) {
			return err
		}
		m.State, m.Version = api.MovePreparing, 1
		doc, err := json.Marshal(m)
		if err != nil {
			return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		err = tx.QueryRowContext(ctx, `INSERT INTO moves (id, tenant, to_cell, state, active, unfinished, driver, version, doc)
			VALUES (?, ?, ?, ?, 1, 1, ?, 1, ?) RETURNING seq`, m.ID, m.Tenant, m.To, m.State, m.Driver, string(doc)).Scan(&m.Seq)
		if err != nil {
			return err
		}
		if op.ID != "" {
			id := string(m.ID)
			if err := putOperation(ctx, tx, op, &id, m.CreatedAt); err != nil {
				return err
			}
		}
		rec, created = m, true
		return insertAudit(ctx, tx, audit)
	})
	return rec, created, err
}

// itemNames checks that a campaign still wants the move.
func itemNames(ctx context.Context, tx *Tx, m *api.Move) error {
	it, err := scanItem(tx.QueryRowContext(ctx, `SELECT doc, state FROM campaign_items WHERE campaign = ? AND pos = ?`, m.Campaign, m.Item))
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if err != nil || it.State != api.ItemRunning || it.Move != m.ID || it.Tenant != m.Tenant {
		return fmt.Errorf("%w: item %d of campaign %s does not wait for move %s", cells.ErrConflict, m.Item, m.Campaign, m.ID)
	}
	return nil
}

// firstMove returns the move that the operation made, or nil.
func firstMove(ctx context.Context, tx *Tx, op directory.Operation) (*api.Move, error) {
	var kind string
	var tenant cells.TenantID
	var cell cells.CellID
	var id sql.NullString
	err := tx.QueryRowContext(ctx, `SELECT kind, tenant, cell, answer FROM operations WHERE id = ?`, op.ID).Scan(&kind, &tenant, &cell, &id)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := sameOperation(op, kind, tenant, cell); err != nil {
		return nil, err
	}
	m, err := scanMove(tx.QueryRowContext(ctx, `SELECT `+moveColumns+` FROM moves WHERE id = ?`, id.String))
	if err != nil {
		return nil, err
	}
	return &m, nil
}

// Move implements [directory.Store].
func (s *Store) Move(ctx context.Context, id cells.MoveID) (api.Move, error) {
	m, err := scanMove(s.read.QueryRowContext(ctx, `SELECT `+moveColumns+` FROM moves WHERE id = ?`, id))
	return m, s.translate("move", err)
}

// Moves implements [directory.Store].
func (s *Store) Moves(ctx context.Context, f directory.MoveFilter) ([]api.Move, error) {
	var where []string
	var args []any
	add := func(cond string, arg ...any) {
		where = append(where, cond)
		args = append(args, arg...)
	}
	if f.Tenant != "" {
		add(`tenant = ?`, f.Tenant)
	}
	if f.State != "" {
		add(`state = ?`, f.State)
	}
	if f.Unfinished {
		add(`unfinished = 1`)
	}
	if f.After > 0 {
		add(`seq < ?`, f.After)
	}
	query := `SELECT ` + moveColumns + ` FROM moves`
	if len(where) > 0 {
		query += ` WHERE ` + strings.Join(where, ` AND `)
	}
	query += ` ORDER BY seq DESC LIMIT ?`
	rows, err := s.read.QueryContext(ctx, query, append(args, pageLimit(f.Limit))...)
	if err != nil {
		return nil, s.translate("moves", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.Move
	for rows.Next() {
		m, err := scanMove(rows)
		if err != nil {
			return nil, s.translate("moves", err)
		}
		out = append(out, m)
	}
	return out, s.translate("moves", rows.Err())
}

// UpdateMove implements [directory.Store].
func (s *Store) UpdateMove(ctx context.Context, id cells.MoveID, fn func(*api.Move) error, audit *api.AuditEntry) (api.Move, error) {
	var out api.Move
	err := s.tx(ctx, "update move", func(tx *Tx) error {
		old, err := scanMove(tx.QueryRowContext(ctx, `SELECT `+moveColumns+` FROM moves WHERE id = ?`, id))
		if err != nil {
			return err
		}
		m := old
		if err := fn(&m); err != nil {
			return err
		}
		m.ID, m.Tenant, m.From, m.To, m.Seq, m.Driver = old.ID, old.Tenant, old.From, old.To, old.Seq, old.Driver
		m.Version = old.Version + 1
		doc, err := json.Marshal(m)
		if err != nil {
			return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		_, err = tx.ExecContext(ctx, `UPDATE moves SET state = ?, active = ?, unfinished = ?, version = ?, doc = ? WHERE id = ?`,
			m.State, m.State.Active(), unfinished(&m), m.Version, string(doc), id)
		if err != nil {
			return err
		}
		out = m
		if audit == nil {
			return nil
		}
		return insertAudit(ctx, tx, *audit)
	})
	return out, err
}

// MoveBeats implements [directory.Store].
func (s *Store) MoveBeats(ctx context.Context) ([]directory.MoveBeat, error) {
	return drivenBeats[cells.MoveID](ctx, s, drivenMoves, "move beats")
}

// Beat implements [directory.Store].
func (s *Store) Beat(ctx context.Context, driver string) error {
	return s.beat(ctx, drivenMoves, "beat", driver)
}

// TakeMove implements [directory.Store].
func (s *Store) TakeMove(ctx context.Context, seen directory.MoveBeat, driver string) (bool, error) {
	return take(ctx, s, drivenMoves, "take move", seen, driver)
}
