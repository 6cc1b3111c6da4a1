// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/celltable"
	"github.com/cloister-dev/cloister/edge/rules"
)

// front is a router in front of deployments with real sockets. It borrows a fleet's
// ways of sending requests.
type front struct {
	*fleet
	source *source
	table  *celltable.Watcher
	ups    map[string]string // name -> base URL

	mu   sync.Mutex // guards runs
	runs map[string]int
}

// source is a directory.
type source struct {
	mu    sync.Mutex // guards what follows
	table rules.Table
	err   error
	hang  bool
}

func (s *source) Table(ctx context.Context) (rules.Table, error) {
	s.mu.Lock()
	t, err, hang := s.table.Clone(), s.err, s.hang
	s.mu.Unlock()
	if hang {
		<-ctx.Done()
		return rules.Table{}, context.Cause(ctx)
	}
	return t, err
}

const (
	sharedHost = "app.example.com"
	bHost      = "b.example.com"
)

type frontOptions struct {
	cfg      edge.Config
	own      http.Handler
	handler  http.Handler // of every deployment
	table    func(f *front) rules.Table
	noSource error // the directory cannot be read
	folder   string
}

// serving is the first cell and another one.
func serving(f *front) rules.Table {
	return rules.Table{Aliases: []string{"alias.example.com"}, Cells: []rules.Cell{
		{Name: "a", Host: sharedHost, Upstream: f.ups["a"], Issuers: []string{"iss-a", "iss-two"}, First: true, State: rules.Serving},
		{Name: "b", Host: bHost, Upstream: f.ups["b"], Issuers: []string{"iss-b", "iss-two"}, State: rules.Serving},
		{Name: "c", Host: "[2001:db8::7]", State: rules.Serving},
	}}
}

func attaching(f *front) rules.Table {
	t := serving(f)
	t.Cells[0].State = rules.Attaching
	return t
}

func newFront(t testing.TB, o frontOptions) *front {
	t.Helper()
	f := &front{fleet: &fleet{t: t, table: cells.NewMemTable()}, ups: map[string]string{}, runs: map[string]int{}}
	t.Cleanup(func() { f.fleet.table.(*cells.MemTable).Close() })
	for _, name := range []string{"a", "b"} {
		f.ups[name] = f.deployment(name, o.handler)
	}
	f.source = &source{err: o.noSource}
	if o.table != nil {
		f.source.table = o.table(f)
	}
	ct := celltable.Config{Rules: rules.Config{Shared: sharedHost, Upstream: f.ups["a"]}, Source: f.source, Every: 2 * time.Millisecond, Patience: 2 * time.Second, Log: quiet()}
	if o.folder != "" {
		ct.Folder, ct.Name, ct.Key = o.folder, "r", masterKey
	}
	var err error
	if f.table, err = celltable.Watch(t.Context(), ct); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.table.Close)
	o.cfg.Addr, o.cfg.AdminAddr, o.cfg.Log = "127.0.0.1:0", "127.0.0.1:0", quiet()
	s, err := edge.NewDeployment(o.cfg, edge.Deployment{Table: f.table, Own: o.own})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.edge, f.url, f.admin = s, "http://"+s.Addr(), "http://"+s.AdminAddr()
	f.run(s)
	h1 := &http.Transport{MaxIdleConnsPerHost: 100, DisableCompression: true}
	h2 := &http.Transport{Protocols: new(http.Protocols), DisableCompression: true}
	h2.Protocols.SetUnencryptedHTTP2(true)
	f.http, f.h2 = &http.Client{Transport: h1}, &http.Client{Transport: h2}
	t.Cleanup(func() {
		h1.CloseIdleConnections()
		h2.CloseIdleConnections()
	})
	return f
}

// deployment starts one and returns its address.
func (f *front) deployment(name string, h http.Handler) string {
	f.t.Helper()
	if h == nil {
		h = http.HandlerFunc(echo)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	srv := &http.Server{Protocols: new(http.Protocols), DisableGeneralOptionsHandler: true, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.runs[name]++
		f.mu.Unlock()
		w.Header().Set("X-Deployment", name)
		h.ServeHTTP(w, r)
	})}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	f.t.Cleanup(func() {
		_ = srv.Close()
		<-done
	})
	return "http://" + l.Addr().String()
}

