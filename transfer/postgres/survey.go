// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// exactRows is the estimate up to which rows are counted.
const exactRows = 100_000

// Survey implements transfer.Source and transfer.Sink.
func (s *Store) Survey(ctx context.Context, tenant cells.TenantID) (transfer.Survey, error) {
	out := transfer.Survey{Engine: "postgres"}
	find := func(blocking bool, code, table, message, fix string) {
		out.Findings = append(out.Findings, cells.Finding{Code: code, Table: table, Message: message, Fix: fix, Blocking: blocking})
	}
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		cat, err := s.load(ctx, tx)
		if err != nil {
			return err
		}
		if err := s.surveyServer(ctx, tx, &out, find); err != nil {
			return err
		}
		for _, m := range cat.missing {
			find(true, transfer.FindTableMissing, m.Name, "the table is listed and does not exist", "run the service's migrations, or take it off the list")
		}
		for _, t := range cat.tables {
			info, err := t.survey(ctx, tx, tenant, cat, find)
			if err != nil {
				return err
			}
			out.Tables = append(out.Tables, info)
		}
		if err := s.unlisted(ctx, tx, cat, find); err != nil {
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
	shape := make([]any, 0, 3*len(out.Tables))
	byName := slices.Clone(out.Tables)
	slices.SortFunc(byName, func(a, b transfer.TableInfo) int { return strings.Compare(a.Name, b.Name) })
	for _, t := range byName {
		shape = append(shape, t.Table, t.Columns, t.Key)
	}
	text, err := json.Marshal(shape)
	if err != nil {
		return out, err
	}
	sum := sha256.Sum256(text)
	out.Fingerprint = hex.EncodeToString(sum[:])
	return out, nil
}

type finder func(blocking bool, code, table, message, fix string)

func (s *Store) surveyServer(ctx context.Context, tx pgx.Tx, out *transfer.Survey, find finder) error {
	var version, slots, maxSlots, senders, maxSenders int
	var level, keep string
	var replication, create bool
	var old int
	var oldest string
	err := tx.QueryRow(ctx, `SELECT current_setting('server_version_num')::int, current_setting('wal_level'), current_setting('max_slot_wal_keep_size'),
		(SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
		(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'), current_setting('max_wal_senders')::int,
		(SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user), has_database_privilege(current_database(), 'CREATE'),
		(SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND xact_start < now() - interval '30 seconds') + (SELECT count(*) FROM pg_prepared_xacts),
		coalesce((SELECT 'pid ' || pid || ' of ' || coalesce(usename, '?') || ' since ' || date_trunc('second', xact_start) FROM pg_stat_activity WHERE backend_xid IS NOT NULL ORDER BY xact_start LIMIT 1), 'prepared')`).
		Scan(&version, &level, &keep, &slots, &maxSlots, &senders, &maxSenders, &replication, &create, &old, &oldest)
	if err != nil {
		return err
	}
	out.Version = strconv.Itoa(version / 10000)
	if version < 150000 {
		find(true, transfer.FindVersion, "", fmt.Sprintf("Postgres %d has no row filters in publications", version/10000), "upgrade to 15 or later")
	}
	if level != "logical" {
		find(true, transfer.FindWALLevel, "", "wal_level is "+level, "set wal_level = logical and restart the server")
	}
	// One slot for the changes, and one now and then for a view.
	if maxSlots-slots < 2 || maxSenders-senders < 2 {
		find(true, transfer.FindSlots, "", fmt.Sprintf("%d of %d replication slots and %d of %d senders are taken; a move needs two of each", slots, maxSlots, senders, maxSenders),
			"drop slots that nobody reads (see pg_replication_slots), or raise max_replication_slots and max_wal_senders")
	}
	if !replication {
		find(true, transfer.FindPrivilege, "", "the agent's role has no REPLICATION attribute", "ALTER ROLE ... REPLICATION")
	}
	if !create {
		find(true, transfer.FindPrivilege, "", "the agent's role may not create a publication", "GRANT CREATE ON DATABASE ... TO the role")
	}
	if old > 0 {
		find(false, transfer.FindLongTransaction, "", fmt.Sprintf("%d transactions that write have been open for long (%s): each view of the source waits for them", old, oldest), "end them before the move")
	}
	if keep == "-1" {
		find(false, transfer.FindRetention, "", "max_slot_wal_keep_size is unlimited: while a move lasts the server keeps its log",
			"set max_slot_wal_keep_size to what the disk can spare; a move that exceeds it starts over")
	}
	return nil
}

func (t *table) survey(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, cat *catalog, find finder) (transfer.TableInfo, error) {
	info := transfer.TableInfo{Table: t.Table, Key: t.key}
	has := false
	for _, c := range t.cols {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ})
		has = has || c.name == t.TenantColumn
		if c.identity || c.hasSequence {
			find(false, transfer.FindSequence, t.Name, "values of column "+c.name+" travel, the sequence of the target is not advanced",
				"make sure that the two cells cannot give out one value twice for a tenant: different ranges, or uuids")
		}
		if c.base == "oid" || c.base == "lo" {
			find(c.base == "lo", transfer.FindLargeObject, t.Name, "column "+c.name+" may refer to large objects, which do not travel", "keep such values in bytea")
		}
	}
	for _, c := range t.gen {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ, Generated: true})
	}
	switch {
	case !has:
		find(true, transfer.FindTenantNotInKey, t.Name, "there is no column "+t.TenantColumn, "add it, as text, and make it part of the primary key")
		return info, nil
	case len(t.key) == 0:
		find(true, transfer.FindNoKey, t.Name, "the table has no primary key", "declare one that begins with "+t.TenantColumn)
	case len(t.keys) == len(t.key):
		find(true, transfer.FindTenantNotInKey, t.Name, fmt.Sprintf("the primary key (%s) lacks %s: keys of two tenants may collide in the other cell", strings.Join(t.key, ", "), t.TenantColumn),
			"make the primary key begin with "+t.TenantColumn)
	}
	switch t.identity {
	case "n":
		find(true, transfer.FindReplicaIdentity, t.Name, "REPLICA IDENTITY is NOTHING: deletes would not be seen", "ALTER TABLE ... REPLICA IDENTITY DEFAULT")
	case "i":
		find(true, transfer.FindReplicaIdentity, t.Name, "REPLICA IDENTITY is another index than the primary key", "ALTER TABLE ... REPLICA IDENTITY DEFAULT")
	}
	if !t.owned {
		find(true, transfer.FindPrivilege, t.Name, "the agent's role does not own the table and may not publish it", "make the role a member of the owner")
	}
	if t.rowSecurity {
		find(true, transfer.FindPrivilege, t.Name, "row level security may hide rows from the agent", "ALTER ROLE ... BYPASSRLS")
		return info, nil
	}
	if !cat.mayReplica {
		for _, g := range t.triggers {
			find(true, transfer.FindTrigger, t.Name, "trigger "+g+" would run on every imported row", "GRANT SET ON PARAMETER session_replication_role TO the agent's role")
		}
		if t.selfRef {
			find(true, transfer.FindSelfReference, t.Name, "foreign keys form a circle: no order of copying satisfies them", "GRANT SET ON PARAMETER session_replication_role TO the agent's role")
		}
	}
	rows, err := tx.Query(ctx, `SELECT i.indexrelid::regclass::text FROM pg_index i WHERE i.indrelid = $1 AND i.indisunique AND NOT i.indisprimary
		AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = i.indrelid AND a.attname = $2 AND a.attnum = ANY (i.indkey)) ORDER BY 1`, t.oid, t.TenantColumn)
	if err != nil {
		return info, err
	}
	indexes, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return info, err
	}
	for _, n := range indexes {
		find(false, transfer.FindUnique, t.Name, "unique index "+n+" does not carry "+t.TenantColumn+": a value may be taken by another tenant of the target", "put "+t.TenantColumn+" into the index")
	}
	for _, fk := range cat.loose[t.Name] {
		find(false, transfer.FindForeignTenant, t.Name, "foreign key "+fk+" leads out of the tenant's own rows: the row it refers to may be missing at the target",
			"put "+t.TenantColumn+" into the foreign key, or keep the same rows of the other table in every cell")
	}
	return info, t.estimate(ctx, tx, tenant, &info)
}

