// SPDX-License-Identifier: Apache-2.0

package httpapi_test

import (
	"errors"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	directoryclient "github.com/cloister-dev/cloister/directory/client"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/client"
	"github.com/cloister-dev/cloister/directory/deploy/httpapi"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/tenancy/probe"
)

// A cell is registered only when its probe listener answers what the registration says.
func TestRegister(t *testing.T) {
	r := newRouter(t)
	ctx := t.Context()
	second := r.deploy("two", secondProbe)
	_, err := r.op.Register(ctx, "two", second)
	r.want(err, cells.CodeNoCell, "a later cell before the first")
	first := r.deploy("one", firstProbe)
	refused := func(what string, want cells.Code, change func(*wire.Register)) {
		t.Helper()
		reg := first
		change(&reg)
		_, err := r.op.Register(ctx, "one", reg)
		r.want(err, want, what)
	}
	refused("a probe address for the first cell", cells.CodeBadRequest, func(q *wire.Register) { q.ProbeURL = firstProbe })
	refused("another deployment", cells.CodeConflict, func(q *wire.Register) { q.DeploymentID = string(stores.NewDeploymentID()) })
	refused("a copy of the stores", cells.CodeConflict, func(q *wire.Register) { q.Nonces = map[stores.Kind]stores.Nonce{"postgres": stores.NewNonce()} })
	refused("a store left out", cells.CodeConflict, func(q *wire.Register) { q.Nonces = map[stores.Kind]stores.Nonce{"s3": r.nonces["postgres"]} })
	refused("no nonces", cells.CodeBadRequest, func(q *wire.Register) { q.Nonces = nil })
	refused("no bucket, of a cell that has one", cells.CodeConflict, func(q *wire.Register) { q.Bucket, q.Prefix = "", "" })
	refused("a credential in place of its hash", cells.CodeBadRequest, func(q *wire.Register) { q.CredentialSHA256 = r.tokens["one"] })
	r.cells.set(func(d *deployments) { d.err = &cells.Answer{Code: cells.CodeProbeBusy, RetryAfter: time.Second} })
	refused("a busy listener", cells.CodeProbeBusy, func(*wire.Register) {})
	r.cells.set(func(d *deployments) { d.err = errors.New("no route to host") })
	refused("a listener that is away", cells.CodeProbeUnreachable, func(*wire.Register) {})
	r.cells.set(func(d *deployments) { d.err, d.ports[upstream] = nil, stores.NewDeploymentID() })
	refused("another deployment behind the shared host", cells.CodeConflict, func(*wire.Register) {})
	r.cells.set(func(d *deployments) { d.ports[upstream] = r.ids["one"] })
	if v, err := r.op.Directory(ctx); err != nil || len(v.Cells) != 0 {
		t.Fatalf("refusals left %+v, %v", v, err)
	}
	c, err := r.op.Register(ctx, "one", first)
	if err != nil || !c.First || c.Upstream != upstream || c.ProbeURL != firstProbe || c.State != deploy.Attaching || c.Mode != tenancy.Recording {
		t.Fatalf("the first cell: %+v, %v", c, err)
	}
	// A rerun changes nothing, and one that contradicts is refused before the probe.
	if again, err := r.op.Register(ctx, "one", first); err != nil || again.Revision != c.Revision {
		t.Errorf("a rerun: %+v, %v", again, err)
	}
	r.cells.set(func(d *deployments) { d.asked = 0 })
	refused("a rerun with another credential", cells.CodeConflict, func(q *wire.Register) { q.CredentialSHA256 = strings.Repeat("0", 64) })
	second.ProbeURL = "http://u:p@10.0.1.1:9000"
	_, err = r.op.Register(ctx, "two", second)
	r.want(err, cells.CodeBadRequest, "a password in an address")
	if r.cells.asked != 0 || strings.Contains(err.Error(), "u:p") {
		t.Errorf("%d probes; %v", r.cells.asked, err)
	}
	second.ProbeURL = secondProbe
	if c, err = r.op.Register(ctx, "two", second); err != nil || c.First || c.Mode != tenancy.Enforced || c.Upstream != "" {
		t.Errorf("a later cell: %+v, %v", c, err)
	}
}

