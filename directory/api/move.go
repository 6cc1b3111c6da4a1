// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"slices"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// MoveState is how far a move is, as its record tells it. The route decides; the
// record follows it and only ever goes forward.
type MoveState string

const (
	// MovePreparing: waiting for its turn, preflight, snapshot and catch-up, while
	// the source serves. A rollback costs nothing.
	MovePreparing MoveState = "PREPARING"
	// MoveCutting: the tenant's requests are held. It ends in a commit or a rollback.
	MoveCutting MoveState = "CUTTING"
	// MoveCommitted: decided for the target, which is being opened.
	MoveCommitted MoveState = "COMMITTED"
	// MoveCleaning: the target serves; the source's rows are being removed.
	MoveCleaning MoveState = "CLEANING"
	// MoveDone: the target serves, and nothing is left at the source but rows that are
	// kept while the move can be undone; Residue tells. Final.
	MoveDone MoveState = "DONE"
	// MoveRolledBack: the source serves. Final; Residue tells whether the target
	// still holds rows of the attempt.
	MoveRolledBack MoveState = "ROLLED_BACK"
	// MoveRefused: the move never began. Final.
	MoveRefused MoveState = "REFUSED"
)

var moveRank = map[MoveState]int{
	MovePreparing: 1, MoveCutting: 2, MoveCommitted: 3, MoveCleaning: 4, MoveDone: 5, MoveRolledBack: 6, MoveRefused: 6,
}

// Valid reports whether s is one of the states above.
func (s MoveState) Valid() bool { return moveRank[s] > 0 }

// Active reports whether the move still holds its tenant: no other may begin.
func (s MoveState) Active() bool { return s.Valid() && moveRank[s] <= moveRank[MoveCommitted] }

// Final reports whether the record's state changes no more.
func (s MoveState) Final() bool { return moveRank[s] >= moveRank[MoveDone] }

// Before reports whether a record in state s may still go to t. A committed move
// is never rolled back or refused, one that began is never refused.
func (s MoveState) Before(t MoveState) bool {
	switch t {
	case MoveRefused:
		return s == MovePreparing
	case MoveRolledBack:
		return s == MovePreparing || s == MoveCutting
	}
	return moveRank[s] < moveRank[t]
}

