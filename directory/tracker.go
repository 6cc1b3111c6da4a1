// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

const (
	// maxSteps bounds the steps that a record keeps; the oldest go first.
	maxSteps = 256
	// progressEvery is how often watchers hear of progress.
	progressEvery = 100 * time.Millisecond
	// persistProgress is how often progress is written.
	persistProgress = time.Second
	// cutQuiet is for how long a record is not written while its tenant waits: the
	// route is what a recovery needs, and its writes come first.
	cutQuiet = 250 * time.Millisecond
	// gatherSteps is how long a change waits for others to be written with it: steps
	// come close together, and nothing but people waits for them.
	gatherSteps = 25 * time.Millisecond
)

// tracker is the record of a move that this process drives: changed in memory at
// once, written behind it. The record follows the route, so what a crash loses of
// it is made up from the route.
type tracker struct {
	store   Store
	id      cells.MoveID
	driver  string
	changed broadcast
	wake    chan struct{}

	flushMu sync.Mutex // held while writing, so that writes keep their order

	mu       sync.Mutex
	rec      api.Move          // guarded by mu
	written  api.MoveState     // guarded by mu; the state that the stored record is in
	pending  []func(*api.Move) // guarded by mu; changes that are not written yet
	progress *cells.Progress   // guarded by mu; of the running step, not written yet
	rows     int64             // guarded by mu; the most that was told, written with the next change
	bytes    int64             // guarded by mu; as rows
	told     time.Time         // guarded by mu; when watchers last heard of progress
	stop     context.CancelCauseFunc
}

func newTracker(store Store, rec api.Move, driver string) *tracker {
	return &tracker{store: store, id: rec.ID, driver: driver, rec: rec, written: rec.State, wake: make(chan struct{}, 1)}
}

func (t *tracker) snapshot() api.Move {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.rec
	m.Steps = slices.Clip(m.Steps)
	return m
}

// visible returns the record as others may see it: an outcome is told only once it is
// written, so that whoever has heard of it finds it everywhere.
func (t *tracker) visible() (api.Move, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.rec.State.Active() && t.rec.State != t.written {
		return api.Move{}, false
	}
	m := t.rec
	m.Steps = slices.Clip(m.Steps)
	return m, true
}

// apply changes the record. fn must be pure; it is run again on the stored record.
func (t *tracker) apply(fn func(*api.Move)) {
	t.mu.Lock()
	fn(&t.rec)
	t.pending = append(t.pending, fn)
	t.mu.Unlock()
	t.changed.wake()
	t.signal()
}

func (t *tracker) signal() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// flush writes what is pending.
func (t *tracker) flush(ctx context.Context) error {
	t.flushMu.Lock()
	defer t.flushMu.Unlock()
	t.mu.Lock()
	n := len(t.pending)
	todo := slices.Clone(t.pending)
	p, rows, size := t.progress, t.rows, t.bytes
	t.mu.Unlock()
	if n == 0 && p == nil {
		return nil
	}
	rec, err := t.store.UpdateMove(ctx, t.id, func(m *api.Move) error {
		for _, fn := range todo {
			fn(m)
		}
		m.Rows, m.Bytes = max(m.Rows, rows), max(m.Bytes, size)
		if p != nil {
			m.Progress = p
		}
		return nil
	}, nil)
	if err != nil {
		return err
	}
	t.mu.Lock()
	t.pending = slices.Delete(t.pending, 0, n)
	if t.progress == p {
		t.progress = nil
	}
	// A rollback that was asked for while this was being written is in the store, but
	// not in what was read for this write.
	if t.rec.Cancel && !rec.Cancel {
		rec.Cancel, rec.Reason = true, t.rec.Reason
	}
	t.rec, t.written = rec, rec.State
	for _, fn := range t.pending {
		fn(&t.rec)
	}
	t.rec.Rows, t.rec.Bytes = max(rec.Rows, t.rows), max(rec.Bytes, t.bytes)
	if t.progress != nil {
		t.rec.Progress = t.progress
	}
	t.mu.Unlock()
	t.changed.wake()
	return nil
}

// flushAll writes until nothing is pending, for as long as the context goes on.
func (t *tracker) flushAll(ctx context.Context) error {
	wait := 20 * time.Millisecond
	for {
		err := t.flush(ctx)
		if err == nil {
			return nil
		}
		if !sleep(ctx, wait) {
			return err
		}
		wait = min(2*wait, 2*time.Second)
	}
}

// run writes behind the changes until the context ends.
func (t *tracker) run(ctx context.Context) {
	progress := time.NewTicker(persistProgress)
	defer progress.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-progress.C:
			t.mu.Lock()
			idle := t.progress == nil && len(t.pending) == 0
			t.mu.Unlock()
			if idle {
				continue
			}
		case <-t.wake:
		}
		t.mu.Lock()
		cutting := t.rec.State == api.MoveCutting || t.rec.State == api.MoveCommitted && t.rec.ServedAt.IsZero()
		t.mu.Unlock()
		quiet := gatherSteps
		if cutting {
			quiet = cutQuiet
		}
		if !sleep(ctx, quiet) {
			return
		}
		if t.flush(ctx) != nil && !sleep(ctx, 500*time.Millisecond) {
			return
		}
	}
}

