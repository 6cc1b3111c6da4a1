// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// entryBytes is about what an entry of the change log takes, with its index.
const entryBytes = 100

// kept is what is kept for a move: its tenant's entries of the change log, and what the
// write-ahead log has grown since the capture was begun, since views keep it from being
// reset. The file never gets smaller by itself.
func (s *Store) kept(ctx context.Context, q querier, tenant cells.TenantID, before int64) (int64, error) {
	var n int64
	if err := q.QueryRowContext(ctx, "SELECT count(*) FROM cell_transfer_log WHERE tenant = ?", tenant).Scan(&n); err != nil {
		return 0, err
	}
	return n*entryBytes + max(0, s.walSize()-before), nil
}

func (s *Store) walSize() int64 {
	info, err := os.Stat(s.cfg.Path + "-wal")
	if err != nil {
		return 0
	}
	return info.Size()
}

// ReplicaLag implements transfer.Sink: a file has no standbys.
func (s *Store) ReplicaLag(context.Context) (time.Duration, error) { return 0, nil }

// Check implements transfer.Source. Views wait for nobody here.
func (s *Store) Check(ctx context.Context, m cells.MoveRef, l transfer.Limits) (h transfer.Health, err error) {
	var limit, wal int64
	err = s.reading(ctx, func(tx *sql.Tx) error {
		if err := s.captured(ctx, tx, m); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, "SELECT max_retained, wal FROM cell_transfer_capture WHERE move = ?", m.ID).Scan(&limit, &wal); err != nil {
			return err
		}
		h.Retained, err = s.kept(ctx, tx, m.Tenant, wal)
		return err
	})
	if err == nil && limit != l.MaxRetained {
		err = s.tx(ctx, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "UPDATE cell_transfer_capture SET max_retained = ? WHERE move = ?", l.MaxRetained, m.ID)
			return err
		})
	}
	if err != nil {
		return h, err
	}
	return h, l.Check(m.Source, h.Retained)
}

// spent ends the captures for which more is kept than they may: nobody may be there to
// roll the move back, and the log would fill the disk.
func (s *Store) spent(ctx context.Context) (err error) {
	type known struct {
		move   cells.MoveID
		tenant cells.TenantID
		kept   int64
		limit  int64
		wal    int64
	}
	var over []known
	var ended bool
	err = s.reading(ctx, func(tx *sql.Tx) error {
		if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE released = 0 AND ended <> '')").Scan(&ended); err != nil {
			return err
		}
		rows, err := tx.QueryContext(ctx, "SELECT move, tenant, max_retained, wal FROM cell_transfer_capture WHERE released = 0 AND ended = ''")
		if err != nil {
			return err
		}
		defer rows.Close()
		var all []known
		for rows.Next() {
			var k known
			if err := rows.Scan(&k.move, &k.tenant, &k.limit, &k.wal); err != nil {
				return err
			}
			all = append(all, k)
		}
		if err := rows.Err(); err != nil {
			return err
		}
		for _, k := range all {
			k.limit = transfer.Limits{MaxRetained: k.limit}.Retained()
			if k.kept, err = s.kept(ctx, tx, k.tenant, k.wal); err != nil {
				return err
			}
			if k.limit > 0 && k.kept > k.limit {
				over = append(over, k)
			}
		}
		return nil
	})
	if ended {
		// The triggers go on logging for them while those of another move are there.
		err = errors.Join(err, s.tx(ctx, func(tx *sql.Tx) error { return s.disarm(ctx, tx) }))
	}
	for _, k := range over {
		err = errors.Join(err, s.tx(ctx, func(tx *sql.Tx) error {
			why := fmt.Sprintf("%d bytes of changes were kept for move %s, the limit was %d; the capture was ended", k.kept, k.move, k.limit)
			if _, err := tx.ExecContext(ctx, "UPDATE cell_transfer_capture SET ended = ? WHERE move = ?", why, k.move); err != nil {
				return err
			}
			return s.disarm(ctx, tx)
		}))
	}
	return err
}
