// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Mover is the Agent of one store. Made by [New].
type Mover struct {
	source Source
	sink   Sink
	o      options
	ctx    context.Context // ends with Close
	stop   context.CancelCauseFunc
	wg     sync.WaitGroup
	asked  asked

	mu     sync.Mutex // guards runs and closed
	runs   map[cells.MoveID]*followed
	closed bool
}

// followed is a prepared move whose changes are applied while it waits for Finish.
type followed struct {
	r     *run
	timer *time.Timer
}

var _ Agent = (*Mover)(nil)

// New makes the agent of a store. The caller closes it.
func New(source Source, sink Sink, opts ...Option) *Mover {
	o := defaults()
	for _, f := range opts {
		f(&o)
	}
	v := &Mover{source: source, sink: sink, o: o, runs: map[cells.MoveID]*followed{}}
	v.ctx, v.stop = context.WithCancelCause(context.Background())
	return v
}

// Close ends what runs in the background and waits for it. Moves are resumed by
// another process, or by this one when it is started again.
func (v *Mover) Close() error {
	v.mu.Lock()
	v.closed = true
	runs := v.runs
	v.runs = map[cells.MoveID]*followed{}
	v.mu.Unlock()
	v.stop(cells.ErrClosed)
	for _, f := range runs {
		f.timer.Stop()
		v.end(f.r)
	}
	v.wg.Wait()
	return nil
}

// Source implements Agent.
func (v *Mover) Source() Source { return surveyedSource{v.source, &v.asked} }

// Survey implements Agent. It asks the store; what it hears is kept for a moment, for the
// move that the context names ([ContextForMove]).
func (v *Mover) Survey(ctx context.Context, tenant cells.TenantID) (Survey, error) {
	if err := tenant.Validate(); err != nil {
		return Survey{}, err
	}
	out, err := v.sink.Survey(ctx, tenant)
	if err == nil {
		v.asked.keep(ctx, tenant, out)
	}
	return out, err
}

// surveyed is the survey of this side for a move that is prepared.
func (v *Mover) surveyed(ctx context.Context, tenant cells.TenantID) (Survey, error) {
	if out, ok := v.asked.take(ctx, tenant); ok {
		return out, nil
	}
	return v.sink.Survey(ctx, tenant)
}

// Discard implements Agent.
func (v *Mover) Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error {
	if err := errors.Join(tenant.Validate(), r.Cell.Validate(), r.Move.Validate()); err != nil {
		return err
	}
	if run := v.take(r.Move); run != nil {
		v.end(run)
	}
	p := v.o.pacer(ctx)
	return v.sink.Discard(ctx, tenant, r, RemoveOptions{BatchRows: v.o.batchRows, Pace: p.wait, Progress: orNone(progress)})
}

// Sweep frees what the captures and imports of decided moves hold in this cell: after
// a rollback nothing else tells a source that the move is over. Safe at any time.
func (v *Mover) Sweep(ctx context.Context) error { return v.sink.Sweep(ctx) }

// Holdings implements [Lister].
func (v *Mover) Holdings(ctx context.Context, limit int) ([]Holding, error) {
	return v.sink.Holdings(ctx, limit)
}

// SweepTenant is Sweep for one tenant: it costs what that tenant's moves have left, however
// many others there are.
func (v *Mover) SweepTenant(ctx context.Context, tenant cells.TenantID) error {
	if err := tenant.Validate(); err != nil {
		return err
	}
	return v.sink.SweepTenant(ctx, tenant)
}

// Run sweeps every minute until ctx ends; the error is ctx's cause. One process
// of a cell is enough, several do no harm.
func (v *Mover) Run(ctx context.Context) error {
	t := time.NewTicker(time.Minute)
	defer t.Stop()
	for {
		if err := v.Sweep(ctx); err != nil && ctx.Err() == nil {
			v.o.log.Warn("transfer: sweep failed; it is tried again in a minute", "err", err)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func orNone(progress func(cells.Progress)) func(cells.Progress) {
	if progress == nil {
		return func(cells.Progress) {}
	}
	return progress
}

// leave keeps the run applying until Finish takes it or the time is up.
func (v *Mover) leave(r *run) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed {
		v.wg.Go(func() { v.end(r) })
		return
	}
	if old := v.runs[r.m.ID]; old != nil {
		old.timer.Stop()
		v.wg.Go(func() { v.end(old.r) })
	}
	f := &followed{r: r}
	f.timer = time.AfterFunc(v.o.follow, func() {
		v.mu.Lock()
		mine := v.runs[r.m.ID] == f
		if mine {
			delete(v.runs, r.m.ID)
			v.wg.Add(1)
		}
		v.mu.Unlock()
		if mine {
			defer v.wg.Done()
			v.end(r)
		}
	})
	v.runs[r.m.ID] = f
}

func (v *Mover) take(id cells.MoveID) *run {
	v.mu.Lock()
	defer v.mu.Unlock()
	f := v.runs[id]
	if f == nil {
		return nil
	}
	delete(v.runs, id)
	f.timer.Stop()
	return f.r
}

// end stops a run and frees its import.
func (v *Mover) end(r *run) {
	if err := r.stop(); err != nil {
		v.o.log.Debug("transfer: following ended", "move", r.m.ID, "tenant", r.m.Tenant, "err", err)
	}
	_ = r.imp.Close()
	<-r.ended
}

func validate(m cells.MoveRef) error {
	if m.Source == m.Target {
		return fmt.Errorf("%w: move %s has cell %s at both ends", cells.ErrInvalid, m.ID, m.Source)
	}
	return errors.Join(m.ID.Validate(), m.Tenant.Validate(), m.Source.Validate(), m.Target.Validate())
}

// retry runs step until it succeeds, fails for good, or has failed ten times in a
// row without getting further, as advanced tells.
func (v *Mover) retry(ctx context.Context, m cells.MoveRef, name string, first time.Duration, step func() error, advanced func() bool) error {
	wait, failed := first, 0
	for {
		err := step()
		if err == nil || ctx.Err() != nil || !retryable(err) && !errors.Is(err, ErrOvertaken) {
			return err
		}
		if failed++; advanced() {
			wait, failed = first, 0
		}
		if failed >= 10 {
			return err
		}
		v.o.log.Info("transfer: trying again", "step", name, "move", m.ID, "tenant", m.Tenant, "err", err)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return errors.Join(err, context.Cause(ctx))
		case <-v.ctx.Done():
			t.Stop()
			return context.Cause(v.ctx)
		}
		wait = min(2*wait, 2*time.Second)
	}
}
