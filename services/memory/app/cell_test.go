// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/wire"
	tenancypg "github.com/cloister-dev/cloister/guard/postgres/tenancy"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgtest"
)

const issuerName = "https://a.example"

// world is a cell's database, an issuer, and a directory that answers what the test
// says.
type world struct {
	t       *testing.T
	dsn     string
	rows    *tenancypg.Store
	issuers string
	sign    func(issuer string, tenant cells.TenantID) string

	mu        sync.Mutex // guards what follows
	attaching bool
	closed    bool
	elsewhere map[cells.TenantID]bool
	placed    []cells.TenantID
	id        string
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, dsn: pgtest.DB(t), attaching: true, elsewhere: map[cells.TenantID]bool{}}
	var err error
	if w.rows, err = tenancypg.Open(w.dsn); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.rows.Close)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name string, v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	write("keys.json", jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "k", Algorithm: "ES256"}}})
	w.issuers = write("issuers.json", []map[string]any{{"issuer": issuerName, "jwks": "keys.json"}, {"issuer": "https://users.example", "jwks": "keys.json", "tenants": []string{"u-*"}}})
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	w.sign = func(issuer string, tenant cells.TenantID) string {
		s, err := jwt.Signed(signer).Claims(map[string]any{"iss": issuer, "sub": "someone", "tenant": tenant, "exp": time.Now().Add(time.Hour).Unix()}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	router := httptest.NewServer(http.HandlerFunc(w.directory))
	t.Cleanup(router.Close)
	for name, v := range map[string]string{"CELL": "a", "CELL_PUBLIC_BASE_URL": "https://a.example", "CELL_ROUTER_URL": router.URL, "CELL_ROUTER_TOKEN": "lcr_" + strings.Repeat("ab", 64),
		"CELL_TENANCY_MODE_CACHE_S": "0.3"} {
		t.Setenv(name, v)
	}
	return w
}

// directory answers the two questions of a cell's process.
func (w *world) directory(rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	rw.Header().Set("Content-Type", api.ContentJSON)
	rw.Header().Set(api.HeaderRequestID, "r")
	if r.Method == http.MethodGet {
		_ = json.NewEncoder(rw).Encode(wire.CellState{Cell: "a", State: map[bool]deploy.State{true: deploy.Attaching, false: deploy.Serving}[w.attaching]})
		return
	}
	var c wire.Place
	if err := json.NewDecoder(r.Body).Decode(&c); err != nil || w.closed {
		cells.WriteProblem(rw, r, &cells.Answer{Code: cells.CodeCellClosed, RetryAfter: time.Second})
		return
	}
	w.placed = append(w.placed, c.Tenant)
	win := wire.Winner{Tenant: c.Tenant, Cell: "a", DeploymentID: c.Fingerprint.Value(tenancy.FieldDeploymentID)}
	if w.elsewhere[c.Tenant] {
		win = wire.Winner{Tenant: c.Tenant, Cell: "b", DeploymentID: "another"}
	}
	_ = json.NewEncoder(rw).Encode(win)
}

func (w *world) do(f func()) { w.mu.Lock(); defer w.mu.Unlock(); f() }

// start runs the program and returns its address.
func (w *world) start(args ...string) string {
	w.t.Helper()
	port, err := freeport.Port()
	if err != nil {
		w.t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan int, 1)
	var log strings.Builder
	go func() {
		done <- Main(ctx, append([]string{"--listen", addr, "--store", "postgres", "--dsn", w.dsn}, args...), &locked{w: &log})
	}()
	w.t.Cleanup(func() {
		cancel()
		if code := <-done; code != 0 {
			w.t.Errorf("ended with %d", code)
		}
	})
	w.until("it listens", func() bool {
		resp, err := http.Get("http://" + addr + "/livez")
		if err == nil {
			resp.Body.Close()
		}
		select {
		case code := <-done:
			done <- code
			w.t.Fatalf("ended with %d", code)
		default:
		}
		return err == nil
	})
	return "http://" + addr
}

type locked struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *locked) Write(p []byte) (int, error) { l.mu.Lock(); defer l.mu.Unlock(); return l.w.Write(p) }

func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(60 * time.Second); !ok(); <-tick.C {
		if time.Now().After(end) {
			w.t.Fatalf("waited in vain: %s", what)
		}
	}
}

// ask sends a request with a token for a tenant ("" for none) and returns the status,
// the code of the answer and its text.
func (w *world) ask(base, method, path, body, token string, header ...string) (int, string, string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), method, base+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header.Get(cells.HeaderAnswer), string(b)
}

const oneItem = `{"namespace":"n","key":"k","value":1}`

func (w *world) set(base string, tenant cells.TenantID) (int, string) {
	status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, w.sign(issuerName, tenant))
	return status, code
}

