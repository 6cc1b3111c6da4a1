// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"fmt"
	"time"
)

// Step names one step of an operation of the controller.
type Step string

// The steps, in the order in which a move takes them. A step is reported when it
// is done; those marked (row) have just been written to the routing table.
const (
	StepClaim     Step = "claim"     // (row) the tenant is placed
	StepPreflight Step = "preflight" // the dry run found nothing that forbids the move
	StepBegin     Step = "begin"     // (row) the move exists; the source serves
	StepPrepare   Step = "prepare"   // the target has all but the last changes
	StepQuiesce   Step = "quiesce"   // (row) QUIESCING: the pause begins
	StepGates     Step = "gates"     // (row) DRAINING: gates are told to close
	StepDrain     Step = "drain"     // nothing is in flight
	StepCopy      Step = "copy"      // (row) COPYING: Epoch is Base+1
	StepFence     Step = "fence"     // the source's fence is closed
	StepEvents    Step = "events"    // the source's events are paused at a mark
	StepFinish    Step = "finish"    // the target has everything, verified
	StepCommit    Step = "commit"    // (row) COMMITTING at the target: decided
	StepRollback  Step = "rollback"  // (row) COMMITTING at the source: decided
	StepStart     Step = "start"     // the winner's events may flow
	StepOpen      Step = "open"      // the winner's fence is open
	StepActivate  Step = "activate"  // (row) ACTIVE at the target: the pause is over
	StepReopen    Step = "reopen"    // (row) ACTIVE at the source again
	StepDiscard   Step = "discard"   // a loser's rows are gone, verified
	StepRemoved   Step = "removed"   // (row) its entry of Residue is dropped
	StepReturn    Step = "return"    // changes were brought back to the cell that keeps the rows; hooks are not called
	StepWindow    Step = "window"    // (row) the undo window is closed
	StepDelete    Step = "delete"    // (row) DELETING
	StepDeleted   Step = "deleted"   // (row) DELETED
)

// StepEvent reports a step, or how far it is, or that it failed.
type StepEvent struct {
	Tenant TenantID `json:"tenant"`
	Move   MoveRef  `json:"move,omitzero"`
	Step   Step     `json:"step"`
	// Route is the tenant's row as the driver knows it: for a row step, what it has
	// written.
	Route TenantRoute `json:"route"`
	// Progress is set while the step is going on.
	Progress *Progress `json:"progress,omitempty"`
	// Predicted is the pause that is expected of the cut; set with StepPrepare.
	Predicted time.Duration `json:"predicted,omitempty"`
	// Bound is the most that the cut may take before it is given up; set with StepQuiesce.
	Bound time.Duration `json:"bound,omitempty"`
	// Compared is what the mover compared; set with StepFinish if it is a [Prover].
	Compared []Comparison `json:"compared,omitempty"`
	// Err is set when the step failed. A step may be tried again after that.
	Err error     `json:"-"`
	At  time.Time `json:"at"`
}

// Wrote reports whether the step is one that writes the tenant's row.
func (s Step) Wrote() bool {
	switch s {
	case StepClaim, StepBegin, StepQuiesce, StepGates, StepCopy, StepCommit, StepRollback, StepActivate, StepReopen,
		StepRemoved, StepWindow, StepDelete, StepDeleted:
		return true
	}
	return false
}

// StepTiming says when a step was done and how long it took, seen from one driver.
type StepTiming struct {
	Step Step          `json:"step"`
	At   time.Time     `json:"at"`
	Took time.Duration `json:"took"`
}

