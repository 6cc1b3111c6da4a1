// SPDX-License-Identifier: Apache-2.0

package tenancy

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-dev/cloister/cells"
)

func TestSCIMTokens(t *testing.T) {
	token, _, err := NewSCIMToken("a-b")
	if err != nil {
		t.Fatal(err)
	}
	if cell, err := SCIMTokenCell(token); cell != "a-b" || err != nil {
		t.Errorf("%.10s names %q, %v", token, cell, err)
	}
	if cell, err := SCIMTokenCell("an older token"); cell != "" || err != nil {
		t.Errorf("a token of another form names %q, %v", cell, err)
	}
	for _, bad := range []string{"lsc_b_short", "lsc_", "lsc__" + strings.Repeat("a", 128), strings.ToUpper(token[:8]) + token[8:] + "x", "lsc_a_b_" + strings.Repeat("a", 128)} {
		if strings.HasPrefix(bad, "lsc_") {
			if cell, err := SCIMTokenCell(bad); cell != "" || !errors.Is(err, cells.ErrInvalid) || strings.Contains(err.Error(), bad[4:]) && len(bad) > 6 {
				t.Errorf("%.12s names %q, %v", bad, cell, err)
			}
		}
	}
	if _, _, err := NewSCIMToken("a_b"); !errors.Is(err, cells.ErrInvalid) {
		t.Errorf("a cell with _: %v", err)
	}
}
