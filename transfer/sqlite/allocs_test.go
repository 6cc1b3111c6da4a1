// SPDX-License-Identifier: Apache-2.0

package sqlite

import (
	"testing"

	"github.com/cloister-dev/cloister/internal/alloctest"
)

// What the row codec allocates for a row of five columns is kept in
// testdata/allocs.txt.
func TestAllocs(t *testing.T) {
	row := []any{"acme", int64(7), 1.5, "a text of some length, as rows have them", []byte{1, 2, 3}}
	enc, err := appendValues(nil, row)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 0, 1024)
	alloctest.Check(t,
		alloctest.Path{Name: "row/encode", Run: func() {
			if _, err := appendValues(buf[:0], row); err != nil {
				t.Fatal(err)
			}
		}},
		alloctest.Path{Name: "row/decode", Run: func() {
			if _, _, err := readValues(enc, len(row)); err != nil {
				t.Fatal(err)
			}
		}},
	)
}
