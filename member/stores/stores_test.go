// SPDX-License-Identifier: Apache-2.0

package stores_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
)

// fake is a store whose answers are set.
type fake struct {
	stores.Store // nil: what a test does not set must not be called
	kind         stores.Kind
	at           stores.Location
	id           stores.DeploymentID
	idErr        error
	writes       int
	nonce        stores.Nonce
	nonceErr     error
	empty        string
}

func (f *fake) Kind() stores.Kind         { return f.kind }
func (f *fake) Location() stores.Location { return f.at }
func (f *fake) Identity(context.Context) (stores.Identity, error) {
	return stores.Identity{Kind: f.kind, Location: f.at, Deployment: f.id}, f.idErr
}
func (f *fake) Establish(_ context.Context, id stores.DeploymentID) (stores.DeploymentID, error) {
	f.writes++
	if f.id == "" {
		f.id = id
	}
	return f.id, nil
}
func (f *fake) WriteNonce(_ context.Context, n stores.Nonce) error {
	if f.nonceErr == nil {
		f.nonce = n
	}
	return f.nonceErr
}
func (f *fake) ReadNonce(context.Context) (stores.Nonce, error) {
	if f.nonce == "" && f.nonceErr == nil {
		return "", stores.ErrNoNonce
	}
	return f.nonce, f.nonceErr
}
func (f *fake) DeleteNonce(context.Context) error {
	if f.nonceErr == nil {
		f.nonce = ""
	}
	return f.nonceErr
}
func (f *fake) Empty(context.Context) (bool, string, error) { return f.empty == "", f.empty, nil }

const a, b stores.DeploymentID = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"

// Pair over everything that three stores can carry: it agrees or writes nothing.
func TestPair(t *testing.T) {
	for _, p := range []stores.DeploymentID{"", a, b} {
		for _, s := range []stores.DeploymentID{"", a, b} {
			for _, c := range []stores.DeploymentID{"", a, b} {
				t.Run(fmt.Sprintf("%.1s-%.1s-%.1s", p, s, c), func(t *testing.T) {
					pg, s3, ch := &fake{kind: stores.Postgres, id: p}, &fake{kind: stores.S3, at: stores.Location{Bucket: "bucket"}, id: s}, &fake{kind: stores.ClickHouse, id: c}
					set, err := stores.NewSet(pg, s3, ch)
					if err != nil {
						t.Fatal(err)
					}
					good := (s == "" || s == p) && (c == "" || c == p)
					_, err = set.Deployment(t.Context())
					if want := map[bool]error{true: nil, false: stores.ErrMismatch}[good]; p == "" && good || good && (s == "" || c == "") {
						want = stores.ErrNoDeployment
						if !errors.Is(err, want) {
							t.Errorf("Deployment: %v, want %v", err, want)
						}
					} else if !errors.Is(err, want) {
						t.Errorf("Deployment: %v, want %v", err, want)
					}
					id, err := set.Pair(t.Context())
					if !good {
						if !errors.Is(err, stores.ErrMismatch) || id != "" || pg.writes+s3.writes+ch.writes > 0 {
							t.Errorf("%s, %v, %d writes; want ErrMismatch and none", id, err, pg.writes+s3.writes+ch.writes)
						}
						return
					}
					if err != nil || id.Validate() != nil || p != "" && id != p || pg.id != id || s3.id != id || ch.id != id {
						t.Errorf("%s, %v; carried %s, %s, %s", id, err, pg.id, s3.id, ch.id)
					}
					if again, err := set.Deployment(t.Context()); err != nil || again != id {
						t.Errorf("afterwards %s, %v; want %s", again, err, id)
					}
				})
			}
		}
	}
}

// A store that cannot be asked decides nothing.
func TestPairUnavailable(t *testing.T) {
	pg, ch := &fake{kind: stores.Postgres}, &fake{kind: stores.ClickHouse, idErr: fmt.Errorf("%w: away", cells.ErrUnavailable)}
	set, err := stores.NewSet(pg, ch)
	if err != nil {
		t.Fatal(err)
	}
	if id, err := set.Pair(t.Context()); id != "" || !errors.Is(err, cells.ErrUnavailable) || pg.writes > 0 {
		t.Errorf("%s, %v, %d writes", id, err, pg.writes)
	}
}

func TestNewSet(t *testing.T) {
	at := stores.Location{Bucket: "bucket"}
	for name, list := range map[string][]stores.Store{
		"two of a kind": {&fake{kind: stores.Postgres}, &fake{kind: stores.Postgres}},
		"two buckets":   {&fake{kind: stores.Postgres}, &fake{kind: stores.S3, at: at}, &fake{kind: "other", at: at}},
		"odd kind":      {&fake{kind: "Postgres"}},
		"no kind":       {&fake{}},
		"odd bucket":    {&fake{kind: stores.Postgres}, &fake{kind: stores.S3, at: stores.Location{Bucket: "B"}}},
	} {
		if _, err := stores.NewSet(list[0], list[1:]...); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}

func TestNonces(t *testing.T) {
	pg, ch := &fake{kind: stores.Postgres}, &fake{kind: stores.ClickHouse}
	set, err := stores.NewSet(pg, ch)
	if err != nil {
		t.Fatal(err)
	}
	wrote, err := set.WriteNonces(t.Context())
	if err != nil || len(wrote) != 2 || wrote[stores.Postgres] == wrote[stores.ClickHouse] {
		t.Fatalf("%v, %v; want two nonces", wrote, err)
	}
	pg.nonce = ""
	if got, err := set.ReadNonces(t.Context()); err != nil || len(got) != 1 || got[stores.ClickHouse] != wrote[stores.ClickHouse] {
		t.Errorf("one is gone: %v, %v", got, err)
	}
	pg.nonceErr = cells.ErrUnavailable
	if got, err := set.ReadNonces(t.Context()); got != nil || !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("one cannot be read: %v, %v; want no answer at all", got, err)
	}
	if err := set.DeleteNonces(t.Context()); !errors.Is(err, cells.ErrUnavailable) || ch.nonce != "" {
		t.Errorf("after a failure: %v, and ClickHouse holds %q", err, ch.nonce)
	}
}

