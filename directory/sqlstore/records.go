// SPDX-License-Identifier: Apache-2.0

package sqlstore

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/member"
)

// SaveMembers implements [directory.Store].
func (s *Store) SaveMembers(ctx context.Context, list []member.Heartbeat, at time.Time) error {
	if len(list) == 0 {
		return nil
	}
	return s.tx(ctx, "save members", func(tx *Tx) error {
		for _, h := range list {
			doc, err := json.Marshal(h)
			if err != nil {
				return fmt.Errorf("%w: %w", cells.ErrInvalid, err)
			}
			_, err = tx.ExecContext(ctx, `INSERT INTO members (cell, instance, heartbeat, beat, seen_at) VALUES (?, ?, ?, 1, ?)
				ON CONFLICT (cell, instance) DO UPDATE SET heartbeat = excluded.heartbeat, beat = members.beat + 1, seen_at = excluded.seen_at`,
				h.Cell, h.Instance, string(doc), micros(at))
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// RemoveMember implements [directory.Store].
func (s *Store) RemoveMember(ctx context.Context, cell cells.CellID, instance string) error {
	return s.tx(ctx, "remove member", func(tx *Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM members WHERE cell = ? AND instance = ?`, cell, instance)
		return err
	})
}

// Members implements [directory.Store].
func (s *Store) Members(ctx context.Context) ([]directory.MemberRow, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT heartbeat, beat, seen_at FROM members ORDER BY cell, instance`)
	if err != nil {
		return nil, s.translate("members", err)
	}
	defer func() { _ = rows.Close() }()
	var out []directory.MemberRow
	for rows.Next() {
		var r directory.MemberRow
		var doc string
		var at int64
		if err := rows.Scan(&doc, &r.Beat, &at); err != nil {
			return nil, s.translate("members", err)
		}
		if err := json.Unmarshal([]byte(doc), &r.Heartbeat); err != nil {
			return nil, fmt.Errorf("%w: member: %w", cells.ErrInvalid, err)
		}
		r.SeenAt = fromMicros(at)
		out = append(out, r)
	}
	return out, s.translate("members", rows.Err())
}

func insertAudit(ctx context.Context, tx *Tx, entries ...api.AuditEntry) error {
	if len(entries) == 0 {
		return nil
	}
	var args []any
	for _, e := range entries {
		detail := string(e.Detail)
		if detail == "" {
			detail = "{}"
		}
		args = append(args, micros(e.At), e.Peer, e.Actor, e.RequestID, e.Action, e.Tenant, e.Cell, e.Move, detail)
	}
	_, err := tx.ExecContext(ctx, `INSERT INTO audit (at, peer, actor, request_id, action, tenant, cell, move, detail) VALUES `+
		tuples(len(entries), `(?, ?, ?, ?, ?, ?, ?, ?, ?)`), args...)
	return err
}

// AppendAudit implements [directory.Store].
func (s *Store) AppendAudit(ctx context.Context, e api.AuditEntry) error {
	return s.tx(ctx, "audit", func(tx *Tx) error { return insertAudit(ctx, tx, e) })
}

// Audit implements [directory.Store].
func (s *Store) Audit(ctx context.Context, f directory.AuditFilter) ([]api.AuditEntry, error) {
	query := `SELECT seq, at, peer, actor, request_id, action, tenant, cell, move, detail FROM audit
		WHERE (CAST(?1 AS BIGINT) = 0 OR seq < CAST(?1 AS BIGINT))`
	args := []any{f.After}
	if f.Tenant != "" {
		query += ` AND tenant = ?2 AND tenant <> ''`
		args = append(args, f.Tenant)
	}
	rows, err := s.read.QueryContext(ctx, query+fmt.Sprintf(` ORDER BY seq DESC LIMIT %d`, pageLimit(f.Limit)), args...)
	if err != nil {
		return nil, s.translate("audit", err)
	}
	defer func() { _ = rows.Close() }()
	var out []api.AuditEntry
	for rows.Next() {
		var e api.AuditEntry
		var at int64
		var detail string
		if err := rows.Scan(&e.Seq, &at, &e.Peer, &e.Actor, &e.RequestID, &e.Action, &e.Tenant, &e.Cell, &e.Move, &detail); err != nil {
			return nil, s.translate("audit", err)
		}
		e.At, e.Detail = fromMicros(at), json.RawMessage(detail)
		out = append(out, e)
	}
	return out, s.translate("audit", rows.Err())
}
