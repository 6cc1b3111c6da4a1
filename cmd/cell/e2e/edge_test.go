// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/cmd/cell/fleet"
	"github.com/cloister-dev/cloister/cmd/cell/load"
)

type answer struct {
	status   int
	Code     string
	Retry    *bool
	Revision *uint64
	Age      *int64 `json:"age_ms"`
	body     string
}

func (e *env) send(method, url string, header http.Header, body io.Reader) answer {
	e.t.Helper()
	req, err := http.NewRequestWithContext(e.t.Context(), method, url, body)
	if err != nil {
		e.t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Close = true // a refusal may end the connection, and a POST is not repeated on another
	resp, err := e.http.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	a := answer{status: resp.StatusCode, body: string(b)}
	_ = json.Unmarshal(b, &a)
	return a
}

// Whatever is wrong with a request, it gets one clear answer of the closed list.
func TestBadRequests(t *testing.T) {
	e := start(t, fleet.Config{})
	tenant := e.tenant("acme", "cell-a")
	if _, err := tenant.Set(t.Context(), "n", "k", "kept", -1); err != nil {
		t.Fatal(err)
	}
	members, err := e.cl.Members(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	direct := members[0].ServiceURL
	get := `{"namespace":"n","key":"k"}`
	for name, c := range map[string]struct {
		url    string
		header http.Header
		body   string
		status int
		code   cells.Code
	}{
		"unknown tenant":        {e.Info.Edge + "/v1/memory.get", http.Header{"X-Tenant": {"nobody"}}, get, 404, cells.CodeUnknownTenant},
		"no tenant":             {e.Info.Edge + "/v1/memory.get", nil, get, 400, cells.CodeBadRequest},
		"malformed tenant":      {e.Info.Edge + "/v1/memory.get", http.Header{"X-Tenant": {"a b"}}, get, 400, cells.CodeInvalidTenant},
		"two tenants":           {e.Info.Edge + "/v1/memory.get", http.Header{"X-Tenant": {"acme", "globex"}}, get, 400, cells.CodeBadRequest},
		"own path":              {e.Info.Edge + "/cells/v1/routes", http.Header{"X-Tenant": {"acme"}}, "", 404, cells.CodeNotServed},
		"own path, encoded":     {e.Info.Edge + "/%63ells/v1/routes", http.Header{"X-Tenant": {"acme"}}, "", 404, cells.CodeNotServed},
		"body too large":        {e.Info.Edge + "/v1/memory.set", http.Header{"X-Tenant": {"acme"}}, strings.Repeat("x", 17<<20), 413, cells.CodeTooLarge},
		"past the edge":         {direct + "/v1/memory.get", http.Header{"Cell-Tenant": {"acme"}}, get, 400, cells.CodeBadRequest},
		"forged token":          {direct + "/v1/memory.get", http.Header{"Cell-Tenant": {"acme"}, "Cell-Epoch": {"1"}, "Cell-Admission": {"1." + strings.Repeat("A", 43)}}, get, 400, cells.CodeBadRequest},
		"duplicate Cell header": {direct + "/v1/memory.get", http.Header{"Cell-Tenant": {"acme", "acme"}, "Cell-Epoch": {"1"}}, get, 400, cells.CodeBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			e := &env{Fleet: e.Fleet, t: t, http: e.http}
			a := e.send(http.MethodPost, c.url, c.header, strings.NewReader(c.body))
			if a.status != c.status || a.Code != string(c.code) {
				t.Fatalf("%d %s, want %d %s: %s", a.status, a.Code, c.status, c.code, a.body)
			}
			if a.Retry == nil || *a.Retry != c.code.Retry() {
				t.Errorf("retry is %v: %s", a.Retry, a.body)
			}
		})
	}
	t.Run("headers of a client that name a cell count for nothing", func(t *testing.T) {
		e := &env{Fleet: e.Fleet, t: t, http: e.http}
		a := e.send(http.MethodPost, e.Info.Edge+"/v1/memory.get", http.Header{"X-Tenant": {"acme"}, "Cell-Tenant": {"globex"}, "Cell-Epoch": {"99"},
			"Cell-Admission": {"x"}, "Connection": {"Cell-Tenant, Cell-Admission"}}, strings.NewReader(get))
		if a.status != 200 || !strings.Contains(a.body, "kept") {
			t.Fatalf("%d %s", a.status, a.body)
		}
	})
	t.Run("headers too large", func(t *testing.T) {
		e := &env{Fleet: e.Fleet, t: t, http: e.http}
		if a := e.send(http.MethodPost, e.Info.Edge+"/v1/memory.get", http.Header{"X-Tenant": {"acme"}, "X-Long": {strings.Repeat("x", 200<<10)}}, strings.NewReader(get)); a.status != 431 {
			t.Fatalf("status %d", a.status)
		}
	})
}

// With the directory gone, tenants are served, by an edge and cells that are
// started anew, too; what needs the directory says so.
func TestDirectoryDown(t *testing.T) {
	e := start(t, fleet.Config{})
	a, b := e.tenant("acme", "cell-a"), e.tenant("globex", "cell-b")
	if _, err := a.Set(t.Context(), "n", "k", "kept", -1); err != nil {
		t.Fatal(err)
	}
	// The snapshots follow the last placement a moment later; so do those of the cells.
	e.eventually("the edge and the cell have written what they know", time.Minute, func() bool {
		cell, err := os.ReadFile(filepath.Join(e.Layout.Cell("cell-b"), "member-1", "routes.snapshot"))
		if err != nil || !bytes.Contains(cell, []byte("globex")) {
			return false
		}
		x, err1 := os.ReadFile(filepath.Join(e.Layout.Edge(), "routes.snapshot"))
		_, err2 := os.ReadFile(filepath.Join(e.Layout.Edge(), "topology.snapshot"))
		return err1 == nil && err2 == nil && bytes.Contains(x, []byte("globex"))
	})
	e.Procs.Remove("directory")
	e.kill("edge")
	e.kill("cell-b-1")
	for _, c := range []*load.Client{a, b} {
		if err := load.WaitServed(t.Context(), c); err != nil {
			t.Errorf("with the directory down: %v", err)
		}
	}
	if it, err := a.Get(t.Context(), "n", "k"); err != nil || string(it.Value) != `"kept"` {
		t.Errorf("read: %v, %s", err, it.Value)
	}
	if _, err := b.Set(t.Context(), "n", "k", 1, -1); err != nil {
		t.Errorf("write: %v", err)
	}
	out, code := e.cell("place", "newcomer")
	if code == 0 {
		t.Errorf("a placement without a directory succeeded: %s", out)
	}
}

// cell runs the command line against the fleet.
func (e *env) cell(args ...string) (string, int) {
	e.t.Helper()
	cmd := exec.CommandContext(e.t.Context(), filepath.Join(bin, "cell"), append([]string{"--fleet", e.Layout.Dir}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		e.t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// What an operator types, against a running fleet.
func TestCommands(t *testing.T) {
	e := start(t, fleet.Config{Cells: []fleet.Cell{{Name: "eu-1", Jurisdiction: "eu"}, {Name: "us-1", Jurisdiction: "us"}}})
	run := func(want int, contains string, args ...string) string {
		t.Helper()
		out, code := e.cell(args...)
		if code != want || !strings.Contains(out, contains) {
			t.Fatalf("cell %s: exit %d, want %d with %q:\n%s", strings.Join(args, " "), code, want, contains, out)
		}
		return out
	}
	run(0, "eu-1", "cells")
	run(0, "placed in eu-1", "place", "acme", "--cell", "eu-1")
	run(0, "is in eu-1", "place", "acme", "--cell", "eu-1")
	run(3, "cell move acme --to us-1", "place", "acme", "--cell", "us-1")
	run(3, "UNKNOWN_TENANT", "which", "nobody")
	run(0, "eu-1 (ACTIVE, epoch 1", "which", "acme")
	c := &load.Client{Base: e.Info.Edge, Tenant: "acme", HTTP: e.http}
	if err := load.WaitServed(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := c.Fill(t.Context(), "n", 500, 100, func(int) {}); err != nil {
		t.Fatal(err)
	}
	run(0, "nothing stands in the way", "move", "acme", "--to", "us-1", "--dry-run")
	run(0, "pause", "move", "acme", "--to", "us-1")
	run(0, "us-1", "which", "acme")
	run(0, "us-1", "explain", "acme")
	run(0, "us-1", "explain", "--header", "X-Tenant: acme")
	run(3, "", "move", "acme", "--to", "nowhere")
	var moves []struct {
		ID    string
		State string
		Rows  int64
		Pause time.Duration
	}
	if err := json.Unmarshal([]byte(run(0, "", "--json", "moves", "--tenant", "acme")), &moves); err != nil || len(moves) == 0 {
		t.Fatalf("moves: %v, %+v", err, moves)
	}
	if moves[0].State != "DONE" || moves[0].Rows < 500 || moves[0].Pause <= 0 {
		t.Errorf("the move's record: %+v", moves[0])
	}
	run(0, "commit", "moves", "show", moves[0].ID)
	run(3, "", "moves", "rollback", moves[0].ID, "--yes")
	run(0, "closed", "cells", "set", "eu-1", "--closed")
	run(0, "closed", "cells")
	run(3, "CELL_CLOSED", "place", "late", "--cell", "eu-1")
	run(3, "CELL_CLOSED", "move", "acme", "--to", "eu-1")
	run(0, "DELETED", "tenants", "delete", "acme", "--yes")
	run(0, "acme", "tenants", "--deleted")
	run(3, "UNKNOWN_TENANT", "which", "acme")
	e.eventually("the deleted tenant's rows are removed", 30*time.Second, func() bool {
		r, err := e.cl.Tenant(t.Context(), "acme")
		return err == nil && r.Route != nil && len(r.Route.Residue) == 0
	})
	run(0, "epoch", "place", "acme", "--cell", "us-1")
	if r, err := e.cl.Tenant(t.Context(), "acme"); err != nil || r.Route.Epoch < 5 {
		t.Errorf("a tenant that was created again must start above its old epochs: %+v, %v", r.Route, err)
	}
	// In its second life it has none of the old rows, and events from 1 without a gap.
	if err := load.WaitServed(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if it, err := c.Get(t.Context(), "n", "row-00000001"); err == nil {
		t.Errorf("a row of the deleted tenant is there: %+v", it)
	}
	for want := uint64(1); want <= 3; want++ {
		if it, err := c.Set(t.Context(), "n", "k", want, -1); err != nil || it.EventSeq != want {
			t.Errorf("event %d of the second life has number %d, %v", want, it.EventSeq, err)
		}
	}
	run(0, "takes new", "cells", "set", "eu-1", "--open")
	run(0, "pause", "move", "acme", "--to", "eu-1")
}
