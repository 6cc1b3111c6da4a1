// SPDX-License-Identifier: Apache-2.0

// Package sqlite is the guard on SQLite through database/sql: fences and the
// outbox of a cell whose service keeps its data in one SQLite file, with one
// process or several on one machine. It is made for modernc.org/sqlite; open the
// file with
//
//	file:PATH?_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)&_txlock=immediate&_pragma=synchronous(FULL)
//
// The rows of the cell_ tables are authoritative, for all processes.
//
// # Locks
//
// SQLite has one writer. An admission takes the file's write lock (also in a
// transaction that was begun as deferred, where it fails if the snapshot is older
// than the last commit), so it holds until the transaction ends; a savepoint that
// is rolled back does not give it up. An order is one more writer: it comes after
// the transactions that were admitted and before those that will be. It waits for
// tenants other than its own too, since the file has one lock for all.
// Within one process transactions of InTx and orders queue up in order of arrival.
//
// # What it cannot do
//
// SQLite has no settings of a transaction that a trigger could look at: writes
// that do not go through InTx or Admit are not refused, nor are rows of another
// tenant than the admitted one. All of the service's writes have to go through
// the guard; a sqlite3 shell on a cell's file is out of bounds. Do not use the
// shared cache with read_uncommitted.
//
// # Publishing
//
// One process at a time publishes for the tenants of a file: it holds a lock on
// the file PATH-relay, which the operating system drops when the process ends.
// What it publishes at the moment is in a table, for other processes that pause a
// tenant; when the lock is free, those rows are of a dead process and are dropped.
// Processes find what others have written, or paused, by polling.
package sqlite
