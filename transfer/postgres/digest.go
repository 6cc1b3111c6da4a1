// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// A digest of rows is their number and two sums over a hash of each, so that their order
// does not matter. The hash is of every column's text, byte by byte, which is exact:
// floats in their shortest form that reads back, numerics with their scale, NULL apart
// from ”. It is the one that hash partitions are made with, the same in all versions of
// the server; twice, with two seeds, and mixed once more (to 32 bits each), since a record's hash alone is
// linear in those of its columns: a sum of such would not tell values that have changed
// places between two rows. docs/decisions/0029-how-rows-travel.md has the figures.
const (
	sums    = `count(*), coalesce(sum(hashint8extended(h0, 2)), 0)::text, coalesce(sum(hashint8extended(h1, 3)), 0)::text`
	sumKind = "h2:"
)

// plainSums is what agents of earlier builds compute: two halves of an MD5.
const plainSums = `count(*), coalesce(sum(('x' || substr(h, 1, 16))::bit(64)::bigint), 0)::text, coalesce(sum(('x' || substr(h, 17, 16))::bit(64)::bigint), 0)::text`

// hashed are the rows of from with their hashes, and with one more column if it is given.
// OFFSET 0 has each text made once.
func (t *table) hashed(plain bool, extra, from string) string {
	if plain {
		row := list(t.names(), ", ", func(_ int, n string) string { return "t." + ident(n) })
		return fmt.Sprintf("(SELECT md5(ROW(%s)::text) AS h%s FROM %s) AS d", row, extra, from)
	}
	name := ""
	if extra != "" {
		name = ", " + setColumn
	}
	row := list(t.names(), ", ", func(_ int, n string) string { return "t." + ident(n) + `::text COLLATE "C"` })
	return fmt.Sprintf("(SELECT hash_record_extended(r, 0) AS h0, hash_record_extended(r, 1) AS h1%s FROM (SELECT ROW(%s) AS r%s FROM %s OFFSET 0) AS d) AS d", name, row, extra, from)
}

func sumsOf(plain bool) string {
	if plain {
		return plainSums
	}
	return sums
}

// digestSQL digests the rows of from.
func (t *table) digestSQL(plain bool, from string) string {
	return fmt.Sprintf("SELECT %s FROM %s", sumsOf(plain), t.hashed(plain, "", from))
}

// digestKeysSQL digests the rows of many sets of keys at once, each set with its number:
// the keys as unnest takes them from $1 on, the numbers in one more array.
func (t *table) digestKeysSQL(plain bool, tenant cells.TenantID) string {
	from := fmt.Sprintf("%s JOIN %s AS t ON %s", t.keyed(t.unnestWith(t.keyAt, 1, "int4 "+setColumn), tenant), t.sql(), t.onKey())
	return fmt.Sprintf("SELECT %s, %s FROM %s GROUP BY %s", setColumn, sumsOf(plain), t.hashed(plain, ", u."+setColumn, from), setColumn)
}

// setColumn is a name that no key's column has.
const setColumn = `"number of the set"`

// digestKeys bounds the keys of one question.
const digestKeys = 5000

func digests(ctx context.Context, q querier, cat *catalog, tenant cells.TenantID, sets []transfer.KeySet) ([]transfer.Digest, error) {
	out := make([]transfer.Digest, len(sets))
	plain := transfer.PlainDigests(ctx)
	for at := 0; at < len(sets); {
		t, err := cat.table(sets[at].Table)
		if err != nil {
			return nil, err
		}
		n, err := t.digest(ctx, q, plain, tenant, sets[at:], out[at:])
		if err != nil {
			return nil, err
		}
		at += n
	}
	return out, nil
}

// digest answers for the first of sets, and for those behind it that are keys of the same
// table; it returns for how many.
func (t *table) digest(ctx context.Context, q querier, plain bool, tenant cells.TenantID, sets []transfer.KeySet, out []transfer.Digest) (int, error) {
	kind := sumKind
	if plain {
		kind = ""
	}
	if sets[0].All || len(t.keys) == 0 {
		var a, b string
		err := q.QueryRow(ctx, t.digestSQL(plain, fmt.Sprintf("%s AS t WHERE t.%s", t.sql(), t.where(tenant)))).Scan(&out[0].Rows, &a, &b)
		out[0].Table, out[0].Sum = sets[0].Table, kind+a+"/"+b
		return 1, err
	}
	var keys [][]string
	var of []int32
	n := 0
	for n < len(sets) && !sets[n].All && sets[n].Table == sets[0].Table && (n == 0 || int64(len(keys))+sets[n].Count <= digestKeys) {
		more, err := t.readKeys(sets[n])
		if err != nil {
			return 0, err
		}
		keys = append(keys, more...)
		for range more {
			of = append(of, int32(n))
		}
		out[n] = transfer.Digest{Table: sets[n].Table, Sum: kind + "0/0"}
		n++
	}
	rows, err := q.Query(ctx, t.digestKeysSQL(plain, tenant), append(columnsOf(keys, len(t.keys)), of)...)
	if err != nil {
		return 0, err
	}
	var set int32
	var count int64
	var a, b string
	_, err = pgx.ForEachRow(rows, []any{&set, &count, &a, &b}, func() error {
		out[set].Rows, out[set].Sum = count, kind+a+"/"+b
		return nil
	})
	return n, err
}