// ran returns how many requests a deployment got.
func (f *front) ran(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.runs[name]
}

// set replaces the directory's table and waits until the router has it.
func (f *front) set(t rules.Table) {
	f.t.Helper()
	f.source.mu.Lock()
	f.source.table = t.Clone()
	f.source.mu.Unlock()
	f.wait(func() bool {
		now, ok := f.table.Table()
		return ok && reflect.DeepEqual(now, t.Clone())
	}, "the router reads the table")
}

// where says what became of an answer: a deployment's name, or a code.
func where(r *http.Response) string {
	if c := r.Header.Get(cells.HeaderAnswer); c != "" {
		return c
	}
	if d := r.Header.Get("X-Deployment"); d != "" {
		return d
	}
	return strconv.Itoa(r.StatusCode)
}

func host(h string) func(*http.Request) { return func(r *http.Request) { r.Host = h } }

func bearer(tok string) func(*http.Request) { return header("Authorization", "Bearer "+tok) }

func token(claims string) string {
	seg := base64.RawURLEncoding.EncodeToString
	return seg([]byte(`{"alg":"ES256"}`)) + "." + seg([]byte(claims)) + ".c2ln"
}

func issued(iss string) string { return token(fmt.Sprintf(`{"iss":%q}`, iss)) }

// Before a cell exists everything on the shared host passes through; the same holds,
// request by request, while the first cell is registered and attaches beside others.
// Once it serves, rules 2 to 4 part the requests.
func TestDeploymentRules(t *testing.T) {
	onlyAliases := rules.Table{Aliases: []string{"alias.example.com"}}
	f := newFront(t, frontOptions{table: func(*front) rules.Table { return onlyAliases }})
	none, err := rules.NewIndex(rules.Config{Shared: sharedHost, Upstream: f.ups["a"]}, onlyAliases)
	if err != nil {
		t.Fatal(err)
	}
	form := func(body string) func(*http.Request) {
		return func(r *http.Request) {
			r.Method, r.Body, r.ContentLength = "POST", io.NopCloser(strings.NewReader(body)), int64(len(body))
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
	}
	type change = func(*http.Request)
	for _, c := range []struct {
		path                    string
		with                    []change
		before, attach, serving string
	}{
		{"/", []change{host(sharedHost)}, "a", "a", "a"},
		{"/v1/health", []change{host("APP.example.com.:443")}, "a", "a", "a"},
		{"/", []change{host("alias.example.com")}, "a", "a", "a"},
		{"/", []change{host(bHost)}, "UNKNOWN_HOST", "b", "b"},
		{"/v1/health", []change{host(bHost), bearer(issued("iss-a"))}, "UNKNOWN_HOST", "b", "b"},
		{"/scim/v2/Users", []change{host(bHost), bearer("lsc_b_x")}, "UNKNOWN_HOST", "b", "b"},
		{"/", []change{host("[2001:DB8:0::7]")}, "UNKNOWN_HOST", "BACKEND_UNAVAILABLE", "BACKEND_UNAVAILABLE"},
		{"/", []change{host("elsewhere.example.com")}, "UNKNOWN_HOST", "UNKNOWN_HOST", "UNKNOWN_HOST"},
		{"/", []change{host("127.0.0.1")}, "UNKNOWN_HOST", "UNKNOWN_HOST", "UNKNOWN_HOST"},
		{"/mcp", []change{host(sharedHost), bearer(issued("iss-a"))}, "a", "a", "a"},
		{"/mcp", []change{host(sharedHost), bearer(issued("iss-b"))}, "a", "a", "b"},
		{"/mcp", []change{host("alias.example.com"), bearer(issued("iss-b"))}, "a", "a", "b"},
		{"/mcp", []change{host(sharedHost), bearer(issued("iss-two"))}, "a", "a", "UNKNOWN_ISSUER"},
		{"/mcp", []change{host(sharedHost), bearer(issued("nobody"))}, "a", "a", "UNKNOWN_ISSUER"},
		{"/mcp", []change{host(sharedHost), bearer("opaque")}, "a", "a", "a"},
		{"/mcp", []change{host(sharedHost), bearer("x"), bearer("y")}, "a", "a", "BAD_REQUEST"},
		{"/scim/v2/Users", []change{host(sharedHost), bearer(issued("iss-b"))}, "a", "a", "a"},
		{"/scim/v2/Groups/1", []change{host(sharedHost), bearer("lsc_a_x")}, "a", "a", "a"},
		{"/scim/v2/Groups/1", []change{host(sharedHost), bearer(issued("iss-b"))}, "a", "a", "b"},
		{"/.well-known/openid-configuration", []change{host(sharedHost), bearer(issued("iss-b"))}, "a", "a", "a"},
		{"/oauth/revoke", []change{host(sharedHost), form("token=" + issued("iss-b") + "&token_type_hint=access_token")}, "a", "a", "b"},
		{"/oauth/revoke", []change{host(sharedHost), form("token=opaque")}, "a", "a", "a"},
		{"/oauth/revoke", []change{host(sharedHost), form("token=" + issued("nobody"))}, "a", "a", "UNKNOWN_ISSUER"},
		{"/oauth/revoke", []change{host(sharedHost), form("token=x&token=" + issued("iss-b"))}, "a", "a", "BAD_REQUEST"},
		{"/oauth/revoke", []change{host(sharedHost), form("token=%zz")}, "a", "a", "BAD_REQUEST"},
		{"/oauth/revoke", []change{host(sharedHost), form("x=" + strings.Repeat("y", 70<<10))}, "a", "a", "TOO_LARGE"},
		{"/oauth/revoke", []change{host(bHost), form("token=" + issued("iss-a"))}, "UNKNOWN_HOST", "b", "b"},
		{"/cells/v1/placements", []change{host(sharedHost)}, "NOT_SERVED", "NOT_SERVED", "NOT_SERVED"},
		{"/cells/x", []change{host(bHost)}, "NOT_SERVED", "NOT_SERVED", "NOT_SERVED"},
	} {
		// A router that has seen cells does not forget them: this one has seen none.
		r, err := http.NewRequest("GET", "http://x"+c.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, ch := range c.with {
			ch(r)
		}
		d := none.Decide(rules.Request{Method: r.Method, Host: r.Host, Path: c.path, Authorization: r.Header["Authorization"]})
		got := string(d.Answer)
		if got == "" && d.Upstream == f.ups["a"] {
			got = "a"
		}
		if got != c.before {
			t.Errorf("before: %s: %s, want %s", c.path, got, c.before)
		}
		for _, stage := range []struct {
			name, want string
			table      rules.Table
		}{{"attaching", c.attach, attaching(f)}, {"serving", c.serving, serving(f)}} {
			f.set(stage.table)
			for name, cl := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
				a := f.must(cl, "GET", c.path, nil, c.with...)
				if got := where(a.Response); got != stage.want {
					t.Errorf("%s: %s %s: %s, want %s", stage.name, name, c.path, got, stage.want)
				}
				if challenge := a.Header.Get("WWW-Authenticate"); (a.StatusCode == 401) != (challenge != "") {
					t.Errorf("%s: %d with the challenge %q", c.path, a.StatusCode, challenge)
				}
				if code := a.code(); code != "" && a.StatusCode != code.HTTPStatus() {
					t.Errorf("%s: %s: %d", c.path, code, a.StatusCode)
				}
			}
		}
	}
}

// Before the first cell is registered requests pass through as they are.
func TestDeploymentPassThrough(t *testing.T) {
	f := newFront(t, frontOptions{table: func(*front) rules.Table { return rules.Table{} }})
	body := "token=" + issued("iss-b")
	for _, path := range []string{"/", "/scim/v2/Groups", "/oauth/revoke"} {
		a := f.must(f.http, "POST", path, strings.NewReader(body), host(sharedHost), bearer(issued("iss-b")))
		if where(a.Response) != "a" {
			t.Errorf("%s: %s", path, where(a.Response))
		}
	}
	if a := f.must(f.http, "GET", "/", nil, host(bHost)); a.StatusCode != 421 {
		t.Error(a.Status)
	}
}

// A request reaches its cell as the client sent it, but for what the router says of it.
func TestDeploymentRequest(t *testing.T) {
	f := newFront(t, frontOptions{table: serving})
	e := decode(t, f.raw(`GET /a%2Fb//c/../d?x=1;y=%zz HTTP/1.1
Host: B.example.com.:80
Authorization: Basic x
Cell-Tenant: evil
Cell_Admission: forged
Connection: X-Drop, keep-alive
X-Drop: 1
X-Keep: 1
X-Keep: 2
X-Forwarded-For: 6.6.6.6
X-Forwarded-Proto: https
X-Forwarded-Host: app.example.com
X-Forwarded-Port: 1
X-Forwarded-Prefix: /x
Forwarded: for=6.6.6.6;host=app.example.com
X-Real-IP: 6.6.6.6
X-Original-URL: /admin
X-Rewrite-URL: /admin
Keep-Alive: 5
Proxy-Authorization: secret
TE: trailers, deflate
Accept-Encoding: br
Cookie: a=1

`))
	want := http.Header{
		"Authorization": {"Basic x"}, "X-Keep": {"1", "2"}, "X-Forwarded-For": {"127.0.0.1"}, "X-Forwarded-Proto": {"http"}, "X-Forwarded-Host": {"B.example.com.:80"},
		"Te": {"trailers"}, "Accept-Encoding": {"br"}, "Cookie": {"a=1"},
	}
	if !reflect.DeepEqual(e.Header, want) {
		t.Errorf("the cell got\n%v\nwant\n%v", e.Header, want)
	}
	if e.Host != "B.example.com.:80" || e.URI != "/a%2Fb//c/../d?x=1;y=%zz" || e.Method != "GET" || e.TransferEncoding != nil {
		t.Errorf("%+v", e)
	}
	// A revocation's body and trailers arrive although the router has read them.
	big := strings.Repeat("x", 40<<10)
	f2 := newFront(t, frontOptions{table: serving, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		_ = json.NewEncoder(w).Encode([]any{string(b), r.Trailer.Get("X-Sum"), r.ContentLength, r.TransferEncoding})
	})})
	form := "token=" + issued("iss-b") + "&x=" + big
	r := f2.raw(fmt.Sprintf("POST /oauth/revoke HTTP/1.1\nHost: app.example.com\nContent-Type: application/x-www-form-urlencoded\nTransfer-Encoding: chunked\nTrailer: X-Sum\n\n%x\n%s\n0\nX-Sum: 42\n\n", len(form), form))
	b, _ := io.ReadAll(r.Body)
	if where(r) != "b" || !strings.HasPrefix(string(b), `["token=`) || !strings.HasSuffix(strings.TrimSpace(string(b)), `x","42",-1,["chunked"]]`) || len(b) < len(form) {
		t.Errorf("%s %.80s...%s", where(r), b, b[max(0, len(b)-40):])
	}
}

