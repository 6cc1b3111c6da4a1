// SPDX-License-Identifier: Apache-2.0

package directory

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
	"github.com/cloister-dev/cloister/directory/api"
	"github.com/cloister-dev/cloister/directory/provision"
)

// ProvisionChange is what [ProvisionStore.UpdateProvisioned] gives to be changed.
type ProvisionChange struct {
	// Record is that of the cell; its zero value but for Spec.Cell when Exists is
	// false. The store numbers generations: it raises Spec.Generation when the spec has
	// changed.
	Record provision.Record
	Exists bool
	// Cell is the cell as it is registered, with its count of tenants; nil when it
	// is not. Set to nil it is removed, which is refused with [cells.ErrConflict] while it
	// counts tenants; set, it is registered or replaced as by PutCell.
	Cell *api.Cell
	// Moves counts the records of active moves from the cell or to it. Read-only.
	Moves int64
}

// ProvisionStore keeps the catalogue of versions, and what cells should be.
type ProvisionStore interface {
	// Versions lists the catalogue in order of the names.
	Versions(ctx context.Context) ([]provision.Version, error)
	// PutVersion adds a version. One that is there already is returned unchanged when it
	// says the same (who added it and when apart), replaced with replace, and otherwise
	// refused with ErrConflict.
	PutVersion(ctx context.Context, v provision.Version, replace bool, audit api.AuditEntry) (provision.Version, error)
	// RemoveVersion removes a version. ErrNotFound; ErrConflict while a cell that is not
	// retired is pinned to it.
	RemoveVersion(ctx context.Context, name string, audit api.AuditEntry) error

	// Provisioned lists the records in order of the cells, and a revision that grows
	// with every change of a spec.
	Provisioned(ctx context.Context) ([]provision.Record, int64, error)
	// UpdateProvisioned changes a cell's record, and the cell with it, by fn, alone among
	// all writers of both. fn must be pure: it may run more than once. An error of fn is
	// returned and changes nothing. A nil audit writes none; nothing is written either
	// when nothing changed. ErrConflict as PutCell, and of a removal that is refused.
	UpdateProvisioned(ctx context.Context, cell cells.CellID, fn func(*ProvisionChange) error, audit *api.AuditEntry) (provision.Record, error)
}
