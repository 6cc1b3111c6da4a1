// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// Steps of a campaign at which Config.CampaignHook is called, each after it was
// persisted.
const (
	CampaignStepTaken   = "taken"    // this directory drives it
	CampaignStepBegin   = "begin"    // an item is RUNNING, its move is not recorded yet
	CampaignStepCreated = "created"  // the item's move is recorded, nobody drives it yet
	CampaignStepResult  = "result"   // an item has its result
	CampaignStepStopped = "stopped"  // paused by its failures
	CampaignStepDone    = "finished" // DONE or ABORTED
)

var (
	errItemTaken = errors.New("directory: the item was taken on by another driver")
	errNotDriver = errors.New("directory: another directory drives the campaign")
	errNoChange  = errors.New("directory: nothing to change")
)

// campaigns drives campaigns. Two drivers at once are wasteful and harmless: an
// item's attempt names its move, a move's id is recorded once, and a result is written
// once.
type campaigns struct {
	*drivers[api.CampaignID]

	runMu sync.Mutex
	runs  map[api.CampaignID]*campaignRun // guarded by runMu
}

// campaignRun is this process's part in a campaign.
type campaignRun struct {
	c  *campaigns
	id api.CampaignID
	// Used by its goroutine only: when full cells are tried again, by target.
	full map[cells.CellID]time.Time
}

func newCampaigns(s *Server) *campaigns {
	c := &campaigns{drivers: newDrivers[api.CampaignID](s, "campaign"), runs: map[api.CampaignID]*campaignRun{}}
	c.beats, c.beat, c.take = s.store.CampaignBeats, s.store.BeatCampaigns, s.store.TakeCampaign
	c.taken = func(ctx context.Context, id api.CampaignID) error { return c.hook(ctx, CampaignStepTaken, id, 0) }
	c.step = func(ctx context.Context, id api.CampaignID) (time.Duration, bool, error) {
		wait, err := c.run(id).step(ctx)
		return wait, errors.Is(err, errNotDriver), err
	}
	c.ended = func(id api.CampaignID) {
		c.runMu.Lock()
		defer c.runMu.Unlock()
		delete(c.runs, id)
	}
	return c
}

// run returns what this process knows of a campaign that it drives.
func (c *campaigns) run(id api.CampaignID) *campaignRun {
	c.runMu.Lock()
	defer c.runMu.Unlock()
	r := c.runs[id]
	if r == nil {
		r = &campaignRun{c: c, id: id, full: map[cells.CellID]time.Time{}}
		c.runs[id] = r
	}
	return r
}

func (c *campaigns) hook(ctx context.Context, step string, id api.CampaignID, pos int64) error {
	if c.s.cfg.CampaignHook == nil {
		return nil
	}
	if err := c.s.cfg.CampaignHook(ctx, step, id, pos); err != nil {
		return &hookError{err}
	}
	return nil
}

// lookEvery is how often a campaign looks at moves that other directories drive.
const lookEvery = 250 * time.Millisecond

func (r *campaignRun) audit(action, actor string) api.AuditEntry {
	s := r.c.s
	return api.AuditEntry{At: time.Now().UTC(), Peer: "directory/" + s.cfg.Name, Actor: actor, RequestID: string(r.id), Action: action}
}

