// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// window is an open undo window and what this process has seen of it.
type window struct {
	api.UndoWindow
	since time.Time // when this process first saw it
	let   bool      // the cell does not hold the tenant; used by the window's round only
}

// onlyHeld reports whether nothing is to be done about the route but to bring changes
// back.
func onlyHeld(row *cells.TenantRoute) bool {
	_, held := row.Held()
	return held && row.MoveID == "" && len(row.Residue) == 1
}

// undoWindow is the one that a request asks for, or the default.
func (e *executor) undoWindow(req *api.MoveRequest) time.Duration {
	if _, ok := e.agents.(cells.Returner); !ok || e.s.cfg.Stateless {
		return 0
	}
	switch {
	case req.UndoWindow != nil:
		return *req.UndoWindow
	case req.Undo:
		return 0
	}
	return e.s.cfg.UndoWindow
}

// undone finds the move that an undo takes back, and fills in where to.
func (s *Server) undone(ctx context.Context, req *api.MoveRequest) (cells.MoveID, error) {
	if !req.Undo {
		return "", nil
	}
	row, err := s.table.Get(ctx, req.Tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return "", unknownTenant(req.Tenant)
	}
	if err != nil {
		return "", err
	}
	held, ok := row.Held()
	if !ok || req.To != "" && req.To != held.Cell {
		return "", &cells.Answer{Code: cells.CodeConflict, Tenant: req.Tenant, Cell: row.CellID,
			Detail: "the tenant's last move cannot be undone (any more): move it instead"}
	}
	req.To = held.Cell
	return held.Move, nil
}

