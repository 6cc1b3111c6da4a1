// SPDX-License-Identifier: Apache-2.0

// Package postgres is a cell's Postgres as a [stores.Store]: the authority of its
// deployment id.
//
// # Who is authoritative
//
// The primary. Each method is one statement on it, on a pool of the store's own, so
// that neither a service that has used up its connections nor a flood on its port
// keeps the probe from being answered. Every read asks in the same statement whether
// the server is in recovery; a standby's answer is [cells.ErrUnavailable].
//
// What is kept is in one table, reserved, in a schema of its own (cell_stores): no
// tenant's rows, and none that an erasure has to look at. [Open] makes it when it is
// missing and the role may; a role that may not finds it made by an earlier start, or
// the error says what it lacks.
//
// # Failures
//
// A server that cannot be reached is [cells.ErrUnavailable]; nothing was decided. A
// write whose answer was lost may have been done: all of them may be repeated.
package postgres
