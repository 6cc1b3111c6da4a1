// SPDX-License-Identifier: Apache-2.0

package provision

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Source is where specs come from and statuses go to: the directory.
type Source interface {
	// Watch calls f with all records, now and after each change of a spec, until ctx
	// ends or the watch breaks, which is an error in either case.
	Watch(ctx context.Context, f func([]Record)) error
	// Report tells the directory of a cell. A report that was overtaken is ignored there.
	Report(ctx context.Context, st Status) error
	// Living returns the processes of the cell that are heard.
	Living(ctx context.Context, cell cells.CellID) ([]Live, error)
}

// ReconcilerConfig is what a [Reconciler] is made of.
type ReconcilerConfig struct {
	Source      Source
	Provisioner Provisioner
	// Log; nil discards.
	Log *slog.Logger
	// Mine, if set, says which records this provisioner is for; nil is all.
	Mine func(*Record) bool
	// Every is how often a cell that is as it should be is looked at again; default 5 s.
	Every time.Duration
	// Retry bounds the backoff after a failure; default 30 s.
	Retry time.Duration
}

// Reconciler has cells made as their specs want them. It keeps nothing that a restart
// would miss.
type Reconciler struct {
	cfg ReconcilerConfig

	mu      sync.Mutex
	workers map[cells.CellID]*worker // guarded by mu
}

// worker looks after one cell.
type worker struct {
	r    *Reconciler
	cell cells.CellID
	wake chan struct{}

	mu   sync.Mutex
	spec Spec // guarded by mu; the newest
	// newer ends the call that is under way when the spec changes; guarded by mu.
	newer context.CancelCauseFunc
}

// errNewer ends a call for a spec that is not the newest any more.
var errNewer = errors.New("provision: the spec has changed")

// NewReconciler returns a reconciler; Run runs it.
func NewReconciler(cfg ReconcilerConfig) *Reconciler {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Every <= 0 {
		cfg.Every = 5 * time.Second
	}
	if cfg.Retry <= 0 {
		cfg.Retry = 30 * time.Second
	}
	return &Reconciler{cfg: cfg, workers: map[cells.CellID]*worker{}}
}

