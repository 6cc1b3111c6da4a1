// SPDX-License-Identifier: Apache-2.0

package tenancy_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
	mt "github.com/cloister-dev/cloister/member/tenancy"
)

// What a client, or somebody beside the edge, says of a tenant, an epoch and an
// admission: the check and the gate behind it serve the tenant of the credential, by
// the present route, or nobody.
func TestForgedAdmissions(t *testing.T) {
	table := cells.NewMemTable()
	t.Cleanup(func() { _ = table.Close() })
	ctrl := cells.NewMoveController(table)
	for _, tenant := range []cells.TenantID{"acme", "other"} {
		if err := ctrl.Assign(t.Context(), tenant, "a", "test"); err != nil {
			t.Fatal(err)
		}
	}
	router := cells.NewRouter(table)
	if err := router.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = router.Close() })
	master := []byte("0123456789abcdef0123456789abcdef")
	key := func(cell string) []byte { return cells.DeriveCellKey(master, cells.CellID(cell)) }
	gates := cells.NewGates("a", router, cells.WithAdmissionKey(key("a")))
	// Away and back: the epochs before are those of another time.
	for _, way := range [][2]cells.CellID{{"a", "b"}, {"b", "a"}} {
		if err := ctrl.Move(t.Context(), cells.MovePlan{TenantID: "acme", FromCell: way[0], ToCell: way[1], Actor: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	row, err := table.Get(t.Context(), "acme")
	if err != nil || row.CellID != "a" || row.Epoch != 5 {
		t.Fatalf("%+v %v", row, err)
	}
	if _, err := router.Refresh(t.Context(), "acme"); err != nil {
		t.Fatal(err)
	}

	store := newStore(rows(true, tenancy.Enforced), "acme", "other")
	directory := &fakeRouter{winner: mt.Winner{Cell: "b", DeploymentID: "d-2"}}
	p := start(t, config(store, directory))
	service := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, _ := cells.AdmissionFromContext(r.Context())
		c, _ := mt.FromContext(r.Context())
		_, _ = io.WriteString(w, string(a.Tenant)+" "+string(c.Tenant))
	})
	srv := httptest.NewServer(p.Handler(cells.HTTPMiddleware(router, gates)(service), mt.HTTP{Resolve: func(r *http.Request) (cells.TenantID, mt.Principal, error) {
		c := cells.TenantID(r.Header.Get("Credential"))
		return c, mine(c), nil
	}}))
	t.Cleanup(srv.Close)

	minted := func(tenant cells.TenantID, cell cells.CellID, epoch cells.Epoch) string {
		return cells.MintToken(key(string(cell)), tenant, cell, epoch)
	}
	one := func(v string) []string { return []string{v} }
	for name, c := range map[string]struct {
		credential string
		header     http.Header
		want       cells.Code
	}{
		"as the edge sends it":                 {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 5))}, ""},
		"in another case, which is the same":   {"acme", http.Header{"cell-tenant": one("acme"), "CELL-EPOCH": one("5"), "cELL-admission": one(minted("acme", "a", 5))}, ""},
		"a token from before the moves":        {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("1"), "Cell-Admission": one(minted("acme", "a", 1))}, cells.CodeStaleRoute},
		"that token with the present epoch":    {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 1))}, cells.CodeBadRequest},
		"the other cell's token, as it was":    {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("3"), "Cell-Admission": one(minted("acme", "b", 3))}, cells.CodeBadRequest},
		"the other cell's key":                 {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": one(cells.MintToken(key("b"), "acme", "a", 5))}, cells.CodeBadRequest},
		"the other tenant's token":             {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("1"), "Cell-Admission": one(minted("other", "a", 1))}, cells.CodeBadRequest},
		"an epoch that is to come":             {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("7"), "Cell-Admission": one(cells.MintToken(key("b"), "acme", "a", 7))}, cells.CodeBadRequest},
		"no token":                             {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5")}, cells.CodeBadRequest},
		"two tokens":                           {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": {minted("acme", "a", 1), minted("acme", "a", 5)}}, cells.CodeBadRequest},
		"two epochs":                           {"acme", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": {"5", "1"}, "Cell-Admission": one(minted("acme", "a", 5))}, cells.CodeBadRequest},
		"two tenants":                          {"acme", http.Header{"Cell-Tenant": {"acme", "other"}, "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 5))}, cells.CodeForbidden},
		"one tenant twice":                     {"acme", http.Header{"Cell-Tenant": {"acme", "acme"}, "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 5))}, cells.CodeBadRequest},
		"nothing of an edge":                   {"acme", http.Header{}, cells.CodeInvalidTenant},
		"a name that a lenient server takes":   {"acme", http.Header{"Cell_Tenant": one("acme"), "Cell_Epoch": one("5"), "Cell_Admission": one(minted("acme", "a", 5))}, cells.CodeInvalidTenant},
		"a neighbour's tenant, rightly routed": {"acme", http.Header{"Cell-Tenant": one("other"), "Cell-Epoch": one("1"), "Cell-Admission": one(minted("other", "a", 1))}, cells.CodeForbidden},
		"the neighbour, the other way":         {"other", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 5))}, cells.CodeForbidden},
		"another cell's tenant, routed here":   {"far", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 5))}, cells.CodeForbidden},
		"another cell's tenant":                {"far", http.Header{"Cell-Tenant": one("far"), "Cell-Epoch": one("1"), "Cell-Admission": one(minted("far", "a", 1))}, cells.CodeWrongCell},
		"another cell's tenant by its cell":    {"far", http.Header{"Cell-Tenant": one("far"), "Cell-Cell": one("a"), "Cell-Epoch": one("1"), "Cell-Admission": one(minted("far", "b", 1))}, cells.CodeWrongCell},
		"everybody":                            {"*", http.Header{"Cell-Tenant": one("acme"), "Cell-Epoch": one("5"), "Cell-Admission": one(minted("acme", "a", 5))}, cells.CodeForbidden},
	} {
		r, err := http.NewRequestWithContext(t.Context(), "GET", srv.URL+"/v1/x", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header = c.header
		r.Header["Credential"] = one(c.credential)
		resp, err := srv.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if got := cells.Code(resp.Header.Get(cells.HeaderAnswer)); got != c.want || c.want == "" && string(b) != "acme acme" {
			t.Errorf("%s: %d %s %.200s, want %s", name, resp.StatusCode, got, b, c.want)
		}
	}
	if n, held := store.written(); n != 0 || held["far"] {
		t.Errorf("%d rows were written, held %v", n, held)
	}

	// gRPC says the same in metadata.
	g := mt.GRPC{Resolve: func(context.Context, string, any) (cells.TenantID, mt.Principal, error) {
		return "acme", mine("acme"), nil
	}}
	for name, c := range map[string]struct {
		md   metadata.MD
		want cells.Code
	}{
		"the same tenant": {metadata.Pairs("cell-tenant", "acme"), ""}, "no edge": {metadata.MD{}, ""},
		"a neighbour": {metadata.Pairs("cell-tenant", "other"), cells.CodeForbidden}, "both": {metadata.Pairs("Cell-Tenant", "acme", "cell-tenant", "other"), cells.CodeForbidden},
	} {
		ctx, cancel := context.WithTimeout(metadata.NewIncomingContext(t.Context(), c.md), time.Minute)
		ran := false
		_, err := p.UnaryServerInterceptor(g)(ctx, nil, &grpc.UnaryServerInfo{FullMethod: "/a/b"}, func(context.Context, any) (any, error) {
			ran = true
			return nil, nil
		})
		serr := p.StreamServerInterceptor(g)(nil, fakeStream{ctx: ctx}, &grpc.StreamServerInfo{FullMethod: "/a/b"}, func(any, grpc.ServerStream) error { return nil })
		cancel()
		for _, err := range []error{err, serr} {
			got := cells.Code("")
			if a, ok := cells.AnswerFromStatus(status.Convert(err)); ok {
				got = a.Code
			}
			if got != c.want || ran != (c.want == "") {
				t.Errorf("gRPC, %s: %v, want %s", name, err, c.want)
			}
		}
	}
}
