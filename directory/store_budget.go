// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"
	"time"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
)

// SeenRow is what the clients of one edge process saw of one move. Times are the
// directory's.
type SeenRow struct {
	Move cells.MoveID
	// Edge is the name in the certificate, Instance the process.
	Edge, Instance string
	// Seq grows with each report of the process; one that is not newer changes nothing.
	Seq int64
	// Refused counts the requests that were refused. First is when the first of them
	// arrived, Last until when the last of them was without service; zero if none was.
	Refused     int64
	First, Last time.Time
}

// Accounts is the part of a [Store] that keeps budgets, what clients saw of moves,
// and receipts. The rules of Store hold for it.
type Accounts interface {
	// Budgets returns the store of unavailability budgets. It stays valid until Close,
	// and is a [cells.BudgetLimits].
	Budgets() cells.BudgetStore
	// Limits lists what is set, in order of tenants; that of tenant "" is everybody's.
	Limits(ctx context.Context) ([]api.BudgetLimit, error)
	// SetLimit sets the limit of l.Tenant. RemoveLimit removes it; [cells.ErrNotFound]
	// when there is none.
	SetLimit(ctx context.Context, l api.BudgetLimit, audit api.AuditEntry) error
	RemoveLimit(ctx context.Context, tenant cells.TenantID, audit api.AuditEntry) error

	// SaveSeen writes a report in place of the process's earlier one, unless that is
	// as new; it reports whether it did.
	SaveSeen(ctx context.Context, row SeenRow) (bool, error)
	// Seen returns the reports about a move, in order of their edges.
	Seen(ctx context.Context, move cells.MoveID) ([]SeenRow, error)

	// AppendReceipt adds what build returns to the receipt of a move, alone among all
	// writers: build gets the entries so far. It must not change the store, and may run
	// more than once. An error of build is returned.
	AppendReceipt(ctx context.Context, move cells.MoveID, build func(entries [][]byte) (ReceiptChange, error)) error
	// EndReceipts does the same for up to limit receipts whose end is due at the time, the
	// oldest first, in one change, and returns how many they were. One that build does not
	// set another time for stays due.
	EndReceipts(ctx context.Context, due time.Time, limit int, build func(move cells.MoveID, entries [][]byte) (ReceiptChange, error)) (int, error)
	// Receipt returns the entries of a move's receipt, in order; none is no error.
	Receipt(ctx context.Context, move cells.MoveID) ([][]byte, error)
}

// ReceiptChange is what becomes of a receipt.
type ReceiptChange struct {
	// Entry is added behind the others; nil adds nothing.
	Entry []byte
	// EndAt is from when on EndReceipts finds the receipt, the zero time never; nil
	// leaves what was set before.
	EndAt *time.Time
}
