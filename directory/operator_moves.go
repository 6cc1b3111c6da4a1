// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

func (s *Server) postMove(w http.ResponseWriter, r *http.Request) (int, any, error) {
	var req api.MoveRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, badTenant(req.Tenant, err)
	}
	if err := s.pinned(r.Context()); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	asked := req.To
	if req.Undo {
		asked = "" // where to is known by the route only
	}
	if req.OperationID != "" {
		op := Operation{ID: req.OperationID, Kind: OperationMove, Tenant: req.Tenant, Cell: asked}
		id, err := s.store.Answer(ctx, op)
		if err != nil {
			return 0, nil, err
		}
		if id != nil && !req.DryRun {
			m, err := s.store.Move(ctx, cells.MoveID(id))
			if err != nil {
				return 0, nil, err
			}
			return http.StatusOK, s.exec.current(m), nil
		}
	}
	undoes, err := s.undone(ctx, &req)
	if err != nil {
		return 0, nil, err
	}
	from, err := s.source(ctx, &req)
	if err != nil {
		return 0, nil, err
	}
	if req.DryRun {
		d, err := s.dryRun(ctx, &req, from, undoes)
		if err != nil {
			return 0, nil, err
		}
		return http.StatusOK, d, nil
	}
	who := callerOf(ctx).as(req.Actor)
	now := time.Now().UTC()
	m := api.Move{
		ID: cells.MoveID("mv-" + rand.Text()), Tenant: req.Tenant, From: from, To: req.To, State: api.MovePreparing, Step: "queued",
		Actor: req.Actor, Force: req.Force, Throttle: req.Throttle, OperationID: req.OperationID, RequestID: who.request, Driver: s.instance, CreatedAt: now, UpdatedAt: now,
		Undoes: undoes, UndoWindow: s.exec.undoWindow(&req),
	}
	if err := s.mayMove(ctx, &m); err != nil {
		return 0, nil, err
	}
	e := who.audit("move.create")
	e.Tenant, e.Cell, e.Move = m.Tenant, m.To, m.ID
	e.Detail = detail(map[string]any{"from": from, "to": req.To, "force": req.Force, "operation": req.OperationID, "undoes": undoes, "undo_window": m.UndoWindow.String()})
	rec, created, err := s.store.CreateMove(ctx, m, e)
	switch {
	case err != nil:
		return 0, nil, unknownOr(req.To, err)
	case !created:
		return http.StatusOK, s.exec.current(rec), nil
	}
	s.exec.start(rec)
	w.Header().Set("Location", api.PathMoves+"/"+string(rec.ID))
	return http.StatusAccepted, rec, nil
}

// source says where the tenant would be moved from, or why it cannot be moved.
func (s *Server) source(ctx context.Context, req *api.MoveRequest) (cells.CellID, error) {
	row, err := s.table.Get(ctx, req.Tenant)
	var from cells.CellID
	switch {
	case errors.Is(err, cells.ErrNotFound):
		if from = s.fleet.defaultCell(); from == "" {
			return "", unknownTenant(req.Tenant)
		}
	case err != nil:
		return "", err
	case row.State == cells.StateDeleted:
		return "", &cells.Answer{Code: cells.CodeUnknownTenant, Tenant: req.Tenant, Detail: "the tenant was deleted"}
	case row.State == cells.StateDeleting:
		return "", &cells.Answer{Code: cells.CodeConflict, Tenant: req.Tenant, Detail: "the tenant is being deleted"}
	default:
		from = row.CellID
	}
	if from == req.To && row.MoveID == "" {
		return "", &cells.Answer{Code: cells.CodeConflict, Tenant: req.Tenant, Cell: from,
			Detail: fmt.Sprintf("the tenant is in cell %s already", from)}
	}
	return from, nil
}

// mayMove says why the target does not take the move's tenant; nil if it does.
func (s *Server) mayMove(ctx context.Context, m *api.Move) error {
	if _, err := s.deployed(ctx, m.Tenant, m.From, m.To, m.Undoes != ""); err != nil {
		return err
	}
	if err := s.takes(ctx, m.To, m.Tenant); err != nil && !Waived(m, err) {
		return unknownOr(m.To, err)
	}
	return nil
}

// unknownOr names the cell that is not registered.
func unknownOr(cell cells.CellID, err error) error {
	if errors.Is(err, ErrNoCell) {
		return unknownCell(cell)
	}
	return err
}

// verdict is a dry run that is being made.
type verdict struct{ api.DryRun }

// refuse adds a refusal; the first one gives the code, as it would end the move.
func (v *verdict) refuse(reason string, code cells.Code) {
	v.Refusals = append(v.Refusals, reason)
	if v.Code == "" {
		v.Code = code
	}
}

