// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"time"

	"github.com/cloister-dev/cloister/cells"
)

// Leftovers is what a cell's database keeps for moves, read without changing anything
// and without asking anybody whether it is still needed.
type Leftovers struct {
	// Kept are the captures that were not released, and the imports that are recorded.
	Kept []Kept
	// Slots and Publications are those of moves in this database that no row of Kept
	// accounts for. Empty for stores that have none.
	Slots        []Slot
	Publications []string
}

// Kept is a row that a move has in a cell's database.
type Kept struct {
	Move   cells.MoveID
	Tenant cells.TenantID
	// Import: the move brings the tenant here; else its changes are captured here.
	Import bool
	// Ended says why the capture was given up; "" while it is not.
	Ended string
	// At is when it began; zero where the store does not record it.
	At time.Time
}

// Slot is a logical replication slot.
type Slot struct {
	Name string
	// Active: somebody reads from it now.
	Active bool
	// Retained is how much of the server's log is kept for it, in bytes.
	Retained int64
}
