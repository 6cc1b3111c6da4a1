// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"encoding/json"
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Table names a table of the service that holds tenants' rows.
type Table struct {
	// Name, optionally schema-qualified on Postgres.
	Name string `json:"name"`
	// TenantColumn holds the tenant id, as text. It must be part of the primary key.
	TenantColumn string `json:"tenant_column"`
}

// Fence is a tenant's fence row in a cell's database.
type Fence struct {
	Tenant cells.TenantID `json:"tenant"`
	Epoch  cells.Epoch    `json:"epoch"`
	// Floor <= Epoch: an open fence admits epochs from Floor to Epoch.
	Floor cells.Epoch  `json:"floor"`
	Open  bool         `json:"open"`
	Move  cells.MoveID `json:"move,omitempty"`
	// Seq is the last event_seq given out in this cell.
	Seq cells.EventSeq `json:"seq"`
	// Published is the last event_seq that the relay has published.
	Published cells.EventSeq `json:"published"`
	// Paused: the relay publishes nothing of the tenant.
	Paused bool `json:"paused"`
}

// Keeper is the administration of fences and events in one cell's database: what
// a cell's agent uses to carry out a move's orders. Every implementation passes
// the suite of package guardtest. Safe for concurrent use, by several processes.
type Keeper interface {
	// Install creates or migrates the guard's own tables, and protects the
	// service's tables where the store can. Idempotent; older builds run on it.
	Install(ctx context.Context, tables []Table) error

	// OpenFence opens the fence at o.Epoch (creating the row if there is none).
	// A fence that is open already keeps its floor if that is at least o.Floor.
	// The same order again succeeds. [cells.ErrStaleOrder] if the fence is at a
	// higher epoch, or closed at the same one.
	OpenFence(ctx context.Context, o cells.FenceOrder) error
	// CloseFence closes the fence at o.Epoch (creating the row if there is none),
	// after waiting for every transaction that was admitted and is still open.
	// [cells.ErrStaleOrder] if the fence is at a higher epoch, or open at the same one, or
	// closed at the same one by another move.
	CloseFence(ctx context.Context, o cells.FenceOrder) error
	// Fence returns the tenant's row; [cells.ErrNotFound] when there is none.
	Fence(ctx context.Context, tenant cells.TenantID) (Fence, error)
	// Fences lists rows in tenant order, after the given tenant, at most limit.
	Fences(ctx context.Context, after cells.TenantID, limit int) ([]Fence, error)

	// PauseEvents stops the relay for one tenant, in every process of the cell:
	// when it returns no publication is in flight and none starts until StartEvents.
	// It returns the last event_seq that is committed.
	PauseEvents(ctx context.Context, o cells.BarrierOrder) (cells.EventSeq, error)
	// StartEvents numbers on after mark (never lower than what the cell has given
	// out) and lets the relay publish what is not yet published.
	StartEvents(ctx context.Context, o cells.BarrierOrder, mark cells.EventSeq) error

	// ForgetEvents drops the numbering of a tenant whose rows were removed here, while
	// its fence is closed at exactly o.Epoch by o.Move: where the tenant comes back to, it is
	// numbered by what comes with it, or from 1. [cells.ErrStaleOrder] otherwise.
	// Idempotent.
	ForgetEvents(ctx context.Context, o cells.FenceOrder) error

	// MovedTables are the guard's own tables whose rows belong to the tenant and
	// travel with it: the outbox, and how far it was published.
	MovedTables() []Table
}

// Event is one row of the outbox. Payload is owned by the receiver.
type Event struct {
	Tenant cells.TenantID `json:"tenant"`
	Seq    cells.EventSeq `json:"event_seq"`
	// Epoch and Cell are those of the transaction that wrote the event.
	Epoch cells.Epoch  `json:"epoch"`
	Cell  cells.CellID `json:"cell,omitempty"`
	// ID is unique for ever; consumers drop what they have seen by it.
	ID      string          `json:"id"`
	Type    string          `json:"type"`
	Payload json.RawMessage `json:"payload"`
	At      time.Time       `json:"at"`
}

// Outbox reads committed events in order; for relays and for event streams.
type Outbox interface {
	// Events returns committed events of the tenant with Seq > after, in order,
	// without gaps, at most limit.
	Events(ctx context.Context, tenant cells.TenantID, after cells.EventSeq, limit int) ([]Event, error)
	// Wait blocks until the tenant may have events with Seq > after, or the context
	// ends. Spurious returns are allowed.
	Wait(ctx context.Context, tenant cells.TenantID, after cells.EventSeq) error
}

// Publisher sends events outside. Publish returns nil only when all of them are
// accepted; it is called with events of one tenant, in order, and again with the
// same ones after an error or a crash (at least once, in order).
type Publisher interface {
	Publish(ctx context.Context, events []Event) error
}

// RelayStore is an outbox that a [Relay] can publish from.
type RelayStore interface {
	Outbox
	// Backlog lists tenants in order, after the given one, at most limit, that have
	// committed events to be published: not published yet, the fence open, not paused.
	Backlog(ctx context.Context, after cells.TenantID, limit int) ([]cells.TenantID, error)
	// PublishNext takes the tenant's turn in the cell, gives the next events, at most
	// limit, to publish and records them as published when it returns nil. The
	// context of publish ends with [ErrPaused] as its cause when the tenant is paused; a
	// call of PauseEvents waits until publish has returned.
	// It returns how many were published, also with an error that is a
	// [PartialError] of publish: 0 and no error when there is nothing to
	// publish (no events, a closed fence, paused). [ErrBusy] when another
	// process has the turn.
	PublishNext(ctx context.Context, tenant cells.TenantID, limit int, publish func(context.Context, []Event) error) (int, error)
	// NewFeed returns a feed of what this process hears of new events, from now on.
	NewFeed() (Feed, error)
}

// Feed tells which tenants may have new events. One goroutine uses it.
type Feed interface {
	// Next blocks until there are any, or the context or the guard ends. The tenant
	// "" says that some may have been missed.
	Next(ctx context.Context) ([]cells.TenantID, error)
	// Close releases the feed.
	Close()
}

// MaxEventType is the longest event type, in bytes.
const MaxEventType = 200
