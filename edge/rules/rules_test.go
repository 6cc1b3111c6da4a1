// SPDX-License-Identifier: Apache-2.0

package rules_test

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge/rules"
)

func seg(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) }

// jwt is a token with these claims and a signature that nobody made.
func jwt(claims string) string { return seg(`{"alg":"ES256"}`) + "." + seg(claims) + ".c2ln" }

func iss(issuer string) string { return jwt(fmt.Sprintf(`{"iss":%q,"sub":"x"}`, issuer)) }

var own = rules.Config{Shared: "Shared.example.com", Upstream: "http://old.internal:8080"}

// the classes of what a request can be, each with the spellings that must not matter.
type hostClass struct {
	name  string
	spell []string
}

type pathClass struct {
	name  string
	spell []string
}

type tokenClass struct {
	name  string
	spell [][]string // Authorization headers
	iss   string     // of a JWT
}

var hosts = []hostClass{
	{"shared", []string{"shared.example.com", "SHARED.example.com.", "shared.example.com:443", "old.example.com", "also.example.com:80"}},
	{"b", []string{"b.example.com", "B.EXAMPLE.COM", "b.example.com.:443", "b2.example.com"}},
	{"c", []string{"xn--bcher-kva.example", "XN--BCHER-KVA.EXAMPLE."}},
	{"v6", []string{"[2001:db8::5]:8443", "[2001:DB8:0::5]:8443"}},
	{"nobody", []string{"d.example.com", "b.example.com:8443", "\uff42.example.com", "b\u00fccher.example", "\u0430.example.com", "xn--80a.example.com", "b.example.com..", "", "user@b.example.com", "b.example.com@x",
		"b%2eexample.com", "[2001:db8::5]", "[2001:db8::5%25eth0]:8443", "2001:db8::5", "sub.shared.example.com", "shared.example.com.evil.com", "shared.example.com:8443", "b.example.com, shared.example.com"}},
}

var paths = []pathClass{
	{"other", []string{"/", "/v1/memory", "/v1/health", "/oauth/token", "/scim", "/scim/v2x/Users", "/scim/v3", "/SCIM/v2/Users", "/x/scim/v2", "/.well-knownx", "/oauth/revokex", "/cellsx", "/a/cells/", "*", "/%zz"}},
	{"scim", []string{"/scim/v2", "/scim/v2/", "/scim/v2/Users", "/scim/v2/Groupsx", "/scim/v2/groups", "/scim//v2/Users", "/%73cim/v2/Users", "/x/../scim/v2/Users", "/scim/v2/Groups/../Users", "/scim%2Fv2/Users"}},
	{"groups", []string{"/scim/v2/Groups", "/scim/v2/Groups/", "/scim/v2/Groups/42", "/scim/v2/%47roups", "/scim/v2/Users/../Groups"}},
	{"discovery", []string{"/.well-known/openid-configuration", "/.well-known/oauth-protected-resource/mcp", "/.well-known/jwks.json", "/%2ewell-known/x"}},
	{"revoke", []string{"/oauth/revoke", "/oauth/revoke/", "/oauth//revoke", "/oauth/%72evoke"}},
	{"own", []string{"/cells/", "/cells", "/cells/v1/placements", "/%63ells/lookup", "//cells/x", "/CELLS/", "/x/../cells/y", "/cells;a/b", "/%2563ells/", "/\\cells/", "/cells%2flookup", "/./cells", "/cells."}},
}

