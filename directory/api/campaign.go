// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// CampaignID names a campaign: 1 to 32 bytes of [A-Za-z0-9_-].
type CampaignID string

// Validate reports whether the id is well formed. The error wraps
// [cells.ErrInvalid].
func (c CampaignID) Validate() error {
	if len(c) > 32 || strings.Contains(string(c), ".") {
		return fmt.Errorf("%w: campaign id %q", cells.ErrInvalid, string(c))
	}
	return cells.MoveID(c).Validate()
}

// CampaignState is how far a campaign is.
type CampaignState string

const (
	// CampaignPlanned: a plan that nobody has started. It may be edited.
	CampaignPlanned CampaignState = "PLANNED"
	// CampaignRunning: a directory makes its moves.
	CampaignRunning CampaignState = "RUNNING"
	// CampaignPaused: no move begins; those that run end as they would have.
	CampaignPaused CampaignState = "PAUSED"
	// CampaignAborting: given up; the moves that run end, or are rolled back.
	CampaignAborting CampaignState = "ABORTING"
	// CampaignDone: every move was made or has its result. Final, unless failed moves
	// are tried again.
	CampaignDone CampaignState = "DONE"
	// CampaignAborted: given up, and nothing runs any more. Final.
	CampaignAborted CampaignState = "ABORTED"
)

// Valid reports whether s is one of the states above.
func (s CampaignState) Valid() bool {
	switch s {
	case CampaignPlanned, CampaignRunning, CampaignPaused, CampaignAborting, CampaignDone, CampaignAborted:
		return true
	}
	return false
}

// Final reports whether nothing happens in this state any more.
func (s CampaignState) Final() bool { return s == CampaignDone || s == CampaignAborted }

// ItemState is how far one move of a campaign is.
type ItemState string

const (
	// ItemPending: not begun.
	ItemPending ItemState = "PENDING"
	// ItemRunning: its move, named by Move, is to be made or is being made.
	ItemRunning ItemState = "RUNNING"
	// ItemMoved: the target serves the tenant.
	ItemMoved ItemState = "MOVED"
	// ItemAlready: the tenant was in the target already.
	ItemAlready ItemState = "ALREADY"
	// ItemDeferred: the tenant's budget does not allow a move now. No failure.
	ItemDeferred ItemState = "DEFERRED"
	// ItemFailed: the move was refused or rolled back.
	ItemFailed ItemState = "FAILED"
	// ItemSkipped: not tried, because the plan no longer fits the tenant or the
	// campaign was aborted. No failure.
	ItemSkipped ItemState = "SKIPPED"
)

// Valid reports whether s is one of the states above.
func (s ItemState) Valid() bool {
	switch s {
	case ItemPending, ItemRunning, ItemMoved, ItemAlready, ItemDeferred, ItemFailed, ItemSkipped:
		return true
	}
	return false
}

// Final reports whether the item has its result.
func (s ItemState) Final() bool { return s.Valid() && s != ItemPending && s != ItemRunning }

// CampaignSettings say how a campaign is run.
type CampaignSettings struct {
	// Concurrency is how many moves run at once, 1 to 256; 0 means 4. The directory's
	// own bound on moves that prepare holds beside it.
	Concurrency int `json:"concurrency,omitempty"`
	// PerPair bounds those between the same two cells; 0 is no bound.
	PerPair int `json:"per_pair,omitempty"`
	// PerHour is how many moves begin in an hour at most, evenly spaced; 0 is no
	// bound.
	PerHour int `json:"per_hour,omitempty"`
	// Windows are when moves may begin; none is always. Moves that run when a window
	// ends go on to their end.
	Windows []Window `json:"windows,omitempty"`
	// TimeZone is the IANA name of the windows' zone; "" is UTC.
	TimeZone string `json:"time_zone,omitempty"`
	// StopAfter pauses the campaign: "3" once three moves have failed, "5%" once more
	// than five percent of all have, "none" never. "" means "1".
	StopAfter string `json:"stop_after,omitempty"`
	// Force lets moves exceed their tenants' budgets.
	Force bool `json:"force,omitempty"`
	// UndoWindow is for how long each move can be undone, as "24h" or "0s"; "" is the
	// directory's own.
	UndoWindow string `json:"undo_window,omitempty"`
	// PreferUndo makes a move back to where the tenant came from as the undo of its last
	// move, while that can be undone.
	PreferUndo bool `json:"prefer_undo,omitempty"`
}

