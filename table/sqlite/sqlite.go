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
	"path/filepath"
	"sync"
	"time"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
	sqlitelib "modernc.org/sqlite/lib"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

//go:embed migrations/*.sql
var migrations embed.FS

// watchRows bounds one update of a watch.
const watchRows = 1000

// Table is a [cells.RoutingTable] in a SQLite database. Safe for concurrent use.
type Table struct {
	db     *sql.DB
	owned  bool // Close closes db
	poll   time.Duration
	idle   time.Duration
	write  chan struct{} // admits one writer of this process; SQLite's own queue is unfair
	notice pull.Notice
	life   context.Context // ends with Close
	end    context.CancelFunc
	once   sync.Once
}

var _ cells.RoutingTable = (*Table)(nil)

// Option configures a Table.
type Option func(*Table)

// WithPoll sets how often a watch looks for changes made by other processes;
// 100 ms by default.
func WithPoll(d time.Duration) Option { return func(t *Table) { t.poll = max(d, time.Millisecond) } }

// WithWatchIdle sets how long a watch without changes waits before it gives a
// sign of life; 1 s by default.
func WithWatchIdle(d time.Duration) Option {
	return func(t *Table) { t.idle = max(d, time.Millisecond) }
}

// DSN returns the data source name of the database file at path, with the
// settings that this package relies on: WAL, full synchronisation, write
// transactions that take their lock first, and a busy timeout of 5 s.
func DSN(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	u := url.URL{Scheme: "file", OmitHost: true, Path: path}
	return u.String() + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_pragma=synchronous(FULL)&_txlock=immediate"
}

// Open opens or creates the table in the database file at path. The folder must
// exist. The error wraps [cells.ErrInvalid] or [cells.ErrUnavailable].
func Open(ctx context.Context, path string, opts ...Option) (*Table, error) {
	db, err := sql.Open("sqlite", DSN(path))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %v", cells.ErrInvalid, path, err)
	}
	db.SetMaxOpenConns(8)
	t, err := New(ctx, db, opts...)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), db.Close())
	}
	t.owned = true
	return t, nil
}

// New uses a database that the caller opened (see [DSN] for the settings) and
// still owns; it creates or migrates the table's part of it. The error wraps
// [cells.ErrInvalid] or [cells.ErrUnavailable].
func New(ctx context.Context, db *sql.DB, opts ...Option) (*Table, error) {
	t := &Table{
		db: db, poll: 100 * time.Millisecond, idle: time.Second,
		write: make(chan struct{}, 1),
	}
	t.life, t.end = context.WithCancel(context.Background())
	for _, o := range opts {
		o(t)
	}
	if err := migrate(ctx, db); err != nil {
		return nil, err
	}
	return t, nil
}

func migrate(ctx context.Context, db *sql.DB) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	// Several processes may start at once: the version is read and written under
	// the database's write lock, one after the other.
	for attempt := 0; ; attempt++ {
		err = migrateOnce(ctx, db, sub)
		if err == nil || ctx.Err() != nil || errors.Is(err, cells.ErrInvalid) || attempt == 20 {
			return err
		}
		wait := time.NewTimer(time.Duration(attempt+1) * 10 * time.Millisecond)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
		}
	}
}

