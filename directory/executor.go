// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/transfer"
)

var (
	errHalted  = errors.New("directory: halted at a step")
	errAskBack = errors.New("directory: a rollback was asked for")
)

// executor drives moves. The route of a tenant says how far its move is; a record
// says who drives it and tells people about it.
type executor struct {
	s      *Server
	agents Agents // nil: stateless cells without a channel
	slots  chan struct{}
	sweeps chan struct{} // bounds removals

	mu      sync.Mutex
	running map[cells.MoveID]*tracker  // guarded by mu
	windows map[cells.TenantID]*window // guarded by mu; undo windows that are open
	tending map[cells.TenantID]bool    // guarded by mu; routes without a record that are being resumed

	tracer *cells.Tracer // nil: nothing is traced

	sweeper sweeperState
}

func newExecutor(s *Server) *executor {
	e := &executor{
		s: s, agents: newAgents(s), slots: make(chan struct{}, s.cfg.Moves), sweeps: make(chan struct{}, s.cfg.Moves),
		running: map[cells.MoveID]*tracker{}, tending: map[cells.TenantID]bool{}, windows: map[cells.TenantID]*window{}, sweeper: newSweeperState(s),
	}
	if s.cfg.Trace != nil {
		e.tracer = cells.NewTracer(s.cfg.Trace, s.instance)
	}
	return e
}

func (e *executor) controller() *cells.MoveController { return e.controllerOn(e.s.table) }

// controllerOn makes a controller for one operation: it costs nothing and follows
// the present default cell.
func (e *executor) controllerOn(table cells.RoutingTable) *cells.MoveController {
	cfg := &e.s.cfg
	opts := []cells.ControllerOption{
		cells.WithDrainDeadline(cfg.DrainDeadline), cells.WithMaxPause(cfg.MaxPause), cells.WithFallbackCell(e.s.fleet.defaultCell()),
		cells.WithPauseHeadroom(cfg.PauseHeadroom), cells.WithObserver(e.observe), cells.WithStepHook(e.hook), cells.WithControllerLogger(e.s.log), cells.WithoutReclaim(),
	}
	if cfg.Now != nil {
		opts = append(opts, cells.WithNow(cfg.Now))
	}
	if cfg.Budget != nil {
		opts = append(opts, cells.WithBudgetMeter(cfg.Budget))
	}
	if e.tracer != nil {
		table = e.tracer.Table(table)
	}
	if e.agents != nil {
		opts = append(opts, cells.WithDrainer(e.agents))
		if !cfg.Stateless {
			var fencer cells.Fencer = e.agents
			if e.tracer != nil {
				fencer = e.tracer.Fencer(fencer)
			}
			if cfg.Deployments != nil {
				fencer = placedFences{fencer, e}
			}
			opts = append(opts, cells.WithFencer(fencer), cells.WithEventBarrier(e.agents), cells.WithDataMover(e.mover()))
		}
	}
	return cells.NewMoveController(table, opts...)
}

// holds asks a cell whether it has rows of the tenant.
func (e *executor) holds(ctx context.Context, cell cells.CellID, tenant cells.TenantID) (bool, error) {
	if e.agents == nil || e.s.cfg.Stateless {
		return false, nil
	}
	return holds(ctx, e.agents, cell, tenant)
}

func (e *executor) tracker(id cells.MoveID) *tracker {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.running[id]
}

// current returns the record as this process knows it, if it drives the move.
func (e *executor) current(m api.Move) api.Move {
	if t := e.tracker(m.ID); t != nil {
		if now, ok := t.visible(); ok {
			return now
		}
	}
	return m
}

// observe is told of progress and failures.
func (e *executor) observe(ev cells.StepEvent) {
	if e.tracer != nil {
		e.tracer.Observe(ev)
	}
	t := e.tracker(ev.Move.ID)
	if t == nil {
		return
	}
	switch {
	case ev.Progress != nil:
		t.noteProgress(*ev.Progress)
	case ev.Err != nil:
		t.noteError(fmt.Errorf("%s: %w", ev.Step, ev.Err))
	}
}