// A lookup of a tenant that is placed nowhere is answered as one of the first cell's.
func TestLookup(t *testing.T) {
	r := newRouter(t, func(c *httpapi.Config) { c.LookupsPerMinute = 9 })
	ctx := t.Context()
	lookup := func(tenant cells.TenantID) (wire.Lookup, error) { return client.Lookup(ctx, r.url, tenant, 0) }
	_, err := lookup("t")
	r.want(err, cells.CodeNoCell, "before the first cell")
	r.two("held")
	if _, err := r.cell("two", r.url).Place(ctx, "other", *r.fingerprint("two", "two.example.com")); err != nil {
		t.Fatal(err)
	}
	read := func(tenant string) (int, string, http.Header) {
		resp := r.raw(http.MethodGet, wire.PathLookup+"?tenant="+tenant, "")
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		h := maps.Clone(map[string][]string(resp.Header))
		delete(h, "Date")
		delete(h, "Cell-Request-Id")
		return resp.StatusCode, strings.ReplaceAll(string(b), tenant, "TTTT"), h
	}
	s1, b1, h1 := read("held")
	s2, b2, h2 := read("none")
	if s1 != http.StatusOK || s1 != s2 || b1 != b2 || len(h1) != len(h2) || !strings.Contains(b1, `"cell":"one"`) || !strings.Contains(b1, shared) {
		t.Errorf("placed: %d %s %v\nnowhere: %d %s %v", s1, b1, h1, s2, b2, h2)
	}
	if l, err := lookup("other"); err != nil || l.Cell != "two" || l.Host != "two.example.com" {
		t.Errorf("%+v, %v", l, err)
	}
	_, err = lookup("*")
	r.want(err, cells.CodeInvalidTenant, "tenant *")
	// Without the directory only tenants that are placed, and were asked for, are known.
	r.store.away.Store(true)
	for tenant, want := range map[cells.TenantID]cells.Code{"held": "", "other": ""} {
		_, err := lookup(tenant)
		r.want(err, want, string(tenant))
	}
	if s, b, _ := read("none"); s != http.StatusServiceUnavailable || !strings.Contains(b, string(cells.CodeBackendUnavailable)) {
		t.Errorf("nowhere, without the directory: %d %s", s, b)
	}
	_, err = lookup("late")
	r.want(err, cells.CodeBackendUnavailable, "not asked for before")
	_, err = lookup("held")
	a := cells.AnswerOf(err)
	if a == nil || a.Code != cells.CodeRateLimited || a.RetryAfter < time.Second || a.RetryAfter > time.Minute {
		t.Errorf("past the pace: %v", err)
	}
}

// A client that is past the pace asks again after the time that it is told, while it
// has time.
func TestLookupWaits(t *testing.T) {
	r := newRouter(t, func(c *httpapi.Config) { c.LookupsPerMinute = 60 })
	r.two("held")
	limited := false
	for range 10_000 { // the pace refills meanwhile
		_, err := client.Lookup(t.Context(), r.url, "held", 100*time.Millisecond)
		if limited = code(err) == cells.CodeRateLimited; limited || err != nil {
			break
		}
	}
	if !limited {
		t.Fatal("the pace was never passed")
	}
	if l, err := client.Lookup(t.Context(), r.url, "held", 30*time.Second); err != nil || l.Cell != "one" {
		t.Errorf("%+v, %v", l, err)
	}
}

