// SPDX-License-Identifier: Apache-2.0

// Package table groups the routing tables that are more than one file: each
// subpackage implements [cells.RoutingTable] on one kind of store, and all of
// them pass the suite in tabletest.
//
//	cells.MemTable    one process, no durability
//	cells.FileTable   processes of one machine, some thousands of tenants
//	table/sqlite      processes of one machine, more tenants, one database file
//	table/postgres    processes anywhere, one database
//	table/remote      a table behind HTTP: a handler for any table, and its client
//
// # Who is authoritative
//
// The store is. A table keeps nothing that decides: every compare-and-set is
// decided by the store in one transaction, every read goes to the store. What a
// process holds in memory (the router's view, a watch) is a copy, and carries the
// revision that it is a copy of.
//
// # Revisions
//
// One counter a table orders all changes. A store gives out a revision while it
// holds a lock that lasts until the change is visible, so that whoever sees
// revision r sees every change below r. That is what makes "watch from the last
// revision seen" complete; a sequence without the lock would let a watcher pass a
// revision whose transaction commits later. Rows are never removed (a deleted
// tenant keeps its tombstone), so the rows above a revision are the changes since
// it, the last one of every tenant, and these tables need no change log.
//
// # Failures
//
//   - the store cannot be reached or has no room: [cells.ErrUnavailable], and for
//     a compare-and-set an unknown outcome: read the row and compare Stamp;
//   - the store was restored from an older copy: a watch from a revision ahead of
//     it gets [cells.ErrCompacted]; fences must be raised from the routes before
//     anything is written, see the design's invariants;
//   - the store holds something unreadable or was made by a newer version:
//     [cells.ErrInvalid], and nothing is written over it.
package table