func (w *world) want(base string, tenant cells.TenantID, status int, code cells.Code) {
	w.t.Helper()
	if s, c := w.set(base, tenant); s != status || c != string(code) {
		w.t.Errorf("set for %s: %d %s, want %d %s", tenant, s, c, status, code)
	}
}

// untouched fails if any table has a row of the tenant.
func (w *world) untouched(tenant string) {
	w.t.Helper()
	all, err := w.rows.TenantsOfEveryTable(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, t := range all {
		if t == tenant {
			w.t.Errorf("there is a row of %s", tenant)
		}
	}
}

// prepare writes the cell's rows with the fingerprint that its process reports.
func (w *world) prepare(first bool, mode tenancy.Mode) {
	w.t.Helper()
	var beats []tenancy.Heartbeat
	w.until("the process reports", func() bool {
		var err error
		beats, err = w.rows.Heartbeats(w.t.Context(), time.Minute)
		return err == nil && len(beats) == 1 && beats[0].Fingerprint != nil
	})
	if _, err := w.rows.Prepare(w.t.Context(), tenancy.Preparation{First: tenancy.First{First: first, Cell: "a"}, Mode: mode, Self: &tenancy.Self{Current: beats[0].Fingerprint}}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) ready(base string) bool {
	status, _, _ := w.ask(base, "GET", "/readyz", "", "")
	return status == 200
}

// TestFirstCell takes a deployment from unprepared over recording to enforced, on a
// real database, and looks at who is served on the way.
func TestFirstCell(t *testing.T) {
	w := newWorld(t)
	base := w.start("--issuers", w.issuers)
	if status, _, text := w.ask(base, "GET", "/readyz", "", ""); status != 503 || !strings.Contains(text, "cell prepare") {
		t.Errorf("unprepared: %d %s", status, text)
	}
	w.want(base, "t1", 503, cells.CodeAuthUnavailable)
	w.prepare(true, tenancy.Recording)
	w.until("it is ready", func() bool { return w.ready(base) })

	// Without CELL a process of a recording cell serves as before.
	t.Setenv("CELL", "")
	alone := w.start()
	status, _, _ := w.ask(alone, "POST", "/v1/memory.set", oneItem, "", "X-Tenant", "before")
	if status != 200 || !w.ready(alone) {
		t.Errorf("without CELL while recording: %d", status)
	}
	t.Setenv("CELL", "a")

	w.want(base, "t1", 200, "")
	for _, c := range []struct{ tenant, named, token string }{{"t2", "t9", w.sign(issuerName, "t9")}, {"t3", "x", w.sign("https://users.example", "x")}, {"t4", "t4", "nonsense"}} {
		status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, c.token, "X-Tenant", c.tenant)
		if status/100 != 4 || code == "" {
			t.Errorf("a token that is not for %s: %d %s", c.tenant, status, code)
		}
		w.untouched(c.tenant)
	}
	w.do(func() { w.attaching = false })
	w.until("the directory's answer is seen", func() bool {
		s, _ := w.set(base, cells.TenantID(fmt.Sprint("n", time.Now().UnixNano())))
		return s == 503
	})
	w.want(base, "t1", 200, "") // held

	if m, err := w.rows.SetMode(t.Context(), tenancy.Enforced, tenancy.ModeWrite{}); err != nil || m != tenancy.Enforced {
		t.Fatalf("%q, %v", m, err)
	}
	if r, err := w.rows.EnsureTriggers(t.Context()); err != nil || len(r.Skipped) > 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	w.until("every process reports it", func() bool {
		beats, err := w.rows.Heartbeats(t.Context(), time.Minute)
		n := 0
		for _, b := range beats {
			if b.Mode == tenancy.Enforced {
				n++
			}
		}
		return err == nil && n == 2
	})
	w.do(func() { w.elsewhere["b1"] = true })
	w.want(base, "t1", 200, "")
	w.want(base, "new", 200, "")
	w.want(base, "b1", 409, cells.CodeWrongCell)
	w.untouched("b1")
	if status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, w.sign("https://users.example", "u-7")); status != 200 {
		t.Errorf("an end-user issuer's tenant: %d %s", status, code)
	}
	w.do(func() { w.closed = true })
	w.want(base, "new2", 503, cells.CodeBackendUnavailable)
	w.want(base, "new", 200, "")
	w.untouched("new2")

	// The one without CELL serves nothing now, and says why.
	status, code, _ := w.ask(alone, "POST", "/v1/memory.set", oneItem, "", "X-Tenant", "t1")
	ready, _, text := w.ask(alone, "GET", "/readyz", "", "")
	live, _, _ := w.ask(alone, "GET", "/livez", "", "")
	if status != 503 || code != string(cells.CodeAuthUnavailable) || ready != 503 || live != 200 || !strings.Contains(text, "CELL") {
		t.Errorf("without CELL: %d %s, ready %d %q, live %d", status, code, ready, text, live)
	}
	w.everyRoute(base)
	w.commands()
}

