// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/services/idp"
	"github.com/cloister-dev/cloister/services/idp/idptest"
)

// listIssuers writes an issuers' file.
func listIssuers(t *testing.T, list ...map[string]any) string {
	t.Helper()
	b, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "issuers.json")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A cell accepts the tokens of its own provider, in the tenant that they name, and
// those of no other cell's.
func TestSignInAtTheCellsProvider(t *testing.T) {
	w := newWorld(t)
	ann := idp.User{Name: "ann", Password: "pw", Email: "ann@example.com", Verified: true, Tenant: "t1"}
	own := idptest.Start(t, "cell-a", ann, idp.User{Name: "nobody", Password: "pw"})
	other := idptest.Start(t, "cell-b", ann)
	base := w.start("--issuers", listIssuers(t, map[string]any{"issuer": own.URL, "audience": "cell-a"}))
	w.prepare(true, tenancy.Recording)
	w.until("it is ready", func() bool { return w.ready(base) })

	set := func(token string, header ...string) (int, string) {
		t.Helper()
		status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, token, header...)
		return status, code
	}
	want := func(what string, status int, code cells.Code, token string, header ...string) {
		t.Helper()
		if s, c := set(token, header...); s != status || c != string(code) {
			t.Errorf("%s: %d %s, want %d %s", what, s, c, status, code)
		}
	}
	good := own.Token("ann")
	want("a token of the cell's provider", 200, "", good)
	want("for another tenant", 403, cells.CodeForbidden, good, "X-Tenant", "t9")
	want("for its own tenant", 200, "", good, "X-Tenant", "t1")
	want("of another cell's provider", 401, cells.CodeUnknownIssuer, other.Token("ann"))
	if s, c := set(own.Token("nobody")); s/100 != 4 || c == "" {
		t.Errorf("a token without a tenant: %d %s", s, c)
	}
	want("with another signature", 401, cells.CodeUnauthenticated, good[:strings.LastIndex(good, ".")+1]+strings.Split(other.Token("ann"), ".")[2])
	want("of no form", 401, cells.CodeUnauthenticated, "x")
	w.untouched("t9")

	// The provider rotates its key, and the cell follows; what the earlier key signed is
	// good as long as it is published.
	if err := own.Rotate(); err != nil {
		t.Fatal(err)
	}
	rotated := own.Token("ann")
	w.until("the new key is fetched", func() bool { s, _ := set(rotated); return s == 200 })
	want("of the earlier key", 200, "", good)

	// The provider does not answer: known keys verify, a new one cannot be told from a
	// wrong one.
	if err := own.Rotate(); err != nil {
		t.Fatal(err)
	}
	unseen := own.Token("ann")
	own.Down.Store(true)
	w.until("a fetch has failed", func() bool { s, c := set(unseen); return s == 503 && c == string(cells.CodeAuthUnavailable) })
	want("of a known key", 200, "", rotated)
	own.Down.Store(false)
	w.until("the key is fetched", func() bool { s, _ := set(unseen); return s == 200 })

	resp, err := http.Get(base + "/v1/memory.get")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 401 {
		t.Errorf("without a credential: %d", resp.StatusCode)
	}
}

// While the keys were never fetched nobody passes, and nobody is told that a good token
// is wrong.
func TestNoKeysYet(t *testing.T) {
	w := newWorld(t)
	own := idptest.Start(t, "cell-a", idp.User{Name: "ann", Password: "pw", Tenant: "t1"})
	base := w.start("--issuers", listIssuers(t, map[string]any{"issuer": own.URL}))
	w.prepare(true, tenancy.Recording)
	w.until("it is ready", func() bool { return w.ready(base) })
	token := own.Token("ann")
	own.Down.Store(true)
	status, code, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, token)
	if status != 503 || code != string(cells.CodeAuthUnavailable) {
		t.Errorf("%d %s", status, code)
	}
	w.untouched("t1")
	own.Down.Store(false)
	w.until("the keys are fetched", func() bool {
		status, _, _ := w.ask(base, "POST", "/v1/memory.set", oneItem, token)
		return status == 200
	})
}
