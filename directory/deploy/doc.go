// SPDX-License-Identifier: Apache-2.0

// Package deploy is the directory of whole deployments: which deployments are cells,
// what each accepts, and which cell every tenant was placed in. It has the nouns, the
// rules of every change as pure functions, and the contract of the [Store] that keeps
// them; directory/sqlite and directory/postgres implement it, package deploytest is its
// conformance suite, package httpapi serves it.
//
// # Who is authoritative
//
// The store. Routers only cache what they read there, and never decide a placement
// from a cache. What a cell's own stores say of itself follows the directory, except
// before its attach, when the directory holds no fingerprint of it.
//
// # A cell's life
//
//	(none) --Register--> attaching --Attach--> attaching, with fingerprint --Serve--> serving
//
// Registered, a cell's host, deployment id, bucket prefix and credential are its own
// for ever; it takes no placement and no issuer is its. Attach reserves, in one
// transaction, what its configuration accepts, and places its tenants. A cell is never
// removed.
//
// The first cell is the deployment that was there before: one unique index allows one,
// no other is registered before it, and no other is attached before it serves. It
// begins in mode recording, any other in enforced; the directory records the highest
// mode that was raised or tried, and it only goes up.
//
// # Placements
//
// One row for each tenant, written once. [Store.Place] answers the winner, whoever
// asks: a retry and the loser of a race read the same row. A tenant that is placed
// nowhere is judged on the locked row of the cell that asks ([Judge]): its state,
// whether it is closed, its credential, its configuration, its quota, counted and
// inserted under that lock, so callers at any number of routers never pass it.
// Attach of the first cell places every tenant that the cell holds, beyond any quota:
// refusing one would strand its data.
//
// In a pinned directory no placement ever changes; the database itself refuses it. A
// movable one has [Store.Repoint] for what moves tenants: it follows a move that the
// tenant's route has decided, to a higher epoch only. A decision cannot be taken back
// when the target turns out to be full, so a move has its place before it begins
// ([Store.Reserve]), and counts in both cells until it is over. Rows are never deleted
// in either.
//
// # What two cells may not share
//
// Hosts and aliases, bearer issuers, tenant patterns and configured tenants, OIDC
// clients, deployment ids, nested bucket prefixes, root-secret fingerprints, router
// credentials. A change of one cell is made under the directory's lock with the
// refusals run inside it, and counts both values, current and next, of every other.
//
// # Failures
//
// The store is down: every change answers [cells.ErrUnavailable], and a change whose
// commit was under way may have been made; each is safe to repeat. Routers go on from
// their caches; lookups of tenants that are not cached and placements answer 503.
package deploy
