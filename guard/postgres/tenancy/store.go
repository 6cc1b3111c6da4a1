// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

//go:embed schema.sql
var schemaSQL string

//go:embed schema_2.sql
var schema2SQL string

//go:embed schema_3.sql
var schema3SQL string

// schemas are the versions of the rows, each of which adds to the one before. A process
// installs those up to its build's ([tenancy.SchemaVersion]) and never replaces what a
// newer one has installed.
var schemas = []string{schemaSQL, schema2SQL, schema3SQL}

// Store is a cell's own rows in its Postgres. Safe for concurrent use. It owns a few
// connections of its own; close it.
type Store struct {
	cfg  config
	pool *pgxpool.Pool
	// stall, if set, runs in a write of the mode between the lock and the commit; for
	// tests.
	stall func(ctx context.Context, try int)
}

var _ tenancy.Store = (*Store)(nil)

type config struct {
	schema     string
	columns    []string
	exclude    []string
	recordWait time.Duration
	log        *slog.Logger
}

// Option changes a store's defaults.
type Option func(*config)

// WithSchema names the guard's schema; "cell" by default.
func WithSchema(name string) Option { return func(c *config) { c.schema = name } }

// WithTenantColumns names the columns that hold a tenant; "tenant" by default. A
// table that has several of them is guarded by the first one in this order.
func WithTenantColumns(names ...string) Option { return func(c *config) { c.columns = names } }

// WithExclude leaves tables, by schema.name, out of the triggers and of what is read
// as the tenants' data: tables that have a tenant column and rows that are not the
// named tenant's. The guard's fences, barriers and tenancy rows are left out always.
func WithExclude(tables ...string) Option { return func(c *config) { c.exclude = tables } }

// WithRecordWait bounds how long Record waits for a write of the mode; 5 s by default.
func WithRecordWait(d time.Duration) Option { return func(c *config) { c.recordWait = d } }

// WithLogger takes what EnsureTriggers and SetMode have to say; slog.Default() by
// default.
func WithLogger(l *slog.Logger) Option { return func(c *config) { c.log = l } }

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

// Mark makes every session of connections with this configuration carry the marker,
// as a startup parameter: a pool that resets its sessions keeps it. A process calls
// it for every pool with which it writes tenants' rows, if and only if it runs the
// tenancy check (its CELL is set). schema is the guard's, "" for "cell".
func Mark(cfg *pgx.ConnConfig, schema string) {
	if schema == "" {
		schema = "cell"
	}
	if cfg.RuntimeParams == nil {
		cfg.RuntimeParams = map[string]string{}
	}
	cfg.RuntimeParams[schema+"."+tenancy.MarkerSetting] = "on"
}

// MarkSession marks one session, for a migration: its data steps only copy or
// rewrite rows that are stored already. Call it after the migration's lock is held.
func MarkSession(ctx context.Context, conn interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, schema string) error {
	if schema == "" {
		schema = "cell"
	}
	_, err := conn.Exec(ctx, `SELECT set_config($1, 'on', false)`, schema+"."+tenancy.MarkerSetting)
	return translate(err)
}

// Open returns the store of the database at dsn. It does not connect. Errors wrap
// [cells.ErrInvalid].
func Open(dsn string, opts ...Option) (*Store, error) {
	c := config{schema: "cell", columns: []string{"tenant"}, recordWait: 5 * time.Second, log: slog.Default()}
	for _, o := range opts {
		o(&c)
	}
	if !schemaName.MatchString(c.schema) || len(c.columns) == 0 || c.recordWait < time.Millisecond {
		return nil, fmt.Errorf("%w: tenancy: schema %q, columns %v, wait %s", cells.ErrInvalid, c.schema, c.columns, c.recordWait)
	}
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("%w: tenancy: the address of the database is malformed", cells.ErrInvalid)
	}
	cfg.MaxConns, cfg.MinConns = 4, 0
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = 5 * time.Second
	}
	// The rows are read at the primary: a standby may be behind, also one that was the
	// primary when the connection was made.
	cfg.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsPrimary
	p := cfg.ConnConfig.RuntimeParams
	// Whatever the database's default is: an insert that finds the mode changed has to
	// see that.
	p["default_transaction_isolation"] = "read committed"
	if p["application_name"] == "" {
		p["application_name"] = "cell tenancy"
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		return nil, fmt.Errorf("%w: tenancy: %w", cells.ErrInvalid, err)
	}
	return &Store{cfg: c, pool: pool}, nil
}

// Close ends the store's connections. Nothing may be running.
func (s *Store) Close() { s.pool.Close() }

func (s *Store) q(query string) string {
	return strings.ReplaceAll(query, "@s", s.cfg.schema)
}

