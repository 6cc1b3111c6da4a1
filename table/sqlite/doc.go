// SPDX-License-Identifier: Apache-2.0

// Package sqlite is a routing table in a SQLite database, for one machine: one
// file, several processes, tens of thousands of tenants. The tables
// cells_routes and cells_routes_meta may live beside others in the same database.
//
// # Who is authoritative
//
// The database file. Every compare-and-set is one write transaction; SQLite runs
// those one after the other, also across processes, so the order of revisions is
// the order in which changes become visible, and a watch that has seen revision r
// has seen everything below it.
//
// # Watching
//
// A watch asks the database: at once when this process made the change, and every
// 100 ms ([WithPoll]) for the changes of other processes. Rows are never removed,
// so every revision that the table has had can be watched from;
// [cells.ErrCompacted] means that the revision is ahead of the table, which
// happens when the file was replaced by an older copy.
//
// # Failures
//
//   - another process holds the write lock for longer than the busy timeout, the
//     disk is full, an I/O error: [cells.ErrUnavailable], nothing is half written;
//   - the file is no database, is damaged, or was migrated by a newer version:
//     [cells.ErrInvalid]; it is not written to;
//   - the process dies: SQLite's journal rolls back what was not committed. An
//     acknowledged change is on disk ([Open] sets synchronous to FULL; so must
//     whoever gives [New] a database).
package sqlite