func TestPlacement(t *testing.T) {
	r := newRouter(t)
	ctx := t.Context()
	r.two("held")
	f1, f2 := *r.fingerprint("one", shared), *r.fingerprint("two", "two.example.com")
	one, two := r.cell("one", r.url), r.cell("two", r.url)
	w, err := two.Place(ctx, "new", f2)
	if err != nil || !w.Created || w.Cell != "two" || w.DeploymentID != string(r.ids["two"]) {
		t.Fatalf("%+v, %v", w, err)
	}
	for what, place := range map[string]func() (wire.Winner, error){
		"a retry": func() (wire.Winner, error) { return two.Place(ctx, "new", f2) },
		"a loser": func() (wire.Winner, error) { return one.Place(ctx, "new", f1) },
		"an operator": func() (wire.Winner, error) {
			return r.op.Place(ctx, wire.Place{Tenant: "new", Cell: "one", Actor: "alice"})
		},
	} {
		if w, err := place(); err != nil || w.Created || w.Cell != "two" || w.DeploymentID != string(r.ids["two"]) {
			t.Errorf("%s: %+v, %v", what, w, err)
		}
	}
	_, err = two.Place(ctx, "another", f1)
	r.want(err, cells.CodeCellClosed, "a configuration that is not the cell's")
	// A credential of one cell places nothing in another.
	r.tokens["forged"] = r.tokens["two"]
	asOne, err := client.NewCell("one", r.url, r.tokens["two"])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(asOne.CloseIdleConnections)
	_, err = asOne.Place(ctx, "another", f1)
	r.want(err, cells.CodeUnauthenticated, "another cell's credential")
	token, _ := credential.Router.New()
	nobody, err := client.NewCell("two", r.url, token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nobody.CloseIdleConnections)
	_, err = nobody.Place(ctx, "another", f2)
	r.want(err, cells.CodeUnauthenticated, "nobody's credential")
	if _, err := r.store.Placement(ctx, "another"); !errors.Is(err, cells.ErrNotFound) {
		t.Errorf("refused calls placed the tenant: %v", err)
	}
	w, err = r.op.Place(ctx, wire.Place{Tenant: "by-op", Cell: "two", Fingerprint: &f2, Actor: "alice"})
	if err != nil || !w.Created || w.Cell != "two" {
		t.Errorf("an operator: %+v, %v", w, err)
	}
	list, err := r.op.Audit(ctx, directoryclient.AuditQuery{Tenant: "by-op", Limit: 10})
	if err != nil || len(list.Entries) != 1 || list.Entries[0].Peer != "operator" || list.Entries[0].Actor != "alice" || list.Entries[0].Action != "placement" {
		t.Errorf("audit %+v, %v", list, err)
	}
	if list, err = r.op.Audit(ctx, directoryclient.AuditQuery{Tenant: "new", Limit: 10}); err != nil || len(list.Entries) != 1 || list.Entries[0].Peer != "cell/two" {
		t.Errorf("audit %+v, %v", list, err)
	}
	// The state is the first cell's to read, with its own credential.
	if st, err := one.State(ctx); err != nil || st.State != deploy.Serving || st.Mode != tenancy.Enforced {
		t.Errorf("%+v, %v", st, err)
	}
	_, err = asOne.State(ctx)
	r.want(err, cells.CodeUnauthenticated, "the first cell's state with another's credential")
	_, err = two.State(ctx)
	r.want(err, cells.CodeForbidden, "a later cell's state")
	r.store.away.Store(true)
	_, err = one.State(ctx)
	r.want(err, cells.CodeBackendUnavailable, "the state without the directory")
	_, err = two.Place(ctx, "new", f2)
	var unknown *directoryclient.UnknownOutcomeError
	if !errors.As(err, &unknown) || code(err) != cells.CodeBackendUnavailable {
		t.Errorf("a placement without the directory: %v", err)
	}
}

