// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// Discard implements transfer.Sink.
func (s *Store) Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, opts transfer.RemoveOptions) error {
	order := cells.FenceOrder{Cell: r.Cell, Tenant: tenant, Epoch: r.Epoch, Move: r.Move}
	if err := s.cfg.Keeper.CloseFence(ctx, order); err != nil {
		return err
	}
	cat, err := s.usables(ctx, s.pool)
	if err != nil {
		return err
	}
	known := r.Move.Deletion()
	err = s.admitted(ctx, tenant, r.Epoch, r.Move, func(tx pgx.Tx) error {
		if known {
			return s.end(ctx, tx, tenant, r)
		}
		if err := tx.QueryRow(ctx, s.q(`SELECT EXISTS (SELECT FROM @s.transfer_import WHERE move IN ($1, $3) AND tenant = $2) OR EXISTS (SELECT FROM @s.transfer_capture WHERE move IN ($1, $3) AND tenant = $2)`),
			string(r.Move), string(tenant), string(r.Undoes)).Scan(&known); err != nil {
			return err
		}
		if known {
			return s.end(ctx, tx, tenant, r)
		}
		name, err := anyRows(ctx, tx, cat, tenant)
		if err == nil && name != "" {
			err = fmt.Errorf("%w: transfer/postgres: table %s holds rows of tenant %s that move %s has neither captured nor brought; find out whose they are and remove them by hand",
				cells.ErrInvalid, name, tenant, r.Move)
		}
		return err
	})
	if err != nil {
		return err
	}
	past, err := s.past(ctx, s.pool, tenant, r)
	if err != nil {
		return translate(err)
	}
	for _, m := range past {
		if err := s.release(ctx, m); err != nil {
			return err
		}
	}
	if known {
		err = removeRows(ctx, s.pool, cat, tenant, opts, func(f func(pgx.Tx) error) error {
			return s.admitted(ctx, tenant, r.Epoch, r.Move, func(tx pgx.Tx) error {
				if cat.replica {
					if _, err := tx.Exec(ctx, "SET LOCAL session_replication_role = replica"); err != nil {
						return err
					}
				}
				return f(tx)
			})
		})
		if err != nil {
			return err
		}
	}
	if err := s.cfg.Keeper.ForgetEvents(ctx, order); err != nil {
		return err
	}
	return s.admitted(ctx, tenant, r.Epoch, r.Move, func(tx pgx.Tx) error {
		name, err := anyRows(ctx, tx, cat, tenant)
		if err != nil {
			return err
		}
		if name != "" {
			return fmt.Errorf("%w: transfer/postgres: table %s still holds rows of tenant %s after the removal", cells.ErrUnavailable, name, tenant)
		}
		for _, m := range past {
			if err := s.forget(ctx, tx, m); err != nil {
				return err
			}
		}
		return nil
	})
}

// past lists the moves of the tenant that are known here and that the fence has
// passed: the one whose rows are removed, and what earlier ones have left.
func (s *Store) past(ctx context.Context, q querier, tenant cells.TenantID, r cells.Residue) ([]cells.MoveID, error) {
	rows, err := q.Query(ctx, s.q(`SELECT move FROM @s.transfer_capture WHERE tenant = $1 AND base < $2 UNION SELECT move FROM @s.transfer_import WHERE tenant = $1 AND base < $2`),
		string(tenant), int64(r.Epoch))
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	out := []cells.MoveID{r.Move} // a crash may have left its slot without a row
	for _, m := range all {
		if m != string(r.Move) {
			out = append(out, cells.MoveID(m))
		}
	}
	return out, err
}

// end has a way back that is at work, or begins late, bring nothing from here on.
func (s *Store) end(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, r cells.Residue) error {
	if _, err := tx.Exec(ctx, s.q("UPDATE @s.transfer_capture SET role = $3 WHERE tenant = $1 AND base < $2"), string(tenant), int64(r.Epoch), roleRemoving); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, s.q("UPDATE @s.transfer_import SET gen = gen + 1 WHERE tenant = $1 AND base < $2"), string(tenant), int64(r.Epoch))
	return err
}

