// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/cmd/cell/load"
	"github.com/cloister-dev/cloister/internal/freeport"
	"github.com/cloister-dev/cloister/internal/pgcluster"
)

// page is the guide, of which every command is run.
const page = "../../../docs/adoption.md"

// adopter has the databases of a run: two servers, each with a synchronous standby.
type adopter struct {
	dir      string
	one, two *pgcluster.Cluster
}

func startAdopter(t *testing.T) *adopter {
	t.Helper()
	dir, err := os.MkdirTemp("", "cell-adoption-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // Postgres runs as another user
		t.Fatal(err)
	}
	a := &adopter{dir: dir}
	var wg sync.WaitGroup
	for name, to := range map[string]**pgcluster.Cluster{"one": &a.one, "two": &a.two} {
		var primary, standby *pgcluster.Cluster
		t.Cleanup(func() {
			for _, c := range []*pgcluster.Cluster{standby, primary} {
				if c != nil {
					_ = c.Stop()
				}
			}
		})
		wg.Go(func() {
			var err error
			if primary, err = pgcluster.Start(t.Context(), pgcluster.Options{Dir: filepath.Join(dir, name), NoSync: true}); err != nil {
				t.Error(err)
				return
			}
			*to = primary
			if standby, err = primary.Standby(t.Context(), filepath.Join(dir, name+"-standby")); err != nil {
				t.Error(err)
				return
			}
			conn, err := pgx.Connect(t.Context(), primary.URL("postgres"))
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close(context.WithoutCancel(t.Context()))
			for _, q := range []string{`ALTER SYSTEM SET synchronous_standby_names = '*'`, `SELECT pg_reload_conf()`} {
				if _, err := conn.Exec(t.Context(), q); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return a
}

// adopted is what came of a run.
type adopted struct {
	requests, writes, failed, lost, fresh int
	longest, took                         time.Duration
}

// newcomers are tenants that come one after the other while the guide is followed.
type newcomers struct {
	t      *testing.T
	client func(tenant string) *load.Client
	came   []string
	failed int
	first  error
}

func (n *newcomers) run(ctx context.Context) {
	for i := 0; ctx.Err() == nil; i++ {
		tenant := fmt.Sprintf("fresh-%d", i)
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		_, err := n.client(tenant).Set(rctx, "n", "k", tenant, -1)
		cancel()
		if n.came = append(n.came, tenant); err != nil {
			n.failed++
			n.first = errors.Join(n.first, fmt.Errorf("%s: %w", tenant, err))
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// lost counts those whose write is not there.
func (n *newcomers) lost() (lost int) {
	for _, tenant := range n.came {
		it, err := n.client(tenant).Get(n.t.Context(), "n", "k")
		if err != nil || string(it.Value) != strconv.Quote(tenant) {
			n.t.Errorf("the write of %s: %s, %v", tenant, it.Value, err)
			lost++
		}
	}
	return lost
}

// follow runs the guide from its first command to its last, on databases of its own,
// with clients from the first moment at which there is something to ask.
func (a *adopter) follow(t *testing.T, blocks []block, run int) (out adopted) {
	began := time.Now()
	dir := filepath.Join(a.dir, fmt.Sprintf("run-%d", run))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	env := []string{"PATH=" + bin + string(os.PathListSeparator) + os.Getenv("PATH"), "DRAIN=1s", "CACHE=0.2", "REQUEST=200ms", "PGPASSFILE=" + filepath.Join(dir, "pgpass")}
	var passwords strings.Builder
	for _, c := range []struct {
		of       *pgcluster.Cluster
		variable string
		name     string
	}{{a.one, "ONE_DSN", "one"}, {a.two, "TWO_DSN", "two"}, {a.one, "DIRECTORY", "directory"}} {
		name := fmt.Sprintf("%s_%d", c.name, run)
		if err := c.of.CreateDatabase(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		env = append(env, c.variable+"="+c.of.PublicURL(name))
		u, err := url.Parse(c.of.URL(name))
		if err != nil {
			t.Fatal(err)
		}
		password, _ := u.User.Password()
		fmt.Fprintf(&passwords, "%s:%s:*:postgres:%s\n", u.Hostname(), u.Port(), password)
	}
	if err := os.WriteFile(filepath.Join(dir, "pgpass"), []byte(passwords.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	at := map[string]string{}
	for _, name := range []string{"ONE", "A", "A_ADMIN", "B", "B_ADMIN", "C", "C_ADMIN", "ROUTER", "ROUTER_ADMIN"} {
		addr, err := freeport.Addr()
		if err != nil {
			t.Fatal(err)
		}
		at[name] = addr
		env = append(env, name+"="+addr)
	}
	for _, name := range []string{"A_PROBE", "B_PROBE", "C_PROBE"} {
		port, err := freeport.Port()
		if err != nil {
			t.Fatal(err)
		}
		env = append(env, fmt.Sprint(name, "=", port))
	}
	signOne, signTwo := issuer(t, filepath.Join(dir, "keys-one.json")), issuer(t, filepath.Join(dir, "keys-two.json"))
	env = append(env, "TOKEN="+signTwo("iss-two", "gamma"))
	balancer(t, at["ONE"], map[string]string{at["A"]: at["A_ADMIN"], at["B"]: at["B_ADMIN"]})

	hc := load.NewHTTPClient(32)
	defer hc.CloseIdleConnections()
	client := func(tenant string) *load.Client {
		return &load.Client{Base: "http://shared", Tenant: tenant, HTTP: &http.Client{Transport: &leads{base: hc.Transport, file: filepath.Join(dir, "shared-host"), token: signOne("iss-one", tenant)}}}
	}
	var hammers []*load.Hammer
	for _, tenant := range []string{"acme", "beta", "late"} {
		hammers = append(hammers, &load.Hammer{Client: client(tenant), Clients: 2, Keys: 3, Pause: 20 * time.Millisecond})
	}
	fresh := &newcomers{t: t, client: client}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	end := func() { stop(); wg.Wait() }
	defer end()
	sh := startShell(t, dir, env...)
	defer end() // before the shell is ended
	started := false
	var when []time.Time
	for _, b := range blocks {
		when = append(when, time.Now())
		sh.run(t, b)
		if _, err := os.Stat(filepath.Join(dir, "shared-host")); err == nil && !started {
			started = true
			for _, h := range hammers {
				wg.Go(func() { h.Run(ctx) })
			}
			wg.Go(func() { fresh.run(ctx) })
		}
	}
	end()
	if !started {
		t.Fatal("the guide has led nobody anywhere")
	}
	perStep := make([]struct{ asked, failed int }, len(blocks))
	for _, h := range hammers {
		for _, op := range h.Ops() {
			out.longest = max(out.longest, op.Return.Sub(op.Call))
			i := 0
			for i+1 < len(when) && op.Call.After(when[i+1]) {
				i++
			}
			perStep[i].asked++
			if op.Err != nil {
				perStep[i].failed++
			}
		}
		tally, err := h.Verify(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		mustBeClean(t, h.Client.Tenant, tally, false)
		out.requests, out.writes, out.failed, out.lost = out.requests+tally.Requests, out.writes+tally.Writes, out.failed+tally.Failed, out.lost+tally.Lost+tally.Duplicated+tally.Phantom
	}
	out.requests, out.writes, out.fresh = out.requests+len(fresh.came), out.writes+len(fresh.came)-fresh.failed, len(fresh.came)
	out.failed, out.lost = out.failed+fresh.failed, out.lost+fresh.lost()
	if fresh.failed > 0 {
		t.Errorf("%d of %d new tenants failed: %v", fresh.failed, len(fresh.came), fresh.first)
	}
	for i, b := range blocks {
		t.Logf("%-34s %5d requests, %d failed", b.heading, perStep[i].asked, perStep[i].failed)
	}
	said := sh.said.String()
	if !strings.Contains(said, "gamma: two at two.example.com") {
		t.Errorf("the second cell does not have its tenant:\n%s", said)
	}
	if got := (&leadsTo{at["ROUTER"], "two.example.com", signTwo("iss-two", "acme")}).set(t); got != "409 WRONG_CELL" {
		t.Errorf("a tenant of the first cell, at the second: %s", got)
	}
	out.took = time.Since(began)
	return out
}

// leadsTo asks one host with one token.
type leadsTo struct{ router, host, token string }

func (l *leadsTo) set(t *testing.T) string {
	d := &deployments{T: t, router: "http://" + l.router}
	return d.ask("POST", "/v1/memory.set", l.host, l.token, "", setItem)
}

// The guide from one deployment to two cells is followed, command by command, while
// clients read and write: no request fails and no write is lost. CELL_ADOPTION_RUNS
// follows it several times and prints a table.
func TestAdoption(t *testing.T) {
	runs := 1
	if v := os.Getenv("CELL_ADOPTION_RUNS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			t.Fatalf("CELL_ADOPTION_RUNS=%s", v)
		}
		runs = n
	}
	blocks := commands(t, page)
	a := startAdopter(t)
	table := "| run | requests | failed | writes | lost | new tenants | longest request | took |\n|---|---|---|---|---|---|---|---|\n"
	for i := range runs {
		t.Run(strconv.Itoa(i+1), func(t *testing.T) {
			r := a.follow(t, blocks, i+1)
			table += fmt.Sprintf("| %d | %d | %d | %d | %d | %d | %s | %s |\n", i+1, r.requests, r.failed, r.writes, r.lost, r.fresh, r.longest.Round(time.Millisecond), r.took.Round(time.Second))
		})
	}
	fmt.Print(table)
}
