// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

const rolloutColumns = `seq, driver, version, doc`

func scanRollout(row interface{ Scan(...any) error }) (api.Rollout, error) {
	var r api.Rollout
	var seq, version int64
	var driver, doc string
	if err := row.Scan(&seq, &driver, &version, &doc); err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(doc), &r); err != nil {
		return r, fmt.Errorf("%w: rollout record %d: %w", cells.ErrInvalid, seq, err)
	}
	r.Seq, r.Driver, r.Version = seq, driver, version
	return r, nil
}

func rolloutIn(ctx context.Context, tx *Tx, id api.RolloutID) (api.Rollout, error) {
	return scanRollout(tx.QueryRowContext(ctx, `SELECT `+rolloutColumns+` FROM rollouts WHERE id = ?`, id))
}

// putRollout writes a record; a final one holds its cells no longer.
func putRollout(ctx context.Context, tx *Tx, r *api.Rollout) error {
	r.Version++
	rec := *r
	rec.Now, rec.BakeLeft, rec.Moves = nil, 0, nil
	doc, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	if _, err := tx.ExecContext(ctx, `UPDATE rollouts SET state = ?, driven = ?, driver = ?, version = ?, doc = ? WHERE id = ?`,
		r.State, !r.State.Final(), r.Driver, r.Version, string(doc), r.ID); err != nil || !r.State.Final() {
		return err
	}
	_, err = tx.ExecContext(ctx, `DELETE FROM rollout_cells WHERE rollout = ?`, r.ID)
	return err
}

// rolloutHeld refuses a rollout whose cells have one.
func rolloutHeld(ctx context.Context, q queryer, r *api.Rollout) error {
	for _, c := range r.Cells() {
		var other string
		err := q.QueryRowContext(ctx, `SELECT rollout FROM rollout_cells WHERE cell = ?`, c).Scan(&other)
		if err == nil {
			return fmt.Errorf("%w: cell %s has rollout %s", directory.ErrRolloutActive, c, other)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
	}
	return nil
}

// RolloutHeld implements [directory.Store].
func (s *Store) RolloutHeld(ctx context.Context, r *api.Rollout) error {
	err := rolloutHeld(ctx, s.read, r)
	if errors.Is(err, directory.ErrRolloutActive) {
		return err
	}
	return s.translate("rollout cells", err)
}

// CreateRollout implements [directory.Store].
func (s *Store) CreateRollout(ctx context.Context, r api.Rollout, units []api.RolloutUnit, audit api.AuditEntry) (rec api.Rollout, created bool, err error) {
	err = s.tx(ctx, "create rollout", func(tx *Tx) error {
		created = false
		if r.OperationID != "" {
			rec, err = scanRollout(tx.QueryRowContext(ctx, `SELECT `+rolloutColumns+` FROM rollouts WHERE operation = ?`, r.OperationID))
			if !errors.Is(err, sql.ErrNoRows) {
				return err
			}
		}
		if err := rolloutHeld(ctx, tx, &r); err != nil {
			return err
		}
		rec = r
		rec.Version, rec.Driver = 0, ""
		err := tx.QueryRowContext(ctx, `INSERT INTO rollouts (id, state, driven, driver, version, operation, doc) VALUES (?, ?, 0, '', 0, ?, '{}') RETURNING seq`,
			rec.ID, rec.State, rec.OperationID).Scan(&rec.Seq)
		if err != nil {
			return err
		}
		for _, c := range r.Cells() {
			if _, err := tx.ExecContext(ctx, `INSERT INTO rollout_cells (cell, rollout) VALUES (?, ?)`, c, r.ID); err != nil {
				return err
			}
		}
		for i := range rec.Waves {
			rec.Waves[i].Counts = api.UnitCounts{}
		}
		if err := insertUnits(ctx, tx, &rec, units); err != nil {
			return err
		}
		if err := putRollout(ctx, tx, &rec); err != nil {
			return err
		}
		created = true
		return insertAudit(ctx, tx, audit)
	})
	return rec, created && err == nil, err
}

// Rollout implements [directory.Store].
func (s *Store) Rollout(ctx context.Context, id api.RolloutID) (api.Rollout, error) {
	r, err := scanRollout(s.read.QueryRowContext(ctx, `SELECT `+rolloutColumns+` FROM rollouts WHERE id = ?`, id))
	return r, s.translate("rollout", err)
}

// Rollouts implements [directory.Store].
func (s *Store) Rollouts(ctx context.Context, f directory.RolloutFilter) ([]api.Rollout, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+rolloutColumns+` FROM rollouts
		WHERE (?1 = '' OR state = ?1) AND (CAST(?2 AS BIGINT) = 0 OR seq < CAST(?2 AS BIGINT)) AND (?4 = '' OR operation = ?4)
		ORDER BY seq DESC LIMIT ?3`, f.State, f.After, pageLimit(f.Limit), f.OperationID)
	if err != nil {
		return nil, s.translate("rollouts", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.Rollout
	for rows.Next() {
		r, err := scanRollout(rows)
		if err != nil {
			return nil, s.translate("rollouts", err)
		}
		out = append(out, r)
	}
	return out, s.translate("rollouts", rows.Err())
}

// changeRollout runs fn on a record and restores what it must not change.
func changeRollout(r *api.Rollout, fn func(*api.Rollout) error) error {
	old := *r
	old.Waves = append([]api.RolloutWave(nil), r.Waves...)
	if err := fn(r); err != nil {
		return err
	}
	r.ID, r.Seq, r.Version, r.Old, r.New = old.ID, old.Seq, old.Version, old.Old, old.New
	if len(r.Waves) != len(old.Waves) {
		return fmt.Errorf("%w: %d waves in place of %d", cells.ErrInvalid, len(r.Waves), len(old.Waves))
	}
	for i := range r.Waves {
		r.Waves[i].Counts = old.Waves[i].Counts
	}
	if r.Driver != "" {
		r.Driver = old.Driver
	}
	return nil
}

// UpdateRollout implements [directory.Store].
func (s *Store) UpdateRollout(ctx context.Context, id api.RolloutID, fn func(*api.Rollout) error, audit *api.AuditEntry) (api.Rollout, error) {
	var out api.Rollout
	err := s.tx(ctx, "update rollout", func(tx *Tx) error {
		r, err := rolloutIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := changeRollout(&r, fn); err != nil {
			return err
		}
		if err := putRollout(ctx, tx, &r); err != nil {
			return err
		}
		out = r
		if audit == nil {
			return nil
		}
		return insertAudit(ctx, tx, *audit)
	})
	return out, err
}

// RolloutBeats implements [directory.Store].
func (s *Store) RolloutBeats(ctx context.Context) ([]directory.RolloutBeat, error) {
	return drivenBeats[api.RolloutID](ctx, s, drivenRollouts, "rollout beats")
}

// BeatRollouts implements [directory.Store].
func (s *Store) BeatRollouts(ctx context.Context, driver string) error {
	return s.beat(ctx, drivenRollouts, "beat rollouts", driver)
}

// TakeRollout implements [directory.Store].
func (s *Store) TakeRollout(ctx context.Context, seen directory.RolloutBeat, driver string) (bool, error) {
	return take(ctx, s, drivenRollouts, "take rollout", seen, driver)
}
