// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/guard"
	"github.com/cloister-dev/cloister/transfer"
)

func testCatalog() *catalog {
	c := &catalog{byName: map[string]*table{}}
	for i, name := range []string{"a", "b"} {
		t := &table{Table: guard.Table{Name: name, TenantColumn: "tenant"}, order: i, key: []string{"tenant", "id"}, keys: []string{"id"}, keyAt: []int{1},
			cols: []column{{name: "big"}, {name: "id"}, {name: "n"}, {name: "tenant"}}}
		c.tables = append(c.tables, t)
		c.byName[name] = t
	}
	return c
}

// model is tables as maps from key to row.
type model map[string]map[string][]value

func newModel() model { return model{"a": {}, "b": {}} }

func (m model) clone() model {
	return model{"a": maps.Clone(m["a"]), "b": maps.Clone(m["b"])}
}

func (m model) String() string {
	var b strings.Builder
	for _, t := range []string{"a", "b"} {
		for _, k := range slices.Sorted(maps.Keys(m[t])) {
			fmt.Fprintf(&b, "%s/%s:", t, k)
			for _, v := range m[t][k] {
				if v.text == nil {
					b.WriteString(" -")
				} else {
					b.WriteString(" " + *v.text)
				}
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

// naive applies one change as the source did.
func (m model) naive(o op) {
	rows := m[o.t.Name]
	switch o.kind {
	case opDelete:
		delete(rows, o.key[0])
	case opInsert:
		rows[o.key[0]] = o.row
	case opUpdate:
		rows[o.key[0]] = merge(o.row, rows[o.key[0]])
	case opRekey:
		row := merge(o.row, rows[o.old[0]])
		delete(rows, o.old[0])
		rows[o.key[0]] = row
	}
}

// TestGatherEqualsOneByOne draws histories that a source may have and compares what
// is gathered from them with applying each change.
func TestGatherEqualsOneByOne(t *testing.T) {
	gathered := 0
	rapid.Check(t, func(rt *rapid.T) {
		cat := testCatalog()
		m := newModel()
		text := func(s string) value { return value{text: &s} }
		ids := []string{"1", "2", "3", "4"}
		serial := 0
		row := func(id string, whole bool) []value {
			serial++
			r := []value{text(fmt.Sprint("big", serial)), text(id), text(fmt.Sprint(serial)), text("t")}
			if !whole {
				r[0] = value{unchanged: true}
			}
			if serial%4 == 0 {
				r[2] = value{}
			}
			return r
		}
		for _, tb := range cat.tables {
			for _, id := range ids[:2] {
				m[tb.Name][id] = row(id, true)
			}
		}
		before := m.clone()
		var ops []op
		for range rapid.IntRange(1, 25).Draw(rt, "changes") {
			tb := rapid.SampledFrom(cat.tables).Draw(rt, "table")
			id := rapid.SampledFrom(ids).Draw(rt, "id")
			whole := rapid.Bool().Draw(rt, "whole")
			_, there := m[tb.Name][id]
			o := op{t: tb, key: []string{id}}
			switch {
			case !there:
				o.kind, o.row = opInsert, row(id, true)
			case rapid.IntRange(0, 3).Draw(rt, "delete") == 0:
				o.kind = opDelete
			default:
				o.kind, o.row = opUpdate, row(id, whole)
				to := rapid.SampledFrom(ids).Draw(rt, "to")
				if _, taken := m[tb.Name][to]; !taken {
					o.kind, o.old, o.key, o.row = opRekey, []string{id}, []string{to}, row(to, whole)
				}
			}
			m.naive(o)
			ops = append(ops, o)
		}
		all, err := gather(ops)
		if errors.Is(err, errOneByOne) {
			return
		}
		if err != nil {
			rt.Fatal(err)
		}
		gathered++
		got := before.clone()
		for tb, ls := range all {
			for _, l := range ls {
				switch {
				case l.row != nil:
					got[tb.Name][l.key[0]] = l.row
				case l.patch != nil:
					old, there := got[tb.Name][l.key[0]]
					if !there {
						rt.Fatalf("a patch of %s/%s, which is not there", tb.Name, l.key[0])
					}
					got[tb.Name][l.key[0]] = merge(l.patch, old)
				default:
					delete(got[tb.Name], l.key[0])
				}
			}
		}
		if got.String() != m.String() {
			rt.Fatalf("gathered\n%s\none by one\n%s", got, m)
		}
	})
	if gathered == 0 {
		t.Error("nothing was ever gathered")
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("T\x01aI" + "t\x01xt\x011nt\x01t" + "D\x011" + "K\x011ut\x012nt\x01t" + "X"))
	f.Add([]byte("T\x01zI"))
	f.Add([]byte("I\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	cat := testCatalog()
	f.Fuzz(func(t *testing.T, data []byte) {
		ops, err := cat.decode(data)
		if err == nil {
			_, _ = gather(ops)
		}
	})
}

func TestDecodeReadsWhatIsWritten(t *testing.T) {
	cat := testCatalog()
	var b []byte
	b = appendText(append(b, opTable), []byte("a"))
	b = append(b, opInsert, valUnchanged)
	b = appendText(append(b, valText), []byte("1"))
	b = append(b, valNull)
	b = appendText(append(b, valText), []byte("t"))
	b = append(appendText(append(b, opTable), []byte("b")), opDelete)
	b = appendText(b, []byte("k\x00ey"))
	ops, err := cat.decode(b)
	if err != nil || len(ops) != 2 {
		t.Fatal(ops, err)
	}
	if o := ops[0]; o.kind != opInsert || o.t.Name != "a" || o.key[0] != "1" || !o.row[0].unchanged || o.row[2].text != nil || o.whole() {
		t.Errorf("%+v", o)
	}
	if ops[1].kind != opDelete || ops[1].key[0] != "k\x00ey" || ops[1].t.Name != "b" {
		t.Errorf("%+v", ops[1:])
	}
	for n := range b {
		if ops, err := cat.decode(b[:n]); err == nil && len(ops) == 2 {
			t.Errorf("cut at %d of %d it still reads", n, len(b))
		}
	}
}

func TestLines(t *testing.T) {
	tb := testCatalog().tables[0]
	var got []transfer.Batch
	l := newLines(tb, func(b transfer.Batch) error { got = append(got, b); return nil })
	in := "big\\tx\t1\\n\\\\\t\\N\tt\n" + strings.Repeat("b\tk\tn\tt\n", batchRows) + "last\tend\\b\tn\tt\n"
	// In pieces of any size.
	for at := 0; at < len(in); at += 7 {
		if _, err := l.Write([]byte(in[at:min(len(in), at+7)])); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	var all string
	var n int64
	for i, b := range got {
		all += string(b.Data)
		n += b.Count
		if b.End != (i == len(got)-1) {
			t.Errorf("batch %d of %d has End %v", i, len(got), b.End)
		}
	}
	if all != in || n != batchRows+2 || len(got) < 2 {
		t.Errorf("%d rows in %d batches, %d of %d bytes", n, len(got), len(all), len(in))
	}
	key, rest, err := readTexts(got[len(got)-1].LastKey, 1)
	if err != nil || len(rest) > 0 || key[0] != "end\b" {
		t.Errorf("last key %q, %v", key, err)
	}
	if key, err := tb.lineKey([]byte("big\\tx\t1\\n\\\\\t\\N\tt")); err != nil || key[0] != "1\n\\" {
		t.Errorf("key %q, %v", key, err)
	}
	empty := newLines(tb, func(b transfer.Batch) error {
		if b.Count != 0 || !b.End {
			t.Errorf("empty table: %+v", b)
		}
		return nil
	})
	if err := empty.end(); err != nil {
		t.Fatal(err)
	}
}
