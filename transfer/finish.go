// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Finish implements Agent.
func (v *Mover) Finish(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (string, error) {
	mark, _, err := v.FinishProved(ctx, m, src, progress)
	return mark, err
}

// FinishProved implements [Prover].
func (v *Mover) FinishProved(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (string, []cells.Comparison, error) {
	if err := validate(m); err != nil {
		return "", nil, err
	}
	var st State
	err := v.retry(ctx, m, "finish", 10*time.Millisecond, func() (err error) {
		st, err = v.finish(ctx, m, src, orNone(progress))
		if errors.Is(err, ErrCaptureLost) {
			// Copying again is no part of a cut.
			err = fmt.Errorf("%w: transfer: move %s cannot be finished: %s", cells.ErrNotApplicable, m.ID, err.Error())
		}
		return err
	}, func() bool { return false })
	if err != nil {
		return "", nil, err
	}
	return string(st.Mark), st.Compared, nil
}

// finish returns the finished import's state.
func (v *Mover) finish(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (State, error) {
	progress(cells.Progress{Phase: "final"})
	watch := stopwatch{last: time.Now()}
	type opened struct {
		view View
		err  error
	}
	final := make(chan opened, 1)
	go func() {
		view, err := src.Final(ctx, m)
		final <- opened{view, err}
	}()
	r, done, err := v.resume(ctx, m, src)
	watch.lap("resume")
	o := <-final
	watch.lap("view")
	if o.view != nil {
		// Nobody waits for a view to be freed.
		defer v.wg.Go(func() { _ = o.view.Close() })
	}
	if err != nil {
		return State{}, err
	}
	if done.Mark != "" {
		return done, nil
	}
	defer func() {
		_ = r.stop()
		_ = r.imp.Close()
		v.wg.Go(func() { <-r.ended })
	}()
	if o.err != nil {
		return State{}, o.err
	}
	if err := v.o.fault("final"); err != nil {
		return State{}, err
	}
	mark := o.view.Position()
	if err := r.wait(ctx, mark); err != nil {
		return State{}, err
	}
	watch.lap("wait")
	if err := r.stop(); err != nil {
		return State{}, err
	}
	watch.lap("stop")
	if err := v.o.fault("applied"); err != nil {
		return State{}, err
	}
	progress(cells.Progress{Phase: "verify"})
	if err := fill(ctx, r.imp, o.view); err != nil {
		return State{}, err
	}
	sets, err := r.imp.Touched(ctx, finishKeys)
	if err != nil {
		return State{}, err
	}
	watch.lap("touched")
	found, err := compare(ctx, m, r.imp, o.view, sets)
	if err != nil {
		return State{}, err
	}
	watch.lap("compare")
	if err := v.o.fault("compared"); err != nil {
		return State{}, err
	}
	if err := r.imp.Finish(ctx, mark, compared(r.imp.State().Compared, found)); err != nil {
		return State{}, err
	}
	st := r.imp.State()
	if err := v.o.fault("finished"); err != nil {
		return State{}, err
	}
	watch.lap("mark")
	v.o.log.Debug("transfer: finished", append([]any{"move", m.ID, "tenant", m.Tenant, "keys", keyCount(sets)}, watch.laps...)...)
	v.wg.Go(func() {
		ctx, cancel := context.WithTimeout(v.ctx, 10*time.Second)
		defer cancel()
		if err := src.Release(ctx, m); err != nil {
			v.o.log.Info("transfer: the capture is not released; the removal will", "move", m.ID, "tenant", m.Tenant, "err", err)
		}
	})
	return st, nil
}

// resume returns a run for the move: the one that Prepare left, or a new one; or
// the state, with its mark, if the import is finished already.
func (v *Mover) resume(ctx context.Context, m cells.MoveRef, src Source) (*run, State, error) {
	if r := v.take(m.ID); r != nil {
		if r.alive() && r.call(ctx, func(imp Import) error { return imp.Lock(ctx) }) == nil {
			return r, State{}, nil
		}
		v.end(r)
	}
	imp, err := v.sink.Import(ctx, m)
	if err != nil {
		return nil, State{}, err
	}
	st := imp.State()
	if st.Mark != "" {
		return nil, st, imp.Close()
	}
	if !st.Copied || st.Verified == "" {
		_ = imp.Close()
		return nil, State{}, fmt.Errorf("%w: transfer: move %s of tenant %s is not prepared here; prepare it, or roll it back", cells.ErrNotApplicable, m.ID, m.Tenant)
	}
	return follow(ctx, m, src, imp), State{}, nil
}

// stopwatch tells where the time of a cut went.
type stopwatch struct {
	last time.Time
	laps []any // of slog
}

func (w *stopwatch) lap(name string) {
	now := time.Now()
	w.laps = append(w.laps, name, now.Sub(w.last))
	w.last = now
}
