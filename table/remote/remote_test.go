// SPDX-License-Identifier: Apache-2.0

package remote_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/table/remote"
	"github.com/cloister-dev/cloister/table/tabletest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = remote.WithHandlerLogger(slog.New(slog.DiscardHandler))

// served is a client, the server that it talks to and the table behind.
type served struct {
	*remote.Client
	url  string
	back *cells.MemTable
}

func serve(tb tabletest.TB, back *cells.MemTable, opts ...remote.HandlerOption) *served {
	h := remote.Handler(back, append([]remote.HandlerOption{quiet}, opts...)...)
	srv := httptest.NewServer(h)
	tb.Cleanup(func() {
		_ = h.Close()
		srv.Close()
	})
	return &served{client(tb, srv.URL), srv.URL, back}
}

func client(tb tabletest.TB, url string, opts ...remote.ClientOption) *remote.Client {
	tr := &http.Transport{MaxIdleConnsPerHost: 64}
	c := remote.NewClient(&http.Client{Transport: tr}, url, append([]remote.ClientOption{remote.WithHeartbeat(100 * time.Millisecond)}, opts...)...)
	tb.Cleanup(func() {
		_ = c.Close()
		tr.CloseIdleConnections()
	})
	return c
}

func memTable(tb tabletest.TB) *cells.MemTable {
	m := cells.NewMemTable(cells.WithWatchIdle(10 * time.Millisecond))
	tb.Cleanup(func() { _ = m.Close() })
	return m
}

func TestConformance(t *testing.T) {
	tabletest.Run(t, tabletest.Harness{
		Open: func(tb tabletest.TB) cells.RoutingTable { return serve(tb, memTable(tb)) },
		Another: func(tb tabletest.TB, s cells.RoutingTable) cells.RoutingTable {
			return &served{client(tb, s.(*served).url), s.(*served).url, s.(*served).back}
		},
		Compact: func(_ tabletest.TB, s cells.RoutingTable) { s.(*served).back.Compact(1 << 62) },
	})
}

func row(id cells.TenantID) cells.TenantRoute {
	return cells.TenantRoute{TenantID: id, State: cells.StateActive, CellID: "a", Epoch: 1, Floor: 1, Stamp: "s"}
}

// Peers that are not a routing table are unavailable, never "no route".
func TestForeignPeers(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"a proxy's 404":     http.NotFound,
		"a login page":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>please log in</html>") },
		"another JSON":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"tenant":"x"}`) },
		"a 500":             func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "boom", 500) },
		"an unknown code":   problem(404, `{"code":"gone_fishing"}`),
		"a torn problem":    problem(404, `{"code":"not_fo`),
		"an untyped answer": func(w http.ResponseWriter, _ *http.Request) { w.Header()["Content-Type"] = nil; w.WriteHeader(200) },
		"an endless answer": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			for range 20 {
				if _, err := w.Write(make([]byte, 1<<20)); err != nil {
					return
				}
			}
		},
	} {
		srv := httptest.NewServer(h)
		c := client(t, srv.URL)
		_, getErr := c.Get(t.Context(), "t")
		_, listErr := c.List(t.Context(), cells.ListOptions{})
		_, casErr := c.CompareAndSet(t.Context(), 0, row("t"))
		_, watchErr := c.Watch(t.Context(), 0)
		for what, err := range map[string]error{"Get": getErr, "List": listErr, "CompareAndSet": casErr, "Watch": watchErr} {
			if !errors.Is(err, cells.ErrUnavailable) || errors.Is(err, cells.ErrNotFound) {
				t.Errorf("%s: %s: %v, want ErrUnavailable", name, what, err)
			}
		}
		srv.Close()
	}
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	if _, err := client(t, gone.URL).Get(t.Context(), "t"); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("nobody listens: %v, want ErrUnavailable", err)
	}
	for _, base := range []string{"", "directory:7001", "ftp://x", "http://", "http://x?y=z", "http://x#y", "http://%zz"} {
		if _, err := client(t, base).Get(t.Context(), "t"); !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("base %q: %v, want ErrInvalid", base, err)
		}
	}
}

func problem(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(status)
		fmt.Fprint(w, body)
	}
}