// Install implements [tenancy.Store].
func (s *Store) Install(ctx context.Context) error {
	if v, err := s.installed(ctx); err != nil || v >= tenancy.SchemaVersion() {
		return err
	}
	err := s.inTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		// The guard's installation takes the same lock: both make the schema.
		if _, err := tx.Exec(ctx, s.q(`SELECT pg_advisory_xact_lock(hashtextextended('@s.install', 0))`)); err != nil {
			return err
		}
		v, err := s.version(ctx, tx)
		if err != nil || v >= tenancy.SchemaVersion() {
			return err
		}
		for _, sql := range schemas[v:tenancy.SchemaVersion()] {
			if err := tx.Conn().PgConn().Exec(ctx, s.q(sql)).Close(); err != nil {
				return err
			}
		}
		_, err = tx.Exec(ctx, s.q(`INSERT INTO @s.tenancy_meta (version) VALUES ($1) ON CONFLICT (one) DO UPDATE SET version = EXCLUDED.version`), tenancy.SchemaVersion())
		return err
	})
	if err != nil {
		return fmt.Errorf("tenancy: install schema %s: %w", s.cfg.schema, err)
	}
	return nil
}

func (s *Store) installed(ctx context.Context) (int, error) {
	v, err := s.version(ctx, s.pool)
	if err != nil {
		return 0, fmt.Errorf("tenancy: reading the schema's version: %w", translate(err))
	}
	return v, nil
}

type querier interface {
	QueryRow(context.Context, string, ...any) pgx.Row
	Query(context.Context, string, ...any) (pgx.Rows, error)
}

// version is 0 when nothing is installed.
func (s *Store) version(ctx context.Context, q querier) (v int, err error) {
	var there bool
	if err := q.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, s.cfg.schema+".tenancy_meta").Scan(&there); err != nil || !there {
		return 0, err
	}
	err = q.QueryRow(ctx, s.q(`SELECT coalesce(max(version), 0) FROM @s.tenancy_meta`)).Scan(&v)
	return v, err
}

// inTx runs fn in a transaction; errors are translated.
func (s *Store) inTx(ctx context.Context, o pgx.TxOptions, fn func(pgx.Tx) error) error {
	return translate(pgx.BeginTxFunc(ctx, s.pool, o, fn))
}

// Read implements [tenancy.Store].
func (s *Store) Read(ctx context.Context) (tenancy.Rows, error) {
	rows, err := s.read(ctx, s.pool)
	if err != nil {
		return tenancy.Rows{}, fmt.Errorf("tenancy: reading the cell's own rows: %w", translate(err))
	}
	return rows, nil
}

func (s *Store) read(ctx context.Context, q querier) (r tenancy.Rows, err error) {
	var mode, cell, current, next *string
	var first *bool
	err = q.QueryRow(ctx, s.q(`SELECT m.mode, f.first, f.cell, o.current, o.next, EXISTS (SELECT FROM @s.tenancy)
		FROM (SELECT) AS one LEFT JOIN @s.own_mode m ON true LEFT JOIN @s.own_first f ON true LEFT JOIN @s.own_self o ON true`)).
		Scan(&mode, &first, &cell, &current, &next, &r.AnyTenancy)
	if err != nil {
		return tenancy.Rows{}, err
	}
	if mode != nil {
		r.Mode = tenancy.Mode(*mode)
	}
	if first != nil {
		r.First = &tenancy.First{First: *first, Cell: cells.CellID(*cell)}
	}
	if current != nil {
		r.Self = &tenancy.Self{}
		for _, v := range []struct {
			text *string
			to   **tenancy.Fingerprint
		}{{current, &r.Self.Current}, {next, &r.Self.Next}} {
			if v.text == nil {
				continue
			}
			f, err := tenancy.DecodeFingerprint([]byte(*v.text))
			if err != nil {
				return tenancy.Rows{}, err
			}
			*v.to = &f
		}
	}
	return r, nil
}

// Held implements [tenancy.Store].
func (s *Store) Held(ctx context.Context, tenant cells.TenantID) (held bool, err error) {
	err = s.pool.QueryRow(ctx, s.q(`SELECT EXISTS (SELECT FROM @s.tenancy WHERE tenant = $1)`), string(tenant)).Scan(&held)
	if err != nil {
		return false, fmt.Errorf("tenancy: looking for tenant %s: %w", tenant, translate(err))
	}
	return held, nil
}

