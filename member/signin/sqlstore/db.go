// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
)

//go:embed migrations/*.sql
var migrations embed.FS

// MigrationsTable keeps which migrations were made.
const MigrationsTable = "signin_migrations"

// Migrations are those of the tables.
func Migrations() fs.FS {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		panic(err) // the folder is embedded above
	}
	return sub
}

// Dialect is what differs between databases.
type Dialect struct {
	// Numbered placeholders are written $1, otherwise ?.
	Numbered bool
	// Taken reports whether an error of the driver says that a unique index has the value.
	Taken func(error) bool
}

// Store is a [signin.Store] on a database whose tables are migrated.
type Store struct {
	d  Dialect
	db *sql.DB
}

var _ signin.Store = (*Store)(nil)

// New makes a store, which owns db from here on.
func New(db *sql.DB, d Dialect) *Store { return &Store{d, db} }

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// querier is the database or a transaction.
type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// q writes placeholders as the database wants them; no query here has a question mark
// in a text.
func (s *Store) q(query string) string {
	if !s.d.Numbered {
		return query
	}
	var b strings.Builder
	n := 0
	for i := range len(query) {
		if query[i] == '?' {
			n++
			b.WriteByte('$')
			b.WriteString(strconv.Itoa(n))
			continue
		}
		b.WriteByte(query[i])
	}
	return b.String()
}

// exec runs a statement and returns how many rows it changed.
func (s *Store) exec(ctx context.Context, db querier, query string, args ...any) (int64, error) {
	r, err := db.ExecContext(ctx, s.q(query), args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

// each calls read for each row.
func (s *Store) each(ctx context.Context, db querier, read func(scan func(...any) error) error, query string, args ...any) error {
	rows, err := db.QueryContext(ctx, s.q(query), args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := read(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// change runs f in a transaction.
func (s *Store) change(ctx context.Context, what string, f func(tx *sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err == nil {
		if err = f(tx); err == nil {
			err = tx.Commit()
		} else if rerr := tx.Rollback(); rerr != nil && !errors.Is(rerr, sql.ErrTxDone) {
			err = errors.Join(err, rerr)
		}
	}
	return s.told(what, err)
}

// told translates an error.
func (s *Store) told(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, cells.ErrNotFound), errors.Is(err, signin.ErrTaken), errors.Is(err, signin.ErrChanged), errors.Is(err, cells.ErrInvalid):
	case errors.Is(err, sql.ErrNoRows):
		err = cells.ErrNotFound
	case s.d.Taken(err):
		err = signin.ErrTaken // the driver's text has the value
	case !errors.Is(err, cells.ErrUnavailable):
		err = fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return fmt.Errorf("signin: %s: %w", what, err)
}

// micros is a time as it is stored; the zero time is 0.
func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func at(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros).UTC()
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// now is the time as it is stored.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// newID makes an id; later ones are greater.
func newID() (string, error) {
	id, err := uuid.NewV7()
	return id.String(), err
}

func pageSize(limit int) int { return max(1, min(limit, 1000)) }
