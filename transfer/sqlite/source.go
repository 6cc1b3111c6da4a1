// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// A follower looks for new changes at least this often; a position that this
// process gives out wakes it at once.
const (
	pollMin = 2 * time.Millisecond
	pollMax = 20 * time.Millisecond
)

// Begin implements transfer.Source.
func (s *Store) Begin(ctx context.Context, m cells.MoveRef) (pos transfer.Position, err error) {
	err = s.tx(ctx, func(tx *sql.Tx) error {
		var start uint64
		var released bool
		var shape, ended string
		err := tx.QueryRowContext(ctx, "SELECT start, released, shape, ended FROM cell_transfer_capture WHERE move = ?", m.ID).Scan(&start, &released, &shape, &ended)
		switch {
		case err == nil && !released && ended != "":
			return fmt.Errorf("%w: %s", transfer.ErrRetention, ended)
		case err == nil && !released:
			// Whether the triggers are still there is to be seen before they are made anew.
			pos = transfer.MakePosition(start)
			return s.unchanged(ctx, tx, shape, m)
		case err == nil && released:
			return fmt.Errorf("%w: transfer/sqlite: the capture of move %s was released", cells.ErrNotApplicable, m.ID)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if start, err = head(ctx, tx); err != nil {
			return err
		}
		if err := s.pin(ctx, tx); err != nil {
			return err
		}
		if err := s.arm(ctx, tx); err != nil {
			return err
		}
		now, err := s.shape(ctx, tx, true)
		if err != nil {
			return err
		}
		text, err := json.Marshal(now)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO cell_transfer_capture (move, tenant, base, start, shape, wal) VALUES (?, ?, ?, ?, ?, ?)", m.ID, m.Tenant, int64(m.Base), start, string(text), s.walSize())
		pos = transfer.MakePosition(start)
		return err
	})
	return pos, err
}

// arm makes the capture triggers those of the tables' present shape.
func (s *Store) arm(ctx context.Context, tx *sql.Tx) error {
	for _, t := range s.tables {
		u, err := usable(ctx, tx, t)
		if err != nil {
			return err
		}
		for name, create := range u.triggers() {
			var have string
			err := tx.QueryRowContext(ctx, "SELECT sql FROM sqlite_master WHERE type = 'trigger' AND name = ?", name).Scan(&have)
			if err != nil && !errors.Is(err, sql.ErrNoRows) {
				return err
			}
			if have == create {
				continue
			}
			if _, err := tx.ExecContext(ctx, "DROP TRIGGER IF EXISTS "+name); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, create); err != nil {
				return err
			}
		}
	}
	return nil
}

// Release implements transfer.Source.
func (s *Store) Release(ctx context.Context, m cells.MoveRef) error {
	err := s.tx(ctx, func(tx *sql.Tx) error { return s.release(ctx, tx, m.ID) })
	return errors.Join(err, s.trim(ctx))
}

// release keeps the row, which says that the rows here are the move's to remove.
func (s *Store) release(ctx context.Context, tx *sql.Tx, move cells.MoveID) error {
	if _, err := tx.ExecContext(ctx, "UPDATE cell_transfer_capture SET released = 1 WHERE move = ?", move); err != nil {
		return err
	}
	return s.disarm(ctx, tx)
}

// disarm ends the capturing when no move needs it any more. While others do, the
// log of this one is left to trim.
func (s *Store) disarm(ctx context.Context, tx *sql.Tx) error {
	var live bool
	if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE released = 0 AND ended = '')").Scan(&live); err != nil || live {
		return err
	}
	// Without a condition SQLite drops the pages and reads no rows.
	if _, err := tx.ExecContext(ctx, "DELETE FROM cell_transfer_log"); err != nil {
		return err
	}
	for _, t := range s.tables {
		for _, op := range []string{"insert", "update", "delete"} {
			if _, err := tx.ExecContext(ctx, "DROP TRIGGER IF EXISTS "+triggerName(t.Name, op)); err != nil {
				return err
			}
		}
	}
	return nil
}

// trimRows bounds what one transaction takes from the log: it holds the write lock of
// the whole database.
const trimRows = 1000