// step does what there is to do, and says when to look again.
func (r *campaignRun) step(ctx context.Context) (time.Duration, error) {
	s := r.c.s
	c, err := s.store.Campaign(ctx, r.id)
	if err != nil {
		return 0, err
	}
	if c.Driver != s.instance || !c.Driven() {
		return 0, errNotDriver
	}
	running, err := r.settle(ctx, &c)
	if err != nil {
		return 0, err
	}
	if c, err = s.store.Campaign(ctx, r.id); err != nil {
		return 0, err
	}
	if c.State == api.CampaignRunning && c.Settings.Stops(c.Counts.Failed-c.Forgiven, c.Counts.Total) {
		if c, err = r.stop(ctx); err != nil {
			return 0, err
		}
	}
	wait := lookEvery
	if c.State == api.CampaignRunning {
		if wait, err = r.begin(ctx, &c, running); err != nil {
			return 0, err
		}
		if c, err = s.store.Campaign(ctx, r.id); err != nil {
			return 0, err
		}
	}
	if c.Counts.Running > 0 {
		return min(wait, lookEvery), nil
	}
	switch {
	case c.State == api.CampaignAborting, c.State == api.CampaignRunning && c.Counts.Pending == 0:
		return 0, r.finish(ctx, &c)
	case c.State == api.CampaignRunning:
		return wait, nil
	}
	// Paused, and nothing runs: nobody needs to drive it.
	_, err = s.store.UpdateCampaign(ctx, r.id, func(c *api.Campaign) error {
		if c.Driven() || c.Driver != s.instance {
			return errNoChange
		}
		c.Driver = ""
		return nil
	}, nil)
	if errors.Is(err, errNoChange) {
		return 0, nil
	}
	return 0, err
}

// stop pauses a campaign whose failures have used up what was allowed.
func (r *campaignRun) stop(ctx context.Context) (api.Campaign, error) {
	e := r.audit("campaign.stop", "directory/"+r.c.s.cfg.Name)
	c, err := r.c.s.store.UpdateCampaign(ctx, r.id, func(c *api.Campaign) error {
		if c.State != api.CampaignRunning {
			return errNoChange
		}
		c.State = api.CampaignPaused
		c.Reason = fmt.Sprintf("%d of %d moves have failed; it stops after %s", c.Counts.Failed-c.Forgiven, c.Counts.Total, c.Settings.StopAfter)
		c.UpdatedAt = time.Now().UTC()
		return nil
	}, &e)
	if errors.Is(err, errNoChange) {
		return r.c.s.store.Campaign(ctx, r.id)
	}
	if err == nil {
		r.c.s.log.Warn("campaign stopped", "campaign", r.id, "reason", c.Reason)
		err = r.c.hook(ctx, CampaignStepStopped, r.id, 0)
	}
	return c, err
}

// finish ends a campaign of which nothing runs and nothing is to be begun.
func (r *campaignRun) finish(ctx context.Context, c *api.Campaign) error {
	end := api.CampaignDone
	if c.State == api.CampaignAborting {
		end = api.CampaignAborted
		if _, err := r.c.s.store.MoveItems(ctx, r.id, []api.ItemState{api.ItemPending}, api.ItemSkipped, "the campaign was aborted"); err != nil {
			return err
		}
	}
	e := r.audit("campaign."+strings.ToLower(string(end)), "directory/"+r.c.s.cfg.Name)
	from := c.State
	_, err := r.c.s.store.UpdateCampaign(ctx, r.id, func(c *api.Campaign) error {
		if c.State != from || c.Counts.Running > 0 || c.Counts.Pending > 0 {
			return errNoChange
		}
		c.State, c.Driver = end, ""
		c.FinishedAt = time.Now().UTC()
		c.UpdatedAt = c.FinishedAt
		return nil
	}, &e)
	if errors.Is(err, errNoChange) {
		return nil
	}
	if err != nil {
		return err
	}
	r.c.s.log.Info("campaign ended", "campaign", r.id, "state", end)
	if err := r.c.hook(ctx, CampaignStepDone, r.id, 0); err != nil {
		return err
	}
	return errNotDriver
}

// settle looks at the moves of the running items: those that are over give their
// items the result, those that were never recorded are recorded now. It returns
// what still runs.
func (r *campaignRun) settle(ctx context.Context, c *api.Campaign) ([]api.CampaignItem, error) {
	var running []api.CampaignItem
	after := int64(0)
	for {
		list, err := r.c.s.store.CampaignItems(ctx, ItemFilter{Campaign: r.id, State: api.ItemRunning, After: after, Limit: api.MaxPage})
		if err != nil {
			return nil, err
		}
		for i := range list {
			still, err := r.look(ctx, c, &list[i])
			if err != nil {
				return nil, err
			}
			if still {
				running = append(running, list[i])
			}
		}
		if len(list) < api.MaxPage {
			return running, nil
		}
		after = list[len(list)-1].Pos
	}
}