func migrateOnce(ctx context.Context, db *sql.DB, sub fs.FS) error {
	p, err := goose.NewProvider(goose.DialectSQLite3, db, sub,
		goose.WithTableName("cells_routes_version"), goose.WithLogger(goose.NopLogger()), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return fmt.Errorf("%w: migrations: %v", cells.ErrInvalid, err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return translate(ctx, "reading the version", err)
	}
	if have > want {
		return fmt.Errorf("%w: the table was made by a newer version (schema %d, this one knows up to %d); upgrade this program", cells.ErrInvalid, have, want)
	}
	if have == want {
		return nil
	}
	if _, err := p.Up(ctx); err != nil {
		return translate(ctx, "migrating", err)
	}
	return nil
}

// Close ends every watch and every later call with [cells.ErrClosed], and closes
// the database if [Open] opened it. It may be called again.
func (t *Table) Close() error {
	var err error
	t.once.Do(func() {
		t.end()
		if t.owned {
			t.write <- struct{}{} // after the change that is being written
			err = t.db.Close()
			<-t.write
		}
	})
	return err
}

// begin refuses what need not reach the database.
func (t *Table) begin(ctx context.Context) error {
	if t.life.Err() != nil {
		return fmt.Errorf("%w: table", cells.ErrClosed)
	}
	return pull.EndOf(ctx)
}

// failed translates a driver's error.
func (t *Table) failed(ctx context.Context, doing string, err error) error {
	if closed := t.begin(context.WithoutCancel(ctx)); closed != nil {
		return closed
	}
	return translate(ctx, doing, err)
}

func translate(ctx context.Context, doing string, err error) error {
	if end := pull.EndOf(ctx); end != nil {
		return fmt.Errorf("%s: %w", doing, end)
	}
	kind := cells.ErrUnavailable
	var se *sqlite.Error
	if errors.As(err, &se) {
		switch se.Code() & 0xff {
		case sqlitelib.SQLITE_CORRUPT, sqlitelib.SQLITE_NOTADB, sqlitelib.SQLITE_FORMAT:
			kind = cells.ErrInvalid
		}
	}
	return fmt.Errorf("%w: %s: %v", kind, doing, err)
}

// scanRow makes a row out of its columns.
func scanRow(tenant string, revision int64, row []byte) (cells.TenantRoute, error) {
	r, err := cells.DecodeRoute(row)
	if err != nil {
		return cells.TenantRoute{}, fmt.Errorf("row of %q: %w", tenant, err)
	}
	if string(r.TenantID) != tenant || revision <= 0 {
		return cells.TenantRoute{}, fmt.Errorf("%w: the row of %q holds tenant %q, revision %d", cells.ErrInvalid, tenant, r.TenantID, revision)
	}
	r.Revision = cells.Revision(revision)
	return r, nil
}

type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func getRow(ctx context.Context, q querier, tenant cells.TenantID) (cells.TenantRoute, error) {
	var revision int64
	var row []byte
	err := q.QueryRowContext(ctx, "SELECT revision, row FROM cells_routes WHERE tenant = ?", string(tenant)).Scan(&revision, &row)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	return scanRow(string(tenant), revision, row)
}

// Get implements [cells.RoutingTable].
func (t *Table) Get(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	if err := tenant.Validate(); err != nil {
		return cells.TenantRoute{}, err
	}
	r, err := getRow(ctx, t.db, tenant)
	switch {
	case err == nil, errors.Is(err, cells.ErrInvalid):
		return r, err
	case errors.Is(err, sql.ErrNoRows):
		return cells.TenantRoute{}, fmt.Errorf("%w for %s", cells.ErrNotFound, tenant)
	}
	return cells.TenantRoute{}, t.failed(ctx, "reading a route", err)
}

// CompareAndSet implements [cells.RoutingTable].
func (t *Table) CompareAndSet(ctx context.Context, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	if err := cells.ValidateRoute(cells.CanonicalRoute(next)); err != nil {
		return cells.TenantRoute{}, err
	}
	select {
	case t.write <- struct{}{}:
	case <-ctx.Done():
		return cells.TenantRoute{}, pull.EndOf(ctx)
	case <-t.life.Done():
		return cells.TenantRoute{}, fmt.Errorf("%w: table", cells.ErrClosed)
	}
	defer func() { <-t.write }()
	tx, err := t.db.BeginTx(ctx, nil)
	if err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "beginning a change", err)
	}
	got, err := t.CompareAndSetTx(ctx, tx, old, next)
	if err != nil {
		_ = tx.Rollback()
		return cells.TenantRoute{}, err
	}
	if err := tx.Commit(); err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "committing a change", err)
	}
	t.Changed()
	return got, nil
}

