// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/internal/pull"
)

// watchRows bounds one update of a watch.
const watchRows = 1000

// Table is a [cells.RoutingTable] in a Postgres database. Safe for concurrent use.
type Table struct {
	pool   *pgxpool.Pool
	owned  bool // Close closes pool
	schema string
	poll   time.Duration
	idle   time.Duration
	q      queries
	notice pull.Notice

	life context.Context // ends with Close
	end  context.CancelFunc
	once sync.Once

	mu        sync.Mutex     // guards all below
	listening bool           // the listener has been started
	listener  sync.WaitGroup // its goroutine
}

var _ cells.RoutingTable = (*Table)(nil)

// Option configures a Table.
type Option func(*Table)

// WithSchema sets the schema that the table lives in; "cells" by default. It is
// [a-z_][a-z0-9_]{0,39} and is created if it is missing. Tables in different
// schemas of a database know nothing of each other.
func WithSchema(name string) Option { return func(t *Table) { t.schema = name } }

// WithPoll sets how often a watch asks without having been notified; 500 ms by
// default.
func WithPoll(d time.Duration) Option { return func(t *Table) { t.poll = max(d, time.Millisecond) } }

// WithWatchIdle sets how long a watch without changes waits before it gives a
// sign of life; 1 s by default.
func WithWatchIdle(d time.Duration) Option {
	return func(t *Table) { t.idle = max(d, time.Millisecond) }
}

// Open connects to the database at url (a URL or a keyword string, as pgx takes
// it) and opens the table there. The error wraps [cells.ErrInvalid] or
// [cells.ErrUnavailable]; it does not hold the password.
func Open(ctx context.Context, url string, opts ...Option) (*Table, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("%w: database url: %v", cells.ErrInvalid, err)
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", cells.ErrUnavailable, err)
	}
	t, err := New(ctx, pool, opts...)
	if err != nil {
		pool.Close()
		return nil, err
	}
	t.owned = true
	return t, nil
}

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// New opens the table on a pool that the caller still owns. The error wraps
// [cells.ErrInvalid] or [cells.ErrUnavailable].
func New(ctx context.Context, pool *pgxpool.Pool, opts ...Option) (*Table, error) {
	t := &Table{pool: pool, schema: "cells", poll: 500 * time.Millisecond, idle: time.Second}
	for _, o := range opts {
		o(t)
	}
	if !schemaName.MatchString(t.schema) || strings.HasPrefix(t.schema, "pg_") {
		return nil, fmt.Errorf("%w: schema name %q", cells.ErrInvalid, t.schema)
	}
	t.q = newQueries(t.schema)
	if err := migrate(ctx, pool.Config().ConnConfig, t.schema); err != nil {
		return nil, err
	}
	t.life, t.end = context.WithCancel(context.Background())
	return t, nil
}

// Close ends every watch and every later call with [cells.ErrClosed], stops the
// listener, and closes the pool if [Open] made it. It may be called again.
func (t *Table) Close() error {
	t.once.Do(func() {
		t.mu.Lock()
		t.end()
		t.mu.Unlock()
		t.listener.Wait()
		if t.owned {
			t.pool.Close()
		}
	})
	return nil
}

// queries are the statements with the schema's name in them.
type queries struct {
	get, list, listCell, since, revision, create, update, durable string
	channel                                                       string
}

func newQueries(schema string) queries {
	routes := pgx.Identifier{schema, "routes"}.Sanitize()
	meta := pgx.Identifier{schema, "routes_meta"}.Sanitize()
	count := `UPDATE ` + meta + ` SET revision = revision + 1 WHERE one = 1 RETURNING revision`
	// The counter and the rows in one statement, hence of one snapshot.
	rows := func(where, order string) string {
		return `SELECT m.revision, r.tenant, r.revision, r.row FROM ` + meta + ` m LEFT JOIN LATERAL
			(SELECT tenant, revision, row FROM ` + routes + ` WHERE ` + where + ` ORDER BY ` + order + ` LIMIT $2) r ON true
			ORDER BY r.` + order
	}
	return queries{
		get:      `SELECT revision, row FROM ` + routes + ` WHERE tenant = $1`,
		list:     rows(`tenant > $1`, `tenant`),
		listCell: rows(`tenant > $1 AND $3::text IN (cell, source, target)`, `tenant`),
		since:    rows(`revision > $1`, `revision`),
		revision: `SELECT revision FROM ` + meta,
		// The counter is taken and used in one statement. A row that was created
		// meanwhile is left alone: no row is returned, and the counter goes back with
		// the transaction. DO UPDATE would wait for that row's lock with the counter in
		// hand, while the lock's holder may be waiting for the counter.
		create: `WITH m AS (` + count + `)
			INSERT INTO ` + routes + ` (tenant, revision, state, cell, source, target, epoch, row)
			SELECT $1, m.revision, $2, $3, $4, $5, $6, $7 FROM m
			ON CONFLICT DO NOTHING RETURNING revision`,
		update: `WITH m AS (` + count + `)
			UPDATE ` + routes + ` r SET revision = m.revision, state = $2, cell = $3, source = $4, target = $5, epoch = $6, row = $7
			FROM m WHERE r.tenant = $1 RETURNING r.revision`,
		durable: `SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'`,
		channel: "cells_routes_" + schema,
	}
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
	if t.life.Err() != nil {
		return fmt.Errorf("%w: table", cells.ErrClosed)
	}
	return translate(ctx, doing, err)
}

