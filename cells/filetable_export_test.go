// SPDX-License-Identifier: Apache-2.0

package cells

import (
	"os"
	"slices"
)

// WriteTableFile makes a table file with the given tenants, each active in cell a.
func WriteTableFile(path string, tenants []string) error {
	tenants = slices.Sorted(slices.Values(tenants))
	s := &fileState{}
	for _, id := range tenants {
		r := testRoute(TenantID(id), "a")
		s.revision++
		r.Revision = s.revision
		enc, err := EncodeRoute(r)
		if err != nil {
			return err
		}
		s.rows = append(s.rows, &fileRow{route: r, enc: enc})
	}
	return os.WriteFile(path, s.encode(), 0o600)
}
