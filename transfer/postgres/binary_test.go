// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/transfer"
)

// loaded is a store without a guard over one table t, and that table.
func loaded(t *testing.T, create ...string) (*Store, *table) {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), pgtest.DB(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	for _, q := range create {
		if _, err := pool.Exec(t.Context(), q); err != nil {
			t.Fatalf("%v, in: %s", err, q)
		}
	}
	s := &Store{pool: pool, tables: []guard.Table{{Name: "t", TenantColumn: "tenant"}}}
	cat, err := s.load(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	tb, err := cat.table("t")
	if err != nil {
		t.Fatal(err)
	}
	return s, tb
}

// TestBinaryRows: rows that are cut from COPY's binary output in pieces of any size are, put
// together again, the rows; and a copy can go on behind each batch.
func TestBinaryRows(t *testing.T) {
	s, tb := loaded(t,
		"CREATE TABLE t (tenant text, a int2, b int8, c uuid, n numeric, v text, at timestamptz, doc jsonb, PRIMARY KEY (tenant, a, b, c))",
		"CREATE TABLE u (LIKE t)",
		`INSERT INTO t SELECT 'x', (i % 7) - 3, -i, md5(i::text)::uuid, i / 7.0, CASE WHEN i % 3 = 0 THEN NULL ELSE repeat('y', i % 500) END, now(), '{"k": [1, null]}' FROM generate_series(1, 6000) AS i`)
	if !tb.binary() {
		t.Fatal("the table's types have a binary form")
	}
	ctx := t.Context()
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	var out bytes.Buffer
	q := fmt.Sprintf("COPY (SELECT %s FROM t ORDER BY a, b, c) TO STDOUT (FORMAT binary)", idents(tb.names()))
	if _, err := conn.Conn().PgConn().CopyTo(ctx, &out, q); err != nil {
		t.Fatal(err)
	}
	var got []transfer.Batch
	l := newTuples(tb, func(b transfer.Batch) error { got = append(got, b); return nil })
	for in := out.Bytes(); len(in) > 0; {
		n := min(len(in), 1+len(in)%61)
		if _, err := l.Write(in[:n]); err != nil {
			t.Fatal(err)
		}
		in = in[n:]
	}
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	seen := int64(0)
	for i, b := range got {
		if b.End != (i == len(got)-1) || b.Form != transfer.FormBinary {
			t.Errorf("batch %d of %d: End %t, form %q", i, len(got), b.End, b.Form)
		}
		if _, err := conn.Conn().PgConn().CopyFrom(ctx, copyReader(b.Form, b.Data), fmt.Sprintf("COPY u (%s) FROM STDIN%s", idents(tb.names()), copyOptions(b.Form))); err != nil {
			t.Fatal(err)
		}
		seen += b.Count
		key, rest, err := readTexts(b.LastKey, len(tb.keys))
		if err != nil || len(rest) > 0 {
			t.Fatalf("last key %x: %v", b.LastKey, err)
		}
		var upto int64
		if err := conn.QueryRow(ctx, "SELECT count(*) FROM t WHERE (a, b, c) <= ($1::text::int2, $2::text::int8, $3::text::uuid)", anys(key)...).Scan(&upto); err != nil || upto != seen {
			t.Errorf("%d rows up to the last key of batch %d, %v, want %d", upto, i, err, seen)
		}
	}
	var differ int
	if err := conn.QueryRow(ctx, "SELECT count(*) FROM ((TABLE t EXCEPT TABLE u) UNION ALL (TABLE u EXCEPT TABLE t)) AS d").Scan(&differ); err != nil || differ != 0 || len(got) < 2 || seen != 6000 {
		t.Errorf("%d rows in %d batches, %d differ, %v", seen, len(got), differ, err)
	}

	// What is cut off, or of other columns, is no table.
	whole := out.Bytes()
	for _, in := range [][]byte{whole[:len(whole)-2], whole[:len(whole)-9], whole[:10], append([]byte("x"), whole...), append(bytes.Clone(whole[:19]), 0, 1, 0, 0, 0, 0)} {
		l := newTuples(tb, func(transfer.Batch) error { return nil })
		_, err := l.Write(in)
		if err = errors.Join(err, l.end()); !errors.Is(err, errShort) {
			t.Errorf("%d of %d bytes: %v", len(in), len(whole), err)
		}
	}
}

// TestTextRows: a type of an extension, of a user, or one that is an OID of the catalog has
// its rows travel as text, and a form that is not known is refused.
func TestTextRows(t *testing.T) {
	_, tb := loaded(t, "CREATE TYPE mood AS ENUM ('so', 'so so')", "CREATE TABLE t (tenant text, k text, PRIMARY KEY (tenant, k))")
	if err := errors.Join(tb.knownForm(""), tb.knownForm(transfer.FormBinary)); err != nil {
		t.Error(err)
	}
	if err := tb.knownForm("columns"); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("an unknown form: %v", err)
	}
	for _, typ := range []string{"mood", "mood[]", "int4[]", "regclass", "oid", "date[]", "point", "int4range"} {
		_, tb := loaded(t, "CREATE TYPE mood AS ENUM ('so', 'so so')", "CREATE TABLE t (tenant text, k text, v "+typ+", PRIMARY KEY (tenant, k))")
		if tb.binary() || tb.knownForm(transfer.FormBinary) == nil {
			t.Errorf("a column of type %s travels in binary", typ)
		}
	}
	if _, tb := loaded(t, "CREATE TABLE t (tenant text, k timestamptz, PRIMARY KEY (tenant, k))"); tb.binary() {
		t.Error("a key of times travels in binary")
	}
	text, err := io.ReadAll(copyReader("", []byte("a\tb\n")))
	if err != nil || string(text) != "a\tb\n" || strings.Contains(copyOptions(""), "binary") {
		t.Errorf("%q, %v", text, err)
	}
}

