// SPDX-License-Identifier: Apache-2.0

package member

import (
	"encoding/json"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/member/vitals"
	"github.com/cloister-dev/cloister/transfer"
)

// Paths of the control plane that members call, over the channel.
const (
	PathHeartbeat = "/cells/v1/members/heartbeat" // POST Heartbeat -> HeartbeatReply
	PathLeave     = "/cells/v1/members/leave"     // POST Heartbeat (Instance counts)
	PathRoutes    = "/cells/v1/routes"            // table/remote: list, get, watch
)

// Paths that a member's agent serves, over the channel. All are POST with a JSON
// body; those marked (stream) answer NDJSON lines of StepLine, the last of which
// carries Result or Error. A refusal has another status than 200 and one StepLine
// with Error as its body.
const (
	PathDrain       = "/cells/v1/agent/drain"        // cells.TenantRoute -> {}
	PathFenceOpen   = "/cells/v1/agent/fence/open"   // cells.FenceOrder -> {}
	PathFenceClose  = "/cells/v1/agent/fence/close"  // cells.FenceOrder -> {}
	PathEventsPause = "/cells/v1/agent/events/pause" // cells.BarrierOrder -> EventsReply
	PathEventsStart = "/cells/v1/agent/events/start" // EventsStart -> {}
	PathSurvey      = "/cells/v1/agent/survey"       // SurveyRequest -> transfer.Survey
	PathPrepare     = "/cells/v1/agent/prepare"      // MoveOrder -> (stream) cells.Prediction
	PathFinish      = "/cells/v1/agent/finish"       // MoveOrder -> (stream) FinishReply
	PathDiscard     = "/cells/v1/agent/discard"      // DiscardOrder -> (stream) {}
	PathReturn      = "/cells/v1/agent/return"       // MoveOrder (Move is a way back) -> cells.Returned
	PathHoldings    = "/cells/v1/agent/holdings"     // HoldingsRequest -> Holdings
	PathFree        = "/cells/v1/agent/free"         // FreeOrder -> {}
	PathTenancy     = "/cells/v1/agent/tenancy"      // TenancyOrder -> {}
	// PathTransfer is the prefix of what one cell's agent serves to another's; see
	// package transfer for what is below it.
	PathTransfer = transfer.PathTransfer
)

// HeaderTimeout carries how many milliseconds the caller still waits, so that the
// agent can say what held it up instead of being cut off.
const HeaderTimeout = "Cell-Timeout-Ms"

// Heartbeat is how a process says that it lives, and where.
type Heartbeat struct {
	Cell     cells.CellID `json:"cell"`
	Instance string       `json:"instance"` // unique per process start
	Version  string       `json:"version"`
	PID      int          `json:"pid"`
	// ServiceURL is where edges reach the process; AgentURL where the control plane
	// and other cells' agents do (https, channel).
	ServiceURL string `json:"service_url"`
	AgentURL   string `json:"agent_url"`
	// Ready: routes were read, fences are reconciled, the service says so.
	Ready bool `json:"ready"`
	// Reason says why not ready.
	Reason string `json:"reason,omitempty"`
	// StoreDown: the process lives and cannot reach the cell's store. Edges may still
	// ask it when none of the cell is ready: it says so itself.
	StoreDown bool `json:"store_down,omitempty"`
	// Revision is how far this process's view of the routes is.
	Revision cells.Revision `json:"revision"`
	// Engine is that of the cell's store; "" when the service keeps no state: then
	// there is nothing to fence, to pause or to move.
	Engine string `json:"engine,omitempty"`
	// Load for people and policies.
	InFlight int64 `json:"in_flight"`
	// Busiest are the tenants with the most admissions a second in this process, the
	// busiest first, at most MaxBusiest of them.
	Busiest []TenantLoad `json:"busiest,omitempty"`
	// Vitals is how all requests since the process's start went, at Version. Nil: none
	// has ended yet.
	Vitals *vitals.Counts `json:"vitals,omitempty"`
}

// MaxBusiest bounds Heartbeat.Busiest.
const MaxBusiest = 32

// TenantLoad is how busy a tenant is: requests, streams and jobs that were
// admitted, a second, over about the last minute.
type TenantLoad struct {
	Tenant    cells.TenantID `json:"tenant"`
	PerSecond float64        `json:"per_second"`
}

// HeartbeatReply tells the member how often to report and when it counts as gone.
type HeartbeatReply struct {
	Every time.Duration `json:"every"`
	Lapse time.Duration `json:"lapse"`
}

