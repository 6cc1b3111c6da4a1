// SPDX-License-Identifier: Apache-2.0

package app

import (
	"math/rand/v2"
	"net/http"
	"time"
)

// faults make the service a bad one, to rehearse what a rollout does then.
type faults struct {
	percent float64
	delay   time.Duration
}

// around fails and delays requests to next. One that fails has not run.
func (f faults) around(next http.Handler) http.Handler {
	if f == (faults{}) {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.delay > 0 {
			t := time.NewTimer(f.delay)
			defer t.Stop()
			select {
			case <-t.C:
			case <-r.Context().Done():
				return
			}
		}
		if 100*rand.Float64() < f.percent {
			http.Error(w, "a fault that was asked for with --fault-percent", http.StatusInternalServerError)
			return
		}
		next.ServeHTTP(w, r)
	})
}
