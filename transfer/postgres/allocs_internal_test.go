// SPDX-License-Identifier: Apache-2.0

package postgres

import (
	"testing"

	"github.com/cloister-dev/cloister/internal/alloctest"
)

// What the codec of changes allocates for a row of four columns is kept in
// testdata/allocs.txt.
func TestAllocs(t *testing.T) {
	var row []byte
	for _, v := range []string{"acme", "k-1", "a text of some length, as rows have them"} {
		row = appendText(append(row, valText), []byte(v))
	}
	row = append(row, valNull)
	buf, key := make([]byte, 0, 1024), []string{"acme", "k-1"}
	alloctest.Check(t,
		alloctest.Path{Name: "text/encode", Run: func() { appendText(buf[:0], row) }},
		alloctest.Path{Name: "key/encode", Run: func() { encodeKey(key) }},
		alloctest.Path{Name: "row/decode", Run: func() {
			if _, _, err := readRow(row, 4); err != nil {
				t.Fatal(err)
			}
		}},
	)
}
