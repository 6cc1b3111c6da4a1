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
	"github.com/cloister-dev/cloister/directory/sqlstore"
)

//go:embed migrations/*.sql
var migrations embed.FS

const migrationsTable = "directory_migrations"

// Store is a [directory.Store] in one SQLite file.
type Store struct{ *sqlstore.Store }

var _ directory.Store = (*Store)(nil)

// dialect is SQLite's: its immediate transactions exclude each other by themselves.
var dialect = sqlstore.Dialect{
	Snapshot: sql.TxOptions{ReadOnly: true},
	SetText: func(column, key, placeholder string) string {
		return fmt.Sprintf("json_set(%s, '$.%s', %s)", column, key, placeholder)
	},
	Failure: failure,
}

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
	write, err := sql.Open("sqlite", base+"&_txlock=immediate")
	if err != nil {
		return nil, dialect.Translate("open", err)
	}
	write.SetMaxOpenConns(1)
	read, err := sql.Open("sqlite", base+"&_pragma=query_only(ON)")
	if err != nil {
		return nil, errors.Join(dialect.Translate("open", err), write.Close())
	}
	read.SetMaxOpenConns(4)
	s := &Store{sqlstore.New(write, read, dialect)}
	if err := migrate(ctx, write); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// migrate brings the file to this build's schema. Another process may be doing
// the same: whoever is second finds the work done after a retry.
func migrate(ctx context.Context, db *sql.DB) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("%w: migrations: %w", cells.ErrInvalid, err)
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, db, sub,
		goose.WithTableName(migrationsTable), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("%w: migrations: %w", cells.ErrInvalid, err)
	}
	var last error
	for range 5 {
		last = migrateOnce(ctx, db, p)
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

func migrateOnce(ctx context.Context, db *sql.DB, p *goose.Provider) error {
	current, target, err := p.GetVersions(ctx)
	if err != nil {
		return dialect.Translate("migrate", err)
	}
	if current > target {
		return dialect.Translate("migrate", sqlstore.RunsOn(ctx, db, current, target))
	}
	if _, err := p.Up(ctx); err != nil {
		return dialect.Translate("migrate", err)
	}
	return nil
}

// failure says what an error of the driver means.
func failure(err error) error {
	var se *sqlite.Error
	if !errors.As(err, &se) {
		return nil
	}
	switch se.Code() & 0xff {
	case sqlite3.SQLITE_CONSTRAINT:
		return cells.ErrConflict
	case sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_MISMATCH:
		return cells.ErrInvalid
	}
	return cells.ErrUnavailable
}