// recordSQL locks the mode row and inserts in one statement. The lock is taken on
// the row as it is committed: one that a writer has just changed is read again.
const recordSQL = `WITH m AS MATERIALIZED (
		SELECT m.mode, f.first FROM @s.own_mode m, @s.own_first f, @s.own_self o FOR SHARE OF m
	), put AS (
		INSERT INTO @s.tenancy (tenant) SELECT $1 FROM m WHERE m.first AND m.mode = 'recording' ON CONFLICT (tenant) DO NOTHING
	)
	SELECT CASE WHEN m.first AND m.mode = 'recording' THEN 'recording' ELSE 'enforced' END FROM m`

// Record implements [tenancy.Store].
func (s *Store) Record(ctx context.Context, tenant cells.TenantID) (mode tenancy.Mode, held bool, err error) {
	if err := validTenant(tenant); err != nil {
		return "", false, err
	}
	err = s.inTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", s.cfg.recordWait.Milliseconds())); err != nil {
			return err
		}
		return tx.QueryRow(ctx, s.q(recordSQL), string(tenant)).Scan(&mode)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		// Some row of the state is missing: as enforced, or nothing to record in.
		rows, rerr := s.Read(ctx)
		if rerr != nil {
			return "", false, rerr
		}
		if mode = rows.EffectiveMode(); mode == tenancy.Recording {
			return "", false, fmt.Errorf("%w: tenancy: the cell's own rows changed meanwhile", cells.ErrUnavailable)
		}
		return mode, false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("tenancy: recording tenant %s: %w", tenant, err)
	}
	return mode, mode == tenancy.Recording, nil
}

// Hold implements [tenancy.Store].
func (s *Store) Hold(ctx context.Context, tenants ...cells.TenantID) error {
	ids := make([]string, len(tenants))
	for i, t := range tenants {
		if err := validTenant(t); err != nil {
			return err
		}
		ids[i] = string(t)
	}
	// In one order everywhere, so that two callers do not wait for each other.
	_, err := s.pool.Exec(ctx, s.q(`INSERT INTO @s.tenancy (tenant) SELECT DISTINCT t FROM unnest($1::text[]) t ORDER BY t ON CONFLICT (tenant) DO NOTHING`), ids)
	if err != nil {
		return fmt.Errorf("tenancy: holding %d tenants: %w", len(ids), translate(err))
	}
	return nil
}

// underFence runs fn in a transaction that no order to the tenant's fence crosses, with
// the epoch that the fence is closed at; closed is false when it is not. A schema without
// fences has none that is closed.
func (s *Store) underFence(ctx context.Context, tenant cells.TenantID, fn func(tx pgx.Tx, closed bool, at cells.Epoch) error) error {
	if err := validTenant(tenant); err != nil {
		return err
	}
	return s.inTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		var fenced, closed bool
		var at int64
		if err := tx.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, s.cfg.schema+".fence").Scan(&fenced); err != nil {
			return err
		}
		if fenced {
			// The function takes the lock that orders wait for, then reads.
			err := tx.QueryRow(ctx, s.q(`SELECT coalesce(NOT (f).is_open, false), coalesce((f).epoch, 0) FROM (SELECT @s.locked_fence($1) AS f OFFSET 0) AS one`), string(tenant)).Scan(&closed, &at)
			if err != nil {
				return err
			}
		}
		return fn(tx, closed, cells.Epoch(at))
	})
}

// HoldPlaced implements [tenancy.Store].
func (s *Store) HoldPlaced(ctx context.Context, tenant cells.TenantID) error {
	err := s.underFence(ctx, tenant, func(tx pgx.Tx, closed bool, _ cells.Epoch) error {
		if closed {
			return tenancy.ErrMoved
		}
		_, err := tx.Exec(ctx, s.q(`INSERT INTO @s.tenancy (tenant) VALUES ($1) ON CONFLICT (tenant) DO NOTHING`), string(tenant))
		return err
	})
	if err != nil {
		return fmt.Errorf("tenancy: holding tenant %s: %w", tenant, err)
	}
	return nil
}

// Unhold implements [tenancy.Store].
func (s *Store) Unhold(ctx context.Context, tenant cells.TenantID, upto cells.Epoch) error {
	err := s.underFence(ctx, tenant, func(tx pgx.Tx, closed bool, at cells.Epoch) error {
		if !closed || upto != 0 && at > upto {
			return tenancy.ErrNotMoved
		}
		_, err := tx.Exec(ctx, s.q(`DELETE FROM @s.tenancy WHERE tenant = $1`), string(tenant))
		return err
	})
	if err != nil {
		return fmt.Errorf("tenancy: letting tenant %s go: %w", tenant, err)
	}
	return nil
}

func validTenant(t cells.TenantID) error {
	if tenancy.Everybody(string(t)) {
		return fmt.Errorf("%w: tenancy: %q names no tenant", cells.ErrInvalid, t)
	}
	return t.Validate()
}