// MovePlan asks for one move.
type MovePlan struct {
	TenantID TenantID `json:"tenant"`
	// FromCell is the cell that the tenant is expected in; "" takes it from where it is.
	FromCell CellID `json:"from,omitempty"`
	ToCell   CellID `json:"to"`
	// MoveID names the attempt; "" makes a random one. One id is one attempt: a plan
	// with the id of a move that is in progress joins it, one that is over is refused
	// or, if it was committed, succeeds at once.
	MoveID MoveID `json:"move,omitempty"`
	// Actor is who asks, for the audit.
	Actor string `json:"actor,omitempty"`
	// Force moves although the predicted pause exceeds the budget or the bound. With a
	// [BudgetMeter] it is recorded there, with Actor, and binds whoever resumes the move.
	Force bool `json:"force,omitempty"`
	// UndoWindow is for how long after the commit the source keeps its rows and
	// receives the target's changes, so that the move can be undone; 0 is not at all.
	// It takes a [DataMover] that is a [Returner].
	UndoWindow time.Duration `json:"undo_window,omitempty"`
	// Undoes is the move to take back, whose window is open; ToCell is its source then.
	// [MoveController.Undo] fills in both.
	Undoes MoveID `json:"undoes,omitempty"`
}

func (p MovePlan) validate() error {
	if err := p.TenantID.Validate(); err != nil {
		return err
	}
	if err := p.ToCell.Validate(); err != nil {
		return fmt.Errorf("target: %w", err)
	}
	if p.FromCell != "" {
		if err := p.FromCell.Validate(); err != nil {
			return fmt.Errorf("source: %w", err)
		}
	}
	if p.FromCell == p.ToCell {
		return fmt.Errorf("%w: a move from %s to itself", ErrInvalid, p.ToCell)
	}
	if p.MoveID.Deletion() {
		return fmt.Errorf("%w: move ids that begin with %q belong to deletions", ErrInvalid, deletionPrefix)
	}
	if p.UndoWindow < 0 || p.UndoWindow > MaxUndoWindow {
		return fmt.Errorf("%w: undo window of %v, want 0 to %v", ErrInvalid, p.UndoWindow, MaxUndoWindow)
	}
	if p.MoveID != "" {
		return p.MoveID.Validate()
	}
	return nil
}

// MoveResult is what came of a move, also when an error comes with it.
type MoveResult struct {
	// Route is the last row that the driver saw.
	Route TenantRoute `json:"route"`
	// Move is zero if no move was begun: the tenant was there already, or the move
	// was refused first.
	Move MoveRef `json:"move,omitzero"`
	// Predicted is the pause that was expected before the cut.
	Predicted time.Duration `json:"predicted"`
	// Bound is the most that the cut was allowed to take before its decision; 0 if this
	// driver did not begin it.
	Bound time.Duration `json:"bound,omitempty"`
	// Pause is the time for which no cell served: from the row QUIESCING to the row
	// ACTIVE. A driver that took over in the middle takes its beginning from the
	// reservation in the budget, or estimates it from the deadline.
	Pause time.Duration `json:"pause"`
	// Steps are those that this driver took.
	Steps []StepTiming `json:"steps,omitempty"`
	// RolledBack: the source serves again, at a higher epoch.
	RolledBack bool `json:"rolled_back"`
	// Reason says why.
	Reason string `json:"reason,omitempty"`
}

// Claim asks for a tenant's first placement.
type Claim struct {
	Tenant TenantID `json:"tenant"`
	Cell   CellID   `json:"cell"`
	// OperationID names the caller's operation: the same one again gets its first
	// answer, whatever cell it asks for. "" names none. At most 256 bytes.
	OperationID string `json:"operation,omitempty"`
	// Actor is who asks, for the audit.
	Actor string `json:"actor,omitempty"`
	// New says that nobody has ever served the tenant, the default cell of
	// [WithFallbackCell] included, so that it may be placed elsewhere without a
	// move. If it is wrong, what the default cell has written is left behind.
	New bool `json:"new,omitempty"`
}

// PreflightError refuses a move because of what the dry run found. It wraps
// [ErrInvalid].
type PreflightError struct {
	Preflight Preflight
}

// Error names the first finding that forbids the move.
func (e *PreflightError) Error() string {
	for _, f := range e.Preflight.Findings {
		if f.Blocking {
			return fmt.Sprintf("%v: preflight: %s: %s", ErrInvalid, f.Code, f.Message)
		}
	}
	return fmt.Sprintf("%v: preflight", ErrInvalid)
}

// Unwrap returns [ErrInvalid].
func (e *PreflightError) Unwrap() error { return ErrInvalid }
