// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/cloister-dev/cloister/guard/tenancy"
)

const (
	triggerInsert = "zz_cell_tenancy_insert"
	triggerUpdate = "zz_cell_tenancy_update"
	firstRow      = "own_first_row"
	firstTruncate = "own_first_truncate"

	// Each table's DDL: tries of so long, so far apart.
	ddlTry   = 100 * time.Millisecond
	ddlGap   = time.Second
	ddlTries = 3
)

// table is a relation with a tenant column.
type table struct {
	oid     uint32
	schema  string
	name    string
	kind    string // of pg_class
	part    bool   // a partition
	column  string
	indexed bool // an index leads with the column
}

func (t table) String() string { return t.schema + "." + t.name }

func (t table) sql() string { return pgx.Identifier{t.schema, t.name}.Sanitize() }

// tables finds every table with a tenant column in the catalog, whether anybody
// listed it or not. The guard's rows about tenants, which are no data of theirs, are
// left out.
func (s *Store) tables(ctx context.Context, q querier) ([]table, error) {
	own := []string{s.cfg.schema + ".tenancy", s.cfg.schema + ".fence", s.cfg.schema + ".outbox_barrier"}
	rows, err := q.Query(ctx, `SELECT DISTINCT ON (n.nspname, c.relname) c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relispartition, a.attname::text,
			EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indkey[0] = a.attnum AND i.indisvalid AND i.indpred IS NULL)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		WHERE c.relkind IN ('r', 'p', 'f') AND c.relpersistence <> 't' AND a.attname = ANY ($1)
			AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_(toast|temp)'
			AND n.nspname || '.' || c.relname <> ALL ($2)
		ORDER BY n.nspname, c.relname, array_position($1, a.attname::text)`, s.cfg.columns, append(own, s.cfg.exclude...))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (t table, err error) {
		err = row.Scan(&t.oid, &t.schema, &t.name, &t.kind, &t.part, &t.column, &t.indexed)
		return t, err
	})
}

// when is a trigger's condition as it is created.
func (s *Store) when(name, column string) string {
	unmarked := fmt.Sprintf("current_setting('%s.%s', true) IS DISTINCT FROM 'on'", s.cfg.schema, tenancy.MarkerSetting)
	if name == triggerInsert {
		return unmarked
	}
	col := pgx.Identifier{column}.Sanitize()
	return fmt.Sprintf("%s AND NEW.%s IS DISTINCT FROM OLD.%s", unmarked, col, col)
}

func (s *Store) create(t table, name string) string {
	event := "INSERT"
	if name == triggerUpdate {
		event = "UPDATE"
	}
	return fmt.Sprintf("CREATE TRIGGER %s AFTER %s ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION %s.tenancy_refuse(%s)",
		name, event, t.sql(), s.when(name, t.column), s.cfg.schema, "'"+strings.ReplaceAll(t.column, "'", "''")+"'")
}

// found is a trigger as the catalog has it.
type found struct {
	oid     uint32
	name    string
	enabled string
	def     string
	plain   bool // type, function, arguments and columns are as created
}

// looseSQL is what servers of different versions print differently.
var looseSQL = regexp.MustCompile(`[\s()"]|::text`)

func loose(s string) string { return strings.ToLower(looseSQL.ReplaceAllString(s, "")) }

func (s *Store) found(ctx context.Context, q querier, t table) (map[string]found, error) {
	rows, err := q.Query(ctx, `SELECT g.oid, g.tgname::text, g.tgenabled::text, pg_get_triggerdef(g.oid),
			g.tgfoid = to_regprocedure($2) AND g.tgtype = CASE g.tgname WHEN $3 THEN 5 WHEN $4 THEN 17 END AND g.tgattr = '' AND NOT g.tgdeferrable
				AND g.tgconstraint = 0 AND g.tgoldtable IS NULL AND g.tgnewtable IS NULL AND g.tgargs = convert_to($5, 'UTF8') || '\x00'
		FROM pg_trigger g WHERE g.tgrelid = $1 AND g.tgname IN ($3, $4)`,
		t.oid, s.cfg.schema+".tenancy_refuse()", triggerInsert, triggerUpdate, t.column)
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f found, err error) {
		var plain *bool
		err = row.Scan(&f.oid, &f.name, &f.enabled, &f.def, &plain)
		f.plain = plain != nil && *plain
		return f, err
	})
	out := map[string]found{}
	for _, f := range list {
		out[f.name] = f
	}
	return out, err
}