// hook runs after each step, persisted.
func (e *executor) hook(ctx context.Context, ev cells.StepEvent) error {
	t := e.tracker(ev.Move.ID)
	if t != nil {
		t.noteStep(ev)
	}
	e.s.metrics.step(ev)
	if ev.Step == cells.StepWindow || ev.Step == cells.StepRemoved && t == nil {
		e.noteResidue(ctx, ev.Move.ID, residueOf(&ev.Route, ev.Move.ID))
	}
	if halt := e.s.cfg.HaltAt; halt != "" && halt == string(ev.Step) {
		if t != nil {
			_ = t.flushAll(e.s.ctx) // fails only when the server closes
		}
		e.s.log.Error("halted for ever, as configured", "step", ev.Step, "tenant", ev.Tenant, "move", ev.Move.ID)
		<-e.s.ctx.Done()
		return errHalted
	}
	if t != nil && (ev.Step == cells.StepPreflight || ev.Step == cells.StepBegin) && t.snapshot().Cancel {
		return errAskBack
	}
	if e.s.cfg.StepHook != nil {
		if err := e.s.cfg.StepHook(ctx, ev); err != nil {
			return &hookError{err}
		}
	}
	return nil
}

// start drives a move that this process is the driver of; again is no harm.
func (e *executor) start(rec api.Move) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.running[rec.ID] != nil || e.s.ctx.Err() != nil {
		return
	}
	t := newTracker(e.s.store, rec, e.s.instance)
	e.running[rec.ID] = t
	e.s.wg.Go(func() { e.drive(t) })
}

func (e *executor) drive(t *tracker) {
	ctx := e.s.ctx
	writing, end := context.WithCancel(ctx)
	var writer sync.WaitGroup
	writer.Go(func() { t.run(writing) })
	defer func() {
		if err := t.flushAll(ctx); err != nil && ctx.Err() == nil {
			e.s.log.Warn("record not written", "move", t.id, "err", err)
		}
		end()
		writer.Wait()
		e.mu.Lock()
		delete(e.running, t.id)
		e.mu.Unlock()
		t.changed.wake()
		e.s.camps.poke()
	}()
	if t.snapshot().State.Active() && !e.move(ctx, t) {
		return
	}
	if m := t.snapshot(); !m.State.Final() || m.Removable() {
		e.clean(e.throttled(ctx, m.Throttle), t)
	}
}

// move drives the move until it is decided and served, and reports whether it is.
func (e *executor) move(ctx context.Context, t *tracker) bool {
	release, ok := e.slot(ctx, t)
	if !ok {
		return false
	}
	defer release()
	wait := 50 * time.Millisecond
	for ctx.Err() == nil {
		done, err := e.round(ctx, t)
		if done {
			return true
		}
		if errors.Is(err, errStopped) {
			return false
		}
		if err == nil {
			wait = 50 * time.Millisecond
			continue
		}
		e.s.log.Warn("move not finished; going on", "move", t.id, "tenant", t.snapshot().Tenant, "err", err, "in", wait)
		if !sleep(ctx, wait) {
			return false
		}
		wait = min(2*wait, 5*time.Second)
	}
	return false
}

// slot waits for the move's turn. A move that is past its cut never waits, and
// one that is given up before its turn needs none.
func (e *executor) slot(ctx context.Context, t *tracker) (release func(), ok bool) {
	none := func() {}
	for {
		m := t.snapshot()
		if m.State != api.MovePreparing || m.Cancel {
			return none, true
		}
		if row, err := e.s.table.Get(ctx, m.Tenant); err == nil && row.MoveID == t.id && row.Moving() {
			return none, true
		}
		changed := t.changed.next()
		select {
		case e.slots <- struct{}{}:
			return func() { <-e.slots }, true
		case <-changed:
		case <-ctx.Done():
			return none, false
		}
	}
}

