// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
)

// insertUnits writes units, many in one statement, and counts them in their waves.
func insertUnits(ctx context.Context, tx *Tx, r *api.Rollout, units []api.RolloutUnit) error {
	const chunk = 100
	head, one := `INSERT INTO rollout_units (rollout, pos, unit, wave, home, state, reason, at) VALUES `, `(?,?,?,?,?,?,?,?)`
	full := head + one + strings.Repeat(`,`+one, chunk-1)
	for len(units) > 0 {
		n := min(chunk, len(units))
		args := make([]any, 0, 8*n)
		for _, u := range units[:n] {
			if u.Wave < 1 || u.Wave > len(r.Waves) || !u.State.Valid() {
				return fmt.Errorf("%w: unit %s is %q in wave %d of %d", cells.ErrInvalid, u.Unit, u.State, u.Wave, len(r.Waves))
			}
			c := &r.Waves[u.Wave-1].Counts
			c.Total++
			*c.Of(u.State)++
			args = append(args, r.ID, u.Pos, u.Unit, u.Wave, u.Home, u.State, u.Reason, atOf(u.At))
		}
		query := full
		if n < chunk {
			query = head + one + strings.Repeat(`,`+one, n-1)
		}
		if _, err := tx.ExecContext(ctx, query, args...); err != nil {
			return err
		}
		units = units[n:]
	}
	return nil
}

func atOf(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return micros(t)
}

const unitColumns = `pos, unit, wave, home, state, reason, at`

func scanUnit(row interface{ Scan(...any) error }) (api.RolloutUnit, error) {
	var u api.RolloutUnit
	var at int64
	err := row.Scan(&u.Pos, &u.Unit, &u.Wave, &u.Home, &u.State, &u.Reason, &at)
	if at != 0 {
		u.At = fromMicros(at)
	}
	return u, err
}

// in appends "column IN (?, ...)" for the states.
func in(query string, args []any, column string, states []api.UnitState) (string, []any) {
	if len(states) == 0 {
		return query, args
	}
	for _, s := range states {
		args = append(args, s)
	}
	return query + " AND " + column + " IN (?" + strings.Repeat(",?", len(states)-1) + ")", args
}

// RolloutUnits implements [directory.Store].
func (s *Store) RolloutUnits(ctx context.Context, f rollout.UnitFilter) ([]api.RolloutUnit, error) {
	query, args := `SELECT `+unitColumns+` FROM rollout_units WHERE rollout = ? AND pos > ?`, []any{f.Rollout, f.After}
	if f.Wave > 0 {
		query, args = query+` AND wave = ?`, append(args, f.Wave)
	}
	query, args = in(query, args, "state", f.States)
	rows, err := s.read.QueryContext(ctx, query+` ORDER BY pos LIMIT ?`, append(args, pageLimit(f.Limit))...)
	if err != nil {
		return nil, s.translate("rollout units", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.RolloutUnit
	for rows.Next() {
		u, err := scanUnit(rows)
		if err != nil {
			return nil, s.translate("rollout units", err)
		}
		out = append(out, u)
	}
	return out, s.translate("rollout units", rows.Err())
}

// ChangeUnits implements [directory.Store].
func (s *Store) ChangeUnits(ctx context.Context, id api.RolloutID, at time.Time, list []rollout.UnitChange) (int64, error) {
	var n int64
	err := s.tx(ctx, "change units", func(tx *Tx) error {
		n = 0
		r, err := rolloutIn(ctx, tx, id)
		if err != nil {
			return err
		}
		for _, ch := range list {
			u, err := scanUnit(tx.QueryRowContext(ctx, `SELECT `+unitColumns+` FROM rollout_units WHERE rollout = ? AND unit = ?`, id, ch.Unit))
			switch {
			case errors.Is(err, sql.ErrNoRows), err == nil && ch.To == u.State && ch.Reason == u.Reason:
				continue
			case err != nil:
				return err
			case ch.To == u.State: // only its reason
			case !u.State.May(ch.To):
				continue
			default:
				c := &r.Waves[u.Wave-1].Counts
				*c.Of(u.State)--
				*c.Of(ch.To)++
				u.At = at
			}
			if _, err := tx.ExecContext(ctx, `UPDATE rollout_units SET state = ?, reason = ?, at = ? WHERE rollout = ? AND pos = ?`,
				ch.To, ch.Reason, atOf(u.At), id, u.Pos); err != nil {
				return err
			}
			n++
		}
		if n == 0 {
			return nil
		}
		return putRollout(ctx, tx, &r)
	})
	return n, err
}

// MoveUnits implements [directory.Store].
func (s *Store) MoveUnits(ctx context.Context, id api.RolloutID, at time.Time, first, last int, from []api.UnitState, to api.UnitState, reason string) (int64, error) {
	var n int64
	err := s.tx(ctx, "move units", func(tx *Tx) error {
		n = 0
		r, err := rolloutIn(ctx, tx, id)
		if err != nil {
			return err
		}
		for wave := max(first, 1); wave <= min(last, len(r.Waves)); wave++ {
			c := &r.Waves[wave-1].Counts
			for _, f := range from {
				if !f.May(to) || *c.Of(f) == 0 {
					continue
				}
				res, err := tx.ExecContext(ctx, `UPDATE rollout_units SET state = ?, reason = ?, at = ? WHERE rollout = ? AND wave = ? AND state = ?`,
					to, reason, atOf(at), id, wave, f)
				if err != nil {
					return err
				}
				k, err := res.RowsAffected()
				if err != nil {
					return err
				}
				*c.Of(f) -= k
				*c.Of(to) += k
				n += k
			}
		}
		if n == 0 {
			return nil
		}
		return putRollout(ctx, tx, &r)
	})
	return n, err
}

// AddUnits implements [directory.Store].
func (s *Store) AddUnits(ctx context.Context, id api.RolloutID, at time.Time, wave int, units []api.RolloutUnit) (int64, error) {
	var n int64
	err := s.tx(ctx, "add units", func(tx *Tx) error {
		r, err := rolloutIn(ctx, tx, id)
		if err != nil {
			return err
		}
		have := map[string]bool{}
		rows, err := tx.QueryContext(ctx, `SELECT unit FROM rollout_units WHERE rollout = ?`, id)
		if err != nil {
			return err
		}
		for rows.Next() {
			var u string
			if err := rows.Scan(&u); err != nil {
				_ = rows.Close()
				return err
			}
			have[u] = true
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			return err
		}
		pos := int64(len(have))
		var fresh []api.RolloutUnit
		for _, u := range units {
			if have[u.Unit] {
				continue
			}
			have[u.Unit] = true
			pos++
			fresh = append(fresh, api.RolloutUnit{Pos: pos, Unit: u.Unit, Wave: wave, Home: u.Home, State: api.UnitPending, Reason: u.Reason, At: at})
		}
		if n = int64(len(fresh)); n == 0 {
			return nil
		}
		if err := insertUnits(ctx, tx, &r, fresh); err != nil {
			return err
		}
		return putRollout(ctx, tx, &r)
	})
	return n, err
}
