// SPDX-License-Identifier: Apache-2.0

//go:build race

package transfertest

// scale divides the number of rows of the larger tests.
const scale = 10
