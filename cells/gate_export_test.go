// SPDX-License-Identifier: Apache-2.0

package cells

// GateCount is how many gates g keeps.
func GateCount(g *Gates) int64 { return g.count.Load() }