// estimate asks the planner, and counts when it expects few rows.
func (t *table) estimate(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, info *transfer.TableInfo) error {
	from := fmt.Sprintf("FROM %s WHERE %s", t.sql(), t.where(tenant))
	var text []byte
	if err := tx.QueryRow(ctx, "EXPLAIN (FORMAT JSON) SELECT * "+from).Scan(&text); err != nil {
		return err
	}
	var plan []struct {
		Plan struct {
			Rows  float64 `json:"Plan Rows"`
			Width float64 `json:"Plan Width"`
		} `json:"Plan"`
	}
	if err := json.Unmarshal(text, &plan); err != nil || len(plan) == 0 {
		return fmt.Errorf("transfer/postgres: plan of table %s: %w", t.Name, err)
	}
	rows := int64(plan[0].Plan.Rows)
	count := "SELECT count(*) " + from
	if rows > exactRows {
		count = "SELECT CASE WHEN EXISTS (SELECT " + from + ") THEN " + strconv.FormatInt(rows, 10) + " ELSE 0 END"
	}
	var width float64
	if err := tx.QueryRow(ctx, count).Scan(&info.Rows); err != nil {
		return err
	}
	if err := tx.QueryRow(ctx, "SELECT coalesce(avg(pg_column_size(s.*)), 0)::float8 FROM (SELECT * "+from+" LIMIT 200) AS s").Scan(&width); err != nil {
		return err
	}
	info.Bytes = int64(width * float64(info.Rows))
	return nil
}

// unlisted warns of tables that look like a tenant's and are not listed.
func (s *Store) unlisted(ctx context.Context, tx pgx.Tx, cat *catalog, find finder) error {
	var oids []uint32
	var columns []string
	for _, t := range cat.tables {
		oids = append(oids, t.oid)
	}
	for _, t := range s.cfg.Tables {
		columns = append(columns, t.TenantColumn)
	}
	rows, err := tx.Query(ctx, `SELECT c.oid::regclass::text, min(a.attname::text) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname NOT IN ('pg_catalog', 'information_schema', $3) AND n.nspname NOT LIKE 'pg\_%'
		AND c.oid <> ALL ($1) AND a.attname = ANY ($2) AND NOT a.attisdropped GROUP BY c.oid ORDER BY 1`, oids, columns, s.cfg.Schema)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var name, col string
		if err := rows.Scan(&name, &col); err != nil {
			return err
		}
		find(false, transfer.FindUnlisted, name, "the table has a column "+col+" and is not listed: its rows stay behind", "list it, if its rows belong to tenants")
	}
	return rows.Err()
}
