// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/transfer"
)

// sums adds up two halves of a hash h of each row's text, so that their order does not
// matter. Text is exact: floats in their shortest form that reads back, numerics with
// their scale, NULL apart from ”.
const sums = `count(*), coalesce(sum(('x' || substr(h, 1, 16))::bit(64)::bigint), 0)::text, coalesce(sum(('x' || substr(h, 17, 16))::bit(64)::bigint), 0)::text`

// rowHash is h for rows of t.
func (t *table) rowHash() string {
	return fmt.Sprintf("md5(ROW(%s)::text)", list(t.names(), ", ", func(_ int, n string) string { return "t." + ident(n) }))
}

// digestSQL digests the rows of from.
func (t *table) digestSQL(from string) string {
	return fmt.Sprintf("SELECT %s FROM (SELECT %s AS h FROM %s) AS d", sums, t.rowHash(), from)
}

// digestKeysSQL digests the rows of many sets of keys at once, each set with its number:
// the keys as unnest takes them from $1 on, the numbers in one more array.
func (t *table) digestKeysSQL(tenant cells.TenantID) string {
	return fmt.Sprintf("SELECT of_set, %s FROM (SELECT %s AS h, u.%s AS of_set FROM %s JOIN %s AS t ON %s) AS d GROUP BY of_set",
		sums, t.rowHash(), setColumn, t.keyed(t.unnestWith(t.keyAt, 1, "int4 "+setColumn), tenant), t.sql(), t.onKey())
}

// setColumn is a name that no key's column has.
const setColumn = `"number of the set"`

// digestKeys bounds the keys of one question.
const digestKeys = 5000

func digests(ctx context.Context, q querier, cat *catalog, tenant cells.TenantID, sets []transfer.KeySet) ([]transfer.Digest, error) {
	out := make([]transfer.Digest, len(sets))
	for at := 0; at < len(sets); {
		t, err := cat.table(sets[at].Table)
		if err != nil {
			return nil, err
		}
		n, err := t.digest(ctx, q, tenant, sets[at:], out[at:])
		if err != nil {
			return nil, err
		}
		at += n
	}
	return out, nil
}

// digest answers for the first of sets, and for those behind it that are keys of the same
// table; it returns for how many.
func (t *table) digest(ctx context.Context, q querier, tenant cells.TenantID, sets []transfer.KeySet, out []transfer.Digest) (int, error) {
	if sets[0].All || len(t.keys) == 0 {
		var a, b string
		err := q.QueryRow(ctx, t.digestSQL(fmt.Sprintf("%s AS t WHERE t.%s", t.sql(), t.where(tenant)))).Scan(&out[0].Rows, &a, &b)
		out[0].Table, out[0].Sum = sets[0].Table, a+"/"+b
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
		out[n] = transfer.Digest{Table: sets[n].Table, Sum: "0/0"}
		n++
	}
	rows, err := q.Query(ctx, t.digestKeysSQL(tenant), append(columnsOf(keys, len(t.keys)), of)...)
	if err != nil {
		return 0, err
	}
	var set int32
	var count int64
	var a, b string
	_, err = pgx.ForEachRow(rows, []any{&set, &count, &a, &b}, func() error {
		out[set].Rows, out[set].Sum = count, a+"/"+b
		return nil
	})
	return n, err
}