// throttled bounds what the agents do in the context as the move asks for.
func (e *executor) throttled(ctx context.Context, t *api.Throttle) context.Context {
	if t == nil {
		return ctx
	}
	l := e.s.cfg.Limits
	if t.MaxRetained != 0 {
		l.MaxRetained = t.MaxRetained
	}
	if t.MaxReplicaLag > 0 {
		l.MaxReplicaLag = t.MaxReplicaLag
	}
	if t.RowsPerSecond > 0 {
		ctx = transfer.ContextWithRate(ctx, t.RowsPerSecond)
	}
	return transfer.ContextWithLimits(ctx, l)
}

// errStopped: a step hook ended this process's part; the sweeper goes on later.
var errStopped = errors.New("directory: stopped by a step hook")

// round looks at the route, does what it asks for, and reports whether the move is
// over. An error asks for another round, later.
func (e *executor) round(ctx context.Context, t *tracker) (done bool, _ error) {
	m := t.snapshot()
	row, err := e.s.table.Get(ctx, m.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return false, err
	}
	switch {
	case row.MoveID == m.ID:
	case over(&m, &row):
		state, reason := outcome(&m, &row)
		return true, e.conclude(ctx, t, state, &row, &cells.MoveResult{}, because(reason))
	case m.Cancel:
		return true, e.conclude(ctx, t, api.MoveRolledBack, &row, &cells.MoveResult{}, because(orDefault(m.Reason, "given up before it began")))
	default:
		if m, err = e.began(ctx, t, &row); err != nil || m.Cancel {
			return false, err
		}
	}
	acting := transfer.ContextWithGroup(e.throttled(ctx, m.Throttle), transfer.GroupID(m.Group))
	res, err := e.act(acting, t, &m, &row)
	var refused error
	switch {
	case ctx.Err() != nil:
		return false, context.Cause(ctx)
	case err == nil:
		return true, e.conclude(ctx, t, api.MoveDone, &res.Route, &res, why{})
	case errors.Is(err, cells.ErrRolledBack):
		return true, e.conclude(ctx, t, api.MoveRolledBack, &res.Route, &res, because(orDefault(res.Reason, err.Error())))
	case errors.Is(err, errAskBack):
		return false, nil
	case errors.Is(err, errHalted), stopped(err):
		return false, errStopped
	default:
		refused = err
	}
	// Was anything begun? Only the route knows.
	row, err = e.s.table.Get(ctx, m.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return false, errors.Join(refused, err)
	}
	m = t.snapshot()
	if row.MoveID == m.ID || over(&m, &row) || m.Cancel {
		t.noteError(refused)
		return false, refused
	}
	if errors.Is(refused, cells.ErrUnavailable) && !errors.Is(refused, cells.ErrClosed) && time.Since(m.StartedAt) < beginPatience {
		t.noteError(refused)
		return false, refused
	}
	return true, e.conclude(ctx, t, api.MoveRefused, &row, &res, why{refused.Error(), refusalCode(refused)})
}

// beginPatience is for how long a move that has not begun waits for cells that
// cannot be reached: a process or a database that has just been started again.
const beginPatience = 5 * time.Second

// hookError carries the error of the configured step hook.
type hookError struct{ err error }

func (h *hookError) Error() string { return h.err.Error() }
func (h *hookError) Unwrap() error { return h.err }

func stopped(err error) bool {
	var h *hookError
	return errors.As(err, &h)
}

