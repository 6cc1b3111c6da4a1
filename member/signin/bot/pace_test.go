// SPDX-License-Identifier: Apache-2.0

package bot

import (
	"strconv"
	"testing"
)

// Names that are no bot's take no place of a bot's pace, however many there are, and
// what is kept is bounded.
func TestPacesAreApart(t *testing.T) {
	p := newPaces(1e-9)
	for range burst {
		if !p.allow(true, "glass", "192.0.2.1:1") {
			t.Fatal("refused within the burst")
		}
	}
	for n := range 20 * maxPaces {
		p.allow(false, strconv.Itoa(n), "192.0.2.1:1")
	}
	if p.allow(true, "glass", "192.0.2.1:1") {
		t.Error("the pace of a bot was forgotten for the names of others")
	}
	if p.known.Len() != 1 || p.others.Len() != maxPaces {
		t.Errorf("%d and %d are kept", p.known.Len(), p.others.Len())
	}
}
