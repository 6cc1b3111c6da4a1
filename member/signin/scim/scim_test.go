// SPDX-License-Identifier: Apache-2.0

package scim_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	guard "github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/scim"
	"github.com/cloister-dev/cloister/member/signin/sqlite"
	"github.com/cloister-dev/cloister/member/tenancy"
)

const (
	token   = "lsc_a_0123456789abcdef0123456789abcdef"
	unnamed = "an-unnamed-token-of-old"
)

// service is a cell's SCIM on a real store.
type service struct {
	testing.TB
	*scim.Handler
	store signin.Store
	first atomic.Pointer[guard.First]
	held  map[cells.TenantID]error
}

func newService(t testing.TB) *service {
	store, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	tokens, err := scim.NewTokens("a", []string{token, unnamed})
	if err != nil {
		t.Fatal(err)
	}
	s := &service{TB: t, store: store, held: map[cells.TenantID]error{}}
	s.first.Store(&guard.First{First: false, Cell: "a"})
	s.Handler, err = scim.New(scim.Config{Store: store, Tokens: tokens, BaseURL: "https://a.example",
		First: func(context.Context) *guard.First { return s.first.Load() },
		Verify: func(_ context.Context, raw string) (tenancy.Principal, error) {
			if tenant, ok := strings.CutPrefix(raw, "jwt.x."); ok {
				return tenancy.Principal{Tenant: cells.TenantID(tenant)}, nil
			}
			return tenancy.Principal{}, &cells.Answer{Code: cells.CodeUnknownIssuer}
		},
		Held: func(_ context.Context, t cells.TenantID, _ *tenancy.Principal) error { return s.held[t] }})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// do sends a request and returns the status and the document.
func (s *service) do(method, path, bearer, body string, header ...string) (int, map[string]any, http.Header) {
	s.Helper()
	r := httptest.NewRequestWithContext(s.Context(), method, "/scim/v2/"+path, strings.NewReader(body))
	if bearer != "" {
		r.Header.Set("Authorization", "Bearer "+bearer)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	out := map[string]any{}
	if w.Body.Len() > 0 {
		if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil {
			s.Fatalf("%s %s: %d %s", method, path, w.Code, w.Body)
		}
	}
	return w.Code, out, w.Result().Header
}

func (s *service) want(status int, method, path, body string, header ...string) map[string]any {
	s.Helper()
	got, doc, _ := s.do(method, path, token, body, header...)
	if got != status {
		s.Errorf("%s %s %s: %d %v, want %d", method, path, body, got, doc, status)
	}
	return doc
}

// row is what counts of an email: active, inactive or none.
func (s *service) row(email string) string {
	s.Helper()
	k, err := signin.KeyOf(email)
	if err != nil {
		s.Fatal(err)
	}
	rows, err := s.store.Rows(s.Context(), []signin.EmailKey{k})
	switch {
	case err != nil || len(rows) > 1:
		s.Fatal(rows, err)
	case len(rows) == 0:
		return "none"
	case rows[0].Active:
		return "active"
	}
	return "inactive"
}

func (s *service) is(email, want string) {
	s.Helper()
	if got := s.row(email); got != want {
		s.Errorf("%s is %s, want %s", email, got, want)
	}
}

const (
	userSchema = `"schemas":["urn:ietf:params:scim:schemas:core:2.0:User"]`
	patchOp    = `{"schemas":["urn:ietf:params:scim:api:messages:2.0:PatchOp"],"Operations":[`
)

// What identity providers send in the life of a person.
func TestUsers(t *testing.T) {
	s := newService(t)
	if doc := s.want(200, "GET", `Users?filter=userName%20eq%20%22ann%40x.org%22`, ""); doc["totalResults"] != 0.0 {
		t.Errorf("before: %v", doc)
	}
	doc := s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"Ann@x.org","externalId":"00u1","active":true,"password":"hunter2","name":{"givenName":"Ann"},"emails":[{"value":"ann@x.org","primary":true,"type":"work"},{"value":"ann@work.org","type":"work"}]}`)
	id, _ := doc["id"].(string)
	meta, _ := doc["meta"].(map[string]any)
	if id == "" || doc["externalId"] != "00u1" || doc["password"] != nil || meta["location"] != "https://a.example/scim/v2/Users/"+id {
		t.Errorf("made: %v", doc)
	}
	s.is("ann@x.org", "active")
	s.is("ann@work.org", "none")
	if u, err := s.store.User(t.Context(), id); err != nil || strings.Contains(string(u.Attributes), "hunter2") {
		t.Errorf("stored: %s, %v", u.Attributes, err)
	}
	for _, filter := range []string{`userName%20eq%20%22ANN%40X.ORG%22`, `externalId%20eq%20%2200u1%22`, `emails%5Bvalue%20eq%20%22ann%40work.org%22%5D`, `active%20eq%20true%20and%20name.givenName%20sw%20%22A%22`} {
		if doc := s.want(200, "GET", "Users?filter="+filter, ""); doc["totalResults"] != 1.0 {
			t.Errorf("%s: %v", filter, doc)
		}
	}
	if doc := s.want(409, "POST", "Users", `{`+userSchema+`,"userName":"ann@X.org"}`); doc["scimType"] != "uniqueness" {
		t.Errorf("twice: %v", doc)
	}
	work, err := signin.KeyOf("ann@work.org")
	if err != nil {
		t.Fatal(err)
	}
	if of, err := s.store.WorkOf(t.Context(), work); err != nil || len(of) != 1 {
		t.Errorf("the work address: %v, %v", of, err)
	}
	at := "Users/" + id
	// Okta deactivates with a value, Entra with a path.
	s.want(200, "PATCH", at, patchOp+`{"op":"replace","value":{"active":false}}]}`)
	s.is("ann@x.org", "inactive")
	s.want(200, "PATCH", at, patchOp+`{"op":"Replace","path":"active","value":true}]}`)
	s.is("ann@x.org", "active")
	s.want(200, "PATCH", at, patchOp+`{"op":"replace","path":"name.familyName","value":"Other"},{"op":"add","path":"emails[type eq \"home\"].value","value":"ann@home.org"},{"op":"replace","path":"externalId","value":"00u2"}]}`)
	doc = s.want(200, "GET", at, "")
	name, _ := doc["name"].(map[string]any)
	list, _ := doc["emails"].([]any)
	if name["familyName"] != "Other" || name["givenName"] != "Ann" || len(list) != 3 || doc["externalId"] != "00u2" {
		t.Errorf("patched: %v", doc)
	}
	s.want(200, "PATCH", at, patchOp+`{"op":"remove","path":"emails[type eq \"home\"]"}]}`)
	// Another email: the one before is deleted.
	s.want(200, "PUT", at, `{`+userSchema+`,"userName":"ann@new.org","active":true}`)
	s.is("ann@x.org", "inactive")
	s.is("ann@new.org", "active")
	s.want(204, "DELETE", at, "")
	s.is("ann@new.org", "inactive")
	s.want(404, "GET", at, "")
	s.want(404, "DELETE", at, "")
	again := s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"ann@new.org","active":false}`)
	s.is("ann@new.org", "inactive")
	// What leaves active out brings nobody back.
	s.want(200, "PUT", "Users/"+again["id"].(string), `{`+userSchema+`,"userName":"ann@new.org"}`)
	s.is("ann@new.org", "inactive")
	s.want(200, "PATCH", "Users/"+again["id"].(string), patchOp+`{"op":"remove","path":"active"}]}`)
	s.is("ann@new.org", "inactive")
	s.want(200, "PUT", "Users/"+again["id"].(string), `{`+userSchema+`,"userName":"ann@new.org","active":"True"}`)
	s.is("ann@new.org", "active")
	for what, body := range map[string]string{
		"no email": `{` + userSchema + `,"userName":"ann"}`, "a bad email": `{` + userSchema + `,"userName":"b@x.org","emails":[{"value":"b"}]}`,
		"two primary": `{` + userSchema + `,"userName":"b","emails":[{"value":"b@x.org","primary":true},{"value":"c@x.org","primary":true}]}`,
		"no name":     `{` + userSchema + `}`, "a text for a flag": `{` + userSchema + `,"userName":"b@x.org","active":"yes"}`, "no JSON": `{`, "a list": `[]`, "nothing": ``,
	} {
		if doc := s.want(400, "POST", "Users", body); doc["status"] != "400" {
			t.Errorf("%s: %v", what, doc)
		}
	}
	s.is("b@x.org", "none")
	for _, body := range []string{patchOp + `{"op":"replace","path":"emails[","value":1}]}`, patchOp + `{"op":"explode","path":"active","value":true}]}`, patchOp + `]}`, `{}`,
		patchOp + `{"op":"replace","path":"active","value":"x"}]}`, patchOp + `{"op":"replace","path":"id","value":"x"}]}`, patchOp + `{"op":"replace","path":"emails[type eq \"none\"].display","value":1}]}`} {
		s.want(400, "PATCH", "Users/"+again["id"].(string), body)
	}
	for _, name := range []string{"p1", "p2", "p3"} {
		s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"`+name+`@page.org"}`)
	}
	for query, want := range map[string]int{"": 3, "&count=2": 2, "&startIndex=2&count=1": 1, "&startIndex=3": 1, "&startIndex=4": 0, "&count=0": 0} {
		doc := s.want(200, "GET", "Users?filter=userName%20ew%20%22%40page.org%22"+query, "")
		if list, _ := doc["Resources"].([]any); len(list) != want || doc["totalResults"] != 3.0 || doc["Resources"] == nil {
			t.Errorf("page %s: %v", query, doc)
		}
	}
	s.want(400, "GET", "Users?filter=userName%20xx%201", "")
	s.want(200, "GET", "ServiceProviderConfig", "")
	s.want(404, "GET", "Elsewhere", "")
}

// Groups belong to a tenant, which is checked before anything is read or written.
func TestGroups(t *testing.T) {
	s := newService(t)
	s.held["gone"] = &cells.Answer{Code: cells.CodeWrongCell}
	s.held["down"] = errors.New("no answer")
	const group = `{"schemas":["urn:ietf:params:scim:schemas:core:2.0:Group"],"displayName":"Admins","members":[{"value":"u1"}]}`
	s.want(400, "POST", "Groups", group)
	doc := s.want(201, "POST", "Groups", group, "X-Tenant", "t1")
	id := doc["id"].(string)
	s.want(409, "POST", "Groups", group, "X-Tenant", "t1")
	s.want(404, "GET", "Groups/"+id, "", "X-Tenant", "t2")
	s.want(200, "PATCH", "Groups/"+id, patchOp+`{"op":"add","path":"members","value":[{"value":"u2"},{"value":"u1"}]}]}`, "X-Tenant", "t1")
	doc = s.want(200, "GET", "Groups/"+id, "", "X-Tenant", "t1")
	if list, _ := doc["members"].([]any); len(list) != 2 {
		t.Errorf("members: %v", doc)
	}
	s.want(200, "PATCH", "Groups/"+id, patchOp+`{"op":"remove","path":"members[value eq \"u1\"]"}]}`, "X-Tenant", "t1")
	doc = s.want(200, "GET", "Groups/"+id, "", "X-Tenant", "t1")
	if list, _ := doc["members"].([]any); len(list) != 1 {
		t.Errorf("members: %v", doc)
	}
	for tenant, status := range map[string]int{"gone": 409, "down": 503, "a b": 400} {
		s.want(status, "POST", "Groups", group, "X-Tenant", tenant)
	}
	// A tenant's token reads its groups, and writes none.
	for _, c := range []struct {
		method, path, tenant string
		status               int
	}{{"GET", "Groups", "t1", 200}, {"GET", "Groups/" + id, "t1", 200}, {"GET", "Groups/" + id, "t2", 403}, {"POST", "Groups", "t1", 403}, {"PUT", "Groups/" + id, "t1", 403}, {"DELETE", "Groups/" + id, "t1", 403}} {
		if code, doc, _ := s.do(c.method, c.path, "jwt.x.t1", group, "X-Tenant", c.tenant); code != c.status {
			t.Errorf("%s %s in %s by the token of a tenant: %d %v", c.method, c.path, c.tenant, code, doc)
		}
	}
	if code, _, _ := s.do("GET", "Users", "jwt.x.t2", ""); code != 401 {
		t.Errorf("users by a tenant's token: %d", code)
	}
	s.want(204, "DELETE", "Groups/"+id, "", "X-Tenant", "t1")
}

// Tokens are a cell's own.
func TestTokens(t *testing.T) {
	secret := strings.Repeat("0123456789abcdef", 2)
	s := newService(t)
	ask := func(what, bearer string, want int) {
		t.Helper()
		if code, doc, h := s.do("GET", "Users", bearer, ""); code != want || (want == 503) != (h.Get("Retry-After") != "") {
			t.Errorf("%s: %d %v, want %d", what, code, doc, want)
		}
	}
	ask("its own", token, 200)
	ask("none", "", 401)
	ask("another secret", "lsc_a_"+strings.Repeat("f", 32), 401)
	ask("another cell's", "lsc_b_"+secret, 401)
	ask("a longer name's", "lsc_a-b_"+secret, 401)
	ask("a malformed one", "lsc_a_"+strings.ToUpper(secret), 401)
	ask("a shorter one", token[:len(token)-1], 401)
	ask("one that names no cell, in a later cell", unnamed, 401)
	s.first.Store(&guard.First{First: true, Cell: "a"})
	ask("one that names no cell, in the first", unnamed, 200)
	ask("its own, in the first", token, 200)
	s.first.Store(&guard.First{First: true, Cell: "b"})
	ask("in a cell whose first row is another's", unnamed, 401)
	s.first.Store(nil)
	ask("the first row is not read", token, 503)
	if code, _, _ := s.do("POST", "Users", token, `{`+userSchema+`,"userName":"eve@x.org"}`); code != 503 || s.row("eve@x.org") != "none" {
		t.Errorf("written before the first row is read: %d", code)
	}

	for what, c := range map[string]struct {
		cell   cells.CellID
		tokens []string
		word   string
	}{
		"another cell's":        {"a", []string{"lsc_b_" + secret}, "names cell b"},
		"a longer name's":       {"a", []string{"lsc_a-b_" + secret}, "names cell a-b"},
		"malformed":             {"a", []string{"lsc_a_" + secret[1:]}, "malformed"},
		"malformed, without":    {"", []string{"lsc_A_" + secret}, "malformed"},
		"of four fields":        {"a", []string{"lsc_a_b_" + secret}, "malformed"},
		"a third":               {"a", []string{token, token + "0", token + "1"}, "3 SCIM tokens"},
		"a short one, no cell":  {"", []string{"short"}, "fewer than"},
		"a short one in a cell": {"a", []string{"short"}, "fewer than"},
	} {
		_, err := scim.NewTokens(c.cell, c.tokens)
		if !errors.Is(err, cells.ErrInvalid) || !strings.Contains(err.Error(), c.word) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := scim.Problems("a", []string{unnamed}, &guard.First{Cell: "a"}); len(got) != 1 {
		t.Errorf("a token that names no cell, in a later one: %q", got)
	}
	if got := scim.Problems("a", []string{unnamed}, &guard.First{First: true, Cell: "a"}); got != nil {
		t.Errorf("in the first: %q", got)
	}
	alone, err := scim.NewTokens("", []string{unnamed, "lsc_x_" + secret})
	if err != nil {
		t.Fatal(err)
	}
	for presented, want := range map[string]bool{unnamed: true, "lsc_x_" + secret: false, "": false} {
		if ok, err := alone.Authorized(presented, nil); ok != want && presented != "lsc_x_"+secret || err != nil {
			t.Errorf("a deployment that is no cell, %q: %t, %v", presented, ok, err)
		}
	}
}

// A store that does not answer is no verdict on a person.
func TestStoreDoesNotAnswer(t *testing.T) {
	s := newService(t)
	doc := s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"ann@x.org"}`)
	_ = s.store.Close()
	for _, c := range []struct{ method, path, body string }{{"GET", "Users/" + doc["id"].(string), ""}, {"GET", "Users", ""}, {"POST", "Users", `{` + userSchema + `,"userName":"b@x.org"}`},
		{"PATCH", "Users/" + doc["id"].(string), patchOp + `{"op":"replace","path":"active","value":false}]}`}, {"DELETE", "Users/" + doc["id"].(string), ""}} {
		if code, _, h := s.do(c.method, c.path, token, c.body); code != 503 || h.Get("Retry-After") == "" {
			t.Errorf("%s %s: %d", c.method, c.path, code)
		}
	}
}

