// SPDX-License-Identifier: Apache-2.0

// Package transfertest is the suite that every pair of stores of package transfer
// passes, over the real database: it moves tenants between two cells that have
// the suite's tables, the store's guard and an agent each, while they are written
// to, with everything that takes part being cut off, killed and repeated.
//
// A store's test implements [Cell] and calls [Run]. [Mutants] runs the suite
// against stores that are broken on purpose, and fails if the suite does not notice.
//
// The databases are authoritative: what a test expects is what the source's
// tables say once its fence is closed, and the suite's own record of the
// writes that were acknowledged.
package transfertest
