// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// foreignKey is one that begins or ends at a listed table.
type foreignKey struct {
	Name             string
	From, To         uint32
	FromName, ToName string // quoted
	Cols, Refs       []string
}

const aroundSQL = `SELECT c.conname::text, c.conrelid, c.confrelid, c.conrelid::regclass::text, c.confrelid::regclass::text,
	(SELECT array_agg(a.attname::text ORDER BY k.at) FROM unnest(c.conkey) WITH ORDINALITY AS k(num, at) JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.num),
	(SELECT array_agg(a.attname::text ORDER BY k.at) FROM unnest(c.confkey) WITH ORDINALITY AS k(num, at) JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.num)
	FROM pg_constraint c WHERE c.contype = 'f' AND c.conparentid = 0 AND (c.conrelid = ANY ($1) OR c.confrelid = ANY ($1)) ORDER BY 4, 1`

// on joins the two tables of the key, under the names c and p.
func (k foreignKey) on() string {
	return list(k.Cols, " AND ", func(i int, c string) string { return "c." + ident(c) + " = p." + ident(k.Refs[i]) })
}

// references judges the foreign keys from and to the listed tables.
func (s *Store) references(ctx context.Context, tx pgx.Tx, cat *catalog, tenant cells.TenantID, find finder) error {
	byOID := map[uint32]*table{}
	oids := make([]uint32, 0, len(cat.tables))
	for _, t := range cat.tables {
		byOID[t.oid] = t
		oids = append(oids, t.oid)
	}
	rows, err := tx.Query(ctx, aroundSQL, oids)
	if err != nil {
		return err
	}
	keys, err := pgx.CollectRows(rows, pgx.RowToStructByPos[foreignKey])
	if err != nil {
		return err
	}
	for _, k := range keys {
		from, to := byOID[k.From], byOID[k.To]
		switch {
		case from == nil:
			err = s.child(ctx, tx, k, to, tenant, find)
		case to == nil:
			find(warning, transfer.FindForeignTenant, from.Name, "foreign key "+k.Name+" leads out of the tenant's own rows, to "+k.ToName+", which is not listed: the row it refers to may be missing at the target",
				"keep the same rows of "+k.ToName+" in every cell, or list it with a tenant column")
		case !slices.ContainsFunc(k.Cols, func(c string) bool {
			return c == from.TenantColumn && k.Refs[slices.Index(k.Cols, c)] == to.TenantColumn
		}):
			err = s.crossing(ctx, tx, k, from, to, tenant, find)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// crossing judges a foreign key between listed tables that does not carry the tenant.
func (s *Store) crossing(ctx context.Context, tx pgx.Tx, k foreignKey, from, to *table, tenant cells.TenantID, find finder) error {
	crosses, known, err := false, true, error(nil)
	if from.fit() && to.fit() {
		crosses, known, err = probe(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s AS c JOIN %s AS p ON %s WHERE c.%s AND p.%s IS DISTINCT FROM c.%s)",
			from.sql(), to.sql(), k.on(), from.where(tenant), ident(to.TenantColumn), ident(from.TenantColumn)))
	}
	if err != nil {
		return err
	}
	fix := "put " + from.TenantColumn + " into the foreign key"
	switch {
	case crosses:
		find(blocking, transfer.FindCrossing, from.Name, "rows of the tenant refer by "+k.Name+" to rows of other tenants in "+k.ToName+", which stay behind", "give the tenant rows of its own to refer to; then "+fix)
	case !known:
		find(blocking, transfer.FindCrossing, from.Name, fmt.Sprintf("whether rows of the tenant refer by %s to rows of other tenants could not be told within %v", k.Name, probePatience), fix)
	default:
		find(warning, transfer.FindForeignTenant, from.Name, "foreign key "+k.Name+" to "+k.ToName+" does not carry "+from.TenantColumn+": a row may refer to another tenant's, which would be missing at the target", fix)
	}
	return nil
}

// child judges a table that is not listed and refers to one that is: its rows belong
// to the tenant of the row that they refer to, and would stay behind, stand in the way
// of the removal, or go with it.
func (s *Store) child(ctx context.Context, tx pgx.Tx, k foreignKey, to *table, tenant cells.TenantID, find finder) error {
	holds, known, err := false, true, error(nil)
	if to.fit() {
		holds, known, err = probe(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s AS c JOIN %s AS p ON %s WHERE p.%s)", k.FromName, to.sql(), k.on(), to.where(tenant)))
	}
	if err != nil {
		return err
	}
	fix := "give it the column " + to.TenantColumn + " and a primary key that begins with it, and list it"
	switch {
	case holds:
		find(blocking, transfer.FindChild, k.FromName, "the table is not listed and has rows that refer by "+k.Name+" to the tenant's rows in "+to.Name+": they would be lost or stand in the way of the removal", fix)
	case !known:
		find(blocking, transfer.FindChild, k.FromName, fmt.Sprintf("whether the table has rows of the tenant, by %s to %s, could not be told within %v", k.Name, to.Name, probePatience), fix)
	default:
		find(warning, transfer.FindChild, k.FromName, "the table is not listed and refers by "+k.Name+" to "+to.Name+": rows that come would stay behind", fix)
	}
	return nil
}

// fit reports whether the tenant's rows can be asked for.
func (t *table) fit() bool {
	return !t.unfit && slices.ContainsFunc(t.cols, func(c column) bool { return c.name == t.TenantColumn })
}

// unlisted judges tables that look like a tenant's and are not listed.
func (s *Store) unlisted(ctx context.Context, tx pgx.Tx, cat *catalog, tenant cells.TenantID, find finder) error {
	var oids []uint32
	var columns []string
	for _, t := range cat.tables {
		oids = append(oids, t.oid)
	}
	for _, t := range s.cfg.Tables {
		columns = append(columns, t.TenantColumn)
	}
	rows, err := tx.Query(ctx, `SELECT c.oid::regclass::text, min(a.attname::text), bool_or(t.typcategory = 'S'), min(format_type(t.oid, NULL)),
		EXISTS (SELECT FROM unnest($4::text[]) AS l(name) WHERE to_regclass(l.name) = c.oid)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid JOIN pg_type t ON t.oid = a.atttypid
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't' AND n.nspname NOT IN ('pg_catalog', 'information_schema', $3) AND n.nspname NOT LIKE 'pg\_%'
		AND c.oid <> ALL ($1) AND a.attname = ANY ($2::text[]::name[]) AND NOT a.attisdropped GROUP BY c.oid ORDER BY 1`, oids, columns, s.cfg.Schema, s.cfg.Stay)
	if err != nil {
		return err
	}
	type other struct {
		Name, Column string
		Text         bool
		Type         string
		Stays        bool
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[other])
	if err != nil {
		return err
	}
	for _, o := range all {
		if o.Stays {
			continue
		}
		if !o.Text {
			find(warning, transfer.FindTenantType, o.Name, "the table is not listed and has a column "+o.Column+" of type "+o.Type+": whether its rows are a tenant's cannot be told",
				"list the table with a column of text, or rename the column, or say that its rows stay")
			continue
		}
		holds, known, err := probe(ctx, tx, fmt.Sprintf("SELECT EXISTS (SELECT FROM %s WHERE %s = $1)", o.Name, ident(o.Column)), string(tenant))
		if err != nil {
			return err
		}
		fix := "list it; or, if its rows are meant to stay behind, say so in the agent's configuration"
		switch {
		case holds:
			find(blocking, transfer.FindUnlisted, o.Name, "the table is not listed and holds rows of the tenant, by its column "+o.Column+": they would stay behind", fix)
		case !known:
			find(blocking, transfer.FindUnlisted, o.Name, fmt.Sprintf("whether the table holds rows of the tenant, by its column %s, could not be told within %v", o.Column, probePatience), fix)
		default:
			find(warning, transfer.FindUnlisted, o.Name, "the table has a column "+o.Column+" and is not listed: rows of the tenant would stay behind", fix)
		}
	}
	return nil
}
