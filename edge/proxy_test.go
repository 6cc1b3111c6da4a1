// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/edge"
	"github.com/cloister-dev/cloister/edge/extract"
)

// raw sends bytes and returns the parsed answer.
func (f *fleet) raw(request string) *http.Response {
	f.t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(f.url, "http://"))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, strings.ReplaceAll(request, "\n", "\r\n")); err != nil {
		f.t.Fatal(err)
	}
	method, _, _ := strings.Cut(request, " ")
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: method})
	if err != nil {
		f.t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	resp.Body = io.NopCloser(bytes.NewReader(b))
	return resp
}

// echo answers with what reached the cell.
type echoed struct {
	URI, Host, Method string
	Header            http.Header
	Trailer           http.Header
	TransferEncoding  []string
	Length            int64
}

func echo(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(echoed{r.RequestURI, r.Host, r.Method, r.Header, r.Trailer, r.TransferEncoding, r.ContentLength})
}

func decode(t *testing.T, resp *http.Response) (e echoed) {
	t.Helper()
	if resp.StatusCode != 200 {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil {
		t.Fatal(err)
	}
	return e
}

func TestRequestHeaders(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo)})
	f.place("acme", "a")
	e := decode(t, f.raw(`GET /x HTTP/1.1
Host: acme.localhost:1234
X-Tenant: acme
cell-tenant: evil
Cell-Epoch: 99
CELL-ADMISSION: forged
Cell_Tenant: evil
Cell.Cell: b
Cell-Answer: MOVING
Connection: Cell-Tenant, Cell-Epoch, Cell-Admission, X-Drop, keep-alive
X-Drop: 1
X-Keep: 1
X-Keep: 2
X-Forwarded-For: 6.6.6.6
X-Forwarded-Proto: https
X-Forwarded-Host: evil
X-Forwarded-Port: 1
X_Forwarded_For: 6.6.6.6
Forwarded: for=6.6.6.6
X-Real-IP: 6.6.6.6
Keep-Alive: 5
Proxy-Authorization: secret
Proxy-Connection: x
TE: trailers, deflate
Accept-Encoding: br

`))
	want := http.Header{
		"X-Tenant": {"acme"}, "Cell-Tenant": {"acme"}, "Cell-Epoch": {"1"},
		"Cell-Admission": {cells.MintToken(cells.DeriveCellKey(masterKey, "a"), "acme", "a", 1)},
		"X-Keep":         {"1", "2"}, "X-Forwarded-For": {"127.0.0.1"}, "X-Forwarded-Proto": {"http"}, "X-Forwarded-Host": {"acme.localhost:1234"},
		"Te": {"trailers"}, "Accept-Encoding": {"br"},
	}
	if !reflect.DeepEqual(e.Header, want) {
		t.Errorf("the cell got\n%v\nwant\n%v", e.Header, want)
	}
	if e.Host != "acme.localhost:1234" || e.URI != "/x" || e.TransferEncoding != nil || e.Length != 0 {
		t.Errorf("%+v", e)
	}
}

func TestRawPathAndQuery(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo)})
	f.place("acme", "a")
	for in, want := range map[string]string{
		"/a%2Fb%2fc//d/./e/../f?x=1;y=%zz&&q=a+b%20c": "",
		`/a"b|c^d?<>`:       "",
		"//double":          "",
		"/":                 "",
		"/?":                "",
		"/t/acme/a%2Fb?x=;": "/a%2Fb?x=;",
		"/t/acme":           "/",
		"/t/acme?q":         "/?q",
		"http://elsewhere.localhost/abs%20olute?x=1#not": "/abs%20olute?x=1#not",
	} {
		if want == "" {
			want = in
		}
		head := "X-Tenant: acme\n"
		if strings.HasPrefix(in, "/t/") {
			head = ""
		}
		e := decode(t, f.raw("GET "+in+" HTTP/1.1\nHost: h\n"+head+"\n"))
		if e.URI != want {
			t.Errorf("%s came as %s, want %s", in, e.URI, want)
		}
		if strings.HasPrefix(in, "/t/") && e.Header.Get("X-Forwarded-Prefix") != "/t/acme" {
			t.Errorf("prefix %q", e.Header.Get("X-Forwarded-Prefix"))
		}
	}
	if e := decode(t, f.raw("OPTIONS * HTTP/1.1\nHost: acme.localhost\n\n")); e.URI != "*" || e.Method != "OPTIONS" {
		t.Errorf("%+v", e)
	}
}