// Tenants implements [tenancy.Store].
func (s *Store) Tenants(ctx context.Context) ([]cells.TenantID, error) {
	rows, err := s.pool.Query(ctx, s.q(`SELECT tenant FROM @s.tenancy ORDER BY tenant`))
	if err != nil {
		return nil, translate(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[cells.TenantID])
	return out, translate(err)
}

// Prepare implements [tenancy.Store].
func (s *Store) Prepare(ctx context.Context, p tenancy.Preparation) (rows tenancy.Rows, err error) {
	if err := errors.Join(p.First.Cell.Validate(), p.Mode.Validate()); err != nil {
		return rows, err
	}
	if p.Self != nil && p.Self.Current == nil {
		return rows, fmt.Errorf("%w: tenancy: an own row without a current fingerprint", cells.ErrInvalid)
	}
	err = s.inTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		// Against another preparation; readers and Record go on.
		if _, err := tx.Exec(ctx, s.q(`LOCK TABLE @s.own_first IN SHARE ROW EXCLUSIVE MODE`)); err != nil {
			return err
		}
		have, err := s.read(ctx, tx)
		if err != nil {
			return err
		}
		if have.First != nil && *have.First != p.First {
			return fmt.Errorf("%w: the first row is (%t, %s), not (%t, %s)", tenancy.ErrOtherRow, have.First.First, have.First.Cell, p.First.First, p.First.Cell)
		}
		if have.First == nil {
			if _, err := tx.Exec(ctx, s.q(`INSERT INTO @s.own_first (first, cell) VALUES ($1, $2)`), p.First.First, string(p.First.Cell)); err != nil {
				return err
			}
		}
		if have.Mode == "" {
			if _, err := tx.Exec(ctx, s.q(`INSERT INTO @s.own_mode (mode) VALUES ($1)`), string(p.Mode)); err != nil {
				return err
			}
		}
		if p.Self != nil && (have.Self == nil || p.ReplaceSelf) {
			if err := s.putSelf(ctx, tx, *p.Self); err != nil {
				return err
			}
		}
		rows, err = s.read(ctx, tx)
		return err
	})
	if err != nil {
		return tenancy.Rows{}, fmt.Errorf("tenancy: preparing cell %s: %w", p.First.Cell, err)
	}
	return rows, nil
}

type execer interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}

func (s *Store) putSelf(ctx context.Context, x execer, self tenancy.Self) error {
	if self.Current == nil {
		return fmt.Errorf("%w: tenancy: an own row without a current fingerprint", cells.ErrInvalid)
	}
	var next *string
	if self.Next != nil {
		text := string(self.Next.Encode())
		next = &text
	}
	_, err := x.Exec(ctx, s.q(`INSERT INTO @s.own_self (current, next) VALUES ($1, $2)
		ON CONFLICT (one) DO UPDATE SET current = EXCLUDED.current, next = EXCLUDED.next, changed_at = clock_timestamp()`), string(self.Current.Encode()), next)
	return err
}

// SetSelf implements [tenancy.Store].
func (s *Store) SetSelf(ctx context.Context, self tenancy.Self) error {
	if err := s.putSelf(ctx, s.pool, self); err != nil {
		return fmt.Errorf("tenancy: writing the own row: %w", translate(err))
	}
	return nil
}

// translate adds the sentinel that a caller can act on.
func translate(err error) error {
	if err == nil || errors.Is(err, cells.ErrUnavailable) || errors.Is(err, cells.ErrInvalid) || errors.Is(err, cells.ErrConflict) || errors.Is(err, pgx.ErrNoRows) {
		return err
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		if errors.Is(err, context.Canceled) {
			return err
		}
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err) // the connection, or its patience
	}
	switch {
	case pg.Code == tenancy.SQLState:
		return fmt.Errorf("%w: %w", tenancy.ErrRefused, err)
	case pg.Code == codeLockTimeout, pg.Code == codeNoTable, pg.Code == codeNoSchema, pg.Code == codeReadOnly, strings.HasPrefix(pg.Code, "08"), strings.HasPrefix(pg.Code, "53"),
		strings.HasPrefix(pg.Code, "57"), strings.HasPrefix(pg.Code, "40"):
		// A table that is not there yet is one that a migration will make.
		return fmt.Errorf("%w: %w", cells.ErrUnavailable, err)
	}
	return err
}

const (
	codeLockTimeout = "55P03"
	codeNoTable     = "42P01"
	codeNoSchema    = "3F000"
	codeReadOnly    = "25006"
	codeNotOwner    = "42501"
	codeExists      = "42710"
)
