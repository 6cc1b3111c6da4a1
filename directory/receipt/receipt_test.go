// SPDX-License-Identifier: Apache-2.0

package receipt

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
)

func testKey(seed byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
}

func pub(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

// example is a receipt with every field of every statement set.
func example(t testing.TB, key ed25519.PrivateKey) []byte {
	t.Helper()
	at := time.Date(2026, 5, 6, 7, 8, 9, 123456000, time.UTC)
	head := Statement{At: at, By: "main/X", Move: "mv-1", Tenant: "acme"}
	budget := &Budget{Limit: time.Minute, Window: time.Hour, Charged: time.Second, Before: 59 * time.Second, After: 58 * time.Second}
	outcome, removal, clients, end := head, head, head, head
	outcome.Kind, outcome.Outcome = KindOutcome, &Outcome{
		Verdict: Committed, Reason: "none <&>", Source: "a", Target: "b", Base: 1, Closed: 2, Opened: 3, EventMark: 1<<63 + 5, DataMark: "0000000000000010",
		Tables: []Table{{Table: "item", Position: "0000000000000009", Whole: true, Keys: 0, Source: Digest{10, "aa"}, Target: Digest{10, "aa"}},
			{Table: "item", Position: "0000000000000010", Keys: 2, Source: Digest{2, "bb"}, Target: Digest{2, "bb"}}},
		ComparedUnknown: true, Rows: 10, Bytes: 1000, Actor: "alice", Forced: true, Operation: "op", Request: "rq", Driver: "main/X",
		Predicted: 60 * time.Millisecond, Bound: 5 * time.Second, Pause: 40 * time.Millisecond, Clients: &Seen{Edges: 1, Refused: 2, Span: time.Second}, Budget: budget,
		Created: at, Started: at, Cut: at, Decided: at, Served: at, Remains: []cells.Residue{{Cell: "a", Epoch: 2, Move: "mv-1"}},
	}
	clients.Kind, clients.Clients = KindClients, &Clients{Seen: Seen{Edges: 2, Refused: 3, Span: 2 * time.Second}, Budget: budget}
	removal.Kind, removal.Removal = KindRemoval, &Removal{Cell: "a", Epoch: 2, Gone: true}
	end.Kind, end.End = KindEnd, &End{Statements: 4}
	var entries [][]byte
	for _, s := range []Statement{outcome, clients, removal, end} {
		e, err := Append(key, entries, s)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
	r, err := New("mv-1", entries)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func verifies(doc []byte, keys ...ed25519.PublicKey) error {
	_, err := Verify(doc, keys)
	if err != nil && !errors.Is(err, ErrUnverified) && !errors.Is(err, cells.ErrInvalid) {
		return fmt.Errorf("an error of neither kind: %w", err)
	}
	return err
}

func TestVerify(t *testing.T) {
	key := testKey(1)
	doc := example(t, key)
	list, err := Verify(doc, []ed25519.PublicKey{pub(testKey(2)), pub(key)})
	if err != nil || len(list) != 4 || !Ended(list) || list[0].Outcome.EventMark != 1<<63+5 || list[0].Outcome.Reason != "none <&>" || !list[2].Removal.Gone {
		t.Fatalf("%+v, %v", list, err)
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, doc, "", "   "); err != nil {
		t.Fatal(err)
	}
	if err := verifies(indented.Bytes(), pub(key)); err != nil {
		t.Errorf("indented: %v", err)
	}
	// Members in another order, as another program would write them.
	var any map[string]any
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	if err := dec.Decode(&any); err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(any)
	if err != nil || bytes.Equal(again, doc) {
		t.Fatal("the order is the same", err)
	}
	if err := verifies(again, pub(key)); err != nil {
		t.Errorf("reordered: %v", err)
	}
	if err := verifies(doc, pub(testKey(2))); !errors.Is(err, ErrUnverified) {
		t.Errorf("another key: %v", err)
	}
	if err := verifies(doc); !errors.Is(err, ErrUnverified) {
		t.Errorf("no key: %v", err)
	}
}

// leaves lists the paths of all values of a document that have none in them, and of
// all containers.
func paths(v any, at []string) (out [][]string) {
	out = append(out, slices.Clone(at))
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			out = append(out, paths(x, append(at, k))...)
		}
	case []any:
		for i, x := range v {
			out = append(out, paths(x, append(at, strconv.Itoa(i)))...)
		}
	}
	return out
}

// change replaces the value at a path by what f makes of it; f returns nil to remove it.
func change(v any, path []string, f func(any) any) any {
	if len(path) == 0 {
		return f(v)
	}
	switch v := v.(type) {
	case map[string]any:
		if x := change(v[path[0]], path[1:], f); x != nil {
			v[path[0]] = x
		} else {
			delete(v, path[0])
		}
	case []any:
		i, err := strconv.Atoi(path[0])
		if err != nil {
			panic(err)
		}
		if x := change(v[i], path[1:], f); x != nil {
			v[i] = x
		} else {
			return slices.Delete(v, i, i+1)
		}
	}
	return v
}

func decode(t interface{ Fatal(...any) }, doc []byte) any {
	var v any
	dec := json.NewDecoder(bytes.NewReader(doc))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// Whatever is changed in a receipt, at any place, it does not verify any more.
func TestTamperingWithAnyFieldFails(t *testing.T) {
	key := testKey(1)
	doc := example(t, key)
	all := paths(decode(t, doc), nil)
	slices.SortFunc(all, func(a, b []string) int { return slices.Compare(a, b) })
	last := len(decode(t, doc).(map[string]any)["entries"].([]any)) - 1
	changed := 0
	for _, path := range all {
		for name, f := range map[string]func(any) any{
			"removed": func(any) any { return nil },
			"other": func(v any) any {
				switch v := v.(type) {
				case string:
					return v + "x"
				case json.Number:
					if v == "0" {
						return json.Number("7")
					}
					return json.Number(v.String() + "1")
				case bool:
					return !v
				case []any:
					return append(v, "x")
				case map[string]any:
					v["x"] = json.Number("1")
					return v
				}
				return "x"
			},
			"null": func(any) any { return json.RawMessage("null") },
		} {
			if name == "removed" && len(path) == 2 && path[1] == strconv.Itoa(last) || name != "other" && len(path) == 0 {
				continue // the end of a receipt can be cut off; see the package's documentation
			}
			v := change(decode(t, doc), path, f)
			b, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			changed++
			if err := verifies(b, pub(key)); err == nil {
				t.Errorf("%s %s: still verifies", strings.Join(path, "."), name)
			}
		}
	}
	if changed < 200 {
		t.Errorf("only %d changes were tried", changed)
	}
}

func TestTamperingWithAnyByteFails(t *testing.T) {
	key := testKey(1)
	doc := example(t, key)
	want, err := Canonical(doc)
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		b := bytes.Clone(doc)
		for range rapid.IntRange(1, 3).Draw(t, "changes") {
			i := rapid.IntRange(0, len(b)-1).Draw(t, "at")
			switch rapid.SampledFrom([]string{"set", "cut", "double"}).Draw(t, "how") {
			case "set":
				b[i] = rapid.Byte().Draw(t, "byte")
			case "cut":
				b = slices.Delete(b, i, i+1)
			default:
				b = slices.Insert(b, i, b[i])
			}
		}
		if got, err := Canonical(b); err == nil && bytes.Equal(got, want) {
			t.Skip("it says the same")
		}
		if err := verifies(b, pub(key)); err == nil {
			t.Fatalf("still verifies:\n%s", b)
		}
	})
}

