// SPDX-License-Identifier: Apache-2.0

// Package postgres keeps a directory's records in a schema of a Postgres database,
// for any number of directories and routers. What it reads and writes there is the
// SQL of package directory/sqlstore; this package connects, migrates, orders changes
// and looks at the standbys.
//
// # Who is authoritative
//
// The primary server; connections to a standby are refused. Nothing is cached.
//
// # The order of changes
//
// A change of the directory takes one advisory lock of the schema for its
// transaction, so changes happen one after the other, each seeing all before it, as
// they do in one SQLite file. Postgres makes a transaction visible before it
// releases its locks, so the next holder's statements see it. Placements of
// deployments do not take that lock: they exclude each other by tenant, and lock
// the row of the cell whose quota they count.
// A change waits five seconds for locks, a statement runs ten at most, and a session
// that stands still in a transaction is ended by the server after fifteen: a process
// that hangs or is cut off holds the others up no longer.
//
// # Losing nothing
//
// What was answered must survive the loss of the primary. So [Open] refuses a server
// that waits for no synchronous standby, or whose standbys it may not see;
// [Options.AllowAsynchronous] turns that into an error in the log, at the start and
// whenever it is looked at. One that waits for a standby which is away is opened, since
// nothing that it answers can be lost and routers have to start: that is an error in the
// log, and [Store.Ping], on which readiness rests, fails until the standby streams.
// Changes wait meanwhile, and end with [cells.ErrUnavailable]: they may have been made.
// Each change switches synchronous_commit on for itself where it is off or local.
//
// # Migrations
//
// The first process creates and migrates the schema. A migration only adds, so builds
// of the release before run on beside it: an older build that finds a newer schema
// looks for needs_schema in meta, the oldest schema whose builds may still run, and
// is refused with [cells.ErrInvalid] only if it does not reach it.
//
// # Failures
//
// The server is away, refuses, is read only or fails over, a lock or a standby is
// waited for too long: [cells.ErrUnavailable]. A constraint: [cells.ErrConflict].
package postgres
