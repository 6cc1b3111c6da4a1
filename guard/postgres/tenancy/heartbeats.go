// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// keepHeartbeats is how long the heartbeat of a process that died stays to be read.
const keepHeartbeats = 24 * time.Hour

// Beat implements [tenancy.Store]. It also removes what has not beaten for a day.
func (s *Store) Beat(ctx context.Context, h tenancy.Heartbeat) error {
	if err := cells.MoveID(h.Instance).Validate(); err != nil {
		return fmt.Errorf("%w: tenancy: instance %q", cells.ErrInvalid, h.Instance)
	}
	if err := h.Settings.Validate(); err != nil {
		return err
	}
	var fp *string
	if h.Fingerprint != nil {
		text := string(h.Fingerprint.Encode())
		fp = &text
	}
	columns, values, also := "", "", ""
	args := []any{h.Instance, string(h.Cell), string(h.Mode), fp, h.Build, h.Gated, h.Workers, h.Lease, keepHeartbeats.Seconds()}
	if tenancy.SchemaVersion() >= 2 {
		columns, values, also = ", cache_ms", ", $10", ", cache_ms = EXCLUDED.cache_ms"
		args = append(args, h.CacheFor.Milliseconds())
	}
	if tenancy.SchemaVersion() >= 3 {
		columns, values, also = columns+", settings", values+", $11", also+", settings = EXCLUDED.settings"
		args = append(args, h.Settings)
	}
	_, err := s.pool.Exec(ctx, s.q(`WITH old AS (DELETE FROM @s.heartbeats WHERE at < clock_timestamp() - make_interval(secs => $9) AND instance <> $1)
		INSERT INTO @s.heartbeats (instance, cell, mode, fingerprint, build, gated, workers, lease, at`+columns+`) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp()`+values+`)
		ON CONFLICT (instance) DO UPDATE SET cell = EXCLUDED.cell, mode = EXCLUDED.mode, fingerprint = EXCLUDED.fingerprint, build = EXCLUDED.build,
			gated = EXCLUDED.gated, workers = EXCLUDED.workers, lease = EXCLUDED.lease, at = EXCLUDED.at`+also), args...)
	if err != nil {
		return fmt.Errorf("tenancy: heartbeat of %s: %w", h.Instance, translate(err))
	}
	return nil
}

// Leave implements [tenancy.Store].
func (s *Store) Leave(ctx context.Context, instance string) error {
	_, err := s.pool.Exec(ctx, s.q(`DELETE FROM @s.heartbeats WHERE instance = $1`), instance)
	return translate(err)
}

// Heartbeats implements [tenancy.Store].
func (s *Store) Heartbeats(ctx context.Context, within time.Duration) ([]tenancy.Heartbeat, error) {
	// Another cell's rows may still be those of a version before.
	cache, settings := "0", "NULL"
	if tenancy.SchemaVersion() >= 2 {
		cache = "coalesce((to_jsonb(h) ->> 'cache_ms')::bigint, 0)"
	}
	if tenancy.SchemaVersion() >= 3 {
		settings = "nullif(to_jsonb(h) -> 'settings', 'null')"
	}
	rows, err := s.pool.Query(ctx, s.q(`SELECT instance, cell, mode, fingerprint, build, gated, workers, lease, at, `+cache+`::bigint, `+settings+`::jsonb FROM @s.heartbeats h
		WHERE at >= clock_timestamp() - make_interval(secs => $1) ORDER BY instance`), within.Seconds())
	if err != nil {
		return nil, fmt.Errorf("tenancy: reading the heartbeats: %w", translate(err))
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h tenancy.Heartbeat, err error) {
		var fp *string
		var cache int64
		err = row.Scan(&h.Instance, &h.Cell, &h.Mode, &fp, &h.Build, &h.Gated, &h.Workers, &h.Lease, &h.At, &cache, &h.Settings)
		h.CacheFor = time.Duration(cache) * time.Millisecond
		if err != nil || fp == nil {
			return h, err
		}
		f, err := tenancy.DecodeFingerprint([]byte(*fp))
		h.Fingerprint = &f
		return h, err
	})
	if err != nil {
		return nil, fmt.Errorf("tenancy: reading the heartbeats: %w", translate(err))
	}
	return out, nil
}
