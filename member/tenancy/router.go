// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/guard/tenancy"
)

// PlaceCall asks the directory to place a tenant.
type PlaceCall struct {
	// Cell asks for itself; the credential must be the one recorded for it.
	Cell   cells.CellID   `json:"cell"`
	Tenant cells.TenantID `json:"tenant"`
	// Fingerprint is the calling process's; it must match a value of the cell's row
	// when the tenant is not placed yet.
	Fingerprint tenancy.Fingerprint `json:"fingerprint"`
}

// Winner is the cell that a tenant is placed in, read back.
type Winner struct {
	Cell         cells.CellID `json:"cell"`
	DeploymentID string       `json:"deployment_id"`
}

// Placer places one tenant at a time, once and for ever.
type Placer interface {
	// Place returns the winner, which may be another cell. Repeating a call is safe.
	// An error that is a [*cells.Answer] keeps its RetryAfter.
	Place(ctx context.Context, c PlaceCall) (Winner, error)
}

// StateReader reads a cell's own state in the directory.
type StateReader interface {
	// Attaching reports whether the cell is the first and is being attached. A refusal
	// is an error, never false: only an answer that names the state is one.
	Attaching(ctx context.Context, cell cells.CellID) (bool, error)
}

// Router is the directory, as a cell's process asks it with the cell's credential.
type Router interface {
	Placer
	StateReader
}