// altered compares a trigger with what create makes.
func (s *Store) altered(t table, f found) bool {
	_, rest, ok := strings.Cut(f.def, " WHEN ")
	i := strings.LastIndex(rest, " EXECUTE ")
	return !f.plain || !ok || i < 0 || loose(rest[:i]) != loose(s.when(f.name, t.column))
}

// judge lists what is wrong with a table's triggers.
func (s *Store) judge(t table, have map[string]found, required bool) []tenancy.Defect {
	var out []tenancy.Defect
	add := func(name, what string) {
		out = append(out, tenancy.Defect{Table: t.String(), Trigger: name, What: what})
	}
	if t.kind != "r" {
		add("", tenancy.DefectUnsupported)
		return out
	}
	for _, name := range []string{triggerInsert, triggerUpdate} {
		f, ok := have[name]
		switch {
		case !ok && required:
			add(name, tenancy.DefectMissing)
		case !ok:
		case s.altered(t, f):
			add(name, tenancy.DefectAltered)
		case f.enabled == "D":
			add(name, tenancy.DefectDisabled)
		case f.enabled != "O":
			add(name, tenancy.DefectNotOrigin)
		}
	}
	return out
}

// TriggerDefects implements [tenancy.Store].
func (s *Store) TriggerDefects(ctx context.Context) ([]tenancy.Defect, error) {
	rows, err := s.Read(ctx)
	if err != nil {
		return nil, err
	}
	out, err := s.ownDefects(ctx)
	if err != nil {
		return nil, fmt.Errorf("tenancy: reading the triggers: %w", translate(err))
	}
	tables, err := s.tables(ctx, s.pool)
	if err != nil {
		return nil, fmt.Errorf("tenancy: reading the catalog: %w", translate(err))
	}
	for _, t := range tables {
		have, err := s.found(ctx, s.pool, t)
		if err != nil {
			return nil, fmt.Errorf("tenancy: reading the triggers of %s: %w", t, translate(err))
		}
		out = append(out, s.judge(t, have, rows.State() == tenancy.StateEnforced)...)
	}
	return out, nil
}

// ownDefects looks at the first row's triggers and at the functions.
func (s *Store) ownDefects(ctx context.Context) ([]tenancy.Defect, error) {
	var out []tenancy.Defect
	for _, name := range []string{firstRow, firstTruncate} {
		// BEFORE ROW DELETE UPDATE is 1+2+8+16, BEFORE STATEMENT TRUNCATE 2+32.
		var enabled *string
		var plain *bool
		err := s.pool.QueryRow(ctx, `SELECT g.tgenabled::text, g.tgfoid = to_regprocedure($3) AND g.tgqual IS NULL AND g.tgattr = '' AND g.tgtype = $4
			FROM (SELECT) AS one LEFT JOIN pg_trigger g ON g.tgrelid = to_regclass($1) AND g.tgname = $2`,
			s.cfg.schema+".own_first", name, s.cfg.schema+".own_first_keep()", map[string]int{firstRow: 27, firstTruncate: 34}[name]).Scan(&enabled, &plain)
		if err != nil {
			return nil, err
		}
		d := tenancy.Defect{Table: s.cfg.schema + ".own_first", Trigger: name}
		switch {
		case enabled == nil:
			d.What = tenancy.DefectMissing
		case plain == nil || !*plain:
			d.What = tenancy.DefectAltered
		case *enabled == "D":
			d.What = tenancy.DefectDisabled
		case *enabled != "A":
			d.What = tenancy.DefectNotAlways
		default:
			continue
		}
		out = append(out, d)
	}
	v, err := s.version(ctx, s.pool)
	if err != nil || v != tenancy.SchemaVersion() {
		return out, err // a newer build's functions are its own affair
	}
	for _, f := range functions(s.q(schemaSQL)) {
		var body *string
		if err := s.pool.QueryRow(ctx, `SELECT (SELECT prosrc FROM pg_proc WHERE oid = to_regprocedure($1))`, s.cfg.schema+"."+f.name+"()").Scan(&body); err != nil {
			return nil, err
		}
		if body == nil {
			out = append(out, tenancy.Defect{Table: s.cfg.schema, Trigger: f.name + "()", What: tenancy.DefectMissing})
		} else if *body != f.body {
			out = append(out, tenancy.Defect{Table: s.cfg.schema, Trigger: f.name + "()", What: tenancy.DefectAltered})
		}
	}
	return out, nil
}

