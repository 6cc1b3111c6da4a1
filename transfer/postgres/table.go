// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

// table is a tenant table as this database has it.
type table struct {
	guard.Table
	oid            uint32
	schema, rel    string
	identity       string // relreplident
	partitioned    bool
	cols           []column // not generated, by name
	gen            []column // generated
	key            []string // the primary key in its order, tenant column included
	keys           []string // the key without the tenant column
	keyAt          []int    // where keys are among cols
	order          int      // what is referred to comes first
	selfRef        bool     // its foreign keys are part of a circle
	triggers       []string // of the service, that would run on imported rows
	always         []string // of the service, that run whatever the role of the session is
	rules          []string // that rewrite what is written
	unlogged       bool
	unfit          bool // the tenant's id is no value of the tenant column
	inherits       bool // inherits or is inherited from, other than as a partition
	rowSecurity    bool
	owned          bool
	generatedIdent bool // a column is GENERATED ALWAYS AS IDENTITY
	alwaysData     bool // and it is no part of the key
}

type column struct {
	name, typ, base string
	oid             uint32 // of the type
	mod             int32
	collate         string // " COLLATE ..." if it is not that of the type
	loose           bool   // the collation takes texts that differ for equal
	always          bool   // GENERATED ALWAYS AS IDENTITY
	identity        bool
	hasSequence     bool
}

func ident(name string) string { return pgx.Identifier{name}.Sanitize() }

func literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

func (t *table) sql() string { return pgx.Identifier{t.schema, t.rel}.Sanitize() }

// querier is a pool, a connection or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// catalog is the store's tables as the database has them.
type catalog struct {
	tables  []*table // in the order in which they can be filled
	byName  map[string]*table
	missing []guard.Table
	// replica: imports set session_replication_role, because foreign keys form a
	// circle or the service has triggers; mayReplica: the role is allowed to.
	replica, mayReplica bool
	shape               transfer.Shape
	// then is what was recorded for the move that load was told of.
	then recorded
}

const relSQL = `SELECT w.at::int, c.oid, n.nspname::text, c.relname::text, c.relreplident::text, c.relkind = 'p', row_security_active(c.oid), pg_has_role(c.relowner, 'USAGE'),
	coalesce((SELECT array_agg(a.attname::text ORDER BY k.at) FROM pg_index i, unnest(i.indkey::int2[]) WITH ORDINALITY AS k(num, at) JOIN pg_attribute a ON a.attnum = k.num
		WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid), '{}'),
	coalesce((SELECT array_agg(g.tgname::text ORDER BY g.tgname) FROM pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A')
		AND g.tgname NOT LIKE 'zz\_cell\_guard\_%'), '{}'),
	coalesce((SELECT array_agg(g.tgname::text ORDER BY g.tgname) FROM pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgenabled IN ('A', 'R')
		AND g.tgname NOT LIKE 'zz\_cell\_guard\_%'), '{}'),
	coalesce((SELECT array_agg(r.rulename::text ORDER BY r.rulename) FROM pg_rewrite r WHERE r.ev_class = c.oid AND r.ev_type <> '1'), '{}'),
	c.relpersistence = 'u', EXISTS (SELECT FROM pg_inherits h WHERE h.inhrelid = c.oid) OR c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits h WHERE h.inhparent = c.oid)
	FROM unnest($1::text[]) WITH ORDINALITY AS w(name, at) JOIN pg_class c ON c.oid = to_regclass(w.name) JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p')`

const colSQL = `SELECT w.at::int, a.attname::text, format_type(a.atttypid, a.atttypmod), t.typname::text, a.atttypid, a.atttypmod, a.attgenerated <> '', a.attidentity = 'a', a.attidentity <> '',
	coalesce(pg_get_expr(d.adbin, d.adrelid) LIKE 'nextval(%', false),
	CASE WHEN a.attcollation <> 0 AND a.attcollation <> t.typcollation THEN ' COLLATE ' || quote_ident(l.collname) ELSE '' END, coalesce(NOT l.collisdeterministic, false)
	FROM unnest($1::text[]) WITH ORDINALITY AS w(name, at) JOIN pg_attribute a ON a.attrelid = to_regclass(w.name) JOIN pg_type t ON t.oid = a.atttypid
	LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum LEFT JOIN pg_collation l ON l.oid = a.attcollation
	WHERE a.attnum > 0 AND NOT a.attisdropped ORDER BY w.at, a.attname COLLATE "C"`

const fkSQL = `SELECT conrelid, confrelid FROM pg_constraint WHERE contype = 'f' AND conrelid IN (SELECT to_regclass(name) FROM unnest($1::text[]) AS w(name)) AND conparentid = 0`