// removeRows removes all of the tenant's rows, what refers before what is referred
// to, in transactions made by in.
func removeRows(ctx context.Context, q querier, cat *catalog, tenant cells.TenantID, opts transfer.RemoveOptions, in func(func(pgx.Tx) error) error) error {
	limit := int64(max(1, opts.BatchRows))
	var done int64
	for _, t := range slices.Backward(cat.tables) {
		for {
			if opts.Pace != nil {
				if err := opts.Pace(ctx, limit); err != nil {
					return err
				}
			}
			var gone int64
			err := in(func(tx pgx.Tx) error {
				tag, err := tx.Exec(ctx, t.removal(tenant, limit))
				gone = tag.RowsAffected()
				return err
			})
			if err != nil {
				return err
			}
			if done += gone; opts.Progress != nil && gone > 0 {
				opts.Progress(cells.Progress{Phase: "remove", Table: t.Name, Done: done})
			}
			if gone >= limit {
				continue
			}
			// Fewer went because there are no more, or because another process removes too.
			var more bool
			if err := q.QueryRow(ctx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s WHERE %s)", t.sql(), t.where(tenant)), once).Scan(&more); err != nil {
				return err
			}
			if !more {
				break
			}
		}
	}
	return nil
}

// removal deletes at most limit of the tenant's rows. By physical address the plan
// is a scan of those addresses whatever the statistics say; a join by key becomes
// quadratic on a table that was never analysed. Addresses are not unique across
// partitions, so there the join has to do.
func (t *table) removal(tenant cells.TenantID, limit int64) string {
	if t.partitioned {
		return fmt.Sprintf("DELETE FROM %[1]s WHERE %[3]s AND (%[2]s) IN (SELECT %[2]s FROM %[1]s WHERE %[3]s LIMIT %[4]d)", t.sql(), idents(t.key), t.where(tenant), limit)
	}
	return fmt.Sprintf("DELETE FROM %[1]s WHERE ctid = ANY (ARRAY(SELECT ctid FROM %[1]s WHERE %[2]s LIMIT %[3]d))", t.sql(), t.where(tenant), limit)
}

// forget removes what is kept about a move.
func (s *Store) forget(ctx context.Context, tx pgx.Tx, move cells.MoveID) error {
	for _, t := range []string{"transfer_key", "transfer_import", "transfer_capture"} {
		if _, err := tx.Exec(ctx, s.q("DELETE FROM @s."+t+" WHERE move = $1"), string(move)); err != nil {
			return err
		}
	}
	return nil
}

// Sweep implements transfer.Sink.
func (s *Store) Sweep(ctx context.Context) error {
	return errors.Join(s.sweepAll(ctx, nil), s.spent(ctx), s.sweepGroups(ctx))
}

// SweepTenant implements transfer.Sink.
func (s *Store) SweepTenant(ctx context.Context, tenant cells.TenantID) error {
	t := string(tenant)
	return s.sweepAll(ctx, &t)
}

// sweepAll sweeps what the moves of a tenant, nil: of all, have left.
func (s *Store) sweepAll(ctx context.Context, tenant *string) error {
	which := ""
	args := []any{roleBack}
	if tenant != nil {
		which, args = " WHERE tenant = $2", append(args, *tenant)
	}
	rows, err := s.pool.Query(ctx, s.q("SELECT move, tenant, base, role = $1, NOT released FROM @s.transfer_capture"+which+" UNION SELECT move, tenant, base, false, false FROM @s.transfer_import"+which), args...)
	if err != nil {
		return translate(err)
	}
	type known struct {
		Move, Tenant string
		Base         int64
		Back         bool // the owner's capture of a way back
		Armed        bool // changes are still captured
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[known])
	err = translate(err)
	for _, k := range all {
		f, ferr := s.cfg.Keeper.Fence(ctx, cells.TenantID(k.Tenant))
		if ferr != nil {
			if !errors.Is(ferr, cells.ErrNotFound) {
				err = errors.Join(err, ferr)
			}
			continue
		}
		opened := (cells.MoveRef{Base: cells.Epoch(k.Base)}).OpenEpoch()
		if k.Armed && !f.Open && f.Epoch > opened {
			// The tenant has left again, by a later move, before anybody swept.
			err = errors.Join(err, s.release(ctx, cells.MoveID(k.Move)))
		}
		if !f.Open || f.Epoch < opened || k.Back && f.Epoch == opened {
			continue
		}
		err = errors.Join(err, s.sweep(ctx, cells.MoveID(k.Move), k.Back))
	}
	return err
}

// sweep forgets a move that is over, but not the way back that has its id.
func (s *Store) sweep(ctx context.Context, move cells.MoveID, back bool) error {
	c, err := s.capture(ctx, s.pool, move)
	if err != nil {
		return translate(err)
	}
	if c.known && c.role == roleBack && !back {
		return s.tx(ctx, func(tx pgx.Tx) error {
			for _, t := range []string{"transfer_key", "transfer_import"} {
				if _, err := tx.Exec(ctx, s.q("DELETE FROM @s."+t+" WHERE move = $1"), string(move)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := s.release(ctx, move); err != nil {
		return err
	}
	return s.tx(ctx, func(tx pgx.Tx) error { return s.forget(ctx, tx, move) })
}
