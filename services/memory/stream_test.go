// SPDX-License-Identifier: Apache-2.0

package memory_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/services/memory"
)

// A stream of events ends cleanly when the tenant's gate closes: a comment says
// why, and a trailer, and the client's place is that of the last event.
func TestStreamEndsWithAComment(t *testing.T) {
	ctx := t.Context()
	store, err := memory.OpenSQLite(ctx, filepath.Join(t.TempDir(), "m.db"), memory.OpenOptions{Cell: "cell-a"})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	table := cells.NewMemTable()
	defer table.Close()
	ctrl := cells.NewMoveController(table)
	if err := ctrl.Assign(ctx, "acme", "cell-a", "test"); err != nil {
		t.Fatal(err)
	}
	router := cells.NewRouter(table)
	if err := router.Start(ctx); err != nil {
		t.Fatal(err)
	}
	defer router.Close()
	gates := cells.NewGates("cell-a", router, cells.WithOpener(store.Guard().OpenFence))
	srv := httptest.NewServer(cells.HTTPMiddleware(router, gates)(memory.New(store, memory.Options{}).Handler()))
	defer srv.Close()
	do := func(method, path, body string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, method, srv.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set(cells.HeaderTenant, "acme")
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v %v", path, resp, err)
		}
		return resp
	}
	do("POST", "/v1/memory.set", `{"namespace":"n","key":"k","value":1}`).Body.Close()
	resp := do("GET", "/v1/events", "")
	defer resp.Body.Close()
	var text strings.Builder
	buf := make([]byte, 4096)
	for !strings.Contains(text.String(), "event: memory.set") {
		n, err := resp.Body.Read(buf)
		text.Write(buf[:n])
		if err != nil {
			t.Fatalf("%q: %v", text.String(), err)
		}
	}
	row, err := table.Get(ctx, "acme")
	if err != nil {
		t.Fatal(err)
	}
	if err := gates.Drain(ctx, row); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("the stream broke: %v", err)
	}
	text.Write(rest)
	if !strings.HasSuffix(text.String(), "\n\n: the tenant moves, connect again\n\n") || resp.Trailer.Get(cells.HeaderStreamEnd) != string(cells.CodeMoving) {
		t.Errorf("the stream ended with %q and %v", rest, resp.Trailer)
	}
}
