// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/guard/tenancy"
)

// beforeTheCheck is the last commit whose memory service knows nothing of cells that are
// deployments.
const beforeTheCheck = "230f599ac17ab031646f9b2f8ff3cc30a1d27cff"

// olderBuild builds memory and cell as an older version of what a cell keeps, from the
// same sources; it returns their folder.
func olderBuild(t *testing.T, schema int) string {
	t.Helper()
	dir := t.TempDir()
	for _, b := range []struct{ dir, pkg, out string }{{"..", ".", "cell"}, {"../../../services", "./memory/cmd/memory", "memory"}} {
		cmd := exec.Command("go", "build", "-ldflags", fmt.Sprintf("-X github.com/cloister-dev/cloister/guard/tenancy.schema=%d", schema), "-o", filepath.Join(dir, b.out), b.pkg)
		cmd.Dir = b.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("building %s: %v\n%s", b.out, err, out)
		}
	}
	return dir
}

// ancientBuild builds memory as it was at a commit, or returns "" where the history is
// not at hand.
func ancientBuild(t *testing.T, commit string) string {
	t.Helper()
	root := filepath.Join("..", "..", "..")
	if exec.Command("git", "-C", root, "cat-file", "-e", commit+"^{commit}").Run() != nil {
		return ""
	}
	dir := t.TempDir()
	untar := exec.Command("tar", "-x", "-C", dir)
	archive := exec.Command("git", "-C", root, "archive", commit)
	var err error
	if untar.Stdin, err = archive.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := archive.Start(); err != nil {
		t.Fatal(err)
	}
	if out, err := untar.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	if err := archive.Wait(); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "memory"), "./memory/cmd/memory")
	build.Dir = filepath.Join(dir, "services")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", commit, err, out)
	}
	return filepath.Join(dir, "memory")
}

// at asks one process, past the router.
func (s *service) at(op, token, tenant, body string) string {
	s.Helper()
	d := &deployments{T: s.T, router: "http://" + s.addr}
	return d.ask("POST", "/v1/memory."+op, s.host, token, tenant, body)
}

// why is what /readyz says of a process that is not ready; "" of one that is.
func (s *service) why() string {
	resp, err := http.Get("http://" + s.admin + "/readyz")
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return ""
	}
	b, err := io.ReadAll(resp.Body)
	return fmt.Sprint(string(b), err)
}

