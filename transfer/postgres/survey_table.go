// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// exactRows is the estimate up to which rows are counted.
const exactRows = 100_000

func (t *table) survey(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, cat *catalog, find finder) (transfer.TableInfo, error) {
	info := transfer.TableInfo{Table: t.Table, Key: t.key}
	has := false
	for _, c := range t.cols {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ + c.collate})
		has = has || c.name == t.TenantColumn
		if c.name == t.TenantColumn {
			t.tenantType(c, find)
		}
	}
	for _, c := range t.gen {
		info.Columns = append(info.Columns, transfer.Column{Name: c.name, Type: c.typ + c.collate, Generated: true})
		if slices.Contains(t.key, c.name) {
			find(blocking, transfer.FindGenerated, t.Name, "generated column "+c.name+" is part of the primary key: changes do not carry it", "let the service write the column")
		} else {
			find(note, transfer.FindGenerated, t.Name, "generated column "+c.name+" does not travel: the target computes it", "none needed if both cells compute it alike")
		}
	}
	if t.unlogged {
		find(blocking, transfer.FindUnlogged, t.Name, "the table is unlogged: its changes are in no log, and it is emptied by a crash", "ALTER TABLE ... SET LOGGED")
	}
	if t.inherits {
		find(blocking, transfer.FindInheritance, t.Name, "the table inherits from another, or is inherited from: rows would be seen twice", "use declarative partitions, or list the tables that hold rows and drop the inheritance")
	}
	if t.partitioned {
		find(note, transfer.FindPartitioned, t.Name, "rows travel through the root of the partitions", "none needed if the target has a partition for each row")
	}
	for _, r := range t.rules {
		find(blocking, transfer.FindRule, t.Name, "rule "+r+" would rewrite what is imported", "replace it by a trigger, or by work of the service")
	}
	for _, g := range t.always {
		find(blocking, transfer.FindTrigger, t.Name, "trigger "+g+" is enabled ALWAYS or for REPLICA and would run on every imported row", "ALTER TABLE ... ENABLE TRIGGER "+g)
	}
	switch {
	case !has:
		find(blocking, transfer.FindTenantNotInKey, t.Name, "there is no column "+t.TenantColumn, "add it, as text, and make it part of the primary key")
		return info, nil
	case len(t.key) == 0:
		find(blocking, transfer.FindNoKey, t.Name, "the table has no primary key", "declare one that begins with "+t.TenantColumn)
	case len(t.keys) == len(t.key):
		find(blocking, transfer.FindTenantNotInKey, t.Name, fmt.Sprintf("the primary key (%s) lacks %s: keys of two tenants may collide in the other cell", strings.Join(t.key, ", "), t.TenantColumn),
			"make the primary key begin with "+t.TenantColumn)
	}
	switch t.identity {
	case "n":
		find(blocking, transfer.FindReplicaIdentity, t.Name, "REPLICA IDENTITY is NOTHING: deletes would not be seen", "ALTER TABLE ... REPLICA IDENTITY DEFAULT")
	case "i":
		find(blocking, transfer.FindReplicaIdentity, t.Name, "REPLICA IDENTITY is another index than the primary key", "ALTER TABLE ... REPLICA IDENTITY DEFAULT")
	}
	if !t.owned {
		find(blocking, transfer.FindPrivilege, t.Name, "the agent's role does not own the table and may not publish it", "make the role a member of the owner")
	}
	if t.rowSecurity {
		find(blocking, transfer.FindPrivilege, t.Name, "row level security may hide rows from the agent", "ALTER ROLE ... BYPASSRLS")
		return info, nil
	}
	if cat.mayReplica {
		for _, g := range t.triggers {
			find(note, transfer.FindTrigger, t.Name, "trigger "+g+" does not run on imported rows", "none needed: what it did at the source has travelled")
		}
	}
	if !cat.mayReplica {
		for _, g := range t.triggers {
			find(blocking, transfer.FindTrigger, t.Name, "trigger "+g+" would run on every imported row", "GRANT SET ON PARAMETER session_replication_role TO the agent's role")
		}
		if t.selfRef {
			find(blocking, transfer.FindSelfReference, t.Name, "foreign keys form a circle: no order of copying satisfies them", "GRANT SET ON PARAMETER session_replication_role TO the agent's role")
		}
	}
	if _, _, err := probe(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s WHERE %s)", t.sql(), t.where(tenant))); strings.HasPrefix(sqlState(err), "22") {
		t.unfit = true
		find(blocking, transfer.FindTenantType, t.Name, "the tenant's id is no value of column "+t.TenantColumn, "make the column text")
		return info, nil
	} else if err != nil {
		return info, err
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
		find(warning, transfer.FindUnique, t.Name, "unique index "+n+" does not carry "+t.TenantColumn+": a value may be taken by another tenant of the target", "put "+t.TenantColumn+" into the index")
	}
	if info.Rules, err = t.asks(ctx, tx); err != nil {
		return info, err
	}
	if err := t.contents(ctx, tx, tenant, &info, find); err != nil {
		return info, err
	}
	return info, t.estimate(ctx, tx, tenant, &info)
}

