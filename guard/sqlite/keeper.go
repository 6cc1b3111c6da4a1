// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"context"
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/rules"
	"github.com/cloister-dev/cloister/guard/internal/txrun"
)

//go:embed schema.sql
var schemaSQL string

// schemaVersion grows with each change of schema.sql.
const schemaVersion = 1

// MovedTables implements [guard.Keeper].
func (g *Guard) MovedTables() []guard.Table {
	return []guard.Table{
		{Name: "cell_outbox", TenantColumn: "tenant"},
		{Name: "cell_outbox_published", TenantColumn: "tenant"},
	}
}

// Install implements [guard.Keeper]. SQLite cannot refuse writes that carry no
// admission, so the tables are checked only: [cells.ErrInvalid] when one is
// missing, or its tenant column is missing or is no part of the primary key.
func (g *Guard) Install(ctx context.Context, tables []guard.Table) error {
	var version int
	if err := g.db.QueryRowContext(ctx, `SELECT version FROM cell_meta`).Scan(&version); err != nil || version < schemaVersion {
		err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
			for stmt := range strings.SplitSeq(schemaSQL, ";\n") {
				if _, err := tx.ExecContext(ctx, stmt); err != nil {
					return err
				}
			}
			_, err := tx.ExecContext(ctx, `INSERT INTO cell_meta (one, version) VALUES (1, ?1) ON CONFLICT (one) DO UPDATE SET version = max(version, ?1)`, schemaVersion)
			return err
		})
		if err != nil {
			return fmt.Errorf("guard/sqlite: install: %w", err)
		}
	}
	for _, t := range tables {
		var column, key int
		err := g.db.QueryRowContext(ctx, `SELECT count(*), coalesce(sum(pk > 0), 0) FROM pragma_table_info(?) WHERE name = ?`, t.Name, t.TenantColumn).Scan(&column, &key)
		switch {
		case err != nil:
			return ended(ctx, translate(err))
		case column == 0:
			return fmt.Errorf("%w: table %s is missing or has no column %s", cells.ErrInvalid, t.Name, t.TenantColumn)
		case key == 0:
			return fmt.Errorf("%w: column %s of table %s is no part of the primary key", cells.ErrInvalid, t.TenantColumn, t.Name)
		}
	}
	return nil
}

// OpenFence implements [guard.Keeper].
func (g *Guard) OpenFence(ctx context.Context, o cells.FenceOrder) error {
	if err := rules.Check(g.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	// Members repeat orders whenever they start; those need no lock.
	if row, _, err := fenceRow(ctx, g.db, o.Tenant); err == nil {
		if _, change, err := rules.Open(row, o); !change || err != nil {
			return err
		}
	}
	return g.order(ctx, o, rules.Open)
}

// CloseFence implements [guard.Keeper].
func (g *Guard) CloseFence(ctx context.Context, o cells.FenceOrder) error {
	if err := rules.Check(g.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	return g.order(ctx, o, rules.Close)
}

func (g *Guard) order(ctx context.Context, o cells.FenceOrder, rule func(guard.Fence, cells.FenceOrder) (guard.Fence, bool, error)) error {
	return g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
		row, _, err := g.lockedFence(ctx, tx, o.Tenant)
		if err != nil {
			return err
		}
		next, change, err := rule(row, o)
		if err != nil || !change {
			return err
		}
		return putFence(ctx, tx, next)
	})
}

// inOrder runs a transaction of the guard's own under the file's write lock. It
// waits for the writer at most for the lock wait; the end of ctx before the
// commit leaves everything as it was.
func (g *Guard) inOrder(ctx context.Context, f func(context.Context, *sql.Tx) error) error {
	wctx, cancel := context.WithTimeoutCause(ctx, g.lockWait, fmt.Errorf("%w: a transaction holds the database's write lock", cells.ErrUnavailable))
	defer cancel()
	for try := 0; ; try++ {
		err := g.once(wctx, f)
		if !errors.Is(err, guard.ErrContended) {
			return ended(wctx, err)
		}
		if berr := txrun.Backoff(wctx, try); berr != nil {
			return ended(wctx, err)
		}
	}
}

func (g *Guard) once(ctx context.Context, f func(context.Context, *sql.Tx) error) error {
	leave, err := g.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	d, err := txrun.Begin(ctx, g.db, nil)
	if err != nil {
		return translate(err)
	}
	defer d.Rollback()
	if err := g.lockFile(ctx, d.Tx); err != nil && !missingTable(err) {
		return translate(err)
	}
	if err := f(ctx, d.Tx); err != nil {
		return translate(err)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return g.commit(ctx, d)
}

type querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// lockFile takes the write lock, whatever kind of transaction was begun: a
// writing statement takes it before it finds that it has nothing to write. In a
// deferred transaction whose snapshot is older than the last commit it fails
// (SQLITE_BUSY_SNAPSHOT).
func (g *Guard) lockFile(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, g.lockSQL)
	return err
}

