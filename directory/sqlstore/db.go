// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
)

// Dialect is what differs between databases.
type Dialect struct {
	// Numbered placeholders are written $1; otherwise ? and ?1 stay as they are.
	Numbered bool
	// Begin, unless nil, is run first in each change, and excludes all others until
	// the transaction ends.
	Begin func(ctx context.Context, tx *sql.Tx) error
	// Share, unless nil, is run in place of Begin in a change that may run beside
	// others; it locks names against each other, in an order that is the same for all.
	Share func(ctx context.Context, tx *sql.Tx, names ...string) error
	// ForUpdate is appended to a query whose rows are locked until the end of the
	// transaction.
	ForUpdate string
	// Snapshot are the options of a transaction whose reads are of one moment.
	Snapshot sql.TxOptions
	// SetText returns the expression that is the JSON document in column with a text
	// value, given by placeholder, under key.
	SetText func(column, key, placeholder string) string
	// Failure says what an error of the driver means: one of the sentinels of package
	// cells, or nil if the error is none of the driver's.
	Failure func(err error) error
	// Timeout bounds a change whose context has no earlier deadline; 0 is no bound.
	Timeout time.Duration
}

// Store is a [directory.Store] on a database.
type Store struct {
	d     *Dialect
	write *sql.DB
	read  conn
	reads *sql.DB
	// placings are the calls that place tenants, by cell.
	placings together[cells.CellID, *placing]
	// lookups are the same calls, before: which of their tenants are placed already.
	lookups together[struct{}, *placing]
}

var _ directory.Store = (*Store)(nil)

// New makes a store on a database that is migrated. Changes use write, all else
// read, which may be the same. The store owns both from here on.
func New(write, read *sql.DB, d Dialect) *Store {
	s := &Store{d: &d, write: write, read: conn{q: read, d: &d}, reads: read}
	s.placings.max, s.placings.linger, s.placings.run = placeMax, placeLinger, deployments{s}.placeList
	s.lookups.max, s.lookups.run = placeMax, deployments{s}.lookList
	return s
}

// Ping implements [directory.Store].
func (s *Store) Ping(ctx context.Context) error {
	var n int
	return s.translate("ping", s.read.QueryRowContext(ctx, `SELECT count(*) FROM meta`).Scan(&n))
}

// Close implements [directory.Store].
func (s *Store) Close() error {
	if s.reads == s.write {
		return s.write.Close()
	}
	return errors.Join(s.reads.Close(), s.write.Close())
}

// querier is a database, a connection or a transaction.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// conn runs statements of this package on a database.
type conn struct {
	q querier
	d *Dialect
}

// Tx is a change under way.
type Tx struct {
	conn
	tx *sql.Tx
}

func (c conn) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return c.q.ExecContext(ctx, c.d.rebind(query), values(args)...)
}

func (c conn) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return c.q.QueryContext(ctx, c.d.rebind(query), values(args)...)
}

func (c conn) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	return c.q.QueryRowContext(ctx, c.d.rebind(query), values(args)...)
}

// values turns arguments into what every driver takes: named types become their
// kinds, flags become 0 and 1. What cannot be turned is left to the driver to refuse.
func values(args []any) []any {
	out := make([]any, len(args))
	for i, a := range args {
		v, err := driver.DefaultParameterConverter.ConvertValue(a)
		if err != nil {
			v = a
		}
		if b, ok := v.(bool); ok {
			v = int64(0)
			if b {
				v = int64(1)
			}
		}
		out[i] = v
	}
	return out
}

// rebound holds the statements that were translated, by their text.
var rebound sync.Map

// rebind translates placeholders. Text in quotes is left alone.
func (d *Dialect) rebind(query string) string {
	if !d.Numbered {
		return query
	}
	if q, ok := rebound.Load(query); ok {
		return q.(string)
	}
	var b strings.Builder
	n, quoted := 0, false
	for i := 0; i < len(query); i++ {
		switch c := query[i]; {
		case c == '\'':
			quoted = !quoted
			b.WriteByte(c)
		case c == '?' && !quoted:
			b.WriteByte('$')
			if i+1 == len(query) || query[i+1] < '0' || query[i+1] > '9' {
				n++
				b.WriteString(strconv.Itoa(n))
			}
		default:
			b.WriteByte(c)
		}
	}
	rebound.Store(query, b.String())
	return b.String()
}

