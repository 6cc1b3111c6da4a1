// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// Snapshot implements [tenancy.Store]. The value is the end of a Postgres snapshot
// and the virtual ids of the transactions that were open when it was taken.
//
// The two cover each other. A virtual id names a transaction from its begin to its
// end, also one that has written nothing and holds no snapshot; the end of the
// snapshot finds those that began later with an older one's snapshot (imported by a
// parallel dump), which may read what was true before.
func (s *Store) Snapshot(ctx context.Context) (string, error) {
	var v string
	err := s.pool.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text || ' ' ||
		coalesce((SELECT string_agg(virtualxid, ',' ORDER BY virtualxid) FROM pg_locks
			WHERE locktype = 'virtualxid' AND mode = 'ExclusiveLock' AND granted AND virtualxid = virtualtransaction AND pid <> pg_backend_pid()), '')`).Scan(&v)
	if err != nil {
		return "", fmt.Errorf("tenancy: taking a snapshot: %w", translate(err))
	}
	return v, nil
}

var snapshotForm = regexp.MustCompile(`^[0-9]{1,20} ([0-9]+/[0-9]+(,[0-9]+/[0-9]+)*)?$`)

// maintenance are Postgres's own processes, which run nobody's SQL.
var maintenance = []string{"autovacuum launcher", "autovacuum worker", "background writer", "checkpointer", "walwriter", "archiver", "startup",
	"walreceiver", "walsummarizer", "logger", "stats collector", "logical replication launcher", "slotsync worker", "io worker", "standalone backend"}

// openBeforeSQL lists what is open. A transaction of this database counts when its
// virtual id was open or when its id or snapshot is older than the snapshot's end;
// one of another database only when it writes, because then it holds back every
// snapshot's horizon. A walsender without a database is a standby or a base backup
// and runs no SQL. A session whose kind the role may not see counts as open.
const openBeforeSQL = `
	SELECT a.pid, coalesce(a.backend_type, 'session'), CASE WHEN a.datid <> d.oid THEN coalesce(a.datname, '?') ELSE '' END,
		coalesce(a.usename::text, ''), coalesce(a.application_name, ''), false, a.backend_type IS NULL
	FROM pg_stat_activity a CROSS JOIN (SELECT oid, $1::text::xid8::xid AS xmax FROM pg_database WHERE datname = current_database()) d
	WHERE a.pid <> pg_backend_pid() AND coalesce(a.backend_type, '') <> ALL ($3)
		AND NOT (coalesce(a.backend_type, '') = 'walsender' AND a.datid IS NULL)
		AND CASE WHEN a.datid <> d.oid THEN coalesce(age(a.backend_xid) > age(d.xmax), false)
			ELSE coalesce(age(a.backend_xid) > age(d.xmax), false) OR coalesce(age(a.backend_xmin) > age(d.xmax), false)
				OR a.datid IS NOT NULL AND a.backend_type IS NULL
				OR EXISTS (SELECT FROM pg_locks l WHERE l.pid = a.pid AND l.locktype = 'virtualxid' AND l.mode = 'ExclusiveLock' AND l.granted
					AND l.virtualxid = l.virtualtransaction AND l.virtualxid = ANY ($2)) END
	UNION ALL
	SELECT 0, 'prepared transaction', CASE WHEN p.database <> current_database() THEN p.database::text ELSE '' END, p.owner::text, p.gid, true, false
	FROM pg_prepared_xacts p WHERE age(p.transaction) > age($1::text::xid8::xid)
	ORDER BY 1`

// OpenBefore implements [tenancy.Store].
func (s *Store) OpenBefore(ctx context.Context, snapshot string) ([]tenancy.Blocker, error) {
	if !snapshotForm.MatchString(snapshot) {
		return nil, fmt.Errorf("%w: tenancy: %q is no snapshot of this store", cells.ErrInvalid, snapshot)
	}
	xmax, open, _ := strings.Cut(snapshot, " ")
	rows, err := s.pool.Query(ctx, openBeforeSQL, xmax, strings.Split(open, ","), maintenance)
	if err != nil {
		return nil, fmt.Errorf("tenancy: looking for open transactions: %w", translate(err))
	}
	out, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (b tenancy.Blocker, err error) {
		err = row.Scan(&b.PID, &b.Kind, &b.Database, &b.User, &b.Name, &b.Prepared, &b.Unreadable)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("tenancy: looking for open transactions: %w", translate(err))
	}
	return out, nil
}

// WaitAbility implements [tenancy.Store].
func (s *Store) WaitAbility(ctx context.Context) error {
	var prepared int
	var all bool
	err := s.pool.QueryRow(ctx, `SELECT current_setting('max_prepared_transactions')::int, pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')`).Scan(&prepared, &all)
	if err != nil {
		return fmt.Errorf("tenancy: looking at the server's settings: %w", translate(err))
	}
	var errs []error
	if !all {
		errs = append(errs, fmt.Errorf("%w: the role may not read every session's state; grant it pg_read_all_stats", cells.ErrInvalid))
	}
	if prepared != 0 {
		errs = append(errs, fmt.Errorf("%w: max_prepared_transactions is %d; set it to 0 while the cell is attached", cells.ErrInvalid, prepared))
	}
	return errors.Join(errs...)
}
