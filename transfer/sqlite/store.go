// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// AdmitClosed checks, inside tx, that the tenant's fence is closed at exactly
// epoch by move, and lets the transaction write the tenant's rows until it ends.
// It fails with [cells.ErrStaleOrder] or [cells.ErrFenced] otherwise.
type AdmitClosed func(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID) error

// Config describes a cell's database to its agent. All fields but Stay are required.
type Config struct {
	// Path of the database file. The store opens connections of its own, so that its
	// long reads and its foreign key setting disturb nobody.
	Path string
	// Keeper is the guard of that database.
	Keeper guard.Keeper
	// Admit is the guard's check for imports and removals.
	Admit AdmitClosed
	// Tables hold tenants' rows; the guard's own MovedTables are added to them.
	Tables []guard.Table
	// Stay are tables that are not in Tables although they have a tenant column, and
	// whose rows are meant to stay behind: caches, audits. Preflights leave them out.
	Stay []string
}

// Store is one SQLite database as the source and the target of moves. It is safe
// for concurrent use, by several processes.
type Store struct {
	cfg    Config
	tables []guard.Table
	read   *sql.DB // query_only, deferred
	write  *sql.DB // immediate, foreign keys off

	mu   sync.Mutex    // guards wake
	wake chan struct{} // closed and replaced when a position was given out
}

var (
	_ transfer.Source = (*Store)(nil)
	_ transfer.Sink   = (*Store)(nil)
)

// Open opens the store and creates its own tables if they are missing. The file
// must be in WAL mode or empty.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.Keeper == nil || cfg.Admit == nil || cfg.Path == "" {
		return nil, fmt.Errorf("%w: transfer/sqlite: Path, Keeper and Admit are required", cells.ErrInvalid)
	}
	abs, err := filepath.Abs(cfg.Path)
	if err != nil {
		return nil, err
	}
	cfg.Path = abs
	s := &Store{cfg: cfg, tables: append(append([]guard.Table(nil), cfg.Tables...), cfg.Keeper.MovedTables()...), wake: make(chan struct{})}
	if s.write, err = sql.Open("sqlite", dsn(abs, "immediate", "busy_timeout(3)", "synchronous(FULL)", "foreign_keys(0)")); err != nil {
		return nil, err
	}
	if s.read, err = sql.Open("sqlite", dsn(abs, "deferred", "busy_timeout(5000)", "query_only(1)")); err != nil {
		return nil, errors.Join(err, s.write.Close())
	}
	if err := s.install(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func dsn(path, lock string, pragmas ...string) string {
	q := url.Values{"_txlock": {lock}}
	for _, p := range pragmas {
		q.Add("_pragma", p)
	}
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String()
}

// Close closes the store's connections. Views and imports must be closed before.
func (s *Store) Close() error {
	return errors.Join(s.read.Close(), s.write.Close())
}

// schema is written so that an older and a newer build can run on it.
const schema = `
CREATE TABLE IF NOT EXISTS cell_transfer_capture (
	move TEXT PRIMARY KEY, tenant TEXT NOT NULL, base INTEGER NOT NULL, start INTEGER NOT NULL,
	released INTEGER NOT NULL DEFAULT 0, shape TEXT NOT NULL DEFAULT '',
	max_retained INTEGER NOT NULL DEFAULT 0, ended TEXT NOT NULL DEFAULT '', wal INTEGER NOT NULL DEFAULT 0, role INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS cell_transfer_capture_tenant ON cell_transfer_capture (tenant) WHERE released = 0;
CREATE TABLE IF NOT EXISTS cell_transfer_log (
	seq INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, tbl TEXT NOT NULL, k1, k2, k3, k4, k5, k6, k7, k8
);
CREATE INDEX IF NOT EXISTS cell_transfer_log_tenant ON cell_transfer_log (tenant, seq);
CREATE TABLE IF NOT EXISTS cell_transfer_import (
	move TEXT PRIMARY KEY, tenant TEXT NOT NULL, base INTEGER NOT NULL, gen INTEGER NOT NULL, state TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cell_transfer_touched (
	move TEXT NOT NULL, tbl TEXT NOT NULL, key BLOB NOT NULL, PRIMARY KEY (move, tbl, key)
) WITHOUT ROWID;`

func (s *Store) install(ctx context.Context) error {
	var mode string
	if err := s.begin(ctx, func() error { return s.write.QueryRowContext(ctx, "PRAGMA journal_mode = WAL").Scan(&mode) }); err != nil {
		return err
	}
	if mode != "wal" {
		return fmt.Errorf("%w: transfer/sqlite: %s is in journal mode %s, not WAL: readers would hold up writers", cells.ErrInvalid, s.cfg.Path, mode)
	}
	columns := []string{"shape TEXT NOT NULL DEFAULT ''", "max_retained INTEGER NOT NULL DEFAULT 0", "ended TEXT NOT NULL DEFAULT ''", "wal INTEGER NOT NULL DEFAULT 0",
		"role INTEGER NOT NULL DEFAULT 0"}
	has := func(tx *sql.Tx, column string) (there bool, err error) {
		name, _, _ := strings.Cut(column, " ")
		err = tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM pragma_table_info('cell_transfer_capture') WHERE name = ?)", name).Scan(&there)
		return there, err
	}
	var there bool
	err := s.reading(ctx, func(tx *sql.Tx) (err error) {
		if there, err = has(tx, columns[len(columns)-1]); err == nil && there {
			err = tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'cell_transfer_touched')").Scan(&there)
		}
		return err
	})
	if err != nil || there {
		return err
	}
	return s.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, schema); err != nil {
			return err
		}
		// A database of an older build.
		for _, c := range columns {
			if there, err := has(tx, c); err != nil || there {
				if err != nil {
					return err
				}
				continue
			}
			if _, err := tx.ExecContext(ctx, "ALTER TABLE cell_transfer_capture ADD COLUMN "+c); err != nil {
				return err
			}
		}
		return nil
	})
}