// EventsReply answers PathEventsPause.
type EventsReply struct {
	Mark cells.EventSeq `json:"mark"`
}

// EventsStart is the body of PathEventsStart.
type EventsStart struct {
	cells.BarrierOrder
	Mark cells.EventSeq `json:"mark"`
}

// SurveyRequest is the body of PathSurvey.
type SurveyRequest struct {
	Tenant cells.TenantID `json:"tenant"`
	// Group, Source and Target are those of the move that is to be begun; they may be
	// empty. A member of a group may need less of the source.
	Group  transfer.GroupID `json:"group,omitempty"`
	Source cells.CellID     `json:"source,omitempty"`
	Target cells.CellID     `json:"target,omitempty"`
}

// HoldingsRequest is the body of PathHoldings.
type HoldingsRequest struct {
	Cell cells.CellID `json:"cell"`
	// Limit bounds the tenants of each list, 1 to MaxHoldings.
	Limit int `json:"limit"`
}

// MaxHoldings bounds HoldingsRequest.Limit.
const MaxHoldings = 1000

// Holdings are the tenants that a cell's own store knows of, whatever the routes say.
type Holdings struct {
	// Open are tenants whose fence is open: their writes commit here.
	Open []cells.TenantID `json:"open"`
	// Rows are tenants that have rows in a table.
	Rows []transfer.Holding `json:"rows"`
}

// MoveOrder is the body of PathPrepare and PathFinish, sent to the target.
type MoveOrder struct {
	Move cells.MoveRef `json:"move"`
	// Sources are the agent URLs of live processes of the source cell.
	Sources []string `json:"sources"`
	// RowsPerSecond throttles the copy; 0 is unlimited.
	RowsPerSecond int `json:"rows_per_second,omitempty"`
	// Limits bound what the move may cost both cells.
	Limits transfer.Limits `json:"limits,omitzero"`
	// Group is that of the moves which may share what they need; "" is none.
	Group transfer.GroupID `json:"group,omitempty"`
}

// FinishReply is the result of PathFinish.
type FinishReply struct {
	Mark string `json:"mark"`
	// Compared is what was compared up to the mark, if the agent tells.
	Compared []cells.Comparison `json:"compared,omitempty"`
}

// DiscardOrder is the body of PathDiscard.
type DiscardOrder struct {
	Tenant  cells.TenantID `json:"tenant"`
	Residue cells.Residue  `json:"residue"`
	// RowsPerSecond throttles the removal; 0 is unlimited.
	RowsPerSecond int `json:"rows_per_second,omitempty"`
}

// FreeOrder is the body of PathFree, sent to the cell that captures the way back of
// a move that can no longer be undone.
type FreeOrder struct {
	Cell   cells.CellID   `json:"cell"`
	Tenant cells.TenantID `json:"tenant"`
	Move   cells.MoveID   `json:"move"`
}

// TenancyOrder is the body of PathTenancy: what a cell that is a whole deployment is to do
// with its tenancy row of a tenant.
type TenancyOrder struct {
	Cell   cells.CellID   `json:"cell"`
	Tenant cells.TenantID `json:"tenant"`
	Do     TenancyDo      `json:"do"`
	// Epoch that the fence is about to open at, for a hold: one below the fence's is
	// late, and refused. For an unhold that of the tenant's route, as it was read before
	// its placement: a fence that is closed above it is a move's that brings it back.
	Epoch cells.Epoch `json:"epoch,omitempty"`
}

// TenancyDo is what a TenancyOrder asks for.
type TenancyDo string

// The three: say whether the cell keeps such rows; write the row, before the fence opens
// here; remove it, while the fence is closed here.
const (
	TenancyCheck  TenancyDo = "check"
	TenancyHold   TenancyDo = "hold"
	TenancyUnhold TenancyDo = "unhold"
)

// StepLine is one line of a streamed answer. A line without any of the three is a
// sign of life.
type StepLine struct {
	Progress *cells.Progress `json:"progress,omitempty"`
	Result   json.RawMessage `json:"result,omitempty"`
	Error    *StepError      `json:"error,omitempty"`
}

// StepError carries an error over the wire. It matches, with errors.Is, the
// sentinel of package cells (or transfer) that its Kind names.
type StepError struct {
	// Kind is "stale_order", "fenced", "not_found", "invalid", "unavailable",
	// "conflict", "return_lost", "not_applicable", "other_move", "mismatch", "forbidden", "timeout" or
	// "" for anything else.
	Kind    string `json:"kind,omitempty"`
	Message string `json:"message"`
}
