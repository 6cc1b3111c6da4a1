// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// watch looks after a move while it is prepared: it asks the source again and again
// what the move costs, ends the attempt when that is too much or the schema has
// changed, holds up copying while standbys are behind, and says what a step waits for.
type watch struct {
	v        *Mover
	m        cells.MoveRef
	src      Source
	limits   Limits
	progress func(cells.Progress)
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup

	mu     sync.Mutex // guards what follows
	paused string     // why copying is held up; "" if it is not
	asked  int        // steps that wait for a view or a capture
	wake   chan struct{}
}

// watching begins to look after an attempt; the context that it returns ends, with
// the cause, when the move may not go on. The caller calls end.
func (p *preparing) watching(ctx context.Context) (context.Context, *watch) {
	ctx, cancel := context.WithCancelCause(ctx)
	w := &watch{v: p.v, m: p.m, src: p.src, limits: limitsOf(ctx), progress: p.progress, cancel: cancel, wake: make(chan struct{})}
	w.wg.Go(func() { w.loop(ctx) })
	return ctx, w
}

func (w *watch) end() {
	w.cancel(nil)
	w.wg.Wait()
}

func (w *watch) loop(ctx context.Context) {
	t := time.NewTicker(w.v.o.check)
	defer t.Stop()
	for {
		if err := w.once(ctx); err != nil {
			w.cancel(err)
			return
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// once returns an error only if the move may not go on. Whether the source answers
// at all is the business of the steps.
func (w *watch) once(ctx context.Context) error {
	h, err := w.src.Check(ctx, w.m, w.limits)
	if err != nil {
		if fatal(err) {
			return err
		}
		return nil
	}
	paused := ""
	if limit := w.limits.MaxReplicaLag; limit > 0 {
		if h.ReplicaLag > limit {
			paused = fmt.Sprintf("a standby of cell %s is %v behind", w.m.Source, h.ReplicaLag.Round(time.Millisecond))
		} else if lag, err := w.v.sink.ReplicaLag(ctx); err == nil && lag > limit {
			paused = fmt.Sprintf("a standby of cell %s is %v behind", w.m.Target, lag.Round(time.Millisecond))
		}
	}
	w.mu.Lock()
	w.paused = paused
	waits := w.asked > 0
	close(w.wake)
	w.wake = make(chan struct{})
	w.mu.Unlock()
	switch {
	case paused != "":
		w.progress(cells.Progress{Phase: "snapshot", Waiting: paused})
	case waits && len(h.Blockers) > 0:
		w.progress(cells.Progress{Phase: "snapshot", Waiting: fmt.Sprintf("a view of cell %s waits for transactions to end: %s", w.m.Source, nameAll(h.Blockers))})
		w.v.o.log.Info("transfer: waiting for transactions", "move", w.m.ID, "tenant", w.m.Tenant, "blockers", nameAll(h.Blockers))
	}
	return nil
}

// clear waits while copying is held up.
func (w *watch) clear(ctx context.Context) error {
	for {
		w.mu.Lock()
		paused, wake := w.paused, w.wake
		w.mu.Unlock()
		if paused == "" {
			return nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// wait is around a step that may have to wait for transactions of the source.
func (w *watch) wait(f func() error) error {
	w.mu.Lock()
	w.asked++
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		w.asked--
		w.mu.Unlock()
	}()
	return f()
}
