// SPDX-License-Identifier: Apache-2.0

// Package vitals counts how requests went, by cell and version, in one process: an
// edge, or a process of a cell.
//
// # Who is authoritative
//
// Each process is, for its own counts, which only grow from its start to its end. It
// reports all of them every time, so a report that is lost or sent twice changes
// nothing, and whoever adds up the last reports of all processes has totals that only
// grow, too. What happened between two moments is the difference of two totals. What a
// killed process had not reported is lost: too little is known then, never too much.
//
// # What is counted
//
//	answered   the service answered below 500: its latency counts, unless it was a stream
//	failed     the service answered 500 or more, or broke off; over gRPC, a status that
//	           blames the server
//	refused    the platform answered in the cell's place: it could not be reached, took
//	           too long, or cannot reach its store
//
// Over gRPC an edge cannot tell a call from a stream, and measures both up to the head of
// the answer, which comes with the first message; a cell's process can.
//
// What is the fault of a client, of a move (MOVING, STALE_ROUTE, WRONG_CELL) or of the
// edge itself is not counted: it says nothing about a version of the service. Time
// that a request was held at the edge is no latency of the service either.
//
// A process that can no longer keep counts (too many cells and versions) counts what
// it knows already and drops what is new.
package vitals
