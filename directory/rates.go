// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/cloister-dev/cloister/cells"
)

// rates bounds the pace at which each cell places for itself. The names come from
// certificates and the cells are registered, so the map is bounded by them.
type rates struct {
	perMinute int

	mu    sync.Mutex
	cells map[cells.CellID]*rate.Limiter // guarded by mu
}

func newRates(perMinute int) *rates {
	return &rates{perMinute: perMinute, cells: map[cells.CellID]*rate.Limiter{}}
}

// take counts one call of the cell, or refuses it with RATE_LIMITED and the time
// after which it would be admitted, at most a minute.
func (r *rates) take(cell cells.CellID) error {
	r.mu.Lock()
	l := r.cells[cell]
	if l == nil {
		l = rate.NewLimiter(rate.Limit(float64(r.perMinute)/60), r.perMinute)
		r.cells[cell] = l
	}
	r.mu.Unlock()
	res := l.Reserve()
	wait := res.Delay()
	if res.OK() && wait == 0 {
		return nil
	}
	res.Cancel()
	return &cells.Answer{Code: cells.CodeRateLimited, Cell: cell, RetryAfter: min(max(wait, time.Second), time.Minute),
		Detail: fmt.Sprintf("cell %s places more than %d tenants a minute", cell, r.perMinute)}
}
