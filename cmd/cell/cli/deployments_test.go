// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cmd/cell/cli"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/directory/deploy/deploytest"
	"github.com/cloister-dev/cloister/directory/deploy/httpapi"
	"github.com/cloister-dev/cloister/directory/sqlite"
	"github.com/cloister-dev/cloister/guard/tenancy"
	"github.com/cloister-dev/cloister/internal/credential"
)

// The commands of whole deployments, against a router's own paths.
func TestDeploymentCommands(t *testing.T) {
	for _, name := range []string{"CELL_ROUTER_URL", "CELL_ROUTER_OPERATOR_TOKEN", "CELL_OPERATOR_CREDENTIAL_FILE"} {
		t.Setenv(name, "")
	}
	run := func(want int, args ...string) (string, string) {
		t.Helper()
		var out, errs bytes.Buffer
		if got := cli.Main(t.Context(), "test", args, strings.NewReader(""), &out, &errs); got != want {
			t.Errorf("cell %s: exit %d, want %d: %s", strings.Join(args, " "), got, want, errs.String())
		}
		return out.String(), errs.String()
	}
	made := func(args ...string) (cred, sum string) {
		t.Helper()
		out, _ := run(cli.ExitOK, append([]string{"--json", "credential", "new"}, args...)...)
		var v struct{ Credential, SHA256 string }
		if err := json.Unmarshal([]byte(out), &v); err != nil {
			t.Fatal(err)
		}
		return v.Credential, v.SHA256
	}
	op, opSum := made("--operator")
	token, sum := made()
	if credential.Operator.Check(op) != nil || credential.Router.Check(token) != nil || credential.Of(token).String() != sum {
		t.Fatalf("credential new made %.8s and %.8s", op, token)
	}

	dir := t.TempDir()
	address := "sqlite:" + filepath.Join(dir, "directory.db")
	run(cli.ExitUsage, "router", "migrate", "--directory", "nothing:x")
	if out, _ := run(cli.ExitOK, "router", "migrate", "--directory", address); !strings.Contains(out, "pinned") {
		t.Errorf("migrate said %q", out)
	}
	run(cli.ExitFailed, "router", "migrate", "--directory", address, "--movable")

	s, err := sqlite.Open(t.Context(), filepath.Join(dir, "directory.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	fp := deploytest.Fingerprint("one", "app.example.com")
	for _, rule := range []deploy.Rule{deploy.Register(deploytest.First("one")), deploy.Attach(deploy.Attachment{Current: fp}),
		deploy.RaiseMode(tenancy.Enforced), deploy.Serve()} {
		if _, err := s.Deployments().Change(t.Context(), "one", rule, api.AuditEntry{At: time.Now(), Action: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	h, err := httpapi.New(httpapi.Config{Store: s.Deployments(), OperatorSHA256: []string{opSum}})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(h)
	defer srv.Close()
	credFile, fpFile := filepath.Join(dir, "op"), filepath.Join(dir, "fp.json")
	for path, b := range map[string][]byte{credFile: []byte(op + "\n"), fpFile: fp.Encode()} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	with := func(args ...string) []string {
		return append(args, "--router", srv.URL, "--credential-file", credFile)
	}
	run(cli.ExitRefused, with("place", "acme", "--cell", "one")...) // no configuration
	if out, _ := run(cli.ExitOK, with("place", "acme", "--cell", "one", "--fingerprint-file", fpFile)...); !strings.Contains(out, "acme placed in one") {
		t.Errorf("place said %q", out)
	}
	if out, _ := run(cli.ExitOK, with("place", "acme", "--cell", "one")...); !strings.Contains(out, "acme is in one") {
		t.Errorf("place again said %q", out)
	}
	if _, errs := run(cli.ExitRefused, with("place", "acme", "--cell", "two")...); !strings.Contains(errs, "it is in one already") {
		t.Errorf("place elsewhere said %q", errs)
	}
	if out, _ := run(cli.ExitOK, "which", "acme", "--router", srv.URL); out != "acme: one at app.example.com\n" {
		t.Errorf("which said %q", out)
	}
	if out, _ := run(cli.ExitOK, with("limit", "--cell", "one", "--closed", "--placements-max", "5")...); !strings.Contains(out, "serving, closed, 1 tenants, quota 5") {
		t.Errorf("limit said %q", out)
	}
	run(cli.ExitRefused, with("place", "other", "--cell", "one", "--fingerprint-file", fpFile)...)
	run(cli.ExitOK, with("limit", "--cell", "one", "--open", "--placements-max", "none")...)
	run(cli.ExitOK, with("place", "other", "--cell", "one", "--fingerprint-file", fpFile)...)
	run(cli.ExitRefused, with("credential", "--cell", "one", "--finish")...)
	for _, secret := range []string{token, strings.TrimPrefix(token, "lcr_")} {
		if _, errs := run(cli.ExitUsage, with("credential", "--cell", "one", "--next", secret)...); strings.Contains(errs, secret[20:]) || !strings.Contains(errs, "cell credential new") {
			t.Errorf("a credential in place of its hash: %q", errs)
		}
	}
	run(cli.ExitOK, with("credential", "--cell", "one", "--next", sum)...)
	run(cli.ExitRefused, with("credential", "--cell", "one", "--next", strings.Repeat("1", 64))...)
	run(cli.ExitOK, with("credential", "--cell", "one", "--revert")...)
	run(cli.ExitOK, with("credential", "--cell", "one", "--next", sum)...)
	run(cli.ExitOK, with("credential", "--cell", "one", "--finish")...)
	v, err := s.Deployments().Read(t.Context())
	if err != nil || v.First().CredentialHash != sum || v.First().NextHash != "" || v.First().PlacementsMax != nil || v.First().Closed || v.First().Placements != 2 {
		t.Errorf("the directory says %+v, %v", v.First(), err)
	}
	for _, args := range [][]string{{"limit", "--cell", "one"}, {"limit", "--cell", "one", "--closed", "--open"}, {"credential", "--cell", "one"},
		{"credential", "--cell", "one", "--finish", "--revert"}, {"limit", "--closed"}} {
		run(cli.ExitUsage, with(args...)...)
	}
	run(cli.ExitUsage, "limit", "--cell", "one", "--closed", "--router", "http://192.0.2.1", "--credential-file", credFile)
	// The directory is away: the outcome is not known.
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, errs := run(cli.ExitUnknown, with("limit", "--cell", "one", "--closed")...); !strings.Contains(errs, "may have been made") {
		t.Errorf("without the directory: %q", errs)
	}
	srv.Close()
	run(cli.ExitFailed, with("limit", "--cell", "one", "--closed")...)
}