// Run reconciles until ctx ends, and returns when every call has ended. What was being
// done is gone on with by the next Run, here or elsewhere.
func (r *Reconciler) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for wait := 50 * time.Millisecond; ctx.Err() == nil; wait = min(2*wait, 2*time.Second) {
		err := r.cfg.Source.Watch(ctx, func(list []Record) {
			wait = 50 * time.Millisecond
			for i := range list {
				if r.cfg.Mine == nil || r.cfg.Mine(&list[i]) {
					r.tell(ctx, &wg, &list[i])
				}
			}
		})
		if ctx.Err() != nil {
			return
		}
		r.cfg.Log.Info("the specs are not watched; what runs goes on running", "err", err, "again", wait)
		if !pause(ctx, wait) {
			return
		}
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// tell gives a worker its spec, and starts it if there is none. A cell that is retired
// and reported so needs none.
func (r *Reconciler) tell(ctx context.Context, wg *sync.WaitGroup, rec *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.workers[rec.Spec.Cell]
	if w == nil {
		if rec.Spec.Desired == DesiredRetired && rec.Status.Reached(&rec.Spec) {
			return
		}
		w = &worker{r: r, cell: rec.Spec.Cell, wake: make(chan struct{}, 1), spec: rec.Spec.Clone(), newer: func(error) {}}
		r.workers[rec.Spec.Cell] = w
		wg.Go(func() { w.run(ctx) })
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if rec.Spec.Generation <= w.spec.Generation {
		return
	}
	w.spec = rec.Spec.Clone()
	w.newer(errNewer)
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// next returns the newest spec and a context that ends when a newer one comes.
func (w *worker) next(ctx context.Context) (Spec, context.Context, context.CancelCauseFunc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	w.newer = cancel
	return w.spec.Clone(), ctx, cancel
}

func (w *worker) run(ctx context.Context) {
	backoff := 100 * time.Millisecond
	for ctx.Err() == nil {
		spec, call, done := w.next(ctx)
		err := w.reconcile(call, &spec)
		overtaken := errors.Is(context.Cause(call), errNewer)
		done(nil)
		wait := w.r.cfg.Every
		switch {
		case ctx.Err() != nil:
			return
		case overtaken:
			backoff, wait = 100*time.Millisecond, 0
		case err != nil:
			w.r.cfg.Log.Warn("cell is not as it should be", "cell", w.cell, "generation", spec.Generation, "desired", spec.Desired, "err", err, "again", backoff)
			wait = backoff
			backoff = min(2*backoff, w.r.cfg.Retry)
		default:
			backoff = 100 * time.Millisecond
			if spec.Desired == DesiredRetired && w.finished(&spec) {
				return
			}
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-w.wake:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// finished ends the worker of a retired cell, unless a new cell of the name has come.
func (w *worker) finished(spec *Spec) bool {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.spec.Generation != spec.Generation {
		return false
	}
	delete(w.r.workers, w.cell)
	return true
}

// reconcile looks, does what is to be done, and looks again; each look is reported. A
// cell that has to run before it can be drained takes two steps.
func (w *worker) reconcile(ctx context.Context, spec *Spec) error {
	p := w.r.cfg.Provisioner
	for step := 0; ; step++ {
		st, err := p.Status(ctx, w.cell)
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		switch {
		case err != nil:
			return w.failed(ctx, spec, st, err)
		case st.Reached(spec):
			return w.report(ctx, st)
		case step == 2:
			return w.failed(ctx, spec, st, fmt.Errorf("it is %s with %d of %d processes ready at version %q", st.Phase, st.Ready, spec.Replicas, st.Version))
		}
		do, during := w.call(&st, spec)
		stop := w.follow(ctx, spec, during)
		err = do(ctx, *spec)
		stop()
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		if err != nil {
			now, _ := p.Status(ctx, w.cell)
			return w.failed(ctx, spec, now, err)
		}
	}
}

// call chooses what brings the cell nearer to its spec, and what that is called.
func (w *worker) call(st *Status, spec *Spec) (func(context.Context, Spec) error, Phase) {
	p := w.r.cfg.Provisioner
	switch {
	case spec.Desired == DesiredRetired:
		return p.Retire, PhaseRetiring
	case spec.Desired == DesiredDrained && st.Replicas > 0:
		return p.Drain, PhaseDraining
	case st.Replicas == 0:
		return p.Provision, PhaseProvisioning // a drained cell runs, too, until it is retired
	case st.Version == spec.Version:
		return p.Upgrade, PhaseProvisioning
	}
	return p.Upgrade, PhaseUpgrading
}

// follow reports how far a call is, until it is stopped.
func (w *worker) follow(ctx context.Context, spec *Spec, during Phase) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(500 * time.Millisecond)
		defer t.Stop()
		var last Status
		for {
			if st, err := w.r.cfg.Provisioner.Status(ctx, w.cell); err == nil {
				st.ObservedGeneration, st.Phase, st.At = spec.Generation, during, time.Time{}
				if st != last && w.report(ctx, st) == nil {
					last = st
				}
			}
			select {
			case <-t.C:
			case <-ctx.Done():
				return
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

func (w *worker) failed(ctx context.Context, spec *Spec, st Status, err error) error {
	if ctx.Err() != nil {
		return err
	}
	st.Cell, st.ObservedGeneration, st.Phase, st.Message = w.cell, spec.Generation, PhaseFailed, err.Error()
	return errors.Join(err, w.report(ctx, st))
}

// report tells the directory; a directory that is away is told at the next look.
func (w *worker) report(ctx context.Context, st Status) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if len(st.Message) > MaxMessage {
		st.Message = strings.ToValidUTF8(st.Message[:MaxMessage], "")
	}
	if err := w.r.cfg.Source.Report(ctx, st); err != nil {
		return fmt.Errorf("reporting cell %s: %w", w.cell, err)
	}
	return nil
}
