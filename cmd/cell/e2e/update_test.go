// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"os"
	"strings"
	"testing"
)

// updated changes what two accepts and where it is probed, and restores it, while its
// processes come and go. The router and one go on.
func (d *deployments) updated(t *testing.T, one, two *service) {
	serves := func(what, issuer, tenant, want string) {
		t.Helper()
		got := ""
		eventually(t, what, func() bool { // the router reads its table behind requests
			got = d.ask("POST", "/v1/memory.set", "app.example.com", d.sign(issuer, tenant), "", setItem)
			return got == want
		})
	}
	// config writes the settings of two with these issuers, for a command.
	config := func(issuers string) string {
		t.Helper()
		b, err := os.ReadFile(two.env)
		if err != nil {
			t.Fatal(err)
		}
		path := two.env + ".next"
		text := strings.ReplaceAll(string(b), "CELL_BEARER_ISSUERS=iss-two\n", "CELL_BEARER_ISSUERS="+issuers+"\n")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	update := func(args ...string) []string {
		return append([]string{"update", "--request-deadline", "100ms", "--alive", "3s", "--wait", "60s"}, args...)
	}
	serves("an issuer of nobody", "iss-more", "gamma", "401 UNKNOWN_ISSUER")
	two.refused("iss-one", update("--config", config("iss-two,iss-one"))...)
	two.run(update("--config", config("iss-two,iss-more"))...)
	two.refused("another next configuration", update("--config", config("iss-two,iss-other"))...)
	serves("reserved, and not rolled out", "iss-more", "gamma", "401 UNKNOWN_ISSUER")
	serves("the old configuration", "iss-two", "gamma", "200")
	two.refused("do not report the next configuration", "update", "--request-deadline", "100ms", "--alive", "3s", "--wait", "1s", "--finish")
	two.stop()
	d.json("issuers-two.json", []map[string]any{{"issuer": "iss-two", "jwks": "keys.json"}, {"issuer": "iss-more", "jwks": "keys.json"}})
	two.probe = d.free()
	two.start(true)
	eventually(t, "two is ready with the next configuration", two.ready)
	serves("rolled out", "iss-more", "gamma", "200")
	two.run(update("--finish")...)
	serves("the only configuration", "iss-more", "gamma", "200")
	two.refused("no next configuration", update("--revert")...)

	// Where it is probed: its listener is at another address by now.
	two.run(update("--probe-url", "http://"+two.probe)...)
	two.refused("deployment", update("--probe-url", "http://"+one.probe)...)
	one.refused("the router's own configuration", update("--probe-url", "http://"+one.probe)...)
	one.run(update("--addresses")...)

	// Restored to before its tenants were placed, and without a row of its state.
	two.refused("stop them", "restore", "--alive", "3s")
	held := two.holdings()
	two.stop()
	for _, q := range []string{`DELETE FROM cell.tenancy`, `DELETE FROM cell.own_mode`, `DELETE FROM cell.own_self`} {
		if err := two.sql(q); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
	two.run("restore", "--alive", "3s")
	if got := two.holdings(); got != held {
		t.Errorf("two had %s, and has %s after its restore", held, got)
	}
	two.start(true)
	eventually(t, "two is ready after its restore", two.ready)
	serves("restored", "iss-two", "gamma", "200")
	if got := d.ask("POST", "/v1/memory.set", "app.example.com", d.sign("iss-one", "acme"), "", setItem); got != "200" {
		t.Errorf("one, meanwhile: %s", got)
	}
}
