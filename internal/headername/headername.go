// SPDX-License-Identifier: Apache-2.0

// Package headername tells which headers are the platform's, in every spelling that
// a server behind it could take for one. It has no state.
package headername

import "strings"

// Folded returns a header's name as the most lenient server would read it: lower
// case, and every other character than a letter or a digit as '-'.
func Folded(name string) string {
	var buf [64]byte
	return string(Fold(buf[:0], name))
}

// Fold appends what [Folded] returns.
func Fold[S string | []byte](b []byte, name S) []byte {
	for i := range len(name) {
		c := name[i]
		switch {
		case c >= 'A' && c <= 'Z':
			c += 'a' - 'A'
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
		default:
			c = '-'
		}
		b = append(b, c)
	}
	return b
}

// Platform reports whether the header belongs to the platform: Cell-*, in any
// spelling that a server could take for it (Cell_Tenant, cell.tenant).
func Platform(name string) bool {
	return len(name) >= 5 && (name[0] == 'C' || name[0] == 'c') && strings.HasPrefix(Folded(name), "cell-")
}
