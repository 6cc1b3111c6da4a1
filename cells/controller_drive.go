// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"
)

var (
	errDeadline  = errors.New("the cut's deadline has passed")
	errOvertaken = fmt.Errorf("%w: the move is over, and others have followed", ErrOtherMove)
)

// drive is one driver's part in one move.
type drive struct {
	c     *MoveController
	ref   MoveRef
	force bool
	actor string

	row       TenantRoute
	winner    CellID    // set once the decision is known
	cause     error     // why this driver rolled back
	pauseFrom time.Time // when this driver took the tenant out of service
	until     time.Time // when the cut that this driver began must be decided, by its own clock
	bound     time.Duration
	ended     time.Time // when this driver wrote ACTIVE
	predicted time.Duration
	compared  []Comparison
	steps     []StepTiming
	last      time.Time
	// decided: this driver's commit may have been written. Nothing rolls back.
	decided bool
	// told are the effects that were reported.
	told []reported
}

func (c *MoveController) newDrive(m MoveRef, row TenantRoute) *drive {
	return &drive{c: c, ref: m, row: row, last: c.now()}
}

// run drives the move to its end, or as far as the context and the hook allow.
func (d *drive) run(ctx context.Context) error {
	for {
		if d.row.MoveID != d.ref.ID {
			return d.over(ctx)
		}
		if d.row.State == StateCommitting {
			d.winner = d.row.CellID
		}
		err := d.step(ctx)
		switch {
		case err == nil:
		case isStop(err):
			return err
		case ctx.Err() != nil:
			if cause := context.Cause(ctx); !errors.Is(err, cause) {
				err = fmt.Errorf("%w: %w", cause, err)
			}
			return fmt.Errorf("move %s left at %s, to be resumed: %w", d.ref.ID, d.row.State, err)
		case errors.Is(err, errChanged):
			if err := d.reread(ctx); err != nil {
				return err
			}
		default:
			if err := d.giveUp(ctx, err); err != nil {
				return err
			}
		}
	}
}

func (d *drive) reread(ctx context.Context) error {
	r, err := d.c.read(ctx, d.ref.Tenant, forever)
	if err != nil {
		return fmt.Errorf("move %s left at %s, to be resumed: %w", d.ref.ID, d.row.State, err)
	}
	d.row = r
	return nil
}

// giveUp is for a step that failed while this driver can still roll back. If the
// row has changed meanwhile the failure says nothing: the driver follows the row.
func (d *drive) giveUp(ctx context.Context, cause error) error {
	seen := d.row.Revision
	if err := d.reread(ctx); err != nil {
		return fmt.Errorf("%w (after %w)", err, cause)
	}
	if d.row.Revision != seen {
		return nil
	}
	if d.row.State == StateCommitting || d.decided {
		return fmt.Errorf("move %s left at %s, to be resumed: %w", d.ref.ID, d.row.State, cause)
	}
	d.cause = cause
	err := d.rollback(ctx, cause.Error())
	switch {
	case err == nil, errors.Is(err, errChanged):
		return nil
	case isStop(err):
		return err
	}
	return fmt.Errorf("move %s left at %s, to be resumed: %w: %w", d.ref.ID, d.row.State, cause, err)
}

func (d *drive) rollback(ctx context.Context, reason string) error {
	from := d.row.State
	wrote, err := d.write(ctx, StepRollback, Event{Kind: EventRollback, Reason: reason}, patiently)
	if wrote && from == StateActive {
		d.pauseFrom = d.row.UpdatedAt
	}
	return err
}

// over finds out how a move ended that is no longer in the row.
func (d *drive) over(ctx context.Context) error {
	if d.winner == "" && d.row.Epoch == d.ref.OpenEpoch() && d.row.Exists() {
		d.winner = d.row.CellID
	}
	d.charge(ctx)
	switch d.winner {
	case d.ref.Target:
		return nil
	case d.ref.Source:
		reason := d.reason()
		if d.cause != nil {
			return fmt.Errorf("%w: %w", ErrRolledBack, d.cause)
		}
		return fmt.Errorf("%w: %s", ErrRolledBack, reason)
	}
	return fmt.Errorf("move %s of tenant %s: %w", d.ref.ID, d.ref.Tenant, errOvertaken)
}

func (d *drive) reason() string {
	if d.winner != d.ref.Source || d.winner == "" {
		return ""
	}
	if d.row.Epoch == d.ref.OpenEpoch() && d.row.Reason != "" {
		return d.row.Reason
	}
	if d.cause != nil {
		return d.cause.Error()
	}
	return "rolled back"
}

func (d *drive) pause() time.Duration {
	if d.pauseFrom.IsZero() || d.ended.IsZero() {
		return 0
	}
	return max(d.ended.Sub(d.pauseFrom), 0)
}