func translate(ctx context.Context, doing string, err error) error {
	if end := pull.EndOf(ctx); end != nil {
		return fmt.Errorf("%s: %w", doing, end)
	}
	return fmt.Errorf("%w: %s: %v", cells.ErrUnavailable, doing, err)
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

func readRow(row pgx.Row, tenant cells.TenantID) (cells.TenantRoute, error) {
	var revision int64
	var enc []byte
	if err := row.Scan(&revision, &enc); err != nil {
		return cells.TenantRoute{}, err
	}
	return scanRow(string(tenant), revision, enc)
}

// Get implements [cells.RoutingTable].
func (t *Table) Get(ctx context.Context, tenant cells.TenantID) (cells.TenantRoute, error) {
	if err := t.begin(ctx); err != nil {
		return cells.TenantRoute{}, err
	}
	if err := tenant.Validate(); err != nil {
		return cells.TenantRoute{}, err
	}
	r, err := readRow(t.pool.QueryRow(ctx, t.q.get, string(tenant)), tenant)
	switch {
	case err == nil, errors.Is(err, cells.ErrInvalid):
		return r, err
	case errors.Is(err, pgx.ErrNoRows):
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
	// Read committed, whatever the server's default: the counter's lock is what
	// orders, and stricter levels would only fail on it.
	tx, err := t.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "beginning a change", err)
	}
	got, err := t.CompareAndSetTx(ctx, tx, old, next)
	if err != nil {
		// Not with ctx: it may have ended, and the connection is to be kept.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = tx.Rollback(undo)
		return cells.TenantRoute{}, err
	}
	if err := tx.Commit(ctx); err != nil {
		return cells.TenantRoute{}, t.failed(ctx, "committing a change", err)
	}
	t.Changed()
	return got, nil
}

// CompareAndSetTx is CompareAndSet inside a transaction of the caller, which must
// be read committed and on the same database: the change happens if and when the
// caller commits, together with whatever else the transaction does. From here on
// no other change of the table can commit before the caller's transaction ends:
// call it last. After an error the caller rolls back; after its commit it calls
// [Table.Changed].
func (t *Table) CompareAndSetTx(ctx context.Context, tx pgx.Tx, old cells.Revision, next cells.TenantRoute) (cells.TenantRoute, error) {
	next = cells.CanonicalRoute(next)
	next.Revision = 0
	if err := cells.ValidateRoute(next); err != nil {
		return cells.TenantRoute{}, err
	}
	enc, err := cells.EncodeRoute(next)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	cur, err := t.lockRow(ctx, tx, next.TenantID)
	if err != nil {
		return cells.TenantRoute{}, err
	}
	if cur.Revision != old {
		return cells.TenantRoute{}, fmt.Errorf("%w: %s is at revision %d, not %d", cells.ErrConflict, next.TenantID, cur.Revision, old)
	}
	if err := cells.ValidateChange(cur, next); err != nil {
		return cells.TenantRoute{}, err
	}
	query := t.q.update
	if old == 0 {
		query = t.q.create
	}
	var b pgx.Batch
	b.Queue(query, string(next.TenantID), next.State.String(), string(next.CellID), string(next.SourceCell), string(next.TargetCell),
		int64(next.Epoch), string(enc))
	b.Queue(`SELECT pg_notify($1, '')`, t.q.channel)
	res := tx.SendBatch(ctx, &b)
	var revision int64
	err = res.QueryRow().Scan(&revision)
	if closeErr := res.Close(); err == nil {
		err = closeErr
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return cells.TenantRoute{}, fmt.Errorf("%w: %s was created meanwhile", cells.ErrConflict, next.TenantID)
	case err != nil:
		return cells.TenantRoute{}, t.failed(ctx, "writing a route", err)
	}
	next.Revision = cells.Revision(revision)
	return next, nil
}

// lockRow returns the tenant's row, locked until the transaction ends; the zero
// row if there is none.
func (t *Table) lockRow(ctx context.Context, tx pgx.Tx, tenant cells.TenantID) (cells.TenantRoute, error) {
	var b pgx.Batch
	b.Queue(t.q.durable)
	b.Queue(t.q.get+` FOR UPDATE`, string(tenant))
	res := tx.SendBatch(ctx, &b)
	_, err := res.Exec()
	var cur cells.TenantRoute
	if err == nil {
		cur, err = readRow(res.QueryRow(), tenant)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	if closeErr := res.Close(); err == nil {
		err = closeErr
	}
	if err != nil && !errors.Is(err, cells.ErrInvalid) {
		err = t.failed(ctx, "reading a route", err)
	}
	return cur, err
}

// Changed tells the watches of this handle that there may be changes. Those of
// other processes are notified by the database.
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
	query, args := t.q.list, []any{string(opts.After), limit + 1}
	if opts.Cell != "" {
		query, args = t.q.listCell, append(args, string(opts.Cell))
	}
	routes, revision, err := t.rows(ctx, query, args...)
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

func (t *Table) rows(ctx context.Context, query string, args ...any) ([]cells.TenantRoute, cells.Revision, error) {
	const doing = "reading routes"
	rs, err := t.pool.Query(ctx, query, args...)
	if err != nil {
		return nil, 0, t.failed(ctx, doing, err)
	}
	defer rs.Close()
	var table int64
	var out []cells.TenantRoute
	for rs.Next() {
		var tenant *string
		var revision *int64
		var row []byte
		if err := rs.Scan(&table, &tenant, &revision, &row); err != nil {
			return nil, 0, t.failed(ctx, doing, err)
		}
		if tenant == nil || revision == nil {
			continue // the table's revision alone
		}
		r, err := scanRow(*tenant, *revision, row)
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
