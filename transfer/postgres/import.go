// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// keysPerSet bounds a KeySet.
const keysPerSet = 5000

// flushOps is when changes that do not end yet are written, into a transaction
// that stays open until they do.
const flushOps = 5000

// planning is set in every transaction of a move: keys are looked up that have just
// been written, in pages that are in memory.
const planning = "SET LOCAL random_page_cost = 1.1"

// analyzeRows is from how many rows on a table's statistics are taken again.
const analyzeRows = 2000

// Kinds of noted keys.
const (
	keyTouched = "t"
	keyMissing = "m"
)

// imp is the import of one move. All its transactions run on one connection, which
// also holds the lock between processes: who has lost the lock cannot write.
type imp struct {
	s     *Store
	m     cells.MoveRef
	conn  *pgxpool.Conn
	gen   int64
	state transfer.State
	cat   *catalog
	// upsert: tables into which rows may have come before their copy.
	upsert map[string]bool
	// fresh: rows of a table that came since its statistics were taken; known: before.
	fresh, known map[string]int64

	pending []op
	upto    transfer.Position
	whole   bool
	tx      pgx.Tx // open while changes that have not ended are being applied
}

func importKey(tenant cells.TenantID) string { return "cell transfer import " + string(tenant) }

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
	i, err := s.importer(ctx, m)
	if err != nil {
		return nil, err
	}
	if err := i.claim(ctx); err != nil {
		_ = i.Close()
		return nil, translate(err)
	}
	return i, nil
}

// importer has the right to import, and has claimed nothing.
func (s *Store) importer(ctx context.Context, m cells.MoveRef) (*imp, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, translate(err)
	}
	i := &imp{s: s, m: m, conn: conn, upsert: map[string]bool{}, fresh: map[string]int64{}, known: map[string]int64{}}
	if err := i.lock(ctx); err != nil {
		_ = i.Close()
		return nil, err
	}
	return i, nil
}

func (i *imp) lock(ctx context.Context) error {
	_, err := i.conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended($1, 0))", importKey(i.m.Tenant))
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return translate(err)
}

