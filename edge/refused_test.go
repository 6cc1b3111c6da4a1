// SPDX-License-Identifier: Apache-2.0

package edge_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/edge"
)

// TestRefusedWhileSending: a client that is refused while it sends a large body gets the
// answer, from the edge and from a service, and not a connection that breaks.
func TestRefusedWhileSending(t *testing.T) {
	for name, c := range map[string]struct {
		cfg edge.Config
	}{"by the edge": {cfg: edge.Config{MaxBody: 1 << 20}}, "by the service": {}} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, fleetOptions{cfg: c.cfg, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				http.Error(w, "too large", http.StatusRequestEntityTooLarge)
			})})
			f.place("acme", "a")
			for i := range 20 {
				last := func(r *http.Request) { r.Close = i%2 == 0 }
				a := f.must(f.http, "POST", "/", strings.NewReader(strings.Repeat("x", 17<<20)), tenant("acme"), last)
				if a.StatusCode != http.StatusRequestEntityTooLarge {
					t.Fatal(a.Status)
				}
				_, _ = io.Copy(io.Discard, a.Body)
			}
		})
	}
}