// tendWindows brings changes back for every move that can be undone, and closes the
// windows whose time has passed or whose way back is lost. Every directory does; the
// cells' agents take turns.
func (e *executor) tendWindows(ctx context.Context) {
	every := time.NewTicker(e.s.cfg.ReturnEvery)
	defer every.Stop()
	slots := make(chan struct{}, e.s.cfg.Moves)
	for {
		var busy sync.WaitGroup
		for _, tenant := range e.openWindows() {
			busy.Go(func() {
				select {
				case slots <- struct{}{}:
					defer func() { <-slots }()
					e.tendWindow(ctx, tenant)
				case <-ctx.Done():
				}
			})
		}
		busy.Wait()
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}

// openWindows lists the tenants whose routes are held, as last seen.
func (e *executor) openWindows() []cells.TenantID {
	now := time.Now()
	routes := e.s.follow.unfinished()
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []cells.TenantID
	known := map[cells.TenantID]bool{}
	for i := range routes {
		held, ok := routes[i].row.Held()
		if !ok {
			continue
		}
		tenant := routes[i].row.TenantID
		known[tenant] = true
		if w := e.windows[tenant]; w == nil || w.Move != held.Move {
			e.windows[tenant] = &window{since: now, UndoWindow: api.UndoWindow{Move: held.Move, Cell: held.Cell, Until: held.Until}}
		}
		out = append(out, tenant)
	}
	for t := range e.windows {
		if !known[t] {
			delete(e.windows, t)
		}
	}
	return out
}

func (e *executor) tendWindow(ctx context.Context, tenant cells.TenantID) {
	e.letGo(ctx, tenant)
	got, err := e.controller().Tend(ctx, tenant)
	if ctx.Err() != nil {
		return
	}
	result := "done"
	e.mu.Lock()
	w := e.windows[tenant]
	switch {
	case w == nil || got.Entry.Move != w.Move:
	case err != nil:
		result = "failed"
		w.Failures++
		w.Error = err.Error()
	case !got.Open:
		result = "closed"
		delete(e.windows, tenant)
	default:
		w.At, w.Lag, w.Changes = time.Now().UTC(), got.Lag, w.Changes+got.Changes
		w.Failures, w.Error = 0, ""
	}
	e.mu.Unlock()
	e.s.metrics.returns.WithLabelValues(result).Inc()
	switch result {
	case "failed":
		e.s.log.Warn("changes are not brought back; trying again", "tenant", tenant, "move", got.Entry.Move, "err", err)
	case "closed":
		e.s.log.Info("undo window closed", "tenant", tenant, "move", got.Entry.Move, "reason", got.Reason)
	}
}

// letGo has the cell that a tenant can return to let it go, once for each process: the
// end of the move may have found it away.
func (e *executor) letGo(ctx context.Context, tenant cells.TenantID) {
	e.mu.Lock()
	w := e.windows[tenant]
	e.mu.Unlock()
	if w == nil || w.let || e.s.cfg.Deployments == nil {
		return
	}
	if err := e.unhold(ctx, tenant, w.Cell); err != nil {
		if ctx.Err() == nil {
			e.s.log.Warn("the cell that a tenant has left holds it still; trying again", "tenant", tenant, "cell", w.Cell, "err", err)
		}
		return
	}
	w.let = true
}

// window is what this process has seen of the tenant's undo window.
func (e *executor) window(row *cells.TenantRoute) *api.UndoWindow {
	held, ok := row.Held()
	if !ok {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	w := e.windows[row.TenantID]
	if w == nil || w.Move != held.Move {
		return nil
	}
	out := w.UndoWindow
	return &out
}

// windowAges counts the open windows, and says how long the one has waited for whose
// changes were not brought back for longest.
func (e *executor) windowAges() (n int, oldest time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range e.windows {
		at := w.At
		if at.IsZero() {
			at = w.since
		}
		oldest = max(oldest, time.Since(at))
	}
	return len(e.windows), oldest
}

// noteResidue writes what the route says is left of a move that nobody drives here into its
// record, if it has one. The route decides; the record is for people, and says that
// there is something to remove.
func (e *executor) noteResidue(ctx context.Context, id cells.MoveID, left []cells.Residue) {
	now := time.Now().UTC()
	if len(left) == 0 {
		e.amend(ctx, id)
	}
	e.note(ctx, id, func(m *api.Move) { takeResidue(m, left, now) })
}

// noteUndo writes into the record of a move that it was taken back, or that this was
// tried and is not offered any more.
func (e *executor) noteUndo(ctx context.Context, undo api.Move, state api.MoveState) {
	if state == api.MoveRefused {
		return
	}
	if state == api.MoveDone {
		e.amend(ctx, undo.Undoes)
	}
	now := time.Now().UTC()
	e.note(ctx, undo.Undoes, func(m *api.Move) {
		if state == api.MoveDone {
			m.UndoneBy = undo.ID
		}
		takeResidue(m, nil, now)
	})
}

func (e *executor) note(ctx context.Context, id cells.MoveID, f func(*api.Move)) {
	_, err := e.s.store.UpdateMove(ctx, id, func(m *api.Move) error { f(m); return nil }, nil)
	if err != nil && !errors.Is(err, cells.ErrNotFound) && ctx.Err() == nil {
		e.s.log.Warn("record not written", "move", id, "err", err)
	}
}

func (s *Server) postCloseWindow(w http.ResponseWriter, r *http.Request) (int, any, error) {
	tenant, err := tenantOf(r)
	if err != nil {
		return 0, nil, err
	}
	var req api.CloseWindowRequest
	if err := readJSON(w, r, &req); err != nil {
		return 0, nil, err
	}
	if err := req.Normalize(); err != nil {
		return 0, nil, err
	}
	ctx := r.Context()
	row, err := s.table.Get(ctx, tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return 0, nil, unknownTenant(tenant)
	}
	if err != nil {
		return 0, nil, err
	}
	held, ok := row.Held()
	if !ok {
		return http.StatusOK, row, nil
	}
	e := callerOf(ctx).as(req.Actor).audit("window.close")
	e.Tenant, e.Cell, e.Move, e.Detail = tenant, held.Cell, held.Move, detail(map[string]string{"reason": req.Reason})
	if err := s.store.AppendAudit(ctx, e); err != nil {
		return 0, nil, err
	}
	row, err = s.exec.controller().CloseWindow(ctx, tenant, req.Reason, req.Actor)
	return http.StatusOK, row, err
}
