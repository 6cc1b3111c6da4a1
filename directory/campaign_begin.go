// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// lookAhead is among how many pending items those to begin are chosen: enough for
// the bounds on pairs of cells, few enough to be read each time.
const lookAhead = 500

// fullWait is for how long a target that was found full is left alone, unless an
// item of the campaign ends before.
const fullWait = 5 * time.Second

type pair struct{ from, to cells.CellID }

// begin begins as many items as the settings allow, and says when to look again.
func (r *campaignRun) begin(ctx context.Context, c *api.Campaign, running []api.CampaignItem) (time.Duration, error) {
	free := c.Settings.Concurrency - len(running)
	if free <= 0 || c.Counts.Pending == 0 {
		return time.Minute, nil
	}
	now := r.c.s.cfg.Now()
	if wait := r.c.s.campaignWait(c, now); wait > 0 {
		return min(wait, time.Minute), nil
	}
	busy := map[pair]int{}
	for i := range running {
		busy[pair{running[i].From, running[i].To}]++
	}
	list, err := r.c.s.store.CampaignItems(ctx, ItemFilter{Campaign: r.id, State: api.ItemPending, Limit: lookAhead})
	if err != nil {
		return 0, err
	}
	n := len(running)
	for i := range list {
		it := &list[i]
		p := pair{it.From, it.To}
		if free == 0 || ctx.Err() != nil {
			break
		}
		if c.Settings.PerPair > 0 && busy[p] >= c.Settings.PerPair || time.Now().Before(r.full[it.To]) {
			continue
		}
		runs, err := r.item(ctx, c, it, n > 0)
		if errors.Is(err, errItemTaken) {
			continue
		}
		if err != nil {
			return 0, err
		}
		if runs {
			free--
			n++
			busy[p]++
		}
		if c.Settings.PerHour > 0 {
			break
		}
	}
	return lookEvery, nil
}

// campaignWait is for how long no move of the campaign may begin.
func (s *Server) campaignWait(c *api.Campaign, now time.Time) time.Duration {
	sched, err := c.Settings.Schedule()
	if err != nil {
		return time.Minute // it was valid when it was stored
	}
	if !sched.Open(now) {
		if next, ok := sched.Next(now); ok {
			return max(next.Sub(now), time.Millisecond)
		}
		return time.Hour
	}
	if n := c.Settings.PerHour; n > 0 && !c.LastStart.IsZero() {
		return max(c.LastStart.Add(time.Hour/time.Duration(n)).Sub(now), 0)
	}
	return 0
}

// item begins one item. First it is persisted as running, under the id that its
// move will have; only then is the move recorded.
func (r *campaignRun) item(ctx context.Context, c *api.Campaign, it *api.CampaignItem, others bool) (runs bool, _ error) {
	s := r.c.s
	now := s.cfg.Now().UTC()
	got, err := s.store.UpdateItem(ctx, r.id, it.Pos, func(it *api.CampaignItem) error {
		if it.State != api.ItemPending {
			return errItemTaken
		}
		it.State, it.Reason, it.Code = api.ItemRunning, "", ""
		it.Attempt++
		it.Move = api.ItemMove(r.id, it.Pos, it.Attempt)
		it.StartedAt, it.FinishedAt = now, time.Time{}
		return nil
	}, func(c *api.Campaign, _ *api.CampaignItem) error {
		if c.State != api.CampaignRunning || c.Driver != s.instance {
			return errNotDriver // paused meanwhile, or in other hands
		}
		c.LastStart, c.UpdatedAt = now, now
		return nil
	}, nil)
	if errors.Is(err, cells.ErrNotFound) {
		return false, errItemTaken // replaced meanwhile
	}
	if errors.Is(err, errNotDriver) {
		return false, errItemTaken
	}
	if err != nil {
		return false, err
	}
	if err := r.c.hook(ctx, CampaignStepBegin, r.id, it.Pos); err != nil {
		return false, err
	}
	return r.createWith(ctx, c, &got, others)
}

func (r *campaignRun) create(ctx context.Context, c *api.Campaign, it *api.CampaignItem) (runs bool, _ error) {
	return r.createWith(ctx, c, it, c.Counts.Running > 1)
}

// createWith records the move of a running item and drives it, or gives the item
// its result if it is not to be made. others: the campaign has other moves under
// way, which may make room.
func (r *campaignRun) createWith(ctx context.Context, c *api.Campaign, it *api.CampaignItem, others bool) (runs bool, _ error) {
	s := r.c.s
	undoes, err := r.undoes(ctx, c, it)
	if err != nil {
		return true, err
	}
	state, w, err := r.unfit(ctx, it, others, undoes != "")
	switch {
	case err != nil:
		return true, err
	case state == api.ItemPending:
		r.full[it.To] = time.Now().Add(fullWait)
		return false, r.back(ctx, it)
	case state != "":
		return false, r.result(ctx, it, state, w, nil)
	}
	now := time.Now().UTC()
	m := api.Move{
		ID: it.Move, Tenant: it.Tenant, From: it.From, To: it.To, State: api.MovePreparing, Step: "queued",
		Actor: c.RunBy, Force: c.Settings.Force, OperationID: string(it.Move), RequestID: string(r.id), Campaign: r.id, Item: it.Pos,
		UndoWindow: s.exec.undoWindow(&api.MoveRequest{UndoWindow: c.Settings.Undo(), Undo: undoes != ""}), Undoes: undoes,
		Driver: s.instance, CreatedAt: now, UpdatedAt: now,
	}
	if c.Counts.Total > 1 {
		m.Group = api.ItemGroup(r.id, it.Pos)
	}
	e := r.audit("move.create", c.RunBy)
	e.Tenant, e.Cell, e.Move = m.Tenant, m.To, m.ID
	e.Detail = detail(map[string]any{"from": m.From, "to": m.To, "force": m.Force, "campaign": r.id})
	rec, created, err := s.store.CreateMove(ctx, m, e)
	switch {
	case errors.Is(err, cells.ErrConflict):
		return true, nil // another driver has given the item its result meanwhile
	case errors.Is(err, ErrMoveActive):
		return false, r.result(ctx, it, api.ItemSkipped, why{fmt.Sprintf("move %s of the tenant is under way", rec.ID), cells.CodeConflict}, nil)
	case errors.Is(err, cells.ErrNoRoom) && others:
		// Moves that run may make room: its turn comes later.
		r.full[it.To] = time.Now().Add(fullWait)
		return false, r.back(ctx, it)
	case errors.Is(err, ErrCellClosed), errors.Is(err, cells.ErrJurisdiction), errors.Is(err, ErrNoCell), errors.Is(err, ErrOperationReused), errors.Is(err, cells.ErrInvalid):
		return false, r.result(ctx, it, api.ItemFailed, why{err.Error(), answerOf(err).Code}, nil)
	case err != nil:
		return true, err
	}
	if created {
		if err := r.c.hook(ctx, CampaignStepCreated, r.id, it.Pos); err != nil {
			return true, err
		}
	}
	if rec.Driver == s.instance {
		s.exec.start(rec)
	}
	return true, nil
}

