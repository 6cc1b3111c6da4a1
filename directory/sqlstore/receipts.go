// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
)

// microsOrZero writes the zero time as 0.
func microsOrZero(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return micros(t)
}

// SaveSeen implements [directory.Store].
func (s *Store) SaveSeen(ctx context.Context, r directory.SeenRow) (saved bool, err error) {
	err = s.tx(ctx, "seen", func(tx *Tx) error {
		res, err := tx.ExecContext(ctx, `INSERT INTO seen (move, edge, instance, seq, refused, first_at, last_at) VALUES (?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (move, edge, instance) DO UPDATE SET seq = excluded.seq, refused = excluded.refused,
			first_at = excluded.first_at, last_at = excluded.last_at WHERE excluded.seq > seen.seq`,
			r.Move, r.Edge, r.Instance, r.Seq, r.Refused, microsOrZero(r.First), microsOrZero(r.Last))
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		saved = n > 0
		return err
	})
	return saved, err
}

// Seen implements [directory.Store].
func (s *Store) Seen(ctx context.Context, move cells.MoveID) ([]directory.SeenRow, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT edge, instance, seq, refused, first_at, last_at FROM seen WHERE move = ? ORDER BY edge, instance`, move)
	if err != nil {
		return nil, s.translate("seen", err)
	}
	defer func() { _ = rows.Close() }()
	var out []directory.SeenRow
	for rows.Next() {
		r := directory.SeenRow{Move: move}
		var first, last int64
		if err := rows.Scan(&r.Edge, &r.Instance, &r.Seq, &r.Refused, &first, &last); err != nil {
			return nil, s.translate("seen", err)
		}
		if r.Refused > 0 {
			r.First, r.Last = fromMicros(first), fromMicros(last)
		}
		out = append(out, r)
	}
	return out, s.translate("seen", rows.Err())
}

func receiptEntries(ctx context.Context, q queryer, move cells.MoveID) ([][]byte, error) {
	rows, err := q.QueryContext(ctx, `SELECT entry FROM receipts WHERE move = ? ORDER BY n`, move)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out [][]byte
	for rows.Next() {
		var entry string
		if err := rows.Scan(&entry); err != nil {
			return nil, err
		}
		out = append(out, []byte(entry))
	}
	return out, rows.Err()
}

// AppendReceipt implements [directory.Store].
func (s *Store) AppendReceipt(ctx context.Context, move cells.MoveID, build func([][]byte) (directory.ReceiptChange, error)) error {
	return s.tx(ctx, "receipt", func(tx *Tx) error { return changeReceipt(ctx, tx, move, build) })
}

func changeReceipt(ctx context.Context, tx *Tx, move cells.MoveID, build func([][]byte) (directory.ReceiptChange, error)) error {
	entries, err := receiptEntries(ctx, tx, move)
	if err != nil {
		return err
	}
	c, err := build(entries)
	if err != nil {
		return err
	}
	if c.Entry != nil {
		if _, err := tx.ExecContext(ctx, `INSERT INTO receipts (move, n, entry) VALUES (?, ?, ?)`, move, len(entries), string(c.Entry)); err != nil {
			return err
		}
	}
	switch {
	case c.EndAt == nil:
	case c.EndAt.IsZero():
		_, err = tx.ExecContext(ctx, `DELETE FROM receipt_ends WHERE move = ?`, move)
	default:
		_, err = tx.ExecContext(ctx, `INSERT INTO receipt_ends (move, at) VALUES (?, ?) ON CONFLICT (move) DO UPDATE SET at = excluded.at`, move, micros(*c.EndAt))
	}
	return err
}

// EndReceipts implements [directory.Store].
func (s *Store) EndReceipts(ctx context.Context, due time.Time, limit int, build func(cells.MoveID, [][]byte) (directory.ReceiptChange, error)) (n int, err error) {
	moves, err := dueReceipts(ctx, s.read, due, 1)
	if err != nil || len(moves) == 0 { // the usual case writes nothing
		return 0, s.translate("receipts", err)
	}
	err = s.tx(ctx, "receipts", func(tx *Tx) error {
		moves, err := dueReceipts(ctx, tx, due, limit)
		if err != nil {
			return err
		}
		n = len(moves)
		for _, m := range moves {
			if err := changeReceipt(ctx, tx, m, func(entries [][]byte) (directory.ReceiptChange, error) { return build(m, entries) }); err != nil {
				return err
			}
		}
		return nil
	})
	return n, err
}

func dueReceipts(ctx context.Context, q queryer, due time.Time, limit int) ([]cells.MoveID, error) {
	rows, err := q.QueryContext(ctx, `SELECT move FROM receipt_ends WHERE at <= ? ORDER BY at, move LIMIT ?`, micros(due), limit)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out []cells.MoveID
	for rows.Next() {
		var m cells.MoveID
		if err := rows.Scan(&m); err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, rows.Err()
}

// Receipt implements [directory.Store].
func (s *Store) Receipt(ctx context.Context, move cells.MoveID) ([][]byte, error) {
	out, err := receiptEntries(ctx, s.read, move)
	return out, s.translate("receipt", err)
}
