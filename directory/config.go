// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/channel"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/deploy"
	"github.com/cloister-dev/cloister/transfer"
)

// Agents carries out the steps of moves in the cells. [member.AgentClient] does it
// over the channel.
type Agents interface {
	cells.Fencer
	cells.EventBarrier
	cells.Drainer
	cells.DataMover
}

// DefaultUndoWindow is for how long a move can be undone.
const DefaultUndoWindow = 24 * time.Hour

// Config is what a [Server] is made of. The zero value of a field means its
// default where one is named; the others are required.
type Config struct {
	// Name of this directory, unique among those on one store; [a-z0-9-]{1,32}.
	// Default "directory".
	Name string
	// Store and Table are used, not closed, by the server.
	Store Store
	Table cells.RoutingTable

	// Channel is this directory's identity for mutual TLS; ChannelListener is where
	// cells and edges reach it. Both or neither.
	Channel         *channel.Channel
	ChannelListener net.Listener
	// OperatorListener serves the operator interface; nil serves none.
	OperatorListener net.Listener
	// OperatorSHA256 are the SHA-256 of the accepted operator credentials, 64
	// lowercase hex digits each: one, or two while it is rotated. Empty: every
	// operator call is answered NO_OPERATOR_CREDENTIAL.
	OperatorSHA256 []string

	// Agents carries out moves. Nil: [member.AgentClient] over Channel, or nothing
	// when there is no Channel (the stateless profile).
	Agents Agents
	// Stateless: cells share their database. Only drains are asked of them.
	Stateless bool

	// HeartbeatEvery is what members are told; default 500 ms. A member whose
	// heartbeats stop is gone after Lapse; default 2 s. Lapse is at least twice
	// HeartbeatEvery.
	HeartbeatEvery time.Duration
	Lapse          time.Duration
	// SyncEvery is how often members and cells are exchanged with the other
	// directories on the store; default 1 s. Changes are written at once.
	SyncEvery time.Duration
	// AliveEvery is how often a watch without changes shows that it lives; default 1 s.
	AliveEvery time.Duration

	// Moves bounds how many moves run at once before their cut; default 4. Moves
	// that are past it never wait.
	Moves int
	// DrainDeadline bounds the cut of a move; default [cells.DefaultDrainDeadline].
	// MaxPause refuses cuts that are predicted to be longer, and gives up those that
	// are; 0 is no bound. PauseHeadroom is what a cut may take on top of twice its
	// prediction; default [cells.DefaultPauseHeadroom].
	DrainDeadline time.Duration
	MaxPause      time.Duration
	PauseHeadroom time.Duration
	// SweepEvery is how often unfinished work is looked at; default 1 s. TakeOver
	// is for how long a move's driver must have shown no sign of life before another
	// directory takes the move; default 5 s.
	SweepEvery time.Duration
	TakeOver   time.Duration
	// UndoWindow is for how long a move can be undone unless its request says otherwise;
	// default 24 h, negative is not at all. ReturnEvery is how often the changes of a
	// tenant whose move can be undone are brought to the cell that it came from; default 5 s.
	UndoWindow  time.Duration
	ReturnEvery time.Duration
	// RowsPerSecond throttles copies and removals; 0 is unlimited. Limits bound what a
	// move may cost its cells. A move may be asked for with others of its own.
	RowsPerSecond int
	Limits        transfer.Limits
	// Budget is each tenant's unavailability allowance; nil keeps no budgets.
	Budget *cells.BudgetMeter

	// ReceiptKey signs the receipts of moves; nil makes none. A receipt is ended
	// ReceiptGrace after the last statement that had to be made, so that edges which
	// report late are in it; default 30 s.
	ReceiptKey   ed25519.PrivateKey
	ReceiptGrace time.Duration

	// PlacementsPerMinute bounds what each cell places for itself, at this directory;
	// default 600. Operators are not counted.
	PlacementsPerMinute int
	// Pinned: placements never change. Moves and deletions are refused.
	Pinned bool
	// Deployments are the deployments that are cells, if there are any: a move from or to
	// one is made in a movable directory only, and the tenant's placement and the cells'
	// tenancy rows follow it. Nil is none.
	Deployments deploy.Store

	// HaltAt names a step ([cells.Step]) after which the executor stops for ever,
	// once the step is persisted and noted in the move's record. For crash tests.
	HaltAt string
	// StepHook is called after each persisted step of each move, after it was noted;
	// an error ends this process's part in the move until the sweeper resumes it.
	StepHook func(context.Context, cells.StepEvent) error
	// Now is the clock that stamps routes, sets deadlines and measures pauses; default
	// time.Now. It decides nothing that safety depends on.
	Now func() time.Time
	// CampaignHook is called after each persisted step of each campaign with the
	// number of the item, if the step belongs to one; an error ends this process's part
	// in the campaign until it is taken on again.
	CampaignHook func(ctx context.Context, step string, id api.CampaignID, pos int64) error
	// RolloutHook is called after each persisted step of each rollout, as package
	// directory/rollout names them; an error ends this process's part in the rollout until
	// it is taken on again.
	RolloutHook func(ctx context.Context, step string, id api.RolloutID) error
	// Trace, if set, receives what this process writes and orders, for
	// [CheckTrace]. Writes are not concurrent.
	Trace io.Writer

	// Logger; default discards.
	Logger *slog.Logger
}

func (c *Config) normalize() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	if c.Name == "" {
		c.Name = "directory"
	}
	if err := cells.CellID(c.Name).Validate(); err != nil {
		return fmt.Errorf("directory name: %w", err)
	}
	if c.Store == nil || c.Table == nil {
		return fmt.Errorf("%w: a directory needs a store and a routing table", cells.ErrInvalid)
	}
	if c.Deployments != nil && c.Stateless {
		c.Deployments = nil // cells that share a database are no deployments
	}
	if (c.Channel == nil) != (c.ChannelListener == nil) {
		return fmt.Errorf("%w: Channel and ChannelListener go together", cells.ErrInvalid)
	}
	def(&c.HeartbeatEvery, 500*time.Millisecond)
	def(&c.Lapse, 2*time.Second)
	if c.Lapse < 2*c.HeartbeatEvery {
		return fmt.Errorf("%w: Lapse %v is shorter than two heartbeats", cells.ErrInvalid, c.Lapse)
	}
	def(&c.SyncEvery, time.Second)
	def(&c.AliveEvery, time.Second)
	def(&c.DrainDeadline, cells.DefaultDrainDeadline)
	def(&c.PauseHeadroom, cells.DefaultPauseHeadroom)
	def(&c.SweepEvery, time.Second)
	def(&c.TakeOver, 5*time.Second)
	if c.UndoWindow == 0 {
		c.UndoWindow = DefaultUndoWindow
	}
	if c.UndoWindow = max(c.UndoWindow, 0); c.UndoWindow > cells.MaxUndoWindow {
		return fmt.Errorf("%w: undo window %v", cells.ErrInvalid, c.UndoWindow)
	}
	def(&c.ReturnEvery, 5*time.Second)
	def(&c.ReceiptGrace, 30*time.Second)
	if c.Moves <= 0 {
		c.Moves = 4
	}
	if c.PlacementsPerMinute <= 0 {
		c.PlacementsPerMinute = 600
	}
	if _, err := parseHashes(c.OperatorSHA256); err != nil {
		return err
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}
