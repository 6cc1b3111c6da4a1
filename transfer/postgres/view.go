// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// view is a REPEATABLE READ transaction whose snapshot shows exactly what had
// committed before at.
type view struct {
	s    *Store
	m    cells.MoveRef
	at   pglogrepl.LSN
	conn *pgxpool.Conn
	cat  *catalog
	once sync.Once
}

// View implements transfer.Source. The position is the consistent point of a
// temporary slot, the snapshot the one that it exports: a transaction is in it
// exactly if its commit record stands before that point.
func (s *Store) View(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	v, err := s.sharedView(ctx, m)
	if err != nil {
		return nil, err
	}
	if v == nil {
		e, err := s.export(ctx, viewName(s.objectName(m.ID)), true)
		if err != nil {
			return nil, err
		}
		defer hangUp(e.repl) // the temporary slot goes with it; the snapshot stays with its importer
		if v, err = s.openView(ctx, m, e.at, e.first()); err != nil {
			return nil, err
		}
	}
	// Something behind the view, so that whoever reads changes up to it sees the end.
	if _, err := s.message(ctx, m.ID); err != nil {
		_ = v.Close()
		return nil, err
	}
	return v, nil
}

// Final implements transfer.Source. Nothing of the tenant can commit between the
// message and the snapshot, in either order: the fence is closed, and the events are paused.
func (s *Store) Final(ctx context.Context, m cells.MoveRef) (transfer.View, error) {
	f, err := s.cfg.Keeper.Fence(ctx, m.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return nil, err
	}
	if f.Open || f.Epoch != m.CloseEpoch() || f.Move != m.ID {
		return nil, fmt.Errorf("%w: transfer/postgres: the fence of tenant %s is not closed at epoch %d by move %s", cells.ErrNotApplicable, m.Tenant, m.CloseEpoch(), m.ID)
	}
	// Beside each other: both are behind the closed fence, whichever comes first.
	type written struct {
		at  pglogrepl.LSN
		err error
	}
	message := make(chan written, 1)
	go func() {
		at, err := s.message(ctx, m.ID)
		message <- written{at, err}
	}()
	v, err := s.openView(ctx, m, 0, "SELECT 1")
	w := <-message
	if err == nil && w.err != nil {
		err = errors.Join(w.err, v.Close())
	}
	if err != nil {
		return nil, err
	}
	v.at = w.at
	return v, nil
}

func (s *Store) openView(ctx context.Context, m cells.MoveRef, at pglogrepl.LSN, first string) (*view, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, translate(err)
	}
	v := &view{s: s, m: m, at: at, conn: conn}
	if _, err = conn.Exec(ctx, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; "+first+"; "+planning); err == nil {
		v.cat, err = s.capturedTables(ctx, conn, m)
	}
	if err != nil {
		_ = v.Close()
		return nil, translate(err)
	}
	return v, nil
}

// capturedTables loads the catalog if it is still that of the capture.
func (s *Store) capturedTables(ctx context.Context, q querier, m cells.MoveRef) (*catalog, error) {
	c, err := s.load(ctx, q, m.ID)
	if err == nil {
		err = c.then.same(c.shape, m.Source)
	}
	if err == nil {
		err = c.usable()
	}
	return c, err
}

// explain says that the schema has changed if that is why a read failed.
func (v *view) explain(ctx context.Context, err error) error {
	if code := sqlState(err); code == "" {
		return err
	}
	if serr := v.s.unchanged(context.WithoutCancel(ctx), v.s.pool, v.m); errors.Is(serr, transfer.ErrSchemaChanged) {
		return fmt.Errorf("%w: %w", serr, err)
	}
	return err
}

func (v *view) Position() transfer.Position { return positionOf(v.at) }

func (v *view) Close() error {
	v.once.Do(func() {
		if v.conn.Conn().IsClosed() {
			v.conn.Release()
			return
		}
		if _, err := v.conn.Exec(context.Background(), "ROLLBACK"); err != nil {
			_ = v.conn.Conn().Close(context.Background())
		}
		v.conn.Release()
	})
	return nil
}

// lost says that the view is gone when its connection is.
func (v *view) lost(err error) error {
	if err != nil && v.conn.Conn().IsClosed() {
		return fmt.Errorf("%w: %w", transfer.ErrViewLost, err)
	}
	return translate(err)
}

