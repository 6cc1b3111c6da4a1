// SPDX-License-Identifier: Apache-2.0

package headername_test

import (
	"testing"

	"github.com/cloister-dev/cloister/internal/headername"
)

func TestPlatform(t *testing.T) {
	for name, want := range map[string]bool{
		"Cell-Tenant": true, "cell-epoch": true, "CELL_TENANT": true, "Cell.Admission": true, "cell tenant": true,
		"Cell": false, "Cells-Tenant": false, "Cellular-Id": false, "X-Cell-Tenant": false, "": false,
	} {
		if got := headername.Platform(name); got != want {
			t.Errorf("%q: %t", name, got)
		}
	}
}