type function struct{ name, body, create string }

var functionSQL = regexp.MustCompile(`(?s)CREATE OR REPLACE FUNCTION [a-z0-9_]+\.([a-z_]+)\(\).*?\$\$(.*?)\$\$;`)

// functions cuts the functions out of the schema's script.
func functions(script string) []function {
	var out []function
	for _, m := range functionSQL.FindAllStringSubmatch(script, -1) {
		out = append(out, function{m[1], m[2], m[0]})
	}
	return out
}

// EnsureTriggers implements [tenancy.Store].
func (s *Store) EnsureTriggers(ctx context.Context) (r tenancy.Report, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return r, fmt.Errorf("tenancy: triggers: %w", translate(err))
	}
	defer conn.Release()
	if _, err := conn.Exec(ctx, s.q(`SELECT pg_advisory_lock(hashtextextended('@s.triggers', 0))`)); err != nil {
		return r, fmt.Errorf("tenancy: triggers: waiting for another process: %w", translate(err))
	}
	defer func() {
		if _, uerr := conn.Exec(context.WithoutCancel(ctx), s.q(`SELECT pg_advisory_unlock(hashtextextended('@s.triggers', 0))`)); uerr != nil {
			_ = conn.Conn().Close(context.WithoutCancel(ctx)) // frees it as well
		}
	}()
	if err := s.ensureOwn(ctx, conn.Conn(), &r); err != nil {
		return r, fmt.Errorf("tenancy: the first row's triggers: %w", translate(err))
	}
	rows, err := s.Read(ctx)
	if err != nil || rows.State() != tenancy.StateEnforced {
		return r, err
	}
	tables, err := s.tables(ctx, conn)
	if err != nil {
		return r, fmt.Errorf("tenancy: reading the catalog: %w", translate(err))
	}
	for _, t := range tables {
		if t.kind != "r" {
			continue
		}
		if err := s.ensureTable(ctx, conn.Conn(), t, &r); err != nil {
			return r, fmt.Errorf("tenancy: triggers of %s: %w", t, translate(err))
		}
	}
	for _, sk := range r.Skipped {
		s.cfg.log.Error("tenancy: a table is unguarded until a later start", "table", sk.Table, "why", sk.Why, "holders", sk.Holders)
	}
	return r, nil
}

func (s *Store) ensureOwn(ctx context.Context, conn *pgx.Conn, r *tenancy.Report) error {
	defects, err := s.ownDefects(ctx)
	if err != nil || len(defects) == 0 {
		return err
	}
	first := s.cfg.schema + ".own_first"
	var stmts []string
	for _, d := range defects {
		switch {
		case d.Trigger == firstRow:
			stmts = append(stmts, fmt.Sprintf("CREATE OR REPLACE TRIGGER %s BEFORE UPDATE OR DELETE ON %s FOR EACH ROW EXECUTE FUNCTION %s.own_first_keep()", d.Trigger, first, s.cfg.schema),
				fmt.Sprintf("ALTER TABLE %s ENABLE ALWAYS TRIGGER %s", first, d.Trigger))
		case d.Trigger == firstTruncate:
			stmts = append(stmts, fmt.Sprintf("CREATE OR REPLACE TRIGGER %s BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s.own_first_keep()", d.Trigger, first, s.cfg.schema),
				fmt.Sprintf("ALTER TABLE %s ENABLE ALWAYS TRIGGER %s", first, d.Trigger))
		default:
			for _, f := range functions(s.q(schemaSQL)) {
				if f.name+"()" == d.Trigger {
					stmts = append([]string{f.create}, stmts...)
				}
			}
		}
	}
	done, err := s.ddl(ctx, conn, first, stmts, r)
	if done {
		for _, d := range defects {
			r.Repaired = append(r.Repaired, tenancy.Trigger{Table: d.Table, Name: d.Trigger})
		}
	}
	return err
}

