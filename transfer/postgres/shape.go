// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// shapeSQL hashes what a running move depends on, for each listed table. A file node
// changes when a table is truncated or rewritten: both take rows of all tenants away
// from the eyes of who reads an older snapshot, and TRUNCATE asks no fence. Columns
// are counted (relnatts), so that one which came and went is noticed. Indexes are left
// out: they may be made during a move. The guard's triggers are its own business.
// Tables that are not listed and have a tenant column, or refer to a listed table, have
// a row each: one that comes during a move may have the tenant's rows. Those are counted,
// not asked for with EXISTS, so that they are looked up by index for the few tables of the
// service: EXISTS reads the columns of the whole catalog.
const shapeSQL = `WITH w AS (SELECT at::int, to_regclass(name)::oid AS oid FROM unnest($1::text[]) WITH ORDINALITY AS u(name, at))
	SELECT at, '', md5(string_agg(line, E'\n' ORDER BY line COLLATE "C")) FROM (
	SELECT w.at, concat_ws(' ', 'table', t.relid::oid, coalesce(pg_relation_filenode(t.relid), 0), c.relkind, c.relpersistence, c.relreplident, c.relnatts) AS line
		FROM w, pg_partition_tree(w.oid) t JOIN pg_class c ON c.oid = t.relid
	UNION ALL SELECT w.at, concat_ws(' ', 'table', c.oid, coalesce(pg_relation_filenode(c.oid), 0), c.relkind, c.relpersistence, c.relreplident, c.relnatts)
		FROM w JOIN pg_class c USING (oid)
	UNION ALL SELECT w.at, concat_ws(' ', 'column', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attcollation, a.attnotnull, a.attgenerated, a.attidentity)
		FROM w JOIN pg_attribute a ON a.attrelid = w.oid WHERE a.attnum > 0 AND NOT a.attisdropped
	UNION ALL SELECT w.at, concat_ws(' ', 'constraint', c.oid, c.contype, c.conkey::text, c.confrelid, c.confkey::text, md5(c.conbin::text))
		FROM w JOIN pg_constraint c ON c.conrelid = w.oid
	UNION ALL SELECT w.at, concat_ws(' ', 'trigger', g.oid, g.tgenabled)
		FROM w JOIN pg_trigger g ON g.tgrelid = w.oid WHERE NOT g.tgisinternal AND g.tgname NOT LIKE 'zz\_cell\_guard\_%'
	) AS l GROUP BY at
	UNION ALL SELECT 0, format('%I.%I', n.nspname, c.relname), c.oid::text
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't' AND n.nspname NOT IN ('pg_catalog', 'information_schema', $4) AND n.nspname NOT LIKE 'pg\_%'
		AND NOT EXISTS (SELECT FROM w WHERE w.oid = c.oid) AND NOT EXISTS (SELECT FROM unnest($3::text[]) AS l(name) WHERE to_regclass(l.name) = c.oid)
		AND ((SELECT count(*) FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = ANY ($2::text[]::name[]) AND NOT a.attisdropped) > 0
			OR (SELECT count(*) FROM pg_constraint k JOIN w ON w.oid = k.confrelid WHERE k.conrelid = c.oid AND k.contype = 'f') > 0)`

// shapeArgs are what shapeSQL takes.
func (s *Store) shapeArgs() []any {
	columns := make([]string, len(s.tables))
	for i, t := range s.tables {
		columns[i] = t.TenantColumn
	}
	return []any{s.shapeNames(), columns, append([]string{}, s.cfg.Stay...), s.cfg.Schema}
}

func (s *Store) shapeNames() []string {
	out := make([]string, len(s.tables))
	for i, t := range s.tables {
		out[i] = t.Name
	}
	return out
}

// readShape collects the rows of shapeSQL. A table that is missing has no row.
func (s *Store) readShape(rows pgx.Rows) (transfer.Shape, error) {
	out := transfer.Shape{}
	for rows.Next() {
		var at int
		var other, sum string
		if err := rows.Scan(&at, &other, &sum); err != nil {
			return nil, err
		}
		if at > 0 {
			other = s.tables[at-1].Name
		}
		out[other] = sum
	}
	return out, rows.Err()
}