var tokens = []tokenClass{
	{"none", [][]string{nil, {"Basic dXNlcjpwYXNz"}, {""}, {"Bearer"}, {"Bearer "}, {"Token " + iss("iss-b")}, {iss("iss-b")}}, ""},
	{"opaque", [][]string{{"Bearer lsc_b_0123456789abcdef0123456789abcdef"}, {"Bearer v4.public.abc"}, {"bearer a.b"}, {"Bearer a.b.c"}, {"Bearer a.b.c.d.e"}, {"Bearer 1|x"}, {"Bearer " + seg("[1]") + ".e30.x"}}, ""},
	{"a", [][]string{{"Bearer " + iss("iss-a")}, {"bearer  " + iss("iss-a") + " "}, {"BEARER\t" + iss("iss-a")}, {"DPoP " + iss("iss-a")}}, "iss-a"},
	{"b", [][]string{{"Bearer " + iss("iss-b")}, {"Bearer " + jwt(`{"sub":"iss-a","iss":"iss-b","x":{"iss":"iss-a"}}`)}, {"Bearer " + jwt(`{"Iss":"iss-a","iss":"iss-b"}`)}}, "iss-b"},
	{"shared by two", [][]string{{"Bearer " + iss("iss-two")}}, "iss-two"},
	{"unknown", [][]string{
		{"Bearer " + iss("iss-d")}, {"Bearer " + iss("ISS-A")}, {"Bearer " + iss("iss-a/")}, {"Bearer " + iss(" iss-a")}, {"Bearer " + iss("")}, {"Bearer " + jwt(`{}`)},
		{"Bearer " + jwt(`{"iss":null}`)}, {"Bearer " + jwt(`{"iss":1}`)}, {"Bearer " + jwt(`{"iss":["iss-a"]}`)}, {"Bearer " + jwt(`{"iss":{"iss":"iss-a"}}`)},
		{"Bearer " + jwt(`{"iss":"iss-a","iss":"iss-b"}`)}, {"Bearer " + jwt(`{"iss":"iss-b","\u0069ss":"iss-b"}`)}, {"Bearer " + jwt(`{"iss":"iss-a"}x`)}, {"Bearer " + jwt(`{"iss":"iss-a"`)},
		{"Bearer " + jwt(`["iss-a"]`)}, {"Bearer " + seg(`{"alg":"none"}`) + ".." /* no payload */}, {"Bearer " + seg(`{"alg":"none"}`) + ".!!!.x"},
		{"Bearer " + seg(`{}`) + "." + seg(`{"iss":"iss-a"}`) + "=.x"}, {"Bearer " + seg(`{}`) + "=." + seg(`{"iss":"\u0000"}`) + ".x"},
	}, "?"},
	{"two", [][]string{{"Bearer " + iss("iss-a"), "Bearer " + iss("iss-b")}, {"Basic x", "Bearer " + iss("iss-b")}, {"Bearer x", "Bearer x"},
		{"Bearer " + iss("iss-a") + ", Bearer " + iss("iss-b")}, {"Bearer " + iss("iss-a") + " " + iss("iss-b")}, {"Bearer Bearer " + iss("iss-a")}, {"Bearer " + iss("iss-a") + ",x"},
		{"Bearer " + jwt(`{"iss":"iss-a","x":"`+strings.Repeat("x", 17<<10)+`"}`)}}, "!"},
}

// world is one table, and what is special about it.
type world struct {
	name  string
	first string // "", attaching, serving, "two"
	noUp  string // the cell that has no upstream
}

var worlds = []world{
	{"nothing registered", "", ""}, {"attaching", "attaching", ""}, {"attaching without an address", "attaching", "a"},
	{"serving", "serving", ""}, {"serving without an address", "serving", "a"}, {"b without an address", "serving", "b"}, {"two firsts", "two", ""},
}

func (w world) table() rules.Table {
	t := rules.Table{Aliases: []string{"old.example.com"}, Cells: []rules.Cell{
		{Name: "b", Host: "b.example.com", Aliases: []string{"B2.example.com."}, Upstream: "http://b.internal", Issuers: []string{"iss-b", "iss-two", "iss-b"}, State: rules.Serving},
		{Name: "c", Host: "b\u00fccher.example", Upstream: "https://c.internal:1", Issuers: []string{"iss-two", "iss-c"}, State: rules.Attaching},
		{Name: "v6", Host: "[2001:db8::5]:8443", Upstream: "http://[fd00::1]:1", State: rules.Serving},
	}}
	first := rules.Cell{Name: "a", Host: "shared.example.com", Aliases: []string{"also.example.com"}, Upstream: "http://old.internal:8080/", Issuers: []string{"iss-a"}, First: true, State: rules.State(w.first)}
	switch w.first {
	case "two":
		first.State = rules.Serving
		second := first
		second.Name, second.Issuers = "a2", nil
		t.Cells = append(t.Cells, first, second)
	case "":
		t.Aliases = append(t.Aliases, "also.example.com") // it has no first cell to own it
	default:
		t.Cells = append(t.Cells, first)
	}
	for i := range t.Cells {
		if string(t.Cells[i].Name) == w.noUp {
			t.Cells[i].Upstream = ""
		}
	}
	return t
}

