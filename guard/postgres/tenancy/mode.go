// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Bounds of one try to write the mode. The server keeps them up to the commit, so that
// a writer that stalls frees the lock by itself.
const (
	modeLockTry   = time.Second     // waiting for the lock, with later inserts behind
	modeStatement = 3 * time.Second // each statement, and the commit's wait for a standby
	modeIdle      = 2 * time.Second // between statements
	modeGap       = 500 * time.Millisecond
	// modeTry is the longest that a try can take to commit.
	modeTry = modeLockTry + 2*modeIdle + 2*modeStatement
	// modeGone bounds the wait for an ended session.
	modeGone = 10 * time.Second
)

// session is a backend of Postgres, for ever: process ids come again.
type session struct {
	pid   int32
	start time.Time
}

// SetMode implements [tenancy.Store].
func (s *Store) SetMode(ctx context.Context, mode tenancy.Mode, w tenancy.ModeWrite) (tenancy.Mode, error) {
	if err := mode.Validate(); err != nil {
		return "", err
	}
	if w.Deadline.IsZero() {
		w.Deadline = time.Now().Add(time.Minute)
	}
	var last error
	for n := 1; ; n++ {
		if w.Tried != nil {
			if err := w.Tried(n); err != nil {
				return s.readBack(ctx, errors.Join(err, last))
			}
		}
		if time.Until(w.Deadline) < modeTry || ctx.Err() != nil {
			if last == nil {
				last = fmt.Errorf("%w: tenancy: less than %s is left, which one try may take", cells.ErrUnavailable, modeTry)
			}
			return s.readBack(ctx, last)
		}
		err := s.tryMode(ctx, mode, n)
		if err == nil {
			return mode, nil
		}
		if errors.Is(err, cells.ErrNotFound) || errors.Is(err, tenancy.ErrModeUnknown) {
			return s.readBack(ctx, err)
		}
		last = err
		s.cfg.log.Warn("tenancy: the mode was not written, or not surely", "mode", mode, "try", n, "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(modeGap):
		}
	}
}

// readBack returns the mode as it is, with the error that ended the tries.
func (s *Store) readBack(ctx context.Context, cause error) (tenancy.Mode, error) {
	if errors.Is(cause, tenancy.ErrModeUnknown) {
		return "", cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), modeStatement)
	defer cancel()
	var mode string
	err := s.pool.QueryRow(ctx, s.q(`SELECT mode FROM @s.own_mode`)).Scan(&mode)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", cause
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w (after: %w)", tenancy.ErrModeUnknown, translate(err), cause)
	}
	return tenancy.Mode(mode), fmt.Errorf("tenancy: the mode is %s: %w", mode, cause)
}

// tryMode is one try on a session of its own. When it returns an error other than
// ErrModeUnknown the session is gone, so that what is read afterwards stays.
func (s *Store) tryMode(ctx context.Context, mode tenancy.Mode, n int) error {
	cfg := s.pool.Config().ConnConfig.Copy()
	var warned atomic.Bool
	cfg.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) {
		// A commit whose wait for a standby was cut off succeeds with a warning.
		if notice.SeverityUnlocalized == "WARNING" {
			warned.Store(true)
		}
	}
	cctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	conn, err := pgx.ConnectConfig(cctx, cfg)
	cancel()
	if err != nil {
		return translate(err)
	}
	var own session
	if err := conn.QueryRow(ctx, `SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()`).Scan(&own.pid, &own.start); err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return translate(err)
	}
	warned.Store(false)
	err = s.writeMode(ctx, conn, mode, n)
	if err == nil && warned.Load() {
		err = fmt.Errorf("%w: tenancy: the commit did not wait for its standby", cells.ErrUnavailable)
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), modeGone)
	defer cancel()
	if err == nil {
		_ = conn.Close(end)
		return nil
	}
	gone := s.endSession(end, own)
	_ = conn.Close(end)
	if gone != nil {
		return fmt.Errorf("%w: the session pid %d may still be committing: %w (after: %w)", tenancy.ErrModeUnknown, own.pid, gone, err)
	}
	return err
}

func (s *Store) writeMode(ctx context.Context, conn *pgx.Conn, mode tenancy.Mode, n int) error {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return translate(err)
	}
	ms := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	// A commit that waits for nobody would report what a failover can take back.
	if _, err := tx.Exec(ctx, `SELECT set_config('idle_in_transaction_session_timeout', $1, true), set_config('statement_timeout', $2, true), set_config('lock_timeout', $3, true),
		set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on' ELSE current_setting('synchronous_commit') END, true)`,
		ms(modeIdle), ms(modeStatement), ms(modeLockTry)); err != nil {
		return translate(err)
	}
	if _, err := tx.Exec(ctx, s.q(`LOCK TABLE @s.own_mode IN EXCLUSIVE MODE`)); err != nil {
		return translate(err)
	}
	tag, err := tx.Exec(ctx, s.q(`UPDATE @s.own_mode SET mode = $1, changed_at = clock_timestamp()`), string(mode))
	if err != nil {
		return translate(err)
	}
	if tag.RowsAffected() != 1 {
		return fmt.Errorf("%w: tenancy: there is no mode row; prepare writes it", cells.ErrNotFound)
	}
	if s.stall != nil {
		s.stall(ctx, n)
	}
	// The server's statement timeout ends before a commit begins to wait for a standby,
	// so this wait is bounded here, and the session is ended afterwards.
	cctx, cancel := context.WithTimeout(ctx, modeStatement)
	defer cancel()
	return translate(tx.Commit(cctx))
}

// endSession ends a backend and waits until it has left.
func (s *Store) endSession(ctx context.Context, own session) error {
	for {
		var there bool
		err := s.pool.QueryRow(ctx, `SELECT coalesce(bool_or(pg_terminate_backend(pid) IS NOT NULL), false) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2`, own.pid, own.start).Scan(&there)
		switch {
		case err == nil && !there:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && !errors.Is(translate(err), cells.ErrUnavailable):
			return translate(err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
