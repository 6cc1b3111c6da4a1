// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// view is one read transaction: the database at one number of the change log.
type view struct {
	s      *Store
	tx     *sql.Tx
	tenant cells.TenantID
	at     uint64
	tables map[string]*table
}

// View implements transfer.Source.
func (s *Store) View(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	return s.view(ctx, m)
}

// Final implements transfer.Source.
func (s *Store) Final(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	f, err := s.cfg.Keeper.Fence(ctx, m.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return nil, err
	}
	if f.Open || f.Epoch != m.CloseEpoch() || f.Move != m.ID {
		return nil, fmt.Errorf("%w: transfer/sqlite: the fence of tenant %s is not closed at epoch %d by move %s", cells.ErrNotApplicable, m.Tenant, m.CloseEpoch(), m.ID)
	}
	v, err := s.view(ctx, m)
	s.gave()
	return v, err
}

func (s *Store) view(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	// The view outlives the call that opens it.
	tx, err := s.read.BeginTx(context.WithoutCancel(ctx), nil)
	if err != nil {
		return nil, translate(err)
	}
	v := &view{s: s, tx: tx, tenant: m.Tenant}
	if v.at, err = head(ctx, tx); err == nil {
		if err = s.captured(ctx, tx, m); err == nil {
			v.tables, err = s.usables(ctx, tx)
		}
	}
	if err != nil {
		_ = v.Close()
		return nil, translate(err)
	}
	return v, nil
}

func (v *view) Position() transfer.Position { return transfer.MakePosition(v.at) }

func (v *view) Close() error {
	if err := v.tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) {
		return err
	}
	return nil
}

func (v *view) Changes(ctx context.Context, from transfer.Position, yield func(transfer.Batch) error) error {
	at, err := from.Number()
	if err != nil {
		return err
	}
	return translate(v.s.diff(ctx, v.tx, v.tenant, at, v.at, yield))
}

func (v *view) Rows(ctx context.Context, name string, after []byte, yield func(transfer.Batch) error) error {
	t := v.tables[name]
	if t == nil {
		return unknown(name)
	}
	cond, args := "", []any{v.tenant}
	if after != nil {
		key, rest, err := readValues(after, len(t.keys))
		if err != nil || len(rest) > 0 {
			return errShort
		}
		cond, args = t.after(), append(args, key...)
	}
	rows, err := v.tx.QueryContext(ctx, t.selectRows(cond), args...)
	if err != nil {
		return translate(err)
	}
	defer rows.Close()
	index := t.keyIndex()
	p := packer{table: name}
	// One batch is held back, so that the last one can say so.
	var held *transfer.Batch
	p.yield = func(b transfer.Batch) error {
		var err error
		if held != nil {
			err = yield(*held)
		}
		held = &b
		return err
	}
	sc := newScanner(len(t.cols))
	for rows.Next() {
		vals, err := sc.scan(rows)
		if err != nil {
			return err
		}
		at := len(p.data)
		if p.data, err = appendValues(p.data, vals); err != nil {
			return err
		}
		p.last = nil
		for _, i := range index {
			if p.last, err = appendValue(p.last, vals[i]); err != nil {
				return err
			}
		}
		if err := p.added(at); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return translate(err)
	}
	if err := p.flush(); err != nil {
		return err
	}
	if held == nil {
		held = &transfer.Batch{Table: name}
	}
	held.End = true
	return yield(*held)
}

func (v *view) Fetch(ctx context.Context, set transfer.KeySet, yield func(transfer.Batch) error) error {
	t := v.tables[set.Table]
	if t == nil {
		return unknown(set.Table)
	}
	p := packer{table: set.Table, yield: yield}
	err := t.each(ctx, v.tx, v.tenant, set, func(vals []any) (err error) {
		at := len(p.data)
		if p.data, err = appendValues(p.data, vals); err != nil {
			return err
		}
		return p.added(at)
	})
	if err != nil {
		return translate(err)
	}
	return p.flush()
}

func (v *view) Digests(ctx context.Context, sets []transfer.KeySet) ([]transfer.Digest, error) {
	ds, err := digests(ctx, v.tx, v.tables, v.tenant, sets)
	return ds, translate(err)
}

// each calls f with every row of set.
func (t *table) each(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, set transfer.KeySet, f func([]any) error) error {
	sc := newScanner(len(t.cols))
	read := func(rows *sql.Rows, err error) error {
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			vals, err := sc.scan(rows)
			if err != nil {
				return err
			}
			if err := f(vals); err != nil {
				return err
			}
		}
		return rows.Err()
	}
	if set.All {
		return read(tx.QueryContext(ctx, t.selectRows(""), tenant))
	}
	stmt, err := tx.PrepareContext(ctx, t.selectRows(t.byKey()))
	if err != nil {
		return err
	}
	defer stmt.Close()
	data := set.Data
	for range set.Count {
		key, rest, err := readValues(data, len(t.keys))
		if err != nil {
			return err
		}
		data = rest
		if err := read(stmt.QueryContext(ctx, append([]any{tenant}, key...)...)); err != nil {
			return err
		}
	}
	if len(data) > 0 {
		return errShort
	}
	return nil
}

// digests adds up a hash of every row, so that their order does not matter.
func digests(ctx context.Context, tx *sql.Tx, tables map[string]*table, tenant cells.TenantID, sets []transfer.KeySet) ([]transfer.Digest, error) {
	out := make([]transfer.Digest, len(sets))
	var buf []byte
	for i, set := range sets {
		t := tables[set.Table]
		if t == nil {
			return nil, unknown(set.Table)
		}
		var lanes [4]uint64
		out[i].Table = set.Table
		err := t.each(ctx, tx, tenant, set, func(vals []any) (err error) {
			if buf, err = appendValues(buf[:0], vals); err != nil {
				return err
			}
			sum := sha256.Sum256(buf)
			for l := range lanes {
				lanes[l] += binary.BigEndian.Uint64(sum[8*l:])
			}
			out[i].Rows++
			return nil
		})
		if err != nil {
			return nil, err
		}
		out[i].Sum = fmt.Sprintf("%016x%016x%016x%016x", lanes[0], lanes[1], lanes[2], lanes[3])
	}
	return out, nil
}
