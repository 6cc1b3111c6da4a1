// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Tables are what the service keeps of a tenant, for the guard and for moves.
var Tables = []guard.Table{
	{Name: "memory_items", TenantColumn: "tenant"},
	{Name: "memory_history", TenantColumn: "tenant"},
}

// Store keeps memories in SQLite or Postgres; the two differ only in dialect.
// Every write is one guarded transaction with one event.
type Store struct {
	dsn     string
	checked bool // its sessions are marked
	db      *sql.DB
	d       dialect
	outbox  guard.Outbox
	guard   Guard
}

// dialect is what the two databases do differently.
type dialect interface {
	// write runs fn in a transaction that commits only while the tenant's fence
	// admits the caller; it is run again when the database asks for that.
	write(ctx context.Context, tenant cells.TenantID, fn func(ctx context.Context, tx Tx) error) error
	// read runs fn on one snapshot in which the fence admits the caller.
	read(ctx context.Context, tenant cells.TenantID, fn func(ctx context.Context, q Querier) error) error
	// rebind turns $1 into what the driver takes.
	rebind(query string) string
	// lock is appended to a select whose rows the transaction will change.
	lock() string
	// emitCall is the guard's EmitCall for parameters from $1 on; "" where the store
	// has none.
	emitCall(ctx context.Context, typ string, payload any) (call string, args []any, err error)
}

// Querier is what reads need.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Tx is what writes need.
type Tx interface {
	Querier
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	// Emit puts an event into the outbox and returns its sequence number.
	Emit(ctx context.Context, typ string, payload any) (cells.EventSeq, error)
}

// DB returns the database; the store stays its owner.
func (s *Store) DB() *sql.DB { return s.db }

// Outbox returns the tenant's committed events.
func (s *Store) Outbox() guard.Outbox { return s.outbox }

// errRaced: another transaction created the same key first; try again.
var errRaced = errors.New("memory: another writer was first")

// Write applies all writes or none, as one event of the given type, and returns
// the new versions in the order asked for. A key may be named once.
//
// Errors: [ErrBadRequest], *[VersionConflict], cells.ErrFenced (nothing written).
func (s *Store) Write(ctx context.Context, tenant cells.TenantID, typ string, writes []Write) ([]Item, error) {
	named := make(map[Ref]bool, len(writes))
	for _, w := range writes {
		if err := w.Ref.Validate(); err != nil {
			return nil, err
		}
		if named[w.Ref] {
			return nil, fmt.Errorf("%w: %s/%s is named twice", ErrBadRequest, w.Namespace, w.Key)
		}
		named[w.Ref] = true
		if !w.Delete && len(w.Value) == 0 {
			return nil, fmt.Errorf("%w: %s/%s has no value", ErrBadRequest, w.Namespace, w.Key)
		}
		if !w.Delete && len(w.Value) > MaxValue {
			return nil, tooLarge("the value of %s/%s has %d bytes; at most %d are allowed", w.Namespace, w.Key, len(w.Value), MaxValue)
		}
	}
	var out []Item
	for range 20 {
		err := s.d.write(ctx, tenant, func(ctx context.Context, tx Tx) (err error) {
			out, err = s.apply(ctx, tx, tenant, typ, writes)
			return err
		})
		if !errors.Is(err, errRaced) {
			return out, err
		}
	}
	return nil, fmt.Errorf("%w: 20 other writers were first", cells.ErrUnavailable)
}

func (s *Store) apply(ctx context.Context, tx Tx, tenant cells.TenantID, typ string, writes []Write) ([]Item, error) {
	refs := make([]Ref, len(writes))
	for i, w := range writes {
		refs[i] = w.Ref
	}
	// Rows are locked in key order, and the event's number is taken after them:
	// two bulk writes cannot wait for each other in a circle.
	sort.Slice(refs, func(i, j int) bool { return refs[i].less(refs[j]) })
	old, err := s.selectItems(ctx, tx, tenant, refs, true)
	if err != nil {
		return nil, err
	}
	was := make(map[Ref]Item, len(old))
	for _, it := range old {
		was[it.Ref] = it
	}
	adm, _ := cells.AdmissionFromContext(ctx)
	now := time.Now().UTC().Truncate(time.Microsecond)
	out := make([]Item, len(writes))
	type change struct {
		Ref
		Version int64 `json:"version"`
		Deleted bool  `json:"deleted,omitempty"`
	}
	changes := make([]change, len(writes))
	for i, w := range writes {
		prev := was[w.Ref]
		if w.IfVersion != nil && *w.IfVersion != prev.live() {
			return nil, &VersionConflict{Ref: w.Ref, Want: *w.IfVersion, Have: prev.live()}
		}
		if w.Delete && prev.live() == 0 {
			return nil, ErrNoItem
		}
		out[i] = Item{Ref: w.Ref, Version: prev.Version + 1, Deleted: w.Delete, At: now}
		if adm != nil {
			out[i].Epoch, out[i].Cell = adm.Epoch, adm.Cell
		}
		changes[i] = change{w.Ref, out[i].Version, w.Delete}
	}
	if err := s.keepHistory(ctx, tx, tenant, old); err != nil {
		return nil, err
	}
	return out, s.upsert(ctx, tx, tenant, writes, out, typ, map[string]any{"items": changes})
}