// everyRoute: each call refuses a tenant of another cell, and writes nothing for it.
func (w *world) everyRoute(base string) {
	w.do(func() { w.closed = false })
	bodies := map[string]string{"POST /v1/memory.bulk_set": `{"items":[` + oneItem + `]}`, "POST /v1/memory.bulk_get": `{"items":[{"namespace":"n","key":"k"}]}`,
		"POST /v1/memory.list": `{"namespace":"n"}`, "POST /v1/memory.set": oneItem}
	for route := range decided.Routes {
		method, path, ofAPI := strings.Cut(route, " ")
		if !ofAPI {
			continue // of people: TestProvisioning
		}
		body := bodies[route]
		if body == "" {
			body = `{"namespace":"n","key":"k"}`
		}
		for _, body := range []string{body, "nonsense"} {
			status, code, text := w.ask(base, method, path, body, w.sign(issuerName, "b1"))
			if status != 409 || code != string(cells.CodeWrongCell) {
				w.t.Errorf("%s of another cell's tenant: %d %s %s", route, status, code, text)
			}
		}
	}
	w.untouched("b1")
}

// commands: what a command line may write, with and without CELL and the credential.
func (w *world) commands() {
	token := os.Getenv("CELL_ROUTER_TOKEN")
	for _, c := range []struct {
		name, cell, token, tenant string
		code                      int
		words                     string
	}{
		{"held", "a", "", "t1", 0, "1 items"},
		{"unheld", "a", "", "new3", 1, "cell place"},
		{"with the credential", "a", token, "t1", 1, "CELL_ROUTER_TOKEN"},
		{"without CELL", "", "", "t1", 1, "CELL"},
	} {
		w.t.Setenv("CELL", c.cell)
		w.t.Setenv("CELL_ROUTER_TOKEN", c.token)
		if c.token == "" {
			w.t.Setenv("CELL_ROUTER_URL", "")
		} else {
			w.t.Setenv("CELL_ROUTER_URL", "http://127.0.0.1:1")
		}
		args := []string{"--tenant", c.tenant, "--dsn", w.dsn}
		if c.cell != "" {
			args = append(args, "--issuers", w.issuers)
		}
		var out strings.Builder
		if code := importMain(w.t.Context(), args, strings.NewReader(oneItem), &out); code != c.code || !strings.Contains(out.String(), c.words) {
			w.t.Errorf("%s: %d %s", c.name, code, out.String())
		}
	}
	w.untouched("new3")
	// A writer that knows nothing of the check is refused by the stores, behind the fence
	// that it has passed.
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close(w.t.Context())
	for tenant, refused := range map[string]bool{"t1": false, "new4": true} {
		tx, err := conn.Begin(w.t.Context())
		if err != nil {
			w.t.Fatal(err)
		}
		_, err = tx.Exec(w.t.Context(), `SELECT cell.admit_current($1)`, tenant)
		if err == nil {
			_, err = tx.Exec(w.t.Context(), `INSERT INTO memory_items VALUES ($1, 'n', 'raw', '1', 1, 1, 0, '', false, 0)`, tenant)
		}
		_ = tx.Rollback(w.t.Context())
		if (err != nil) != refused || err != nil && !strings.Contains(err.Error(), tenancy.SQLState) {
			w.t.Errorf("an older writer for %s: %v", tenant, err)
		}
	}
}

// A process with CELL set does not boot where it could not keep to the check.
func TestBootIsRefused(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		env  map[string]string
		args []string
		word string
	}{
		"SQLite":           {nil, []string{"--store", "sqlite", "--issuers", w.issuers}, "postgres"},
		"no issuers":       {nil, []string{"--store", "postgres", "--dsn", w.dsn}, "--issuers"},
		"no URL":           {map[string]string{"CELL_PUBLIC_BASE_URL": ""}, []string{"--store", "postgres", "--issuers", w.issuers}, "CELL_PUBLIC_BASE_URL"},
		"a bad name":       {map[string]string{"CELL": "A_1"}, nil, "CELL"},
		"a bad token":      {map[string]string{"CELL_ROUTER_TOKEN": "secret-token"}, nil, "CELL_ROUTER_TOKEN"},
		"issuers twice":    {map[string]string{"CELL_BEARER_ISSUERS": "x"}, []string{"--store", "postgres", "--issuers", w.issuers}, "CELL_BEARER_ISSUERS"},
		"issuers, no cell": {map[string]string{"CELL": ""}, []string{"--issuers", w.issuers}, "--issuers"},
	} {
		t.Run(name, func(t *testing.T) {
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Second, errors.New("it serves"))
			defer cancel()
			var out strings.Builder
			code := Main(ctx, append([]string{"--listen", "127.0.0.1:0"}, c.args...), &locked{w: &out})
			if code != 1 || !strings.Contains(out.String(), c.word) || strings.Contains(out.String(), "secret-token") {
				t.Errorf("%d: %s", code, out.String())
			}
		})
	}
}
