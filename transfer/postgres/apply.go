// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
)

// applier applies changes in one transaction. Many at once first: what each key is
// at the end. If a unique or foreign key does not like that order, one after the
// other, as they happened: then the rows are at every moment those that the source had.
type applier struct {
	tx   pgx.Tx
	i    *imp
	note bool // remember the keys that change
}

// errOneByOne says that changes cannot be gathered.
var errOneByOne = errors.New("transfer/postgres: changes cannot be gathered")

func (a *applier) apply(ctx context.Context, ops []op) error {
	if len(ops) == 0 {
		return nil
	}
	err := savepoint(ctx, a.tx, func() error { return a.gathered(ctx, ops) })
	if code := sqlState(err); errors.Is(err, errOneByOne) || code == stateUnique || code == stateForeign {
		for _, o := range ops {
			if err := a.one(ctx, o); sqlState(err) == stateUnique {
				return fmt.Errorf("%w: transfer/postgres: a row of tenant %s in table %s has a value that must be unique and that another row has here: %w; if it is another tenant's, let the unique index carry %s",
					cells.ErrInvalid, a.i.m.Tenant, o.t.Name, err, o.t.TenantColumn)
			} else if err != nil {
				return err
			}
		}
	} else if err != nil {
		return err
	}
	if !a.note {
		return nil
	}
	return a.noteOps(ctx, ops)
}

// last is what a key is after a number of changes. Neither row nor patch: gone.
type last struct {
	key   []string
	row   []value // whole
	patch []value // some values unchanged
	// fresh: an older row with the key must go first, since it has a column that
	// cannot be updated (GENERATED ALWAYS AS IDENTITY).
	fresh bool
}

// gather reduces the changes to the last state of each key, by table.
func gather(ops []op) (map[*table][]*last, error) {
	out := map[*table][]*last{}
	at := map[*table]map[string]*last{}
	get := func(t *table, key []string) *last {
		if at[t] == nil {
			at[t] = map[string]*last{}
		}
		k := string(encodeKey(key))
		l := at[t][k]
		if l == nil {
			l = &last{key: key}
			at[t][k] = l
			out[t] = append(out[t], l)
		}
		return l
	}
	known := func(t *table, key []string) *last { return at[t][string(encodeKey(key))] }
	for _, o := range ops {
		switch o.kind {
		case opDelete:
			*get(o.t, o.key) = last{key: o.key}
		case opInsert, opUpdate:
			was := known(o.t, o.key)
			l := get(o.t, o.key)
			switch {
			case o.whole():
				gone := was != nil && was.row == nil && was.patch == nil
				*l = last{key: o.key, row: o.row, fresh: o.t.alwaysData && (gone || l.fresh)}
			case o.kind == opInsert, was != nil && was.row == nil && was.patch == nil:
				return nil, errOneByOne
			case was != nil && was.row != nil:
				*l = last{key: o.key, row: merge(o.row, was.row), fresh: was.fresh}
			case was != nil:
				*l = last{key: o.key, patch: merge(o.row, was.patch)}
			default:
				*l = last{key: o.key, patch: o.row}
			}
		case opRekey:
			row := o.row
			if !o.whole() {
				was := known(o.t, o.old)
				if was == nil || was.row == nil {
					return nil, errOneByOne
				}
				row = merge(o.row, was.row)
			}
			*get(o.t, o.old) = last{key: o.old}
			*get(o.t, o.key) = last{key: o.key, row: row}
		default:
			return nil, errOneByOne
		}
	}
	return out, nil
}

// merge takes what row does not carry from before.
func merge(row, before []value) []value {
	out := slices.Clone(row)
	for i, v := range out {
		if v.unchanged {
			out[i] = before[i]
		}
	}
	return out
}

