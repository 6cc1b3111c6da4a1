// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// warmFor bounds one call of the service's warm-up.
const warmFor = 30 * time.Second

// WithWarmUp has f called when a move begins that brings a tenant to this cell, long
// before the tenant is served here: for what its first requests would wait for, like
// connections to a database. One call is made at a time; a move that begins during one
// has none of its own. ctx ends after 30 seconds and with the member. An error is logged
// and changes nothing else.
func WithWarmUp(f func(ctx context.Context, tenant cells.TenantID) error) Option {
	return func(o *options) { o.warm = f }
}

// expect notes that the change of a route is the beginning of a move to this cell.
func (m *Member) expect(old, next *cells.TenantRoute) {
	if m.opts.warm == nil || next.MoveID == "" || next.MoveID == old.MoveID || next.TargetCell != m.cfg.Cell {
		return
	}
	select {
	case m.arriving <- next.TenantID:
	default:
	}
}

// warmUp calls the service until Close.
func (m *Member) warmUp() {
	for {
		select {
		case <-m.life.Done():
			return
		case t := <-m.arriving:
			ctx, cancel := context.WithTimeout(m.life, warmFor)
			if err := m.opts.warm(ctx, t); err != nil && m.life.Err() == nil {
				m.log.Warn("member: warming up for a tenant that arrives", "tenant", t, "err", err)
			}
			cancel()
		}
	}
}
