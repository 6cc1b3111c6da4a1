// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
)

//go:embed migrations/*.sql
var migrations embed.FS

const migrationsTable = "directory_migrations"

// Store is a [directory.Store] in one SQLite file.
type Store struct {
	write *sql.DB // one connection, immediate transactions
	read  *sql.DB
}

var _ directory.Store = (*Store)(nil)

// Open opens the file at path, creates it with mode 0600 if there is none, and
// migrates it. The caller closes the store. Errors wrap [cells.ErrInvalid] for a
// file that is newer than this build or no database, and [cells.ErrUnavailable]
// for one that cannot be opened now.
func Open(ctx context.Context, path string) (*Store, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	f, err := os.OpenFile(abs, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: directory store: %w", cells.ErrUnavailable, err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("%w: directory store: %w", cells.ErrUnavailable, err)
	}
	base := "file:" + (&url.URL{Path: abs}).EscapedPath() +
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=foreign_keys(ON)"
	s := &Store{}
	if s.write, err = sql.Open("sqlite", base+"&_txlock=immediate"); err != nil {
		return nil, translate("open", err)
	}
	s.write.SetMaxOpenConns(1)
	if s.read, err = sql.Open("sqlite", base+"&_pragma=query_only(ON)"); err != nil {
		return nil, errors.Join(translate("open", err), s.Close())
	}
	s.read.SetMaxOpenConns(4)
	if err := s.migrate(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// migrate brings the file to this build's schema. Another process may be doing
// the same: whoever is second finds the work done after a retry.
func (s *Store) migrate(ctx context.Context) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("%w: migrations: %w", cells.ErrInvalid, err)
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, s.write, sub,
		goose.WithTableName(migrationsTable), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("%w: migrations: %w", cells.ErrInvalid, err)
	}
	var last error
	for range 5 {
		last = s.migrateOnce(ctx, p)
		if last == nil || errors.Is(last, cells.ErrInvalid) || ctx.Err() != nil {
			return last
		}
		t := time.NewTimer(100 * time.Millisecond)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	return last
}

func (s *Store) migrateOnce(ctx context.Context, p *goose.Provider) error {
	current, target, err := p.GetVersions(ctx)
	if err != nil {
		return translate("migrate", err)
	}
	if current > target {
		return fmt.Errorf("%w: directory store has schema %d, this build knows up to %d: run a newer build",
			cells.ErrInvalid, current, target)
	}
	if _, err := p.Up(ctx); err != nil {
		return translate("migrate", err)
	}
	return nil
}

// Ping implements [directory.Store].
func (s *Store) Ping(ctx context.Context) error {
	var n int
	return translate("ping", s.read.QueryRowContext(ctx, `SELECT count(*) FROM meta`).Scan(&n))
}

// Close implements [directory.Store].
func (s *Store) Close() error {
	var errs []error
	for _, db := range []*sql.DB{s.read, s.write} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return errors.Join(errs...)
}

// tx runs fn in one immediate transaction.
func (s *Store) tx(ctx context.Context, op string, fn func(*sql.Tx) error) error {
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return translate(op, err)
	}
	defer func() { _ = tx.Rollback() }()
	if err := fn(tx); err != nil {
		return translate(op, err)
	}
	return translate(op, tx.Commit())
}

// translate turns driver errors into the sentinels of package cells; errors that
// carry one already, or are none of the driver's, pass.
func translate(op string, err error) error {
	if err == nil {
		return nil
	}
	var se *sqlite.Error
	switch {
	case errors.As(err, &se):
		switch se.Code() & 0xff {
		case sqlite3.SQLITE_CONSTRAINT:
			return fmt.Errorf("directory store: %s: %w: %w", op, cells.ErrConflict, err)
		case sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_MISMATCH:
			return fmt.Errorf("directory store: %s: %w: %w", op, cells.ErrInvalid, err)
		}
		return fmt.Errorf("directory store: %s: %w: %w", op, cells.ErrUnavailable, err)
	case errors.Is(err, sql.ErrNoRows):
		return fmt.Errorf("directory store: %s: %w", op, cells.ErrNotFound)
	case errors.Is(err, sql.ErrConnDone), errors.Is(err, sql.ErrTxDone), err.Error() == "sql: database is closed":
		return fmt.Errorf("directory store: %s: %w: %w", op, cells.ErrUnavailable, err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("directory store: %s: %w: %w", op, cells.ErrUnavailable, err)
	}
	return err
}

func micros(t time.Time) int64 { return t.UnixMicro() }

func fromMicros(n int64) time.Time { return time.UnixMicro(n).UTC() }