const maySQL = "SELECT current_setting('is_superuser') = 'on' OR current_setting('server_version_num')::int >= 150000 AND has_parameter_privilege('session_replication_role', 'SET')"

// fixedPlans and freshPlans stand around queries of the catalog in a batch: these are the
// same for every tenant, and planning them each time costs more than they do. A batch that
// fails takes the setting back with its transaction.
const (
	fixedPlans = "SET plan_cache_mode = force_generic_plan"
	freshPlans = "SET plan_cache_mode = force_custom_plan"
)

// load reads the catalog, in one exchange with the server, and, with a move, what its
// capture has recorded of it.
func (s *Store) load(ctx context.Context, q querier, move ...cells.MoveID) (*catalog, error) {
	names := s.shapeNames()
	c := &catalog{byName: map[string]*table{}}
	found := make([]*table, len(s.tables))
	byOID := map[uint32]*table{}
	var refs []reference
	b := &pgx.Batch{}
	b.Queue(fixedPlans)
	b.Queue(relSQL, names).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			t := &table{}
			var at int
			if err := rows.Scan(&at, &t.oid, &t.schema, &t.rel, &t.identity, &t.partitioned, &t.rowSecurity, &t.owned, &t.key, &t.triggers, &t.always, &t.rules, &t.unlogged, &t.inherits); err != nil {
				return err
			}
			t.Table = s.tables[at-1]
			found[at-1], byOID[t.oid] = t, t
		}
		return rows.Err()
	})
	b.Queue(colSQL, names).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var at int
			var col column
			var generated bool
			if err := rows.Scan(&at, &col.name, &col.typ, &col.base, &col.oid, &col.mod, &generated, &col.always, &col.identity, &col.hasSequence, &col.collate, &col.loose); err != nil {
				return err
			}
			if t := found[at-1]; t != nil {
				t.add(col, generated)
			}
		}
		return rows.Err()
	})
	b.Queue(fkSQL, names).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var r reference
			if err := rows.Scan(&r.from, &r.to); err != nil {
				return err
			}
			refs = append(refs, r)
		}
		return rows.Err()
	})
	b.Queue(shapeSQL, s.shapeArgs()...).Query(func(rows pgx.Rows) (err error) {
		c.shape, err = s.readShape(rows)
		return err
	})
	for _, m := range move {
		b.Queue(s.q(thenSQL), string(m)).QueryRow(c.then.scan)
	}
	b.Queue(maySQL).QueryRow(func(row pgx.Row) error { return row.Scan(&c.mayReplica) })
	b.Queue(freshPlans)
	if err := q.SendBatch(ctx, b).Close(); err != nil {
		return nil, translate(err)
	}
	for i, t := range found {
		if t == nil {
			c.missing = append(c.missing, s.tables[i])
			continue
		}
		for _, k := range t.key {
			if k != t.TenantColumn {
				t.keys = append(t.keys, k)
				t.keyAt = append(t.keyAt, slices.IndexFunc(t.cols, func(c column) bool { return c.name == k }))
			}
		}
		c.tables = append(c.tables, t)
		c.byName[t.Name] = t
		c.replica = c.replica || len(t.triggers) > 0
	}
	c.sortTables(byOID, refs)
	return c, nil
}

func (t *table) add(c column, generated bool) {
	if generated {
		t.gen = append(t.gen, c)
		return
	}
	t.generatedIdent = t.generatedIdent || c.always
	t.alwaysData = t.alwaysData || c.always && !slices.Contains(t.key, c.name)
	t.cols = append(t.cols, c)
}

// reference is a foreign key.
type reference struct{ from, to uint32 }

// sortTables puts tables behind those that they refer to, and finds circles.
func (c *catalog) sortTables(byOID map[uint32]*table, refs []reference) {
	parents := map[*table]map[*table]bool{}
	for _, r := range refs {
		t := byOID[r.from]
		if p := byOID[r.to]; p != nil {
			if parents[t] == nil {
				parents[t] = map[*table]bool{}
			}
			parents[t][p] = true
		}
	}
	var out []*table
	placed := map[*table]bool{}
	for len(out) < len(c.tables) {
		n := len(out)
		for _, t := range c.tables {
			ready := !placed[t]
			for p := range parents[t] {
				ready = ready && placed[p]
			}
			if ready {
				placed[t] = true
				out = append(out, t)
			}
		}
		if n == len(out) {
			for _, t := range c.tables {
				if !placed[t] {
					t.selfRef, placed[t], c.replica = true, true, true
					out = append(out, t)
				}
			}
		}
	}
	for i, t := range out {
		t.order = i
	}
	c.tables = out
}

