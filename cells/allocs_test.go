// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/alloctest"
)

// What the hot paths of the request path allocate is kept in testdata/allocs.txt.
func TestAllocs(t *testing.T) {
	r, tenants := benchRouter(t)
	plain := cells.NewGates("cell-a", r)
	keyed := cells.NewGates("cell-a", r, cells.WithAdmissionKey(admissionKey))
	token := cells.MintToken(admissionKey, tenants[7], "cell-a", 4)
	ctx := t.Context()
	admit := func(g *cells.Gates, req cells.AdmitRequest) func() {
		return func() {
			a, err := g.Admit(ctx, req)
			if err != nil {
				t.Fatal(err)
			}
			a.Done()
		}
	}
	row := active(tenants[7], "cell-a", 4)
	row.Revision, row.OperationID, row.Actor, row.Stamp = 7, "op-1", "alice", "0123456789abcdef"
	enc, err := cells.EncodeRoute(row)
	if err != nil {
		t.Fatal(err)
	}
	h := cells.HTTPMiddleware(r, plain)(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	req := httptest.NewRequest("GET", "/v1/do", nil)
	req.Header = hdr(cells.HeaderTenant, "tenant-0", cells.HeaderEpoch, "4")
	w := httptest.NewRecorder()
	rev := cells.Revision(len(tenants))
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	alloctest.Check(t,
		alloctest.Path{Name: "lookup", Run: func() { r.Lookup(tenants[7]) }},
		alloctest.Path{Name: "lookup/nobody", Run: func() { r.Lookup("nobody") }},
		alloctest.Path{Name: "observe", Run: func() {
			rev++
			next := active(tenants[9], "cell-a", 4)
			next.Revision = rev
			r.Observe(next)
		}},
		alloctest.Path{Name: "admit", Run: admit(plain, cells.AdmitRequest{Tenant: tenants[7], HasEpoch: true, Epoch: 4})},
		alloctest.Path{Name: "admit/token", Run: admit(keyed, cells.AdmitRequest{Tenant: tenants[7], HasEpoch: true, Epoch: 4, Token: token})},
		alloctest.Path{Name: "admit/stream", Run: admit(plain, cells.AdmitRequest{Tenant: tenants[7], HasEpoch: true, Epoch: 4, Stream: true})},
		alloctest.Path{Name: "token/mint", Run: func() { cells.MintToken(admissionKey, tenants[7], "cell-a", 4) }},
		alloctest.Path{Name: "token/verify", Run: func() { cells.VerifyToken(admissionKey, token, tenants[7], "cell-a", 4) }},
		alloctest.Path{Name: "middleware", Run: func() { h.ServeHTTP(w, req) }},
		alloctest.Path{Name: "route/encode", Run: func() { _, err := cells.EncodeRoute(row); must(err) }},
		alloctest.Path{Name: "route/decode", Run: func() { _, err := cells.DecodeRoute(enc); must(err) }},
	)
}
