// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

const (
	// flushChanges is when changes that do not end yet are written: the write lock of
	// the whole database is never held for longer than that takes.
	flushChanges = 5000
	// putRows is the number of rows of one INSERT.
	putRows = 20
)

// imp is the import of one move. All its transactions go through tx.
type imp struct {
	s      *Store
	m      cells.MoveRef
	lock   *fileLock
	gen    int64
	state  transfer.State
	tables map[string]*table
	// changes taken since the last commit, and where they lead.
	pending []change
	upto    transfer.Position
	whole   bool
	// late are rows whose unique values another row still has, which changes too; by
	// table and key.
	late map[string]change
}

// change is a row as it shall be, or a key that shall be gone.
type change struct {
	t    *table
	key  []any
	row  []any  // nil when gone
	code []byte // the key, encoded
}

// id names the row that changes.
func (c change) id() string { return c.t.Name + "\x00" + string(c.code) }

// Stale implements transfer.Sink.
func (s *Store) Stale(ctx context.Context, m cells.MoveRef) error {
	f, err := s.cfg.Keeper.Fence(ctx, m.Tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return transfer.StaleAt(f, m)
}

// Import implements transfer.Sink.
func (s *Store) Import(ctx context.Context, m cells.MoveRef) (transfer.Import, error) {
	i := &imp{s: s, m: m}
	var err error
	if i.lock, err = lockTenant(ctx, s.cfg.Path, m.Tenant); err != nil {
		return nil, err
	}
	if err := i.claim(ctx); err != nil {
		i.lock.unlock()
		return nil, translate(err)
	}
	return i, nil
}

func (i *imp) claim(ctx context.Context) error {
	s, m := i.s, i.m
	// Rows that are not the move's are found before anything is claimed, and again in
	// the transaction that begins the import.
	err := s.reading(ctx, func(tx *sql.Tx) (err error) {
		if i.tables, err = s.usables(ctx, tx); err != nil {
			return err
		}
		return s.noForeignRows(ctx, tx, m)
	})
	if err != nil {
		return err
	}
	order := cells.FenceOrder{Cell: m.Target, Tenant: m.Tenant, Epoch: m.CloseEpoch(), Move: m.ID}
	if err := s.cfg.Keeper.CloseFence(ctx, order); err != nil {
		return err
	}
	return s.admitted(ctx, m.Tenant, m.CloseEpoch(), m.ID, func(tx *sql.Tx) error {
		if err := s.noForeignRows(ctx, tx, m); err != nil {
			return err
		}
		first, err := i.inherit(ctx, tx)
		if err != nil {
			return err
		}
		return i.enter(ctx, tx, first)
	})
}

// noForeignRows fails if there are rows of the tenant that the move has not brought.
func (s *Store) noForeignRows(ctx context.Context, tx *sql.Tx, m cells.MoveRef) error {
	var known bool
	if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM cell_transfer_import WHERE move = ?1 OR move = ?2 AND tenant = ?3)
		OR EXISTS (SELECT 1 FROM cell_transfer_capture WHERE move = ?2 AND tenant = ?3 AND role IN (?4, ?5))`, m.ID, m.Undoes, m.Tenant, roleMove, roleAdopted).Scan(&known); err != nil || known {
		return err
	}
	name, err := s.anyRows(ctx, tx, m.Tenant)
	if err == nil && name != "" {
		err = fmt.Errorf("%w: transfer/sqlite: table %s already holds rows of tenant %s that move %s has not brought; reclaim what an earlier move left, or remove them",
			cells.ErrInvalid, name, m.Tenant, m.ID)
	}
	return err
}

// anyRows returns the name of a table that holds rows of the tenant, or "".
func (s *Store) anyRows(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) (string, error) {
	for _, t := range s.tables {
		var any bool
		if err := tx.QueryRowContext(ctx, fmt.Sprintf("SELECT EXISTS (SELECT 1 FROM %s WHERE %s = ?)", quote(t.Name), quote(t.TenantColumn)), tenant).Scan(&any); err != nil {
			return "", err
		}
		if any {
			return t.Name, nil
		}
	}
	return "", nil
}

// tx runs f with the state that it may change, and keeps what it leaves.
func (i *imp) tx(ctx context.Context, f func(tx *sql.Tx, st *transfer.State) error) error {
	if i.lock == nil && i.gen == 0 {
		return cells.ErrClosed
	}
	next := i.State()
	err := i.s.admitted(ctx, i.m.Tenant, i.m.CloseEpoch(), i.m.ID, func(tx *sql.Tx) error {
		if err := i.current(ctx, tx); err != nil {
			return err
		}
		if err := f(tx, &next); err != nil {
			return err
		}
		state, err := json.Marshal(next)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "UPDATE cell_transfer_import SET state = ? WHERE move = ?", string(state), i.m.ID)
		return err
	})
	if err == nil {
		i.state = next
	}
	return i.explain(ctx, err)
}

// current fails if another process has taken the import over, or it is finished.
func (i *imp) current(ctx context.Context, q querier) error {
	var gen int64
	var mark sql.NullString
	err := q.QueryRowContext(ctx, "SELECT gen, state ->> '$.mark' FROM cell_transfer_import WHERE move = ?", i.m.ID).Scan(&gen, &mark)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("%w: transfer/sqlite: the import of move %s was cleaned up", cells.ErrStaleOrder, i.m.ID)
	case err != nil:
		return err
	case gen != i.gen:
		return transfer.ErrOvertaken
	case mark.String != "":
		return fmt.Errorf("%w: transfer/sqlite: the import of move %s is finished", cells.ErrStaleOrder, i.m.ID)
	}
	return nil
}

func (i *imp) State() transfer.State {
	st := i.state
	st.Tables = maps.Clone(st.Tables)
	if st.Tables == nil {
		st.Tables = map[string]transfer.TableState{}
	}
	return st
}

func (i *imp) Restart(ctx context.Context, start transfer.Position, opts transfer.RemoveOptions) error {
	if len(i.state.Tables) > 0 {
		err := i.s.removeRows(ctx, i.m.Tenant, opts, func(f func(*sql.Tx) error) error {
			return i.tx(ctx, func(tx *sql.Tx, _ *transfer.State) error { return f(tx) })
		})
		if err != nil {
			return err
		}
	}
	return i.tx(ctx, func(tx *sql.Tx, st *transfer.State) error {
		if _, err := tx.ExecContext(ctx, "DELETE FROM cell_transfer_touched WHERE move = ?", i.m.ID); err != nil {
			return err
		}
		*st = transfer.State{Start: start, Applied: start, Tables: map[string]transfer.TableState{}, Shape: st.Shape}
		return nil
	})
}

func (i *imp) Skip(ctx context.Context, pos transfer.Position) error {
	return i.tx(ctx, func(_ *sql.Tx, st *transfer.State) error {
		if len(st.Tables) > 0 {
			return fmt.Errorf("%w: transfer/sqlite: rows are imported already", cells.ErrNotApplicable)
		}
		st.Applied = pos
		return nil
	})
}

func (i *imp) Copy(ctx context.Context, b transfer.Batch) error {
	t := i.tables[b.Table]
	if t == nil {
		return unknown(b.Table)
	}
	rows, err := t.decode(b)
	if err != nil {
		return err
	}
	start := time.Now()
	err = i.tx(ctx, func(tx *sql.Tx, st *transfer.State) error {
		if err := t.putAll(ctx, tx, rows); isUnique(err) {
			return fmt.Errorf("%w: transfer/sqlite: a row of tenant %s in table %s has a value that must be unique and that another row has here: %w; let the unique index carry %s",
				cells.ErrInvalid, i.m.Tenant, t.Name, err, t.TenantColumn)
		} else if err != nil {
			return err
		}
		ts := st.Tables[b.Table]
		ts.Rows += b.Count
		ts.Done = b.End
		if ts.After = b.LastKey; b.End {
			ts.After = nil
		}
		st.Tables[b.Table] = ts
		st.Copied = true
		for name := range i.tables {
			st.Copied = st.Copied && st.Tables[name].Done
		}
		return nil
	})
	if err == nil && !b.End {
		i.breathe(ctx, time.Since(start))
	}
	return err
}

// breathe leaves the write lock to others for a while: SQLite's waiters sleep
// between their attempts and would lose against a steady writer.
func (i *imp) breathe(ctx context.Context, held time.Duration) {
	t := time.NewTimer(min(held/3, 20*time.Millisecond))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (t *table) decode(b transfer.Batch) ([][]any, error) {
	out := make([][]any, 0, b.Count)
	data := b.Data
	for len(data) > 0 {
		row, rest, err := readValues(data, len(t.cols))
		if err != nil {
			return nil, err
		}
		out, data = append(out, row), rest
	}
	if int64(len(out)) != b.Count {
		return nil, errShort
	}
	return out, nil
}

func (t *table) putAll(ctx context.Context, tx *sql.Tx, rows [][]any) error {
	for _, n := range []int{putRows, 1} {
		if len(rows) < n {
			continue
		}
		stmt, err := tx.PrepareContext(ctx, t.put(n))
		if err != nil {
			return err
		}
		defer stmt.Close()
		args := make([]any, 0, n*len(t.cols))
		for ; len(rows) >= n; rows = rows[n:] {
			args = args[:0]
			for _, r := range rows[:n] {
				args = append(args, r...)
			}
			if _, err := stmt.ExecContext(ctx, args...); err != nil {
				return err
			}
		}
	}
	return nil
}

func (i *imp) Apply(ctx context.Context, b transfer.Batch) error {
	data := b.Data
	if b.Table != "" {
		t := i.tables[b.Table]
		if t == nil {
			return unknown(b.Table)
		}
		_, begun := i.state.Tables[b.Table]
		for len(data) > 0 {
			tag := data[0]
			key, rest, err := readValues(data[1:], len(t.keys))
			if err != nil {
				return err
			}
			c := change{t: t, key: key, code: data[1 : len(data)-len(rest) : len(data)-len(rest)]}
			switch tag {
			case tagRow:
				if c.row, rest, err = readValues(rest, len(t.cols)); err != nil {
					return err
				}
			case tagGone:
			default:
				return errShort
			}
			if data = rest; begun {
				i.pending = append(i.pending, c)
			}
		}
	}
	i.whole = b.End
	if b.End {
		i.upto = b.Upto
	} else if len(i.pending) >= flushChanges {
		return i.write(ctx, "")
	}
	return nil
}

func (i *imp) Commit(ctx context.Context) error {
	if i.upto == "" && len(i.pending) == 0 {
		return nil
	}
	if !i.whole {
		return fmt.Errorf("%w: transfer/sqlite: commit of changes that have not ended", cells.ErrInvalid)
	}
	if len(i.pending) == 0 {
		// Nothing to keep: after a crash the same changes are read as none again.
		i.state.Applied, i.upto = i.upto, ""
		return nil
	}
	return i.write(ctx, i.upto)
}

// write makes the pending changes durable. Without a position they are a part of
// something: after a crash all of it is read again, and ends the same.
func (i *imp) write(ctx context.Context, pos transfer.Position) error {
	var late map[string]change
	err := i.tx(ctx, func(tx *sql.Tx, st *transfer.State) error {
		late = maps.Clone(i.late)
		if late == nil {
			late = map[string]change{}
		}
		put, del, note := stmts{tx: tx}, stmts{tx: tx}, stmts{tx: tx}
		defer put.close()
		defer del.close()
		defer note.close()
		gone := func(c change) error {
			return del.exec(ctx, c.t.remove(), append([]any{string(i.m.Tenant)}, c.key...)...)
		}
		for _, c := range latest(i.pending) {
			var err error
			// What was put aside for this key is overtaken.
			delete(late, c.id())
			if c.row == nil {
				err = gone(c)
			} else if err = put.exec(ctx, c.t.put(1), c.row...); isUnique(err) {
				late[c.id()], err = c, nil
			}
			if err == nil && st.Verified != "" {
				err = note.exec(ctx, "INSERT OR IGNORE INTO cell_transfer_touched (move, tbl, key) VALUES (?, ?, ?)", string(i.m.ID), c.t.Name, c.code)
			}
			if err != nil {
				return err
			}
		}
		if pos == "" {
			return nil
		}
		st.Applied = pos
		return i.settle(late, gone, func(c change) error { return put.exec(ctx, c.t.put(1), c.row...) })
	})
	if err != nil {
		return err
	}
	if i.pending, i.late = i.pending[:0], late; pos != "" {
		i.upto, i.late = "", nil
	}
	return nil
}

// latest keeps the last change of each row: several differences may be written at once.
func latest(all []change) []change {
	last := make(map[string]int, len(all))
	for n, c := range all {
		last[c.id()] = n
	}
	out := make([]change, 0, len(last))
	for n, c := range all {
		if last[c.id()] == n {
			out = append(out, c)
		}
	}
	return out
}

// settle writes the rows that stood in each other's way, once all else is as it
// shall be: first none of them is there, then all are.
func (i *imp) settle(late map[string]change, gone, put func(change) error) error {
	for _, c := range late {
		if err := gone(c); err != nil {
			return err
		}
	}
	for _, c := range late {
		if err := put(c); isUnique(err) {
			return fmt.Errorf("%w: transfer/sqlite: a row of tenant %s in table %s has a value that must be unique and that another row has here: %w; if it is another tenant's, let the unique index carry %s",
				cells.ErrInvalid, i.m.Tenant, c.t.Name, err, c.t.TenantColumn)
		} else if err != nil {
			return err
		}
	}
	return nil
}

func isUnique(err error) bool {
	var e *sqlite.Error
	return errors.As(err, &e) && e.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE
}

// stmts keeps the statement that was used last.
type stmts struct {
	tx   *sql.Tx
	text string
	stmt *sql.Stmt
}

func (s *stmts) exec(ctx context.Context, text string, args ...any) error {
	if s.text != text {
		s.close()
		var err error
		if s.stmt, err = s.tx.PrepareContext(ctx, text); err != nil {
			return err
		}
		s.text = text
	}
	_, err := s.stmt.ExecContext(ctx, args...)
	return err
}

func (s *stmts) close() {
	if s.stmt != nil {
		_ = s.stmt.Close()
		s.stmt, s.text = nil, ""
	}
}

func (i *imp) Abort() { i.pending, i.late, i.upto, i.whole = nil, nil, "", false }

// Missing implements transfer.Import: a change is a whole row here.
func (i *imp) Missing(context.Context) ([]transfer.KeySet, error) { return nil, nil }

// Fill implements transfer.Import; nothing is ever missing.
func (i *imp) Fill(context.Context, transfer.KeySet, []transfer.Batch) error {
	return fmt.Errorf("%w: transfer/sqlite: nothing is missing", cells.ErrNotApplicable)
}

func (i *imp) Verify(ctx context.Context, compared []cells.Comparison) error {
	return i.tx(ctx, func(tx *sql.Tx, st *transfer.State) error {
		if err := i.held(ctx, tx); err != nil {
			return err
		}
		st.Verified, st.Compared = st.Applied, compared
		_, err := tx.ExecContext(ctx, "DELETE FROM cell_transfer_touched WHERE move = ?", i.m.ID)
		return err
	})
}

func (i *imp) Finish(ctx context.Context, mark transfer.Position, compared []cells.Comparison) error {
	return i.tx(ctx, func(tx *sql.Tx, st *transfer.State) error {
		if !st.Copied || st.Verified == "" {
			return fmt.Errorf("%w: transfer/sqlite: the import is not complete", cells.ErrNotApplicable)
		}
		if err := i.held(ctx, tx); err != nil {
			return err
		}
		st.Applied, st.Mark, st.Compared = mark, mark, compared
		if i.m.Keep {
			return i.s.fix(ctx, tx, i.m.ID)
		}
		return nil
	})
}

func (i *imp) Unlock(ctx context.Context) error {
	if err := i.held(ctx, i.s.read); err != nil {
		return err
	}
	i.lock.unlock()
	i.lock = nil
	return nil
}

func (i *imp) Lock(ctx context.Context) error {
	if i.lock != nil {
		return nil
	}
	l, err := lockTenant(ctx, i.s.cfg.Path, i.m.Tenant)
	if err != nil {
		return err
	}
	if err := i.current(ctx, i.s.read); err != nil {
		l.unlock()
		return translate(err)
	}
	i.lock = l
	return nil
}

func (i *imp) Close() error {
	i.Abort()
	i.lock.unlock()
	i.lock, i.gen = nil, 0
	return nil
}