func (r Ref) less(o Ref) bool {
	if r.Namespace != o.Namespace {
		return r.Namespace < o.Namespace
	}
	return r.Key < o.Key
}

const itemColumns = "namespace, key, value, version, event_seq, epoch, cell, deleted, updated_at"

// chunk bounds the rows of one statement; below every driver's parameter limit.
const chunk = 200

// selectItems reads in one statement, so what it returns is of one moment. At most
// MaxBulk refs are asked for, well below every driver's parameter limit.
func (s *Store) selectItems(ctx context.Context, q Querier, tenant cells.TenantID, refs []Ref, lock bool) ([]Item, error) {
	b := newStatement("SELECT "+itemColumns+" FROM memory_items WHERE tenant = ", string(tenant))
	b.text(" AND (namespace, key) IN (VALUES ")
	for i, r := range refs {
		b.row(i, r.Namespace, r.Key)
	}
	b.text(") ORDER BY namespace, key")
	if lock {
		b.text(s.d.lock())
	}
	most := maxAnswer
	if lock {
		most = 0 // all of them are needed
	}
	out, more, err := s.query(ctx, q, b, most)
	if more {
		err = &cells.Answer{Code: cells.CodeTooLarge, Detail: fmt.Sprintf("the values have more than %d bytes together; ask for fewer", maxAnswer)}
	}
	return out, err
}

// query returns what was selected. With most, it stops before the values have more
// bytes than that, but not before the first; more says that it did.
func (s *Store) query(ctx context.Context, q Querier, b *statement, most int) (out []Item, more bool, _ error) {
	rows, err := q.QueryContext(ctx, s.d.rebind(b.sql.String()), b.args...)
	if err != nil {
		return nil, false, err
	}
	defer rows.Close()
	size := 0
	for rows.Next() {
		var it Item
		var value sql.NullString
		var at int64
		if err := rows.Scan(&it.Namespace, &it.Key, &value, &it.Version, &it.EventSeq, &it.Epoch, &it.Cell, &it.Deleted, &at); err != nil {
			return nil, false, err
		}
		if size += len(value.String); most > 0 && size > most && len(out) > 0 {
			return out, true, nil
		}
		if value.Valid {
			it.Value = json.RawMessage(value.String)
		}
		it.At = time.UnixMicro(at).UTC()
		out = append(out, it)
	}
	return out, false, rows.Err()
}

// page is query for one page of at most limit items and maxAnswer bytes of values.
func (s *Store) page(ctx context.Context, q Querier, b *statement, limit int) (out []Item, more bool, err error) {
	b.text(" LIMIT ").arg(limit + 1)
	if out, more, err = s.query(ctx, q, b, maxAnswer); len(out) > limit {
		out, more = out[:limit], true
	}
	return out, more, err
}

func (s *Store) keepHistory(ctx context.Context, tx Tx, tenant cells.TenantID, old []Item) error {
	for len(old) > 0 {
		n := min(chunk, len(old))
		b := newStatement("INSERT INTO memory_history (tenant, " + itemColumns + ") VALUES ")
		for i, it := range old[:n] {
			b.row(i, string(tenant), it.Namespace, it.Key, nullJSON(it.Value), it.Version, int64(it.EventSeq), int64(it.Epoch), string(it.Cell), it.Deleted, it.At.UnixMicro())
		}
		if _, err := tx.ExecContext(ctx, s.d.rebind(b.sql.String()), b.args...); err != nil {
			return err
		}
		old = old[n:]
	}
	return nil
}

// upsert emits the event and writes the new versions with its number. Until the
// transaction ends no other one of the tenant gets a number, so this comes last, and
// where the store can, the number is taken by the statement that writes the rows: a
// round trip to the database fewer in which all others wait.
//
// A row whose version is not the one before says that another transaction was first
// with a key that was new to both.
func (s *Store) upsert(ctx context.Context, tx Tx, tenant cells.TenantID, writes []Write, items []Item, typ string, event any) error {
	call, args, err := s.d.emitCall(ctx, typ, event)
	if err != nil {
		return err
	}
	var seq cells.EventSeq
	if call == "" {
		if seq, err = tx.Emit(ctx, typ, event); err != nil {
			return err
		}
	}
	for done := 0; done < len(items); {
		n := min(chunk, len(items)-done)
		b := newStatement("")
		if seq == 0 {
			b.text("WITH event AS MATERIALIZED (SELECT " + call + " AS seq) ")
			b.args = args
		}
		b.text("INSERT INTO memory_items (tenant, " + itemColumns + ") VALUES ")
		for i, it := range items[done : done+n] {
			value := nullJSON(writes[done+i].Value)
			if it.Deleted {
				value = sql.NullString{}
			}
			number := any(int64(seq))
			if seq == 0 {
				number = expression("(SELECT seq FROM event)")
			}
			b.row(i, string(tenant), it.Namespace, it.Key, value, it.Version, number, int64(it.Epoch), string(it.Cell), it.Deleted, it.At.UnixMicro())
		}
		b.text(` ON CONFLICT (tenant, namespace, key) DO UPDATE SET value = excluded.value, version = excluded.version,
			event_seq = excluded.event_seq, epoch = excluded.epoch, cell = excluded.cell, deleted = excluded.deleted,
			updated_at = excluded.updated_at WHERE memory_items.version = excluded.version - 1 RETURNING event_seq`)
		written, err := s.seqs(ctx, tx, b)
		if err != nil {
			return err
		}
		if len(written) != n {
			return errRaced
		}
		seq, done = written[0], done+n
	}
	for i := range items {
		items[i].EventSeq = seq
	}
	return nil
}

