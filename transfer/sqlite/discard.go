// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// maxRemove bounds what one transaction removes, whatever the caller allows: it
// holds the write lock of the whole database.
const maxRemove = 2000

// Discard implements transfer.Sink.
func (s *Store) Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, opts transfer.RemoveOptions) error {
	order := cells.FenceOrder{Cell: r.Cell, Tenant: tenant, Epoch: r.Epoch, Move: r.Move}
	if err := s.cfg.Keeper.CloseFence(ctx, order); err != nil {
		return err
	}
	err := s.admitted(ctx, tenant, r.Epoch, r.Move, func(tx *sql.Tx) error {
		known := r.Move.Deletion()
		if known {
			return s.end(ctx, tx, tenant, r)
		}
		if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM cell_transfer_import WHERE move IN (?1, ?3) AND tenant = ?2)
			OR EXISTS (SELECT 1 FROM cell_transfer_capture WHERE move IN (?1, ?3) AND tenant = ?2)`, r.Move, tenant, r.Undoes).Scan(&known); err != nil {
			return err
		}
		if !known {
			name, err := s.anyRows(ctx, tx, tenant)
			if err == nil && name != "" {
				err = fmt.Errorf("%w: transfer/sqlite: table %s holds rows of tenant %s that move %s has neither captured nor brought; find out whose they are and remove them by hand",
					cells.ErrInvalid, name, tenant, r.Move)
			}
			return err
		}
		return s.end(ctx, tx, tenant, r)
	})
	if err == nil {
		err = s.trim(ctx)
	}
	if err != nil {
		return err
	}
	err = s.removeRows(ctx, tenant, opts, func(f func(*sql.Tx) error) error { return s.admitted(ctx, tenant, r.Epoch, r.Move, f) })
	if err != nil {
		return err
	}
	if err := s.cfg.Keeper.ForgetEvents(ctx, order); err != nil {
		return err
	}
	return s.admitted(ctx, tenant, r.Epoch, r.Move, func(tx *sql.Tx) error {
		name, err := s.anyRows(ctx, tx, tenant)
		if err != nil {
			return err
		}
		if name != "" {
			return fmt.Errorf("%w: transfer/sqlite: table %s still holds rows of tenant %s after the removal", cells.ErrUnavailable, name, tenant)
		}
		return s.past(ctx, tx, tenant, r, func(m cells.MoveID) error { return s.forget(ctx, tx, m) })
	})
}

// past calls f with every move of the tenant that is known here and that the fence has
// passed: the one whose rows are removed, and what earlier ones have left.
func (s *Store) past(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, r cells.Residue, f func(cells.MoveID) error) error {
	rows, err := tx.QueryContext(ctx, `SELECT move FROM cell_transfer_capture WHERE tenant = ?1 AND base < ?2 UNION SELECT move FROM cell_transfer_import WHERE tenant = ?1 AND base < ?2`,
		tenant, int64(r.Epoch))
	if err != nil {
		return err
	}
	defer rows.Close()
	var all []cells.MoveID
	for rows.Next() {
		var m cells.MoveID
		if err := rows.Scan(&m); err != nil {
			return err
		}
		all = append(all, m)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, m := range all {
		if err := f(m); err != nil {
			return err
		}
	}
	return nil
}

// end frees what is captured of the tenant. A way back that is at work, or begins
// late, brings nothing from here on.
func (s *Store) end(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, r cells.Residue) error {
	return s.past(ctx, tx, tenant, r, func(m cells.MoveID) error {
		if _, err := tx.ExecContext(ctx, "UPDATE cell_transfer_capture SET role = ? WHERE move = ?", roleRemoving, m); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE cell_transfer_import SET gen = gen + 1 WHERE move = ?", m); err != nil {
			return err
		}
		return s.release(ctx, tx, m)
	})
}

// removeRows removes all of the tenant's rows, in transactions made by in.
func (s *Store) removeRows(ctx context.Context, tenant cells.TenantID, opts transfer.RemoveOptions, in func(func(*sql.Tx) error) error) error {
	limit := min(max(1, opts.BatchRows), maxRemove)
	var done int64
	for n := len(s.tables) - 1; n >= 0; n-- {
		t := s.tables[n]
		for {
			if opts.Pace != nil {
				if err := opts.Pace(ctx, int64(limit)); err != nil {
					return err
				}
			}
			var gone int64
			err := in(func(tx *sql.Tx) error {
				u, err := usable(ctx, tx, t)
				if err != nil {
					return err
				}
				keys := quoted("", u.key)
				q := fmt.Sprintf("DELETE FROM %[1]s WHERE (%[2]s) IN (SELECT %[2]s FROM %[1]s WHERE %[3]s = ? LIMIT ?)", quote(t.Name), keys, quote(t.TenantColumn))
				res, err := tx.ExecContext(ctx, q, tenant, limit)
				if err == nil {
					gone, err = res.RowsAffected()
				}
				return err
			})
			if err != nil {
				return err
			}
			if done += gone; opts.Progress != nil && gone > 0 {
				opts.Progress(cells.Progress{Phase: "remove", Table: t.Name, Done: done})
			}
			if gone < int64(limit) {
				break
			}
		}
	}
	return nil
}

// forget removes what is kept about a move.
func (s *Store) forget(ctx context.Context, tx *sql.Tx, move cells.MoveID) error {
	for _, q := range []string{"DELETE FROM cell_transfer_touched WHERE move = ?", "DELETE FROM cell_transfer_import WHERE move = ?", "DELETE FROM cell_transfer_capture WHERE move = ?"} {
		if _, err := tx.ExecContext(ctx, q, move); err != nil {
			return err
		}
	}
	return nil
}

// Sweep implements transfer.Sink.
func (s *Store) Sweep(ctx context.Context) error {
	return errors.Join(s.sweepAll(ctx, ""), s.spent(ctx), s.trim(ctx))
}

// SweepTenant implements transfer.Sink.
func (s *Store) SweepTenant(ctx context.Context, tenant cells.TenantID) error {
	return errors.Join(s.sweepAll(ctx, tenant), s.trim(ctx))
}

// sweepAll sweeps what the moves of a tenant, "": of all, have left.
func (s *Store) sweepAll(ctx context.Context, tenant cells.TenantID) error {
	type known struct {
		move   cells.MoveID
		tenant cells.TenantID
		base   int64
		back   bool // the owner's capture of a way back
		armed  bool // changes are still captured
	}
	var all []known
	err := s.reading(ctx, func(tx *sql.Tx) error {
		rows, err := tx.QueryContext(ctx, `SELECT move, tenant, base, role = ?1, NOT released FROM cell_transfer_capture WHERE ?2 IN ('', tenant)
			UNION SELECT move, tenant, base, 0, 0 FROM cell_transfer_import WHERE ?2 IN ('', tenant)`, roleBack, string(tenant))
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var k known
			if err := rows.Scan(&k.move, &k.tenant, &k.base, &k.back, &k.armed); err != nil {
				return err
			}
			all = append(all, k)
		}
		return rows.Err()
	})
	for _, k := range all {
		f, ferr := s.cfg.Keeper.Fence(ctx, k.tenant)
		if ferr != nil {
			if !errors.Is(ferr, cells.ErrNotFound) {
				err = errors.Join(err, ferr)
			}
			continue
		}
		opened := (cells.MoveRef{Base: cells.Epoch(k.base)}).OpenEpoch()
		if k.armed && !f.Open && f.Epoch > opened {
			// The tenant has left again, by a later move, before anybody swept.
			err = errors.Join(err, s.tx(ctx, func(tx *sql.Tx) error { return s.release(ctx, tx, k.move) }))
		}
		if !f.Open || f.Epoch < opened || k.back && f.Epoch == opened {
			continue
		}
		err = errors.Join(err, s.tx(ctx, func(tx *sql.Tx) error { return s.sweep(ctx, tx, k.move, k.back) }))
	}
	return err
}

// sweep forgets a move that is over, but not the way back that has its id.
func (s *Store) sweep(ctx context.Context, tx *sql.Tx, move cells.MoveID, back bool) error {
	var kept bool
	if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE move = ? AND role = ?)", move, roleBack).Scan(&kept); err != nil {
		return err
	}
	if kept && !back {
		for _, q := range []string{"DELETE FROM cell_transfer_touched WHERE move = ?", "DELETE FROM cell_transfer_import WHERE move = ?"} {
			if _, err := tx.ExecContext(ctx, q, move); err != nil {
				return err
			}
		}
		return nil
	}
	return errors.Join(s.release(ctx, tx, move), s.forget(ctx, tx, move))
}