func (s *Store) ensureTable(ctx context.Context, conn *pgx.Conn, t table, r *tenancy.Report) error {
	have, err := s.found(ctx, conn, t)
	if err != nil {
		return err
	}
	var stmts []string
	var created, repaired []tenancy.Trigger
	for _, d := range s.judge(t, have, true) {
		name := tenancy.Trigger{Table: t.String(), Name: d.Trigger}
		switch d.What {
		case tenancy.DefectMissing:
			stmts, created = append(stmts, s.create(t, d.Trigger)), append(created, name)
		case tenancy.DefectAltered:
			stmts = append(stmts, fmt.Sprintf("DROP TRIGGER %s ON %s", d.Trigger, t.sql()), s.create(t, d.Trigger))
			repaired = append(repaired, name)
		default:
			stmts = append(stmts, fmt.Sprintf("ALTER TABLE ONLY %s ENABLE TRIGGER %s", t.sql(), d.Trigger))
			repaired = append(repaired, name)
		}
	}
	done, err := s.ddl(ctx, conn, t.String(), stmts, r)
	if done {
		r.Created, r.Repaired = append(r.Created, created...), append(r.Repaired, repaired...)
	}
	return err
}

// ddl runs statements that lock one table, in one transaction, in short tries, and
// reports a table that it had to leave.
func (s *Store) ddl(ctx context.Context, conn *pgx.Conn, name string, stmts []string, r *tenancy.Report) (done bool, err error) {
	if len(stmts) == 0 {
		return false, nil
	}
	for try := 1; ; try++ {
		err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", ddlTry.Milliseconds())); err != nil {
				return err
			}
			for _, stmt := range stmts {
				if _, err := tx.Exec(ctx, stmt); err != nil {
					return err
				}
			}
			return nil
		})
		var pg *pgconn.PgError
		switch {
		case err == nil:
			return true, nil
		case !errors.As(err, &pg):
			return false, err
		case pg.Code == codeLockTimeout && try < ddlTries:
			select {
			case <-ctx.Done():
				return false, context.Cause(ctx)
			case <-time.After(ddlGap):
			}
		case pg.Code == codeLockTimeout:
			holders, err := s.holders(ctx, conn, name)
			r.Skipped = append(r.Skipped, tenancy.Skipped{Table: name, Why: "locked", Holders: holders})
			return false, err
		case pg.Code == codeExists:
			return false, nil // an older way of starting made it meanwhile
		case pg.Code == codeNotOwner, pg.Code == codeNoTable, strings.HasPrefix(pg.Code, "42"):
			r.Skipped = append(r.Skipped, tenancy.Skipped{Table: name, Why: pg.Message})
			return false, nil
		default:
			return false, err
		}
	}
}

// holders names the sessions that have locks on a table.
func (s *Store) holders(ctx context.Context, conn *pgx.Conn, name string) ([]string, error) {
	schema, rel, _ := strings.Cut(name, ".")
	rows, err := conn.Query(ctx, `SELECT DISTINCT format('pid %s (%s, %s) has %s', l.pid, coalesce(a.usename, '?'), coalesce(nullif(a.application_name, ''), 'no name'), l.mode)
		FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
		WHERE l.granted AND l.locktype = 'relation' AND l.pid <> pg_backend_pid() AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND l.relation = (SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2) ORDER BY 1`, schema, rel)
	if err != nil {
		return nil, err
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return slices.Clip(out), err
}
