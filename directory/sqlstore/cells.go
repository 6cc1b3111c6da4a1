// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// tenantsOf counts what a cell's quota counts: ledger rows, and active moves that
// come in from elsewhere.
const tenantsOf = `(c.placed + (SELECT count(*) FROM moves m WHERE m.active = 1 AND m.to_cell = c.id
	AND NOT EXISTS (SELECT 1 FROM placements p WHERE p.tenant = m.tenant AND p.cell = c.id)))`

const cellColumns = `c.id, c.spec, c.revision, c.created_at, c.updated_at, ` + tenantsOf

func scanCell(row interface{ Scan(...any) error }) (api.Cell, error) {
	var c api.Cell
	var spec string
	var created, updated int64
	if err := row.Scan(&c.ID, &spec, &c.Revision, &created, &updated, &c.Tenants); err != nil {
		return c, err
	}
	rev := c.Revision
	if err := json.Unmarshal([]byte(spec), &c.CellSpec); err != nil {
		return c, fmt.Errorf("%w: cell %s: %w", cells.ErrInvalid, c.ID, err)
	}
	c.Revision = rev
	c.CreatedAt, c.UpdatedAt = fromMicros(created), fromMicros(updated)
	return c, nil
}

// Cells implements [directory.Store].
func (s *Store) Cells(ctx context.Context) ([]api.Cell, int64, error) {
	var out []api.Cell
	var rev int64
	err := s.snapshot(ctx, "cells", func(tx *Tx) error {
		if err := tx.QueryRowContext(ctx, `SELECT value FROM meta WHERE name = 'cells_revision'`).Scan(&rev); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, `SELECT `+cellColumns+` FROM cells c ORDER BY c.id`)
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			c, err := scanCell(rows)
			if err != nil {
				return err
			}
			out = append(out, c)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, 0, err
	}
	return out, rev, nil
}

// PutCell implements [directory.Store].
func (s *Store) PutCell(ctx context.Context, id cells.CellID, spec api.CellSpec, audit api.AuditEntry) (api.Cell, error) {
	var out api.Cell
	err := s.tx(ctx, "put cell", func(tx *Tx) error {
		old, err := cellIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if spec.Revision != 0 && (old == nil || old.Revision != spec.Revision) {
			at := int64(0)
			if old != nil {
				at = old.Revision
			}
			return fmt.Errorf("%w: cell %s is at revision %d, not %d", cells.ErrConflict, id, at, spec.Revision)
		}
		if old != nil && old.State == api.CellRetiring {
			return fmt.Errorf("%w: cell %s is being retired", cells.ErrConflict, id)
		}
		if err := putCell(ctx, tx, id, spec, audit.At); err != nil {
			return err
		}
		if err := insertAudit(ctx, tx, audit); err != nil {
			return err
		}
		out, err = scanCell(tx.QueryRowContext(ctx, `SELECT `+cellColumns+` FROM cells c WHERE c.id = ?`, id))
		return err
	})
	return out, err
}

// cellIn returns the cell, nil if it is not registered.
func cellIn(ctx context.Context, tx *Tx, id cells.CellID) (*api.Cell, error) {
	c, err := scanCell(tx.QueryRowContext(ctx, `SELECT `+cellColumns+` FROM cells c WHERE c.id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return &c, err
}

// nextCells raises the revision of all cells.
func nextCells(ctx context.Context, tx *Tx) (rev int64, err error) {
	err = tx.QueryRowContext(ctx, `UPDATE meta SET value = value + 1 WHERE name = 'cells_revision' RETURNING value`).Scan(&rev)
	return rev, err
}

// putCell writes a cell and its names.
func putCell(ctx context.Context, tx *Tx, id cells.CellID, spec api.CellSpec, now time.Time) error {
	if err := checkDefault(ctx, tx, id, spec); err != nil {
		return err
	}
	rev, err := nextCells(ctx, tx)
	if err != nil {
		return err
	}
	spec.Revision = 0
	doc, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO cells (id, spec, state, closed, placements_max, is_default, placed, revision, created_at, updated_at)
		VALUES (?1, ?2, ?3, ?4, ?5, ?6, (SELECT count(*) FROM placements WHERE cell = ?1), ?7, ?8, ?8)
		ON CONFLICT (id) DO UPDATE SET spec = excluded.spec, state = excluded.state, closed = excluded.closed,
			placements_max = excluded.placements_max, is_default = excluded.is_default,
			revision = excluded.revision, updated_at = excluded.updated_at`,
		id, string(doc), spec.State, spec.Closed, spec.PlacementsMax, spec.Default, rev, micros(now))
	if err != nil {
		return err
	}
	return putNames(ctx, tx, id, spec)
}

// removeCell forgets a cell that counts no tenants.
func removeCell(ctx context.Context, tx *Tx, c *api.Cell) error {
	if c.Tenants > 0 {
		return fmt.Errorf("%w: cell %s counts %d tenants", cells.ErrConflict, c.ID, c.Tenants)
	}
	if _, err := nextCells(ctx, tx); err != nil {
		return err
	}
	for _, q := range []string{`DELETE FROM cell_names WHERE cell = ?`, `DELETE FROM members WHERE cell = ?`, `DELETE FROM cells WHERE id = ?`} {
		if _, err := tx.ExecContext(ctx, q, c.ID); err != nil {
			return err
		}
	}
	return nil
}

func checkDefault(ctx context.Context, tx *Tx, id cells.CellID, spec api.CellSpec) error {
	if !spec.Default {
		return nil
	}
	var other string
	err := tx.QueryRowContext(ctx, `SELECT id FROM cells WHERE is_default = 1 AND id <> ?`, id).Scan(&other)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: cell %s is the default cell", cells.ErrConflict, other)
}

// putNames replaces the cell's hosts and issuers.
func putNames(ctx context.Context, tx *Tx, id cells.CellID, spec api.CellSpec) error {
	if _, err := tx.ExecContext(ctx, `DELETE FROM cell_names WHERE cell = ?`, id); err != nil {
		return err
	}
	put := func(kind, name string) error {
		var owner string
		err := tx.QueryRowContext(ctx, `INSERT INTO cell_names (kind, name, cell) VALUES (?, ?, ?)
			ON CONFLICT (kind, name) DO UPDATE SET cell = cell_names.cell RETURNING cell`, kind, name, id).Scan(&owner)
		if err != nil {
			return err
		}
		if owner != string(id) {
			return fmt.Errorf("%w: %s %q belongs to cell %s", cells.ErrConflict, kind, name, owner)
		}
		return nil
	}
	if spec.Host != "" {
		if err := put("host", spec.Host); err != nil {
			return err
		}
	}
	for _, a := range spec.Aliases {
		if err := put("host", a); err != nil {
			return err
		}
	}
	for _, i := range spec.Issuers {
		if err := put("issuer", i); err != nil {
			return err
		}
	}
	return nil
}