// MoveRequest is the body of POST PathMoves.
type MoveRequest struct {
	Tenant cells.TenantID `json:"tenant"`
	To     cells.CellID   `json:"to"`
	// Undo takes the tenant's last move back while its undo window is open. To is the
	// cell that it came from then, or "".
	Undo bool `json:"undo,omitempty"`
	// UndoWindow is for how long after its commit the move can be undone; nil is the
	// directory's default (none for an undo), 0 is not at all.
	UndoWindow *time.Duration `json:"undo_window,omitempty"`
	// DryRun asks for a preflight only: nothing is changed or recorded.
	DryRun bool `json:"dry_run,omitempty"`
	// Force lets the move exceed the tenant's unavailability budget. It overrides
	// nothing else: closed and full cells stay closed.
	Force bool   `json:"force,omitempty"`
	Actor string `json:"actor,omitempty"`
	// Throttle bounds the move in other ways than the directory does; nil: as it does.
	Throttle *Throttle `json:"throttle,omitempty"`
	// OperationID makes a retry safe: the same id answers the same move. "" makes
	// each request a new one.
	OperationID string `json:"operation_id,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *MoveRequest) Normalize() error {
	if err := r.Tenant.Validate(); err != nil {
		return err
	}
	if r.To != "" || !r.Undo {
		if err := r.To.Validate(); err != nil {
			return err
		}
	}
	if w := r.UndoWindow; w != nil && (*w < 0 || *w > cells.MaxUndoWindow) {
		return fmt.Errorf("%w: undo window of %v, want 0 to %v", cells.ErrInvalid, *w, cells.MaxUndoWindow)
	}
	if err := r.Throttle.validate(); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, r.OperationID)
}

// Throttle bounds what a move may cost its cells. A field that is 0 is as the
// directory is configured.
type Throttle struct {
	// RowsPerSecond of copies and removals.
	RowsPerSecond int `json:"rows_per_second,omitempty"`
	// MaxRetained is how many bytes of changes the source may keep for the move; negative
	// is no limit.
	MaxRetained int64 `json:"max_retained,omitempty"`
	// MaxReplicaLag pauses copying while a standby is further behind.
	MaxReplicaLag time.Duration `json:"max_replica_lag,omitempty"`
}

func (t *Throttle) validate() error {
	if t != nil && (t.RowsPerSecond < 0 || t.MaxReplicaLag < 0) {
		return fmt.Errorf("%w: throttle %+v", cells.ErrInvalid, *t)
	}
	return nil
}

func normalizeAsked(actor *string, operation string) error {
	if *actor == "" {
		*actor = "operator"
	}
	if err := checkText("actor", *actor, MaxText); err != nil {
		return err
	}
	return checkText("operation_id", operation, MaxText)
}

// DryRun answers a MoveRequest with DryRun set.
type DryRun struct {
	Tenant cells.TenantID `json:"tenant"`
	From   cells.CellID   `json:"from"`
	To     cells.CellID   `json:"to"`
	// Allowed: nothing known now would refuse the move.
	Allowed bool `json:"allowed"`
	// Code is what the move would be refused with; "" if it is allowed.
	Code cells.Code `json:"code,omitempty"`
	// Refusals are the reasons of the directory, beside the preflight's findings.
	Refusals  []string        `json:"refusals,omitempty"`
	Preflight cells.Preflight `json:"preflight"`
}

// StepTiming is one persisted step of a move.
type StepTiming struct {
	Step string    `json:"step"`
	At   time.Time `json:"at"`
	// Took is the time since the step before, by the driver's clock.
	Took time.Duration `json:"took"`
	// State and Epoch are those of the route after the step.
	State string      `json:"state,omitempty"`
	Epoch cells.Epoch `json:"epoch,omitempty"`
	// Driver is the directory that made the step.
	Driver string `json:"driver,omitempty"`
}

// Move is the record of one move. The route is authoritative for its outcome.
type Move struct {
	ID     cells.MoveID   `json:"id"`
	Tenant cells.TenantID `json:"tenant"`
	From   cells.CellID   `json:"from"`
	To     cells.CellID   `json:"to"`
	State  MoveState      `json:"state"`
	// Step is the last step that was persisted; "queued" before the first.
	Step  string `json:"step"`
	Actor string `json:"actor"`
	Force bool   `json:"force,omitempty"`
	// Throttle is that of the request; nil: as the directory is configured.
	Throttle    *Throttle `json:"throttle,omitempty"`
	OperationID string    `json:"operation_id,omitempty"`
	RequestID   string    `json:"request_id,omitempty"`
	// Campaign that the move is made for, and the number of its item; "" is none.
	Campaign CampaignID `json:"campaign,omitempty"`
	Item     int64      `json:"item,omitempty"`
	// Group is what the move's cells know the moves by that share what they need between
	// the same two cells; "" is none.
	Group string `json:"group,omitempty"`
	// Reason says why the move was refused or rolled back.
	Reason string `json:"reason,omitempty"`
	// Code is what a refused move was refused with, and BUDGET_EXCEEDED of one that was
	// rolled back because its pause did not fit; "" of every other move.
	Code cells.Code `json:"code,omitempty"`
	// Cancel is set when a rollback was asked for before the move began.
	Cancel bool `json:"cancel,omitempty"`
	// Predicted is the pause that was expected before the cut; Pause the one that
	// was measured by the driver, from the quiesce to the activation.
	Predicted time.Duration `json:"predicted"`
	Pause     time.Duration `json:"pause"`
	// Bound is what the cut might take before its decision; past it, it rolls back.
	Bound time.Duration `json:"bound,omitempty"`
	// Seen is for how long clients were refused because of the move; nil until an edge
	// has reported. Pause is charged to the tenant's budget until then, Seen afterwards.
	Seen *time.Duration `json:"seen,omitempty"`
	// EventMark, DataMark and Compared are those of the cut.
	EventMark cells.EventSeq     `json:"event_mark,omitempty"`
	DataMark  string             `json:"data_mark,omitempty"`
	Compared  []cells.Comparison `json:"compared,omitempty"`
	Steps     []StepTiming       `json:"steps,omitempty"`
	// Progress of the running step; nil when there is none.
	Progress *cells.Progress `json:"progress,omitempty"`
	// Rows and Bytes that were copied, as far as the steps told.
	Rows  int64 `json:"rows"`
	Bytes int64 `json:"bytes"`
	// Base is the source's epoch when the move began; Epoch the winner's.
	Base  cells.Epoch `json:"base,omitempty"`
	Epoch cells.Epoch `json:"epoch,omitempty"`
	// Residue is what the loser of the cut still holds; nil once it was removed
	// and the removal verified. A held entry is not to be removed yet.
	Residue []cells.Residue `json:"residue,omitempty"`
	// UndoWindow is for how long the move can be undone after its commit. Undoes is the
	// move that this one takes back; UndoneBy the one that took this one back.
	UndoWindow time.Duration `json:"undo_window,omitempty"`
	Undoes     cells.MoveID  `json:"undoes,omitempty"`
	UndoneBy   cells.MoveID  `json:"undone_by,omitempty"`
	// Error is what the last attempt failed with while the move goes on; Attempts
	// counts the failures.
	Error    string `json:"error,omitempty"`
	Attempts int    `json:"attempts,omitempty"`
	// Driver is the directory that drives the move.
	Driver     string    `json:"driver,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	StartedAt  time.Time `json:"started_at,omitzero"`
	ServedAt   time.Time `json:"served_at,omitzero"`
	FinishedAt time.Time `json:"finished_at,omitzero"`
	UpdatedAt  time.Time `json:"updated_at,omitzero"`
	// Seq orders moves by creation; Version counts the record's changes. Read-only.
	Seq     int64 `json:"seq"`
	Version int64 `json:"version"`
}