// A cell's pace is its own at each replica; operators are not counted.
func TestPace(t *testing.T) {
	r := newRouter(t, func(c *httpapi.Config) { c.PlacementsPerMinute = 3 })
	ctx := t.Context()
	r.two("held")
	f2 := *r.fingerprint("two", "two.example.com")
	two := r.cell("two", r.url)
	for range 5 {
		if _, err := r.op.Place(ctx, wire.Place{Tenant: "held", Cell: "two"}); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		if _, err := two.Place(ctx, "held", f2); err != nil {
			t.Fatal(err)
		}
	}
	_, err := two.Place(ctx, "held", f2)
	a := cells.AnswerOf(err)
	if a == nil || a.Code != cells.CodeOverloaded || a.Code.HTTPStatus() != http.StatusServiceUnavailable || a.RetryAfter < time.Second || a.RetryAfter > time.Minute {
		t.Errorf("past the pace: %v", err)
	}
	if _, err := r.cell("one", r.url).Place(ctx, "held", *r.fingerprint("one", shared)); err != nil {
		t.Errorf("another cell: %v", err)
	}
	if _, err := r.op.Place(ctx, wire.Place{Tenant: "mine", Cell: "two", Fingerprint: &f2}); err != nil {
		t.Errorf("an operator: %v", err)
	}
	other := r.serve(httpapi.Config{Store: r.store})
	if _, err := r.cell("two", other).Place(ctx, "held", f2); err != nil {
		t.Errorf("another replica: %v", err)
	}
}

func TestCredentialRotation(t *testing.T) {
	r := newRouter(t, func(c *httpapi.Config) { c.Cache = time.Nanosecond })
	ctx := t.Context()
	r.two()
	f2 := *r.fingerprint("two", "two.example.com")
	old := r.cell("two", r.url)
	token, sum := credential.Router.New()
	next, err := client.NewCell("two", r.url, token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(next.CloseIdleConnections)
	step := func(want cells.Code, a wire.Action, hash string) {
		t.Helper()
		_, err := r.op.Credential(ctx, "two", wire.Credential{Action: a, SHA256: hash})
		r.want(err, want, string(a))
	}
	place := func(c *client.Cell, tenant cells.TenantID, want cells.Code) {
		t.Helper()
		_, err := c.Place(ctx, tenant, f2)
		r.want(err, want, string(tenant))
	}
	step(cells.CodeConflict, wire.Finish, "")
	step(cells.CodeConflict, wire.Revert, "")
	step(cells.CodeBadRequest, wire.Next, token)
	step(cells.CodeConflict, wire.Next, credential.Of(r.tokens["one"]).String())
	place(next, "a", cells.CodeUnauthenticated)
	step("", wire.Next, sum.String())
	step(cells.CodeConflict, wire.Next, strings.Repeat("1", 64))
	place(next, "a", "")
	place(old, "b", "")
	step("", wire.Revert, "")
	place(next, "c", cells.CodeUnauthenticated)
	step("", wire.Next, sum.String())
	step("", wire.Finish, "")
	place(old, "d", cells.CodeUnauthenticated)
	place(next, "d", "")
	// Finished too early: the old hash is recorded again.
	step("", wire.Next, credential.Of(r.tokens["two"]).String())
	step("", wire.Finish, "")
	place(old, "e", "")
}

// A cached credential that was dropped places nobody: the locked row decides.
func TestCachedCredentialPlacesNothing(t *testing.T) {
	r := newRouter(t, func(c *httpapi.Config) { c.Cache = time.Hour })
	ctx := t.Context()
	r.two("held")
	f2 := *r.fingerprint("two", "two.example.com")
	two := r.cell("two", r.url)
	if _, err := two.Place(ctx, "a", f2); err != nil {
		t.Fatal(err)
	}
	_, sum := credential.Router.New()
	for _, rule := range []deploy.Rule{deploy.NextCredential(sum.String()), deploy.EndCredential(true)} { // at another replica
		r.must(r.store.Store.Change(ctx, "two", rule, entry()))
	}
	if w, err := two.Place(ctx, "held", f2); err != nil || w.Cell != "one" {
		t.Errorf("a tenant that is placed, with a cached credential: %+v, %v", w, err)
	}
	_, err := two.Place(ctx, "b", f2)
	r.want(err, cells.CodeUnauthenticated, "a new tenant")
	if _, err := r.store.Placement(ctx, "b"); !errors.Is(err, cells.ErrNotFound) {
		t.Errorf("it is placed: %v", err)
	}
}

func TestOperators(t *testing.T) {
	r := newRouter(t)
	for _, path := range []string{"/directory", "/placements", "/audit", "/cells/one/limit", "/repoint"} {
		method := http.MethodGet
		if strings.HasPrefix(path, "/cells") || path == "/repoint" {
			method = http.MethodPost
		}
		token, _ := credential.Operator.New()
		router, _ := credential.Router.New()
		for _, auth := range []string{"", "Bearer " + token, "Bearer " + router, "Basic " + r.operators, "Bearer " + r.operators + "0"} {
			if resp := r.raw(method, wire.PathOperator+path, auth); resp.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s %.12q: %d", path, auth, resp.StatusCode)
			}
		}
	}
	for path, want := range map[string]int{"/cells/": 404, "/cells/v1/routes": 404, "/cells/v1/operator/": 404, "/cells/lookup/": 404, "/elsewhere": 404} {
		if resp := r.raw(http.MethodGet, path, "Bearer "+r.operators); resp.StatusCode != want || resp.Header.Get(cells.HeaderAnswer) != string(cells.CodeNotServed) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, resp.Header.Get(cells.HeaderAnswer))
		}
	}
	none := newRouter(t, func(c *httpapi.Config) { c.OperatorSHA256 = nil })
	_, err := none.op.Directory(t.Context())
	r.want(err, cells.CodeNoOperatorCredential, "without a credential configured")
	_, err = none.op.Place(t.Context(), wire.Place{Tenant: "t", Cell: "one"})
	r.want(err, cells.CodeNoOperatorCredential, "a placement without a credential configured")
	if _, err := httpapi.New(httpapi.Config{Store: r.store, OperatorSHA256: []string{r.operators}}); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), r.operators) {
		t.Errorf("a credential in place of its hash: %v", err)
	}
	for _, base := range []string{"http://192.0.2.1:80", "https://router/path", "ftp://router"} {
		if _, err := client.New(base, r.operators); !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), r.operators) {
			t.Errorf("%s: %v", base, err)
		}
	}
}

