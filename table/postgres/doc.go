// SPDX-License-Identifier: Apache-2.0

// Package postgres is a routing table in a Postgres database: any number of
// processes anywhere, one database. Its tables live in a schema of their own
// ([WithSchema]); the first process creates and migrates it.
//
// # Who is authoritative
//
// The primary server. Every call goes to it; nothing is cached. Point it at a
// standby and reads may be old, which breaks [cells.RoutingTable.Get].
//
// # The order of revisions
//
// A watch goes on from the last revision that it has seen. That is complete only
// if whoever sees revision r sees every revision below r. A sequence does not give
// that: a transaction may take 7, another take and commit 8, a watch see 8 and go
// on from there, and 7 commit afterwards, unseen for ever.
//
// So a compare-and-set takes its revision by updating the one row of routes_meta,
// and thereby locks that row until its transaction has ended. Postgres makes a
// transaction visible to new snapshots before it releases its locks. So when the
// next writer gets the counter, every snapshot taken from then on sees what was
// committed under the numbers before; revisions are given out and become visible
// in the same order, and a change that is rolled back takes its number back. List
// and Watch read the counter and the rows in one statement, which is one snapshot.
// The price is that compare-and-sets commit one after the other; that is some
// hundreds to thousands a second, and routes change far less often. Reads take no
// lock. The same holds for a standby, which replays commits in that order.
//
// Locks are taken in one order, the tenant's row and then the counter, and who
// holds the counter waits for no row, so there is no deadlock.
//
// # Watching
//
// A change notifies (LISTEN/NOTIFY, a channel for each schema). A notice only says
// that it is worth asking: watches also ask every 500 ms ([WithPoll]), so a lost
// notice, a listener that is reconnecting, or a connection pooler that does not
// pass LISTEN costs time and nothing else. Each open table that is watched holds
// one connection for it beside the pool. Rows are never removed, so every revision
// that the table has had can be watched from; [cells.ErrCompacted] means that the
// revision is ahead of the table: the database was restored, or a standby that had
// not received everything took over.
//
// # Failures
//
//   - the server is away, refuses, or fails over: [cells.ErrUnavailable]; for a
//     compare-and-set whose commit was under way the outcome is unknown;
//   - an acknowledged change survives a crash of the server, also where
//     synchronous_commit is off by default: it is switched on for these
//     transactions. Whether it survives the loss of the server is up to
//     synchronous replication;
//   - the schema was made by a newer version, or a row is not readable:
//     [cells.ErrInvalid]; nothing is written over it.
package postgres