func missingTable(err error) bool { return strings.Contains(err.Error(), "no such table") }

// lockedFence reads the row under the write lock; a missing one as
// [rules.Absent].
func (g *Guard) lockedFence(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) (guard.Fence, bool, error) {
	if err := g.lockFile(ctx, tx); err != nil {
		return guard.Fence{}, false, err
	}
	return fenceRow(ctx, tx, tenant)
}

func fenceRow(ctx context.Context, q querier, tenant cells.TenantID) (row guard.Fence, found bool, err error) {
	row = rules.Absent(tenant)
	var epoch, floor int64
	var move string
	err = q.QueryRowContext(ctx, `SELECT epoch, floor, is_open, move FROM cell_fence WHERE tenant = ?`, string(tenant)).Scan(&epoch, &floor, &row.Open, &move)
	if errors.Is(err, sql.ErrNoRows) {
		return rules.Absent(tenant), false, nil
	}
	row.Epoch, row.Floor, row.Move = cells.Epoch(epoch), cells.Epoch(floor), cells.MoveID(move)
	return row, true, err
}

func putFence(ctx context.Context, tx *sql.Tx, f guard.Fence) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO cell_fence (tenant, epoch, floor, is_open, move) VALUES (?, ?, ?, ?, ?)
		ON CONFLICT (tenant) DO UPDATE SET epoch = excluded.epoch, floor = excluded.floor, is_open = excluded.is_open, move = excluded.move`,
		string(f.Tenant), int64(f.Epoch), int64(f.Floor), f.Open, string(f.Move))
	return err
}

const fenceColumns = `SELECT f.tenant, f.epoch, f.floor, f.is_open, f.move, coalesce(h.seq, 0), coalesce(p.seq, 0), coalesce(b.paused, 0)
	FROM cell_fence f LEFT JOIN cell_outbox_head h USING (tenant) LEFT JOIN cell_outbox_published p USING (tenant)
	LEFT JOIN cell_outbox_barrier b USING (tenant)`

func scanFence(scan func(...any) error) (guard.Fence, error) {
	var (
		f                            guard.Fence
		tenant, move                 string
		epoch, floor, seq, published int64
	)
	err := scan(&tenant, &epoch, &floor, &f.Open, &move, &seq, &published, &f.Paused)
	f.Tenant, f.Epoch, f.Floor, f.Move = cells.TenantID(tenant), cells.Epoch(epoch), cells.Epoch(floor), cells.MoveID(move)
	f.Seq, f.Published = cells.EventSeq(seq), cells.EventSeq(published)
	return f, err
}

// Fence implements [guard.Keeper].
func (g *Guard) Fence(ctx context.Context, tenant cells.TenantID) (guard.Fence, error) {
	f, err := scanFence(g.db.QueryRowContext(ctx, fenceColumns+` WHERE f.tenant = ?`, string(tenant)).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return guard.Fence{}, fmt.Errorf("%w: no fence of tenant %s", cells.ErrNotFound, tenant)
	}
	return f, ended(ctx, translate(err))
}

// Fences implements [guard.Keeper].
func (g *Guard) Fences(ctx context.Context, after cells.TenantID, limit int) ([]guard.Fence, error) {
	var out []guard.Fence
	err := g.each(ctx, fenceColumns+` WHERE f.tenant > ? ORDER BY f.tenant LIMIT ?`, []any{string(after), clampLimit(limit)}, func(scan func(...any) error) error {
		f, err := scanFence(scan)
		out = append(out, f)
		return err
	})
	return out, err
}

func (g *Guard) each(ctx context.Context, query string, args []any, f func(scan func(...any) error) error) error {
	return ended(ctx, translate(eachRow(ctx, g.db, query, args, f)))
}

func eachRow(ctx context.Context, q querier, query string, args []any, f func(scan func(...any) error) error) error {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := f(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

func clampLimit(n int) int {
	if n <= 0 {
		return 1000
	}
	return min(n, 10000)
}

func barrierRow(ctx context.Context, q querier, tenant cells.TenantID) (rules.Barrier, error) {
	var b rules.Barrier
	var epoch int64
	var move string
	err := q.QueryRowContext(ctx, `SELECT paused, epoch, move FROM cell_outbox_barrier WHERE tenant = ?`, string(tenant)).Scan(&b.Paused, &epoch, &move)
	if errors.Is(err, sql.ErrNoRows) {
		return rules.Barrier{}, nil
	}
	b.Epoch, b.Move = cells.Epoch(epoch), cells.MoveID(move)
	return b, err
}

// barrier applies an order to the relay's row, in a transaction of the guard's.
func barrier(ctx context.Context, tx *sql.Tx, o cells.BarrierOrder, rule func(rules.Barrier, guard.Fence, cells.BarrierOrder) (rules.Barrier, error)) error {
	fence, _, err := fenceRow(ctx, tx, o.Tenant)
	if err != nil {
		return err
	}
	b, err := barrierRow(ctx, tx, o.Tenant)
	if err != nil {
		return err
	}
	if b, err = rule(b, fence, o); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO cell_outbox_barrier (tenant, paused, epoch, move) VALUES (?, ?, ?, ?)
		ON CONFLICT (tenant) DO UPDATE SET paused = excluded.paused, epoch = excluded.epoch, move = excluded.move`,
		string(o.Tenant), b.Paused, int64(b.Epoch), string(b.Move))
	return err
}