func (i *imp) claim(ctx context.Context) (err error) {
	s, m := i.s, i.m
	if i.cat, err = s.usables(ctx, i.conn); err != nil {
		return err
	}
	// Rows that are not the move's are found before anything is claimed, and again in
	// the transaction that begins the import.
	if err := s.noForeignRows(ctx, i.conn, i.cat, m); err != nil {
		return err
	}
	if err := s.cfg.Keeper.CloseFence(ctx, cells.FenceOrder{Cell: m.Target, Tenant: m.Tenant, Epoch: m.CloseEpoch(), Move: m.ID}); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, i.conn, func(tx pgx.Tx) error {
		if err := s.cfg.Admit(ctx, tx, m.Tenant, m.CloseEpoch(), m.ID); err != nil {
			return err
		}
		if err := s.noForeignRows(ctx, tx, i.cat, m); err != nil {
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
func (s *Store) noForeignRows(ctx context.Context, q querier, cat *catalog, m cells.MoveRef) error {
	var known bool
	if err := q.QueryRow(ctx, s.q(`SELECT EXISTS (SELECT FROM @s.transfer_import WHERE move = $1 OR move = $2 AND tenant = $3)
		OR EXISTS (SELECT FROM @s.transfer_capture WHERE move = $2 AND tenant = $3 AND role IN ($4, $5))`), string(m.ID), string(m.Undoes), string(m.Tenant), roleMove, roleAdopted).Scan(&known); err != nil || known {
		return err
	}
	name, err := anyRows(ctx, q, cat, m.Tenant)
	if err == nil && name != "" {
		err = fmt.Errorf("%w: transfer/postgres: table %s already holds rows of tenant %s that move %s has not brought; reclaim what an earlier move left, or remove them",
			cells.ErrInvalid, name, m.Tenant, m.ID)
	}
	return err
}

// anyRows returns the name of a table that holds rows of the tenant, or "".
func anyRows(ctx context.Context, q querier, cat *catalog, tenant cells.TenantID) (string, error) {
	if len(cat.tables) == 0 {
		return "", nil
	}
	found := "CASE"
	for i, t := range cat.tables {
		found += fmt.Sprintf(" WHEN EXISTS (SELECT FROM %s WHERE %s) THEN %d", t.sql(), t.where(tenant), i)
	}
	var at int
	if err := q.QueryRow(ctx, "SELECT "+found+" ELSE -1 END", once).Scan(&at); err != nil || at < 0 {
		return "", err
	}
	return cat.tables[at].Name, nil
}

// begin opens a transaction that may import: the fence is closed at the move's
// epoch and stays so, and nobody has overtaken or finished the import.
func (i *imp) begin(ctx context.Context) (pgx.Tx, error) {
	if i.conn == nil {
		return nil, cells.ErrClosed
	}
	tx, err := i.conn.Begin(ctx)
	if err != nil {
		return nil, translate(err)
	}
	err = i.s.cfg.Admit(ctx, tx, i.m.Tenant, i.m.CloseEpoch(), i.m.ID)
	if err == nil {
		err = i.current(ctx, tx, " FOR UPDATE")
	}
	if err == nil {
		set := planning + "; SET CONSTRAINTS ALL DEFERRED"
		if i.cat.replica {
			set += "; SET LOCAL session_replication_role = replica"
		}
		_, err = tx.Exec(ctx, set)
	}
	if err != nil {
		_ = tx.Rollback(context.WithoutCancel(ctx))
		return nil, translate(err)
	}
	return tx, nil
}

func (i *imp) current(ctx context.Context, q querier, lock string) error {
	var gen int64
	var mark string
	err := q.QueryRow(ctx, i.s.q("SELECT gen, coalesce(state ->> 'mark', '') FROM @s.transfer_import WHERE move = $1"+lock), string(i.m.ID)).Scan(&gen, &mark)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("%w: transfer/postgres: the import of move %s was cleaned up", cells.ErrStaleOrder, i.m.ID)
	case err != nil:
		return err
	case gen != i.gen:
		return transfer.ErrOvertaken
	case mark != "":
		return fmt.Errorf("%w: transfer/postgres: the import of move %s is finished", cells.ErrStaleOrder, i.m.ID)
	}
	return nil
}

// end writes the state and commits.
func (i *imp) end(ctx context.Context, tx pgx.Tx, next transfer.State, err error) error {
	if err == nil {
		var text []byte
		if text, err = json.Marshal(next); err == nil {
			_, err = tx.Exec(ctx, i.s.q("UPDATE @s.transfer_import SET state = $2::jsonb WHERE move = $1"), string(i.m.ID), string(text))
		}
	}
	if err == nil {
		err = tx.Commit(ctx)
	} else {
		_ = tx.Rollback(context.WithoutCancel(ctx))
	}
	if err == nil {
		i.state = next
	}
	return translate(err)
}

// do runs f in a transaction with the state that it may change.
func (i *imp) do(ctx context.Context, f func(tx pgx.Tx, st *transfer.State) error) error {
	if i.tx != nil {
		return fmt.Errorf("%w: transfer/postgres: changes are being applied", cells.ErrInvalid)
	}
	tx, err := i.begin(ctx)
	if err != nil {
		return err
	}
	next := i.State()
	return i.explain(ctx, i.end(ctx, tx, next, f(tx, &next)))
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
		err := removeRows(ctx, i.conn, i.cat, i.m.Tenant, opts, func(f func(pgx.Tx) error) error {
			return i.do(ctx, func(tx pgx.Tx, _ *transfer.State) error { return f(tx) })
		})
		if err != nil {
			return err
		}
	}
	i.upsert = map[string]bool{}
	return i.do(ctx, func(tx pgx.Tx, st *transfer.State) error {
		*st = transfer.State{Start: start, Applied: start, Tables: map[string]transfer.TableState{}, Shape: st.Shape}
		_, err := tx.Exec(ctx, i.s.q("DELETE FROM @s.transfer_key WHERE move = $1"), string(i.m.ID))
		return err
	})
}

func (i *imp) Skip(ctx context.Context, pos transfer.Position) error {
	return i.do(ctx, func(_ pgx.Tx, st *transfer.State) error {
		if len(st.Tables) > 0 {
			return fmt.Errorf("%w: transfer/postgres: rows are imported already", cells.ErrNotApplicable)
		}
		st.Applied = pos
		return nil
	})
}

// copyBytes bounds what one transaction copies: the fewer there are, the less of the time
// goes into commits, and the longer an order for the fence waits for one of them.
const copyBytes = 4 << 20

// CopyBytes lets rows of several batches come in one Copy.
func (i *imp) CopyBytes() int { return copyBytes }

func (i *imp) Copy(ctx context.Context, b transfer.Batch) error {
	t, err := i.cat.table(b.Table)
	if err != nil {
		return err
	}
	err = i.do(ctx, func(tx pgx.Tx, st *transfer.State) error {
		if b.Count > 0 {
			if err := i.copyRows(ctx, tx, t, b); err != nil {
				return err
			}
		}
		ts := st.Tables[b.Table]
		ts.Rows += b.Count
		ts.Done = b.End
		if ts.After = b.LastKey; b.End {
			ts.After = nil
		}
		st.Tables[b.Table] = ts
		st.Copied = true
		for name := range i.cat.byName {
			st.Copied = st.Copied && st.Tables[name].Done
		}
		return nil
	})
	if i.fresh[b.Table] += b.Count; err == nil && b.End {
		err = i.analyze(ctx, t)
	}
	return err
}

// analyze takes the statistics of a table's key when the tenant's rows in it have become many:
// with those of before, each changed key is looked for among all of them. A role
// that does not own the table gets a warning, and a slower move.
func (i *imp) analyze(ctx context.Context, t *table) error {
	n := i.fresh[t.Name]
	if n < analyzeRows || n < i.known[t.Name]/2 {
		return nil
	}
	i.fresh[t.Name], i.known[t.Name] = 0, i.known[t.Name]+n
	_, err := i.conn.Exec(ctx, fmt.Sprintf("ANALYZE (SKIP_LOCKED) %s (%s)", t.sql(), idents(t.key)))
	return translate(err)
}

// copyRows writes rows in one of COPY's formats: directly, or over what is there.
func (i *imp) copyRows(ctx context.Context, tx pgx.Tx, t *table, b transfer.Batch) error {
	if err := t.knownForm(b.Form); err != nil {
		return err
	}
	if !i.upsert[t.Name] {
		err := savepoint(ctx, tx, func() error {
			_, err := tx.Conn().PgConn().CopyFrom(ctx, copyReader(b.Form, b.Data), fmt.Sprintf("COPY %s (%s) FROM STDIN%s", t.sql(), idents(t.names()), copyOptions(b.Form)))
			return err
		})
		if sqlState(err) != stateUnique {
			return err
		}
		i.upsert[t.Name] = true
	}
	if _, err := tx.Exec(ctx, fmt.Sprintf("CREATE TEMPORARY TABLE cell_rows ON COMMIT DROP AS SELECT %s FROM %s WHERE false", idents(t.names()), t.sql())); err != nil {
		return err
	}
	if _, err := tx.Conn().PgConn().CopyFrom(ctx, copyReader(b.Form, b.Data), fmt.Sprintf("COPY pg_temp.cell_rows (%s) FROM STDIN%s", idents(t.names()), copyOptions(b.Form))); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, fmt.Sprintf("%s SELECT %s FROM pg_temp.cell_rows%s", t.insertHead(), idents(t.names()), t.upsertTail()))
	if err == nil {
		_, err = tx.Exec(ctx, "DROP TABLE pg_temp.cell_rows")
	}
	return err
}

