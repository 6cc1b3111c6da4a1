// SPDX-License-Identifier: Apache-2.0

//go:build race

package cells

// The explorer has one goroutine: the race detector finds nothing in it and makes
// it ten times slower, so only the small configurations run under it.
const exploreSmall = true