func (a *applier) gathered(ctx context.Context, ops []op) error {
	all, err := gather(ops)
	if err != nil {
		return err
	}
	for _, t := range a.i.cat.tables {
		var rows [][]value
		var stale [][]string
		patches := map[string][]*last{}
		for _, l := range all[t] {
			switch {
			case l.row != nil:
				rows = append(rows, l.row)
				if l.fresh {
					stale = append(stale, l.key)
				}
			case l.patch != nil:
				m := mask(l.patch)
				patches[m] = append(patches[m], l)
			}
		}
		if err := a.remove(ctx, t, stale); err != nil {
			return err
		}
		if err := a.put(ctx, t, rows); err != nil {
			return err
		}
		for m, ls := range patches {
			if err := a.patch(ctx, t, m, ls); err != nil {
				return err
			}
		}
	}
	for _, t := range slices.Backward(a.i.cat.tables) {
		var keys [][]string
		for _, l := range all[t] {
			if l.row == nil && l.patch == nil {
				keys = append(keys, l.key)
			}
		}
		if err := a.remove(ctx, t, keys); err != nil {
			return err
		}
	}
	return nil
}

// mask says which columns a patch carries.
func mask(row []value) string {
	var b strings.Builder
	for _, v := range row {
		if v.unchanged {
			b.WriteByte('u')
		} else {
			b.WriteByte('v')
		}
	}
	return b.String()
}

// columns turns rows into one array of texts for each of cols.
func columns(rows [][]value, cols []int) []any {
	out := make([]any, len(cols))
	for i, c := range cols {
		col := make([]*string, len(rows))
		for j, r := range rows {
			col[j] = r[c].text
		}
		out[i] = col
	}
	return out
}

func (t *table) allCols() []int {
	out := make([]int, len(t.cols))
	for i := range out {
		out[i] = i
	}
	return out
}

// put inserts rows, over those with the same key.
func (a *applier) put(ctx context.Context, t *table, rows [][]value) error {
	if len(rows) == 0 {
		return nil
	}
	cols := t.allCols()
	q := fmt.Sprintf("%s SELECT %s FROM %s%s", t.insertHead(), idents(t.names()), t.unnest(cols, 1), t.upsertTail())
	_, err := a.tx.Exec(ctx, q, columns(rows, cols)...)
	return err
}

// patch sets the values that the mask names, and notes rows that are not there.
func (a *applier) patch(ctx context.Context, t *table, mask string, ls []*last) error {
	cols := slices.Clone(t.keyAt)
	var sets []string
	for i, c := range t.cols {
		if mask[i] == 'v' && !slices.Contains(t.key, c.name) && !c.always {
			cols = append(cols, i)
			sets = append(sets, ident(c.name)+" = u."+ident(c.name))
		}
	}
	if len(sets) == 0 {
		return nil
	}
	rows := make([][]value, len(ls))
	for i, l := range ls {
		rows[i] = l.patch
	}
	q := fmt.Sprintf("UPDATE %s AS t SET %s FROM %s WHERE %s", t.sql(), strings.Join(sets, ", "), t.keyed(t.unnest(cols, 1), a.i.m.Tenant), t.onKey())
	tag, err := a.tx.Exec(ctx, q, columns(rows, cols)...)
	if err != nil || tag.RowsAffected() == int64(len(ls)) {
		return err
	}
	var gone [][]string
	for _, l := range ls {
		there, err := a.there(ctx, t, l.key)
		if err != nil {
			return err
		}
		if !there {
			gone = append(gone, l.key)
		}
	}
	return a.noteKeys(ctx, keyMissing, t, gone)
}

// byKey is the condition for one key whose values are parameters beginning at from.
func (t *table) byKey(from int) string {
	var b strings.Builder
	for i, k := range t.keys {
		fmt.Fprintf(&b, " AND t.%s = $%d::text::%s", ident(k), from+i, t.cols[t.keyAt[i]].typ)
	}
	return b.String()
}