// savepoint runs f so that the transaction can go on if it fails.
func savepoint(ctx context.Context, tx pgx.Tx, f func() error) error {
	if _, err := tx.Exec(ctx, "SAVEPOINT cell"); err != nil {
		return err
	}
	ferr := f()
	end := "RELEASE SAVEPOINT cell"
	if ferr != nil {
		end = "ROLLBACK TO SAVEPOINT cell; RELEASE SAVEPOINT cell"
	}
	if _, err := tx.Exec(ctx, end); err != nil {
		return errors.Join(ferr, err)
	}
	return ferr
}

func (i *imp) Apply(ctx context.Context, b transfer.Batch) error {
	ops, err := i.cat.decode(b.Data)
	if err != nil {
		return err
	}
	for _, o := range ops {
		if _, begun := i.state.Tables[o.t.Name]; begun {
			i.pending = append(i.pending, o)
			i.upsert[o.t.Name] = true
			i.fresh[o.t.Name]++
		}
	}
	if i.whole = b.End; b.End {
		i.upto = b.Upto
	} else if len(i.pending) >= flushOps {
		return i.flush(ctx)
	}
	return nil
}

// flush applies the pending changes in the open transaction.
func (i *imp) flush(ctx context.Context) (err error) {
	if i.tx == nil {
		if i.tx, err = i.begin(ctx); err != nil {
			return err
		}
	}
	a := &applier{tx: i.tx, i: i, note: i.state.Verified != ""}
	if err := a.apply(ctx, i.pending); err != nil {
		return i.explain(ctx, translate(err))
	}
	i.pending = i.pending[:0]
	return nil
}