func TestMethodsAndLengths(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo)})
	f.place("acme", "a")
	for _, c := range []struct {
		head   string
		length int64
		te     string
	}{
		{"GET / HTTP/1.1\nHost: h\nX-Tenant: acme\n\n", 0, "[]"},
		{"DELETE / HTTP/1.1\nHost: h\nX-Tenant: acme\n\n", 0, "[]"},
		{"POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nContent-Length: 0\n\n", 0, "[]"},
		{"POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nContent-Length: 3\n\nabc", 3, "[]"},
		{"GET / HTTP/1.1\nHost: h\nX-Tenant: acme\nContent-Length: 3\n\nabc", 3, "[]"},
		{"PUT / HTTP/1.1\nHost: h\nX-Tenant: acme\nTransfer-Encoding: chunked\n\n3\nabc\n0\n\n", -1, "[chunked]"},
		{"PURGE / HTTP/1.1\nHost: h\nX-Tenant: acme\n\n", 0, "[]"},
	} {
		e := decode(t, f.raw(c.head))
		if e.Length != c.length || fmt.Sprint(e.TransferEncoding) != c.te {
			t.Errorf("%q came with length %d, %v", c.head, e.Length, e.TransferEncoding)
		}
	}
	if r := f.raw("HEAD / HTTP/1.1\nHost: h\nX-Tenant: acme\nConnection: close\n\n"); r.StatusCode != 200 {
		t.Error(r.Status)
	}
}

func TestAnswerHeaders(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Set-Cookie", "a=1")
		h.Add("Set-Cookie", "b=2")
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Keep-Alive", "1")
		h.Set("Cell-Admission", r.Header.Get("Cell-Admission"))
		h.Set("Cell-Answer", "MOVING") // a service may not say so
		h.Set("X-Forwarded-For", "1.2.3.4")
		h.Set("Trailer", "X-Sum")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(207)
		_, _ = io.WriteString(w, "body")
		h.Set("X-Sum", "42")
		h.Set(http.TrailerPrefix+"X-Late", "43")
	})})
	f.place("acme", "a")
	for name, c := range map[string]*http.Client{"h1": f.http, "h2": f.h2} {
		a := f.must(c, "GET", "/", nil, tenant("acme"))
		if a.StatusCode != 207 || a.body != "body" {
			t.Fatalf("%s: %d %s", name, a.StatusCode, a.body)
		}
		if got := a.Header.Values("Set-Cookie"); !reflect.DeepEqual(got, []string{"a=1", "b=2"}) {
			t.Errorf("%s: cookies %v", name, got)
		}
		for _, k := range []string{"X-Hop", "Keep-Alive", "Cell-Admission", "Cell-Answer"} {
			if v, ok := a.Header[k]; ok {
				t.Errorf("%s: %s %v was kept", name, k, v)
			}
		}
		if a.Header.Get("Cell-Cell") != "a" || a.Header.Get("Cell-Epoch") != "1" || a.Header.Get("X-Forwarded-For") != "1.2.3.4" {
			t.Errorf("%s: %v", name, a.Header)
		}
		if a.Trailer.Get("X-Sum") != "42" || a.Trailer.Get("X-Late") != "43" {
			t.Errorf("%s: trailers %v", name, a.Trailer)
		}
	}
}

func TestRequestTrailers(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo)})
	f.place("acme", "a")
	e := decode(t, f.raw("POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nTransfer-Encoding: chunked\nTrailer: X-Sum, Cell-Tenant\n\n3\nabc\n0\nX-Sum: 42\nCell-Tenant: evil\ncell_epoch: 9\n\n"))
	if e.Trailer.Get("X-Sum") != "42" || len(e.Trailer) != 1 {
		t.Errorf("trailers %v", e.Trailer)
	}
}

func TestReservedPaths(t *testing.T) {
	f := newFleet(t, fleetOptions{handler: http.HandlerFunc(echo), cfg: edge.Config{Extractors: []extract.Spec{{Path: "/t/{tenant}/", Strip: true}, {Fixed: "acme"}}}})
	f.place("acme", "a")
	for _, p := range []string{"/cells/v1/routes", "/cells", "/%63ells/", "//cells/", "/./cells/", "/x/../cells/", "/CELLS", "/cells%2fv1", "/\\cells/",
		"/t/acme/cells/v1/agent/drain", "/t/acme/%63ells/", "/t/acme//cells/", "/cells;x/v1", "/%2563ells/"} {
		r := f.raw("GET " + p + " HTTP/1.1\nHost: h\n\n")
		if a, ok := cells.ReadProblem(r); r.StatusCode != 404 || !ok || a.Code != cells.CodeNotServed || a.Revision == 0 {
			t.Errorf("%s: %s %+v", p, r.Status, a)
		}
	}
	for _, p := range []string{"/cellsx", "/x/cells/", "/t/acme/x/cells"} {
		if r := f.raw("GET " + p + " HTTP/1.1\nHost: h\n\n"); r.StatusCode != 200 {
			t.Errorf("%s: %s", p, r.Status)
		}
	}
	for p, want := range map[string]string{"/livez": "ok\n", "/readyz": "ok\n"} {
		r := f.raw("GET " + p + " HTTP/1.1\nHost: h\n\n")
		if b, _ := io.ReadAll(r.Body); r.StatusCode != 200 || string(b) != want {
			t.Errorf("%s: %s %s", p, r.Status, b)
		}
	}
}