// tx runs fn in one change, alone among all changes.
func (s *Store) tx(ctx context.Context, op string, fn func(*Tx) error) error {
	return s.run(ctx, op, s.d.Begin, fn)
}

// beside runs fn in one change that excludes only those beside it that name one of
// the same names, and what its statements lock. Where the database has one writer
// at a time it is as [Store.tx].
func (s *Store) beside(ctx context.Context, op string, names []string, fn func(*Tx) error) error {
	begin := s.d.Begin
	if s.d.Share != nil {
		begin = func(ctx context.Context, tx *sql.Tx) error { return s.d.Share(ctx, tx, names...) }
	}
	return s.run(ctx, op, begin, fn)
}

// bounded is ctx with the store's own bound.
func (s *Store) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.d.Timeout > 0 {
		return context.WithTimeout(ctx, s.d.Timeout)
	}
	return ctx, func() {}
}

func (s *Store) run(ctx context.Context, op string, begin func(context.Context, *sql.Tx) error, fn func(*Tx) error) error {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return s.translate(op, err)
	}
	defer func() { _ = tx.Rollback() }()
	if begin != nil {
		if err := begin(ctx, tx); err != nil {
			return s.translate(op, err)
		}
	}
	if err := fn(&Tx{conn: conn{q: tx, d: s.d}, tx: tx}); err != nil {
		return s.translate(op, err)
	}
	return s.translate(op, tx.Commit())
}

// snapshot runs fn, which only reads, in a transaction that sees one moment.
func (s *Store) snapshot(ctx context.Context, op string, fn func(*Tx) error) error {
	opts := s.d.Snapshot
	tx, err := s.reads.BeginTx(ctx, &opts)
	if err != nil {
		return s.translate(op, err)
	}
	defer func() { _ = tx.Rollback() }()
	return s.translate(op, fn(&Tx{conn: conn{q: tx, d: s.d}, tx: tx}))
}

// translate turns driver errors into the sentinels of package cells; errors that
// carry one already, or are none of the driver's, pass.
func (s *Store) translate(op string, err error) error {
	return s.d.Translate(op, err)
}

// Translate turns an error of the driver into one that wraps a sentinel of package
// cells; errors that carry one already, or are none of the driver's, pass.
func (d *Dialect) Translate(op string, err error) error {
	if err == nil {
		return nil
	}
	if kind := d.Failure(err); kind != nil {
		return fmt.Errorf("directory store: %s: %w: %w", op, kind, err)
	}
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("directory store: %s: %w", op, cells.ErrNotFound)
	case errors.Is(err, sql.ErrConnDone), errors.Is(err, sql.ErrTxDone), err.Error() == "sql: database is closed",
		errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, driver.ErrBadConn):
		return fmt.Errorf("directory store: %s: %w: %w", op, cells.ErrUnavailable, err)
	}
	return err
}

func micros(t time.Time) int64 { return t.UnixMicro() }

func fromMicros(n int64) time.Time { return time.UnixMicro(n).UTC() }

// RunsOn decides about a database whose schema (have) is newer than what this build
// knows: its meta table says from which schema on builds may run on it. A database
// that does not say so is refused. The error wraps [cells.ErrInvalid].
func RunsOn(ctx context.Context, db *sql.DB, have, known int64) error {
	var needs int64
	err := db.QueryRowContext(ctx, `SELECT value FROM meta WHERE name = 'needs_schema'`).Scan(&needs)
	if err == nil && needs <= known {
		return nil
	}
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("needs_schema: %w", err)
	}
	return fmt.Errorf("%w: directory store has schema %d, this build knows up to %d: run a newer build", cells.ErrInvalid, have, known)
}
