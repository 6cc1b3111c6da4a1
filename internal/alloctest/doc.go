// SPDX-License-Identifier: Apache-2.0

// Package alloctest keeps what hot paths allocate from growing unseen.
//
// A package's test names its hot paths and calls [Check]. The values that were
// accepted are in the package's testdata/allocs.txt, one line for each path: name,
// allocations and bytes for one call. The file is authoritative. A path that takes
// more than its line says fails the test, and so does one that has no line, or a line
// that no path has; the message says how to accept what was measured:
//
//	make keep-allocs
//
// writes the files anew, and the change is reviewed as any other. A path that takes
// less is told by a log line only.
//
// Counts do not depend on the machine's speed. They do on the race detector, which
// makes pools lose what they are given: under it the test is skipped, and `make allocs`
// runs it without.
package alloctest