// lockPatience bounds the wait for the write lock.
const lockPatience = 10 * time.Second

// begin repeats f while the database is busy. SQLite's own waiters sleep longer
// and longer, and lose against a service that writes all the time; this one asks
// about every millisecond.
func (s *Store) begin(ctx context.Context, f func() error) error {
	deadline := time.Now().Add(lockPatience)
	for {
		err := f()
		var e *sqlite.Error
		if !errors.As(err, &e) || e.Code()&0xff != sqlite3.SQLITE_BUSY || time.Now().After(deadline) {
			return translate(err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// tx runs f in one write transaction.
func (s *Store) tx(ctx context.Context, f func(*sql.Tx) error) error {
	var tx *sql.Tx
	err := s.begin(ctx, func() (err error) { tx, err = s.write.BeginTx(ctx, nil); return err })
	if err != nil {
		return err
	}
	if err := f(tx); err != nil {
		_ = tx.Rollback()
		return translate(err)
	}
	return translate(tx.Commit())
}

// admitted runs f in one write transaction that the closed fence admits.
func (s *Store) admitted(ctx context.Context, tenant cells.TenantID, epoch cells.Epoch, move cells.MoveID, f func(*sql.Tx) error) error {
	return s.tx(ctx, func(tx *sql.Tx) error {
		if err := s.cfg.Admit(ctx, tx, tenant, epoch, move); err != nil {
			return err
		}
		return f(tx)
	})
}

// reading runs f in one consistent read.
func (s *Store) reading(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := s.read.BeginTx(ctx, nil)
	if err != nil {
		return translate(err)
	}
	defer func() { _ = tx.Rollback() }()
	return translate(f(tx))
}

// translate gives the driver's errors the meaning of package cells.
func translate(err error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) || errors.Is(err, cells.ErrUnavailable) {
		return err
	}
	switch e.Code() & 0xff {
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_SCHEMA:
		return fmt.Errorf("%w: transfer/sqlite: %w", cells.ErrUnavailable, err)
	}
	return err
}

// head is the number of the last entry of the change log, ever.
func head(ctx context.Context, tx *sql.Tx) (n uint64, err error) {
	err = tx.QueryRowContext(ctx, "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'cell_transfer_log'), 0)").Scan(&n)
	return n, err
}

// gave wakes the followers of this process: a position was given out.
func (s *Store) gave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.wake)
	s.wake = make(chan struct{})
}

func (s *Store) woken() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wake
}