// naive says by the classes alone what must come out: a cell, "old" for the deployment
// behind the router, or a code.
func (w world) naive(host, path, method, token, revoked string) string {
	cell := func(name string) string {
		if name == w.noUp {
			return "BACKEND_UNAVAILABLE"
		}
		return name
	}
	first := func() string {
		switch w.first {
		case "":
			return "old"
		case "two":
			return "BACKEND_UNAVAILABLE"
		}
		return cell("a")
	}
	issuer := func(of string) string {
		if of == "a" || of == "b" {
			return cell(of)
		}
		return "UNKNOWN_ISSUER"
	}
	byToken := func() string {
		switch token {
		case "none", "opaque":
			return first()
		case "two":
			return "BAD_REQUEST"
		}
		return issuer(token)
	}
	switch {
	case path == "own":
		return "NOT_SERVED"
	case host == "nobody":
		return "UNKNOWN_HOST"
	case host != "shared":
		return cell(host)
	case w.first == "" || w.first == "attaching":
		return first()
	case path == "scim", path == "discovery":
		return first()
	case path == "groups":
		return byToken()
	case path == "revoke" && method == "POST" && revoked != "none" && revoked != "opaque" && (token == "none" || token == "opaque"):
		return issuer(revoked)
	}
	return byToken()
}

func said(d rules.Decision) string {
	switch {
	case d.Answer != "":
		return string(d.Answer)
	case d.Cell == "":
		return "old"
	}
	return string(d.Cell)
}

// Every class of request against every class of table, each in all of its spellings,
// is decided as the rules read.
func TestEveryDecision(t *testing.T) {
	ups := map[string]string{"old": "http://old.internal:8080", "a": "http://old.internal:8080", "b": "http://b.internal", "c": "https://c.internal:1", "v6": "http://[fd00::1]:1"}
	n := 0
	for _, w := range worlds {
		x, err := rules.NewIndex(own, w.table())
		if err != nil {
			t.Fatal(err)
		}
		check := func(want string, r rules.Request) {
			n++
			d := x.Decide(r)
			if got := said(d); got != want {
				t.Fatalf("%s: %+v: %s, want %s (%+v)", w.name, r, got, want, d)
			}
			if d.Answer == "" && d.Upstream != ups[want] {
				t.Fatalf("%s: %+v goes to %s at %s", w.name, r, want, d.Upstream)
			}
		}
		for _, h := range hosts {
			for _, p := range paths {
				for _, tok := range tokens {
					want := func(method, revoked string) string { return w.naive(h.name, p.name, method, tok.name, revoked) }
					// All spellings of one with the first spelling of the others, and a walk along all.
					for _, host := range h.spell {
						check(want("GET", "none"), rules.Request{Method: "GET", Host: host, Path: p.spell[0], Authorization: tok.spell[0]})
					}
					for _, path := range p.spell {
						for _, auth := range tok.spell {
							check(want("GET", "none"), rules.Request{Method: "GET", Host: h.spell[0], Path: path, Authorization: auth})
							check(want("POST", "none"), rules.Request{Method: "POST", Host: h.spell[len(h.spell)-1], Path: path, Authorization: auth})
						}
					}
					for _, rev := range tokens[:6] {
						for _, auth := range rev.spell {
							if len(auth) == 0 {
								continue
							}
							revoked := ""
							if f := strings.Fields(auth[0]); len(f) == 2 && rev.name != "none" {
								revoked = f[1]
							} else if rev.name != "none" {
								continue
							}
							r := rules.Request{Method: "POST", Host: h.spell[0], Path: p.spell[0], Authorization: tok.spell[0], Revoked: revoked}
							check(want("POST", rev.name), r)
							// What is not asked for must not matter.
							if r.Revoked = ""; !x.NeedsRevoked(r) {
								check(want("POST", rev.name), r)
							}
							r.Method, r.Revoked = "GET", revoked
							check(want("GET", rev.name), r)
						}
					}
				}
			}
		}
	}
	t.Logf("%d decisions", n)
}