// CompareAndSetTx is CompareAndSet inside a write transaction of the caller, on
// the same database: the change happens if and when the caller commits, together
// with whatever else the transaction does. The caller rolls back after an error,
// and calls [Table.Changed] after it has committed.
func (t *Table) CompareAndSetTx(ctx context.Context, tx *sql.Tx, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	next = cells.CanonicalRoute(next)
	next.Revision = 0
	if err := cells.ValidateRoute(next); err != nil {
		return cells.TenantRoute{}, err
	}
	enc, err := cells.EncodeRoute(next)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	// First the counter: it takes the write lock, whatever kind of transaction this
	// is, and what is read after it stays true until the end.
	var revision int64
	err = tx.QueryRowContext(ctx, "UPDATE cells_routes_meta SET revision = revision + 1 WHERE one = 1 RETURNING revision").Scan(&revision)
	if err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "taking a revision", err)
	}
	cur, err := getRow(ctx, tx, next.TenantID)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		if errors.Is(err, cells.ErrInvalid) {
			return cells.TenantRoute{}, err
		}
		return cells.TenantRoute{}, t.failed(ctx, "reading a route", err)
	}
	if cur.Revision != old {
		return cells.TenantRoute{}, fmt.Errorf("%w: %s is at revision %d, not %d", cells.ErrConflict, next.TenantID, cur.Revision, old)
	}
	if err := cells.ValidateChange(cur, next); err != nil {
		return cells.TenantRoute{}, err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO cells_routes (tenant, revision, state, cell, source, target, epoch, row)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (tenant) DO UPDATE SET revision = excluded.revision, state = excluded.state, cell = excluded.cell,
			source = excluded.source, target = excluded.target, epoch = excluded.epoch, row = excluded.row`,
		string(next.TenantID), revision, next.State.String(), string(next.CellID), string(next.SourceCell), string(next.TargetCell),
		int64(next.Epoch), string(enc))
	if err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "writing a route", err)
	}
	next.Revision = cells.Revision(revision)
	return next, nil
}

// Changed tells the watches of this table that there may be changes.
func (t *Table) Changed() { t.notice.Send() }

// List implements [cells.RoutingTable].
func (t *Table) List(ctx context.Context, opts cells.ListOptions) (cells.RoutePage, error) {
	if err := t.begin(ctx); err != nil {
		return cells.RoutePage{}, err
	}
	if err := opts.Validate(); err != nil {
		return cells.RoutePage{}, err
	}
	limit := opts.PageSize()
	query, args := "tenant > ?", []any{string(opts.After)}
	if opts.Cell != "" {
		query += " AND ? IN (cell, source, target)"
		args = append(args, string(opts.Cell))
	}
	routes, revision, err := t.rows(ctx, query, "tenant", limit+1, args...)
	if err != nil {
		return cells.RoutePage{}, err
	}
	page := cells.RoutePage{Routes: routes, Revision: revision}
	if len(routes) > limit {
		page.Routes = routes[:limit]
		page.Next = routes[limit-1].TenantID
	}
	return page, nil
}

// rows reads rows and the table's revision in one statement, hence of one moment.
func (t *Table) rows(ctx context.Context, where, order string, limit int, args ...any) ([]cells.TenantRoute, cells.Revision, error) {
	const doing = "reading routes"
	rs, err := t.db.QueryContext(ctx, `SELECT m.revision, r.tenant, r.revision, r.row FROM cells_routes_meta m LEFT JOIN
		(SELECT tenant, revision, row FROM cells_routes WHERE `+where+` ORDER BY `+order+` LIMIT ?) r ON 1 ORDER BY r.`+order,
		append(args, limit)...)
	if err != nil {
		return nil, 0, t.failed(ctx, doing, err)
	}
	defer func() { _ = rs.Close() }()
	var table int64
	var out []cells.TenantRoute
	for rs.Next() {
		var tenant sql.NullString
		var revision sql.NullInt64
		var row []byte
		if err := rs.Scan(&table, &tenant, &revision, &row); err != nil {
			return nil, 0, t.failed(ctx, doing, err)
		}
		if !tenant.Valid {
			continue // the table's revision alone
		}
		r, err := scanRow(tenant.String, revision.Int64, row)
		if err != nil {
			return nil, 0, err
		}
		out = append(out, r)
	}
	if err := rs.Err(); err != nil {
		return nil, 0, t.failed(ctx, doing, err)
	}
	return out, cells.Revision(table), nil
}

// Watch implements [cells.RoutingTable].
func (t *Table) Watch(ctx context.Context, from cells.Revision) (cells.RouteWatcher, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	if err := t.known(ctx, from); err != nil {
		return nil, err
	}
	return &pull.Watcher{From: from, Since: t.since, Notice: &t.notice, Poll: t.poll, Idle: t.idle, Table: t.life}, nil
}

// known refuses a revision that the table has not reached.
func (t *Table) known(ctx context.Context, from cells.Revision) error {
	var revision int64
	if err := t.db.QueryRowContext(ctx, "SELECT revision FROM cells_routes_meta").Scan(&revision); err != nil {
		return t.failed(ctx, "reading the revision", err)
	}
	return ahead(from, cells.Revision(revision))
}

func ahead(from, revision cells.Revision) error {
	if from > revision {
		return fmt.Errorf("%w: revision %d is ahead of the table's %d", cells.ErrCompacted, from, revision)
	}
	return nil
}

func (t *Table) since(ctx context.Context, from cells.Revision) (cells.RouteUpdate, error) {
	routes, revision, err := t.rows(ctx, "revision > ?", "revision", watchRows, int64(from))
	if err != nil {
		return cells.RouteUpdate{}, err
	}
	if err := ahead(from, revision); err != nil {
		return cells.RouteUpdate{}, err
	}
	if len(routes) == watchRows { // there may be more: the view is only as far as this
		revision = routes[len(routes)-1].Revision
	}
	return cells.RouteUpdate{Routes: routes, Revision: revision}, nil
}