// Advance moves the record forward to state s and reports whether it did. A
// record never goes back: a driver that was overtaken cannot rewrite history.
func (m *Move) Advance(s MoveState) bool {
	if !m.State.Before(s) {
		return false
	}
	m.State = s
	return true
}

// Served reports whether the move is decided and the winner serves.
func (m *Move) Served() bool {
	return m.State == MoveCleaning || m.State.Final()
}

// Removable reports whether the loser still holds rows that are to be removed now.
func (m *Move) Removable() bool {
	return slices.ContainsFunc(m.Residue, func(e cells.Residue) bool { return !e.Held() })
}

// MoveList answers GET PathMoves, newest first. Next is the `after` of the next
// page, 0 when this is the last.
type MoveList struct {
	Moves []Move `json:"moves"`
	Next  int64  `json:"next,omitempty"`
}

// MoveLine is one line of a watched move: exactly one field is set. The stream
// ends after the record is final.
type MoveLine struct {
	Move *Move `json:"move,omitempty"`
	// Alive is sent while nothing changes.
	Alive bool `json:"alive,omitempty"`
	// Error ends the stream before the move's end.
	Error string `json:"error,omitempty"`
}

// RollbackRequest is the body of POST PathMoves/{id}/rollback.
type RollbackRequest struct {
	Reason string `json:"reason,omitempty"`
	Actor  string `json:"actor,omitempty"`
}

// Normalize fills defaults and reports what is malformed; the error wraps
// [cells.ErrInvalid].
func (r *RollbackRequest) Normalize() error {
	if r.Reason == "" {
		r.Reason = "asked for by an operator"
	}
	if err := checkText("reason", r.Reason, 4*MaxText); err != nil {
		return err
	}
	return normalizeAsked(&r.Actor, "")
}

// String implements fmt.Stringer: id, tenant, ends and state on one line.
func (m *Move) String() string {
	return fmt.Sprintf("%s %s %s->%s %s/%s", m.ID, m.Tenant, m.From, m.To, m.State, m.Step)
}