func anys(texts []string) []any {
	out := make([]any, len(texts))
	for i, s := range texts {
		out[i] = s
	}
	return out
}

func (a *applier) there(ctx context.Context, t *table, key []string) (there bool, err error) {
	q := fmt.Sprintf("SELECT EXISTS (SELECT FROM %s AS t WHERE t.%s%s)", t.sql(), t.where(a.i.m.Tenant), t.byKey(1))
	err = a.tx.QueryRow(ctx, q, anys(key)...).Scan(&there)
	return there, err
}

func (a *applier) remove(ctx context.Context, t *table, keys [][]string) error {
	if len(keys) == 0 {
		return nil
	}
	if len(t.keys) == 0 {
		_, err := a.tx.Exec(ctx, fmt.Sprintf("DELETE FROM %s AS t WHERE t.%s", t.sql(), t.where(a.i.m.Tenant)))
		return err
	}
	q := fmt.Sprintf("DELETE FROM %s AS t USING %s WHERE %s", t.sql(), t.keyed(t.unnest(t.keyAt, 1), a.i.m.Tenant), t.onKey())
	_, err := a.tx.Exec(ctx, q, columnsOf(keys, len(t.keys))...)
	return err
}

// one applies a single change.
func (a *applier) one(ctx context.Context, o op) error {
	if o.kind == opDelete {
		return a.remove(ctx, o.t, [][]string{o.key})
	}
	old := o.key
	if o.kind == opRekey {
		old = o.old
	}
	var n int64
	if o.kind != opInsert {
		var err error
		if n, err = a.set(ctx, o, old); err != nil {
			return err
		}
	}
	switch {
	case n > 0:
		return nil
	case o.whole():
		return a.put(ctx, o.t, [][]value{o.row})
	case o.kind == opInsert:
		// A row that came from another tenant's share, with a value that did not change.
		return a.noteKeys(ctx, keyMissing, o.t, [][]string{o.key})
	}
	there, err := a.there(ctx, o.t, o.key)
	if err != nil || there {
		return err
	}
	return a.noteKeys(ctx, keyMissing, o.t, [][]string{o.key})
}

// set gives the row at key old the values of o, its key included.
func (a *applier) set(ctx context.Context, o op, old []string) (int64, error) {
	args := anys(old)
	var sets []string
	for i, c := range o.t.cols {
		if !o.row[i].unchanged && !c.always {
			args = append(args, o.row[i].text)
			sets = append(sets, fmt.Sprintf("%s = $%d::text::%s", ident(c.name), len(args), c.typ))
		}
	}
	if len(sets) == 0 {
		return 1, nil
	}
	q := fmt.Sprintf("UPDATE %s AS t SET %s WHERE t.%s%s", o.t.sql(), strings.Join(sets, ", "), o.t.where(a.i.m.Tenant), o.t.byKey(1))
	tag, err := a.tx.Exec(ctx, q, args...)
	return tag.RowsAffected(), err
}

func (a *applier) noteOps(ctx context.Context, ops []op) error {
	keys := map[*table][][]string{}
	for _, o := range ops {
		if o.kind == opRekey {
			keys[o.t] = append(keys[o.t], o.old)
		}
		keys[o.t] = append(keys[o.t], o.key)
	}
	for _, t := range a.i.cat.tables {
		if err := a.noteKeys(ctx, keyTouched, t, keys[t]); err != nil {
			return err
		}
	}
	return nil
}

func (a *applier) noteKeys(ctx context.Context, kind string, t *table, keys [][]string) error {
	if len(keys) == 0 {
		return nil
	}
	_, err := a.tx.Exec(ctx, a.i.s.q(`INSERT INTO @s.transfer_key (move, kind, tbl, key) SELECT $1, $2::text::"char", $3, k FROM unnest($4::bytea[]) AS k ON CONFLICT DO NOTHING`),
		string(a.i.m.ID), kind, t.Name, encodeKeys(keys))
	return err
}
