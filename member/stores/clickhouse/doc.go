// SPDX-License-Identifier: Apache-2.0

// Package clickhouse is a database of a ClickHouse server as a [stores.Store].
//
// # Who is authoritative
//
// The server that the URL leads to. What is kept is in one table, cell_reserved: a
// row for each value, ordered by a version that each write makes one higher than the
// highest it finds, in a partition for each name. The highest version is the value; a
// name is deleted by dropping its partition, which is done when the statement
// returns. Neither waits for a merge or a mutation, so that the same statements do on
// servers from 18.16 to today's; a KeeperMap table, which newer ones have, would not.
// They go over HTTP, which all of them speak the same way.
//
// One URL is one server, or a service whose servers share their storage. Behind an
// address that leads to replicas in turn, a nonce could be looked for on one that
// does not have it yet, and would then not be found: that is refused, never mistaken.
//
// # Failures
//
// No answer, and an answer of a server that is overloaded or loses its quorum, is
// [cells.ErrUnavailable]; a user who may not, a database that is not there and a
// table of another shape are [cells.ErrInvalid]. Two processes that establish
// different ids at the same moment may both write theirs; from then on the store is
// [stores.ErrMismatch]. The processes of one deployment establish the id that their
// authority holds, which is one.
package clickhouse
