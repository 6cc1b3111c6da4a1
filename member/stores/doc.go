// SPDX-License-Identifier: Apache-2.0

// Package stores says what a cell's stores have to do for the cell, whatever they
// hold: carry the cell's deployment id, echo a nonce, and show whether another
// cell can see them. [Store] is the contract; package storestest checks it;
// postgres, s3 and clickhouse implement it. A further store joins by implementing
// [Store] and passing storestest.
//
// # Who is authoritative
//
// The authority (Postgres) makes the [DeploymentID], once; every derived store
// carries a copy. A store is identified by that id, and one with a bucket also by
// the bucket's name and prefix, never by its address: a failover, a new endpoint or
// a restore elsewhere changes nothing of it.
//
// # Reserved names
//
// Each store keeps what this package writes under names of its own: one table in
// the databases, objects whose names begin with "_cell_" below the bucket's prefix.
// None of it belongs to a tenant, and none of it is secret.
//
//	deployment   the deployment id; written once, never changed
//	nonce        absent -WriteNonce-> value -WriteNonce-> value' -DeleteNonce-> absent
//	marks        one for each isolation probe; Plant makes it, Remove removes it
//
// # Nonces
//
// A copy of a store carries the same deployment id. What tells the live one from its
// copy is a nonce that is written to the store and has to be echoed by the cell's
// running processes, each from its own connection. A read is therefore never
// answered from memory, from a replica, or from an earlier read.
//
// # Failures
//
// A store that cannot be reached is [cells.ErrUnavailable]: whoever asked tries
// again, and nothing is decided. A standby counts as unreachable. Two stores that
// carry different ids are [ErrMismatch]: the process does not start, and nothing is
// written to either. A value under a reserved name that this package did not write is
// [cells.ErrInvalid]. Writing a nonce that fails half way may leave nonces behind in
// some stores; the next one replaces them.
package stores
