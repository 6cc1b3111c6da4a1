// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

const gone = "GONE"

const ledgerColumns = `tenant, cell, state, operation, actor, revision, created_at`

func scanLedger(row interface{ Scan(...any) error }) (directory.LedgerRow, error) {
	var r directory.LedgerRow
	var at int64
	err := row.Scan(&r.Tenant, &r.Cell, &r.State, &r.OperationID, &r.Actor, &r.Revision, &at)
	r.CreatedAt = fromMicros(at)
	return r, err
}

// Reserve implements [directory.Store].
func (s *Store) Reserve(ctx context.Context, r directory.Reservation, audit api.AuditEntry) (row directory.LedgerRow, joined bool, err error) {
	err = s.tx(ctx, "reserve", func(tx *Tx) error {
		if err := putOperation(ctx, tx, r.Operation, nil, r.At); err != nil {
			return err
		}
		old, err := scanLedger(tx.QueryRowContext(ctx, `SELECT `+ledgerColumns+` FROM placements WHERE tenant = ?`, r.Tenant))
		switch {
		case errors.Is(err, sql.ErrNoRows):
		case err != nil:
			return err
		case old.State == gone:
			if old.Revision > r.Seen {
				return fmt.Errorf("%w: tenant %s was deleted at revision %d, the claim has seen %d",
					cells.ErrConflict, r.Tenant, old.Revision, r.Seen)
			}
		case old.Revision >= r.Seen:
			row, joined = old, true
			return nil
		}
		cell, err := chooseCell(ctx, tx, r.Cell, r.Tenant, r.Live)
		if err != nil {
			return err
		}
		row = directory.LedgerRow{Tenant: r.Tenant, Cell: cell, State: directory.PlacementReserved,
			OperationID: r.Operation.ID, Actor: r.Actor, Revision: r.Seen, CreatedAt: r.At}
		_, err = tx.ExecContext(ctx, `INSERT INTO placements (`+ledgerColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (tenant) DO UPDATE SET cell = excluded.cell, state = excluded.state, operation = excluded.operation,
				actor = excluded.actor, revision = excluded.revision, created_at = excluded.created_at`,
			row.Tenant, row.Cell, row.State, row.OperationID, row.Actor, row.Revision, micros(row.CreatedAt))
		if err != nil {
			return err
		}
		audit.Cell = cell
		return insertAudit(ctx, tx, audit)
	})
	return row, joined, err
}

// chooseCell returns the cell asked for, or the one with the fewest tenants among
// those that take the tenant.
func chooseCell(ctx context.Context, tx *Tx, want cells.CellID, tenant cells.TenantID, live []cells.CellID) (cells.CellID, error) {
	rooms, err := roomsIn(ctx, tx.conn, want, tenant)
	if err != nil {
		return "", err
	}
	why, barred := fmt.Errorf("%w: no cell is open", directory.ErrCellClosed), 0
	for i := range rooms {
		r := &rooms[i]
		if why = r.Refuse(); why != nil {
			if errors.Is(why, cells.ErrJurisdiction) {
				barred++
			}
			continue
		}
		if want != "" || live == nil || slices.Contains(live, r.Cell.Cell) {
			return r.Cell.Cell, nil
		}
		why = fmt.Errorf("%w: no process of cell %s serves", directory.ErrCellClosed, r.Cell.Cell)
	}
	switch {
	case len(rooms) == 0 && want != "":
		return "", fmt.Errorf("%w: cell %s", directory.ErrNoCell, want)
	case len(rooms) == 0:
		return "", directory.ErrNoCell
	case barred == len(rooms) && barred > 1:
		return "", fmt.Errorf("%w: no cell is in jurisdiction %s", cells.ErrJurisdiction, rooms[0].Tenant.Jurisdiction)
	case len(rooms) > 1:
		why = fmt.Errorf("%w: each cell is closed, full, outside of the tenant's jurisdiction or without a process that serves", directory.ErrCellClosed)
	}
	return "", why
}

// roomsIn returns what is known of the cell, or of all of them beginning with the
// emptiest, for a tenant that is to be put there.
func roomsIn(ctx context.Context, q conn, want cells.CellID, tenant cells.TenantID) ([]directory.Room, error) {
	f, err := scanFacts(q.QueryRowContext(ctx, `SELECT `+factColumns+` FROM tenant_facts WHERE tenant = ?`, tenant))
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return nil, err
	}
	t := cells.TenantView{Tenant: tenant, Group: f.Group, Jurisdiction: f.Jurisdiction, Rows: f.Rows, Bytes: f.Bytes}
	// The tenant's own ledger row, if it is counted there, does not stand in its way.
	rows, err := q.QueryContext(ctx, `SELECT c.id, c.spec, `+tenantsOf+` - (SELECT count(*) FROM placements p WHERE p.tenant = ?1 AND p.cell = c.id) AS n
		FROM cells c WHERE ?2 = '' OR c.id = ?2 ORDER BY n, c.id`, tenant, want)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out []directory.Room
	for rows.Next() {
		var c api.Cell
		var spec string
		if err := rows.Scan(&c.ID, &spec, &c.Tenants); err != nil {
			return nil, err
		}
		if err := json.Unmarshal([]byte(spec), &c.CellSpec); err != nil {
			return nil, fmt.Errorf("%w: cell %s: %w", cells.ErrInvalid, c.ID, err)
		}
		out = append(out, directory.Room{Cell: c.View(), State: c.State, Tenant: t, Holds: cells.Occupancy{Tenants: c.Tenants}})
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, err
	}
	for i := range out {
		r := &out[i]
		if r.Cell.Limits.Rows == nil && r.Cell.Limits.Bytes == nil {
			continue // nobody asks how large they are
		}
		err := q.QueryRowContext(ctx, `SELECT CAST(coalesce(sum(f.rows_n), 0) AS BIGINT), CAST(coalesce(sum(f.bytes_n), 0) AS BIGINT) FROM tenant_facts f
			WHERE f.tenant <> ?1 AND f.tenant IN (SELECT tenant FROM placements WHERE cell = ?2 UNION SELECT tenant FROM moves WHERE active = 1 AND to_cell = ?2)`,
			tenant, r.Cell.Cell).Scan(&r.Holds.Rows, &r.Holds.Bytes)
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Room implements [directory.Store].
func (s *Store) Room(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (directory.Room, error) {
	rooms, err := roomsIn(ctx, s.read, cell, tenant)
	if err != nil {
		return directory.Room{}, s.translate("room", err)
	}
	if len(rooms) == 0 || cell == "" {
		return directory.Room{}, fmt.Errorf("%w: cell %s", directory.ErrNoCell, cell)
	}
	return rooms[0], nil
}

// Settle implements [directory.Store].
func (s *Store) Settle(ctx context.Context, list []directory.Settlement) error {
	if len(list) == 0 {
		return nil
	}
	return s.tx(ctx, "settle", func(tx *Tx) error {
		const query = `INSERT INTO placements (` + ledgerColumns + `) VALUES (?, ?, ?, '', '', ?, ?)
			ON CONFLICT (tenant) DO UPDATE SET cell = excluded.cell, state = excluded.state, revision = excluded.revision
			WHERE excluded.revision > placements.revision`
		for _, x := range list {
			cell, state := x.Cell, string(directory.PlacementPlaced)
			if !x.Exists {
				cell, state = "", gone
			}
			if _, err := tx.ExecContext(ctx, query, x.Tenant, cell, state, x.Revision, micros(x.At)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Release implements [directory.Store].
func (s *Store) Release(ctx context.Context, tenant cells.TenantID, seen cells.Revision) error {
	return s.tx(ctx, "release", func(tx *Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE placements SET state = 'GONE', cell = ''
			WHERE tenant = ? AND state = 'RESERVED' AND revision = ?`, tenant, seen)
		return err
	})
}

