// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"encoding/json"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Position is a point in a source's captured changes; opaque and comparable only
// by the source that gave it.
type Position string

// TableInfo describes one tenant table as a store sees it.
type TableInfo struct {
	guard.Table
	Columns []Column `json:"columns"`
	Key     []string `json:"key"`
	// Rows and Bytes are estimates for the tenant.
	Rows  int64 `json:"rows"`
	Bytes int64 `json:"bytes"`
}

// Column is one column of a tenant table.
type Column struct {
	Name      string `json:"name"`
	Type      string `json:"type"`
	Generated bool   `json:"generated,omitempty"`
}

// Survey is what one side of a move looks like to a preflight.
type Survey struct {
	Engine string      `json:"engine"` // "postgres", "sqlite"
	Tables []TableInfo `json:"tables"`
	// Fingerprint covers names, columns, types and keys of all tables.
	Fingerprint string          `json:"fingerprint"`
	Findings    []cells.Finding `json:"findings"`
}

// Batch is a piece of a snapshot or of the changes: rows of one table, or a run
// of changes that commits at Upto.
type Batch struct {
	Table string `json:"table,omitempty"`
	// Rows of a snapshot, encoded by the engine that made them.
	Rows json.RawMessage `json:"rows,omitempty"`
	// Changes in commit order, encoded by the engine.
	Changes json.RawMessage `json:"changes,omitempty"`
	Count   int64           `json:"count"`
	Bytes   int64           `json:"bytes"`
	// LastKey is where a snapshot goes on after this batch.
	LastKey json.RawMessage `json:"last_key,omitempty"`
	// Upto is the position reached when the batch is applied.
	Upto Position `json:"upto,omitempty"`
	// End is set on the last batch of a table, or of changes up to a mark.
	End bool `json:"end,omitempty"`
}

// Digest is an order-independent digest of a set of rows.
type Digest struct {
	Table string `json:"table"`
	Rows  int64  `json:"rows"`
	Sum   string `json:"sum"`
}

// The interfaces Source and Sink, the engine that drives them and the protocol
// between two agents are in source.go, sink.go, mover.go and wire.go.

// Agent is everything that a cell's agent does with the rows of moves; the
// member serves it to the driver and to the other cell. It is made by New from a
// Source and a Sink of one store.
type Agent interface {
	// Survey describes the tenant's rows here and what stands in a move's way.
	Survey(ctx context.Context, tenant cells.TenantID) (Survey, error)
	// Prepare, at the target: claim the tenant's fence closed at m.CloseEpoch(),
	// snapshot from src, catch up, verify what is there, return when a cut is worth it.
	Prepare(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (cells.Prediction, error)
	// Finish, at the target: apply up to the source's final position, verify, and
	// return the mark. The source's fence is closed.
	Finish(ctx context.Context, m cells.MoveRef, src Source, progress func(cells.Progress)) (string, error)
	// Discard, at the loser: release captures of the move and remove the tenant's
	// rows while the fence is closed at exactly r.Epoch.
	Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, progress func(cells.Progress)) error
	// Source is this cell as the source of a move.
	Source() Source
}