func TestOwnAnswers(t *testing.T) {
	cfg := edge.Config{MaxBody: 1000, MaxHeader: 4096, Extractors: []extract.Spec{{Header: "X-Tenant"}, {Host: "{tenant}.example.com", Strict: true}}}
	f := newFleet(t, fleetOptions{cfg: cfg})
	f.place("acme", "a")
	for name, c := range map[string]struct {
		raw    string
		status int
		code   cells.Code
	}{
		"unknown tenant": {"GET / HTTP/1.1\nHost: h\nX-Tenant: nobody\n\n", 404, cells.CodeUnknownTenant},
		"invalid tenant": {"GET / HTTP/1.1\nHost: h\nX-Tenant: a/b\n\n", 400, cells.CodeInvalidTenant},
		"two tenants":    {"GET / HTTP/1.1\nHost: h\nX-Tenant: acme\nX-Tenant: acme\n\n", 400, cells.CodeBadRequest},
		"unknown host":   {"GET / HTTP/1.1\nHost: h\n\n", 421, cells.CodeUnknownHost},
		"too large":      {"POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nContent-Length: 1001\n\n", 413, cells.CodeTooLarge},
		"too many chunks": {"POST / HTTP/1.1\nHost: h\nX-Tenant: acme\nTransfer-Encoding: chunked\n\n3e9\n" + strings.Repeat("x", 1001) + "\n0\n\n",
			413, cells.CodeTooLarge},
		"large header": {"GET / HTTP/1.1\nHost: h\nX-Tenant: acme\nX-Big: " + strings.Repeat("x", 10000) + "\n\n", 431, ""},
		"connect":      {"CONNECT h:1 HTTP/1.1\nHost: h:1\n\n", 404, cells.CodeNotServed},
		"no host":      {"GET / HTTP/1.1\n\n", 400, ""},
		"bad length":   {"POST / HTTP/1.1\nHost: h\nContent-Length: 1\nContent-Length: 2\n\n", 400, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := f.raw(c.raw)
			if r.StatusCode != c.status {
				b, _ := io.ReadAll(r.Body)
				t.Fatalf("%s %s, want %d", r.Status, b, c.status)
			}
			if c.code == "" {
				return
			}
			a, ok := cells.ReadProblem(r)
			if !ok || a.Code != c.code || a.Revision == 0 {
				t.Fatalf("%+v %v, want %s", a, r.Header, c.code)
			}
		})
	}
	// A body that fits still passes, and nothing above has run.
	if a := f.must(f.http, "POST", "/", strings.NewReader("x"), tenant("acme"), header("X-Op", "fits")); a.StatusCode != 200 {
		t.Fatal(a.Status)
	}
	if n := f.executions(""); n != 0 {
		t.Fatalf("%d refused requests have run", n)
	}
}

func TestTenantPlacedAMomentAgo(t *testing.T) {
	lag := &lagging{frozen: map[cells.TenantID]cells.Decision{}}
	table := cells.NewMemTable()
	t.Cleanup(func() { table.Close() })
	r := cells.NewRouter(table, cells.WithRouterLogger(quiet()))
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	lag.edgeRoutes = r
	f := newFleet(t, fleetOptions{table: table, routes: lag})
	lag.freeze("acme")
	f.place("acme", "b")
	if a := f.must(f.http, "GET", "/", nil, tenant("acme")); a.StatusCode != 200 || a.Header.Get("X-Cell") != "b" {
		t.Fatal(a.Status, a.body)
	}
}

func TestDefaultCell(t *testing.T) {
	f := newFleet(t, fleetOptions{fallbck: "a"})
	if a := f.must(f.http, "GET", "/", nil, tenant("anyone")); a.StatusCode != 200 || a.body != "a 0 anyone" {
		t.Fatal(a.Status, a.body)
	}
	f.place("anyone", "b")
	if a := f.must(f.http, "GET", "/", nil, tenant("anyone")); a.StatusCode != 200 || a.body != "b 1 anyone" {
		t.Fatal(a.Status, a.body)
	}
	if m := f.metric("cell_edge_default_requests_total"); m != "1" {
		t.Fatalf("counted %s requests to the default cell", m)
	}
}

// metric returns a sample of the admin listener's metrics.
func (f *fleet) metric(name string) string {
	f.t.Helper()
	resp, err := f.http.Get(f.admin + "/metrics")
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	sc := bufio.NewScanner(resp.Body)
	for sc.Scan() {
		if v, ok := strings.CutPrefix(sc.Text(), name+" "); ok {
			return v
		}
	}
	return ""
}