// Answers that contradict the question are not taken for it.
func TestWrongAnswers(t *testing.T) {
	good := row("t")
	good.Revision = 5
	other := good
	other.TenantID = "u"
	alien := good
	alien.Stamp = "of another writer"
	old := good
	old.Revision = 1
	for name, c := range map[string]struct {
		answer any
		call   func(*remote.Client) error
	}{
		"another tenant": {other, func(c *remote.Client) error { _, err := c.Get(t.Context(), "t"); return err }},
		"another stamp":  {alien, func(c *remote.Client) error { _, err := c.CompareAndSet(t.Context(), 2, row("t")); return err }},
		"an old row":     {old, func(c *remote.Client) error { _, err := c.CompareAndSet(t.Context(), 2, row("t")); return err }},
		"no row":         {map[string]int{}, func(c *remote.Client) error { _, err := c.Get(t.Context(), "t"); return err }},
		"a page out of order": {map[string]any{"routes": []any{other, good}, "revision": 9}, func(c *remote.Client) error {
			_, err := c.List(t.Context(), cells.ListOptions{})
			return err
		}},
		"a page that repeats": {map[string]any{"routes": []any{good}, "revision": 9, "next": "a"}, func(c *remote.Client) error {
			_, err := c.List(t.Context(), cells.ListOptions{})
			return err
		}},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(c.answer)
		}))
		if err := c.call(client(t, srv.URL)); !errors.Is(err, cells.ErrUnavailable) && !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v, want an error", name, err)
		}
		srv.Close()
	}
}

// A compare-and-set is on the wire once, whatever becomes of the answer.
func TestSwapIsSentOnce(t *testing.T) {
	m := memTable(t)
	h := remote.Handler(m, quiet)
	var posts, redirected atomic.Int64
	var cut atomic.Value // how to spoil the answer
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			h.ServeHTTP(w, r)
			return
		}
		posts.Add(1)
		switch cut.Load() {
		case "redirect":
			redirected.Add(1)
			http.Redirect(w, r, remote.Path, http.StatusTemporaryRedirect)
		default:
			h.ServeHTTP(httptest.NewRecorder(), r)
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_ = conn.Close()
		}
	}))
	defer srv.Close()
	c := client(t, srv.URL)
	for i := range 3 { // the connection is a used one from the second round on
		if _, err := c.List(t.Context(), cells.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		id := cells.TenantID(fmt.Sprintf("t%d", i))
		posts.Store(0)
		if _, err := c.CompareAndSet(t.Context(), 0, row(id)); !errors.Is(err, cells.ErrUnavailable) {
			t.Fatalf("the answer was lost: %v, want ErrUnavailable", err)
		}
		if posts.Load() != 1 {
			t.Fatalf("the change was sent %d times", posts.Load())
		}
		if got, err := c.Get(t.Context(), id); err != nil || got.Stamp != "s" {
			t.Fatalf("the caller cannot find out: %+v, %v", got, err)
		}
	}
	cut.Store("redirect")
	posts.Store(0)
	if _, err := c.CompareAndSet(t.Context(), 0, row("r")); !errors.Is(err, cells.ErrUnavailable) || posts.Load() != 1 {
		t.Fatalf("a redirect: %v after %d posts", err, posts.Load())
	}
}

// A peer that says nothing more is given up, during the begin and later.
func TestDeadPeer(t *testing.T) {
	release := make(chan struct{})
	var first atomic.Bool
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if first.Load() {
			w.Header().Set("Content-Type", "application/x-ndjson")
			fmt.Fprintln(w, `{"alive":true}`)
			_ = http.NewResponseController(w).Flush()
		}
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	defer srv.Close()
	defer close(release)
	c := client(t, srv.URL, remote.WithTimeout(100*time.Millisecond), remote.WithHeartbeat(50*time.Millisecond))
	if _, err := c.Watch(t.Context(), 0); !errors.Is(err, cells.ErrUnavailable) {
		t.Fatalf("a watch that is never answered: %v, want ErrUnavailable", err)
	}
	if _, err := c.Get(t.Context(), "t"); !errors.Is(err, cells.ErrUnavailable) {
		t.Fatalf("a get that is never answered: %v, want ErrUnavailable", err)
	}
	first.Store(true)
	w, err := c.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := w.Next(ctx); !errors.Is(err, cells.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a watch that fell silent: %v, want ErrUnavailable", err)
	}
}

// A heartbeat keeps the watch alive over a table that is silent, and is not
// passed on as a sign of life.
func TestHeartbeatIsNotASignOfLife(t *testing.T) {
	m := cells.NewMemTable(cells.WithWatchIdle(time.Hour))
	defer m.Close()
	s := serve(t, m)
	c := client(t, s.url, remote.WithHeartbeat(50*time.Millisecond))
	w, err := c.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond) // eight heartbeats; dead after three
	defer cancel()
	if up, err := w.Next(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, cells.ErrUnavailable) {
		t.Fatalf("over a silent table: %+v, %v; want to wait", up, err)
	}
	r, err := c.CompareAndSet(t.Context(), 0, row("t"))
	if err != nil {
		t.Fatal(err)
	}
	if up, err := w.Next(t.Context()); err != nil || up.Revision != r.Revision {
		t.Fatalf("after the wait: %+v, %v", up, err)
	}
}