// trim frees the log of tenants that no capture is for, in small pieces.
func (s *Store) trim(ctx context.Context) error {
	after := ""
	for {
		var tenant sql.NullString
		var live bool
		err := s.reading(ctx, func(tx *sql.Tx) error {
			if err := tx.QueryRowContext(ctx, "SELECT min(tenant) FROM cell_transfer_log WHERE tenant > ?", after).Scan(&tenant); err != nil || !tenant.Valid {
				return err
			}
			return tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE tenant = ? AND released = 0 AND ended = '')", tenant.String).Scan(&live)
		})
		if err != nil || !tenant.Valid {
			return err
		}
		after = tenant.String
		if live {
			continue
		}
		// Another capture of the tenant may begin meanwhile.
		if err := s.forgetLog(ctx, `FROM cell_transfer_log WHERE tenant = ?1
			AND NOT EXISTS (SELECT 1 FROM cell_transfer_capture WHERE tenant = ?1 AND released = 0 AND ended = '')`, after); err != nil {
			return err
		}
	}
}

// forgetLog deletes what a query selects of the log, in small pieces: old is the query
// from its FROM on.
func (s *Store) forgetLog(ctx context.Context, old string, args ...any) error {
	q := fmt.Sprintf("DELETE FROM cell_transfer_log WHERE seq IN (SELECT seq %s LIMIT %d)", old, trimRows)
	for {
		var gone int64
		err := s.tx(ctx, func(tx *sql.Tx) error {
			r, err := tx.ExecContext(ctx, q, args...)
			if err == nil {
				gone, err = r.RowsAffected()
			}
			return err
		})
		if err != nil || gone < trimRows {
			return err
		}
	}
}

// Applied implements transfer.Source: the log before pos is not needed any more.
// It is cut in small pieces.
func (s *Store) Applied(ctx context.Context, m cells.MoveRef, pos transfer.Position) error {
	n, err := pos.Number()
	if err != nil {
		return err
	}
	const old = `FROM cell_transfer_log WHERE tenant = ?1 AND seq <= ?2
		AND (SELECT count(*) FROM cell_transfer_capture WHERE tenant = ?1 AND released = 0) = 1`
	var some bool
	err = s.reading(ctx, func(tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 "+old+")", m.Tenant, int64(n)).Scan(&some)
	})
	if err != nil || !some {
		return err
	}
	return s.forgetLog(ctx, old, m.Tenant, int64(n))
}

// Head implements transfer.Source.
func (s *Store) Head(ctx context.Context, _ cells.MoveRef) (pos transfer.Position, err error) {
	err = s.reading(ctx, func(tx *sql.Tx) error {
		n, err := head(ctx, tx)
		pos = transfer.MakePosition(n)
		return err
	})
	s.gave()
	return pos, err
}

// Changes implements transfer.Source.
func (s *Store) Changes(ctx context.Context, m cells.MoveRef, from transfer.Position, yield func(transfer.Batch) error) error {
	at, err := from.Number()
	if err != nil {
		return err
	}
	wait := pollMin
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		woken := s.woken()
		var now uint64
		var out []transfer.Batch
		err := s.reading(ctx, func(tx *sql.Tx) error {
			if err := s.captured(ctx, tx, m); err != nil {
				return err
			}
			var err error
			if now, err = head(ctx, tx); err != nil || now <= at {
				return err
			}
			// Small pieces are handed over after the read has ended, so that a slow reader
			// holds no old pages of the database.
			return s.diff(ctx, tx, m.Tenant, at, now, func(b transfer.Batch) error {
				if out == nil || len(out) < 16 {
					out = append(out, b)
					return nil
				}
				for _, o := range append(out, b) {
					if err := yield(o); err != nil {
						return err
					}
				}
				out = out[:0]
				return nil
			})
		})
		if err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return err
		}
		for _, b := range out {
			if err := yield(b); err != nil {
				return err
			}
		}
		if now > at {
			at, wait = now, pollMin
		} else {
			wait = min(2*wait, pollMax)
		}
		t.Reset(wait)
		select {
		case <-t.C:
		case <-woken:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// diff yields what brings a copy from one position to another: for each key that
// was noted in between, the row as it is now or that it is gone. tx reads at
// position to. The last batch has End set, the others have not.
func (s *Store) diff(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, from, to uint64, yield func(transfer.Batch) error) error {
	for _, t := range s.tables {
		var any bool
		if err := tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM cell_transfer_log WHERE tenant = ? AND seq > ? AND seq <= ? AND tbl = ?)",
			tenant, int64(from), int64(to), t.Name).Scan(&any); err != nil {
			return err
		}
		if !any {
			continue
		}
		u, err := usable(ctx, tx, t)
		if err != nil {
			return err
		}
		if err := u.diff(ctx, tx, tenant, from, to, yield); err != nil {
			return err
		}
	}
	return yield(transfer.Batch{Upto: transfer.MakePosition(to), End: true})
}