// Two builds of the programs, side by side: the older one runs on the rows that the newer
// has installed, both are processes of one cell while it is prepared and attached, what
// the older does not know of a configuration counts at its default, and an older build
// serves nothing that it should not.
func TestTwoBuilds(t *testing.T) {
	older := olderBuild(t, 1)
	d := startDeployments(t)
	one := d.service("one", "app.example.com")
	db, err := pgx.Connect(t.Context(), one.settings["CELL_DSN"])
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(t.Context())
	query := func(sql string) (out string) {
		t.Helper()
		if err := db.QueryRow(t.Context(), sql).Scan(&out); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		return out
	}
	expect := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	const version, held = `SELECT version::text FROM cell.tenancy_meta`, `SELECT count(*)::text FROM cell.tenancy`

	// A deployment that was never prepared: the newer build starts beside the older one.
	one.memory = filepath.Join(older, "memory")
	one.start(false)
	expect("the older build's rows", query(version), "1")
	d.startRouter(one)
	next := one.beside("")
	next.start(false)
	expect("the newer build's rows", query(version), fmt.Sprint(tenancy.NewestSchema))
	for _, p := range []struct{ write, read *service }{{one, next}, {next, one}} {
		expect("a write before prepare", p.write.at("set", "", "acme", setItem), "200")
		expect("a read before prepare", p.read.at("get", "", "acme", `{"namespace":"n","key":"k"}`), "200")
	}
	expect("tenancy rows before prepare", query(held), "0")

	// Prepared and attached by the newer command, with a process of each.
	one.run("prepare", "--host", "app.example.com", "--credential-sha256", one.sum)
	both := []*service{one, next}
	for _, p := range both {
		expect("prepared, without CELL", p.at("set", "", "acme", setItem), "200")
		p.stop()
		p.start(true)
	}
	serve := func(when, tenant string) {
		t.Helper()
		for i, p := range both {
			expect(when+", ready", p.why(), "")
			expect(when+", a new tenant", p.at("set", d.sign("iss-one", fmt.Sprint(tenant, i)), "", setItem), "200")
		}
		for i, p := range both {
			expect(when+", what the other has written", p.at("get", d.sign("iss-one", fmt.Sprint(tenant, 1-i)), "", `{"namespace":"n","key":"k"}`), "200")
		}
	}
	serve("recording", "rec")
	eventually(t, "both report what they know", func() bool {
		return query(`SELECT string_agg((fingerprint::jsonb ->> 'schema') || ' ' || (fingerprint::jsonb -> 'fields' ? 'audiences')::text || ' ' || cache_ms || ' ' || coalesce(settings ->> 'drain', '-'), ', ' ORDER BY cache_ms) FROM cell.heartbeats`) ==
			fmt.Sprintf("1 false 0 -, %d true 200 0s", tenancy.NewestSchema)
	})
	attach := []string{"attach", "--allow-asynchronous", "--request-deadline", "100ms", "--alive", "3s", "--wait", "60s"}
	one.run(attach...)
	serve("attached", "enf")
	old := one.command("attach", "--allow-asynchronous")
	old.Path = filepath.Join(older, "cell")
	if out, err := old.CombinedOutput(); err != nil || !strings.Contains(string(out), "serves already") {
		t.Errorf("the older command: %v\n%s", err, out)
	}

	// A field that the older build lacks: its default is what the row has, so a process of
	// the newer build that sets it is another configuration, until cell update takes it.
	strict := next.beside("")
	strict.issuers = d.json("issuers-strict.json", []map[string]any{{"issuer": "iss-one", "jwks": "keys.json", "audience": "svc"}})
	strict.start(true)
	if why := strict.why(); !strings.Contains(why, "audiences") {
		t.Errorf("a process with an audience is ready or says %q", why)
	}
	expect("a process with an audience", strict.at("set", d.sign("iss-one", "acme"), "", setItem), "503 AUTH_UNAVAILABLE")
	env, err := os.ReadFile(one.env)
	if err != nil {
		t.Fatal(err)
	}
	audience := filepath.Join(d.dir, "audience.env")
	if err := os.WriteFile(audience, append(env, "CELL_BEARER_AUDIENCES={\"iss-one\":\"svc\"}\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	one.run("update", "--config", audience)
	eventually(t, "the process with an audience is ready", strict.ready)
	serve("while the configuration changes", "upd")
	next.stop()
	one.run("update", "--finish", "--request-deadline", "100ms", "--alive", "3s", "--wait", "60s")
	expect("the older build, after the change", one.why(), "")
	expect("the newer build, after the change", strict.why(), "")
	expect("a token for somebody else", strict.at("set", d.sign("iss-one", "acme"), "", setItem), "401 UNAUTHENTICATED")
	next.start(true)
	if why := next.why(); !strings.Contains(why, "audiences") {
		t.Errorf("a process without the audience is ready or says %q", why)
	}
	next.stop()

	// Back to the older build: it goes by the same rows, and leaves them the newer's.
	drift := one.beside(filepath.Join(older, "memory"))
	drift.issuers = d.json("issuers-drift.json", []map[string]any{{"issuer": "iss-one", "jwks": "keys.json"}, {"issuer": "iss-two", "jwks": "keys.json"}})
	drift.start(true)
	if why := drift.why(); !strings.Contains(why, "issuers") {
		t.Errorf("the older build with another cell's issuer is ready or says %q", why)
	}
	expect("the older build with another cell's issuer", drift.at("set", d.sign("iss-one", "acme"), "", setItem), "503 AUTH_UNAVAILABLE")
	drift.stop()
	bare := one.beside(filepath.Join(older, "memory"))
	bare.start(false)
	if why := bare.why(); !strings.Contains(why, "CELL") {
		t.Errorf("the older build without CELL is ready or says %q", why)
	}
	expect("the older build without CELL", bare.at("set", "", "acme", setItem), "503 AUTH_UNAVAILABLE")
	bare.stop()
	expect("the rows after the older build", query(version), fmt.Sprint(tenancy.NewestSchema))

	// Back beyond the check: such a build asks nobody, and the stores refuse it.
	t.Run("before the check", func(t *testing.T) {
		memory := ancientBuild(t, beforeTheCheck)
		if memory == "" {
			t.Skip("the history is not here: a shallow clone, or no repository")
		}
		p := one.beside(memory)
		p.deployments = &deployments{T: t, dir: d.dir}
		cmd := exec.Command(memory, "--listen", p.addr, "--store", "postgres", "--dsn", p.settings["CELL_DSN"])
		logs := &syncBuffer{}
		cmd.Stderr = logs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if t.Failed() {
				t.Logf("%s", logs)
			}
		})
		eventually(t, "it listens", func() bool {
			c, err := net.Dial("tcp", p.addr)
			if err == nil {
				_ = c.Close()
			}
			return err == nil
		})
		if got := p.at("set", "", "acme", setItem); got != "200" {
			t.Errorf("a tenant that the cell holds: %s", got)
		}
		if got := p.at("set", "", "stranger", setItem); !strings.HasPrefix(got, "5") {
			t.Errorf("a tenant that it does not hold: %s", got)
		}
		for _, sql := range []string{`SELECT count(*)::text FROM memory_items WHERE tenant = 'stranger'`, `SELECT count(*)::text FROM cell.tenancy WHERE tenant = 'stranger'`} {
			if n := query(sql); n != "0" {
				t.Errorf("%s: %s", sql, n)
			}
		}
	})
}