func (s *Store) seqs(ctx context.Context, q Querier, b *statement) ([]cells.EventSeq, error) {
	rows, err := q.QueryContext(ctx, s.d.rebind(b.sql.String()), b.args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []cells.EventSeq
	for rows.Next() {
		var seq cells.EventSeq
		if err := rows.Scan(&seq); err != nil {
			return nil, err
		}
		out = append(out, seq)
	}
	return out, rows.Err()
}

func nullJSON(v json.RawMessage) sql.NullString {
	return sql.NullString{String: string(v), Valid: v != nil}
}

// Read returns the memories that are there, in the order of namespace and key;
// what is deleted or was never written is left out.
func (s *Store) Read(ctx context.Context, tenant cells.TenantID, refs []Ref) ([]Item, error) {
	for _, r := range refs {
		if err := r.Validate(); err != nil {
			return nil, err
		}
	}
	var out []Item
	err := s.d.read(ctx, tenant, func(ctx context.Context, q Querier) error {
		items, err := s.selectItems(ctx, q, tenant, refs, false)
		out = make([]Item, 0, len(items))
		for _, it := range items {
			if !it.Deleted {
				out = append(out, it)
			}
		}
		return err
	})
	return out, err
}

// List returns a namespace's memories in key order, after a key: at most limit, and
// fewer when they are large. more says that others follow.
func (s *Store) List(ctx context.Context, tenant cells.TenantID, namespace, prefix, after string, limit int) (out []Item, more bool, err error) {
	err = s.d.read(ctx, tenant, func(ctx context.Context, q Querier) error {
		b := newStatement("SELECT "+itemColumns+" FROM memory_items WHERE NOT deleted AND tenant = ", string(tenant))
		b.text(" AND namespace = ").arg(namespace)
		b.text(" AND key > ").arg(after)
		if prefix != "" {
			b.text(" AND key >= ").arg(prefix)
			b.text(" AND substr(key, 1, ").arg(len([]rune(prefix))).text(") = ").arg(prefix)
		}
		b.text(" ORDER BY key")
		out, more, err = s.page(ctx, q, b, limit)
		return err
	})
	if out == nil {
		out = []Item{}
	}
	return out, more, err
}

// History returns a memory's versions, newest first, below version before (0:
// from the newest): at most limit, and fewer when they are large. more says that
// others follow.
func (s *Store) History(ctx context.Context, tenant cells.TenantID, ref Ref, before int64, limit int) (out []Item, more bool, err error) {
	if before <= 0 {
		before = 1<<63 - 1
	}
	err = s.d.read(ctx, tenant, func(ctx context.Context, q Querier) error {
		b := newStatement("SELECT "+itemColumns+" FROM (SELECT * FROM memory_items UNION ALL SELECT * FROM memory_history) AS v WHERE tenant = ", string(tenant))
		b.text(" AND namespace = ").arg(ref.Namespace)
		b.text(" AND key = ").arg(ref.Key)
		b.text(" AND version < ").arg(before)
		b.text(" ORDER BY version DESC")
		out, more, err = s.page(ctx, q, b, limit)
		return err
	})
	if err == nil && len(out) == 0 {
		err = ErrNoItem
	}
	return out, more, err
}

// statement builds a query with $n parameters.
type statement struct {
	sql  strings.Builder
	args []any
}

func newStatement(text string, args ...any) *statement {
	b := &statement{}
	b.text(text)
	for _, a := range args {
		b.arg(a)
	}
	return b
}

func (b *statement) text(s string) *statement { b.sql.WriteString(s); return b }

// expression is SQL text in place of a parameter.
type expression string

func (b *statement) arg(v any) *statement {
	if e, ok := v.(expression); ok {
		return b.text(string(e))
	}
	b.args = append(b.args, v)
	b.sql.WriteByte('$')
	b.sql.WriteString(strconv.Itoa(len(b.args)))
	return b
}

func (b *statement) row(i int, vals ...any) {
	if i > 0 {
		b.text(", ")
	}
	b.text("(")
	for j, v := range vals {
		if j > 0 {
			b.text(", ")
		}
		b.arg(v)
	}
	b.text(")")
}
