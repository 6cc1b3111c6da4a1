// SPDX-License-Identifier: Apache-2.0

//go:build race

package transfertest

// Scale divides the number of rows of the larger tests: the race detector is slow.
const Scale = 10
