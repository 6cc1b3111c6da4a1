// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/guard/internal/rules"
)

// Events implements [guard.Outbox]. limit 0 means 1000.
func (c *core) Events(ctx context.Context, tenant cells.TenantID, after cells.EventSeq, limit int) ([]guard.Event, error) {
	out, err := c.events(ctx, c.b, tenant, int64(after), limit)
	return out, ended(ctx, translate(err))
}

func (c *core) events(ctx context.Context, q querier, tenant cells.TenantID, after int64, limit int) ([]guard.Event, error) {
	var out []guard.Event
	err := q.rows(ctx, c.q(`SELECT event_seq, epoch, cell, id, type, payload::text, at FROM @s.outbox WHERE tenant = $1 AND event_seq > $2 ORDER BY event_seq LIMIT $3`),
		[]any{string(tenant), after, clampLimit(limit)}, func(scan func(...any) error) error {
			var (
				e             = guard.Event{Tenant: tenant}
				seq, epoch    int64
				cell, payload string
			)
			err := scan(&seq, &epoch, &cell, &e.ID, &e.Type, &payload, &e.At)
			e.Seq, e.Epoch, e.Cell, e.Payload = cells.EventSeq(seq), cells.Epoch(epoch), cells.CellID(cell), json.RawMessage(payload)
			out = append(out, e)
			return err
		})
	return out, err
}

// Wait implements [guard.Outbox]. All waits of a process share one connection
// that listens and one query for each poll.
func (c *core) Wait(ctx context.Context, tenant cells.TenantID, after cells.EventSeq) error {
	return c.hub.Wait(ctx, tenant, after, func(ctx context.Context) (bool, error) {
		var seq int64
		err := c.b.row(ctx, c.q(`SELECT coalesce((SELECT seq FROM @s.outbox_head WHERE tenant = $1), 0)`), []any{string(tenant)}, &seq)
		return seq > int64(after), ended(ctx, translate(err))
	})
}

// Backlog implements [guard.RelayStore].
func (c *core) Backlog(ctx context.Context, after cells.TenantID, limit int) ([]cells.TenantID, error) {
	var out []cells.TenantID
	err := c.b.rows(ctx, c.q(`SELECT h.tenant FROM @s.outbox_head h JOIN @s.fence f USING (tenant)
		LEFT JOIN @s.outbox_published p USING (tenant) LEFT JOIN @s.outbox_barrier b USING (tenant)
		WHERE h.tenant > $1 AND f.is_open AND h.seq > coalesce(p.seq, 0) AND NOT coalesce(b.paused, false)
		ORDER BY h.tenant LIMIT $2`), []any{string(after), clampLimit(limit)}, func(scan func(...any) error) error {
		var t string
		err := scan(&t)
		out = append(out, cells.TenantID(t))
		return err
	})
	return out, ended(ctx, translate(err))
}

// PublishNext implements [guard.RelayStore]. The turn is an advisory lock of an
// open transaction, so it ends with this process or its connection; nothing else
// is held while publish runs.
func (c *core) PublishNext(ctx context.Context, tenant cells.TenantID, limit int, publish func(context.Context, []guard.Event) error) (int, error) {
	var n int
	var perr error // publish's
	err := c.inTurn(ctx, tenant, func(ctx context.Context, tx txn, published int64) error {
		events, err := c.events(ctx, tx, tenant, published, limit)
		if err != nil || len(events) == 0 {
			return translate(err)
		}
		if err := rules.Contiguous(cells.EventSeq(published), events); err != nil {
			return err
		}
		perr = publish(ctx, events)
		if perr != nil && ctx.Err() != nil {
			perr = ended(ctx, perr)
		}
		if n = guard.Accepted(perr, len(events)); n == 0 {
			return perr
		}
		return translate(c.setPublished(context.WithoutCancel(ctx), tx, string(tenant), int64(events[n-1].Seq)))
	})
	if err != nil {
		return 0, err
	}
	return n, perr
}

