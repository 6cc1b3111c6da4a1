// SPDX-License-Identifier: Apache-2.0

// Package local runs cells and an edge in one process, for examples: routes in
// memory, real gates and fences, rows that really move from one SQLite file to
// another. A fleet of processes is what package member and the program cell are for.
//
// The routing table of the fleet is authoritative; it ends with the process. A move
// that fails is rolled back by its controller, and the tenant stays where it was.
package local
