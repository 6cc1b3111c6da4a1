// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// DefaultDrainDeadline bounds a cut unless [WithDrainDeadline] says otherwise.
const DefaultDrainDeadline = 10 * time.Second

// MoveController places, moves and deletes tenants. It decides nothing itself: it
// reads the tenant's row, asks [Next], writes the row with a compare-and-set and
// performs the effects. It holds no state of its own, so any number of
// controllers, in any number of processes, may drive the same tenant: each row is
// written by one of them, the others follow.
//
// Before a move is decided every error rolls it back, except the end of the
// driver's own context, which leaves it for [MoveController.Resume]. Once the
// decision may have been written nothing rolls it back: the driver retries until
// its context ends, and Resume goes on from there.
type MoveController struct {
	table    RoutingTable
	fencer   Fencer
	barrier  EventBarrier
	mover    DataMover
	drainer  Drainer
	budget   *BudgetMeter
	fallback CellID
	observe  func(StepEvent)
	hook     func(context.Context, StepEvent) error
	log      *slog.Logger
	now      func() time.Time
	deadline time.Duration
	maxPause time.Duration
	headroom time.Duration
	noSweep  bool
}

// ControllerOption configures a MoveController.
type ControllerOption func(*MoveController)

// WithFencer sets the storage fences. Without it cells have none (stateless).
func WithFencer(f Fencer) ControllerOption { return func(c *MoveController) { c.fencer = f } }

// WithEventBarrier sets the event fences. Without it cells send no events.
func WithEventBarrier(b EventBarrier) ControllerOption {
	return func(c *MoveController) { c.barrier = b }
}

// WithDataMover sets what carries rows between cells that own their data.
// Without it cells share their database.
func WithDataMover(m DataMover) ControllerOption { return func(c *MoveController) { c.mover = m } }

// WithDrainer sets what waits for the source's processes: the gates of this
// process, or all processes of the cell. Without it nothing is waited for.
func WithDrainer(d Drainer) ControllerOption { return func(c *MoveController) { c.drainer = d } }

// WithBudgetMeter refuses moves that would exceed their tenant's budget, and
// charges the pauses.
func WithBudgetMeter(m *BudgetMeter) ControllerOption {
	return func(c *MoveController) { c.budget = m }
}

// WithDrainDeadline bounds the cut: a move that is not committed within d of its
// QUIESCING is rolled back. Not positive means [DefaultDrainDeadline].
func WithDrainDeadline(d time.Duration) ControllerOption {
	return func(c *MoveController) {
		if d > 0 {
			c.deadline = d
		}
	}
}

// WithMaxPause refuses a cut whose predicted pause is longer than d, and gives a cut
// up that takes longer before it is decided. Not positive means no bound besides the
// budget.
func WithMaxPause(d time.Duration) ControllerOption {
	return func(c *MoveController) { c.maxPause = d }
}

// WithFallbackCell says which cell serves tenants that have no row, at epoch 0.
// A claim of it keeps epoch 0 good; giving such a tenant to another cell is a
// move, which places it in the fallback cell first. It has to be the cell of the
// routers' WithDefaultCell if that cell keeps state for such tenants.
func WithFallbackCell(cell CellID) ControllerOption {
	return func(c *MoveController) { c.fallback = cell }
}

// WithObserver is told of every step, of progress and of failures. It must not
// block; it is called by the goroutines that drive.
func WithObserver(f func(StepEvent)) ControllerOption {
	return func(c *MoveController) { c.observe = f }
}

// WithStepHook is called after each step is done and, for row steps, persisted.
// When it returns an error the driver stops there and returns it, as if it had
// died: nothing is rolled back or retried.
func WithStepHook(f func(context.Context, StepEvent) error) ControllerOption {
	return func(c *MoveController) { c.hook = f }
}

// WithControllerLogger sets the logger; the default discards.
func WithControllerLogger(l *slog.Logger) ControllerOption {
	return func(c *MoveController) { c.log = l }
}

// WithNow sets the clock that stamps rows, sets deadlines and measures pauses.
func WithNow(now func() time.Time) ControllerOption { return func(c *MoveController) { c.now = now } }

// WithoutReclaim leaves the rows of the loser of a move where they are; call
// [MoveController.Reclaim] or [MoveController.Resume] later.
func WithoutReclaim() ControllerOption { return func(c *MoveController) { c.noSweep = true } }