func TestEntriesCannotChangePlaces(t *testing.T) {
	key := testKey(1)
	doc := example(t, key)
	try := func(what string, f func(r *Receipt)) {
		t.Helper()
		var r Receipt
		if err := json.Unmarshal(doc, &r); err != nil {
			t.Fatal(err)
		}
		f(&r)
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := verifies(b, pub(key), pub(testKey(2))); !errors.Is(err, ErrUnverified) && !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	try("swapped", func(r *Receipt) { r.Entries[1], r.Entries[2] = r.Entries[2], r.Entries[1] })
	try("first left out", func(r *Receipt) { r.Entries = r.Entries[1:] })
	try("middle left out", func(r *Receipt) { r.Entries = append(r.Entries[:1], r.Entries[2]) })
	try("one twice", func(r *Receipt) { r.Entries = append(r.Entries, r.Entries[2]) })
	try("all left out", func(r *Receipt) { r.Entries = nil })
	// A statement of another receipt, well signed.
	try("another move's", func(r *Receipt) {
		s := Statement{Kind: KindRemoval, Move: "mv-2", Tenant: "acme", Removal: &Removal{Cell: "a"}}
		r.Entries = r.Entries[:3]
		var entries [][]byte
		for _, e := range r.Entries {
			b, err := json.Marshal(e)
			if err != nil {
				t.Fatal(err)
			}
			entries = append(entries, b)
		}
		b, err := Append(testKey(2), entries, s)
		if err != nil {
			t.Fatal(err)
		}
		var e Entry
		if err := json.Unmarshal(b, &e); err != nil {
			t.Fatal(err)
		}
		r.Entries = append(r.Entries, e)
	})
}

// A receipt that was cut behind any statement is told from a whole one; nothing can be put
// behind its end, and an end cannot be put where it does not belong.
func TestCutIsSeen(t *testing.T) {
	key := testKey(1)
	var whole Receipt
	if err := json.Unmarshal(example(t, key), &whole); err != nil {
		t.Fatal(err)
	}
	read := func(r Receipt) []Statement {
		t.Helper()
		doc, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		list, err := Verify(doc, []ed25519.PublicKey{pub(key)})
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	all := read(whole)
	var entries [][]byte
	for n := 1; n <= len(whole.Entries); n++ {
		r := whole
		r.Entries = whole.Entries[:n]
		list := read(r)
		if Ended(list) != (n == len(whole.Entries)) {
			t.Errorf("%d of %d statements: ended %v", n, len(whole.Entries), Ended(list))
		}
		if !Begins(list, all) || n < len(all) && Begins(all, list) {
			t.Errorf("the first %d are not the beginning", n)
		}
		changed := slices.Clone(list)
		if changed[n-1].By = "other"; Begins(changed, all) {
			t.Errorf("another statement %d is the beginning, too", n-1)
		}
		b, err := json.Marshal(whole.Entries[n-1])
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, b)
	}
	more := Statement{Kind: KindRemoval, Move: "mv-1", Tenant: "acme", Removal: &Removal{Cell: "a"}}
	if _, err := Append(key, entries, more); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("behind the end: %v", err)
	}
	if _, err := Append(key, entries[:2], Statement{Kind: KindEnd, Move: "mv-1", Tenant: "acme", End: &End{Statements: 4}}); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("an end that counts others: %v", err)
	}
	// Signed behind the end all the same, by who has the key.
	behind := all[3]
	behind.Kind, behind.End, behind.Removal, behind.N = KindRemoval, nil, more.Removal, 4
	forged := whole
	forged.Entries = append(slices.Clone(whole.Entries), sealed(t, key, whole.Entries[3], behind))
	doc, err := json.Marshal(forged)
	if err != nil {
		t.Fatal(err)
	}
	if err := verifies(doc, pub(key)); err == nil || !strings.Contains(err.Error(), "follows the end") {
		t.Errorf("a statement behind the end: %v", err)
	}
}

