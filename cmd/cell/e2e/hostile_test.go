// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	deploywire "github.com/cloister-dev/cloister/directory/deploy/wire"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// sql runs a statement as an old program does: without the marker.
func (s *service) sql(query string, args ...any) error {
	s.Helper()
	c, err := pgx.Connect(s.Context(), s.settings["CELL_DSN"])
	if err != nil {
		s.Fatal(err)
	}
	defer c.Close(s.Context())
	_, err = c.Exec(s.Context(), query, args...)
	return err
}

// holdings is what a cell has of tenants: its items, and its tenancy rows.
func (s *service) holdings() string {
	s.Helper()
	c, err := pgx.Connect(s.Context(), s.settings["CELL_DSN"])
	if err != nil {
		s.Fatal(err)
	}
	defer c.Close(s.Context())
	rows, err := c.Query(s.Context(), `SELECT tenant || ' ' || count(*) FROM memory_items GROUP BY tenant UNION SELECT 'held ' || tenant FROM cell.tenancy ORDER BY 1`)
	if err != nil {
		s.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		s.Fatal(err)
	}
	return strings.Join(list, ", ")
}

// raw sends a request as it is written and returns the status and the platform's code.
func raw(t *testing.T, addr, head, body string) string {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(addr, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	head = strings.ReplaceAll(head, "\n", "\r\n")
	if _, err := fmt.Fprintf(c, "%sContent-Length: %d\r\n\r\n%s", head, len(body), body); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	return strings.TrimSpace(fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("Cell-Answer")))
}