// The first cell is registered, attaches, and another one beside it: for what goes to
// the shared host before, nothing changes until the first cell serves.
func TestRegistrationChangesNoRoute(t *testing.T) {
	before, err := rules.NewIndex(own, rules.Table{Aliases: []string{"old.example.com", "also.example.com"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range []world{{first: ""}, {first: "attaching"}} {
		x, err := rules.NewIndex(own, w.table())
		if err != nil {
			t.Fatal(err)
		}
		for _, host := range hosts[0].spell {
			for _, p := range paths {
				for _, tok := range tokens {
					r := rules.Request{Method: "POST", Host: host, Path: p.spell[0], Authorization: tok.spell[0]}
					if a, b := before.Decide(r), x.Decide(r); a.Upstream != b.Upstream || a.Answer != b.Answer {
						t.Fatalf("%+v: %+v before, then %+v", r, a, b)
					}
				}
			}
		}
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []rules.Config{
		{}, {Shared: "x"}, {Upstream: "http://y"}, {Shared: "x y", Upstream: "http://y"}, {Shared: "x", Upstream: "y:80"}, {Shared: "x", Upstream: "ftp://y"},
		{Shared: "x", Upstream: "http://u:p@y"}, {Shared: "x", Upstream: "http://y/path"}, {Shared: "x", Upstream: "http://y?q"}, {Shared: "x", Upstream: "http://X:80"},
		{Shared: "x", Upstream: "http://y", Paths: rules.Paths{SCIM: "scim"}}, {Shared: "x", Upstream: "http://y", Paths: rules.Paths{Groups: "/Groups"}},
		{Shared: "x", Upstream: "http://y", Paths: rules.Paths{Revoke: "/a%2fb"}}, {Shared: "x", Upstream: "http://y", Paths: rules.Paths{Discovery: "/"}},
	} {
		if _, err := rules.NewIndex(c, rules.Table{}); err == nil {
			t.Errorf("%+v was taken", c)
		} else if strings.Contains(err.Error(), "u:p") {
			t.Errorf("a password is in %v", err)
		}
	}
	x, err := rules.NewIndex(rules.Config{Shared: "x", Upstream: "http://y", Paths: rules.Paths{SCIM: "/api/scim/", Groups: "Teams", Revoke: "/token/end", Discovery: "/meta"}},
		rules.Table{Cells: []rules.Cell{{Name: "a", Host: "x", First: true, State: rules.Serving, Upstream: "http://y"}, {Name: "b", Host: "b", Upstream: "http://z", Issuers: []string{"i"}, State: rules.Serving}}})
	if err != nil {
		t.Fatal(err)
	}
	auth := []string{"Bearer " + iss("i")}
	for path, want := range map[string]string{"/api/scim/Users": "a", "/api/scim/Teams/1": "b", "/meta/x": "a", "/scim/v2/Users": "b", "/.well-known/x": "b"} {
		if got := said(x.Decide(rules.Request{Host: "x", Path: path, Authorization: auth})); got != want {
			t.Errorf("%s: %s", path, got)
		}
	}
	if !x.NeedsRevoked(rules.Request{Method: "POST", Host: "x", Path: "/token/end"}) {
		t.Error("the revocation is not seen")
	}
}

// What a table says twice, or wrongly, holds for nobody, and is named.
func TestProblems(t *testing.T) {
	table := rules.Table{Aliases: []string{"bad host", "alias.example.com"}, Cells: []rules.Cell{
		{Name: "a", Host: "other.example.com", First: true, State: rules.Serving, Upstream: "http://u:secret@a.internal", Issuers: []string{"i", ""}},
		{Name: "b", Host: "b.example.com", State: rules.Serving, Upstream: "http://c.example.com:80", Issuers: []string{"i"}},
		{Name: "c", Host: "c.example.com", Aliases: []string{"B.example.com.", "alias.example.com"}, State: "ready", Upstream: "http://c.internal"},
		{Name: "d_", Host: "d.example.com", State: rules.Serving, Upstream: "http://d.internal"},
		{Name: "c", Host: "e.example.com", State: rules.Serving, Upstream: "http://e.internal"},
		{Name: "f", Host: "", State: rules.Serving, Upstream: "http://shared.example.com"},
	}}
	x, err := rules.NewIndex(own, table)
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(x.Problems(), "\n")
	for _, want := range []string{"alias of the shared host is left out", "issuer \"i\" is listed by two", "empty issuer", "host b.example.com is that of two", "has the host alias.example.com, which is the shared host",
		`state "ready"`, `"d_" is malformed`, `"c" is malformed or there twice`, "a host of cell f is left out", "cell a is first and its host is other.example.com", "upstream address of cell a is left out",
		"upstream address of cell b is left out: http://c.example.com:80 is a public host", "upstream address of cell f is left out"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is not among\n%s", want, all)
		}
	}
	if strings.Contains(all, "secret") {
		t.Errorf("a password is told:\n%s", all)
	}
	for host, want := range map[string]string{
		"shared.example.com": "BACKEND_UNAVAILABLE", "other.example.com": "BACKEND_UNAVAILABLE", "alias.example.com": "BACKEND_UNAVAILABLE",
		"b.example.com": "UNKNOWN_HOST", "c.example.com": "c", "d.example.com": "UNKNOWN_HOST", "e.example.com": "UNKNOWN_HOST",
	} {
		if got := said(x.Decide(rules.Request{Method: "GET", Host: host, Path: "/"})); got != want {
			t.Errorf("%s: %s, want %s", host, got, want)
		}
	}
	if x.Upstream("c") != "http://c.internal" || x.Upstream("") != "http://old.internal:8080" || x.Upstream("b") != "" || !x.Knows("f") || x.Knows("d_") || !x.Knows("") || x.Cells() != 6 {
		t.Error("what the index knows of its cells is wrong")
	}
	// The caller's table is its own.
	table.Cells[2].Upstream, table.Cells[2].Issuers = "http://evil", []string{"j"}
	if x.Upstream("c") != "http://c.internal" {
		t.Error("the index changed with the caller's table")
	}
}

func FuzzDecide(f *testing.F) {
	for _, h := range hosts {
		for _, p := range paths {
			f.Add("POST", h.spell[0], p.spell[len(p.spell)-1], "Bearer "+iss("iss-b"), "", iss("iss-a"))
		}
	}
	for _, tok := range tokens {
		for _, a := range tok.spell {
			if len(a) > 0 {
				f.Add("GET", "shared.example.com", "/scim/v2/Groups", a[0], "x", "")
			}
		}
	}
	x, err := rules.NewIndex(own, world{first: "serving"}.table())
	if err != nil {
		f.Fatal(err)
	}
	known := map[cells.Code]bool{"": true, cells.CodeNotServed: true, cells.CodeUnknownHost: true, cells.CodeUnknownIssuer: true, cells.CodeBadRequest: true}
	f.Fuzz(func(t *testing.T, method, host, path, auth, second, revoked string) {
		r := rules.Request{Method: method, Host: host, Path: path, Authorization: []string{auth}, Revoked: revoked}
		if second != "" {
			r.Authorization = append(r.Authorization, second)
		}
		d := x.Decide(r)
		if !known[d.Answer] || (d.Answer == "") == (d.Upstream == "") {
			t.Fatalf("%+v: %+v", r, d)
		}
		// A cell is reached by its host, or on the shared host by an issuer of its own, or as
		// the first one.
		onShared := r
		onShared.Host = "shared.example.com"
		switch ds := x.Decide(onShared); {
		case ds.Answer == cells.CodeUnknownHost:
			t.Fatalf("%+v: the shared host is not known", onShared)
		case d.Rule == rules.RuleHost || d.Rule == rules.RuleOwn:
			plain := x.Decide(rules.Request{Host: host, Path: path})
			if plain != (rules.Decision{}) && (plain.Cell != d.Cell || plain.Answer != d.Answer) {
				t.Fatalf("%+v: a token changes rule 1: %+v, %+v", r, d, plain)
			}
		case ds.Cell != d.Cell || ds.Answer != d.Answer:
			t.Fatalf("%+v: an alias is decided otherwise: %+v, %+v", r, d, ds)
		case d.Cell != "a" && d.Rule != rules.RuleIssuer:
			t.Fatalf("%+v: %+v", r, d)
		}
	})
}
