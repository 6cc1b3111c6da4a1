// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"testing"

	"github.com/cloister-dev/cloister/edge/forward"
)

// A look at a header's name makes no garbage.
func TestPassesAllocatesNothing(t *testing.T) {
	names := [][]byte{[]byte("X-Forwarded-For"), []byte("Cell_Tenant"), []byte("Accept"), []byte("X-Request-Id"), []byte("Content-Type")}
	want := []bool{false, false, true, true, true}
	if n := testing.AllocsPerRun(100, func() {
		for i, name := range names {
			if forward.Passes(name) != want[i] {
				t.Fatalf("%s", name)
			}
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
