// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"bufio"
	"encoding/base64"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

// request parses a raw request as a server does.
func request(t testing.TB, raw string) *http.Request {
	t.Helper()
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.ReplaceAll(raw, "\n", "\r\n") + "\r\n\r\n")))
	if err != nil {
		t.Fatalf("request %q: %v", raw, err)
	}
	return r
}

func list(t testing.TB, doc string) *List {
	t.Helper()
	specs, err := Parse([]byte(doc))
	if err != nil {
		t.Fatal(err)
	}
	l, err := New(specs)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func unsigned(claims string) string {
	e := base64.RawURLEncoding.EncodeToString
	return e([]byte(`{"alg":"ES256"}`)) + "." + e([]byte(claims)) + "." + e([]byte("x"))
}

func TestResolve(t *testing.T) {
	all := `extractors:
  - header: x-tenant
    strip: true
  - host: "{tenant}.Example.com"
  - path: /t/{tenant}/...
    strip: true
  - jwt: {claim: org}
  - jwt: {claim: /acct/id, header: X-Token}
  - issuers: {"https://id.acme.example": acme}
`
	jwtOf := func(claims string) string {
		return "GET / HTTP/1.1\nHost: h\nAuthorization: bearer " + unsigned(claims)
	}
	for _, c := range []struct {
		name, doc, raw string
		tenant         cells.TenantID
		kind           string
		stripPath      string
		code           cells.Code
	}{
		{"header", all, "GET / HTTP/1.1\nHost: a.example.com\nX-Tenant: acme", "acme", "header", "", ""},
		{"header twice", all, "GET / HTTP/1.1\nHost: a.example.com\nX-Tenant: acme\nx-tenant: acme", "", "", "", cells.CodeBadRequest},
		{"header list", all, "GET / HTTP/1.1\nHost: h\nX-Tenant: a,b", "", "", "", cells.CodeInvalidTenant},
		{"header empty", all, "GET / HTTP/1.1\nHost: h\nX-Tenant:", "", "", "", cells.CodeInvalidTenant},
		{"header long", all, "GET / HTTP/1.1\nHost: h\nX-Tenant: " + strings.Repeat("a", 129), "", "", "", cells.CodeInvalidTenant},
		{"header bytes", all, "GET / HTTP/1.1\nHost: h\nX-Tenant: ac\u00e9", "", "", "", cells.CodeInvalidTenant},
		{"host", all, "GET / HTTP/1.1\nHost: ACME.example.COM.:8080", "acme", "host", "", ""},
		{"host of two labels", all, "GET / HTTP/1.1\nHost: a.b.example.com", "", "", "", cells.CodeUnknownIssuer},
		{"host apex", all, "GET /t/acme/ HTTP/1.1\nHost: example.com", "acme", "path", "/t/acme", ""},
		{"host empty label", all, "GET /t/x/ HTTP/1.1\nHost: .example.com", "x", "path", "/t/x", ""},
		{"host suffix only", all, "GET /t/x/ HTTP/1.1\nHost: evilexample.com", "x", "path", "/t/x", ""},
		{"host address", all, "GET /t/x HTTP/1.1\nHost: [::1]:80", "x", "path", "/t/x", ""},
		{"path", all, "GET /t/acme/v1/a%2Fb HTTP/1.1\nHost: h", "acme", "path", "/t/acme", ""},
		{"path bare", all, "GET /t/acme?x=1 HTTP/1.1\nHost: h", "acme", "path", "/t/acme", ""},
		{"path encoded", all, "GET /%74/%61cme/%63ells/ HTTP/1.1\nHost: h", "acme", "path", "/%74/%61cme", ""},
		{"path encoded slash", all, "GET /t/a%2Fb/ HTTP/1.1\nHost: h", "", "", "", cells.CodeInvalidTenant},
		{"path elsewhere", `[{path: "/t/{tenant}"}]`, "GET /tt/acme/ HTTP/1.1\nHost: h", "", "", "", cells.CodeBadRequest},
		{"path no tenant", `[{path: "/t/{tenant}"}]`, "GET /t/ HTTP/1.1\nHost: h", "", "", "", cells.CodeBadRequest},
		{"path star", `[{path: "/{tenant}/"}]`, "OPTIONS * HTTP/1.1\nHost: h", "", "", "", cells.CodeBadRequest},
		{"jwt", all, jwtOf(`{"org":"acme"}`), "acme", "jwt", "", ""},
		{"jwt twice", all, jwtOf(`{"org":"acme","org":"bad"}`), "", "", "", cells.CodeBadRequest},
		{"jwt number", all, jwtOf(`{"org":7}`), "", "", "", cells.CodeBadRequest},
		{"jwt bad tenant", all, jwtOf(`{"org":"a b"}`), "", "", "", cells.CodeInvalidTenant},
		{"jwt pointer", all, "GET / HTTP/1.1\nHost: h\nX-Token: " + unsigned(`{"acct":{"id":"deep"}}`), "deep", "jwt", "", ""},
		{"authorization twice", all, jwtOf(`{"org":"acme"}`) + "\nAuthorization: Bearer x", "", "", "", cells.CodeBadRequest},
		{"token too long", all, "GET / HTTP/1.1\nHost: h\nAuthorization: Bearer a.b." + strings.Repeat("x", MaxToken), "", "", "", cells.CodeBadRequest},
		{"issuer", all, jwtOf(`{"iss":"https://id.acme.example"}`), "acme", "issuers", "", ""},
		{"issuer unknown", all, jwtOf(`{"iss":"https://evil.example"}`), "", "", "", cells.CodeUnknownIssuer},
		{"opaque token", `[{issuers: {i: acme}}, {fixed: demo}]`, "GET / HTTP/1.1\nHost: h\nAuthorization: Bearer opaque", "demo", "fixed", "", ""},
		{"issuer strict", `[{issuers: {i: acme}, strict: true}, {fixed: demo}]`, "GET / HTTP/1.1\nHost: h", "", "", "", cells.CodeUnknownIssuer},
		{"fixed after unknown issuer", `[{issuers: {i: acme}}, {fixed: demo}]`, jwtOf(`{"iss":"j"}`), "demo", "fixed", "", ""},
		{"hosts only", `[{host: "{tenant}.a.example"}, {host: "app-{tenant}.b.example"}]`, "GET / HTTP/1.1\nHost: b.example", "", "", "", cells.CodeUnknownHost},
		{"host affix", `[{host: "{tenant}.a.example"}, {host: "app-{tenant}.b.example"}]`, "GET / HTTP/1.1\nHost: app-x.b.example", "x", "host", "", ""},
		{"host strict", `[{host: "{tenant}.a.example", strict: true}, {fixed: demo}]`, "GET / HTTP/1.1\nHost: b.example", "", "", "", cells.CodeUnknownHost},
		{"nothing", `[{header: X-Tenant}]`, "GET / HTTP/1.1\nHost: h", "", "", "", cells.CodeBadRequest},
	} {
		t.Run(c.name, func(t *testing.T) {
			raw := c.raw
			if c.name == "host of two labels" {
				raw += "\nAuthorization: Bearer " + unsigned(`{"iss":"nobody"}`)
			}
			f, err := list(t, c.doc).Resolve(request(t, raw))
			if c.code != "" {
				if a := cells.AnswerOf(err); a == nil || a.Code != c.code {
					t.Fatalf("got %+v, %v; want %s", f, err, c.code)
				}
				return
			}
			if err != nil || f.Tenant != c.tenant || f.Kind != c.kind || f.StripPath != c.stripPath {
				t.Fatalf("got %+v, %v; want %s by %s, strip %q", f, err, c.tenant, c.kind, c.stripPath)
			}
			if f.Kind == "header" && f.StripHeader != "X-Tenant" {
				t.Fatalf("the header is not stripped: %+v", f)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, doc := range []string{
		"", "[]", "{}", "hello", "42", "- 42", "[{}]", "[{header: X-T, fixed: a}]", "[{head: X-T}]", "[{fixed: 42}]", "[{fixed: a b}]",
		"[{header: 'X T'}]", "[{header: Cell-Tenant}]", "[{header: cell-x}]", "[{header: Host}]", "[{header: Connection}]", "[{header: X-T, strict: true}]",
		"[{host: example.com}]", `[{host: "{tenant}.{tenant}.x"}]`, `[{host: "{tenant}.x:80"}]`, `[{host: "{tenant}..x"}]`, `[{host: "{tenant}.x", strip: true}]`,
		`[{host: "{tenant}.x."}]`, `[{path: "t/{tenant}"}]`, `[{path: "/t/{tenant}/v1"}]`, `[{path: "/t/x{tenant}/"}]`, `[{path: "//{tenant}"}]`, `[{path: "/../{tenant}"}]`,
		`[{path: "/CELLS/{tenant}"}]`, `[{path: "/%74/{tenant}"}]`, "[{jwt: {}}]", "[{jwt: {claim: a, algorithms: [RS256]}}]", "[{jwt: {claim: a, jwks: x, algorithms: [none]}}]",
		"[{jwt: {claim: a, jwks: x, algorithms: [HS256]}}]", "[{jwt: {claim: a, issuer: x}}]", "[{jwt: {claim: a, header: Cell-X}}]", "[{issuers: {}}]", "[{issuers: {a: 'b c'}}]",
		"[{fixed: a, fixed: b}]", "extractors: [{fixed: a}]\nother: 1", "[{fixed: a}]\n---\n[{fixed: b}]", "a: &a [*a]",
		"[" + strings.Repeat("{fixed: a},", MaxSpecs+1) + "]",
	} {
		if specs, err := Parse([]byte(doc)); err == nil {
			t.Errorf("%q was accepted as %+v", doc, specs)
		} else if !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%q: %v does not wrap ErrInvalid", doc, err)
		}
	}
	if _, err := New(nil); !errors.Is(err, cells.ErrInvalid) {
		t.Error("an empty list was accepted")
	}
}

func TestRulesAndWays(t *testing.T) {
	l := list(t, `[{header: X-Tenant}, {path: "/t/{tenant}"}]`)
	if got := strings.Join(l.Rules(), "|"); got != "header X-Tenant|path /t/{tenant}/" {
		t.Fatal(got)
	}
	_, err := l.Resolve(request(t, "GET / HTTP/1.1\nHost: h"))
	if a := cells.AnswerOf(err); a == nil || !strings.Contains(a.Detail, "header X-Tenant, path /t/{tenant}/") {
		t.Fatal(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("extractors: [{header: X-Tenant}, {host: \"{tenant}.localhost\"}, {path: \"/t/{tenant}/\"}, {jwt: {claim: org}}]")
	f.Add(`[{"issuers":{"https://a":"b"},"strict":true},{"fixed":"x"}]`)
	f.Fuzz(func(t *testing.T, doc string) {
		specs, err := Parse([]byte(doc))
		if err != nil {
			if !errors.Is(err, cells.ErrInvalid) {
				t.Fatalf("%v does not wrap ErrInvalid", err)
			}
			return
		}
		for i := range specs {
			if err := specs[i].Validate(); err != nil {
				t.Fatalf("accepted, then refused: %v", err)
			}
		}
	})
}

func FuzzResolve(f *testing.F) {
	f.Add("/t/acme/x", "acme.example.com", "acme", "Bearer "+unsigned(`{"org":"x"}`))
	f.Add("/%74/%2e", "[::1]", "", "Bearer a.b.c")
	l := list(f, `[{host: "{tenant}.example.com"}, {header: X-Tenant}, {path: "/t/{tenant}/", strip: true}, {jwt: {claim: /a/b}}, {issuers: {i: acme}}]`)
	f.Fuzz(func(t *testing.T, path, host, header, auth string) {
		r, err := http.NewRequest("GET", "http://h/", nil)
		if err != nil {
			t.Fatal(err)
		}
		u, err := r.URL.Parse(path)
		if err != nil {
			return
		}
		r.URL, r.Host = u, host
		r.Header = http.Header{"X-Tenant": {header}, "Authorization": {auth}}
		found, err := l.Resolve(r)
		if err != nil {
			if cells.AnswerOf(err) == nil {
				t.Fatalf("%v is no answer", err)
			}
			return
		}
		if err := found.Tenant.Validate(); err != nil {
			t.Fatalf("found an invalid tenant: %v", err)
		}
		rest, ok := strings.CutPrefix(r.URL.EscapedPath(), found.StripPath)
		if !ok || found.StripPath != "" && rest != "" && rest[0] != '/' {
			t.Fatalf("cannot strip %q from %q", found.StripPath, r.URL.EscapedPath())
		}
	})
}