// usable fails unless every table has what a move needs.
func (c *catalog) usable() error {
	for _, m := range c.missing {
		return fmt.Errorf("%w: transfer/postgres: there is no table %s", cells.ErrInvalid, m.Name)
	}
	for _, t := range c.tables {
		if len(t.key) == 0 || len(t.keys) == len(t.key) {
			return fmt.Errorf("%w: transfer/postgres: table %s has no primary key that carries %s", cells.ErrInvalid, t.Name, t.TenantColumn)
		}
		if slices.Contains(t.keyAt, -1) {
			return fmt.Errorf("%w: transfer/postgres: table %s has a generated column in its primary key", cells.ErrInvalid, t.Name)
		}
	}
	if c.replica && !c.mayReplica {
		return fmt.Errorf("%w: transfer/postgres: triggers or foreign keys in a circle need the right to set session_replication_role", cells.ErrInvalid)
	}
	return nil
}

func (s *Store) usables(ctx context.Context, q querier) (*catalog, error) {
	c, err := s.load(ctx, q)
	if err == nil {
		err = c.usable()
	}
	return c, err
}

func (c *catalog) table(name string) (*table, error) {
	if t := c.byName[name]; t != nil {
		return t, nil
	}
	return nil, fmt.Errorf("%w: transfer/postgres: table %q is not listed here", cells.ErrInvalid, name)
}

// list joins what f makes of names.
func list(names []string, sep string, f func(i int, name string) string) string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i] = f(i, n)
	}
	return strings.Join(out, sep)
}

func idents(names []string) string {
	return list(names, ", ", func(_ int, n string) string { return ident(n) })
}

func (t *table) names() []string {
	out := make([]string, len(t.cols))
	for i, c := range t.cols {
		out[i] = c.name
	}
	return out
}

// where is the condition for the tenant's rows, as text.
func (t *table) where(tenant cells.TenantID) string {
	return ident(t.TenantColumn) + " = " + literal(string(tenant))
}

// unnest is a row source u of columns that come as one array of texts each,
// beginning at parameter from; each value cast to the column's type.
func (t *table) unnest(cols []int, from int) string { return t.unnestWith(cols, from, "") }

// unnestWith is unnest with one more column, if it is given: its type and its name.
func (t *table) unnestWith(cols []int, from int, extra string) string {
	args := make([]string, len(cols))
	names := make([]string, len(cols))
	casts := make([]string, len(cols))
	for i, c := range cols {
		args[i] = fmt.Sprintf("$%d::text[]", from+i)
		names[i] = fmt.Sprintf("v%d", i)
		casts[i] = fmt.Sprintf("v%d::%s AS %s", i, t.cols[c].typ, ident(t.cols[c].name))
	}
	if typ, name, ok := strings.Cut(extra, " "); ok {
		args, names, casts = append(args, fmt.Sprintf("$%d::%s[]", from+len(cols), typ)), append(names, name), append(casts, name)
	}
	return fmt.Sprintf("(SELECT %s FROM unnest(%s) AS w(%s)) AS u", strings.Join(casts, ", "), strings.Join(args, ", "), strings.Join(names, ", "))
}

// keyed is a row source u for joins with onKey: rows of source, which carry the key
// without the tenant, and the tenant. The tenant must not reach the planner as a
// constant: statistics that were taken before the tenant came say that it has one row
// here, and any index that begins with the tenant looks as good as the key's.
func (t *table) keyed(source string, tenant cells.TenantID) string {
	typ := ""
	for _, c := range t.cols {
		if c.name == t.TenantColumn {
			typ = "::" + c.typ
		}
	}
	return fmt.Sprintf("(SELECT %s%s AS %s, u.* FROM %s OFFSET 0) AS u", literal(string(tenant)), typ, ident(t.TenantColumn), source)
}

// onKey joins t and a source made by keyed.
func (t *table) onKey() string {
	on := func(_ int, k string) string { return "t." + ident(k) + " = u." + ident(k) }
	return list(append([]string{t.TenantColumn}, t.keys...), " AND ", on)
}

// upsertTail is what follows the rows of an INSERT.
func (t *table) upsertTail() string {
	var sets []string
	for _, c := range t.cols {
		if !slices.Contains(t.key, c.name) && !c.always {
			sets = append(sets, ident(c.name)+" = EXCLUDED."+ident(c.name))
		}
	}
	if len(sets) == 0 {
		return fmt.Sprintf(" ON CONFLICT (%s) DO NOTHING", idents(t.key))
	}
	return fmt.Sprintf(" ON CONFLICT (%s) DO UPDATE SET %s", idents(t.key), strings.Join(sets, ", "))
}

func (t *table) insertHead() string {
	out := fmt.Sprintf("INSERT INTO %s AS t (%s)", t.sql(), idents(t.names()))
	if t.generatedIdent {
		out += " OVERRIDING SYSTEM VALUE"
	}
	return out
}
