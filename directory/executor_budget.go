// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// settleBudget ends what the move has reserved, if its driver died before it was
// charged: with the pause that the record's steps tell, with nothing if there was no
// cut, else with what was reserved. It is done before the record says that the move
// is over, so that a kill in between repeats it.
func (e *executor) settleBudget(ctx context.Context, t *tracker, state api.MoveState) error {
	meter := e.s.cfg.Budget
	if meter == nil {
		return nil
	}
	m := t.snapshot()
	settle := func() error { return meter.Settle(ctx, m.Tenant, m.ID, measured(&m)) }
	if state == api.MoveRefused || state == api.MoveRolledBack && m.StartedAt.IsZero() {
		settle = func() error { return meter.Release(ctx, m.Tenant, m.ID) }
	}
	return e.insist(ctx, "budget not settled", m.ID, settle)
}

// measured is the pause that the record's steps tell; negative if they do not.
func measured(m *api.Move) time.Duration {
	var from, to time.Time
	for _, s := range m.Steps {
		switch cells.Step(s.Step) {
		case cells.StepQuiesce:
			from = s.At
		case cells.StepRollback:
			if from.IsZero() {
				from = s.At
			}
		case cells.StepActivate, cells.StepReopen:
			to = s.At
		}
	}
	if from.IsZero() || to.Before(from) {
		return -1
	}
	return to.Sub(from)
}

// insist repeats f until it succeeds or the context ends.
func (e *executor) insist(ctx context.Context, what string, id cells.MoveID, f func() error) error {
	wait := 20 * time.Millisecond
	for {
		err := f()
		if err == nil {
			return nil
		}
		e.s.log.Warn(what, "move", id, "err", err)
		if !sleep(ctx, wait) {
			return err
		}
		wait = min(2*wait, 2*time.Second)
	}
}
