// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
)

const campaignColumns = `seq, driver, version, doc`

func scanCampaign(row interface{ Scan(...any) error }) (api.Campaign, error) {
	var c api.Campaign
	var seq, version int64
	var driver, doc string
	if err := row.Scan(&seq, &driver, &version, &doc); err != nil {
		return c, err
	}
	if err := json.Unmarshal([]byte(doc), &c); err != nil {
		return c, fmt.Errorf("%w: campaign record %d: %w", cells.ErrInvalid, seq, err)
	}
	c.Seq, c.Driver, c.Version = seq, driver, version
	return c, nil
}

func campaignIn(ctx context.Context, tx *Tx, id api.CampaignID) (api.Campaign, error) {
	return scanCampaign(tx.QueryRowContext(ctx, `SELECT `+campaignColumns+` FROM campaigns WHERE id = ?`, id))
}

// document is what is stored of a record.
func document(c api.Campaign) (string, error) {
	c.Estimate, c.Waiting = nil, ""
	b, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("%w: %w", cells.ErrInvalid, err)
	}
	return string(b), nil
}

func putCampaign(ctx context.Context, tx *Tx, c *api.Campaign) error {
	c.Version++
	doc, err := document(*c)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `UPDATE campaigns SET state = ?, driven = ?, driver = ?, version = ?, doc = ? WHERE id = ?`,
		c.State, c.Driven(), c.Driver, c.Version, doc, c.ID)
	return err
}

// insertItems numbers and writes items; many in one statement.
func insertItems(ctx context.Context, tx *Tx, c *api.Campaign, items []api.PlannedItem) error {
	const chunk = 200
	head, one := `INSERT INTO campaign_items (campaign, pos, state, doc) VALUES `, `(?,?,'PENDING',?)`
	full := head + one + strings.Repeat(`,`+one, chunk-1)
	for len(items) > 0 {
		n := min(chunk, len(items))
		args := make([]any, 0, 3*n)
		for _, it := range items[:n] {
			c.NextPos++
			c.Rows += it.Rows
			c.Bytes += it.Bytes
			doc, err := json.Marshal(api.CampaignItem{Pos: c.NextPos, Tenant: it.Tenant, From: it.From, To: it.To, State: api.ItemPending,
				Rows: it.Rows, Bytes: it.Bytes})
			if err != nil {
				return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
			}
			args = append(args, c.ID, c.NextPos, string(doc))
		}
		query := full
		if n < chunk {
			query = head + one + strings.Repeat(`,`+one, n-1)
		}
		if _, err := tx.ExecContext(ctx, query, args...); err != nil {
			return err
		}
		c.Counts.Total += int64(n)
		c.Counts.Pending += int64(n)
		items = items[n:]
	}
	return nil
}

// CreateCampaign implements [directory.Store].
func (s *Store) CreateCampaign(ctx context.Context, c api.Campaign, items []api.PlannedItem, audit api.AuditEntry) (rec api.Campaign, created bool, err error) {
	err = s.tx(ctx, "create campaign", func(tx *Tx) error {
		created = false
		if c.OperationID != "" {
			rec, err = scanCampaign(tx.QueryRowContext(ctx, `SELECT `+campaignColumns+` FROM campaigns WHERE operation = ?`, c.OperationID))
			if !errors.Is(err, sql.ErrNoRows) {
				return err
			}
		}
		rec = c
		rec.State, rec.Version, rec.Driver = api.CampaignPlanned, 0, ""
		rec.Counts, rec.NextPos, rec.Rows, rec.Bytes = api.CampaignCounts{}, 0, 0, 0
		err := tx.QueryRowContext(ctx, `INSERT INTO campaigns (id, state, driven, driver, version, operation, doc) VALUES (?, ?, 0, '', 0, ?, '{}') RETURNING seq`,
			rec.ID, rec.State, rec.OperationID).Scan(&rec.Seq)
		if err != nil {
			return err
		}
		if err := insertItems(ctx, tx, &rec, items); err != nil {
			return err
		}
		if err := putCampaign(ctx, tx, &rec); err != nil {
			return err
		}
		created = true
		return insertAudit(ctx, tx, audit)
	})
	return rec, created && err == nil, err
}

// Campaign implements [directory.Store].
func (s *Store) Campaign(ctx context.Context, id api.CampaignID) (api.Campaign, error) {
	c, err := scanCampaign(s.read.QueryRowContext(ctx, `SELECT `+campaignColumns+` FROM campaigns WHERE id = ?`, id))
	return c, s.translate("campaign", err)
}

