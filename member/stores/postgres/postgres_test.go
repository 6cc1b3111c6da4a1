// SPDX-License-Identifier: Apache-2.0

package postgres_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgcluster"
	"github.com/cloister-dev/cloister/internal/pgtest"
	"github.com/cloister-dev/cloister/member/stores"
	"github.com/cloister-dev/cloister/member/stores/postgres"
	"github.com/cloister-dev/cloister/member/stores/storestest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// urls remembers which database a store is on.
type urls struct {
	mu sync.Mutex
	of map[stores.Store]string
}

func (u *urls) open(tb storestest.TB, url string) stores.Store {
	s, err := postgres.Open(tb.Context(), postgres.Config{URL: url})
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	tb.Cleanup(s.Close)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.of[s] = url
	return s
}

func (u *urls) exec(tb storestest.TB, s stores.Store, q string, args ...any) {
	u.mu.Lock()
	url := u.of[s]
	u.mu.Unlock()
	exec(tb, url, q, args...)
}

func exec(tb storestest.TB, url, q string, args ...any) {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), url)
	if err != nil {
		tb.Fatalf("connect: %v", err)
	}
	defer conn.Close(tb.Context())
	if _, err := conn.Exec(tb.Context(), q, args...); err != nil {
		tb.Fatalf("%s: %v", q, err)
	}
}

func TestConformance(t *testing.T) {
	u := &urls{of: map[stores.Store]string{}}
	storestest.Run(t, storestest.Harness{
		New:     func(tb storestest.TB) stores.Store { return u.open(tb, pgtest.DB(t)) },
		Another: func(tb storestest.TB, s stores.Store) stores.Store { return u.open(tb, u.of[s]) },
		Fill: func(tb storestest.TB, s stores.Store, tenant string) {
			u.exec(tb, s, `CREATE TABLE IF NOT EXISTS notes (id bigserial, tenant_id text)`)
			u.exec(tb, s, `INSERT INTO notes (tenant_id) VALUES ($1), (NULL)`, tenant)
		},
		Garble: func(tb storestest.TB, s stores.Store, text string) {
			u.exec(tb, s, `UPDATE cell_stores.reserved SET value = $1 WHERE name = 'cell-probe'`, text)
		},
		Down:   func(tb storestest.TB) stores.Store { return stopped(t, tb) },
		Column: true,
	})
}

// stopped returns a store whose server has ended since.
func stopped(t *testing.T, tb storestest.TB) stores.Store {
	url := pgtest.DB(t)
	s, err := postgres.Open(tb.Context(), postgres.Config{URL: url})
	if err != nil {
		tb.Fatalf("open: %v", err)
	}
	tb.Cleanup(s.Close)
	// A database that is gone is as unreachable as its server; other tests share that.
	base := url[:strings.LastIndexByte(url, '/')]
	name, query, _ := strings.Cut(url[len(base)+1:], "?")
	exec(tb, base+"/postgres?"+query, fmt.Sprintf(`ALTER DATABASE %s ALLOW_CONNECTIONS false`, name))
	exec(tb, base+"/postgres?"+query, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1`, name)
	return s
}

func TestOpenRefuses(t *testing.T) {
	const secret = "hunter2"
	port, err := freeport.Port()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  postgres.Config
		want error
	}{
		"url":     {postgres.Config{URL: "postgres://me:" + secret + "@host:x/db"}, cells.ErrInvalid},
		"schema":  {postgres.Config{URL: pgtest.DB(t), Schema: `a"; DROP SCHEMA public; --`}, cells.ErrInvalid},
		"nothing": {postgres.Config{URL: fmt.Sprintf("postgres://me:%s@127.0.0.1:%d/db", secret, port)}, cells.ErrUnavailable},
	} {
		s, err := postgres.Open(t.Context(), c.cfg)
		if s != nil || !errors.Is(err, c.want) || strings.Contains(fmt.Sprint(err), secret) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// Many processes that start at once on a new database all find the table.
func TestOpenAtOnce(t *testing.T) {
	url := pgtest.DB(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			s, err := postgres.Open(t.Context(), postgres.Config{URL: url})
			if err != nil {
				t.Error(err)
				return
			}
			s.Close()
		})
	}
	wg.Wait()
}

