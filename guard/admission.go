// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
)

// Admission says for whom a transaction writes.
type Admission struct {
	Tenant cells.TenantID
	// Epoch is the one that the gate admitted the request or job at; 0 for tenants
	// that are served without a route.
	Epoch cells.Epoch
	// Cell is recorded in the events; it may be empty.
	Cell cells.CellID
}

type tenantKey struct{}

// WithTenant returns a context for a service that runs without cells: the guards
// that were made with their WithoutCells option admit its transactions for the
// tenant at epoch 0. All other guards ignore it.
func WithTenant(ctx context.Context, tenant cells.TenantID) context.Context {
	return context.WithValue(ctx, tenantKey{}, tenant)
}

// TenantFrom returns the tenant that [WithTenant] put into the context.
func TenantFrom(ctx context.Context) (cells.TenantID, bool) {
	t, ok := ctx.Value(tenantKey{}).(cells.TenantID)
	return t, ok
}

type admittedKey struct{}

// ContextWith returns a context that carries a; it takes precedence over the
// admission of package cells. For jobs and adapters that hold an admission in
// another form.
func ContextWith(ctx context.Context, a Admission) context.Context {
	return context.WithValue(ctx, admittedKey{}, a)
}

// AdmissionFrom returns the admission that a transaction begun under ctx is for:
// the one of [ContextWith]; otherwise the gate's. With withoutCells, a context
// of [WithTenant] is admitted at epoch 0 when there is neither.
// The error is [ErrNoAdmission].
func AdmissionFrom(ctx context.Context, withoutCells bool) (Admission, error) {
	if a, ok := ctx.Value(admittedKey{}).(Admission); ok {
		return a, nil
	}
	if a, ok := fromGate(ctx); ok {
		return a, nil
	}
	if withoutCells {
		if t, ok := TenantFrom(ctx); ok {
			return Admission{Tenant: t}, nil
		}
	}
	return Admission{}, ErrNoAdmission
}
