// SPDX-License-Identifier: Apache-2.0

package serverstest_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/clickhouse"
	"github.com/cloister-dev/cloister/member/stores/realtest/serverstest"
	"github.com/cloister-dev/cloister/member/stores/storestest"
)

// warehouse is a ClickHouse server whose databases are stores.
type warehouse struct {
	*serverstest.Server
	mu  sync.Mutex
	dbs map[stores.Store]string // guarded by mu
}

func startClickHouse(t *testing.T) *warehouse {
	t.Helper()
	return &warehouse{Server: serverstest.StartClickHouse(t), dbs: map[stores.Store]string{}}
}

// run runs a statement as the tests' own client.
func (w *warehouse) run(tb storestest.TB, db, statement string) string {
	tb.Helper()
	req, err := http.NewRequestWithContext(tb.Context(), http.MethodPost, w.URL+"/?wait_end_of_query=1&database="+url.QueryEscape(db), strings.NewReader(statement))
	if err != nil {
		tb.Fatalf("%v", err)
	}
	req.Header.Set("X-ClickHouse-User", serverstest.User)
	req.Header.Set("X-ClickHouse-Key", serverstest.Password)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		tb.Fatalf("%s: %v", statement, err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		tb.Fatalf("%s: %d %s %v", statement, res.StatusCode, text, err)
	}
	return string(text)
}

var databases atomic.Int64

func (w *warehouse) database(tb storestest.TB) string {
	db := fmt.Sprintf("cell %d`", databases.Add(1))
	w.run(tb, "default", "CREATE DATABASE `"+strings.ReplaceAll(db, "`", "\\`")+"`")
	return db
}

func (w *warehouse) open(tb storestest.TB, db string) stores.Store {
	s, err := clickhouse.Open(tb.Context(), clickhouse.Config{URL: w.URL, Database: db, User: serverstest.User, Password: serverstest.Password})
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	tb.Cleanup(s.Close)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dbs[s] = db
	return s
}

func (w *warehouse) of(s stores.Store) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dbs[s]
}

func (w *warehouse) harness() storestest.Harness {
	return storestest.Harness{
		New:     func(tb storestest.TB) stores.Store { return w.open(tb, w.database(tb)) },
		Another: func(tb storestest.TB, s stores.Store) stores.Store { return w.open(tb, w.of(s)) },
		Fill: func(tb storestest.TB, s stores.Store, tenant string) {
			w.run(tb, w.of(s), "CREATE TABLE IF NOT EXISTS `no``tes` (id UInt64, tenant Nullable(String)) ENGINE = MergeTree ORDER BY id")
			w.run(tb, w.of(s), "INSERT INTO `no``tes` (id, tenant) VALUES (1, '"+tenant+"'), (2, NULL)")
		},
		Garble: func(tb storestest.TB, s stores.Store, text string) {
			w.run(tb, w.of(s), "INSERT INTO cell_reserved (name, value, version) SELECT 'cell-probe', '"+text+"', toUInt64(max(version) + 1) FROM cell_reserved")
		},
		Down: func(tb storestest.TB) stores.Store {
			down := false // set before the requests that see it
			gone := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				if !down && r.Body != nil {
					fmt.Fprint(rw, `{"data":[["name String"],["value String"],["version UInt64"]]}`)
				}
			}))
			s, err := clickhouse.Open(tb.Context(), clickhouse.Config{URL: gone.URL})
			if err != nil {
				tb.Fatalf("open: %v", err)
			}
			gone.Close()
			return s
		},
		Column: true, Undecided: true,
	}
}

func TestClickHouse(t *testing.T) {
	w := startClickHouse(t)
	t.Logf("server %s", strings.TrimSpace(w.run(t, "default", "SELECT version()")))
	storestest.Run(t, w.harness())
}