// A role that may only use the table opens it; one that may not make it is told.
func TestRoles(t *testing.T) {
	url := pgtest.DB(t)
	role := fmt.Sprintf("stores_role_%d", time.Now().UnixNano())
	exec(t, url, fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD 'secret'`, role))
	as := asRole(url, role)
	if _, err := postgres.Open(t.Context(), postgres.Config{URL: as}); !errors.Is(err, cells.ErrInvalid) {
		t.Fatalf("a role that may not make the table: %v", err)
	}
	owner, err := postgres.Open(t.Context(), postgres.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close()
	exec(t, url, fmt.Sprintf(`GRANT USAGE ON SCHEMA cell_stores TO %s`, role))
	exec(t, url, fmt.Sprintf(`GRANT SELECT, INSERT, UPDATE, DELETE ON cell_stores.reserved TO %s`, role))
	user, err := postgres.Open(t.Context(), postgres.Config{URL: as})
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	n := stores.NewNonce()
	if err := owner.WriteNonce(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if got, err := user.ReadNonce(t.Context()); err != nil || got != n {
		t.Fatalf("%.8s, %v", got, err)
	}

	// A policy that hides a tenant's rows is an error, not an empty store.
	exec(t, url, `CREATE TABLE hidden (tenant text); INSERT INTO hidden VALUES ('acme');
		ALTER TABLE hidden ENABLE ROW LEVEL SECURITY; CREATE POLICY none ON hidden USING (false)`)
	exec(t, url, fmt.Sprintf(`GRANT SELECT ON hidden TO %s`, role))
	if empty, _, err := user.Empty(t.Context()); empty || err == nil {
		t.Errorf("with rows that are hidden: empty %v, %v", empty, err)
	}
	if empty, holds, err := owner.Empty(t.Context()); empty || err != nil || !strings.Contains(holds, "hidden") {
		t.Errorf("for the owner: %v, %s, %v", empty, holds, err)
	}
}

func asRole(url, role string) string {
	scheme, rest, _ := strings.Cut(url, "://")
	_, rest, _ = strings.Cut(rest, "@")
	return scheme + "://" + role + ":secret@" + rest
}

// What is looked at: partitions once, through their root; odd names; no views, no
// schemas that are the platform's.
func TestTables(t *testing.T) {
	url := pgtest.DB(t)
	s, err := postgres.Open(t.Context(), postgres.Config{URL: url, TenantColumns: []string{"Org id", "tenant"}, Own: []string{"platform"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	exec(t, url, `CREATE SCHEMA platform; CREATE TABLE platform.fence (tenant text); INSERT INTO platform.fence VALUES ('own');
		CREATE TABLE ids (tenant bigint); CREATE VIEW v AS SELECT 'view'::text AS tenant;
		CREATE SCHEMA "Odd "".";  CREATE TABLE "Odd ""."."T"";" ("Org id" text, dropped text); ALTER TABLE "Odd ""."."T"";" DROP COLUMN dropped;
		CREATE TABLE parts (tenant text, day int) PARTITION BY LIST (day); CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1)`)
	if empty, holds, err := s.Empty(t.Context()); !empty || err != nil {
		t.Fatalf("before: %v, %s, %v", empty, holds, err)
	}
	exec(t, url, `INSERT INTO ids VALUES (7); INSERT INTO parts VALUES ('part', 1); INSERT INTO "Odd ""."."T"";" VALUES ('odd'), ('*')`)
	got, err := s.Tenants(t.Context())
	if want := []string{"7", "odd", "part"}; err != nil || !slices.Equal(got, want) {
		t.Fatalf("tenants %q, %v; want %q", got, err, want)
	}
}

// A standby has the nonce too, and is not asked: neither by a process that starts,
// nor by one that was connected to the server when it was the primary.
func TestStandby(t *testing.T) {
	dir, err := os.MkdirTemp("", "cell-pg-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c, err := pgcluster.Start(t.Context(), pgcluster.Options{Dir: filepath.Join(dir, "c"), NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Stop() })
	url := c.URL("postgres")
	s, err := postgres.Open(t.Context(), postgres.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	n := stores.NewNonce()
	if err := s.WriteNonce(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	signal := filepath.Join(dir, "c", "data", "standby.signal")
	if err := os.WriteFile(signal, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	var value string
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if err := conn.QueryRow(t.Context(), `SELECT value FROM cell_stores.reserved WHERE name = 'cell-probe'`).Scan(&value); err != nil || value != string(n) {
		t.Fatalf("the standby has %.8s, %v; want the nonce, or this shows nothing", value, err)
	}
	if got, err := s.ReadNonce(t.Context()); !errors.Is(err, cells.ErrUnavailable) || got != "" {
		t.Errorf("from a standby: %.8s, %v; want ErrUnavailable", got, err)
	}
	if _, _, err := s.Empty(t.Context()); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("empty, from a standby: %v; want ErrUnavailable", err)
	}
	if _, err := postgres.Open(t.Context(), postgres.Config{URL: url}); !errors.Is(err, cells.ErrUnavailable) {
		t.Errorf("opening a standby: %v; want ErrUnavailable", err)
	}
}
