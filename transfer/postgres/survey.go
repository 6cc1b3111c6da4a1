// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/disk"
	"github.com/cloister-dev/cloister/transfer"
)

// Survey implements transfer.Source and transfer.Sink.
func (s *Store) Survey(ctx context.Context, tenant cells.TenantID) (transfer.Survey, error) {
	out := transfer.Survey{Engine: "postgres"}
	find := func(l level, code, table, message, fix string) {
		out.Findings = append(out.Findings, cells.Finding{Code: code, Table: table, Message: message, Fix: fix, Blocking: l == blocking, Note: l == note})
	}
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		cat, err := s.load(ctx, tx)
		if err != nil {
			return err
		}
		// What follows asks the same of every tenant, or asks once.
		if _, err := tx.Exec(ctx, "SET LOCAL plan_cache_mode = force_generic_plan"); err != nil {
			return err
		}
		if err := s.surveyServer(ctx, tx, &out, find); err != nil {
			return err
		}
		for _, m := range cat.missing {
			find(blocking, transfer.FindTableMissing, m.Name, "the table is listed and does not exist", "run the service's migrations, or take it off the list")
		}
		for _, t := range cat.tables {
			info, err := t.survey(ctx, tx, tenant, cat, find)
			if err != nil {
				return err
			}
			out.Tables = append(out.Tables, info)
		}
		if err := s.references(ctx, tx, cat, tenant, find); err != nil {
			return err
		}
		if err := s.unlisted(ctx, tx, cat, tenant, find); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, s.q("SELECT move FROM @s.transfer_capture WHERE tenant = $1 UNION SELECT move FROM @s.transfer_import WHERE tenant = $1 ORDER BY 1"), string(tenant))
		if err != nil {
			return err
		}
		moves, err := pgx.CollectRows(rows, pgx.RowTo[string])
		for _, m := range moves {
			out.Moves = append(out.Moves, cells.MoveID(m))
		}
		return err
	})
	if err != nil {
		return out, translate(err)
	}
	return out, out.Seal()
}

// level is how serious a finding is.
type level int

const (
	warning level = iota
	blocking
	note
)

type finder func(l level, code, table, message, fix string)

// longTransaction is from when on an open transaction is worth a finding.
const longTransaction = 30 * time.Second

func (s *Store) surveyServer(ctx context.Context, tx pgx.Tx, out *transfer.Survey, find finder) error {
	var version, slots, maxSlots, senders, maxSenders int
	var wal, keep string
	var replication, create, standby, stats, here bool
	var dir *string
	err := tx.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, current_setting('wal_level'), current_setting('max_slot_wal_keep_size'),
		(SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
		(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'), current_setting('max_wal_senders')::int,
		(SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), has_database_privilege(current_database(), 'CREATE'),
		pg_is_in_recovery(), pg_has_role('pg_read_all_stats', 'USAGE'), CASE WHEN pg_has_role('pg_read_all_settings', 'USAGE') THEN current_setting('data_directory') END,
		inet_server_addr() IS NULL OR inet_server_addr() = inet_client_addr(),
		(SELECT datcollate || coalesce(' ' || (to_jsonb(d)->>'datlocprovider'), '') || coalesce(' ' || (to_jsonb(d)->>'daticulocale'), '') FROM pg_database d WHERE datname = current_database())`).
		Scan(&version, &wal, &keep, &slots, &maxSlots, &senders, &maxSenders, &replication, &create, &standby, &stats, &dir, &here, &out.Collation)
	if err != nil {
		return err
	}
	rows, err := tx.Query(ctx, "SELECT extname::text, extversion FROM pg_extension WHERE extname <> 'plpgsql'")
	if err != nil {
		return err
	}
	out.Extensions = map[string]string{}
	var name, ext string
	if _, err := pgx.ForEachRow(rows, []any{&name, &ext}, func() error { out.Extensions[name] = ext; return nil }); err != nil {
		return err
	}
	old, err := blockers(ctx, tx, longTransaction)
	if err != nil {
		return err
	}
	if dir != nil && here {
		if free, total, err := disk.Space(*dir); err == nil {
			out.Disk = &transfer.Disk{Free: free, Total: total}
		}
	}
	out.Version = strconv.Itoa(version / 10000)
	if version < 150000 {
		find(blocking, transfer.FindVersion, "", fmt.Sprintf("Postgres %d has no row filters in publications", version/10000), "upgrade to 15 or later")
	}
	if standby {
		find(blocking, transfer.FindStandby, "", "the server is a standby: it takes no writes and makes no slots", "let the agent connect to the primary")
	}
	if wal != "logical" {
		find(blocking, transfer.FindWALLevel, "", "wal_level is "+wal, "set wal_level = logical and restart the server")
	}
	// One slot for the changes, and one now and then for a view. A group has its one already.
	need, each := 2, "a move needs two of each"
	if there, err := s.hasSlot(ctx, tx); err != nil {
		return err
	} else if there {
		need, each = 1, "a move that joins its group needs one of each"
	}
	if maxSlots-slots < need || maxSenders-senders < need {
		find(blocking, transfer.FindSlots, "", fmt.Sprintf("%d of %d replication slots and %d of %d senders are taken; %s", slots, maxSlots, senders, maxSenders, each),
			"drop slots that nobody reads (see pg_replication_slots), or raise max_replication_slots and max_wal_senders")
	}
	if !replication {
		find(blocking, transfer.FindPrivilege, "", "the agent's role has no REPLICATION attribute", "ALTER ROLE ... REPLICATION")
	}
	if !create {
		find(blocking, transfer.FindPrivilege, "", "the agent's role may not create a publication", "GRANT CREATE ON DATABASE ... TO the role")
	}
	if !stats {
		find(note, transfer.FindStatistics, "", "the agent's role may not see other sessions: transactions that hold a move up are not named, and the lag of standbys is not known", "GRANT pg_read_all_stats TO the role")
	}
	if len(old) > 0 {
		names := make([]string, len(old))
		for i, b := range old {
			names[i] = b.String()
		}
		find(warning, transfer.FindLongTransaction, "", "each view of the source waits for transactions that have written; open for long are: "+strings.Join(names, "; "), "end them before the move")
	}
	if keep == "-1" {
		find(note, transfer.FindRetention, "", "max_slot_wal_keep_size is unlimited: what a move makes the server keep of its log is bounded by the agents (--max-retained), if one of them runs",
			"set max_slot_wal_keep_size to what the disk can spare, and above the moves' limit")
	}
	return nil
}

// hasSlot reports whether the move that the survey is for is of a group whose slot exists.
func (s *Store) hasSlot(ctx context.Context, tx pgx.Tx) (there bool, err error) {
	g, m := transfer.GroupOf(ctx), transfer.MoveOf(ctx)
	if g == "" || m.Source == "" || m.Target == "" {
		return false, nil
	}
	err = tx.QueryRow(ctx, s.q("SELECT EXISTS (SELECT FROM @s.transfer_group AS g JOIN pg_replication_slots AS r ON r.slot_name = g.name WHERE g.id = $1 AND r.database = current_database() AND r.wal_status IS DISTINCT FROM 'lost')"),
		groupID(g, m)).Scan(&there)
	return there, err
}