// Reserved implements [directory.Store].
func (s *Store) Reserved(ctx context.Context, after cells.TenantID, limit int) ([]directory.LedgerRow, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+ledgerColumns+` FROM placements
		WHERE state = 'RESERVED' AND tenant > ? ORDER BY tenant LIMIT ?`, after, pageLimit(limit))
	if err != nil {
		return nil, s.translate("reserved", err)
	}
	defer func() { _ = rows.Close() }()
	var out []directory.LedgerRow
	for rows.Next() {
		r, err := scanLedger(rows)
		if err != nil {
			return nil, s.translate("reserved", err)
		}
		out = append(out, r)
	}
	return out, s.translate("reserved", rows.Err())
}

// putOperation records the operation, or checks that the recorded one is the same.
func putOperation(ctx context.Context, tx *Tx, op directory.Operation, answer *string, at time.Time) error {
	var kind string
	var tenant cells.TenantID
	var cell cells.CellID
	err := tx.QueryRowContext(ctx, `INSERT INTO operations (id, kind, tenant, cell, answer, created_at) VALUES (?, ?, ?, ?, ?, ?)
		ON CONFLICT (id) DO UPDATE SET id = operations.id RETURNING kind, tenant, cell`,
		op.ID, op.Kind, op.Tenant, op.Cell, answer, micros(at)).Scan(&kind, &tenant, &cell)
	if err != nil {
		return err
	}
	return sameOperation(op, kind, tenant, cell)
}

func sameOperation(op directory.Operation, kind string, tenant cells.TenantID, cell cells.CellID) error {
	if kind == op.Kind && tenant == op.Tenant && cell == op.Cell {
		return nil
	}
	return fmt.Errorf("%w: %q was a %s of tenant %s to cell %q", directory.ErrOperationReused, op.ID, kind, tenant, cell)
}

// Answer implements [directory.Store].
func (s *Store) Answer(ctx context.Context, op directory.Operation) ([]byte, error) {
	var kind string
	var tenant cells.TenantID
	var cell cells.CellID
	var answer sql.NullString
	err := s.read.QueryRowContext(ctx, `SELECT kind, tenant, cell, answer FROM operations WHERE id = ?`, op.ID).
		Scan(&kind, &tenant, &cell, &answer)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, s.translate("answer", err)
	}
	if err := sameOperation(op, kind, tenant, cell); err != nil {
		return nil, err
	}
	if !answer.Valid {
		return nil, nil
	}
	return []byte(answer.String), nil
}

// SaveAnswer implements [directory.Store].
func (s *Store) SaveAnswer(ctx context.Context, op directory.Operation, answer []byte, at time.Time) ([]byte, error) {
	var first string
	err := s.tx(ctx, "save answer", func(tx *Tx) error {
		if err := putOperation(ctx, tx, op, nil, at); err != nil {
			return err
		}
		return tx.QueryRowContext(ctx, `UPDATE operations SET answer = coalesce(answer, ?) WHERE id = ? RETURNING answer`,
			string(answer), op.ID).Scan(&first)
	})
	return []byte(first), err
}

func pageLimit(n int) int {
	switch {
	case n <= 0:
		return api.DefaultPage
	case n > api.MaxPage:
		return api.MaxPage
	}
	return n
}
