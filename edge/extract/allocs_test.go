// SPDX-License-Identifier: Apache-2.0

package extract

import (
	"testing"

	"github.com/cloister-dev/cloister/internal/alloctest"
)

// What finding the tenant allocates, by extractor, is kept in testdata/allocs.txt.
func TestAllocs(t *testing.T) {
	var paths []alloctest.Path
	for _, c := range []struct{ name, doc, raw string }{
		{"header", `[{header: X-Tenant}]`, "GET / HTTP/1.1\nHost: h\nX-Tenant: acme"},
		{"host", `[{host: "{tenant}.example.com"}]`, "GET / HTTP/1.1\nHost: acme.example.com"},
		{"path", `[{path: "/t/{tenant}/..."}]`, "GET /t/acme/v1/do HTTP/1.1\nHost: h"},
		{"jwt", `[{jwt: {claim: org}}]`, "GET / HTTP/1.1\nHost: h\nAuthorization: Bearer " + unsigned(`{"iss":"https://id.example","org":"acme","exp":1}`)},
		{"issuers", `[{issuers: {"https://id.example": acme}}]`, "GET / HTTP/1.1\nHost: h\nAuthorization: Bearer " + unsigned(`{"iss":"https://id.example"}`)},
	} {
		l, r := list(t, c.doc), request(t, c.raw)
		paths = append(paths, alloctest.Path{Name: c.name, Run: func() {
			if f, err := l.Resolve(r); err != nil || f.Tenant != "acme" {
				t.Fatal(f, err)
			}
		}})
	}
	alloctest.Check(t, paths...)
}