func (t *table) diff(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, from, to uint64, yield func(transfer.Batch) error) error {
	ks, on := make([]string, len(t.keys)), ""
	for i, k := range t.keys {
		ks[i] = fmt.Sprintf("k%d", i+1)
		on += fmt.Sprintf(" AND r.%s = c.k%d", quote(k), i+1)
	}
	if len(ks) == 0 {
		ks = []string{"NULL AS k0"}
	}
	names := t.names()
	// What is there at all is seen by the tenant column, which is never NULL then.
	q := fmt.Sprintf("SELECT r.%[1]s IS NOT NULL, %[2]s, %[3]s FROM (SELECT DISTINCT %[4]s FROM cell_transfer_log WHERE tenant = ?1 AND seq > ?2 AND seq <= ?3 AND tbl = ?4) AS c LEFT JOIN %[5]s AS r ON r.%[1]s = ?1%[6]s",
		quote(t.TenantColumn), quoted("c.", columnsOf(ks)), exprs("r.", names), joined(ks), quote(t.Name), on)
	rows, err := tx.QueryContext(ctx, q, tenant, int64(from), int64(to), t.Name)
	if err != nil {
		return err
	}
	defer rows.Close()
	p := packer{table: t.Name, yield: yield}
	sc := newScanner(1 + len(ks) + len(names))
	for rows.Next() {
		vals, err := sc.scan(rows)
		if err != nil {
			return err
		}
		there := vals[0] == int64(1)
		key, row := vals[1:1+len(t.keys)], vals[1+len(ks):]
		tag := byte(tagGone)
		if there {
			tag = tagRow
		}
		at := len(p.data)
		if p.data, err = appendValues(append(p.data, tag), key); err != nil {
			return err
		}
		if there {
			if p.data, err = appendValues(p.data, row); err != nil {
				return err
			}
		}
		if err := p.added(at); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return p.flush()
}

func columnsOf(ks []string) []string {
	if len(ks) == 1 && ks[0] == "NULL AS k0" {
		return []string{"k0"}
	}
	return ks
}

func joined(ks []string) string {
	out := ks[0]
	for _, k := range ks[1:] {
		out += ", " + k
	}
	return out
}

// packer makes batches of a bounded size.
type packer struct {
	table string
	data  []byte
	count int64
	last  []byte // key of the last row, if the caller keeps it
	yield func(transfer.Batch) error
}

// batchRows bounds a batch, and so the rows that one import transaction writes.
const batchRows = 1000

// added notes that a row was appended at the given offset.
func (p *packer) added(at int) error {
	if len(p.data)-at > transfer.MaxRowBytes {
		return fmt.Errorf("%w: a row of table %s has %d bytes", transfer.ErrTooLarge, p.table, len(p.data)-at)
	}
	if p.count++; p.count < batchRows && len(p.data) < transfer.BatchBytes {
		return nil
	}
	return p.flush()
}

func (p *packer) flush() error {
	if p.count == 0 {
		return nil
	}
	b := transfer.Batch{Table: p.table, Data: p.data, Count: p.count, LastKey: p.last}
	p.data, p.count, p.last = nil, 0, nil
	return p.yield(b)
}
