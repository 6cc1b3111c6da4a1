// SPDX-License-Identifier: Apache-2.0

package member_test

import (
	"context"
	"log"
	"net/http"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member"
)

// A stateless service: one binary that runs in a cell when CELL_ID is set, and as
// an ordinary service when it is not.
func Example() {
	ctx := context.Background()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /hello", func(w http.ResponseWriter, r *http.Request) {
		if a, ok := cells.AdmissionFromContext(r.Context()); ok {
			w.Write([]byte("hello, " + string(a.Tenant)))
		}
	})
	srv := &http.Server{Addr: "127.0.0.1:8080", Handler: mux}

	cfg, on, err := member.FromEnv()
	if err != nil {
		log.Fatal(err)
	}
	if on {
		m, err := member.Join(ctx, cfg)
		if err != nil {
			log.Fatal(err)
		}
		defer m.Close(ctx)
		srv.Handler = m.Handler(mux)
	}
	log.Print(srv.ListenAndServe())
}