// hostile tries to have one cell serve or write what is another's. one is the first
// cell and holds acme, two another and holds gamma.
func (d *deployments) hostile(t *testing.T, one, two *service) {
	before := []string{one.holdings(), two.holdings()}
	ofOne, ofTwo := d.sign("iss-one", "acme"), d.sign("iss-two", "gamma")
	post := func(target, host, token, more string) string {
		return fmt.Sprintf("POST %s HTTP/1.1\nHost: %s\nAuthorization: Bearer %s\nContent-Type: application/json\n%s", target, host, token, more)
	}
	const set, shared, second = "/v1/memory.set", "app.example.com", "two.example.com"
	for name, c := range map[string]struct{ addr, head, want string }{
		"two's tenant by one's issuer":             {d.router, post(set, shared, d.sign("iss-one", "gamma"), ""), "409 WRONG_CELL"},
		"one's tenant by two's issuer":             {d.router, post(set, second, d.sign("iss-two", "acme"), ""), "409 WRONG_CELL"},
		"one's tenant by two's issuer, shared":     {d.router, post(set, shared, d.sign("iss-two", "acme"), ""), "409 WRONG_CELL"},
		"one's token at two's host":                {d.router, post(set, second, ofOne, ""), "401 UNKNOWN_ISSUER"},
		"one's token at two's process":             {two.addr, post(set, shared, ofOne, ""), "401 UNKNOWN_ISSUER"},
		"two's token at one's process":             {one.addr, post(set, second, ofTwo, ""), "401 UNKNOWN_ISSUER"},
		"an issuer of nobody":                      {d.router, post(set, shared, d.sign("iss-three", "acme"), ""), "401 UNKNOWN_ISSUER"},
		"a neighbour by X-Tenant":                  {d.router, post(set, shared, ofOne, "x-tenant: beta\n"), "403 FORBIDDEN"},
		"two's tenant by X-Tenant":                 {d.router, post(set, shared, ofOne, "X-TENANT: gamma\n"), "403 FORBIDDEN"},
		"two tenants":                              {d.router, post(set, shared, ofOne, "X-Tenant: acme\nX-Tenant: gamma\n"), "400 BAD_REQUEST"},
		"a tenant in the platform's headers":       {d.router, post(set, shared, ofOne, "Cell-Tenant: gamma\nCell-Epoch: 1\nCell-Cell: two\nCell_Tenant: gamma\n"), "200"},
		"the same at the process":                  {one.addr, post(set, shared, ofOne, "cell-tenant: gamma\nCell-Epoch: 1\n"), "403 FORBIDDEN"},
		"a neighbour at the process":               {one.addr, post(set, shared, ofOne, "Cell-Tenant: acme\nCell-Tenant: beta\n"), "403 FORBIDDEN"},
		"everybody":                                {d.router, post(set, shared, d.sign("iss-one", "*"), ""), "401 UNAUTHENTICATED"},
		"another host in what a proxy says":        {d.router, post(set, shared, ofOne, "X-Forwarded-Host: two.example.com\nForwarded: host=two.example.com\nX-Host: two.example.com\n"), "200"},
		"another host in the target":               {d.router, post("http://two.example.com"+set, shared, ofOne, ""), "401 UNKNOWN_ISSUER"},
		"the shared host in the target":            {d.router, post("http://app.example.com"+set, second, ofOne, ""), "200"},
		"a user in the target":                     {d.router, post("http://app.example.com@two.example.com"+set, shared, ofOne, ""), "400 BAD_REQUEST"},
		"a user in the host":                       {d.router, post(set, "app.example.com@two.example.com", ofOne, ""), "400"},
		"two's host, written otherwise":            {d.router, post(set, "TWO.example.COM.:443", ofOne, ""), "401 UNKNOWN_ISSUER"},
		"two's host on another port":               {d.router, post(set, "two.example.com:8443", ofTwo, ""), "421 UNKNOWN_HOST"},
		"a lookalike of two's host":                {d.router, post(set, "xn--tw-0kc.example.com", ofTwo, ""), "421 UNKNOWN_HOST"},
		"the address of two's process":             {d.router, post(set, two.addr, ofTwo, ""), "421 UNKNOWN_HOST"},
		"two Host lines":                           {d.router, post(set, shared, ofOne, "Host: two.example.com\n"), "400"},
		"two tokens":                               {d.router, post(set, shared, ofOne, "Authorization: Bearer "+ofTwo+"\n"), "400 BAD_REQUEST"},
		"a token that is dropped on the way":       {d.router, post(set, shared, ofTwo, "Connection: Authorization\n"), "401 UNAUTHENTICATED"},
		"a connection of requests beside the rule": {d.router, post(set, shared, ofOne, "Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\n"), "200"},
		"two's placements by one's process":        {one.addr, post("/cells/v1/placements", shared, ofOne, ""), "404"},
		"no token":                                 {d.router, "POST " + set + " HTTP/1.1\nHost: app.example.com\nX-Tenant: acme\n", "401 UNAUTHENTICATED"},
		"the router's credential as a token":       {d.router, post(set, shared, one.token, ""), "401 UNAUTHENTICATED"},
	} {
		if got := raw(t, c.addr, c.head, setItem); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	d.hostileCalls(t, one, two)
	d.hostileRows(t, one, two)
	d.hostileProcesses(t, one, two)
	for i, s := range []*service{one, two} {
		if got := s.holdings(); got != before[i] {
			t.Errorf("%s had %s, and has %s", s.name, before[i], got)
		}
	}
}

// hostileCalls are calls of the directory with what is another's.
func (d *deployments) hostileCalls(t *testing.T, one, two *service) {
	place := func(tenant, cell string) string { return fmt.Sprintf(`{"tenant":%q,"cell":%q}`, tenant, cell) }
	api := func(method, path, token, more string) string {
		return method + " " + path + " HTTP/1.1\nHost: router.internal\nContent-Type: application/json\nAuthorization: Bearer " + token + "\n" + more
	}
	for name, c := range map[string]struct{ head, body, want string }{
		"two, with one's credential":        {api("POST", deploywire.PathPlacements, one.token, ""), place("stolen", "two"), "401 UNAUTHENTICATED"},
		"one, with two's credential":        {api("POST", deploywire.PathPlacements, two.token, ""), place("stolen", "one"), "401 UNAUTHENTICATED"},
		"both credentials":                  {api("POST", deploywire.PathPlacements, one.token, "Authorization: Bearer "+two.token+"\n"), place("stolen", "one"), "401 UNAUTHENTICATED"},
		"the hash for the credential":       {api("POST", deploywire.PathPlacements, one.sum, ""), place("stolen", "one"), "401 UNAUTHENTICATED"},
		"the credential without its prefix": {api("POST", deploywire.PathPlacements, strings.TrimPrefix(one.token, "lcr_"), ""), place("stolen", "one"), "401 UNAUTHENTICATED"},
		"capitals":                          {api("POST", deploywire.PathPlacements, strings.ToUpper(one.token), ""), place("stolen", "one"), "401 UNAUTHENTICATED"},
		"one cell and then another":         {api("POST", deploywire.PathPlacements, one.token, ""), `{"tenant":"stolen","cell":"two","cell":"one"}`, "400 BAD_REQUEST"},
		"one tenant and then another":       {api("POST", deploywire.PathPlacements, one.token, ""), `{"tenant":"gamma","Tenant":"stolen","cell":"one"}`, "400 BAD_REQUEST"},
		"no configuration":                  {api("POST", deploywire.PathPlacements, two.token, ""), place("stolen", "two"), "503 CELL_CLOSED"},
		"a tenant of two, by one":           {api("POST", deploywire.PathPlacements, one.token, ""), place("gamma", "one"), "200"},
		"everybody":                         {api("POST", deploywire.PathPlacements, one.token, ""), place("*", "one"), "400 INVALID_TENANT"},
		"two reads its state":               {api("GET", deploywire.PathCells+"/two", two.token, ""), "", "403 FORBIDDEN"},
		"two reads one's state":             {api("GET", deploywire.PathCells+"/one", two.token, ""), "", "401 UNAUTHENTICATED"},
		"the operator's, with a cell's":     {api("POST", deploywire.PathOperator+"/repoint", one.token, ""), `{"tenant":"gamma","from":"two","to":"one","epoch":3,"move":"m"}`, "401 UNAUTHENTICATED"},
		"the operator's, with nothing":      {"POST " + deploywire.PathOperator + "/repoint HTTP/1.1\nHost: r\nContent-Type: application/json\n", `{"tenant":"gamma","from":"two","to":"one","epoch":3,"move":"m"}`, "401 UNAUTHENTICATED"},
	} {
		if got := raw(t, d.router, c.head, c.body); got != c.want {
			t.Errorf("a call of the directory, %s: %s, want %s", name, got, c.want)
		}
	}
	// Whether a tenant exists is not told: one that is placed nowhere has the answer of one
	// that the first cell holds.
	type answer struct {
		status string
		header []string
		body   map[string]string
	}
	look := func(tenant string) (a answer) {
		resp, err := routerClient.Get(d.router + deploywire.PathLookup + "?tenant=" + url.QueryEscape(tenant))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil || json.Unmarshal(b, &a.body) != nil || a.body["tenant"] != tenant {
			t.Fatalf("lookup of %s: %s %s %v", tenant, resp.Status, b, err)
		}
		delete(a.body, "tenant")
		a.status, a.header = resp.Status, slices.Sorted(maps.Keys(resp.Header))
		return a
	}
	for range 2 { // the second time placed ones come from memory
		there := look("acme")
		for _, tenant := range []string{"nobody", "stolen", "Gamma", "acme.", "beta"} {
			if got := look(tenant); fmt.Sprint(got) != fmt.Sprint(there) {
				t.Errorf("lookup of %s: %v, and of a tenant that exists: %v", tenant, got, there)
			}
		}
	}
}

// hostileRows are rows of another time and of programs that know of no check.
func (d *deployments) hostileRows(t *testing.T, one, two *service) {
	unheld := func(s *service, what, query string, args ...any) {
		t.Helper()
		var pg *pgconn.PgError
		// The fence's trigger, which comes first, or that of the tenancy rows.
		if err := s.sql(query, args...); !errors.As(err, &pg) || pg.Code != tenancy.SQLState && pg.Code != "LT001" {
			t.Errorf("%s at %s: %v", what, s.name, err)
		}
	}
	const item = `INSERT INTO memory_items VALUES ($1, 'n', 'forged', '1', 1, 1, 0, '', false, 0)`
	unheld(two, "an old program's row of one's tenant", item, "acme")
	unheld(one, "an old program's row of two's tenant", item, "gamma")
	unheld(one, "a row that is given to two's tenant", `UPDATE memory_items SET tenant = 'gamma' WHERE tenant = 'acme'`)
	unheld(one, "a row in place of another", item+` ON CONFLICT (tenant, namespace, key) DO UPDATE SET value = '2'`, "gamma")
	if err := two.sql(`UPDATE cell.own_first SET cell = 'one', first = true`); err == nil {
		t.Error("two was made the first cell")
	}
	do := func(s *service, query string) {
		t.Helper()
		if err := s.sql(query); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	ask := func(what, host, issuer, tenant, want string) {
		t.Helper()
		got := ""
		eventually(t, what, func() bool {
			got = d.ask("POST", "/v1/memory.set", host, d.sign(issuer, tenant), "", setItem)
			return got == want
		})
	}
	// Two, as it was before gamma was placed: the directory brings the row back.
	do(two, `DELETE FROM cell.tenancy WHERE tenant = 'gamma'`)
	ask("a restored cell's placed tenant", "two.example.com", "iss-two", "gamma", "200")
	// One, as it was before it was enforced: it holds what it holds, and records nothing.
	do(one, `UPDATE cell.own_mode SET mode = 'recording'`)
	ask("two's tenant at a cell from before enforced", "app.example.com", "iss-one", "gamma", "503 BACKEND_UNAVAILABLE")
	ask("a new tenant of a cell from before enforced", "app.example.com", "iss-one", "late", "503 BACKEND_UNAVAILABLE")
	ask("its own tenant", "app.example.com", "iss-one", "acme", "200")
	do(one, `UPDATE cell.own_mode SET mode = 'enforced'`)
	ask("two's tenant, enforced again", "app.example.com", "iss-one", "gamma", "409 WRONG_CELL")
	// Two, with a mode that only a first cell can have.
	do(two, `UPDATE cell.own_mode SET mode = 'recording'`)
	ask("one's tenant at a later cell that records", "two.example.com", "iss-two", "acme", "409 WRONG_CELL")
	do(two, `UPDATE cell.own_mode SET mode = 'enforced'`)
}

// hostileProcesses are processes that somebody has started with what is another's.
func (d *deployments) hostileProcesses(t *testing.T, one, two *service) {
	if err := d.pg.CreateDatabase(d.Context(), "bare"); err != nil {
		t.Fatal(err)
	}
	// A copy of two's database, which nobody may be connected to meanwhile.
	two.stop()
	eventually(t, "two's database is copied", func() bool { return one.sql(`CREATE DATABASE copied TEMPLATE two`) == nil })
	two.start(true)
	eventually(t, "two is ready again", two.ready)
	for name, c := range map[string]struct {
		of       *service
		database string
		cell     bool
		issuer   string
		tenant   string
		reason   string
	}{
		"one's configuration on two's database":     {one, "two", true, "iss-one", "gamma", "CELL is one and the stores are those of cell two"},
		"two's configuration on one's database":     {two, "one", true, "iss-two", "acme", "CELL is two and the stores are those of cell one"},
		"one's configuration on a bare database":    {one, "bare", true, "iss-one", "acme", "run cell prepare"},
		"one's configuration on a copy of two's":    {one, "copied", true, "iss-one", "gamma", "those of cell two"},
		"no cell, as a build from before the check": {two, "two", false, "iss-two", "gamma", "CELL is not set"},
	} {
		p := *c.of
		p.addr, p.admin, p.probe = d.free(), d.free(), d.free()
		p.settings = maps.Clone(c.of.settings)
		p.settings["CELL_DSN"] = d.pg.URL(c.database)
		p.start(c.cell)
		why := ""
		eventually(t, name+" says why it does not serve", func() bool {
			resp, err := http.Get("http://" + p.admin + "/readyz")
			if err != nil {
				return false
			}
			defer resp.Body.Close()
			b, _ := io.ReadAll(resp.Body)
			why = string(b)
			return resp.StatusCode == http.StatusServiceUnavailable && strings.Contains(why, c.reason)
		})
		head := fmt.Sprintf("POST /v1/memory.set HTTP/1.1\nHost: app.example.com\nAuthorization: Bearer %s\nX-Tenant: %s\nContent-Type: application/json\n", d.sign(c.issuer, c.tenant), c.tenant)
		if got := raw(t, p.addr, head, setItem); got != "503 AUTH_UNAVAILABLE" {
			t.Errorf("%s: %s", name, got)
		}
		p.stop()
	}
	// A whole copy of two, with its configuration: the router sends it nothing, and it gets
	// into the directory neither under two's name nor under its own.
	copied := *two
	copied.addr, copied.admin, copied.probe = d.free(), d.free(), d.free()
	copied.settings = maps.Clone(two.settings)
	copied.settings["CELL_DSN"] = d.pg.URL("copied")
	copied.start(true)
	two.refused("nonce", "update", "--wait", "5s", "--probe-url", "http://"+copied.probe)
	three := d.service("three", "three.example.com")
	three.settings["CELL_DSN"] = d.pg.URL("copied")
	three.write()
	three.refused("two", "prepare", "--host", "three.example.com", "--credential-sha256", three.sum, "--probe-url", "http://"+copied.probe)
	three.refused("not registered", "restore")
	copied.stop()
	if got := copied.holdings(); got != two.holdings() {
		t.Errorf("the copy has %s, and two %s", got, two.holdings())
	}
	// Commands with one's name and two's stores.
	mixed := *one
	mixed.settings = maps.Clone(one.settings)
	mixed.settings["CELL_DSN"], mixed.env = d.pg.URL("two"), one.env+".mixed"
	mixed.write()
	for _, args := range [][]string{{"prepare", "--host", "app.example.com", "--credential-sha256", one.sum}, {"attach", "--allow-asynchronous"}, {"restore"}, {"place", "acme"}, {"update", "--finish"}} {
		mixed.refused("deployment", args...)
	}
}
