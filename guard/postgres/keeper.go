// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/hub"
	"github.com/cloister-dev/cloister/guard/internal/rules"
)

// core is the guard without the service's own transactions, which differ in
// type: [Guard] and [SQL] share it.
type core struct {
	config
	b   backend
	hub *hub.Hub
	ann announcer
}

func newCore(b backend, opts []Option) (*core, error) {
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, err
	}
	c := &core{config: cfg, b: b}
	c.hub = hub.New(c.listenLoop, c.pollLoop)
	return c, nil
}

// q writes the schema's name into a statement.
func (c *core) q(query string) string { return strings.ReplaceAll(query, "@s", c.schema) }

// MovedTables implements [guard.Keeper].
func (c *core) MovedTables() []guard.Table {
	return []guard.Table{
		{Name: c.schema + ".outbox", TenantColumn: "tenant"},
		{Name: c.schema + ".outbox_published", TenantColumn: "tenant"},
	}
}

// OpenFence implements [guard.Keeper].
func (c *core) OpenFence(ctx context.Context, o cells.FenceOrder) error {
	if err := rules.Check(c.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	// Members repeat orders whenever they start; those need no lock.
	if row, err := c.fenceRow(ctx, c.b, o.Tenant); err == nil {
		if _, change, err := rules.Open(row, o); !change || err != nil {
			return err
		}
	}
	return c.order(ctx, o, rules.Open)
}

// CloseFence implements [guard.Keeper].
func (c *core) CloseFence(ctx context.Context, o cells.FenceOrder) error {
	if err := rules.Check(c.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	return c.order(ctx, o, rules.Close)
}

// order changes the fence under its exclusive lock: after every transaction
// that was admitted, and before every one that is admitted next.
func (c *core) order(ctx context.Context, o cells.FenceOrder, rule func(guard.Fence, cells.FenceOrder) (guard.Fence, bool, error)) error {
	return c.inOrder(ctx, func(ctx context.Context, tx txn) error {
		if err := tx.exec(ctx, c.q(`SELECT pg_advisory_xact_lock(@s.fence_key($1))`), string(o.Tenant)); err != nil {
			if sqlState(err) == stateLockTimeout {
				err = fmt.Errorf("%w (admitted transactions are still open: %s)", err, c.holders(ctx, "fence", o.Tenant))
			}
			return err
		}
		row, err := c.fenceRow(ctx, tx, o.Tenant)
		if err != nil {
			return err
		}
		next, change, err := rule(row, o)
		if err != nil || !change {
			return err
		}
		return tx.exec(ctx, c.q(`INSERT INTO @s.fence (tenant, epoch, floor, is_open, move) VALUES ($1, $2, $3, $4, $5)
			ON CONFLICT (tenant) DO UPDATE SET epoch = EXCLUDED.epoch, floor = EXCLUDED.floor, is_open = EXCLUDED.is_open,
				move = EXCLUDED.move, changed_at = clock_timestamp()`),
			string(next.Tenant), int64(next.Epoch), int64(next.Floor), next.Open, string(next.Move))
	})
}

// inOrder runs an order's transaction. Waiting for locks is bounded; the end of
// ctx before the commit leaves everything as it was.
func (c *core) inOrder(ctx context.Context, f func(context.Context, txn) error) error {
	wait := c.lockWait
	if d, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(d))
	}
	tx, err := c.b.begin(ctx)
	if err != nil {
		return ended(ctx, unavailable(err))
	}
	defer tx.rollback(context.WithoutCancel(ctx))
	err = tx.exec(ctx, `SELECT set_config('lock_timeout', $1, true), set_config('idle_in_transaction_session_timeout', '0', true)`,
		fmt.Sprintf("%dms", max(1, wait.Milliseconds())))
	if err == nil {
		err = f(ctx, tx)
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return ended(ctx, translate(err))
	}
	return c.commit(ctx, tx)
}

func (c *core) commit(ctx context.Context, tx interface{ commit(context.Context) error }) error {
	cctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), c.commitWait, errors.New("guard/postgres: the commit took too long"))
	defer cancel()
	return translateCommit(tx.commit(cctx))
}

// holders names the sessions that hold a tenant's lock, for people.
func (c *core) holders(ctx context.Context, kind string, tenant cells.TenantID) string {
	var pids string
	// The transaction that timed out is aborted: another connection asks.
	err := c.b.row(ctx, c.q(`WITH k AS (SELECT @s.`+kind+`_key($1) AS v)
		SELECT coalesce(string_agg('pid ' || l.pid || ' ' || coalesce(a.state, 'prepared') || ' ' || coalesce(nullif(a.application_name, ''), '-'), ', '), 'none any more')
		FROM k JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
			AND l.classid::bigint = (k.v >> 32) & 4294967295 AND l.objid::bigint = k.v & 4294967295
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		LEFT JOIN pg_stat_activity a USING (pid)`), []any{string(tenant)}, &pids)
	if err != nil {
		return "unknown"
	}
	return pids
}

