// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// maxLost is how often a capture whose slot the server has dropped is begun anew: once
// is bad luck, twice means that the copy takes longer than the server keeps its log.
const maxLost = 1

// blockerAge is from when on an open transaction is named, and blockersNamed how many are.
const (
	blockerAge    = 5 * time.Second
	blockersNamed = 5
)

// blockersSQL finds what a logical slot waits for: transactions of any database that
// have written, and prepared ones. What they run is left out.
const blockersSQL = `SELECT coalesce(pid, 0), coalesce(gid, ''), coalesce(who, ''), coalesce(app, ''), coalesce(db, ''), coalesce(state, ''), began, query, extract(epoch FROM now() - began)::float8 FROM (
	SELECT pid, NULL AS gid, usename::text AS who, application_name AS app, datname::text AS db, state, xact_start AS began, query_start AS query FROM pg_stat_activity
		WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
	UNION ALL SELECT NULL, gid, owner::text, NULL, database::text, 'prepared', prepared, NULL FROM pg_prepared_xacts) AS x
	WHERE gid IS NOT NULL OR began < now() - make_interval(secs => $1) ORDER BY began LIMIT $2`

// blockers returns the oldest transactions that have been open for at least age, and
// prepared ones of any age.
func blockers(ctx context.Context, q querier, age time.Duration) ([]transfer.Blocker, error) {
	rows, err := q.Query(ctx, blockersSQL, age.Seconds(), blockersNamed)
	if err != nil {
		return nil, translate(err)
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b transfer.Blocker, err error) {
		var query *time.Time
		var secs float64
		err = row.Scan(&b.PID, &b.GID, &b.User, &b.Application, &b.Database, &b.State, &b.Began, &query, &secs)
		if query != nil {
			b.QueryBegan = *query
		}
		b.Age = time.Duration(secs * float64(time.Second))
		return b, err
	})
	return out, translate(err)
}

// lagSQL is the replay lag of the slowest physical standby, in seconds. Readers of
// logical slots are no standbys: moves among them.
const lagSQL = `SELECT coalesce(max(extract(epoch FROM r.replay_lag)), 0)::float8 FROM pg_stat_replication r
	WHERE r.state IN ('streaming', 'catchup') AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')`

// ReplicaLag implements transfer.Sink.
func (s *Store) ReplicaLag(ctx context.Context) (time.Duration, error) {
	var secs float64
	err := s.pool.QueryRow(ctx, lagSQL).Scan(&secs)
	return time.Duration(secs * float64(time.Second)), translate(err)
}

// togetherSQL: o is captured by the slot of c's group.
const togetherSQL = "o.grp = c.grp AND NOT o.released AND o.ended = '' AND NOT o.alone"

// retainedSQL is the log that slot r keeps for capture c. A member of a group answers for
// what it has not applied itself, and for what the server keeps behind all of them.
const retainedSQL = `coalesce(CASE WHEN c.grp <> '' AND NOT c.alone AND c.start <> '0/0' THEN
		pg_wal_lsn_diff(pg_current_wal_lsn(), greatest(c.start, c.applied)) + greatest(0, pg_wal_lsn_diff((SELECT min(greatest(o.start, o.applied)) FROM @s.transfer_capture o
			WHERE ` + togetherSQL + ` AND o.start <> '0/0'), r.restart_lsn))
		ELSE pg_wal_lsn_diff(pg_current_wal_lsn(), r.restart_lsn) END, 0)::bigint`

// Check implements transfer.Source.
func (s *Store) Check(ctx context.Context, m cells.MoveRef, l transfer.Limits) (h transfer.Health, err error) {
	if err := s.unchanged(ctx, s.pool, m); err != nil {
		return h, err
	}
	var lag float64
	err = s.pool.QueryRow(ctx, s.q(`WITH kept AS (UPDATE @s.transfer_capture SET max_retained = $3 WHERE move = $1 AND NOT released AND max_retained <> $3)
		SELECT `+retainedSQL+`, CASE WHEN c.grp <> '' AND NOT c.alone THEN (SELECT count(*) FROM @s.transfer_capture o WHERE `+togetherSQL+`) ELSE 0 END, (`+lagSQL+`)
		FROM @s.transfer_capture c LEFT JOIN @s.transfer_group g ON g.id = c.grp AND NOT c.alone
		LEFT JOIN pg_replication_slots r ON r.slot_name = coalesce(g.name, nullif(c.objects, ''), $2) WHERE c.move = $1 AND NOT c.released`),
		string(m.ID), s.objectName(m.ID), l.MaxRetained).Scan(&h.Retained, &h.Shared, &lag)
	if errors.Is(err, pgx.ErrNoRows) {
		return h, fmt.Errorf("%w: transfer/postgres: changes of move %s are not captured here", cells.ErrNotApplicable, m.ID)
	}
	if err != nil {
		return h, translate(err)
	}
	h.ReplicaLag = time.Duration(lag * float64(time.Second))
	if h.Blockers, err = blockers(ctx, s.pool, s.patience); err != nil {
		return h, err
	}
	return h, l.Check(m.Source, h.Retained)
}

// spent ends the captures for which the server keeps more than they may: nobody may
// be there to roll the move back, and the log would fill the disk.
func (s *Store) spent(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, s.q("SELECT move, max_retained FROM @s.transfer_capture WHERE NOT released AND ended = ''"))
	if err != nil {
		return translate(err)
	}
	type known struct {
		Move string
		Max  int64
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[known])
	err = translate(err)
	for _, k := range all {
		move := cells.MoveID(k.Move)
		var kept int64
		c, cerr := s.capture(ctx, s.pool, move)
		if cerr != nil {
			err = errors.Join(err, translate(cerr))
			continue
		}
		qerr := s.pool.QueryRow(ctx, s.q("SELECT coalesce(sum("+retainedSQL+"), 0)::bigint FROM @s.transfer_capture c JOIN pg_replication_slots r ON r.slot_name = $2 WHERE c.move = $1"), k.Move, c.name).Scan(&kept)
		limit := transfer.Limits{MaxRetained: k.Max}.Retained()
		if qerr != nil || limit == 0 || kept <= limit {
			err = errors.Join(err, translate(qerr))
			continue
		}
		err = errors.Join(err, s.stop(ctx, move, fmt.Sprintf("the server kept %d bytes of its log for move %s, the limit was %d; the capture was ended", kept, move, limit)))
	}
	return err
}

// stop ends a capture for good; its row says why, and is freed with the move.
func (s *Store) stop(ctx context.Context, move cells.MoveID, why string) error {
	return s.locked(ctx, move, func(conn *pgxpool.Conn) error {
		if _, err := conn.Exec(ctx, s.q("UPDATE @s.transfer_capture SET ended = $2 WHERE move = $1"), string(move), why); err != nil {
			return err
		}
		c, err := s.capture(ctx, conn, move)
		if err != nil {
			return err
		}
		if c.group != "" {
			if err := s.dropOwn(ctx, conn, c, move); err != nil {
				return err
			}
			return s.parted(ctx, conn, c.group, move)
		}
		return s.dropSlot(ctx, conn, c.name)
	})
}