// charge books the pause, in place of what was reserved. Only the driver that
// wrote ACTIVE does: the others cannot measure it.
func (d *drive) charge(ctx context.Context) {
	if d.c.budget == nil || d.ended.IsZero() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := d.c.budget.Charge(ctx, d.ref.Tenant, d.ref.ID, d.pause()); err != nil {
		d.c.log.Warn("budget not charged", "tenant", d.ref.Tenant, "move", d.ref.ID, "pause", d.pause(), "err", err)
	}
}

// step performs the effects of the row's state and writes the event that follows.
func (d *drive) step(ctx context.Context) error {
	switch d.row.State {
	case StateActive:
		return d.prepare(ctx)
	case StateQuiescing:
		if d.late() {
			return errDeadline
		}
		_, err := d.write(ctx, StepGates, Event{Kind: EventGatesClosed}, briefly)
		return err
	case StateDraining:
		return d.bounded(ctx, d.drain)
	case StateCopying:
		return d.bounded(ctx, d.cut)
	case StateCommitting:
		return d.finish(ctx)
	}
	return fmt.Errorf("%w: move %s in a row that is %s", ErrInvalid, d.ref.ID, d.row.State)
}

func (d *drive) late() bool { return d.timeLeft() <= 0 }

// timeLeft is how long the cut may still take. The driver that began it goes by its
// own clock, which does not jump; others by the row.
func (d *drive) timeLeft() time.Duration {
	if !d.until.IsZero() {
		return d.until.Sub(d.c.now())
	}
	return d.row.Deadline.Sub(d.c.now())
}

// bounded runs f under the cut's deadline.
func (d *drive) bounded(ctx context.Context, f func(ctx, whole context.Context) error) error {
	if d.late() {
		return errDeadline
	}
	cut, cancel := context.WithTimeoutCause(ctx, d.timeLeft(), errDeadline)
	defer cancel()
	err := f(cut, ctx)
	if err != nil && cut.Err() != nil && ctx.Err() == nil && !isStop(err) && !errors.Is(err, errChanged) && !errors.Is(err, errDeadline) {
		err = fmt.Errorf("%w: %w", errDeadline, err)
	}
	return err
}

func (d *drive) prepare(ctx context.Context) error {
	var p Prediction
	if d.c.mover != nil {
		var err error
		if p, err = d.c.mover.Prepare(ctx, d.ref, d.progress(StepPrepare)); err != nil {
			return d.failed(StepPrepare, err)
		}
	}
	d.predicted = p.Pause
	if err := d.effect(ctx, StepPrepare); err != nil {
		return err
	}
	bound, err := d.c.admit(ctx, d.ref.Tenant, d.ref.ID, p.Pause, d.force)
	if err != nil {
		return d.failed(StepQuiesce, err)
	}
	until := d.c.now().Add(bound)
	d.bound = bound
	wrote, err := d.write(ctx, StepQuiesce, Event{Kind: EventQuiesce, Deadline: until}, briefly)
	if wrote || isStop(err) {
		d.pauseFrom, d.until = d.row.UpdatedAt, until
	}
	return err
}

func (d *drive) drain(cut, ctx context.Context) error {
	if d.c.drainer != nil {
		if err := d.c.drainer.Drain(cut, d.row); err != nil {
			return d.failed(StepDrain, err)
		}
	}
	if err := d.effect(ctx, StepDrain); err != nil {
		return err
	}
	_, err := d.write(cut, StepCopy, Event{Kind: EventDrained}, briefly)
	return err
}

// cut performs the effects of COPYING and decides for the target. Once the
// decision may have been written its outcome is awaited without a bound: ctx is
// the driver's whole life, not the cut's.
func (d *drive) cut(cut, ctx context.Context) error {
	var (
		mark EventSeq
		data string
		err  error
	)
	for _, e := range Effects(d.row) {
		switch e.Kind {
		case EffectCloseFence:
			if d.c.fencer != nil {
				if err := d.c.fencer.Close(cut, e.Fence); err != nil {
					return d.failed(StepFence, err)
				}
			}
			err = d.effect(ctx, StepFence)
		case EffectPauseEvents:
			if d.c.barrier != nil {
				if mark, err = d.c.barrier.Pause(cut, e.Barrier); err != nil {
					return d.failed(StepEvents, err)
				}
			}
			err = d.effect(ctx, StepEvents)
		case EffectFinish:
			if d.c.mover != nil {
				if data, err = d.transfer(cut, e.Move); err != nil {
					return d.failed(StepFinish, err)
				}
			}
			err = d.effect(ctx, StepFinish)
		}
		if err != nil {
			return err
		}
	}
	if cut.Err() != nil || ctx.Err() != nil {
		return context.Cause(cut)
	}
	_, err = d.write(ctx, StepCommit, Event{Kind: EventCommit, EventMark: mark, DataMark: data}, forever)
	d.decided = err != nil && errors.Is(err, errUnknown) && !errors.Is(err, errChanged)
	return err
}