// dryRun finds what would refuse the move, without changing anything.
func (s *Server) dryRun(ctx context.Context, req *api.MoveRequest, from cells.CellID, undoes cells.MoveID) (api.DryRun, error) {
	out := verdict{api.DryRun{Tenant: req.Tenant, From: from, To: req.To, Preflight: cells.Preflight{Findings: []cells.Finding{}}}}
	switch err := s.mayMove(ctx, &api.Move{Tenant: req.Tenant, To: req.To, Undoes: undoes}); {
	case errors.Is(err, ErrCellClosed), errors.Is(err, cells.ErrJurisdiction):
		out.refuse(err.Error(), answerOf(err).Code)
	case err != nil:
		return out.DryRun, err
	}
	last, err := s.store.Moves(ctx, MoveFilter{Tenant: req.Tenant, Limit: 1})
	if err != nil {
		return out.DryRun, err
	}
	if len(last) == 1 && last[0].State.Active() {
		out.refuse(fmt.Sprintf("move %s to cell %s is %s", last[0].ID, last[0].To, last[0].State), cells.CodeConflict)
		return out.DryRun, nil
	}
	p, err := s.exec.controller().Preflight(ctx, cells.MovePlan{TenantID: req.Tenant, FromCell: from, ToCell: req.To, Actor: req.Actor, Force: req.Force,
		UndoWindow: s.exec.undoWindow(req), Undoes: undoes})
	switch {
	case errors.Is(err, cells.ErrOtherMove), errors.Is(err, cells.ErrNotApplicable):
		out.refuse(err.Error(), refusalCode(err))
		return out.DryRun, nil
	case errors.Is(err, cells.ErrUnavailable):
		return out.DryRun, &cells.Answer{Code: cells.CodeCellUnreachable, Tenant: req.Tenant, Cell: req.To, Detail: err.Error(), Err: err}
	case err != nil:
		return out.DryRun, err
	}
	if p.Findings != nil {
		out.Preflight = p
	} else {
		p.Findings = out.Preflight.Findings
		out.Preflight = p
	}
	if out.Code == "" {
		out.Code = findingsCode(p.Findings)
	}
	out.Allowed = len(out.Refusals) == 0 && !p.Blocked()
	return out.DryRun, nil
}

func (s *Server) getMoves(_ http.ResponseWriter, r *http.Request) (int, any, error) {
	q, err := query(r, "tenant", "state", "after", "limit")
	if err != nil {
		return 0, nil, err
	}
	f := MoveFilter{Tenant: cells.TenantID(q["tenant"]), State: api.MoveState(q["state"])}
	if f.Tenant != "" {
		if err := f.Tenant.Validate(); err != nil {
			return 0, nil, badTenant(f.Tenant, err)
		}
	}
	if f.State != "" && !f.State.Valid() {
		return 0, nil, bad("unknown state %q", f.State)
	}
	if f.After, f.Limit, err = paging(q); err != nil {
		return 0, nil, err
	}
	list, err := s.store.Moves(r.Context(), f)
	if err != nil {
		return 0, nil, err
	}
	out := api.MoveList{Moves: make([]api.Move, 0, len(list))}
	for _, m := range list {
		m = s.exec.current(m)
		m.Compared = nil // that of one move is long enough
		out.Moves = append(out.Moves, m)
	}
	_, out.Next = pageOf(list, f.Limit, func(m *api.Move) int64 { return m.Seq })
	return http.StatusOK, out, nil
}

func moveOf(r *http.Request) (cells.MoveID, error) {
	id := cells.MoveID(r.PathValue("move"))
	return id, id.Validate()
}

func unknownMove(id cells.MoveID, err error) error {
	if errors.Is(err, cells.ErrNotFound) {
		return &cells.Answer{Code: cells.CodeNotFound, Detail: "there is no move " + string(id), Err: err}
	}
	return err
}

func (s *Server) getMove(w http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := moveOf(r)
	if err != nil {
		return 0, nil, err
	}
	q, err := query(r, "watch")
	if err != nil {
		return 0, nil, err
	}
	m, err := s.store.Move(r.Context(), id)
	if err != nil {
		return 0, nil, unknownMove(id, err)
	}
	if q["watch"] == "" {
		return http.StatusOK, s.exec.current(m), nil
	}
	out := newLines(w)
	err = s.exec.watch(r.Context(), id, func(m *api.Move) (bool, error) {
		if m == nil {
			return false, out.send(api.MoveLine{Alive: true})
		}
		return m.State.Final(), out.send(api.MoveLine{Move: m})
	})
	if err != nil && r.Context().Err() == nil {
		_ = out.send(api.MoveLine{Error: "the watch ended: " + err.Error()})
	}
	return 0, nil, nil
}