func TestMalformedWatchLines(t *testing.T) {
	good := row("t")
	for name, lines := range map[string][]string{
		"no JSON":           {"nonsense"},
		"cut line":          {`{"revision":3,"rou`},
		"unknown error":     {`{"error":{"code":"novel","detail":"x"}}`},
		"backwards":         {update(5, at(good, 5)), update(3)},
		"repeated":          {update(5, at(good, 5)), update(6, at(good, 5))},
		"out of order":      {update(9, at(good, 7), at(row("u"), 6))},
		"above its line":    {update(5, at(good, 6))},
		"a malformed row":   {update(5, cells.TenantRoute{TenantID: "t", State: cells.StateActive, CellID: "A B", Epoch: 1, Revision: 5})},
		"an endless line":   {strings.Repeat("x", 5<<20)},
		"the end, silently": {update(5, at(good, 5))},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/x-ndjson")
			for _, l := range lines {
				fmt.Fprintln(w, l)
			}
		}))
		w, err := client(t, srv.URL).Watch(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		for err == nil {
			_, err = w.Next(ctx)
		}
		if !errors.Is(err, cells.ErrUnavailable) && !errors.Is(err, cells.ErrInvalid) {
			t.Errorf("%s: %v, want an error", name, err)
		}
		cancel()
		_ = w.Close()
		srv.Close()
	}
}

func at(r cells.TenantRoute, rev cells.Revision) cells.TenantRoute { r.Revision = rev; return r }

func update(rev cells.Revision, rows ...cells.TenantRoute) string {
	b, err := json.Marshal(map[string]any{"revision": rev, "routes": rows})
	if err != nil {
		panic(err)
	}
	return string(b)
}

// Large tables travel in bounded pieces, and no piece claims to be further than it is.
func TestLargeRows(t *testing.T) {
	m := memTable(t)
	const n = 300
	for i := range n {
		r := row(cells.TenantID(fmt.Sprintf("t%04d", i)))
		r.Reason = strings.Repeat("é<", 1300) // some 10 kB on the wire
		if _, err := m.CompareAndSet(t.Context(), 0, r); err != nil {
			t.Fatal(err)
		}
	}
	c := serve(t, m)
	rows := 0
	for after := cells.TenantID(""); ; {
		p, err := c.List(t.Context(), cells.ListOptions{After: after})
		if err != nil {
			t.Fatal(err)
		}
		rows += len(p.Routes)
		if after = p.Next; after == "" {
			break
		}
	}
	w, err := c.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	changes, lines := 0, 0
	for changes < n {
		up, err := w.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(up.Routes) > 0 && changes+len(up.Routes) < n && up.Revision != up.Routes[len(up.Routes)-1].Revision {
			t.Fatalf("a piece of an update says revision %d, its last row has %d", up.Revision, up.Routes[len(up.Routes)-1].Revision)
		}
		changes += len(up.Routes)
		lines++
	}
	if rows != n || changes != n || lines < 3 {
		t.Fatalf("listed %d and watched %d rows in %d lines, want %d", rows, changes, lines, n)
	}
}

