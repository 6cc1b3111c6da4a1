// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// The actions of campaigns in a trace, named as in cells/spec/Campaign.tla, where
// what a campaign's moves do is one step.
const (
	ActionRun    = "Run"
	ActionPause  = "Pause"
	ActionResume = "Resume"
	ActionAbort  = "Abort"
	ActionRetry  = "Retry"
	ActionTake   = "Take"
	ActionBegin  = "Begin"
	ActionRecord = "Record"
	ActionUnfit  = "Unfit"
	ActionResult = "Result"
	ActionFinish = "Finish"

	// actionOther is a change that the model leaves out: a plan that is made or edited,
	// a driver that has nothing to do.
	actionOther = "Other"
)

// CampaignTrace is one line of a trace: one transaction of the store that changed a
// campaign, or recorded a move of it.
type CampaignTrace struct {
	At       time.Time      `json:"at"`
	By       string         `json:"by,omitempty"`
	Campaign api.CampaignID `json:"campaign"`
	Action   string         `json:"action"`
	// Version is the campaign's after the change; 0 where it has none of its own.
	Version int64 `json:"version,omitempty"`
	// From and To are the campaign's states before and after, Driver who drove it.
	From   api.CampaignState `json:"from,omitempty"`
	To     api.CampaignState `json:"to,omitempty"`
	Driver string            `json:"driver,omitempty"`
	// Counts are those after a change of the campaign as a whole.
	Counts *api.CampaignCounts `json:"counts,omitempty"`
	// Item, with the attempt and the states before and after, is that of a change of one.
	Item     int64         `json:"item,omitempty"`
	Attempt  int           `json:"attempt,omitempty"`
	Before   int           `json:"before,omitempty"` // the attempt before
	ItemFrom api.ItemState `json:"item_from,omitempty"`
	ItemTo   api.ItemState `json:"item_to,omitempty"`
	Move     cells.MoveID  `json:"move,omitempty"`
}

// tracedStore is a store that writes down what its campaigns and rollouts go through.
type tracedStore struct {
	Store
	by string
	w  io.Writer // takes whole lines from anybody
}

func (t *tracedStore) put(l CampaignTrace) {
	l.At, l.By = time.Now(), t.by
	if b, err := json.Marshal(l); err == nil {
		_, _ = t.w.Write(append(b, '\n')) // what is missing is found when it is checked
	}
}