// fenceRow reads the row as orders see it; a missing one as [rules.Absent].
func (c *core) fenceRow(ctx context.Context, q querier, tenant cells.TenantID) (guard.Fence, error) {
	row := rules.Absent(tenant)
	var epoch, floor int64
	var move string
	err := q.row(ctx, c.q(`SELECT epoch, floor, is_open, move FROM @s.fence WHERE tenant = $1`), []any{string(tenant)}, &epoch, &floor, &row.Open, &move)
	if errors.Is(err, sql.ErrNoRows) {
		return rules.Absent(tenant), nil
	}
	row.Epoch, row.Floor, row.Move = cells.Epoch(epoch), cells.Epoch(floor), cells.MoveID(move)
	return row, err
}

const fenceColumns = `SELECT f.tenant, f.epoch, f.floor, f.is_open, f.move, coalesce(h.seq, 0), coalesce(p.seq, 0), coalesce(b.paused, false)
	FROM @s.fence f LEFT JOIN @s.outbox_head h USING (tenant) LEFT JOIN @s.outbox_published p USING (tenant)
	LEFT JOIN @s.outbox_barrier b USING (tenant)`

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
func (c *core) Fence(ctx context.Context, tenant cells.TenantID) (guard.Fence, error) {
	f, err := scanFence(func(dest ...any) error {
		return c.b.row(ctx, c.q(fenceColumns+` WHERE f.tenant = $1`), []any{string(tenant)}, dest...)
	})
	if errors.Is(err, sql.ErrNoRows) {
		return guard.Fence{}, fmt.Errorf("%w: no fence of tenant %s", cells.ErrNotFound, tenant)
	}
	return f, ended(ctx, translate(err))
}

// Fences implements [guard.Keeper].
func (c *core) Fences(ctx context.Context, after cells.TenantID, limit int) ([]guard.Fence, error) {
	var out []guard.Fence
	err := c.b.rows(ctx, c.q(fenceColumns+` WHERE f.tenant > $1 ORDER BY f.tenant LIMIT $2`), []any{string(after), clampLimit(limit)}, func(scan func(...any) error) error {
		f, err := scanFence(scan)
		out = append(out, f)
		return err
	})
	return out, ended(ctx, translate(err))
}

func clampLimit(n int) int {
	if n <= 0 {
		return 1000
	}
	return min(n, 10000)
}

// barrierRow reads the relay's row, zero if there is none.
func (c *core) barrierRow(ctx context.Context, q querier, tenant cells.TenantID) (rules.Barrier, error) {
	var b rules.Barrier
	var epoch int64
	var move string
	err := q.row(ctx, c.q(`SELECT paused, epoch, move FROM @s.outbox_barrier WHERE tenant = $1`), []any{string(tenant)}, &b.Paused, &epoch, &move)
	if errors.Is(err, sql.ErrNoRows) {
		return rules.Barrier{}, nil
	}
	b.Epoch, b.Move = cells.Epoch(epoch), cells.MoveID(move)
	return b, err
}

// barrier applies an order to the relay's row; orders for one tenant take turns.
func (c *core) barrier(ctx context.Context, tx txn, o cells.BarrierOrder, rule func(rules.Barrier, guard.Fence, cells.BarrierOrder) (rules.Barrier, error)) error {
	if err := tx.exec(ctx, c.q(`SELECT pg_advisory_xact_lock(hashtextextended('@s.barrier ' || $1, 0))`), string(o.Tenant)); err != nil {
		return err
	}
	fence, err := c.fenceRow(ctx, tx, o.Tenant)
	if err != nil {
		return err
	}
	b, err := c.barrierRow(ctx, tx, o.Tenant)
	if err != nil {
		return err
	}
	if b, err = rule(b, fence, o); err != nil {
		return err
	}
	return tx.exec(ctx, c.q(`INSERT INTO @s.outbox_barrier (tenant, paused, epoch, move) VALUES ($1, $2, $3, $4)
		ON CONFLICT (tenant) DO UPDATE SET paused = EXCLUDED.paused, epoch = EXCLUDED.epoch, move = EXCLUDED.move`),
		string(o.Tenant), b.Paused, int64(b.Epoch), string(b.Move))
}

