// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/cloister-dev/cloister/internal/pgcluster"
)

// Two cells, each with a Postgres server of its own, and one for the directory: the
// directory goes while the first cell records and when both serve, and a cell's server
// goes. Whoever does not need what is gone is served.
func TestDeploymentOutages(t *testing.T) {
	d := startDeployments(t)
	server := func(name string) *pgcluster.Cluster {
		t.Helper()
		c, err := pgcluster.Start(t.Context(), pgcluster.Options{Dir: filepath.Join(d.dir, "pg-"+name), NoSync: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Stop() })
		return c
	}
	directory, other := server("directory"), server("two")
	stop := func(c *pgcluster.Cluster) {
		t.Helper()
		if err := c.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	again := func(c *pgcluster.Cluster) {
		t.Helper()
		if err := c.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	d.directory = directory.URL("postgres")
	one := d.service("one", "app.example.com")
	elsewhere := *d
	elsewhere.pg = other
	two := elsewhere.service("two", "two.example.com")
	two.deployments = d
	two.settings["CELL_TENANCY_MAX_STALE_S"] = "3"

	one.start(false)
	d.startRouter(one)
	set := func(host, issuer, tenant string) string {
		return d.ask("POST", "/v1/memory.set", host, d.sign(issuer, tenant), tenant, setItem)
	}
	lookup := func(tenant string) string { return d.ask("GET", "/cells/lookup?tenant="+tenant, "x", "", "", "") }
	expect := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	comes := func(what, want string, ask func() string) {
		t.Helper()
		eventually(t, what, func() bool { return ask() == want })
	}
	db, err := pgx.Connect(t.Context(), one.settings["CELL_DSN"])
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(t.Context())
	untouched := func(tenant string) {
		t.Helper()
		var n int
		if err := db.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM cell.tenancy WHERE tenant = $1) + (SELECT count(*) FROM memory_items WHERE tenant = $1)`, tenant).Scan(&n); err != nil || n != 0 {
			t.Errorf("%d rows of %s, %v", n, tenant, err)
		}
	}

	// A cell in recording, the directory unreadable.
	one.run("prepare", "--host", "app.example.com", "--credential-sha256", one.sum)
	one.stop()
	one.start(true)
	comes("a tenant is recorded", "200", func() string { return set("app.example.com", "iss-one", "acme") })
	stop(directory)
	refused := ""
	for i := 0; refused == ""; i++ { // what the directory answered last is believed for a moment
		tenant := fmt.Sprint("unrecorded-", i)
		switch got := set("app.example.com", "iss-one", tenant); {
		case got == "503 BACKEND_UNAVAILABLE":
			refused = tenant
		case got != "200" || i == 10_000:
			t.Fatalf("recording without the directory, new tenant %d: %s", i, got)
		}
	}
	untouched(refused)
	expect("recording without the directory, a held tenant", set("app.example.com", "iss-one", "acme"), "200")
	again(directory)
	comes("with the directory again", "200", func() string { return set("app.example.com", "iss-one", refused) })

	attach := []string{"attach", "--allow-asynchronous", "--request-deadline", "100ms", "--alive", "3s", "--wait", "60s"}
	one.run(attach...)
	two.start(true)
	two.run("prepare", "--host", "two.example.com", "--credential-sha256", two.sum, "--probe-url", "http://"+two.probe)
	two.stop()
	two.start(true)
	eventually(t, "two is ready", two.ready)
	later := append(attach, "--upstream", "http://"+two.addr, "--cells", filepath.Join(d.dir, "cells"))
	eventually(t, "two is attached", func() bool { return two.command(later...).Run() == nil })
	comes("a tenant of two, at its host", "200", func() string { return set("two.example.com", "iss-two", "gamma") })
	comes("a tenant of two, by its issuer", "200", func() string { return set("app.example.com", "iss-two", "gamma") })
	expect("a lookup", lookup("gamma"), "200")

	// The directory is down.
	stop(directory)
	comes("a new tenant without the directory", "503 BACKEND_UNAVAILABLE", func() string { return set("app.example.com", "iss-one", "new-2") })
	untouched("new-2")
	for range 3 {
		expect("by host, without the directory", set("two.example.com", "iss-two", "gamma"), "200")
		expect("by issuer, without the directory", set("app.example.com", "iss-two", "gamma"), "200")
		expect("to the first cell, without the directory", set("app.example.com", "iss-one", "acme"), "200")
		expect("a tenant of another cell, without the directory", set("two.example.com", "iss-two", "acme"), "503 BACKEND_UNAVAILABLE")
		expect("a lookup that was asked before", lookup("gamma"), "200")
		expect("a lookup that was not", lookup("unknown"), "503 BACKEND_UNAVAILABLE")
	}
	for _, args := range [][]string{{"place", "new-3"}, append([]string{}, attach...), {"restore"}} {
		if out, err := one.command(args...).CombinedOutput(); err == nil {
			t.Errorf("cell %s ran without the directory\n%s", args[0], out)
		}
	}
	limit := func(args ...string) ([]byte, error) {
		return exec.Command(filepath.Join(bin, "cell"), append([]string{"limit", "--router", d.router, "--credential-file", d.operator, "--cell", "two"}, args...)...).CombinedOutput()
	}
	if out, err := limit("--closed"); err == nil {
		t.Errorf("a limit without the directory\n%s", out)
	}
	doctor := exec.Command(filepath.Join(bin, "cell"), "doctor", "--deployments", d.directory, "--store", "one="+one.settings["CELL_DSN"])
	if out, _ := doctor.CombinedOutput(); doctor.ProcessState.ExitCode() == 0 || !bytes.Contains(out, []byte("not run")) {
		t.Errorf("the doctor without the directory: exit %d\n%s", doctor.ProcessState.ExitCode(), out)
	}
	again(directory)
	comes("a new tenant, with the directory again", "200", func() string { return set("app.example.com", "iss-one", "new-2") })

	// A cell's server is down.
	stop(other)
	eventually(t, "two fails", func() bool { return set("two.example.com", "iss-two", "gamma")[0] == '5' })
	for range 3 {
		expect("the other cell", set("app.example.com", "iss-one", "acme"), "200")
	}
	expect("a new tenant of the other cell", set("app.example.com", "iss-one", "new-4"), "200")
	if out, err := limit("--closed"); err != nil {
		t.Errorf("closing a cell that is down: %v\n%s", err, out)
	}
	eventually(t, "two is gated, once it could not read for too long", func() bool { return two.why() != "" })
	expect("a gated process", set("two.example.com", "iss-two", "gamma"), "503 AUTH_UNAVAILABLE")
	if two.beside("").try(true) {
		t.Error("a process whose first read fails boots")
	}
	again(other)
	comes("two is back", "200", func() string { return set("two.example.com", "iss-two", "gamma") })
	expect("a new tenant of a closed cell", set("two.example.com", "iss-two", "new-5"), "503 BACKEND_UNAVAILABLE")
	if out, err := limit("--open"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	comes("a new tenant of a cell that is open again", "200", func() string { return set("two.example.com", "iss-two", "new-5") })
}
