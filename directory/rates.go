// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"fmt"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/internal/pace"
)

// maxPaced bounds the cells whose pace is remembered.
const maxPaced = 10_000

// rates bounds the pace at which each cell places for itself. The names come from
// certificates.
type rates struct{ limit *pace.Limit }

func newRates(perMinute int) *rates { return &rates{pace.New(perMinute, maxPaced)} }

// take counts one call of the cell, or refuses it with RATE_LIMITED and the time
// after which it would be admitted, at most a minute.
func (r *rates) take(cell cells.CellID) error {
	wait := r.limit.Take(string(cell))
	if wait == 0 {
		return nil
	}
	return &cells.Answer{Code: cells.CodeRateLimited, Cell: cell, RetryAfter: wait,
		Detail: fmt.Sprintf("cell %s places more than %d tenants a minute", cell, r.limit.Burst())}
}