// tenantType judges the column that says whose a row is.
func (t *table) tenantType(c column, find finder) {
	switch {
	case c.base == "citext" || c.loose:
		find(blocking, transfer.FindTenantType, t.Name, "column "+c.name+" is "+c.typ+c.collate+": ids of two tenants that differ may be equal there", "make it text with a deterministic collation")
	case c.base == "text" || c.base == "varchar":
	default:
		find(warning, transfer.FindTenantType, t.Name, "column "+c.name+" is "+c.typ+": a tenant's id must be one of its values, written as the type writes it", "make it text")
	}
}

// asks lists what else the table asks of its rows, without names.
func (t *table) asks(ctx context.Context, tx pgx.Tx) ([]string, error) {
	rows, err := tx.Query(ctx, `SELECT line FROM (SELECT DISTINCT line FROM (
		SELECT pg_get_constraintdef(oid) AS line FROM pg_constraint WHERE conrelid = $1 AND contype IN ('c', 'f', 'u', 'x')
		UNION ALL SELECT regexp_replace(pg_get_indexdef(i.indexrelid), '^CREATE (UNIQUE )?INDEX .* USING ', '\1INDEX ') FROM pg_index i WHERE i.indrelid = $1 AND i.indisvalid
			AND NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conindid = i.indexrelid)
		UNION ALL SELECT attname || ' NOT NULL' FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND attnotnull AND NOT attisdropped
		UNION ALL SELECT a.attname || ' GENERATED AS ' || pg_get_expr(d.adbin, d.adrelid) FROM pg_attribute a JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum WHERE a.attrelid = $1 AND a.attgenerated <> ''
		UNION ALL SELECT 'PARTITION BY ' || pg_get_partkeydef($1) WHERE pg_get_partkeydef($1) IS NOT NULL
		UNION ALL SELECT 'PARTITION ' || pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid WHERE h.inhparent = $1 AND c.relispartition
	) AS l) AS d ORDER BY line COLLATE "C"`, t.oid)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// contents looks at the tenant's rows: what they refer to outside of tables, and where
// the sequences stand that give out their values.
func (t *table) contents(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, info *transfer.TableInfo, find finder) error {
	for _, c := range t.cols {
		if c.base == "oid" || c.base == "lo" {
			held, known, err := probe(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s t JOIN pg_largeobject_metadata l ON l.oid = t.%s WHERE t.%s)", t.sql(), ident(c.name), t.where(tenant)))
			if err != nil {
				return err
			}
			l, message := warning, "column "+c.name+" may refer to large objects, which do not travel"
			if held || !known || c.base == "lo" {
				l, message = blocking, "column "+c.name+" refers to large objects, which do not travel"
			}
			find(l, transfer.FindLargeObject, t.Name, message, "keep such values in bytea")
		}
		if !c.identity && !c.hasSequence {
			continue
		}
		seq := transfer.Sequence{Column: c.name}
		err := tx.QueryRow(ctx, `SELECT coalesce(s.name, ''), coalesce(CASE WHEN has_sequence_privilege(s.name, 'SELECT, USAGE') THEN pg_sequence_last_value(s.name::regclass) END, 0)
			FROM (SELECT coalesce(pg_get_serial_sequence($1, $2), (SELECT d.refobjid::regclass::text FROM pg_attrdef a JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = a.oid
				JOIN pg_class c ON c.oid = d.refobjid AND c.relkind = 'S' WHERE a.adrelid = $3 AND d.refclassid = 'pg_class'::regclass
				AND a.adnum = (SELECT attnum FROM pg_attribute WHERE attrelid = $3 AND attname = $2) LIMIT 1)) AS name) AS s`, t.sql(), c.name, t.oid).Scan(&seq.Name, &seq.Last)
		if err != nil {
			return err
		}
		err = within(ctx, tx, func() error {
			return tx.QueryRow(ctx, fmt.Sprintf("SELECT coalesce(max(%s), 0)::bigint FROM %s WHERE %s", ident(c.name), t.sql(), t.where(tenant)), once).Scan(&seq.Highest)
		})
		if err != nil && sqlState(err) != stateTimeout {
			return err
		}
		info.Sequences = append(info.Sequences, seq)
	}
	return nil
}

// probePatience bounds a look at rows that no index may lead to.
const probePatience = 3 * time.Second

// within runs f with a bound on its time, and so that the transaction can go on if it
// fails.
func within(ctx context.Context, tx pgx.Tx, f func() error) error {
	if _, err := tx.Exec(ctx, fmt.Sprintf("SAVEPOINT cell; SET LOCAL statement_timeout = %d; SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on", probePatience.Milliseconds())); err != nil {
		return err
	}
	ferr := f()
	end := "SET LOCAL statement_timeout = 0; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; RELEASE SAVEPOINT cell"
	if ferr != nil {
		end = "ROLLBACK TO SAVEPOINT cell; RELEASE SAVEPOINT cell"
	}
	if _, err := tx.Exec(ctx, end); err != nil {
		return errors.Join(ferr, err)
	}
	return ferr
}

// once marks a query of one tenant's rows, whose text no other will have: it is neither
// prepared nor kept.
const once = pgx.QueryExecModeExec

// probe asks a question that has a yes or no, unless that takes too long.
func probe(ctx context.Context, tx pgx.Tx, q string, args ...any) (yes, known bool, err error) {
	err = within(ctx, tx, func() error { return tx.QueryRow(ctx, q, append([]any{once}, args...)...).Scan(&yes) })
	switch sqlState(err) {
	case stateTimeout, statePrivilege:
		return false, false, nil
	}
	return yes, err == nil, err
}

// estimate asks the planner, and counts when it expects few rows.
func (t *table) estimate(ctx context.Context, tx pgx.Tx, tenant cells.TenantID, info *transfer.TableInfo) error {
	from := fmt.Sprintf("FROM %s WHERE %s", t.sql(), t.where(tenant))
	var text []byte
	if err := tx.QueryRow(ctx, "EXPLAIN (FORMAT JSON) SELECT * "+from, once).Scan(&text); err != nil {
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
	if err := tx.QueryRow(ctx, "SELECT ("+count+"), (SELECT coalesce(avg(pg_column_size(s.*)), 0)::float8 FROM (SELECT * "+from+" LIMIT 200) AS s)", once).Scan(&info.Rows, &width); err != nil {
		return err
	}
	info.Bytes = int64(width * float64(info.Rows))
	return nil
}
