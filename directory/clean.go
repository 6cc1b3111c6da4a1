// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

const (
	cleanFirst = 200 * time.Millisecond
	cleanLast  = 30 * time.Second
)

// clean removes what the loser of the move still holds, for as long as it takes.
func (e *executor) clean(ctx context.Context, t *tracker) {
	m := t.snapshot()
	wait := cleanFirst
	for {
		left, err := e.cleanOnce(ctx, m.Tenant, m.ID)
		if ctx.Err() != nil {
			return
		}
		if err == nil && len(left) == 0 {
			if e.attestRemoval(ctx, &m) != nil {
				return // the server is closing
			}
			t.cleaned(nil)
			return
		}
		if left != nil {
			t.cleaned(left)
		}
		if err != nil {
			t.noteError(err)
			e.s.log.Warn("rows left behind; trying again", "move", t.id, "tenant", m.Tenant, "err", err, "in", wait)
		}
		if !sleep(ctx, wait) {
			return
		}
		wait = min(2*wait, cleanLast)
	}
}

// cleanOnce tries once and returns what the route still lists of the move.
func (e *executor) cleanOnce(ctx context.Context, tenant cells.TenantID, id cells.MoveID) ([]cells.Residue, error) {
	select {
	case e.sweeps <- struct{}{}:
		defer func() { <-e.sweeps }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	row, err := e.s.table.Get(ctx, tenant)
	if err != nil {
		return nil, err
	}
	left := residueOf(&row, id)
	if len(left) == 0 {
		return nil, nil
	}
	rerr := e.controller().Reclaim(ctx, tenant)
	row, err = e.s.table.Get(ctx, tenant)
	if err != nil {
		return left, errors.Join(rerr, err)
	}
	left = residueOf(&row, id)
	if len(left) == 0 {
		return nil, nil
	}
	return left, rerr
}

// residueOf returns the route's entries of the move.
func residueOf(row *cells.TenantRoute, id cells.MoveID) []cells.Residue {
	var out []cells.Residue
	for _, r := range row.Residue {
		if r.Move == id {
			out = append(out, r)
		}
	}
	return out
}