// TestDigestsTellRowsApart: in both kinds.
func TestDigestsTellRowsApart(t *testing.T) {
	s, tb := loaded(t, "CREATE TABLE t (tenant text, k int, v text, w text, n numeric, PRIMARY KEY (tenant, k))")
	ctx := t.Context()
	cat := &catalog{byName: map[string]*table{"t": tb}, tables: []*table{tb}}
	rows := map[string]string{
		"plain":         "('x', 1, 'a', 'b', 1), ('x', 2, 'c', 'd', 2)",
		"other order":   "('x', 2, 'c', 'd', 2), ('x', 1, 'a', 'b', 1), ('y', 1, 'a', 'b', 1)",
		"between rows":  "('x', 1, 'c', 'b', 1), ('x', 2, 'a', 'd', 2)",
		"both of them":  "('x', 1, 'c', 'd', 1), ('x', 2, 'a', 'b', 2)",
		"between cols":  "('x', 1, 'b', 'a', 1), ('x', 2, 'c', 'd', 2)",
		"empty":         "('x', 1, '', 'b', 1), ('x', 2, 'c', 'd', 2)",
		"null":          "('x', 1, NULL, 'b', 1), ('x', 2, 'c', 'd', 2)",
		"scale":         "('x', 1, 'a', 'b', 1.0), ('x', 2, 'c', 'd', 2)",
		"case":          "('x', 1, 'A', 'b', 1), ('x', 2, 'c', 'd', 2)",
		"one less":      "('x', 1, 'a', 'b', 1)",
		"keys exchange": "('x', 2, 'a', 'b', 1), ('x', 1, 'c', 'd', 2)",
	}
	keys := transfer.KeySet{Table: "t", Count: 2, Data: append(encodeKey([]string{"1"}), encodeKey([]string{"2"})...)}
	for _, c := range []struct {
		kind string
		set  transfer.KeySet
	}{{sumKind, transfer.KeySet{Table: "t", All: true}}, {"", transfer.KeySet{Table: "t", All: true}}, {sumKind, keys}, {"", keys}} {
		ctx := ctx
		if c.kind == "" {
			ctx = transfer.ContextWithPlainDigests(ctx)
		}
		seen := map[transfer.Digest]string{}
		for name, values := range rows {
			for _, q := range []string{"TRUNCATE t", "INSERT INTO t VALUES " + values} {
				if _, err := s.pool.Exec(ctx, q); err != nil {
					t.Fatal(err)
				}
			}
			ds, err := digests(ctx, s.pool, cat, "x", []transfer.KeySet{c.set})
			if err != nil {
				t.Fatal(err)
			}
			if c.kind != "" != strings.HasPrefix(ds[0].Sum, sumKind) {
				t.Errorf("kind %q: %s", c.kind, ds[0].Sum)
			}
			if name == "other order" {
				name = "plain"
			}
			if was, ok := seen[ds[0]]; ok && was != name {
				t.Errorf("%q and %q have one digest %v", was, name, ds[0])
			}
			seen[ds[0]] = name
		}
		if len(seen) != len(rows)-1 {
			t.Errorf("kind %q: %d digests of %d contents", c.kind, len(seen), len(rows)-1)
		}
	}
}
