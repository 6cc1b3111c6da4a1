// SPDX-License-Identifier: Apache-2.0

package cells

import "slices"

// GateCount is how many gates g keeps.
func GateCount(g *Gates) int64 { return g.count.Load() }

// Codes is the closed list.
func Codes() []Code {
	var all []Code
	for c := range codeTable {
		all = append(all, c)
	}
	slices.Sort(all)
	return all
}
