// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"encoding/json"

	"github.com/cloister-dev/cloister/cells"
)

// Source is a cell as the source of a move. It is called in process, or over the
// channel by the target's agent.
type Source interface {
	// Survey describes the tenant's rows here.
	Survey(ctx context.Context, tenant cells.TenantID) (Survey, error)
	// Begin starts capturing the tenant's changes for the move and returns the
	// position from which Changes has everything that Snapshot may miss.
	// Idempotent: the same move gets its first position.
	Begin(ctx context.Context, m cells.MoveRef) (Position, error)
	// Snapshot yields the tenant's rows of one table, after a key.
	Snapshot(ctx context.Context, m cells.MoveRef, table string, after json.RawMessage, yield func(Batch) error) error
	// Changes yields committed changes after from, in commit order, until ctx ends or
	// until the end of what is captured (follow false).
	Changes(ctx context.Context, m cells.MoveRef, from Position, follow bool, yield func(Batch) error) error
	// Mark returns the position behind the tenant's last committed change. The
	// source's fence is closed when the cut asks for it.
	Mark(ctx context.Context, m cells.MoveRef) (Position, error)
	// Release ends the capture of the move and frees what it holds. Idempotent.
	Release(ctx context.Context, m cells.MoveRef) error
}
