// SPDX-License-Identifier: Apache-2.0

package cells_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Whatever a response holds, reading it does not fail, its body stays whole, and
// what is taken for an answer is one: written again it is read as the same.
func FuzzReadProblem(f *testing.F) {
	for _, code := range []cells.Code{cells.CodeMoving, cells.CodeStaleRoute, cells.CodeUnknownTenant} {
		resp := written(httptest.NewRequest("GET", "/x", nil), &cells.Answer{Code: code, Tenant: "acme", Revision: 7, RetryAfter: time.Second})
		body, _ := io.ReadAll(resp.Body)
		f.Add(string(code), "7", "0", "1", resp.Header.Get("Content-Type"), resp.StatusCode, body)
		f.Add(string(code), "7", "0", "", "application/grpc", 200, []byte(nil))
		f.Add(string(code), "", "", "", "application/problem+json; charset=utf-8", resp.StatusCode, body[:len(body)/2])
	}
	f.Fuzz(func(t *testing.T, code, revision, age, retry, contentType string, httpStatus int, body []byte) {
		resp := &http.Response{StatusCode: httpStatus, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body))}
		for k, v := range map[string]string{
			cells.HeaderAnswer: code, cells.HeaderRevision: revision, cells.HeaderAge: age, "Retry-After": retry, "Content-Type": contentType,
		} {
			if v != "" {
				resp.Header.Set(k, v)
			}
		}
		resp.Header.Set("Grpc-Status", strconv.Itoa(httpStatus%20))
		a, ok := cells.ReadProblem(resp)
		if again, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(again, body) {
			t.Fatalf("the body was %d bytes and is %d: %v", len(body), len(again), err)
		}
		if !ok {
			return
		}
		if !a.Code.Known() || a.Tenant != "" && a.Tenant.Validate() != nil || a.Age < 0 || a.RetryAfter < 0 {
			t.Fatalf("%+v", a)
		}
		got, ok := cells.ReadProblem(written(httptest.NewRequest("GET", "/", nil), a))
		if !ok || got.Code != a.Code || got.Tenant != a.Tenant || got.Revision != a.Revision || got.Age != a.Age || got.RetryAfter != a.RetryAfter {
			t.Fatalf("%+v came back as %+v", a, got)
		}
	})
}

// No token but the one that was minted is good.
func FuzzToken(f *testing.F) {
	key := []byte("an admission key of the test....")
	f.Add("acme", "cell-a", uint64(4), "")
	f.Add("acme", "cell-a", uint64(4), cells.MintToken(key, "acme", "cell-a", 4))
	f.Add("a", "b", uint64(0), "1.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
	f.Fuzz(func(t *testing.T, tenant, cell string, epoch uint64, token string) {
		want := cells.MintToken(key, cells.TenantID(tenant), cells.CellID(cell), cells.Epoch(epoch))
		if !cells.VerifyToken(key, want, cells.TenantID(tenant), cells.CellID(cell), cells.Epoch(epoch)) {
			t.Fatal("the minted token is not good")
		}
		if cells.VerifyToken(key, token, cells.TenantID(tenant), cells.CellID(cell), cells.Epoch(epoch)) != (token == want) {
			t.Fatalf("token %q", token)
		}
		if cells.MintToken(key, cells.TenantID(tenant), cells.CellID(cell), cells.Epoch(epoch+1)) == want {
			t.Fatal("two epochs share a token")
		}
	})
}

// A tenant id that is good survives everything it is carried in.
func FuzzTenantID(f *testing.F) {
	for _, s := range []string{"acme", "", "a b", "org:7@eu.example-1", "ü", "a\x00b", "../x", "%2e"} {
		f.Add(s)
	}
	table := cells.NewMemTable()
	router := cells.NewRouter(table, cells.WithDefaultCell("cell-a"))
	if err := router.Start(f.Context()); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = router.Close() })
	gates := cells.NewGates("cell-a", router)
	h := cells.HTTPMiddleware(router, gates)(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, _ := cells.AdmissionFromContext(r.Context())
		_, _ = io.WriteString(w, string(a.Tenant))
	}))
	f.Fuzz(func(t *testing.T, s string) {
		good := cells.TenantID(s).Validate() == nil
		r := httptest.NewRequest("GET", "/", nil)
		r.Header[cells.HeaderTenant] = []string{s}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if good && (w.Code != 200 || w.Body.String() != s) || !good && w.Code != 400 {
			t.Fatalf("%q (good: %v): %d %q", s, good, w.Code, w.Body)
		}
		if !good {
			if a, ok := cells.ReadProblem(w.Result()); !ok || a.Code != cells.CodeInvalidTenant || a.Tenant != "" {
				t.Fatalf("%q: %+v", s, a)
			}
		}
	})
}
