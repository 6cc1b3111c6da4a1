// SPDX-License-Identifier: Apache-2.0

// Package directory is Cloister's control plane: which cells exist, which of
// their processes live, where tenants are placed, and the execution of moves.
//
// # Who is authoritative
//
// The routing table (a [cells.RoutingTable]) decides who owns a tenant, by its
// compare-and-set and by nothing else. The [Store] keeps what stands around it:
// cells, the ledger of placements that bounds them, the records of moves, the
// answers of operations, unavailability budgets and the audit. Where the two
// differ the table is right and the store is brought up to it: a follower reads
// the table, watches it, and settles the ledger and the records after each change.
// Which processes live is known from heartbeats by the monotonic clock of this
// process. Liveness chooses addresses and ends waits; it decides no safety.
//
// # Two listeners
//
// The channel listener speaks mutual TLS only and is what cells and edges reach:
// heartbeats, routes (read only), the topology and placements of a cell for
// itself. Each call is judged by the role and the name in the peer's certificate.
// It may be reachable from every cell's network.
//
// The operator listener speaks HTTP and binds to the loopback by default. Whoever
// holds the operator credential may place, move and delete every tenant, so it is
// exposed only behind TLS and a network policy. /livez, /readyz and /metrics want
// no credential; they name no tenant. Of the credential only the SHA-256 is kept,
// it is compared in constant time, and without one every operator call is answered
// 503 NO_OPERATOR_CREDENTIAL.
//
// # Placements
//
// A claim is made in two steps. First one transaction of the store looks at the
// cell (registered, serving, open), counts its tenants against its quota and
// writes the tenant's ledger row as RESERVED, together with the revision of the
// route that was seen. Then the table is written, on the condition that the
// route is still at that revision. So whatever number of directories claim at
// once, a tenant is created only while its reservation is counted, and a quota is
// never passed. A reservation is settled, never guessed away:
//
//	RESERVED --route exists-----------------> PLACED (at the route's cell)
//	RESERVED --route is past the revision---> overtaken; removed or replaced
//	RESERVED --driver died------------------> the sweeper finishes the claim
//	PLACED   --route is DELETED-------------> removed
//
// # Moves
//
//	PREPARING -> CUTTING -> COMMITTED -> CLEANING -> DONE
//	    |            |
//	    +------------+--> ROLLED_BACK        (PREPARING --> REFUSED)
//
// A record follows its route and never goes back. The executor drives
// [cells.MoveController]; each step is persisted in the route first and then noted
// in the record. A directory that dies leaves a record with a driver whose beat
// stands still; another directory, or the same one when it is back, takes it
// over and resumes from the route. Two drivers on one move are wasteful and safe:
// each step is a compare-and-set, or an order that the cell refuses when it is
// stale. COMMITTED is driven for as long as the process lives, with backoff,
// whatever errors come.
//
// # Failures
//
// Store down: heartbeats, routes and topology go on from memory; every change
// answers BACKEND_UNAVAILABLE, and its outcome is unknown to the caller. Table
// down: the same, and readiness fails. A full disk is a store that is down.
// Directory down: cells and edges serve from what they know; moves that are past
// their cut wait for it. A directory that starts counts the processes that the
// store remembers as live for one lapse, so that edges are not told that nothing
// runs.
package directory
