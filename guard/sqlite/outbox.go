// SPDX-License-Identifier: Apache-2.0

package sqlite

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
func (g *Guard) Events(ctx context.Context, tenant cells.TenantID, after cells.EventSeq, limit int) ([]guard.Event, error) {
	out, err := events(ctx, g.db, tenant, int64(after), limit)
	return out, ended(ctx, translate(err))
}

func events(ctx context.Context, q querier, tenant cells.TenantID, after int64, limit int) ([]guard.Event, error) {
	var out []guard.Event
	err := eachRow(ctx, q, `SELECT event_seq, epoch, cell, id, type, payload, at FROM cell_outbox WHERE tenant = ? AND event_seq > ? ORDER BY event_seq LIMIT ?`,
		[]any{string(tenant), after, clampLimit(limit)}, func(scan func(...any) error) error {
			var (
				e                 = guard.Event{Tenant: tenant}
				seq, epoch        int64
				cell, payload, at string
			)
			if err := scan(&seq, &epoch, &cell, &e.ID, &e.Type, &payload, &at); err != nil {
				return err
			}
			when, err := time.Parse(time.RFC3339Nano, at)
			e.Seq, e.Epoch, e.Cell, e.Payload, e.At = cells.EventSeq(seq), cells.Epoch(epoch), cells.CellID(cell), json.RawMessage(payload), when
			out = append(out, e)
			return err
		})
	return out, err
}

// Wait implements [guard.Outbox]. Writers of this process wake it at once; what
// other processes write is found by one query for each poll.
func (g *Guard) Wait(ctx context.Context, tenant cells.TenantID, after cells.EventSeq) error {
	return g.hub.Wait(ctx, tenant, after, func(ctx context.Context) (bool, error) {
		var seq int64
		err := g.db.QueryRowContext(ctx, `SELECT coalesce((SELECT seq FROM cell_outbox_head WHERE tenant = ?), 0)`, string(tenant)).Scan(&seq)
		return seq > int64(after), ended(ctx, translate(err))
	})
}

// NewFeed implements [guard.RelayStore]. When it is closed another process may
// publish.
func (g *Guard) NewFeed() (guard.Feed, error) {
	f, err := g.hub.NewFeed()
	if err != nil {
		return nil, err
	}
	return feed{f, &g.relay}, nil
}

// Backlog implements [guard.RelayStore].
func (g *Guard) Backlog(ctx context.Context, after cells.TenantID, limit int) ([]cells.TenantID, error) {
	var out []cells.TenantID
	err := g.each(ctx, `SELECT h.tenant FROM cell_outbox_head h JOIN cell_fence f USING (tenant)
		LEFT JOIN cell_outbox_published p USING (tenant) LEFT JOIN cell_outbox_barrier b USING (tenant)
		WHERE h.tenant > ? AND f.is_open AND h.seq > coalesce(p.seq, 0) AND NOT coalesce(b.paused, 0)
		ORDER BY h.tenant LIMIT ?`, []any{string(after), clampLimit(limit)}, func(scan func(...any) error) error {
		var t string
		err := scan(&t)
		out = append(out, cells.TenantID(t))
		return err
	})
	return out, err
}