// watch calls f with the record whenever it has changed, and with nil as a sign of
// life, until f says that it is enough or fails, or the context ends.
func (e *executor) watch(ctx context.Context, id cells.MoveID, f func(*api.Move) (enough bool, err error)) error {
	poll := time.NewTicker(250 * time.Millisecond)
	defer poll.Stop()
	alive := time.NewTicker(e.s.cfg.AliveEvery)
	defer alive.Stop()
	version, first := int64(0), true
	for {
		var changed <-chan struct{}
		var m api.Move
		t, ok := e.tracker(id), false
		if t != nil {
			changed = t.changed.next()
			m, ok = t.visible()
		} else {
			var err error
			if m, err = e.s.store.Move(ctx, id); err != nil {
				return err
			}
		}
		if ok || t == nil && (first || m.Version != version) {
			if enough, err := f(&m); enough || err != nil {
				return err
			}
			version, first = m.Version, false
		}
	wait:
		for {
			select {
			case <-changed:
				break wait
			case <-poll.C:
				if changed == nil {
					break wait
				}
			case <-alive.C:
				if _, err := f(nil); err != nil {
					return err
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-e.s.ctx.Done():
				return errClosing
			}
		}
	}
}

func (s *Server) postRollback(w http.ResponseWriter, r *http.Request) (int, any, error) {
	id, err := moveOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.RollbackRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	if s.cfg.Pinned {
		return 0, nil, pinned()
	}
	ctx := r.Context()
	m, err := s.store.Move(ctx, id)
	if err != nil {
		return 0, nil, unknownMove(id, err)
	}
	m = s.exec.current(m)
	if m.State == api.MoveRolledBack {
		return http.StatusOK, m, nil
	}
	row, err := s.table.Get(ctx, m.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return 0, nil, err
	}
	committed := row.MoveID == id && row.State == cells.StateCommitting && row.CellID == m.To
	if committed || m.State == api.MoveRefused || !m.State.Active() || m.State == api.MoveCommitted {
		return 0, nil, decided(&m)
	}
	e := callerOf(ctx).as(req.Actor).audit("move.rollback")
	e.Tenant, e.Move, e.Detail = m.Tenant, id, detail(map[string]string{"reason": req.Reason})
	rec, err := s.store.UpdateMove(ctx, id, func(m *api.Move) error {
		if !m.State.Active() || m.State == api.MoveCommitted {
			return decided(m)
		}
		m.Cancel, m.Reason = true, req.Reason
		return nil
	}, &e)
	if err != nil {
		return 0, nil, err
	}
	s.exec.askBack(rec, row.MoveID == id)
	return s.awaitRollback(ctx, id)
}

func decided(m *api.Move) error {
	return &cells.Answer{Code: cells.CodeConflict, Tenant: m.Tenant, Detail: fmt.Sprintf("move %s is %s and is not rolled back", m.ID, m.State)}
}

// awaitRollback answers with the outcome, or that it is on its way.
func (s *Server) awaitRollback(ctx context.Context, id cells.MoveID) (int, any, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout/2)
	defer cancel()
	var last api.Move
	err := s.exec.watch(ctx, id, func(m *api.Move) (bool, error) {
		if m == nil {
			return false, nil
		}
		last = *m
		return !m.State.Active(), nil
	})
	switch {
	case last.State == api.MoveRolledBack:
		return http.StatusOK, last, nil
	case last.ID != "" && !last.State.Active():
		return 0, nil, decided(&last)
	case last.ID != "" && ctx.Err() != nil:
		return http.StatusAccepted, last, nil
	}
	return 0, nil, err
}

// askBack makes a move that was asked to roll back do so: its driver here gives
// up what it is doing; for a driver elsewhere the route is decided from here, and
// that driver follows the route.
func (e *executor) askBack(rec api.Move, begun bool) {
	if t := e.tracker(rec.ID); t != nil {
		t.mu.Lock()
		t.rec.Cancel, t.rec.Reason = true, rec.Reason
		stop := t.stop
		t.mu.Unlock()
		t.changed.wake()
		if stop != nil {
			stop(errAskBack)
		}
		return
	}
	if !begun || e.s.ctx.Err() != nil {
		return
	}
	e.s.wg.Go(func() {
		err := e.controller().Rollback(e.s.ctx, rec.Tenant, rec.Reason)
		if err != nil && e.s.ctx.Err() == nil {
			e.s.log.Warn("rollback of a move that is driven elsewhere", "move", rec.ID, "err", err)
		}
	})
}