// FuzzPatch sends any patch to a user: it is answered, and what is stored then can be
// read again.
func FuzzPatch(f *testing.F) {
	s := newService(f)
	doc := s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"ann@x.org","emails":[{"value":"ann@x.org","type":"work"}]}`)
	at := "Users/" + doc["id"].(string)
	for _, op := range []string{`{"op":"replace","path":"active","value":false}`, `{"op":"add","path":"emails[type eq \"x\"].value","value":"b@x.org"}`, `{"op":"remove","path":"emails[value ew \"x\" or not (type pr)]"}`,
		`{"op":"add","value":{"emails":[{"value":"c@x.org"}],"name":{}}}`, `{"op":"remove","path":"name.givenName"}`, `{"op":"replace","path":"emails.type","value":null}`, `{"op":"add","path":"urn:ietf:params:scim:schemas:core:2.0:User:title","value":"x"}`,
		`{"op":"add","value":{"urn:ietf:params:scim:schemas:core:2.0:User":{"name.givenName":"x"},"emails[type eq \"x\"].value":"d@x.org"}}`} {
		f.Add(op)
	}
	f.Fuzz(func(t *testing.T, op string) {
		s.TB = t
		if code, doc, _ := s.do("PATCH", at, token, patchOp+op+`]}`); code != 200 && code != 204 && code != 400 && code != 409 && code != 413 {
			t.Fatalf("%s: %d %v", op, code, doc)
		}
		if code, doc, _ := s.do("GET", at, token, ""); code != 200 {
			t.Fatalf("after %s: %d %v", op, code, doc)
		}
	})
}

// FuzzFilter sends any filter.
func FuzzFilter(f *testing.F) {
	s := newService(f)
	s.want(201, "POST", "Users", `{`+userSchema+`,"userName":"ann@x.org","emails":[{"value":"ann@x.org","type":"work"}],"name":{"givenName":"A"}}`)
	for _, q := range []string{`userName eq "x"`, `emails[type eq "work" and value co "@"]`, `not (active eq true)`, `meta.created gt "2020-01-01T00:00:00Z"`, `name.givenName pr or id ne "x"`, `((((`, `a.b.c eq 1`} {
		f.Add(q)
	}
	f.Fuzz(func(t *testing.T, q string) {
		s.TB = t
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/scim/v2/Users", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		v := r.URL.Query()
		v.Set("filter", q)
		r.URL.RawQuery = v.Encode()
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != 200 && w.Code != 400 && w.Code != 413 {
			t.Fatalf("%q: %d %s", q, w.Code, w.Body)
		}
	})
}

// FuzzToken: a token names its cell in one way only.
func FuzzToken(f *testing.F) {
	for _, s := range []string{token, unnamed, "lsc_", "lsc_a-b_" + token[6:], "lsc__" + token[6:]} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		cell, err := tenancy.SCIMTokenCell(s)
		if err != nil || cell == "" {
			if err == nil && strings.HasPrefix(s, "lsc_") {
				t.Fatalf("%q names no cell", s)
			}
			return
		}
		parts := strings.Split(s, "_")
		if len(parts) != 3 || parts[0] != "lsc" || parts[1] != string(cell) || cell.Validate() != nil || len(parts[2]) < 32 || strings.Trim(parts[2], "0123456789abcdef") != "" {
			t.Fatalf("%q names %q", s, cell)
		}
	})
}