func (v *view) Changes(ctx context.Context, from transfer.Position, yield func(transfer.Batch) error) error {
	return v.s.changes(ctx, v.m, from, v.at, yield)
}

func (v *view) Rows(ctx context.Context, name string, after []byte, yield func(transfer.Batch) error) error {
	t, err := v.cat.table(name)
	if err != nil {
		return err
	}
	where := t.where(v.m.Tenant)
	order := ""
	if len(t.keys) > 0 {
		order = " ORDER BY " + idents(t.keys)
	}
	if after != nil {
		key, rest, err := readTexts(after, len(t.keys))
		if err != nil || len(rest) > 0 {
			return errShort
		}
		if len(t.keys) == 0 {
			where += " AND false"
		} else {
			where += fmt.Sprintf(" AND (%s) > (%s)", idents(t.keys), list(key, ", ", func(i int, k string) string { return literal(k) + "::" + t.cols[t.keyAt[i]].typ }))
		}
	}
	query := fmt.Sprintf("COPY (SELECT %s FROM %s WHERE %s%s) TO STDOUT", idents(t.names()), t.sql(), where, order)
	copied := func(l io.Writer, failed *error, end func() error) error {
		_, err := v.conn.Conn().PgConn().CopyTo(ctx, l, query)
		if *failed != nil {
			return *failed
		}
		if err != nil {
			return v.explain(ctx, v.lost(err))
		}
		return end()
	}
	if transfer.BinaryRows(ctx) && t.binary() {
		query += copyOptions(transfer.FormBinary)
		l := newTuples(t, yield)
		return copied(l, &l.err, l.end)
	}
	l := newLines(t, yield)
	return copied(l, &l.err, l.end)
}

func (v *view) Fetch(ctx context.Context, set transfer.KeySet, yield func(transfer.Batch) error) error {
	t, keys, err := v.cat.keysOf(set)
	if err != nil {
		return err
	}
	l := newLines(t, yield)
	for at := 0; at < len(keys); at += 500 {
		part := keys[at:min(len(keys), at+500)]
		from := fmt.Sprintf("%s AS t WHERE t.%s", t.sql(), t.where(v.m.Tenant))
		if len(t.keys) > 0 {
			tuples := make([]string, len(part))
			for i, k := range part {
				tuples[i] = "(" + list(k, ", ", func(i int, k string) string { return literal(k) + "::" + t.cols[t.keyAt[i]].typ }) + ")"
			}
			source := fmt.Sprintf("(VALUES %s) AS u (%s)", strings.Join(tuples, ", "), idents(t.keys))
			from = fmt.Sprintf("%s JOIN %s AS t ON %s", t.keyed(source, v.m.Tenant), t.sql(), t.onKey())
		}
		q := fmt.Sprintf("COPY (SELECT %s FROM %s) TO STDOUT", list(t.names(), ", ", func(_ int, n string) string { return "t." + ident(n) }), from)
		if _, err := v.conn.Conn().PgConn().CopyTo(ctx, l, q); err != nil {
			return v.explain(ctx, v.lost(errors.Join(l.err, err)))
		}
	}
	return l.end()
}

func (v *view) Digests(ctx context.Context, sets []transfer.KeySet) ([]transfer.Digest, error) {
	ds, err := digests(ctx, v.conn, v.cat, v.m.Tenant, sets)
	return ds, v.explain(ctx, v.lost(err))
}

// keysOf is a key set's table and its keys, decoded.
func (c *catalog) keysOf(set transfer.KeySet) (*table, [][]string, error) {
	t, err := c.table(set.Table)
	if err != nil {
		return nil, nil, err
	}
	keys, err := t.readKeys(set)
	return t, keys, err
}

// readKeys decodes a key set.
func (t *table) readKeys(set transfer.KeySet) ([][]string, error) {
	out := make([][]string, 0, set.Count)
	data := set.Data
	for range set.Count {
		key, rest, err := readTexts(data, len(t.keys))
		if err != nil {
			return nil, err
		}
		out, data = append(out, key), rest
	}
	if len(data) > 0 {
		return nil, errShort
	}
	return out, nil
}

// columnsOf turns keys into one array for each column.
func columnsOf(keys [][]string, n int) []any {
	out := make([]any, n)
	for i := range out {
		col := make([]string, len(keys))
		for j, k := range keys {
			col[j] = k[i]
		}
		out[i] = col
	}
	return out
}
