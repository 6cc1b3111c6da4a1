// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
)

// Source is a cell as the source of a move. It is called in process, or over the
// channel by the target's agent. It never changes a row of the service. Safe for
// concurrent use; one move has one reader of Changes at a time: a later call ends
// an earlier one.
//
// Begin, View, Final, Changes and Check fail with [ErrSchemaChanged] if a listed table is
// not what it was when the capture was begun.
type Source interface {
	// Survey describes the tenant's rows here.
	Survey(ctx context.Context, tenant cells.TenantID) (Survey, error)
	// Begin starts capturing the tenant's changes for the move and returns the
	// position from which Changes has everything. Idempotent: the same move gets its
	// first position, unless the store has lost the capture; then it is begun anew,
	// and the position differs. [cells.ErrNotApplicable] after Release. The target of a
	// move that is to be undoable begins m.Back() in its own store. With a group in ctx
	// ([ContextWithGroup]) it may be captured together with the group's other moves.
	Begin(ctx context.Context, m cells.MoveRef) (Position, error)
	// View opens a consistent view of the tenant's rows at one exact position of the
	// captured changes. The caller closes it.
	View(ctx context.Context, m cells.MoveRef) (View, error)
	// Final is a View behind the tenant's last change. It fails with
	// [cells.ErrNotApplicable] unless the fence here is closed at m.CloseEpoch() by m,
	// which makes its position final.
	Final(ctx context.Context, m cells.MoveRef) (View, error)
	// Changes yields what was committed after from, in commit order, and goes on
	// until ctx ends, yield fails, or the source fails. It yields a batch without
	// data when it has nothing else to show for a position that Head, View or Final
	// gave out, or now and then. It may wait in yield as long as it takes; others of the
	// move's group do not wait with it. [ErrElsewhere] if another process reads for the
	// group.
	Changes(ctx context.Context, m cells.MoveRef, from Position, yield func(Batch) error) error
	// Head returns a position that Changes will reach soon and that is behind
	// everything committed before the call.
	Head(ctx context.Context, m cells.MoveRef) (Position, error)
	// Applied tells the source that the target holds everything up to pos durably:
	// what was kept for it may be freed.
	Applied(ctx context.Context, m cells.MoveRef, pos Position) error
	// Check says what the move costs here and fails if it may not go on: with
	// [ErrSchemaChanged], or with [ErrRetention] if more is kept for it than the limits
	// allow. The source remembers the limits, and enforces them in Sweep when nobody
	// asks. [cells.ErrNotApplicable] if there is no capture.
	Check(ctx context.Context, m cells.MoveRef, l Limits) (Health, error)
	// Kept returns the first position of the way back m, which Begin has begun and
	// Import.Finish has fixed. [cells.ErrReturnLost] when there is none, or when it has
	// missed a change.
	Kept(ctx context.Context, m cells.MoveRef) (Position, error)
	// Adopt makes the way back of m.Undoes the capture of m and returns its first
	// position, from which Changes has everything. Idempotent. [cells.ErrReturnLost] as
	// for Kept; Begin begins anew then.
	Adopt(ctx context.Context, m cells.MoveRef) (Position, error)
	// Release ends the capture of the move, frees what it holds and remembers that
	// it was there until the rows are removed or another move begins. Idempotent.
	Release(ctx context.Context, m cells.MoveRef) error
}

// View is a consistent read of one tenant. Its methods are called one at a time.
// It fails with [ErrViewLost] when what held it is gone: open another one.
type View interface {
	// Position of the view: it shows exactly what was committed up to it.
	Position() Position
	// Changes yields what was committed after from and up to Position exactly, and
	// returns. Not for a view made by Final.
	Changes(ctx context.Context, from Position, yield func(Batch) error) error
	// Rows yields the rows of a table in key order, after a key (nil: from the
	// first). The last batch has End set; an empty table is one empty batch. The data of
	// batches that follow one another can be joined.
	Rows(ctx context.Context, table string, after []byte, yield func(Batch) error) error
	// Digests returns a digest for each of sets, in order.
	Digests(ctx context.Context, sets []KeySet) ([]Digest, error)
	// Fetch yields those rows of set that there are, encoded as those of Rows.
	Fetch(ctx context.Context, set KeySet, yield func(Batch) error) error
	// Close frees the view. Idempotent.
	Close() error
}
