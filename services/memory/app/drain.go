// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	checks "github.com/cloister-dev/cloister/member/tenancy"
)

// drain is how a process ends behind a load balancer. From the signal on it is not
// ready, and takes requests all the same, with answers that close their connection; the
// listener closes when as much time has passed as whoever looks at /readyz needs. A
// process that closes its listener and its idle connections at once breaks the requests
// that are on their way. The zero value has not begun.
type drain struct{ begun atomic.Bool }

// run begins and waits, at most until ctx ends.
func (d *drain) run(ctx context.Context, while time.Duration) error {
	if while <= 0 {
		return nil
	}
	d.begun.Store(true)
	t := time.NewTimer(while)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
	return nil
}

// api is the service, of which each answer closes its connection once it has begun.
func (d *drain) api(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if d.begun.Load() {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// health is not ready once it has begun.
func (d *drain) health(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == checks.PathReady && d.begun.Load() {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, "this process ends\n")
			return
		}
		next.ServeHTTP(w, r)
	})
}
