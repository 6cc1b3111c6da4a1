// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"

	"github.com/cloister-dev/cloister/cells"
)

// fromGate returns the admission that the gate (L2) put into the context.
func fromGate(ctx context.Context) (Admission, bool) {
	a, ok := cells.AdmissionFromContext(ctx)
	if !ok || a == nil {
		return Admission{}, false
	}
	return Admission{Tenant: a.Tenant, Epoch: a.Epoch, Cell: a.Cell}, true
}