// Campaigns implements [directory.Store].
func (s *Store) Campaigns(ctx context.Context, f directory.CampaignFilter) ([]api.Campaign, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+campaignColumns+` FROM campaigns
		WHERE (?1 = '' OR state = ?1) AND (CAST(?2 AS BIGINT) = 0 OR seq < CAST(?2 AS BIGINT)) ORDER BY seq DESC LIMIT ?3`, f.State, f.After, pageLimit(f.Limit))
	if err != nil {
		return nil, s.translate("campaigns", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.Campaign
	for rows.Next() {
		c, err := scanCampaign(rows)
		if err != nil {
			return nil, s.translate("campaigns", err)
		}
		out = append(out, c)
	}
	return out, s.translate("campaigns", rows.Err())
}

func scanItem(row interface{ Scan(...any) error }) (api.CampaignItem, error) {
	var it api.CampaignItem
	var doc, state string
	if err := row.Scan(&doc, &state); err != nil {
		return it, err
	}
	if err := json.Unmarshal([]byte(doc), &it); err != nil {
		return it, fmt.Errorf("%w: campaign item: %w", cells.ErrInvalid, err)
	}
	it.State = api.ItemState(state)
	return it, nil
}

// CampaignItems implements [directory.Store].
func (s *Store) CampaignItems(ctx context.Context, f directory.ItemFilter) ([]api.CampaignItem, error) {
	query, args := `SELECT doc, state FROM campaign_items WHERE campaign = ? AND pos > ?`, []any{f.Campaign, f.After}
	if f.State != "" {
		query += ` AND state = ?`
		args = append(args, f.State)
	}
	rows, err := s.read.QueryContext(ctx, query+` ORDER BY pos LIMIT ?`, append(args, pageLimit(f.Limit))...)
	if err != nil {
		return nil, s.translate("campaign items", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.CampaignItem
	for rows.Next() {
		it, err := scanItem(rows)
		if err != nil {
			return nil, s.translate("campaign items", err)
		}
		out = append(out, it)
	}
	return out, s.translate("campaign items", rows.Err())
}

// changeCampaign runs fn on a record and restores what it must not change.
func changeCampaign(c *api.Campaign, fn func(*api.Campaign) error) error {
	old := *c
	if err := fn(c); err != nil {
		return err
	}
	c.ID, c.Seq, c.Version, c.Counts, c.NextPos, c.Rows, c.Bytes = old.ID, old.Seq, old.Version, old.Counts, old.NextPos, old.Rows, old.Bytes
	if c.Driver != "" {
		c.Driver = old.Driver
	}
	return nil
}

// UpdateCampaign implements [directory.Store].
func (s *Store) UpdateCampaign(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, audit *api.AuditEntry) (api.Campaign, error) {
	var out api.Campaign
	err := s.tx(ctx, "update campaign", func(tx *Tx) error {
		c, err := campaignIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := changeCampaign(&c, fn); err != nil {
			return err
		}
		if err := putCampaign(ctx, tx, &c); err != nil {
			return err
		}
		out = c
		if audit == nil {
			return nil
		}
		return insertAudit(ctx, tx, *audit)
	})
	return out, err
}

// ReplaceItems implements [directory.Store].
func (s *Store) ReplaceItems(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, items []api.PlannedItem, audit api.AuditEntry) (api.Campaign, error) {
	var out api.Campaign
	err := s.tx(ctx, "replace items", func(tx *Tx) error {
		c, err := campaignIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := changeCampaign(&c, fn); err != nil {
			return err
		}
		var rows, bytes int64
		err = tx.QueryRowContext(ctx, `SELECT coalesce(sum(CAST(doc ->> 'rows' AS BIGINT)), 0), coalesce(sum(CAST(doc ->> 'bytes' AS BIGINT)), 0) FROM campaign_items
			WHERE campaign = ? AND state = 'PENDING'`, id).Scan(&rows, &bytes)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM campaign_items WHERE campaign = ? AND state = 'PENDING'`, id); err != nil {
			return err
		}
		c.Rows, c.Bytes = c.Rows-rows, c.Bytes-bytes
		c.Counts.Total -= c.Counts.Pending
		c.Counts.Pending = 0
		if err := insertItems(ctx, tx, &c, items); err != nil {
			return err
		}
		if err := putCampaign(ctx, tx, &c); err != nil {
			return err
		}
		out = c
		return insertAudit(ctx, tx, audit)
	})
	return out, err
}

// UpdateItem implements [directory.Store].
func (s *Store) UpdateItem(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, audit *api.AuditEntry,
) (api.CampaignItem, error) {
	return s.updateItem(ctx, id, pos, false, fn, also, audit)
}

// UpdateUnmoved implements [directory.Store].
func (s *Store) UpdateUnmoved(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, audit *api.AuditEntry,
) (api.CampaignItem, error) {
	return s.updateItem(ctx, id, pos, true, fn, also, audit)
}

func (s *Store) updateItem(ctx context.Context, id api.CampaignID, pos int64, unmoved bool, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, audit *api.AuditEntry,
) (api.CampaignItem, error) {
	var out api.CampaignItem
	err := s.tx(ctx, "update item", func(tx *Tx) error {
		c, err := campaignIn(ctx, tx, id)
		if err != nil {
			return err
		}
		old, err := scanItem(tx.QueryRowContext(ctx, `SELECT doc, state FROM campaign_items WHERE campaign = ? AND pos = ?`, id, pos))
		if err != nil {
			return err
		}
		if unmoved && old.Move != "" {
			var n int
			if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM moves WHERE id = ?`, old.Move).Scan(&n); err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%w: move %s is recorded", cells.ErrConflict, old.Move)
			}
		}
		it := old
		if err := fn(&it); err != nil {
			return err
		}
		it.Pos, it.Tenant, it.From, it.To = old.Pos, old.Tenant, old.From, old.To
		if also != nil {
			if err := changeCampaign(&c, func(c *api.Campaign) error { return also(c, &it) }); err != nil {
				return err
			}
		}
		if it.State != old.State {
			if !it.State.Valid() {
				return fmt.Errorf("%w: item state %q", cells.ErrInvalid, it.State)
			}
			*c.Counts.Of(old.State)--
			*c.Counts.Of(it.State)++
		}
		doc, err := json.Marshal(it)
		if err != nil {
			return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE campaign_items SET state = ?, doc = ? WHERE campaign = ? AND pos = ?`, it.State, string(doc), id, pos); err != nil {
			return err
		}
		if err := putCampaign(ctx, tx, &c); err != nil {
			return err
		}
		out = it
		if audit == nil {
			return nil
		}
		return insertAudit(ctx, tx, *audit)
	})
	return out, err
}

// MoveItems implements [directory.Store].
func (s *Store) MoveItems(ctx context.Context, id api.CampaignID, from []api.ItemState, to api.ItemState, reason string) (int64, error) {
	var n int64
	err := s.tx(ctx, "move items", func(tx *Tx) error {
		n = 0
		c, err := campaignIn(ctx, tx, id)
		if err != nil {
			return err
		}
		if !to.Valid() {
			return fmt.Errorf("%w: item state %q", cells.ErrInvalid, to)
		}
		for _, f := range from {
			if !f.Valid() || f == to {
				return fmt.Errorf("%w: items from state %q to %q", cells.ErrInvalid, f, to)
			}
			res, err := tx.ExecContext(ctx, `UPDATE campaign_items SET state = ?, doc = `+s.d.SetText(`doc`, `reason`, `?`)+` WHERE campaign = ? AND state = ?`, to, reason, id, f)
			if err != nil {
				return err
			}
			k, err := res.RowsAffected()
			if err != nil {
				return err
			}
			*c.Counts.Of(f) -= k
			*c.Counts.Of(to) += k
			n += k
		}
		if n == 0 {
			return nil
		}
		return putCampaign(ctx, tx, &c)
	})
	return n, err
}

// CampaignBeats implements [directory.Store].
func (s *Store) CampaignBeats(ctx context.Context) ([]directory.CampaignBeat, error) {
	return drivenBeats[api.CampaignID](ctx, s, drivenCampaigns, "campaign beats")
}

// BeatCampaigns implements [directory.Store].
func (s *Store) BeatCampaigns(ctx context.Context, driver string) error {
	return s.beat(ctx, drivenCampaigns, "beat campaigns", driver)
}

// TakeCampaign implements [directory.Store].
func (s *Store) TakeCampaign(ctx context.Context, seen directory.CampaignBeat, driver string) (bool, error) {
	return take(ctx, s, drivenCampaigns, "take campaign", seen, driver)
}