// inTurn runs f while this transaction has the tenant's turn, unless the tenant
// is paused or its fence closed.
func (c *core) inTurn(ctx context.Context, tenant cells.TenantID, f func(ctx context.Context, tx txn, published int64) error) error {
	// Registered before the flag is read: a pause is either seen or heard of.
	pctx, done := c.hub.Publishing(ctx, tenant)
	defer done()
	tx, err := c.b.begin(ctx)
	if err != nil {
		return ended(ctx, unavailable(err))
	}
	defer tx.rollback(context.WithoutCancel(ctx))
	tx.detach() // what was accepted is recorded, also at the end of ctx
	var mine bool
	if err := tx.row(ctx, c.q(`SELECT pg_try_advisory_xact_lock(@s.relay_key($1)) FROM set_config('idle_in_transaction_session_timeout', '0', true)`), []any{string(tenant)}, &mine); err != nil {
		return ended(ctx, translate(err))
	}
	if !mine {
		return fmt.Errorf("%w: tenant %s", guard.ErrBusy, tenant)
	}
	var published int64
	err = tx.row(ctx, c.q(`SELECT coalesce((SELECT p.seq FROM @s.outbox_published p WHERE p.tenant = $1), 0) FROM @s.fence f
		WHERE f.tenant = $1 AND f.is_open AND NOT EXISTS (SELECT FROM @s.outbox_barrier b WHERE b.tenant = $1 AND b.paused)`), []any{string(tenant)}, &published)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return ended(pctx, translate(err))
	}
	if err := f(pctx, tx, published); err != nil {
		return ended(pctx, err)
	}
	return c.commit(ctx, tx)
}

// Prune deletes published events up to and including upto, and returns how many.
// What is not published yet is kept. A tenant whose fence is closed or whose
// events are paused is left alone, and so is one that another process publishes
// for at the moment ([guard.ErrBusy]).
func (c *core) Prune(ctx context.Context, tenant cells.TenantID, upto cells.EventSeq) (int64, error) {
	var total int64
	for {
		var n int64 // stays 0 when the tenant is left alone
		err := c.inTurn(ctx, tenant, func(ctx context.Context, tx txn, published int64) error {
			if err := c.relayMark(ctx, tx, string(tenant)); err != nil {
				return translate(err)
			}
			return translate(tx.row(ctx, c.q(`WITH gone AS (DELETE FROM @s.outbox WHERE tenant = $1 AND event_seq IN (
				SELECT event_seq FROM @s.outbox WHERE tenant = $1 AND event_seq <= $2 ORDER BY event_seq LIMIT 1000) RETURNING 1)
				SELECT count(*) FROM gone`), []any{string(tenant), min(int64(min(upto, 1<<62)), published)}, &n))
		})
		total += n
		if err != nil || n == 0 {
			return total, err
		}
	}
}

// NewFeed implements [guard.RelayStore].
func (c *core) NewFeed() (guard.Feed, error) { return c.hub.NewFeed() }

// Close ends the background work of the guard (its listener, its polls) and
// every wait. The pool stays open; it is the caller's.
func (c *core) Close() { c.hub.Close() }

// listenLoop is the process's one listening connection.
func (c *core) listenLoop(ctx context.Context) {
	channels := []string{c.schema + "_outbox", c.schema + "_pause"}
	pause := 100 * time.Millisecond
	for ctx.Err() == nil {
		err := c.b.listen(ctx, channels, func() {
			pause = 100 * time.Millisecond
			c.hub.WakeAll() // what was announced before
		}, func(channel, payload string) {
			if channel == channels[1] {
				c.hub.Pause(cells.TenantID(payload))
			} else {
				c.hub.Wake(cells.TenantID(payload))
			}
		})
		if errors.Is(err, errNoListen) {
			c.log.Warn("guard: this driver cannot listen; events of other processes are found by polling", "every", c.poll)
			return
		}
		if ctx.Err() != nil {
			return
		}
		c.log.Warn("guard: the listening connection was lost", "error", err, "again_in", pause)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			pause = min(2*pause, 5*time.Second)
		}
	}
}

// pollLoop finds what no notification announced, for those who wait.
func (c *core) pollLoop(ctx context.Context) {
	tick := time.NewTicker(c.poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		waiting := c.hub.Waiting()
		if len(waiting) == 0 {
			continue
		}
		tenants := make([]string, 0, len(waiting))
		for t := range waiting {
			tenants = append(tenants, string(t))
		}
		list, err := json.Marshal(tenants)
		if err != nil {
			continue
		}
		err = c.b.rows(ctx, c.q(`SELECT tenant, seq FROM @s.outbox_head WHERE tenant IN (SELECT json_array_elements_text($1::json))`), []any{string(list)}, func(scan func(...any) error) error {
			var t string
			var seq int64
			err := scan(&t, &seq)
			if err == nil && seq > int64(waiting[cells.TenantID(t)]) {
				c.hub.Wake(cells.TenantID(t))
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			c.log.Warn("guard: polling for events failed", "error", err)
		}
	}
}