// PublishNext implements [guard.RelayStore]. One process publishes for all
// tenants of a file: the one that holds the lock file beside it; the others get
// [guard.ErrBusy] until it ends. The file's write lock is not held while publish
// runs; a row says that it does.
func (g *Guard) PublishNext(ctx context.Context, tenant cells.TenantID, limit int, publish func(context.Context, []guard.Event) error) (n int, err error) {
	if own, err := g.own(ctx); err != nil {
		return 0, err
	} else if !own {
		return 0, fmt.Errorf("%w: tenant %s", guard.ErrBusy, tenant)
	}
	if !g.relay.begin(tenant) {
		return 0, fmt.Errorf("%w: tenant %s", guard.ErrBusy, tenant)
	}
	defer g.relay.end(tenant)
	// Registered before the flag is read: a pause is either seen or heard of.
	pctx, done := g.hub.Publishing(ctx, tenant)
	defer done()
	var batch []guard.Event
	err = g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
		batch = nil
		published, ok, err := mayPublish(ctx, tx, tenant)
		if err != nil || !ok {
			return err
		}
		if batch, err = events(ctx, tx, tenant, published, limit); err != nil || len(batch) == 0 {
			return err
		}
		if err := rules.Contiguous(cells.EventSeq(published), batch); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO cell_outbox_turn (tenant) VALUES (?) ON CONFLICT DO NOTHING`, string(tenant))
		return err
	})
	if err != nil || len(batch) == 0 {
		return 0, err
	}
	perr := publish(pctx, batch)
	n = guard.Accepted(perr, len(batch))
	// The record and the end of the turn are one commit, whatever ctx does.
	err = g.inOrder(context.WithoutCancel(ctx), func(ctx context.Context, tx *sql.Tx) error {
		if n > 0 {
			if err := setPublished(ctx, tx, tenant, batch[n-1].Seq); err != nil {
				return err
			}
		}
		return dropTurn(ctx, tx, tenant)
	})
	if err != nil {
		return 0, err
	}
	return n, ended(pctx, perr)
}

// mayPublish reports how far the tenant is published and whether its fence is
// open and it is not paused.
func mayPublish(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) (published int64, ok bool, err error) {
	err = tx.QueryRowContext(ctx, `SELECT coalesce((SELECT seq FROM cell_outbox_published WHERE tenant = ?1), 0) FROM cell_fence f
		WHERE f.tenant = ?1 AND f.is_open AND NOT EXISTS (SELECT 1 FROM cell_outbox_barrier b WHERE b.tenant = ?1 AND b.paused)`, string(tenant)).Scan(&published)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, false, nil
	}
	return published, err == nil, err
}

func dropTurn(ctx context.Context, tx *sql.Tx, tenant cells.TenantID) error {
	_, err := tx.ExecContext(ctx, `DELETE FROM cell_outbox_turn WHERE tenant = ?`, string(tenant))
	return err
}

// Prune deletes published events up to and including upto, and returns how many.
// What is not published yet is kept. A tenant whose fence is closed or whose
// events are paused is left alone.
func (g *Guard) Prune(ctx context.Context, tenant cells.TenantID, upto cells.EventSeq) (int64, error) {
	var total int64
	for {
		var n int64
		err := g.inOrder(ctx, func(ctx context.Context, tx *sql.Tx) error {
			published, ok, err := mayPublish(ctx, tx, tenant)
			if err != nil || !ok {
				n = 0
				return err
			}
			res, err := tx.ExecContext(ctx, `DELETE FROM cell_outbox WHERE tenant = ?1 AND event_seq IN (
				SELECT event_seq FROM cell_outbox WHERE tenant = ?1 AND event_seq <= ?2 ORDER BY event_seq LIMIT 1000)`,
				string(tenant), min(int64(min(upto, 1<<62)), published))
			if err == nil {
				n, err = res.RowsAffected()
			}
			return err
		})
		if err != nil || n == 0 {
			return total, err
		}
		total += n
	}
}

// pollLoop finds what other processes have written, for those who wait, and
// what they have paused, for those who publish.
func (g *Guard) pollLoop(ctx context.Context) {
	tick := time.NewTicker(g.poll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		waiting, publishing := g.hub.Waiting(), g.hub.InPublication()
		if len(waiting) > 0 {
			list := make([]cells.TenantID, 0, len(waiting))
			for t := range waiting {
				list = append(list, t)
			}
			g.pollEach(ctx, `SELECT tenant, seq FROM cell_outbox_head WHERE tenant IN (SELECT value FROM json_each(?))`, list, func(t cells.TenantID, seq int64) {
				if seq > int64(waiting[t]) {
					g.hub.Wake(t)
				}
			})
		}
		if len(publishing) > 0 {
			g.pollEach(ctx, `SELECT tenant, 0 FROM cell_outbox_barrier WHERE paused AND tenant IN (SELECT value FROM json_each(?))`, publishing, func(t cells.TenantID, _ int64) {
				g.hub.Pause(t)
			})
		}
	}
}

func (g *Guard) pollEach(ctx context.Context, query string, tenants []cells.TenantID, f func(cells.TenantID, int64)) {
	list, err := json.Marshal(tenants)
	if err == nil {
		err = g.each(ctx, query, []any{string(list)}, func(scan func(...any) error) error {
			var t string
			var n int64
			err := scan(&t, &n)
			if err == nil {
				f(cells.TenantID(t), n)
			}
			return err
		})
	}
	if err != nil && ctx.Err() == nil {
		g.log.Warn("guard: polling failed", "error", err)
	}
}