// PauseEvents implements [guard.Keeper]. If it fails the tenant may be paused
// already; StartEvents undoes that.
func (g *Guard) PauseEvents(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	if err := rules.Check(g.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return 0, err
	}
	// First the flag, committed: no publication starts from here on.
	if err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error { return barrier(ctx, tx, o, rules.Pause) }); err != nil {
		return 0, err
	}
	g.hub.Pause(o.Tenant)
	// Then the turn of whoever is publishing.
	wctx, cancel := context.WithTimeoutCause(ctx, g.lockWait, fmt.Errorf("%w: a publication of tenant %s is still in flight", cells.ErrUnavailable, o.Tenant))
	defer cancel()
	if err := g.awaitTurn(wctx, o.Tenant); err != nil {
		return 0, ended(wctx, err)
	}
	var mark int64
	err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
		b, err := barrierRow(ctx, tx, o.Tenant)
		if err != nil {
			return err
		}
		if !b.Paused || b.Epoch != o.Epoch {
			return fmt.Errorf("%w: a newer order to the events of tenant %s came in between", cells.ErrStaleOrder, o.Tenant)
		}
		return tx.QueryRowContext(ctx, `SELECT `+lastSeq, string(o.Tenant)).Scan(&mark)
	})
	return cells.EventSeq(mark), err
}

// awaitTurn waits until nobody publishes for the tenant.
func (g *Guard) awaitTurn(ctx context.Context, tenant cells.TenantID) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		var turns int
		if err := g.db.QueryRowContext(ctx, `SELECT count(*) FROM cell_outbox_turn WHERE tenant = ?`, string(tenant)).Scan(&turns); err != nil {
			return translate(err)
		}
		if turns == 0 {
			return nil
		}
		// The turn of a process that has died is nobody's. This process is not the
		// one that publishes only because it has found that out.
		had := g.relay.has()
		switch own, err := g.own(ctx); {
		case err != nil:
			return err
		case own && !g.relay.publishing(tenant):
			err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error { return dropTurn(ctx, tx, tenant) })
			if !had {
				g.relay.yield()
			}
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// StartEvents implements [guard.Keeper]. If the cell holds none of the events up
// to mark that are not known to be published, they were published (or lost)
// elsewhere, and publication begins after mark.
func (g *Guard) StartEvents(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	if err := rules.Check(g.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	if mark > 1<<62 {
		return fmt.Errorf("%w: event mark %d", cells.ErrInvalid, mark)
	}
	err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := barrier(ctx, tx, o, rules.Start); err != nil || mark == 0 {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT INTO cell_outbox_head (tenant, seq) VALUES (?1, max(?2, `+lastSeq+`))
			ON CONFLICT (tenant) DO UPDATE SET seq = max(seq, excluded.seq)`, string(o.Tenant), int64(mark)); err != nil {
			return err
		}
		var held int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM cell_outbox WHERE tenant = ?1 AND event_seq <= ?2
			AND event_seq > coalesce((SELECT seq FROM cell_outbox_published WHERE tenant = ?1), 0)`, string(o.Tenant), int64(mark)).Scan(&held); err != nil || held > 0 {
			return err
		}
		return setPublished(ctx, tx, o.Tenant, mark)
	})
	if err == nil {
		g.hub.Wake(o.Tenant)
	}
	return err
}

// ForgetEvents implements [guard.Keeper].
func (g *Guard) ForgetEvents(ctx context.Context, o cells.FenceOrder) error {
	if err := rules.Check(g.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	return g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := g.AdmitClosed(ctx, tx, o.Tenant, o.Epoch, o.Move); err != nil {
			return err
		}
		defer g.forget(tx)
		_, err := tx.ExecContext(ctx, `DELETE FROM cell_outbox_head WHERE tenant = ?`, string(o.Tenant))
		return err
	})
}

// setPublished records how far the tenant was published, never backwards.
func setPublished(ctx context.Context, tx *sql.Tx, tenant cells.TenantID, seq cells.EventSeq) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO cell_outbox_published (tenant, seq) VALUES (?, ?)
		ON CONFLICT (tenant) DO UPDATE SET seq = max(seq, excluded.seq)`, string(tenant), int64(seq))
	return err
}
