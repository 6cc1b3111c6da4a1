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