// PauseEvents implements [guard.Keeper]. If it fails the tenant may be paused
// already; StartEvents undoes that.
func (c *core) PauseEvents(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error) {
	if err := rules.Check(c.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return 0, err
	}
	// First the flag, committed: no publication starts from here on.
	err := c.inOrder(ctx, func(ctx context.Context, tx txn) error {
		if err := c.barrier(ctx, tx, o, rules.Pause); err != nil {
			return err
		}
		return tx.exec(ctx, `SELECT pg_notify($1, $2)`, c.schema+"_pause", string(o.Tenant))
	})
	if err != nil {
		return 0, err
	}
	c.hub.Pause(o.Tenant)
	// Then the turn of whoever is publishing.
	var mark int64
	err = c.inOrder(ctx, func(ctx context.Context, tx txn) error {
		if err := tx.exec(ctx, c.q(`SELECT pg_advisory_xact_lock(@s.relay_key($1))`), string(o.Tenant)); err != nil {
			if sqlState(err) == stateLockTimeout {
				err = fmt.Errorf("%w (a publication is still in flight: %s)", err, c.holders(ctx, "relay", o.Tenant))
			}
			return err
		}
		b, err := c.barrierRow(ctx, tx, o.Tenant)
		if err != nil {
			return err
		}
		if !b.Paused || b.Epoch != o.Epoch {
			return fmt.Errorf("%w: a newer order to the events of tenant %s came in between", cells.ErrStaleOrder, o.Tenant)
		}
		return tx.row(ctx, c.q(`SELECT @s.last_seq($1)`), []any{string(o.Tenant)}, &mark)
	})
	return cells.EventSeq(mark), err
}

// StartEvents implements [guard.Keeper]. If the cell holds none of the events up
// to mark that are not known to be published, they were published (or lost)
// elsewhere, and publication begins after mark.
func (c *core) StartEvents(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error {
	if err := rules.Check(c.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	if mark > 1<<62 {
		return fmt.Errorf("%w: event mark %d", cells.ErrInvalid, mark)
	}
	tenant := string(o.Tenant)
	err := c.inOrder(ctx, func(ctx context.Context, tx txn) error {
		if err := c.barrier(ctx, tx, o, rules.Start); err != nil {
			return err
		}
		if mark == 0 {
			return nil
		}
		if err := tx.exec(ctx, c.q(`INSERT INTO @s.outbox_head AS h (tenant, seq) VALUES ($1, greatest(@s.last_seq($1), $2::bigint))
			ON CONFLICT (tenant) DO UPDATE SET seq = EXCLUDED.seq WHERE h.seq < EXCLUDED.seq`), tenant, int64(mark)); err != nil {
			return err
		}
		var none bool
		if err := tx.row(ctx, c.q(`SELECT NOT EXISTS (SELECT FROM @s.outbox o WHERE o.tenant = $1 AND o.event_seq <= $2
			AND o.event_seq > coalesce((SELECT p.seq FROM @s.outbox_published p WHERE p.tenant = $1), 0))`), []any{tenant, int64(mark)}, &none); err != nil || !none {
			return err
		}
		return c.setPublished(ctx, tx, tenant, int64(mark))
	})
	if err == nil {
		c.announce(o.Tenant)
	}
	return err
}

// ForgetEvents implements [guard.Keeper].
func (c *core) ForgetEvents(ctx context.Context, o cells.FenceOrder) error {
	if err := rules.Check(c.cell, o.Cell, o.Tenant, o.Epoch, o.Move); err != nil {
		return err
	}
	return c.inOrder(ctx, func(ctx context.Context, tx txn) error {
		if err := c.admitClosed(ctx, tx, o.Tenant, o.Epoch, o.Move); err != nil {
			return err
		}
		return tx.exec(ctx, c.q(`DELETE FROM @s.outbox_head WHERE tenant = $1`), string(o.Tenant))
	})
}

// setPublished records how far the tenant was published, never backwards.
func (c *core) setPublished(ctx context.Context, tx txn, tenant string, seq int64) error {
	if err := c.relayMark(ctx, tx, tenant); err != nil {
		return err
	}
	return tx.exec(ctx, c.q(`INSERT INTO @s.outbox_published AS p (tenant, seq) VALUES ($1, $2)
		ON CONFLICT (tenant) DO UPDATE SET seq = EXCLUDED.seq WHERE p.seq < EXCLUDED.seq`), tenant, seq)
}

// relayMark lets the transaction pass the triggers of the relay's own rows.
func (c *core) relayMark(ctx context.Context, tx txn, tenant string) error {
	return tx.exec(ctx, `SELECT set_config($1, pg_current_xact_id()::text || ' ' || $2, true)`, c.schema+".relay", tenant)
}
