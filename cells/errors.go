// SPDX-License-Identifier: Apache-2.0

package cells

import "errors"

// Sentinels. Everything this package and its implementations return wraps one
// of them where a caller can act on the difference.
var (
	// ErrInvalid: an identifier, a row or a file is malformed, or a write would
	// break an invariant. Never retry unchanged.
	ErrInvalid = errors.New("cells: invalid")
	// ErrNotFound: the tenant has no row. Returned by RoutingTable.Get.
	ErrNotFound = errors.New("cells: no route")
	// ErrConflict: the row is not at the revision that the caller gave. Returned by
	// RoutingTable.CompareAndSet; read the row and decide again.
	ErrConflict = errors.New("cells: route changed")
	// ErrCompacted: the table no longer knows the changes since the revision asked
	// for. Returned by RoutingTable.Watch and RouteWatcher.Next; list again.
	ErrCompacted = errors.New("cells: revision compacted")
	// ErrClosed: the table, router or watch was closed.
	ErrClosed = errors.New("cells: closed")
	// ErrUnavailable: a store or a process cannot be reached now. Retry later.
	ErrUnavailable = errors.New("cells: unavailable")
	// ErrFenced: the tenant's fence does not admit the epoch; nothing was written.
	// Returned by the guards when a transaction is admitted or committed.
	ErrFenced = errors.New("cells: fenced")
	// ErrStaleOrder: a fence, import or removal order is older than the fence.
	// Returned by Fencer and DataMover; the driver that sent it has been overtaken.
	ErrStaleOrder = errors.New("cells: stale order")
	// ErrNotApplicable: the event does not apply to the route's state. Returned by
	// Next; the driver reads the route and goes on from there.
	ErrNotApplicable = errors.New("cells: event does not apply")
	// ErrOtherMove: the route is in the hands of another move. Returned by Next and
	// the controller.
	ErrOtherMove = errors.New("cells: another move")
	// ErrReturnLost: the changes since a move's commit are not captured (any more), so
	// it cannot be undone without a copy. Returned by Returner; the window closes.
	ErrReturnLost = errors.New("cells: the way back is lost")
	// ErrBudget: the move would exceed the tenant's unavailability budget.
	ErrBudget = errors.New("cells: budget exceeded")
	// ErrRolledBack: the move ended with the source serving again.
	ErrRolledBack = errors.New("cells: move rolled back")
	// ErrJurisdiction: the tenant may not be in the cell. Returned by CellView.Refuse;
	// nothing overrides it.
	ErrJurisdiction = errors.New("cells: outside of the tenant's jurisdiction")
	// ErrNoRoom: the cell is closed or one of its limits is reached. Returned by
	// CellView.Refuse; that may change.
	ErrNoRoom = errors.New("cells: no room")
	// ErrElsewhere: the tenant is placed in another cell already. Returned by Assign.
	ErrElsewhere = errors.New("cells: placed elsewhere")
)