// lockedWriter lets several tracers write lines to one writer.
type lockedWriter struct {
	mu sync.Mutex // held while a line is written
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// traced makes a store that traces to w, which takes whole lines from anybody.
func traced(s Store, w io.Writer, by string) Store { return &tracedStore{Store: s, by: by, w: w} }

// orderOf names the change of a campaign as a whole.
func orderOf(from, to api.CampaignState) string {
	switch {
	case from == to:
		return actionOther
	case to == api.CampaignDone || to == api.CampaignAborted:
		return ActionFinish
	case to == api.CampaignPaused:
		return ActionPause
	case to == api.CampaignAborting:
		return ActionAbort
	case to == api.CampaignRunning && from == api.CampaignPlanned:
		return ActionRun
	case to == api.CampaignRunning && from == api.CampaignPaused:
		return ActionResume
	case to == api.CampaignRunning && from == api.CampaignDone:
		return ActionRetry
	}
	return actionOther
}

func (t *tracedStore) whole(action string, from api.CampaignState, c *api.Campaign) {
	counts := c.Counts
	t.put(CampaignTrace{Campaign: c.ID, Action: action, Version: c.Version, From: from, To: c.State, Driver: c.Driver, Counts: &counts})
}

func (t *tracedStore) CreateCampaign(ctx context.Context, c api.Campaign, items []api.PlannedItem, a api.AuditEntry) (api.Campaign, bool, error) {
	rec, created, err := t.Store.CreateCampaign(ctx, c, items, a)
	if err == nil && created {
		t.whole(actionOther, "", &rec)
	}
	return rec, created, err
}

// before remembers the state that a change began from.
func before(fn func(*api.Campaign) error, from *api.CampaignState) func(*api.Campaign) error {
	return func(c *api.Campaign) error {
		*from = c.State
		return fn(c)
	}
}

func (t *tracedStore) UpdateCampaign(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, a *api.AuditEntry) (api.Campaign, error) {
	var from api.CampaignState
	c, err := t.Store.UpdateCampaign(ctx, id, before(fn, &from), a)
	if err == nil {
		t.whole(orderOf(from, c.State), from, &c)
	}
	return c, err
}

func (t *tracedStore) ReplaceItems(ctx context.Context, id api.CampaignID, fn func(*api.Campaign) error, items []api.PlannedItem, a api.AuditEntry) (api.Campaign, error) {
	var from api.CampaignState
	c, err := t.Store.ReplaceItems(ctx, id, before(fn, &from), items, a)
	if err == nil {
		t.whole(actionOther, from, &c)
	}
	return c, err
}

type itemUpdate func(context.Context, api.CampaignID, int64, func(*api.CampaignItem) error, func(*api.Campaign, *api.CampaignItem) error, *api.AuditEntry) (api.CampaignItem, error)

func (t *tracedStore) item(ctx context.Context, update itemUpdate, unmoved bool, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, a *api.AuditEntry,
) (api.CampaignItem, error) {
	var was api.CampaignItem
	l := CampaignTrace{Campaign: id, Item: pos}
	it, err := update(ctx, id, pos, func(it *api.CampaignItem) error {
		was = *it
		return fn(it)
	}, func(c *api.Campaign, it *api.CampaignItem) error {
		l.From, l.To, l.Driver, l.Version = c.State, c.State, c.Driver, c.Version+1
		if also == nil {
			return nil
		}
		return also(c, it)
	}, a)
	if err != nil {
		return it, err
	}
	l.Before, l.Attempt, l.ItemFrom, l.ItemTo, l.Move = was.Attempt, it.Attempt, was.State, it.State, it.Move
	switch {
	case was.State == api.ItemPending && it.State == api.ItemRunning:
		l.Action = ActionBegin
	case was.State == api.ItemRunning && unmoved:
		l.Action = ActionUnfit
	case was.State == api.ItemRunning && it.State.Final():
		l.Action = ActionResult
	default:
		l.Action = actionOther
	}
	t.put(l)
	return it, nil
}

func (t *tracedStore) UpdateItem(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, a *api.AuditEntry,
) (api.CampaignItem, error) {
	return t.item(ctx, t.Store.UpdateItem, false, id, pos, fn, also, a)
}

func (t *tracedStore) UpdateUnmoved(ctx context.Context, id api.CampaignID, pos int64, fn func(*api.CampaignItem) error,
	also func(*api.Campaign, *api.CampaignItem) error, a *api.AuditEntry,
) (api.CampaignItem, error) {
	return t.item(ctx, t.Store.UpdateUnmoved, true, id, pos, fn, also, a)
}

// MoveItems has no version to tell: the checker finds it missing between two others.
func (t *tracedStore) MoveItems(ctx context.Context, id api.CampaignID, from []api.ItemState, to api.ItemState, reason string) (int64, error) {
	n, err := t.Store.MoveItems(ctx, id, from, to, reason)
	if err == nil && n > 0 {
		action := ActionRetry
		if to == api.ItemSkipped {
			action = ActionFinish
		}
		t.put(CampaignTrace{Campaign: id, Action: action, ItemTo: to})
	}
	return n, err
}

func (t *tracedStore) TakeCampaign(ctx context.Context, seen CampaignBeat, driver string) (bool, error) {
	ok, err := t.Store.TakeCampaign(ctx, seen, driver)
	if err == nil && ok {
		t.put(CampaignTrace{Campaign: seen.ID, Action: ActionTake, Driver: driver})
	}
	return ok, err
}

func (t *tracedStore) CreateMove(ctx context.Context, m api.Move, a api.AuditEntry) (api.Move, bool, error) {
	rec, created, err := t.Store.CreateMove(ctx, m, a)
	if m.Campaign != "" && created && err == nil {
		t.put(CampaignTrace{Campaign: m.Campaign, Action: ActionRecord, Item: m.Item, Move: m.ID})
	}
	if errors.Is(err, cells.ErrUnavailable) && m.Campaign != "" {
		t.put(CampaignTrace{Campaign: m.Campaign, Action: actionOther, Item: m.Item, Move: m.ID}) // it may have been recorded
	}
	return rec, created, err
}