// Every line of an answer reaches the client, the platform's codes of a cell included,
// and nothing is ever sent twice.
func TestDeploymentAnswer(t *testing.T) {
	f := newFront(t, frontOptions{table: serving, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wrong" {
			cells.WriteProblem(w, r, &cells.Answer{Code: cells.CodeWrongCell, RetryAfter: time.Second})
			return
		}
		h := w.Header()
		h.Add("Set-Cookie", "a=1; Path=/")
		h.Add("Set-Cookie", "b=2")
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Trailer", "X-Sum")
		h.Set("X-Forwarded-For", "1.2.3.4")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(207)
		_, _ = io.WriteString(w, "body")
		h.Set("X-Sum", "42")
	})})
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		a := f.must(c, "GET", "/", nil, host(bHost))
		if a.StatusCode != 207 || a.body != "body" || !reflect.DeepEqual(a.Header.Values("Set-Cookie"), []string{"a=1; Path=/", "b=2"}) || a.Trailer.Get("X-Sum") != "42" ||
			a.Header.Get("X-Hop") != "" || a.Header.Get("X-Forwarded-For") != "1.2.3.4" {
			t.Errorf("%s: %d %s %v %v", name, a.StatusCode, a.body, a.Header, a.Trailer)
		}
		before := f.ran("b")
		for _, method := range []string{"GET", "POST"} {
			if a := f.must(c, method, "/wrong", nil, host(bHost)); a.StatusCode != 409 || a.code() != cells.CodeWrongCell || a.Header.Get("Retry-After") != "1" {
				t.Errorf("%s: %d %v", name, a.StatusCode, a.Header)
			}
		}
		if n := f.ran("b") - before; n != 2 {
			t.Errorf("%s: two requests were run %d times", name, n)
		}
	}
}