func TestLimitAndOutage(t *testing.T) {
	r := newRouter(t)
	ctx := t.Context()
	r.two("held")
	f2 := *r.fingerprint("two", "two.example.com")
	two := r.cell("two", r.url)
	yes, no, zero, none := true, false, int64(0), int64(-1)
	limit := func(q wire.Limit) { r.Helper(); r.must(r.op.Limit(ctx, "two", q)) }
	limit(wire.Limit{Closed: &yes})
	_, err := two.Place(ctx, "a", f2)
	r.want(err, cells.CodeCellClosed, "closed")
	limit(wire.Limit{Closed: &no, PlacementsMax: &zero})
	_, err = two.Place(ctx, "a", f2)
	r.want(err, cells.CodeCellClosed, "full")
	limit(wire.Limit{PlacementsMax: &none})
	if _, err := two.Place(ctx, "a", f2); err != nil {
		t.Error(err)
	}
	_, err = r.op.Limit(ctx, "three", wire.Limit{Closed: &yes})
	r.want(err, cells.CodeNoCell, "no such cell")
	r.store.away.Store(true)
	var unknown *directoryclient.UnknownOutcomeError
	if _, err := r.op.Limit(ctx, "two", wire.Limit{Closed: &yes}); !errors.As(err, &unknown) {
		t.Errorf("without the directory: %v", err)
	}
	if _, err := r.op.Credential(ctx, "two", wire.Credential{Action: wire.Finish}); !errors.As(err, &unknown) {
		t.Errorf("without the directory: %v", err)
	}
	if _, err := r.op.Directory(ctx); errors.As(err, &unknown) || code(err) != cells.CodeBackendUnavailable {
		t.Errorf("a read without the directory: %v", err)
	}
}

var _ httpapi.Prober = (*probe.Client)(nil)
