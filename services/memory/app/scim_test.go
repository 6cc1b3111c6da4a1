// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/member/signin"
	"github.com/cloister-dev/cloister/member/signin/bot"
	signinpg "github.com/cloister-dev/cloister/member/signin/postgres"
	checks "github.com/cloister-dev/cloister/member/tenancy"
	"github.com/cloister-dev/cloister/services/idp"
	"github.com/cloister-dev/cloister/services/idp/idptest"
)

// writeTokens writes a file with SCIM tokens and names it in the settings.
func writeTokens(t *testing.T, tokens ...string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scim-tokens")
	if err := os.WriteFile(path, []byte(strings.Join(tokens, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CELL_SCIM", "true")
	t.Setenv("CELL_SCIM_TOKENS_FILE", path)
}

const scimUser = `{"schemas":["urn:ietf:params:scim:schemas:core:2.0:User"],"userName":"ann@example.com"}`

// With SCIM on, a person of an enforced cell acts only while the cell's own provider
// keeps an active row, whatever its OpenID Provider signs.
func TestProvisioning(t *testing.T) {
	w := newWorld(t)
	token, _, err := checks.NewSCIMToken("a")
	if err != nil {
		t.Fatal(err)
	}
	const unnamed = "an-older-unnamed-token"
	writeTokens(t, token, unnamed)
	own := idptest.Start(t, "cell-a", idp.User{Name: "ann", Password: "pw", Email: "ann@example.com", Verified: true, Tenant: "t1"}, idp.User{Name: "anon", Password: "pw", Tenant: "t1"})
	base := w.start("--issuers", listIssuers(t, map[string]any{"issuer": own.URL}, map[string]any{"issuer": "https://users.example", "jwks": filepath.Join(filepath.Dir(w.issuers), "keys.json"), "tenants": []string{"u-*"}}))
	scim := func(bearer, method, path, body string, header ...string) (int, map[string]any) {
		t.Helper()
		status, _, text := w.ask(base, method, "/scim/v2/"+path, body, bearer, header...)
		doc := map[string]any{}
		if text != "" {
			if err := json.Unmarshal([]byte(text), &doc); err != nil {
				t.Fatalf("%d %s", status, text)
			}
		}
		return status, doc
	}
	// Before the cell is prepared its first row is not there: no verdict.
	if status, _ := scim(token, "POST", "Users", scimUser); status != 503 {
		t.Errorf("before the first row: %d", status)
	}
	w.prepare(true, tenancy.Recording)
	w.until("it is ready", func() bool { return w.ready(base) })
	set := func(token string) (int, string) {
		t.Helper()
		status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, token)
		return status, code
	}
	// While the cell records, nobody has to be provisioned.
	for _, name := range []string{"ann", "anon"} {
		if status, code := set(own.Token(name)); status != 200 {
			t.Errorf("%s while it records: %d %s", name, status, code)
		}
	}
	if m, err := w.rows.SetMode(t.Context(), tenancy.Enforced, tenancy.ModeWrite{}); err != nil || m != tenancy.Enforced {
		t.Fatalf("%q, %v", m, err)
	}
	refused := func(who, token string) {
		t.Helper()
		w.until(who+" is refused", func() bool { s, c := set(token); return s == 403 && c == string(cells.CodeForbidden) })
	}
	ann := own.Token("ann")
	refused("ann, whom nobody provisioned", ann)
	refused("somebody without an email", own.Token("anon"))
	if status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, w.sign("https://users.example", "u-7")); status != 200 {
		t.Errorf("an end user: %d %s", status, code)
	}

	for _, bad := range []string{"", "lsc_b_" + strings.Repeat("a", 64), token[:len(token)-1], ann} {
		if status, _ := scim(bad, "POST", "Users", scimUser); status != 401 {
			t.Errorf("%.8q may provision: %d", bad, status)
		}
	}
	// The first cell's older token names none.
	status, doc := scim(unnamed, "POST", "Users", scimUser)
	id, _ := doc["id"].(string)
	if meta, _ := doc["meta"].(map[string]any); status != 201 || meta["location"] != "https://a.example/scim/v2/Users/"+id {
		t.Fatalf("provisioned: %d %v", status, doc)
	}
	w.until("ann acts", func() bool { s, _ := set(ann); return s == 200 })
	if status, doc := scim(token, "PATCH", "Users/"+id, `{"schemas":["urn:ietf:params:scim:api:messages:2.0:PatchOp"],"Operations":[{"op":"replace","value":{"active":false}}]}`); status != 200 {
		t.Fatalf("deactivated: %d %v", status, doc)
	}
	refused("ann, deactivated", ann)
	refused("ann, deactivated, with a new token", own.Token("ann"))

	const group = `{"schemas":["urn:ietf:params:scim:schemas:core:2.0:Group"],"displayName":"Admins"}`
	if status, doc := scim(token, "POST", "Groups", group, "X-Tenant", "t1"); status != 201 {
		t.Errorf("a group of a tenant: %d %v", status, doc)
	}
	if status, _ := scim(token, "POST", "Groups", group, "X-Tenant", "stranger"); status != 409 {
		t.Errorf("a group of a tenant that the cell does not hold: %d", status)
	}
	w.untouched("stranger")
	if status, _ := scim(w.sign("https://users.example", "u-7"), "POST", "Groups", group); status != 403 {
		t.Errorf("a group written by the token of a tenant: %d", status)
	}
	if status, doc := scim(w.sign("https://users.example", "u-7"), "GET", "Groups", ""); status != 200 {
		t.Errorf("groups read by the token of a tenant: %d %v", status, doc)
	}
}

// The audit says what a bot asked for in one line, whatever the path has in it.
func TestUseOfABot(t *testing.T) {
	r := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/x%0asa:other%1b[2J"+strings.Repeat("%c3%a9", 200), nil)
	r.Header.Set("X-Tenant", "t1")
	got := useOf(r)
	if !strings.HasPrefix(got, `POST "/v1/x\nsa:other\x1b[2J`) || !strings.HasSuffix(got, `" in tenant "t1"`) || strings.ContainsFunc(got, unicode.IsControl) || len(got) > 260 {
		t.Errorf("%d bytes: %s", len(got), got)
	}
}

func TestBootWithSCIMTokens(t *testing.T) {
	w := newWorld(t)
	secret := strings.Repeat("0123456789abcdef", 4)
	for what, c := range map[string]struct{ tokens, word string }{
		"another cell's": {"lsc_b_" + secret, "names cell b"}, "malformed": {"lsc_a_" + secret + "X", "malformed"}, "none": {"\n", "no token"}, "three": {"lsc_a_" + secret + "\nlsc_a_" + secret + "0\nlsc_a_" + secret + "1", "3 SCIM tokens"}, "no file": {"", "CELL_SCIM_TOKENS_FILE"},
	} {
		t.Run(what, func(t *testing.T) {
			writeTokens(t, c.tokens)
			if c.tokens == "" {
				t.Setenv("CELL_SCIM_TOKENS_FILE", "")
			}
			var out strings.Builder
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if code := Main(ctx, []string{"--listen", "127.0.0.1:0", "--store", "postgres", "--dsn", w.dsn, "--issuers", w.issuers}, &locked{w: &out}); code != 1 || !strings.Contains(out.String(), c.word) || strings.Contains(out.String(), secret) {
				t.Errorf("%d: %s", code, out.String())
			}
		})
	}
}

// A bot that proves itself with its key reaches the cell when SCIM has let nobody in.
func TestBreakGlass(t *testing.T) {
	w := newWorld(t)
	token, _, err := checks.NewSCIMToken("a")
	if err != nil {
		t.Fatal(err)
	}
	writeTokens(t, token)
	base := w.start("--issuers", w.issuers)
	w.prepare(true, tenancy.Recording)
	w.until("it is ready", func() bool { return w.ready(base) })
	if _, _, err := w.rows.Record(t.Context(), "t1"); err != nil {
		t.Fatal(err)
	}
	if m, err := w.rows.SetMode(t.Context(), tenancy.Enforced, tenancy.ModeWrite{}); err != nil || m != tenancy.Enforced {
		t.Fatalf("%q, %v", m, err)
	}
	w.until("nobody is let in", func() bool { s, _ := w.set(base, "t1"); return s == 403 })
	store, err := signinpg.Open(t.Context(), w.dsn, signinpg.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	private, public, thumb, err := bot.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := store.PutBot(t.Context(), signin.Bot{Name: "glass", Key: public, Thumbprint: thumb, Admin: true}, signin.Entry{Actor: "operator", Action: "bot.create"}); err != nil {
		t.Fatal(err)
	}
	raw, err := bot.Proof{Name: "glass", Key: private, Base: "https://a.example", Address: base}.Token(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for tenant, want := range map[string]int{"t1": 200, "unheld": 409, "": 400} {
		header := []string{"X-Tenant", tenant}
		if tenant == "" {
			header = nil
		}
		if status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, raw, header...); status != want {
			t.Errorf("the bot in %q: %d %s, want %d", tenant, status, code, want)
		}
	}
	w.untouched("unheld")
	list, err := store.Audit(t.Context(), "", 100)
	if err != nil || len(list) != 5 || list[2].Actor != "sa:glass" || list[2].Action != "bot.use" || !strings.Contains(list[2].Detail, "/v1/memory.set") {
		t.Errorf("%+v, %v", list, err)
	}
}