func post(t *testing.T, url, body string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+remote.Path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(remote.HeaderWire, "1")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

func TestHandlerRefuses(t *testing.T) {
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	s := serve(t, memTable(t))
	const good = `{"old":0,"route":{"tenant":"t","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"revision":0}}`
	for name, body := range map[string]string{
		"empty":         "",
		"no JSON":       "x",
		"two documents": good + good,
		"unknown field": strings.Replace(good, `"old":0`, `"old":0,"novel":1`, 1),
		"unknown inner": strings.Replace(good, `"epoch":1`, `"epoch":1,"novel":1`, 1),
		"repeated":      strings.Replace(good, `"epoch":1`, `"epoch":9,"epoch":1`, 1),
		"other case":    strings.Replace(good, `"epoch":1`, `"epoch":1,"EPOCH":9`, 1),
		"negative":      strings.Replace(good, `"epoch":1`, `"epoch":-1`, 1),
		"huge number":   strings.Replace(good, `"epoch":1`, `"epoch":99999999999999999999999`, 1),
		"unknown state": strings.Replace(good, `ACTIVE`, `DORMANT`, 1),
		"deep":          strings.Repeat("[", 5000) + strings.Repeat("]", 5000),
		"large":         `{"old":0,"route":{"reason":"` + strings.Repeat("x", 600<<10) + `"}}`,
	} {
		if status, answer := post(t, s.url, body); status != 422 || !strings.Contains(answer, `"code":"invalid"`) {
			t.Errorf("%s: %d %s", name, status, answer)
		}
	}
	if status, answer := post(t, s.url, good, remote.HeaderWire, "2"); status != 422 {
		t.Errorf("another wire: %d %s", status, answer)
	}
	if status, answer := post(t, s.url, good); status != 200 {
		t.Errorf("a good one: %d %s", status, answer)
	}
	for _, path := range []string{
		"?limit=x", "?limit=-1", "?limit=1&limit=2", "?novel=1", "?limit=", "?watch=2", "?watch=1&from=x", "?watch=1&limit=1",
		"?from=1", "/", "/t?limit=1", "/a%20b", "?tenant=a%00", "x", "?limit=%zz",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+remote.Path+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != 422 {
			t.Errorf("GET %s: %s, want 422", path, res.Status)
		}
	}
}

func TestReadOnlyAndAuthorize(t *testing.T) {
	m := memTable(t)
	if _, err := m.CompareAndSet(t.Context(), 0, row("t")); err != nil {
		t.Fatal(err)
	}
	ro := serve(t, m, remote.ReadOnly())
	if _, err := ro.Get(t.Context(), "t"); err != nil {
		t.Error(err)
	}
	if _, err := ro.CompareAndSet(t.Context(), 0, row("u")); !errors.Is(err, remote.ErrReadOnly) {
		t.Errorf("a change of a read-only table: %v, want ErrReadOnly", err)
	}
	var mu sync.Mutex
	var ops []remote.Op
	var verdict error
	guarded := serve(t, m, remote.WithAuthorize(func(_ *http.Request, op remote.Op) error {
		mu.Lock()
		defer mu.Unlock()
		ops = append(ops, op)
		return verdict
	}))
	all := func() []error {
		_, getErr := guarded.Get(t.Context(), "t")
		_, listErr := guarded.List(t.Context(), cells.ListOptions{})
		_, casErr := guarded.CompareAndSet(t.Context(), 0, row("v"))
		w, watchErr := guarded.Watch(t.Context(), 0)
		if watchErr == nil {
			_ = w.Close()
		}
		return []error{getErr, listErr, casErr, watchErr}
	}
	for _, c := range []struct{ verdict, want error }{
		{nil, nil}, {errors.New("secret reason"), remote.ErrForbidden}, {fmt.Errorf("%w: keys", cells.ErrUnavailable), cells.ErrUnavailable},
	} {
		mu.Lock()
		verdict = c.verdict
		mu.Unlock()
		for i, err := range all() {
			if c.want == nil && err != nil || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("call %d with verdict %v: %v, want %v", i, c.verdict, err, c.want)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the reason was sent: %v", err)
			}
		}
	}
	if got := fmt.Sprint(ops[:4]); got != "[read read write watch]" {
		t.Errorf("asked about %s", got)
	}
	if _, err := m.Get(t.Context(), "u"); !errors.Is(err, cells.ErrNotFound) {
		t.Errorf("a refused change was made: %v", err)
	}
}

func TestMaxWatchesAndClose(t *testing.T) {
	m := memTable(t)
	h := remote.Handler(m, quiet, remote.WithMaxWatches(1))
	srv := &http.Server{Handler: h, WriteTimeout: 150 * time.Millisecond, ReadHeaderTimeout: time.Second}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	c := client(t, "http://"+l.Addr().String(), remote.WithHeartbeat(50*time.Millisecond))
	w, err := c.Watch(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := c.Watch(t.Context(), 0); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a watch too many: %v, want ErrUnavailable", err)
	}
	for begin := time.Now(); time.Since(begin) < 400*time.Millisecond; { // beyond the server's write timeout
		if _, err := w.Next(t.Context()); err != nil {
			t.Fatalf("the server's write timeout ends the watch: %v", err)
		}
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil {
		t.Fatalf("Shutdown after Close: %v", err)
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		t.Fatal(err)
	}
	for err = nil; err == nil; {
		_, err = w.Next(ctx)
	}
	if !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("a watch of a server that shut down: %v, want ErrUnavailable", err)
	}
}

func FuzzSwapBody(f *testing.F) {
	f.Add(`{"old":0,"route":{"tenant":"t","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"revision":0}}`)
	f.Add(`{"old":0,"route":{"tenant":"t","state":"ACTIVE","cell":"a","epoch":1,"floor":1,"residue":[{"cell":"b","epoch":1,"move":"m"}]}}`)
	f.Add(`{"old":-1}`)
	f.Fuzz(func(t *testing.T, body string) {
		m := cells.NewMemTable()
		defer m.Close()
		rec := httptest.NewRecorder()
		req := httptest.NewRequest(http.MethodPost, remote.Path, strings.NewReader(body))
		req.Header.Set(remote.HeaderWire, "1")
		remote.Handler(m, quiet).ServeHTTP(rec, req)
		p, err := m.List(t.Context(), cells.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if (rec.Code == 200) != (len(p.Routes) == 1) {
			t.Fatalf("status %d with %d rows", rec.Code, len(p.Routes))
		}
	})
}

func BenchmarkTable(b *testing.B) {
	tabletest.Benchmark(b, func(tb testing.TB) cells.RoutingTable { return serve(tb, cells.NewMemTable()) })
}