// shape is that of the tables now, or, in a transaction with a snapshot, then.
func (s *Store) shape(ctx context.Context, q querier) (transfer.Shape, error) {
	b := &pgx.Batch{}
	var out transfer.Shape
	s.queueShape(b, &out)
	return out, translate(q.SendBatch(ctx, b).Close())
}

// queueShape has the batch read the shape of the tables.
func (s *Store) queueShape(b *pgx.Batch, out *transfer.Shape) {
	b.Queue(fixedPlans)
	b.Queue(shapeSQL, s.shapeArgs()...).Query(func(rows pgx.Rows) (err error) {
		*out, err = s.readShape(rows)
		return err
	})
	b.Queue(freshPlans)
}

// thenSQL reads the shape that a capture was begun with, and why the capture was
// ended. The shape is "" for none, and for that of an older build, which has nothing to
// compare with.
const thenSQL = "SELECT coalesce(max(shape), ''), coalesce(max(ended), '') FROM @s.transfer_capture WHERE move = $1"

// recorded is what thenSQL reads.
type recorded struct{ shape, ended string }

func (r *recorded) scan(row pgx.Row) error { return row.Scan(&r.shape, &r.ended) }

// same fails if the capture was ended, or the shape is not that of its beginning.
func (r recorded) same(now transfer.Shape, cell cells.CellID) error {
	if r.ended != "" {
		return fmt.Errorf("%w: %s", transfer.ErrRetention, r.ended)
	}
	return sameShape(r.shape, now, cell)
}

// unchanged fails unless the capture goes on and the tables are what they were when it was
// begun.
func (s *Store) unchanged(ctx context.Context, q querier, m cells.MoveRef) error {
	b := &pgx.Batch{}
	var now transfer.Shape
	var then recorded
	s.queueShape(b, &now)
	b.Queue(s.q(thenSQL), string(m.ID)).QueryRow(then.scan)
	if err := q.SendBatch(ctx, b).Close(); err != nil {
		return translate(err)
	}
	return then.same(now, m.Source)
}

func sameShape(text string, now transfer.Shape, cell cells.CellID) error {
	if text == "" {
		return nil
	}
	var then transfer.Shape
	if err := json.Unmarshal([]byte(text), &then); err != nil {
		return fmt.Errorf("transfer/postgres: recorded shape: %w", err)
	}
	return then.Same(now, cell)
}

// held fails unless the target's tables are what they were when the import was
// begun. With hold they stay so until the transaction ends.
func (i *imp) held(ctx context.Context, q querier, hold bool) error {
	b := &pgx.Batch{}
	if hold {
		b.Queue("LOCK TABLE " + strings.Join(i.cat.relations(), ", ") + " IN ACCESS SHARE MODE")
	}
	var now transfer.Shape
	i.s.queueShape(b, &now)
	if err := q.SendBatch(ctx, b).Close(); err != nil {
		return translate(err)
	}
	return i.state.Shape.Same(now, i.m.Target)
}

// explain says that the schema has changed if that is why an import failed.
func (i *imp) explain(ctx context.Context, err error) error {
	if code := sqlState(err); err == nil || code == "" || !strings.HasPrefix(code, "42") && !strings.HasPrefix(code, "22") && !strings.HasPrefix(code, "23") && code != "0A000" {
		return err
	}
	now, serr := i.s.shape(context.WithoutCancel(ctx), i.s.pool)
	if serr != nil {
		return err
	}
	if serr = i.state.Shape.Same(now, i.m.Target); serr != nil {
		return fmt.Errorf("%w: %w", serr, err)
	}
	return err
}

func (c *catalog) relations() []string {
	out := make([]string, len(c.tables))
	for i, t := range c.tables {
		out[i] = t.sql()
	}
	return out
}