func (i *imp) Commit(ctx context.Context) error {
	if i.upto == "" && len(i.pending) == 0 {
		return nil
	}
	if !i.whole {
		return fmt.Errorf("%w: transfer/postgres: commit of changes that have not ended", cells.ErrInvalid)
	}
	if len(i.pending) == 0 && i.tx == nil {
		// Nothing to keep: after a crash the same changes are read as none again.
		i.state.Applied, i.upto = i.upto, ""
		return nil
	}
	if err := i.flush(ctx); err != nil {
		i.Abort()
		return err
	}
	next := i.State()
	next.Applied = i.upto
	tx := i.tx
	i.tx, i.upto = nil, ""
	return i.end(ctx, tx, next, nil)
}

func (i *imp) Abort() {
	if i.tx != nil {
		_ = i.tx.Rollback(context.Background())
	}
	i.tx, i.pending, i.upto, i.whole = nil, nil, "", false
}

func (i *imp) Digests(ctx context.Context, sets []transfer.KeySet) ([]transfer.Digest, error) {
	ds, err := digests(ctx, i.conn, i.cat, i.m.Tenant, sets)
	return ds, i.explain(ctx, translate(err))
}

func (i *imp) Touched(ctx context.Context, perSet int) ([]transfer.KeySet, error) {
	return i.noted(ctx, keyTouched, int64(perSet))
}

const settleSQL = `DELETE FROM @s.transfer_key AS t
	USING (SELECT $1::text AS move, 't'::"char" AS kind, $2::text AS tbl, k AS key FROM unnest($3::bytea[]) AS k OFFSET 0) AS u
	WHERE t.move = u.move AND t.kind = u.kind AND t.tbl = u.tbl AND t.key = u.key`

func (i *imp) Settle(ctx context.Context, sets []transfer.KeySet, compared []cells.Comparison) error {
	return i.do(ctx, func(tx pgx.Tx, st *transfer.State) error {
		st.Compared = compared
		done := map[string][][]byte{}
		for _, set := range sets {
			t, keys, err := i.cat.keysOf(set)
			if err != nil {
				return err
			}
			done[t.Name] = append(done[t.Name], encodeKeys(keys)...)
		}
		// Each key is looked up, whatever the statistics of a table say that was empty a
		// moment ago; see keyed.
		if _, err := tx.Exec(ctx, "SET LOCAL enable_seqscan = off"); err != nil {
			return err
		}
		for name, keys := range done {
			if _, err := tx.Exec(ctx, i.s.q(settleSQL), string(i.m.ID), name, keys); err != nil {
				return err
			}
		}
		return nil
	})
}