// Undo returns the undo window of each move; nil is the directory's own. The
// settings are normalised.
func (s *CampaignSettings) Undo() *time.Duration {
	d, err := time.ParseDuration(s.UndoWindow)
	if err != nil {
		return nil
	}
	return &d
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (s *CampaignSettings) Normalize() error {
	if s.Concurrency == 0 {
		s.Concurrency = 4
	}
	if s.StopAfter == "" {
		s.StopAfter = "1"
	}
	for _, n := range []struct {
		name       string
		v, lo, top int
	}{{"concurrency", s.Concurrency, 1, 256}, {"per_pair", s.PerPair, 0, 256}, {"per_hour", s.PerHour, 0, 1_000_000}} {
		if n.v < n.lo || n.v > n.top {
			return fmt.Errorf("%w: %s is %d; want %d to %d", cells.ErrInvalid, n.name, n.v, n.lo, n.top)
		}
	}
	if _, err := NewSchedule(s.TimeZone, s.Windows); err != nil {
		return err
	}
	if s.UndoWindow != "" {
		if d, err := time.ParseDuration(s.UndoWindow); err != nil || d < 0 || d > cells.MaxUndoWindow {
			return fmt.Errorf("%w: undo_window is %q; want a duration like 24h, 0s to %v", cells.ErrInvalid, s.UndoWindow, cells.MaxUndoWindow)
		}
	}
	_, _, err := s.stop()
	return err
}

// stop returns after how many failures, or beyond which share of all, to stop;
// both 0 is never.
func (s *CampaignSettings) stop() (n int64, share float64, err error) {
	if s.StopAfter == "none" {
		return 0, 0, nil
	}
	if text, ok := strings.CutSuffix(s.StopAfter, "%"); ok {
		f, err := strconv.ParseFloat(text, 64)
		if err == nil && f > 0 && f <= 100 {
			return 0, f / 100, nil
		}
	} else if n, err := strconv.ParseInt(s.StopAfter, 10, 64); err == nil && n > 0 {
		return n, 0, nil
	}
	return 0, 0, fmt.Errorf("%w: stop_after is %q; want a number of failures, a percentage like 5%%, or none", cells.ErrInvalid, s.StopAfter)
}

// Stops reports whether so many failures of total moves stop the campaign.
func (s *CampaignSettings) Stops(failed, total int64) bool {
	n, share, err := s.stop()
	switch {
	case err != nil:
		return true
	case n > 0:
		return failed >= n
	case share > 0:
		return float64(failed) > share*float64(total)
	}
	return false
}

// Schedule returns when moves may begin. The settings are normalised.
func (s *CampaignSettings) Schedule() (*Schedule, error) { return NewSchedule(s.TimeZone, s.Windows) }

// CampaignCounts says how many items are in each state.
type CampaignCounts struct {
	Total    int64 `json:"total"`
	Pending  int64 `json:"pending"`
	Running  int64 `json:"running"`
	Moved    int64 `json:"moved"`
	Already  int64 `json:"already"`
	Deferred int64 `json:"deferred"`
	Failed   int64 `json:"failed"`
	Skipped  int64 `json:"skipped"`
}

// Of returns the count of a state, to be read or changed; nil for no state.
func (c *CampaignCounts) Of(s ItemState) *int64 {
	switch s {
	case ItemPending:
		return &c.Pending
	case ItemRunning:
		return &c.Running
	case ItemMoved:
		return &c.Moved
	case ItemAlready:
		return &c.Already
	case ItemDeferred:
		return &c.Deferred
	case ItemFailed:
		return &c.Failed
	case ItemSkipped:
		return &c.Skipped
	}
	return nil
}

// Finished is how many items have their result.
func (c *CampaignCounts) Finished() int64 { return c.Total - c.Pending - c.Running }

// Campaign is the record of a campaign.
type Campaign struct {
	ID    CampaignID    `json:"id"`
	Name  string        `json:"name,omitempty"`
	State CampaignState `json:"state"`
	// Policy is what the plan was made by; nil for a plan that was given.
	Policy   *PolicySpec      `json:"policy,omitempty"`
	Settings CampaignSettings `json:"settings"`
	Counts   CampaignCounts   `json:"counts"`
	// Rows and Bytes are what the plan moves, as far as it was measured.
	Rows  int64 `json:"rows"`
	Bytes int64 `json:"bytes"`
	// Stays are tenants that the policy wanted elsewhere and that stay, at most
	// MaxStays of them; StaysTotal counts all.
	Stays      []cells.Stay `json:"stays,omitempty"`
	StaysTotal int          `json:"stays_total,omitempty"`
	// Unmeasured is how many of the tenants looked at have no measure of what the
	// policy weighs.
	Unmeasured int `json:"unmeasured,omitempty"`
	// Actor is who planned it, RunBy who last ran or resumed it: its moves are theirs.
	Actor string `json:"actor"`
	RunBy string `json:"run_by,omitempty"`
	// Reason says why it was paused or aborted.
	Reason string `json:"reason,omitempty"`
	// Rollback: an abort rolls back the moves that run and are not decided.
	Rollback bool `json:"rollback,omitempty"`
	// Forgiven are the failures that a later resume has accepted: they count no more
	// for Settings.StopAfter.
	Forgiven int64 `json:"forgiven,omitempty"`
	// Pause is what its moves have cost in service so far, Spent how long they took
	// together.
	Pause time.Duration `json:"pause"`
	Spent time.Duration `json:"spent"`
	// NextPos numbers the next item; numbers are never used again.
	NextPos     int64     `json:"next_pos"`
	OperationID string    `json:"operation_id,omitempty"`
	RequestID   string    `json:"request_id,omitempty"`
	CreatedAt   time.Time `json:"created_at"`
	StartedAt   time.Time `json:"started_at,omitzero"`
	// LastStart is when its last move was begun; the pace goes by it.
	LastStart  time.Time `json:"last_start,omitzero"`
	FinishedAt time.Time `json:"finished_at,omitzero"`
	UpdatedAt  time.Time `json:"updated_at,omitzero"`
	// Driver is the directory that runs it; "" when none does. Seq orders campaigns by
	// creation; Version counts the record's changes. Read-only.
	Driver  string `json:"driver,omitempty"`
	Seq     int64  `json:"seq"`
	Version int64  `json:"version"`

	// Estimate and Waiting are made when the record is read, and not stored.
	Estimate *CampaignEstimate `json:"estimate,omitempty"`
	// Waiting says why no move begins now, if none does.
	Waiting string `json:"waiting,omitempty"`
}

// Driven reports whether there is something to do for a directory.
func (c *Campaign) Driven() bool {
	return c.State == CampaignRunning || c.State == CampaignAborting || c.Counts.Running > 0
}

// Editable reports whether the moves that are not begun may be replaced.
func (c *Campaign) Editable() bool {
	return c.State == CampaignPlanned || c.State == CampaignPaused && c.Counts.Running == 0
}

// CampaignEstimate is what is left, by what moves have cost so far.
type CampaignEstimate struct {
	// Moves is on how many moves it rests.
	Moves int `json:"moves"`
	// Left is how long the rest takes while moves may begin; Ends when that is over,
	// windows included, zero if that is not known.
	Left time.Duration `json:"left"`
	Ends time.Time     `json:"ends,omitzero"`
	// Pause is the median pause of a move; PauseTotal that of all moves that are left.
	Pause      time.Duration `json:"pause"`
	PauseTotal time.Duration `json:"pause_total"`
	// OverBudget is how many of the tenants do not have that much left of their budget,
	// of the first MaxBudgetChecks.
	OverBudget int `json:"over_budget,omitempty"`
}

// Bounds of campaigns.
const (
	// MaxStays bounds the tenants that a record names.
	MaxStays = 200
	// MaxBudgetChecks bounds the budgets that an estimate looks at.
	MaxBudgetChecks = 500
	// MaxCampaignMoves bounds a campaign.
	MaxCampaignMoves = 2_000_000
	// MaxPlanBody is the largest body of a plan, in bytes.
	MaxPlanBody = 256 << 20
)

// CampaignItem is one move of a campaign.
type CampaignItem struct {
	Pos    int64          `json:"pos"`
	Tenant cells.TenantID `json:"tenant"`
	From   cells.CellID   `json:"from"`
	To     cells.CellID   `json:"to"`
	State  ItemState      `json:"state"`
	// Attempt counts how often it was begun; Move is the move of the last attempt. It
	// follows from the campaign, the number and the attempt, so that whoever goes on
	// with an attempt asks for the same move.
	Attempt int          `json:"attempt,omitempty"`
	Move    cells.MoveID `json:"move,omitempty"`
	// Rows and Bytes are what was measured when it was planned.
	Rows   int64         `json:"rows,omitempty"`
	Bytes  int64         `json:"bytes,omitempty"`
	Pause  time.Duration `json:"pause,omitempty"`
	Reason string        `json:"reason,omitempty"`
	// Code is that of the refusal, if Reason is one with a code.
	Code       cells.Code `json:"code,omitempty"`
	StartedAt  time.Time  `json:"started_at,omitzero"`
	FinishedAt time.Time  `json:"finished_at,omitzero"`
}

// ItemMove is the id of the move of an item's attempt.
func ItemMove(c CampaignID, pos int64, attempt int) cells.MoveID {
	return cells.MoveID(fmt.Sprintf("%s.%d.%d", c, pos, attempt))
}

// groupItems is how many items of a campaign are in one group: cells bound their groups.
const groupItems = 500

// ItemGroup is the group of an item's move: moves of one group between the same two cells
// share what they need there.
func ItemGroup(c CampaignID, pos int64) string { return fmt.Sprintf("%s.g%d", c, (pos-1)/groupItems) }

// CampaignList answers GET PathCampaigns, newest first.
type CampaignList struct {
	Campaigns []Campaign `json:"campaigns"`
	Next      int64      `json:"next,omitempty"`
}

// CampaignItems answers GET PathCampaigns/{id}/items, in the plan's order. Next is
// the `after` of the next page, 0 when this is the last.
type CampaignItems struct {
	Items []CampaignItem `json:"items"`
	Next  int64          `json:"next,omitempty"`
}
