// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/rollout"
	"github.com/cloister-dev/cloister/member/vitals"
)

// ErrRolloutActive: a cell has a rollout that is not over. Returned by CreateRollout.
var ErrRolloutActive = errors.New("directory: a cell has a rollout already")

// RolloutFilter selects rollouts, newest first.
type RolloutFilter struct {
	State api.RolloutState // "" is all
	// OperationID keeps the rollout that was started with it; "" is all.
	OperationID string
	// After is the Seq of the last record of the page before; 0 starts at the newest.
	After int64
	// Limit; 0 means api.DefaultPage.
	Limit int
}

// VitalsRow is what one process counted of one cell at one version, since its start.
type VitalsRow struct {
	// Measured is api.MeasuredByEdge or api.MeasuredByCell; Source names the process.
	Measured, Source string
	vitals.Row
}

// VitalsTotal is what all processes of a kind counted of one cell at one version.
type VitalsTotal struct {
	Measured string
	vitals.Row
}

// RolloutStore keeps rollouts and what they are judged by; it is a part of [Store],
// whose rules for errors and audit entries hold.
type RolloutStore interface {
	rollout.Store

	// CreateRollout records a rollout and its units, which have their numbers and waves,
	// and holds its cells until it is final. A repeated operation id answers the first
	// record and created false. ErrRolloutActive.
	CreateRollout(ctx context.Context, r api.Rollout, units []api.RolloutUnit, audit api.AuditEntry) (rec api.Rollout, created bool, err error)
	// RolloutHeld is ErrRolloutActive if a cell of r has a rollout that is not over: what
	// CreateRollout would find now. Nothing is written.
	RolloutHeld(ctx context.Context, r *api.Rollout) error
	// Rollouts lists records.
	Rollouts(ctx context.Context, f RolloutFilter) ([]api.Rollout, error)

	// RolloutBeats returns the drivers of all rollouts that are not final.
	RolloutBeats(ctx context.Context) ([]RolloutBeat, error)
	// BeatRollouts raises the beats of the rollouts that driver drives.
	BeatRollouts(ctx context.Context, driver string) error
	// TakeRollout makes driver the driver of the rollout if its beat is still seen; it
	// reports whether it did.
	TakeRollout(ctx context.Context, seen RolloutBeat, driver string) (bool, error)

	// SaveVitals records counts, each in place of an earlier one of the same process; one
	// that has fewer requests changes nothing.
	SaveVitals(ctx context.Context, rows []VitalsRow, at time.Time) error
	// Vitals sums up all counts, by who measured, cell and version. No sum ever falls.
	Vitals(ctx context.Context) ([]VitalsTotal, error)
	// FoldVitals adds up the counts of processes that were not heard since a moment. One
	// that is heard again after all counts twice.
	FoldVitals(ctx context.Context, before time.Time) error
}

// Beat is a sign of life of the driver of something; Driver is "" when it has none.
type Beat[ID ~string] struct {
	ID     ID
	Driver string
	Beat   int64
}

// MoveBeat, CampaignBeat and RolloutBeat are signs of life of a move's, a campaign's
// and a rollout's driver.
type (
	MoveBeat     = Beat[cells.MoveID]
	CampaignBeat = Beat[api.CampaignID]
	RolloutBeat  = Beat[api.RolloutID]
)