func (i *imp) Missing(ctx context.Context) ([]transfer.KeySet, error) {
	return i.noted(ctx, keyMissing, keysPerSet)
}

func (i *imp) noted(ctx context.Context, kind string, perSet int64) (out []transfer.KeySet, err error) {
	rows, err := i.conn.Query(ctx, i.s.q(`SELECT tbl, key FROM @s.transfer_key WHERE move = $1 AND kind = $2::text::"char" ORDER BY tbl, key`), string(i.m.ID), kind)
	if err != nil {
		return nil, translate(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var key []byte
		if err := rows.Scan(&name, &key); err != nil {
			return nil, err
		}
		n := len(out) - 1
		if n < 0 || out[n].Table != name || out[n].Count >= perSet {
			out = append(out, transfer.KeySet{Table: name})
			n++
		}
		out[n].Data = append(out[n].Data, key...)
		out[n].Count++
	}
	return out, translate(rows.Err())
}

func (i *imp) Fill(ctx context.Context, set transfer.KeySet, batches []transfer.Batch) error {
	t, keys, err := i.cat.keysOf(set)
	if err != nil {
		return err
	}
	return i.do(ctx, func(tx pgx.Tx, st *transfer.State) error {
		a := &applier{tx: tx, i: i}
		if err := a.remove(ctx, t, keys); err != nil {
			return err
		}
		for _, b := range batches {
			if b.Count > 0 {
				if err := i.copyRows(ctx, tx, t, b); err != nil {
					return err
				}
			}
		}
		if _, err := tx.Exec(ctx, i.s.q(`DELETE FROM @s.transfer_key WHERE move = $1 AND kind = 'm' AND tbl = $2 AND key = ANY ($3)`), string(i.m.ID), t.Name, encodeKeys(keys)); err != nil {
			return err
		}
		if st.Verified == "" {
			return nil
		}
		return a.noteKeys(ctx, keyTouched, t, keys)
	})
}

func encodeKeys(keys [][]string) [][]byte {
	out := make([][]byte, len(keys))
	for i, k := range keys {
		out[i] = encodeKey(k)
	}
	return out
}

func (i *imp) Verify(ctx context.Context, compared []cells.Comparison) error {
	for _, t := range i.cat.tables {
		if err := i.analyze(ctx, t); err != nil {
			return err
		}
	}
	return i.do(ctx, func(tx pgx.Tx, st *transfer.State) error {
		if err := i.held(ctx, tx, false); err != nil {
			return err
		}
		st.Verified, st.Compared = st.Applied, compared
		_, err := tx.Exec(ctx, i.s.q("DELETE FROM @s.transfer_key WHERE move = $1 AND kind = 't'"), string(i.m.ID))
		return err
	})
}

func (i *imp) Finish(ctx context.Context, mark transfer.Position, compared []cells.Comparison) error {
	return i.do(ctx, func(tx pgx.Tx, st *transfer.State) error {
		if !st.Copied || st.Verified == "" {
			return fmt.Errorf("%w: transfer/postgres: the import is not complete", cells.ErrNotApplicable)
		}
		if err := i.held(ctx, tx, true); err != nil {
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
	if err := i.held(ctx, i.conn, false); err != nil {
		return err
	}
	_, err := i.conn.Exec(ctx, "SELECT pg_advisory_unlock(hashtextextended($1, 0))", importKey(i.m.Tenant))
	return translate(err)
}

func (i *imp) Lock(ctx context.Context) error {
	if err := i.lock(ctx); err != nil {
		return err
	}
	return translate(i.current(ctx, i.conn, ""))
}

func (i *imp) Close() error {
	i.Abort()
	if i.conn == nil {
		return nil
	}
	ctx := context.Background()
	if !i.conn.Conn().IsClosed() {
		if _, err := i.conn.Exec(ctx, "SELECT pg_advisory_unlock_all()"); err != nil {
			_ = i.conn.Conn().Close(ctx)
		}
	}
	i.conn.Release()
	i.conn = nil
	return nil
}
