// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

const benchTenants = 100_000

func benchRouter(b testing.TB) (*cells.Router, []cells.TenantID) {
	b.Helper()
	r := cells.NewRouter(cells.NewMemTable())
	if err := r.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = r.Close() })
	tenants := make([]cells.TenantID, benchTenants)
	for i := range tenants {
		tenants[i] = cells.TenantID(fmt.Sprintf("tenant-%d", i))
		row := active(tenants[i], "cell-a", 4)
		row.Revision = cells.Revision(i + 1)
		r.Observe(row)
	}
	return r, tenants
}

func BenchmarkLookup(b *testing.B) {
	r, tenants := benchRouter(b)
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			if d := r.Lookup(tenants[i%1000]); !d.Known {
				b.Fatal("not known")
			}
		}
	})
}

func benchAdmit(b *testing.B, opts []cells.GateOption, req func(cells.TenantID) cells.AdmitRequest) {
	r, tenants := benchRouter(b)
	g := cells.NewGates("cell-a", r, opts...)
	reqs := make([]cells.AdmitRequest, 1000)
	for i := range reqs {
		reqs[i] = req(tenants[i])
	}
	ctx := b.Context()
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			a, err := g.Admit(ctx, reqs[i%len(reqs)])
			if err != nil {
				b.Fatal(err)
			}
			a.Done()
		}
	})
}

func BenchmarkAdmit(b *testing.B) {
	benchAdmit(b, nil, func(t cells.TenantID) cells.AdmitRequest {
		return cells.AdmitRequest{Tenant: t, HasEpoch: true, Epoch: 4}
	})
}

func BenchmarkAdmitToken(b *testing.B) {
	benchAdmit(b, []cells.GateOption{cells.WithAdmissionKey(admissionKey)}, func(t cells.TenantID) cells.AdmitRequest {
		return cells.AdmitRequest{Tenant: t, HasEpoch: true, Epoch: 4, Token: cells.MintToken(admissionKey, t, "cell-a", 4)}
	})
}

func BenchmarkAdmitOneTenant(b *testing.B) {
	benchAdmit(b, nil, func(cells.TenantID) cells.AdmitRequest {
		return cells.AdmitRequest{Tenant: "tenant-0", HasEpoch: true, Epoch: 4}
	})
}

func BenchmarkAdmitStream(b *testing.B) {
	benchAdmit(b, nil, func(t cells.TenantID) cells.AdmitRequest {
		return cells.AdmitRequest{Tenant: t, HasEpoch: true, Epoch: 4, Stream: true}
	})
}

func BenchmarkMintToken(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		cells.MintToken(admissionKey, "tenant-0", "cell-a", 4)
	}
}

func BenchmarkHTTPMiddleware(b *testing.B) {
	r, _ := benchRouter(b)
	h := cells.HTTPMiddleware(r, cells.NewGates("cell-a", r))(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	}))
	req := httptest.NewRequest("GET", "/v1/do", nil)
	req.Header = hdr(cells.HeaderTenant, "tenant-0", cells.HeaderEpoch, "4")
	w := httptest.NewRecorder()
	b.ReportAllocs()
	for b.Loop() {
		h.ServeHTTP(w, req)
	}
}

// The hot path allocates nothing.
func TestHotPathDoesNotAllocate(t *testing.T) {
	r, tenants := benchRouter(t)
	g := cells.NewGates("cell-a", r, cells.WithAdmissionKey(admissionKey))
	if n := testing.AllocsPerRun(1000, func() { r.Lookup(tenants[7]) }); n != 0 {
		t.Errorf("a lookup allocates %v times", n)
	}
	if n := testing.AllocsPerRun(1000, func() { r.Lookup("nobody") }); n != 0 {
		t.Errorf("a lookup of nobody allocates %v times", n)
	}
	req := cells.AdmitRequest{Tenant: tenants[7], HasEpoch: true, Epoch: 4, Token: cells.MintToken(admissionKey, tenants[7], "cell-a", 4)}
	ctx := t.Context()
	// Admissions come from slabs of 32: less than one allocation for each.
	if n := testing.AllocsPerRun(1000, func() {
		a, err := g.Admit(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		a.Done()
	}); n != 0 {
		t.Errorf("an admission allocates %v times", n)
	}
}