// Every engine that holds rows is read, none that only shows or hands out others';
// an engine that is not known is an error.
func TestClickHouseEngines(t *testing.T) {
	w := startClickHouse(t)
	db := w.database(t)
	s := w.open(t, db)
	tenants := func() ([]string, error) { return s.(stores.TenantLister).Tenants(t.Context()) }
	for _, engine := range []string{"Log", "TinyLog", "Memory", "MergeTree ORDER BY tenant", "ReplacingMergeTree ORDER BY tenant"} {
		name := strings.ToLower(strings.Fields(engine)[0])
		w.run(t, db, "CREATE TABLE t_"+name+" (tenant String, tenant_id UInt64) ENGINE = "+engine)
		w.run(t, db, "INSERT INTO t_"+name+" VALUES ('of_"+name+"', 7)")
	}
	w.run(t, db, "CREATE VIEW v AS SELECT 'of_view' AS tenant")
	w.run(t, db, "CREATE TABLE n (tenant String) ENGINE = Null")
	w.run(t, db, "CREATE MATERIALIZED VIEW mv ENGINE = MergeTree ORDER BY tenant AS SELECT concat('mv_', tenant) AS tenant FROM n")
	w.run(t, db, "INSERT INTO n VALUES ('x')")
	want := []string{"7", "mv_x", "of_log", "of_memory", "of_mergetree", "of_replacingmergetree", "of_tinylog"}
	if got, err := tenants(); err != nil || !slices.Equal(got, want) {
		t.Errorf("tenants %q, %v; want %q", got, err, want)
	}
	w.run(t, db, "CREATE TABLE f (tenant String) ENGINE = File(TabSeparated)")
	if got, err := tenants(); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("with a table of engine File: %q, %v; want ErrInvalid", got, err)
	}
	if empty, _, err := s.Empty(t.Context()); empty || !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("with a table of engine File: empty %v, %v; want ErrInvalid", empty, err)
	}
}

// What has been deleted is gone from the disk when the call returns, and merges
// change nothing of what is read.
func TestClickHouseRows(t *testing.T) {
	w := startClickHouse(t)
	db := w.database(t)
	s := w.open(t, db)
	var last stores.Nonce
	for range 5 {
		last = stores.NewNonce()
		if err := s.WriteNonce(t.Context(), last); err != nil {
			t.Fatal(err)
		}
	}
	w.run(t, db, "OPTIMIZE TABLE cell_reserved PARTITION 'cell-probe' FINAL")
	if got, err := s.ReadNonce(t.Context()); err != nil || got != last {
		t.Fatalf("after a merge: %.8s, %v; want %.8s", got, err, last)
	}
	if err := s.DeleteNonce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(w.run(t, db, "SELECT count() FROM cell_reserved")); got != "0" {
		t.Errorf("%s rows after the delete", got)
	}
	// Two deployments that made their id at once leave a store that says so.
	w.run(t, db, "INSERT INTO cell_reserved VALUES ('deployment', '"+string(stores.NewDeploymentID())+"', 1)")
	w.run(t, db, "INSERT INTO cell_reserved VALUES ('deployment', '"+string(stores.NewDeploymentID())+"', 1)")
	if _, err := s.Identity(t.Context()); !errors.Is(err, stores.ErrMismatch) {
		t.Errorf("two ids: %v, want ErrMismatch", err)
	}
}

func TestClickHouseRefusals(t *testing.T) {
	w := startClickHouse(t)
	odd := w.database(t)
	w.run(t, odd, "CREATE TABLE cell_reserved (name String) ENGINE = Log")
	html := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "<html>") }))
	defer html.Close()
	away := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusBadGateway) }))
	defer away.Close()
	const secret = "hunter2"
	for name, c := range map[string]struct {
		edit func(*clickhouse.Config)
		want error
	}{
		"password": {func(c *clickhouse.Config) { c.Password = secret }, cells.ErrInvalid},
		"user":     {func(c *clickhouse.Config) { c.User = "nobody" }, cells.ErrInvalid},
		"reader":   {func(c *clickhouse.Config) { c.User = "reader" }, cells.ErrInvalid},
		"no user":  {func(c *clickhouse.Config) { c.User = "" }, cells.ErrInvalid},
		"lines":    {func(c *clickhouse.Config) { c.Password += "\r\nX: y" }, cells.ErrInvalid},
		"database": {func(c *clickhouse.Config) { c.Database = "not there" }, cells.ErrInvalid},
		"table":    {func(c *clickhouse.Config) { c.Database = odd }, cells.ErrInvalid},
		"scheme":   {func(c *clickhouse.Config) { c.URL = "clickhouse://host" }, cells.ErrInvalid},
		"userinfo": {func(c *clickhouse.Config) { c.URL = "http://me:" + secret + "@127.0.0.1:1" }, cells.ErrInvalid},
		"html":     {func(c *clickhouse.Config) { c.URL = html.URL }, cells.ErrInvalid},
		"proxy":    {func(c *clickhouse.Config) { c.URL = away.URL }, cells.ErrUnavailable},
		"away":     {func(c *clickhouse.Config) { c.URL = "http://127.0.0.1:1" }, cells.ErrUnavailable},
	} {
		cfg := clickhouse.Config{URL: w.URL, Database: w.database(t), User: serverstest.User, Password: serverstest.Password}
		c.edit(&cfg)
		s, err := clickhouse.Open(t.Context(), cfg)
		if s != nil || !errors.Is(err, c.want) || strings.Contains(fmt.Sprint(err), secret) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
