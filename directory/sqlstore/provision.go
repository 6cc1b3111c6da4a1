// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
)

func scanDoc[T any](row interface{ Scan(...any) error }) (T, error) {
	var out T
	var doc string
	if err := row.Scan(&doc); err != nil {
		return out, err
	}
	if err := json.Unmarshal([]byte(doc), &out); err != nil {
		return out, fmt.Errorf("%w: damaged record: %w", cells.ErrInvalid, err)
	}
	return out, nil
}

func scanDocs[T any](rows *sql.Rows, err error) ([]T, error) {
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out []T
	for rows.Next() {
		v, err := scanDoc[T](rows)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, rows.Err()
}

// Versions implements [directory.Store].
func (s *Store) Versions(ctx context.Context) ([]provision.Version, error) {
	list, err := scanDocs[provision.Version](s.read.QueryContext(ctx, `SELECT doc FROM versions ORDER BY name`))
	return list, s.translate("versions", err)
}

// PutVersion implements [directory.Store].
func (s *Store) PutVersion(ctx context.Context, v provision.Version, replace bool, audit api.AuditEntry) (provision.Version, error) {
	out := v
	err := s.tx(ctx, "put version", func(tx *Tx) error {
		have, err := scanDoc[provision.Version](tx.QueryRowContext(ctx, `SELECT doc FROM versions WHERE name = ?`, v.Name))
		switch {
		case errors.Is(err, sql.ErrNoRows):
		case err != nil:
			return err
		case have.Image == v.Image && slices.Equal(have.Command, v.Command):
			out = have
			return nil
		case !replace:
			return fmt.Errorf("%w: version %s is there already and says something else", cells.ErrConflict, v.Name)
		}
		doc, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO versions (name, doc) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET doc = excluded.doc`, v.Name, string(doc)); err != nil {
			return err
		}
		return insertAudit(ctx, tx, audit)
	})
	return out, err
}

// RemoveVersion implements [directory.Store].
func (s *Store) RemoveVersion(ctx context.Context, name string, audit api.AuditEntry) error {
	return s.tx(ctx, "remove version", func(tx *Tx) error {
		var cell string
		err := tx.QueryRowContext(ctx, `SELECT cell FROM provisioned WHERE version = ? AND desired <> 'retired' ORDER BY cell LIMIT 1`, name).Scan(&cell)
		if err == nil {
			return fmt.Errorf("%w: cell %s is pinned to version %s", cells.ErrConflict, cell, name)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		res, err := tx.ExecContext(ctx, `DELETE FROM versions WHERE name = ?`, name)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, sql.ErrNoRows)
		}
		return insertAudit(ctx, tx, audit)
	})
}

// Provisioned implements [directory.Store].
func (s *Store) Provisioned(ctx context.Context) ([]provision.Record, int64, error) {
	var list []provision.Record
	var rev int64
	err := s.snapshot(ctx, "provisioned", func(tx *Tx) error {
		if err := tx.QueryRowContext(ctx, `SELECT value FROM meta WHERE name = 'specs_revision'`).Scan(&rev); err != nil {
			return err
		}
		var err error
		list, err = scanDocs[provision.Record](tx.QueryContext(ctx, `SELECT doc FROM provisioned ORDER BY cell`))
		return err
	})
	return list, rev, err
}

// UpdateProvisioned implements [directory.Store].
func (s *Store) UpdateProvisioned(ctx context.Context, cell cells.CellID, fn func(*directory.ProvisionChange) error, audit *api.AuditEntry) (provision.Record, error) {
	var out provision.Record
	err := s.tx(ctx, "update provisioned", func(tx *Tx) error {
		ch, err := changeOf(ctx, tx, cell)
		if err != nil {
			return err
		}
		before := ch
		before.Record.Spec = ch.Record.Spec.Clone()
		was := ch.Cell
		if was != nil {
			c := *was
			ch.Cell = &c
		}
		if err := fn(&ch); err != nil {
			return err
		}
		now := time.Now()
		if audit != nil {
			now = audit.At
		}
		ch.Record.Spec.Cell, ch.Record.Spec.Generation = cell, before.Record.Spec.Generation
		out = before.Record
		cellChanged := (was == nil) != (ch.Cell == nil) || was != nil && !reflect.DeepEqual(was.CellSpec, ch.Cell.CellSpec)
		if reflect.DeepEqual(before.Record, ch.Record) && !cellChanged {
			return nil
		}
		if err := saveRecord(ctx, tx, &before.Record, &ch.Record); err != nil {
			return err
		}
		out = ch.Record
		switch {
		case !cellChanged:
		case ch.Cell == nil:
			err = removeCell(ctx, tx, was)
		default:
			err = putCell(ctx, tx, cell, ch.Cell.CellSpec, now)
		}
		if err != nil || audit == nil {
			return err
		}
		return insertAudit(ctx, tx, *audit)
	})
	return out, err
}

func changeOf(ctx context.Context, tx *Tx, cell cells.CellID) (directory.ProvisionChange, error) {
	var ch directory.ProvisionChange
	var err error
	ch.Record, err = scanDoc[provision.Record](tx.QueryRowContext(ctx, `SELECT doc FROM provisioned WHERE cell = ?`, cell))
	ch.Exists = err == nil
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return ch, err
	}
	ch.Record.Spec.Cell = cell
	if ch.Cell, err = cellIn(ctx, tx, cell); err != nil {
		return ch, err
	}
	err = tx.QueryRowContext(ctx, `SELECT count(*) FROM moves WHERE active = 1 AND (to_cell = ?1 OR doc ->> 'from' = ?1)`, cell).Scan(&ch.Moves)
	return ch, err
}

// saveRecord writes a record, and numbers it when its spec has changed.
func saveRecord(ctx context.Context, tx *Tx, old, next *provision.Record) error {
	if !reflect.DeepEqual(old.Spec, next.Spec) || old.Spec.Generation == 0 {
		next.Spec.Generation = old.Spec.Generation + 1
	}
	if _, err := tx.ExecContext(ctx, `UPDATE meta SET value = value + ? WHERE name = 'specs_revision'`,
		next.Spec.Generation-old.Spec.Generation); err != nil {
		return err
	}
	doc, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO provisioned (cell, version, desired, generation, doc) VALUES (?1, ?2, ?3, ?4, ?5)
		ON CONFLICT (cell) DO UPDATE SET version = excluded.version, desired = excluded.desired, generation = excluded.generation,
			doc = excluded.doc`,
		next.Spec.Cell, next.Spec.Version, next.Spec.Desired, next.Spec.Generation, string(doc))
	return err
}
