// SPDX-License-Identifier: Apache-2.0

// Package sqlite keeps what a deployment knows of its people in a SQLite file, for one
// that is no cell: a cell's rows are in its Postgres. The file is authoritative; one
// writer at a time, each waiting for at most 5 s.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/sqlstore"
)

// Open opens the file at path, creates it with mode 0600 if there is none, and
// migrates it. The caller closes the store. Errors wrap [cells.ErrInvalid] or
// [cells.ErrUnavailable].
func Open(ctx context.Context, path string) (signin.Store, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("%w: signin: %w", cells.ErrInvalid, err)
	}
	f, err := os.OpenFile(abs, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: signin: %w", cells.ErrUnavailable, err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("%w: signin: %w", cells.ErrUnavailable, err)
	}
	db, err := sql.Open("sqlite", "file:"+(&url.URL{Path: abs}).EscapedPath()+
		"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=foreign_keys(ON)&_txlock=immediate")
	if err != nil {
		return nil, fmt.Errorf("%w: signin: %w", cells.ErrUnavailable, err)
	}
	db.SetMaxOpenConns(4)
	p, err := goose.NewProvider(goose.DialectSQLite3, db, sqlstore.Migrations(),
		goose.WithTableName(sqlstore.MigrationsTable), goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: signin: migrations: %w", cells.ErrInvalid, err), db.Close())
	}
	have, known, err := p.GetVersions(ctx)
	if err == nil && have > known {
		return nil, errors.Join(fmt.Errorf("%w: signin: the file was made by a newer version (schema %d, this one knows up to %d)", cells.ErrInvalid, have, known), db.Close())
	}
	if err == nil {
		_, err = p.Up(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: signin: %w", cells.ErrUnavailable, err), db.Close())
	}
	return sqlstore.New(db, sqlstore.Dialect{Taken: func(err error) bool {
		var e *sqlite.Error
		return errors.As(err, &e) && (e.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE || e.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
	}}), nil
}