// sealed signs a statement behind an entry, without asking whether it may follow it.
func sealed(t *testing.T, key ed25519.PrivateKey, last Entry, s Statement) Entry {
	t.Helper()
	message, err := signed(last.Body)
	if err != nil {
		t.Fatal(err)
	}
	s.Prev = hash(message)
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	body, err := Canonical(raw)
	if err != nil {
		t.Fatal(err)
	}
	return Entry{Body: body, Key: KeyID(pub(key)), Signature: base64.StdEncoding.EncodeToString(ed25519.Sign(key, append([]byte(context), body...)))}
}

func TestCanonical(t *testing.T) {
	for in, want := range map[string]string{
		` { "b" : 1 , "a" : [ true , null , -5 ] } `:            `{"a":[true,null,-5],"b":1}`,
		`{"\u20ac":1,"\r":2,"1":3,"\ud83d\ude00":4,"\ufb33":5}`: "{\"\\r\":2,\"1\":3,\"\u20ac\":1,\"\U0001f600\":4,\"\ufb33\":5}",
		`"\u003c\u002f\u0001\u000b\t\"\\\u2028"`:                "\"</\\u0001\\u000b\\t\\\"\\\\\u2028\"",
		`18446744073709551615`:                                  `18446744073709551615`,
		`[]`:                                                    `[]`,
	} {
		got, err := Canonical([]byte(in))
		if err != nil || string(got) != want {
			t.Errorf("%s: %s, %v, want %s", in, got, err, want)
		}
	}
	for _, in := range []string{``, `{`, `{"a":1,"a":2}`, `{"a":{"b":1,"b":1}}`, `1.5`, `1e3`, `-0`, `18446744073709551616`, `1 2`, "\"\xff\"", `[1,]`, `nul`,
		strings.Repeat("[", 40) + strings.Repeat("]", 40)} {
		if got, err := Canonical([]byte(in)); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %s, %v", in, got, err)
		}
	}
}

func FuzzCanonical(f *testing.F) {
	f.Add([]byte(`{"b":[1,-2,"x\n"],"a":null}`))
	f.Add(example(f, testKey(1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		once, err := Canonical(b)
		if err != nil {
			return
		}
		twice, err := Canonical(once)
		if err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("%q becomes %q and then %q, %v", b, once, twice, err)
		}
		var x, y any
		if json.Unmarshal(b, &x) != nil || json.Unmarshal(once, &y) != nil || fmt.Sprint(x) != fmt.Sprint(y) {
			t.Fatalf("%q means something else as %q", b, once)
		}
	})
}

func FuzzVerify(f *testing.F) {
	doc := example(f, testKey(1))
	f.Add(doc)
	f.Add(doc[:len(doc)/2])
	want, err := Canonical(doc)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := verifies(b, pub(testKey(1))); err != nil {
			return
		}
		var r, whole Receipt
		if err := json.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(want, &whole); err != nil || len(r.Entries) > len(whole.Entries) {
			t.Fatalf("verifies, and was never signed: %s", b)
		}
	})
}