// finish opens the winner, whoever it is. It gives up only with the context, or
// when the row shows that another driver has done it.
func (d *drive) finish(ctx context.Context) error {
	_, err := retry(ctx, forever, func() (struct{}, error) {
		err := d.open(ctx)
		if err == nil {
			return struct{}{}, nil
		}
		if isStop(err) {
			return struct{}{}, backoff.Permanent(err)
		}
		if row, rerr := d.c.table.Get(ctx, d.ref.Tenant); rerr == nil && row.Revision != d.row.Revision {
			return struct{}{}, backoff.Permanent(errChanged)
		}
		return struct{}{}, err
	})
	if err != nil {
		return err
	}
	step := StepActivate
	if d.row.CellID == d.ref.Source {
		step = StepReopen
	}
	deadline := d.row.Deadline
	wrote, err := d.write(ctx, step, Event{Kind: EventOpened, Epoch: d.row.Epoch}, forever)
	if wrote {
		d.ended = d.last
		if d.pauseFrom.IsZero() && !deadline.IsZero() {
			d.pauseFrom = d.c.cutBegan(ctx, d.ref, deadline)
		}
	}
	return err
}

func (d *drive) open(ctx context.Context) error {
	for _, e := range Effects(d.row) {
		switch e.Kind {
		case EffectStartEvents:
			if d.c.barrier != nil {
				if err := d.c.barrier.Start(ctx, e.Barrier, e.Mark); err != nil {
					return d.failed(StepStart, err)
				}
			}
			if err := d.effect(ctx, StepStart); err != nil {
				return err
			}
		case EffectOpenFence:
			if d.c.fencer != nil {
				if err := d.c.fencer.Open(ctx, e.Fence); err != nil {
					return d.failed(StepOpen, err)
				}
			}
			if err := d.effect(ctx, StepOpen); err != nil {
				return err
			}
		}
	}
	return nil
}

// write writes the event of this move and takes the row over, whoever wrote it.
func (d *drive) write(ctx context.Context, step Step, ev Event, p patience) (wrote bool, _ error) {
	ev.Move, ev.Actor = d.ref.ID, d.actor
	row, wrote, err := d.c.write(ctx, d.row, ev, p)
	if err != nil {
		return false, err
	}
	d.row = row
	if !wrote {
		return false, nil
	}
	return true, d.effect(ctx, step)
}

// effect reports a step that is done, once for each row: an order that is repeated
// because the one behind it fails is no new step.
func (d *drive) effect(ctx context.Context, step Step) error {
	at := reported{step, d.row.Revision}
	if slices.Contains(d.told, at) {
		return nil
	}
	d.told = append(d.told, at)
	now := d.c.now()
	d.steps = append(d.steps, StepTiming{Step: step, At: now, Took: now.Sub(d.last)})
	d.last = now
	ev := StepEvent{Tenant: d.ref.Tenant, Move: d.ref, Step: step, Route: d.row.Clone()}
	switch step {
	case StepPrepare:
		ev.Predicted = d.predicted
	case StepQuiesce:
		ev.Bound = d.bound
	case StepFinish:
		ev.Compared = d.compared
	}
	return d.c.done(ctx, ev)
}

// reported is a step of one row.
type reported struct {
	step Step
	row  Revision
}

func (d *drive) failed(step Step, err error) error {
	d.c.emit(StepEvent{Tenant: d.ref.Tenant, Move: d.ref, Step: step, Route: d.row.Clone(), Err: err})
	return fmt.Errorf("%s: %w", step, err)
}

// transfer applies the last changes, and keeps what was compared.
func (d *drive) transfer(cut context.Context, m MoveRef) (mark string, err error) {
	if p, ok := d.c.mover.(Prover); ok {
		mark, d.compared, err = p.FinishProved(cut, m, d.progress(StepFinish))
		return mark, err
	}
	return d.c.mover.Finish(cut, m, d.progress(StepFinish))
}

func (d *drive) progress(step Step) func(Progress) {
	return func(p Progress) {
		d.c.emit(StepEvent{Tenant: d.ref.Tenant, Move: d.ref, Step: step, Route: d.row.Clone(), Progress: &p})
	}
}

func (d *drive) result() MoveResult {
	return MoveResult{Route: d.row, Move: d.ref, Predicted: d.predicted, Bound: d.bound, Pause: d.pause(), Steps: d.steps,
		RolledBack: d.winner != "" && d.winner == d.ref.Source, Reason: d.reason()}
}
