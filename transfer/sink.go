// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard"
)

// Sink is a cell's database as the target of a move, and as the loser of one.
// Safe for concurrent use by several processes.
type Sink interface {
	// Survey describes the tenant's rows here.
	Survey(ctx context.Context, tenant cells.TenantID) (Survey, error)
	// Stale fails with [cells.ErrStaleOrder] if the fence here has passed the move.
	Stale(ctx context.Context, m cells.MoveRef) error
	// Import waits until no other process imports for the tenant, claims the fence
	// closed at m.CloseEpoch() by m, and returns the import as far as it got.
	// [cells.ErrStaleOrder] if the fence has passed that; [cells.ErrInvalid] if there
	// are rows of the tenant which the move has not brought.
	Import(ctx context.Context, m cells.MoveRef) (Import, error)
	// ImportBack is Import for a way back: it begins without a copy, with the rows that
	// m's move left here, which are those of the owner at start. The capture that the
	// move had here is ended. [cells.ErrStaleOrder] if the fence has passed the move or
	// the rows are being removed; [cells.ErrReturnLost] if the import began at another
	// position.
	ImportBack(ctx context.Context, m cells.MoveRef, start Position) (Import, error)
	// Free ends the way back of a move that this store captures, and forgets it.
	// Idempotent.
	Free(ctx context.Context, tenant cells.TenantID, move cells.MoveID) error
	// Discard removes the tenant's rows here; see [Agent.Discard].
	Discard(ctx context.Context, tenant cells.TenantID, r cells.Residue, opts RemoveOptions) error
	// Sweep frees what captures and imports of decided moves have left behind: those
	// whose fence here is open at or above the move's OpenEpoch. A way back, whose
	// owner is open at just that epoch, stays until the fence has passed it. It ends
	// captures for which more is kept than their limit allows.
	Sweep(ctx context.Context) error
	// Holdings names tenants that have rows in the listed tables, the guard's own
	// included, at most limit of each table: what nobody may throw away with the store.
	Holdings(ctx context.Context, limit int) ([]Holding, error)
	// SweepTenant is Sweep for what one tenant's moves have left, but for the limits.
	SweepTenant(ctx context.Context, tenant cells.TenantID) error
	// ReplicaLag is how far the slowest standby of the server is behind; 0 without one,
	// or if the agent may not see it.
	ReplicaLag(ctx context.Context) (time.Duration, error)
}

// Holding is a tenant that has rows in a table.
type Holding struct {
	Table  string         `json:"table"`
	Tenant cells.TenantID `json:"tenant"`
}

// RemoveOptions bound a removal of rows.
type RemoveOptions struct {
	// BatchRows is the most that one transaction removes.
	BatchRows int
	// Pace is called before each batch with its rows; it may wait.
	Pace func(ctx context.Context, rows int64) error
	// Progress is called after each batch.
	Progress func(cells.Progress)
}

// State is how far an import is. It is kept in the sink's own tables, and changes
// in the same transaction as the rows.
type State struct {
	// Start is the capture's first position; another one means another capture.
	Start Position `json:"start"`
	// Applied: the rows of Tables are those of the source at exactly this position.
	Applied Position `json:"applied"`
	// Tables says how far each table is copied; a table that is not begun is absent.
	Tables map[string]TableState `json:"tables"`
	// Copied: all tables are complete.
	Copied bool `json:"copied"`
	// Verified is where all rows were last compared with the source's; since then the
	// keys that changed are remembered.
	Verified Position `json:"verified,omitempty"`
	// Compared is what was compared so far, for the receipt: all tables once, then the
	// keys that changed.
	Compared []cells.Comparison `json:"compared,omitempty"`
	// Shape is that of the sink's tables when the import was begun.
	Shape Shape `json:"shape,omitempty"`
	// Mark is set when Finish has verified the final state. Nothing is imported after it.
	Mark Position `json:"mark,omitempty"`
}

// TableState is how far one table is copied.
type TableState struct {
	After []byte `json:"after,omitempty"`
	Done  bool   `json:"done,omitempty"`
	Rows  int64  `json:"rows"`
}

// Import is the exclusive right to import one tenant's rows for one move. Every
// method that writes does so in one transaction which checks, under lock, that
// the fence here is closed at exactly m.CloseEpoch() by m, that the import is not
// finished and that no other process has taken it over; it fails with
// [cells.ErrStaleOrder] or [ErrOvertaken] otherwise and writes nothing. Used by one
// goroutine at a time. Sink.Import, Verify, Unlock and Finish fail with
// [ErrSchemaChanged] if a listed table is not what it was when the import was begun.
type Import interface {
	// State returns a copy of how far the import is.
	State() State
	// Adopt says that the rows that are here already are those of the source at start:
	// those of the move that this one undoes, which the import has found and nobody has
	// changed. [cells.ErrNotApplicable] for any other import.
	Adopt(ctx context.Context, start Position) error
	// Restart removes all rows that were brought, in batches, and sets Start and Applied.
	Restart(ctx context.Context, start Position, opts RemoveOptions) error
	// Skip moves Applied ahead while nothing is copied yet.
	Skip(ctx context.Context, pos Position) error
	// Copy imports rows of a view at Applied.
	Copy(ctx context.Context, b Batch) error
	// Apply takes a batch of changes; Commit makes everything taken since durable and
	// moves Applied to the last Upto. A batch without End may not be the last before
	// Commit. Changes of tables that are not begun are left out.
	Apply(ctx context.Context, b Batch) error
	Commit(ctx context.Context) error
	// Abort forgets what was taken since the last Commit.
	Abort()
	// Digests returns a digest for each of sets, in order, of what is committed.
	Digests(ctx context.Context, sets []KeySet) ([]Digest, error)
	// Touched returns the keys that changed since Verified and were not settled after
	// it, in sets of at most perSet keys.
	Touched(ctx context.Context, perSet int) ([]KeySet, error)
	// Settle records that the keys were compared, in what comparisons, and leaves them
	// out of Touched until they change again.
	Settle(ctx context.Context, sets []KeySet, compared []cells.Comparison) error
	// Missing returns keys of rows that could not be applied for want of a value
	// that the changes do not carry; they are to be fetched at Applied.
	Missing(ctx context.Context) ([]KeySet, error)
	// Fill replaces the rows named by set by those in b, and forgets that they are missing.
	Fill(ctx context.Context, set KeySet, b []Batch) error
	// Verify records that all rows were compared at Applied, and in what comparisons.
	Verify(ctx context.Context, compared []cells.Comparison) error
	// Finish records the mark, and the comparisons up to it. For a move with Keep it
	// fixes the first position of the way back in the same transaction: here, at that
	// position, are the rows of the source, and nobody writes until the fence is opened.
	Finish(ctx context.Context, mark Position, compared []cells.Comparison) error
	// Unlock lets others import, who then overtake this one; Lock takes the right
	// back, or fails with [ErrOvertaken].
	Unlock(ctx context.Context) error
	Lock(ctx context.Context) error
	// Close frees everything. Idempotent.
	Close() error
}

// StaleAt reports whether a fence has passed the point at which the move may
// import behind it; the error wraps [cells.ErrStaleOrder].
func StaleAt(f guard.Fence, m cells.MoveRef) error {
	if f.Epoch < m.CloseEpoch() || f.Epoch == m.CloseEpoch() && !f.Open && f.Move == m.ID {
		return nil
	}
	return fmt.Errorf("%w: transfer: the fence of tenant %s at %s is at epoch %d, move %s imports at %d", cells.ErrStaleOrder, m.Tenant, m.Target, f.Epoch, m.ID, m.CloseEpoch())
}