// noteProgress takes how far the running step is.
func (t *tracker) noteProgress(p cells.Progress) {
	now := time.Now()
	t.mu.Lock()
	if p.Phase == "snapshot" {
		t.rows, t.bytes = max(t.rows, p.Done), max(t.bytes, p.Bytes)
		t.rec.Rows, t.rec.Bytes = max(t.rec.Rows, t.rows), max(t.rec.Bytes, t.bytes)
	}
	t.progress, t.rec.Progress = &p, &p
	tell := now.Sub(t.told) >= progressEvery
	if tell {
		t.told = now
	}
	t.mu.Unlock()
	if tell {
		t.changed.wake()
	}
}

func (t *tracker) noteError(err error) {
	text, now := err.Error(), time.Now().UTC()
	t.apply(func(m *api.Move) {
		m.Error, m.Attempts, m.UpdatedAt = text, m.Attempts+1, now
	})
}

// noteStep takes a step that is done.
func (t *tracker) noteStep(ev cells.StepEvent) {
	step := api.StepTiming{Step: string(ev.Step), At: ev.At.UTC(), State: ev.Route.State.String(), Epoch: ev.Route.Epoch, Driver: t.driver}
	base, reason := ev.Move.Base, ev.Route.Reason
	t.mu.Lock()
	t.progress = nil
	t.mu.Unlock()
	t.apply(func(m *api.Move) {
		for _, s := range m.Steps { // written before, with an outcome that was unknown
			if s.Step == step.Step && s.At.Equal(step.At) && s.Driver == step.Driver {
				return
			}
		}
		from := m.StartedAt
		if n := len(m.Steps); n > 0 {
			from = m.Steps[n-1].At
		}
		timed := step
		if !from.IsZero() {
			timed.Took = max(step.At.Sub(from), 0)
		}
		m.Steps = append(slices.Clip(m.Steps), timed)
		if n := len(m.Steps) - maxSteps; n > 0 {
			m.Steps = slices.Clone(m.Steps[n:])
		}
		m.Step, m.UpdatedAt, m.Progress, m.Error = step.Step, step.At, nil, ""
		if base > 0 {
			m.Base = base
		}
		switch ev.Step {
		case cells.StepPrepare:
			m.Predicted = ev.Predicted
		case cells.StepQuiesce:
			m.Bound = ev.Bound
			m.Advance(api.MoveCutting)
		case cells.StepFinish:
			m.Compared = ev.Compared
		case cells.StepCommit:
			m.EventMark, m.DataMark = ev.Route.EventMark, ev.Route.DataMark
			m.Advance(api.MoveCommitted)
		case cells.StepRollback:
			m.Reason = reason
		case cells.StepActivate, cells.StepReopen:
			m.ServedAt, m.Epoch = step.At, step.Epoch
			for _, s := range m.Steps {
				if s.Step == string(cells.StepQuiesce) {
					m.Pause = max(step.At.Sub(s.At), 0)
				}
			}
		}
	})
}

// concluded takes the outcome of a move that is over.
func (t *tracker) concluded(state api.MoveState, row *cells.TenantRoute, res *cells.MoveResult, w why) {
	now := time.Now().UTC()
	var residue []cells.Residue
	for _, e := range row.Residue {
		if e.Move == t.id {
			residue = append(residue, e)
		}
	}
	epoch, pause, predicted := row.Epoch, res.Pause, res.Predicted
	t.apply(func(m *api.Move) {
		switch {
		case state == api.MoveDone:
			m.Advance(api.MoveCommitted)
			if m.State == api.MoveCommitted || m.State == api.MoveCleaning {
				m.Residue = residue
				m.Advance(api.MoveCleaning)
				if !m.Removable() {
					m.Advance(api.MoveDone)
				}
			}
		case m.Advance(state):
			m.Residue = residue
		}
		if m.Base > 0 && epoch == m.Base+2 {
			m.Epoch = epoch
		}
		if pause > 0 {
			m.Pause = pause
		}
		if predicted > 0 {
			m.Predicted = max(m.Predicted, predicted)
		}
		if w.reason != "" && (m.State == api.MoveRolledBack || m.State == api.MoveRefused) {
			m.Reason, m.Code = w.reason, w.code
		}
		if m.ServedAt.IsZero() && m.State != api.MoveRefused {
			m.ServedAt = now
		}
		finish(m, now)
	})
}

// cleaned takes what the route says is left of the move.
func (t *tracker) cleaned(residue []cells.Residue) {
	now := time.Now().UTC()
	t.apply(func(m *api.Move) { takeResidue(m, residue, now) })
}

func takeResidue(m *api.Move, residue []cells.Residue, now time.Time) {
	m.Residue, m.UpdatedAt = residue, now
	if !m.Removable() {
		m.Error, m.Progress = "", nil
		m.Advance(api.MoveDone)
	}
	finish(m, now)
}

func finish(m *api.Move, now time.Time) {
	m.UpdatedAt = now
	if m.State.Final() {
		m.Progress = nil
		if !m.Removable() {
			m.Error = ""
		}
		if len(m.Residue) == 0 && m.Step == string(cells.StepDiscard) {
			m.Step = string(cells.StepRemoved) // the row says so, whoever wrote it
		}
		if m.FinishedAt.IsZero() {
			m.FinishedAt = now
		}
	}
}