// act runs, resumes or rolls back, under a context that a rollback request ends.
func (e *executor) act(ctx context.Context, t *tracker, m *api.Move, row *cells.TenantRoute) (cells.MoveResult, error) {
	ctrl := e.controller()
	if row.MoveID == m.ID && m.Cancel && (row.State != cells.StateCommitting) {
		err := ctrl.Rollback(ctx, m.Tenant, orDefault(m.Reason, "asked for"))
		if err != nil {
			return cells.MoveResult{}, err
		}
		return cells.MoveResult{}, errAskBack // the next round reads the outcome
	}
	driving, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	t.mu.Lock()
	t.stop = stop
	asked := t.rec.Cancel && row.State != cells.StateCommitting
	t.mu.Unlock()
	if asked {
		return cells.MoveResult{}, errAskBack
	}
	var res cells.MoveResult
	var err error
	if row.MoveID == m.ID {
		res, err = ctrl.Resume(driving, m.Tenant)
	} else if err = e.reserve(driving, m); err == nil {
		res, err = ctrl.Run(driving, cells.MovePlan{
			TenantID: m.Tenant, FromCell: m.From, ToCell: m.To, MoveID: m.ID, Actor: m.Actor, Force: m.Force,
			UndoWindow: m.UndoWindow, Undoes: m.Undoes})
	}
	if err != nil && ctx.Err() == nil && errors.Is(context.Cause(driving), errAskBack) {
		return res, errAskBack
	}
	return res, err
}

// began notes, before anything is begun, the epoch that it begins from: it is how
// the outcome is recognised in the route later.
func (e *executor) began(ctx context.Context, t *tracker, row *cells.TenantRoute) (api.Move, error) {
	now, base := time.Now().UTC(), max(row.Epoch, 1) // without a row the default cell gets the first epoch
	t.apply(func(m *api.Move) {
		if m.StartedAt.IsZero() {
			m.StartedAt, m.Step = now, "started"
		}
		m.Base, m.UpdatedAt = base, now
	})
	err := t.flush(ctx)
	return t.snapshot(), err
}

// over reports whether the move has been through its cut: the route's epoch has
// passed the ones that belong to the move.
func over(m *api.Move, row *cells.TenantRoute) bool {
	return !m.StartedAt.IsZero() && m.Base > 0 && row.MoveID != m.ID && row.Epoch >= m.Base+2 && begun(m, row)
}

// begun reports whether there is a sign that the move was written: a step of it,
// or the epoch that its decision leaves.
func begun(m *api.Move, row *cells.TenantRoute) bool {
	for _, s := range m.Steps {
		if cells.Step(s.Step) == cells.StepBegin {
			return true
		}
	}
	for _, r := range row.Residue {
		if r.Move == m.ID {
			return true
		}
	}
	return row.Epoch == m.Base+2 && (row.CellID == m.To || row.CellID == m.From)
}

// outcome reads from the route how a move ended that others have finished.
func outcome(m *api.Move, row *cells.TenantRoute) (api.MoveState, string) {
	committed := m.State == api.MoveCommitted
	for _, r := range row.Residue {
		if r.Move == m.ID {
			committed = r.Cell == m.From
		}
	}
	if row.Epoch == m.Base+2 {
		committed = row.CellID == m.To
	}
	if committed {
		return api.MoveDone, ""
	}
	return api.MoveRolledBack, orDefault(row.Reason, "another driver finished it")
}

// conclude records the outcome, after the ledger has it: the place that the move
// holds in its target must be counted without a break.
func (e *executor) conclude(ctx context.Context, t *tracker, state api.MoveState, row *cells.TenantRoute, res *cells.MoveResult, w why) error {
	if row.State != 0 {
		wait := 20 * time.Millisecond
		for {
			err := e.s.settle(ctx, *row)
			if err == nil {
				break
			}
			e.s.log.Warn("ledger not settled", "move", t.id, "err", err)
			if !sleep(ctx, wait) {
				return err
			}
			wait = min(2*wait, 2*time.Second)
		}
	}
	if err := e.settleBudget(ctx, t, state); err != nil {
		return err
	}
	if err := e.attest(ctx, t, state, row, w.reason); err != nil {
		return err
	}
	m := t.snapshot()
	if err := e.settlePlacement(ctx, &m, state); err != nil {
		return err
	}
	if m.Undoes != "" {
		e.noteUndo(ctx, m, state)
	}
	t.concluded(state, row, res, w)
	e.s.metrics.concluded(t.snapshot())
	err := t.flushAll(ctx)
	e.s.camps.poke()
	return err
}

func orDefault(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