// look looks at one running item and reports whether it still runs.
func (r *campaignRun) look(ctx context.Context, c *api.Campaign, it *api.CampaignItem) (bool, error) {
	s := r.c.s
	m, err := s.store.Move(ctx, it.Move)
	if errors.Is(err, cells.ErrNotFound) {
		// Nothing was begun: the move's record comes first.
		if c.State == api.CampaignAborting {
			return false, r.result(ctx, it, api.ItemSkipped, why{reason: "the campaign was aborted"}, nil)
		}
		return r.create(ctx, c, it)
	}
	if err != nil {
		return true, err
	}
	m = s.exec.current(m)
	if m.State.Active() {
		if c.State == api.CampaignAborting && c.Rollback && !m.Cancel && m.State != api.MoveCommitted {
			return true, s.giveUp(ctx, &m, r.audit("move.rollback", c.RunBy), "the campaign was aborted")
		}
		return true, nil
	}
	// What is concluded here is told only once it is stored.
	switch m.State {
	case api.MoveRolledBack:
		return false, r.result(ctx, it, api.ItemFailed, why{orDefault(m.Reason, "rolled back"), m.Code}, &m)
	case api.MoveRefused:
		state := api.ItemFailed
		if m.Code == cells.CodeBudgetExceeded {
			state = api.ItemDeferred
		}
		return false, r.result(ctx, it, state, why{m.Reason, m.Code}, &m)
	}
	return false, r.result(ctx, it, api.ItemMoved, why{}, &m)
}

// result gives a running item its result, once.
func (r *campaignRun) result(ctx context.Context, it *api.CampaignItem, state api.ItemState, w why, m *api.Move) error {
	now := time.Now().UTC()
	attempt := it.Attempt
	e := r.audit("campaign.item", "directory/"+r.c.s.cfg.Name)
	e.Tenant, e.Cell, e.Move = it.Tenant, it.To, it.Move
	e.Detail = detail(map[string]any{"state": state, "reason": w.reason, "attempt": attempt})
	update := r.c.s.store.UpdateItem
	if m == nil { // another driver may have recorded the move meanwhile
		update = r.c.s.store.UpdateUnmoved
	}
	_, err := update(ctx, r.id, it.Pos, func(it *api.CampaignItem) error {
		if it.State != api.ItemRunning || it.Attempt != attempt {
			return errItemTaken
		}
		it.State, it.Reason, it.Code, it.FinishedAt = state, w.reason, w.code, now
		if m != nil {
			it.Pause = m.Pause
		}
		return nil
	}, func(c *api.Campaign, it *api.CampaignItem) error {
		c.Pause += it.Pause
		if state == api.ItemMoved && m != nil && !m.StartedAt.IsZero() {
			served := m.ServedAt
			if served.IsZero() {
				served = now
			}
			c.Spent += max(served.Sub(m.StartedAt), 0)
		}
		c.UpdatedAt = now
		return nil
	}, &e)
	if errors.Is(err, errItemTaken) || m == nil && errors.Is(err, cells.ErrConflict) {
		return nil
	}
	if err != nil {
		return err
	}
	clear(r.full)
	if state == api.ItemMoved && m != nil && m.Rows > 0 {
		if err := r.c.s.store.SaveMeasures(ctx, []Measurement{{Tenant: it.Tenant, Rows: m.Rows, Bytes: m.Bytes, At: now}}); err != nil {
			r.c.s.log.Warn("measure not kept", "tenant", it.Tenant, "err", err)
		}
	}
	return r.c.hook(ctx, CampaignStepResult, r.id, it.Pos)
}