// undoes is the move that the item's is to take back, or "".
func (r *campaignRun) undoes(ctx context.Context, c *api.Campaign, it *api.CampaignItem) (cells.MoveID, error) {
	if !c.Settings.PreferUndo {
		return "", nil
	}
	row, err := r.c.s.table.Get(ctx, it.Tenant)
	if errors.Is(err, cells.ErrNotFound) {
		return "", nil
	}
	if held, ok := row.Held(); err == nil && ok && held.Cell == it.To && row.MoveID == "" {
		return held.Move, nil
	}
	return "", err
}

// back makes a running item pending again, of which nothing was begun.
func (r *campaignRun) back(ctx context.Context, it *api.CampaignItem) error {
	attempt := it.Attempt
	_, err := r.c.s.store.UpdateUnmoved(ctx, r.id, it.Pos, func(it *api.CampaignItem) error {
		if it.State != api.ItemRunning || it.Attempt != attempt {
			return errItemTaken
		}
		it.State, it.Reason = api.ItemPending, "its cell has no room yet"
		return nil
	}, nil, nil)
	if errors.Is(err, errItemTaken) || errors.Is(err, cells.ErrConflict) {
		return nil
	}
	return err
}

// unfit says whether the plan still fits the tenant and the target, by the rules that
// it was made by: "" if it does, PENDING if it may later. others: as for createWith. A
// target that takes the tenant no more fails the item, as a refused move does: so a
// campaign that has outlived its plan stops, and can be planned anew or tried again.
func (r *campaignRun) unfit(ctx context.Context, it *api.CampaignItem, others, undo bool) (api.ItemState, why, error) {
	s := r.c.s
	if err := s.pinned(ctx); err != nil {
		if a := cells.AnswerOf(err); a != nil {
			return api.ItemFailed, why{a.Detail, a.Code}, nil
		}
		return "", why{}, err
	}
	from, err := s.source(ctx, &api.MoveRequest{Tenant: it.Tenant, To: it.To})
	if a := cells.AnswerOf(err); a != nil {
		switch {
		case a.Code == cells.CodeConflict && a.Cell == it.To:
			return api.ItemAlready, why{}, nil
		case a.Code == cells.CodeConflict, a.Code == cells.CodeUnknownTenant:
			return api.ItemSkipped, why{a.Detail, a.Code}, nil
		}
	}
	if err != nil {
		return "", why{}, err
	}
	if from != it.From {
		return api.ItemSkipped, why{fmt.Sprintf("the tenant is in cell %s, not in %s any more", from, it.From), cells.CodeConflict}, nil
	}
	if undo { // it goes back to a cell that is closed or full meanwhile
		return "", why{}, nil
	}
	switch err := s.takes(ctx, it.To, it.Tenant); {
	case errors.Is(err, cells.ErrNoRoom) && others:
		return api.ItemPending, why{}, nil // moves that run may make room: its turn comes later
	case errors.Is(err, ErrCellClosed), errors.Is(err, cells.ErrJurisdiction):
		return api.ItemFailed, why{err.Error(), answerOf(err).Code}, nil
	case errors.Is(err, ErrNoCell):
		return api.ItemFailed, why{fmt.Sprintf("cell %s is not registered", it.To), cells.CodeNotFound}, nil
	default:
		return "", why{}, err
	}
}

// giveUp asks a move's driver to roll it back; nothing if it is decided meanwhile.
func (s *Server) giveUp(ctx context.Context, m *api.Move, e api.AuditEntry, reason string) error {
	row, err := s.table.Get(ctx, m.Tenant)
	if err != nil && !errors.Is(err, cells.ErrNotFound) {
		return err
	}
	if row.MoveID == m.ID && row.State == cells.StateCommitting && row.CellID == m.To {
		return nil
	}
	e.Tenant, e.Move, e.Detail = m.Tenant, m.ID, detail(map[string]string{"reason": reason})
	rec, err := s.store.UpdateMove(ctx, m.ID, func(m *api.Move) error {
		if !m.State.Active() || m.State == api.MoveCommitted || m.Cancel {
			return errNoChange
		}
		m.Cancel, m.Reason = true, reason
		return nil
	}, &e)
	if errors.Is(err, errNoChange) {
		return nil
	}
	if err != nil {
		return err
	}
	s.exec.askBack(rec, row.MoveID == m.ID)
	return nil
}