func TestDeploymentFailures(t *testing.T) {
	t.Run("before the first read", func(t *testing.T) {
		f := newFront(t, frontOptions{noSource: errors.New("down")})
		for _, h := range []string{sharedHost, bHost, "x"} {
			if a := f.must(f.http, "GET", "/", nil, host(h)); a.StatusCode != 503 || a.code() != cells.CodeBackendUnavailable || a.Header.Get("Retry-After") == "" {
				t.Error(h, a.Status, a.code())
			}
		}
		if a := f.must(f.http, "GET", "/cells/x", nil); a.code() != cells.CodeNotServed {
			t.Error(a.Status)
		}
		if a := f.must(f.http, "GET", "/livez", nil); a.StatusCode != 200 {
			t.Error(a.Status)
		}
		if a := f.must(f.http, "GET", "/readyz", nil); a.StatusCode != 503 {
			t.Error(a.Status)
		}
		if f.ran("a")+f.ran("b") != 0 {
			t.Error("something ran")
		}
		f.source.mu.Lock()
		f.source.err = nil
		f.source.mu.Unlock()
		f.set(serving(f))
		if a := f.must(f.http, "GET", "/readyz", nil); a.StatusCode != 200 {
			t.Error(a.Status)
		}
	})
	t.Run("a directory that hangs", func(t *testing.T) {
		f := newFront(t, frontOptions{table: serving})
		f.source.mu.Lock()
		f.source.hang = true
		f.source.mu.Unlock()
		begin := time.Now()
		for range 200 {
			if a := f.must(f.http, "GET", "/", nil, host(bHost)); where(a.Response) != "b" {
				t.Fatal(where(a.Response))
			}
		}
		// Reads take 5 s to fail: none of the requests has waited for one.
		if d := time.Since(begin); d > 4*time.Second {
			t.Errorf("200 requests took %s", d)
		}
		if a := f.must(f.http, "GET", "/readyz", nil); a.StatusCode != 200 {
			t.Error(a.Status)
		}
	})
	t.Run("a cell that is down", func(t *testing.T) {
		f := newFront(t, frontOptions{cfg: edge.Config{ConnectWait: 50 * time.Millisecond}})
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		gone := "http://" + l.Addr().String()
		l.Close()
		table := serving(f)
		table.Cells[1].Upstream = gone
		f.set(table)
		for range 3 {
			if a := f.must(f.http, "POST", "/", strings.NewReader("x"), host(bHost)); a.StatusCode != 502 || a.code() != cells.CodeCellUnreachable {
				t.Error(a.Status, a.code())
			}
		}
		if a := f.must(f.http, "GET", "/", nil, host(sharedHost)); where(a.Response) != "a" {
			t.Error("another cell:", where(a.Response))
		}
		table.Cells[1].Upstream = f.ups["b"]
		f.set(table)
		if a := f.must(f.http, "GET", "/", nil, host(bHost)); where(a.Response) != "b" {
			t.Error("another address:", where(a.Response))
		}
	})
	t.Run("a first cell without an address", func(t *testing.T) {
		f := newFront(t, frontOptions{table: func(f *front) rules.Table {
			table := serving(f)
			table.Cells[0].Upstream = ""
			return table
		}})
		if a := f.must(f.http, "GET", "/", nil, host(sharedHost)); a.StatusCode != 503 || a.code() != cells.CodeBackendUnavailable {
			t.Error(a.Status, a.code())
		}
		if a := f.must(f.http, "GET", "/", nil, host(sharedHost), bearer(issued("iss-b"))); where(a.Response) != "b" {
			t.Error(where(a.Response))
		}
	})
	t.Run("a cold start", func(t *testing.T) {
		folder := t.TempDir()
		f := newFront(t, frontOptions{table: serving, folder: folder})
		f.table.Close()
		cold := newFront(t, frontOptions{noSource: errors.New("down"), folder: folder})
		// The snapshot's addresses are those of the first one's deployments.
		before := f.ran("b")
		if a := cold.must(cold.http, "GET", "/", nil, host(bHost)); where(a.Response) != "b" || f.ran("b") != before+1 {
			t.Error(where(a.Response))
		}
		if s := cold.table.Status(); s.Source != celltable.SourceSnapshot {
			t.Errorf("%+v", s)
		}
	})
}