// NewMoveController returns a controller on table. It starts nothing.
func NewMoveController(table RoutingTable, opts ...ControllerOption) *MoveController {
	c := &MoveController{table: table, deadline: DefaultDrainDeadline, headroom: DefaultPauseHeadroom, now: time.Now, log: slog.New(slog.DiscardHandler)}
	for _, o := range opts {
		o(c)
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	return c
}

var (
	// errChanged: the row is not the one that was decided on; read it and decide again.
	errChanged = fmt.Errorf("%w since it was read", ErrConflict)
	// errUnknown: a write may or may not have happened, and its trace is gone.
	errUnknown = errors.New("the outcome of a write is unknown")
)

// stopError carries the error of a step hook through everything.
type stopError struct{ err error }

func (e *stopError) Error() string { return e.err.Error() }
func (e *stopError) Unwrap() error { return e.err }

func isStop(err error) bool {
	var s *stopError
	return errors.As(err, &s)
}

// patience is how often a failing store or cell is asked again.
type patience uint

const (
	// forever is for what is decided: until the context ends.
	forever patience = 0
	// briefly is for what can still be given up.
	briefly patience = 5
	// patiently is for giving up itself: about ten seconds.
	patiently patience = 45
)

func (p patience) options() []backoff.RetryOption {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval = 10 * time.Millisecond
	b.MaxInterval = 250 * time.Millisecond // what is decided keeps clients waiting
	return []backoff.RetryOption{backoff.WithBackOff(b), backoff.WithMaxTries(uint(p)), backoff.WithMaxElapsedTime(0)}
}

// retry calls f until it succeeds, says that it never will, or the context ends;
// then the error wraps both the context's cause and f's last error.
func retry[T any](ctx context.Context, p patience, f func() (T, error)) (T, error) {
	var last error
	v, err := backoff.Retry(ctx, func() (T, error) {
		v, err := f()
		last = err
		return v, err
	}, p.options()...)
	var perm *backoff.PermanentError
	if errors.As(err, &perm) {
		return v, perm.Unwrap()
	}
	if err != nil && last != nil && !errors.Is(last, err) {
		err = fmt.Errorf("%w: %w", err, last)
	}
	return v, err
}

// read returns the tenant's row; without a row, the zero route and ErrNotFound.
func (c *MoveController) read(ctx context.Context, tenant TenantID, p patience) (TenantRoute, error) {
	return retry(ctx, p, func() (TenantRoute, error) {
		r, err := c.table.Get(ctx, tenant)
		switch {
		case err == nil:
			return r, nil
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrInvalid), errors.Is(err, ErrClosed):
			return TenantRoute{}, backoff.Permanent(err)
		}
		return TenantRoute{}, err
	})
}

// write asks Next what becomes of cur and writes it. wrote is true only if the
// row in the table is (or was) this call's own, recognised by its stamp and by
// nothing else; it is false without an error when the event had taken effect
// before. When the row has changed the error is errChanged, and errUnknown too
// if this call's write may have been among the changes.
func (c *MoveController) write(ctx context.Context, cur TenantRoute, ev Event, p patience) (_ TenantRoute, wrote bool, _ error) {
	ev.Stamp = rand.Text()
	ev.At = c.now()
	next, _, err := Next(cur, ev)
	if err != nil {
		return cur, false, err
	}
	if next.Stamp != ev.Stamp {
		return next, false, nil
	}
	unknown := false
	out, err := retry(ctx, p, func() (TenantRoute, error) {
		out, err := c.table.CompareAndSet(ctx, cur.Revision, next)
		switch {
		case err == nil:
			return out, nil
		case errors.Is(err, ErrInvalid) && !unknown, errors.Is(err, ErrClosed):
			return cur, backoff.Permanent(err)
		case !errors.Is(err, ErrConflict) && !errors.Is(err, ErrInvalid):
			unknown = true
		}
		// A conflict is answered by the row too: the table's client may have sent our
		// write twice.
		row, rerr := c.table.Get(ctx, next.TenantID)
		switch {
		case rerr == nil && row.Stamp == next.Stamp:
			return row, nil
		case rerr == nil && row.Revision != cur.Revision:
			return row, backoff.Permanent(errChanged)
		case errors.Is(rerr, ErrNotFound) && cur.Revision != 0:
			return cur, backoff.Permanent(fmt.Errorf("%w: the row of tenant %s is gone", ErrInvalid, next.TenantID))
		}
		// The row is as it was, or cannot be read: the same write again, with the same
		// stamp, can take effect only once.
		return cur, err
	})
	switch {
	case err == nil:
		return out, true, nil
	case unknown:
		err = fmt.Errorf("%w: %w", err, errUnknown)
	}
	return out, false, err
}

func (c *MoveController) emit(ev StepEvent) {
	if ev.At.IsZero() {
		ev.At = c.now()
	}
	if c.observe != nil {
		c.observe(ev)
	}
	if ev.Progress != nil {
		return
	}
	level, args := slog.LevelInfo, []any{"tenant", ev.Tenant, "step", ev.Step, "cell", ev.Route.CellID, "epoch", ev.Route.Epoch}
	if ev.Move.ID != "" {
		args = append(args, "move", ev.Move.ID)
	}
	if ev.Err != nil {
		level, args = slog.LevelWarn, append(args, "err", ev.Err)
	}
	c.log.Log(context.Background(), level, "step", args...)
}

// done reports a step that is done and gives the hook its turn.
func (c *MoveController) done(ctx context.Context, ev StepEvent) error {
	ev.At = c.now()
	c.emit(ev)
	if c.hook != nil {
		if err := c.hook(ctx, ev); err != nil {
			return &stopError{err}
		}
	}
	return nil
}