func TestEmpty(t *testing.T) {
	set, err := stores.NewSet(&fake{kind: stores.Postgres}, &fake{kind: stores.ClickHouse, empty: "rows in t"})
	if err != nil {
		t.Fatal(err)
	}
	if empty, holds, err := set.Empty(t.Context()); empty || err != nil || holds != "clickhouse: rows in t" {
		t.Errorf("%v, %q, %v", empty, holds, err)
	}
}

func TestParsePrefix(t *testing.T) {
	for in, want := range map[string]string{"": "", "/": "", "a": "a", "/a/": "a", "a/b/": "a/b", "a b/c+d%2F": "a b/c+d%2F", "é/日本": "é/日本", "_cells": "_cells"} {
		if got, err := stores.ParsePrefix(in); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"//", "a//b", "//a", "a//", ".", "..", "a/../b", "a/.", "a\\b", "a\x00", "a\nb", "\xff", "a/_cell_probe", "_cell_x/b", strings.Repeat("a", 513), "\ufffd"} {
		if got, err := stores.ParsePrefix(in); !errors.Is(err, cells.ErrInvalid) || got != "" {
			t.Errorf("%q: %q, %v; want ErrInvalid", in, got, err)
		}
	}
}

func TestLocation(t *testing.T) {
	for _, l := range []stores.Location{{Prefix: "a"}, {Bucket: "ab"}, {Bucket: "Bucket"}, {Bucket: "a..b"}, {Bucket: ".ab"}, {Bucket: "ab-"}, {Bucket: strings.Repeat("a", 64)},
		{Bucket: "bucket", Prefix: "/a"}, {Bucket: "bucket", Prefix: "a/"}, {Bucket: "b/u"}} {
		if err := l.Validate(); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%+v: %v, want ErrInvalid", l, err)
		}
	}
	for _, l := range []stores.Location{{}, {Bucket: "abc"}, {Bucket: "a.b-c1", Prefix: "x/y"}} {
		if err := l.Validate(); err != nil {
			t.Errorf("%+v: %v", l, err)
		}
	}
	for _, c := range []struct {
		a, b string // bucket:prefix
		want bool
	}{
		{"b:", "b:", true}, {"b:", "b:x", true}, {"b:x", "b:x", true}, {"b:x", "b:x/y", true}, {"b:x/y/z", "b:x", true},
		{"b:x", "b:xy", false}, {"b:x/y", "b:x/z", false}, {"b:x", "c:x", false}, {"b:", "c:", false}, {":", ":", false}, {":", "b:", false}, {"b:x", "b:X", false},
	} {
		x, y := location(c.a), location(c.b)
		if x.Overlaps(y) != c.want || y.Overlaps(x) != c.want {
			t.Errorf("%s and %s: %v, %v; want %v", c.a, c.b, x.Overlaps(y), y.Overlaps(x), c.want)
		}
	}
}

func location(s string) stores.Location {
	bucket, prefix, _ := strings.Cut(s, ":")
	return stores.Location{Bucket: bucket, Prefix: prefix}
}

// Locations overlap exactly when an object's name can be below both.
func TestOverlapsIsByNames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seg := rapid.SampledFrom([]string{"a", "b", "ab"})
		prefix := func(name string) stores.Location {
			p, err := stores.ParsePrefix(strings.Join(rapid.SliceOfN(seg, 0, 3).Draw(t, name), "/"))
			if err != nil {
				t.Fatal(err)
			}
			return stores.Location{Bucket: "bucket", Prefix: p}
		}
		x, y := prefix("x"), prefix("y")
		both := strings.HasPrefix(x.Key("o"), y.Key("")) || strings.HasPrefix(y.Key("o"), x.Key(""))
		if x.Overlaps(y) != both {
			t.Fatalf("%s and %s: %v, want %v", x, y, x.Overlaps(y), both)
		}
	})
}

func FuzzParsePrefix(f *testing.F) {
	for _, s := range []string{"a/b", "/a/", "a//b", "..", "_cell_", "é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := stores.ParsePrefix(s)
		if err != nil {
			return
		}
		if again, err := stores.ParsePrefix(p); err != nil || again != p {
			t.Fatalf("%q is read as %q, and that as %q, %v", s, p, again, err)
		}
		if err := (stores.Location{Bucket: "bucket", Prefix: p}).Validate(); err != nil {
			t.Fatalf("%q: %v", p, err)
		}
	})
}
