// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/channel/pki"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/receipt"
)

// A receipt in a file is verified without a directory, and the exit code tells.
func TestVerifyOffline(t *testing.T) {
	dir := t.TempDir()
	run := func(in string, args ...string) (int, string) {
		t.Helper()
		var out bytes.Buffer
		code := Main(t.Context(), "test", append([]string{"--fleet", dir, "--operator-url", "http://127.0.0.1:1"}, args...), strings.NewReader(in), &out, &out)
		return code, out.String()
	}
	if err := os.Mkdir(filepath.Join(dir, "pki"), 0o700); err != nil {
		t.Fatal(err)
	}
	if code, out := run("", "pki", "receipt-key"); code != ExitOK || !strings.HasPrefix(out, "-----BEGIN PUBLIC KEY-----") {
		t.Fatalf("%d %s", code, out)
	}
	key, err := pki.ReadReceiptKey(filepath.Join(dir, "pki", pki.ReceiptKeyFile))
	if err != nil {
		t.Fatal(err)
	}
	digest := receipt.Digest{Rows: 3, Sum: "aa"}
	entry, err := receipt.Append(key, nil, receipt.Statement{Kind: receipt.KindOutcome, At: time.Now().UTC(), By: "d", Move: "mv-1", Tenant: "acme", Outcome: &receipt.Outcome{
		Verdict: receipt.Committed, Source: "a", Target: "b", Base: 1, Closed: 2, Opened: 3, Actor: "alice", Forced: true,
		Tables: []receipt.Table{{Table: "item", Position: "01", Whole: true, Source: digest, Target: digest}}}})
	if err != nil {
		t.Fatal(err)
	}
	end, err := receipt.Append(key, [][]byte{entry}, receipt.Statement{Kind: receipt.KindEnd, At: time.Now().UTC(), By: "d", Move: "mv-1", Tenant: "acme",
		End: &receipt.End{Statements: 2}})
	if err != nil {
		t.Fatal(err)
	}
	text := func(entries ...[]byte) []byte {
		r, err := receipt.New("mv-1", entries)
		if err != nil {
			t.Fatal(err)
		}
		doc, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		return doc
	}
	doc, cut := text(entry, end), text(entry)
	file, credential := filepath.Join(dir, "receipt.json"), filepath.Join(dir, "credential")
	write := func(path, content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file, string(doc))
	write(credential, "lco_"+strings.Repeat("a", 128)+"\n")
	code, out := run("", "moves", "verify", "--file", file)
	for _, want := range []string{"verified", "acme", "COMMITTED", "FORCED", "alice", "item"} {
		if code != ExitOK || !strings.Contains(out, want) {
			t.Errorf("%d, without %q: %s", code, want, out)
		}
	}
	if code, out := run(string(doc), "--json", "moves", "verify", "--file", "-", "--key", filepath.Join(dir, "pki", pki.ReceiptPublicFile)); code != ExitOK || !strings.Contains(out, `"verified": true`) {
		t.Errorf("%d %s", code, out)
	}
	// As cell --json moves show prints it, inside of the move.
	if code, out := run(`{"id":"mv-1","receipt":`+string(doc)+`}`, "moves", "verify", "--file", "-"); code != ExitOK {
		t.Errorf("%d %s", code, out)
	}
	// Without its end it may be one that was cut, and is no whole one.
	if code, out := run(string(cut), "moves", "verify", "--file", "-"); code != ExitOpen || !strings.Contains(out, "verified, open") || !strings.Contains(out, "it was cut, or taken before its end") {
		t.Errorf("cut: %d %s", code, out)
	}
	if code, out := run(string(cut), "--json", "moves", "verify", "--file", "-"); code != ExitOpen || !strings.Contains(out, `"ended": false`) || !strings.Contains(out, `"exit": 7`) {
		t.Errorf("cut: %d %s", code, out)
	}
	if code, out := run(strings.Replace(string(doc), `"alice"`, `"mallory"`, 1), "moves", "verify", "--file", "-"); code != ExitForged {
		t.Errorf("tampered: %d %s", code, out)
	}
	if code, out := run("{}", "moves", "verify", "--file", "-"); code != ExitForged {
		t.Errorf("no receipt: %d %s", code, out)
	}
	if code, out := run("", "moves", "verify"); code != ExitUsage {
		t.Errorf("%d %s", code, out)
	}
	if code, out := run("", "moves", "verify", "mv-2", "--file", file); code != ExitForged || !strings.Contains(out, "about move mv-1") {
		t.Errorf("of another move: %d %s", code, out)
	}
	// With the directory's own copy beside it, which of both is known.
	for _, c := range []struct {
		file, has []byte
		code      int
		want      string
	}{
		{cut, cut, ExitOpen, "verified, running"}, {cut, doc, ExitOpen, "it has 1 more"}, {doc, doc, ExitOK, "verified, ended"},
		{doc, cut, ExitForged, "another receipt"}, {nil, cut, ExitOpen, "verified, running"}, {nil, doc, ExitOK, "verified, ended"},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", api.ContentJSON)
			w.Header().Set(api.HeaderRequestID, "r")
			_, _ = w.Write(c.has)
		}))
		args := []string{"--operator-url", srv.URL, "--credential-file", credential, "moves", "verify", "mv-1"}
		if c.file != nil {
			write(filepath.Join(dir, "copy"), string(c.file))
			args = append(args, "--file", filepath.Join(dir, "copy"))
		}
		code, out := run("", args...)
		srv.Close()
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%d, want %d with %q: %s", code, c.code, c.want, out)
		}
	}
	write(filepath.Join(dir, "empty"), "")
	if code, out := run("", "moves", "verify", "--file", file, "--key", filepath.Join(dir, "empty")); code != ExitFailed {
		t.Errorf("no key: %d %s", code, out)
	}
}
