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
// # Budgets and receipts
//
// The store keeps each tenant's budget: what cuts have reserved and what they were
// charged with. A reservation is made in one transaction before the cut, and charged
// by the driver that ends it; if that dies first, whoever concludes the move settles
// it, before the record says that the move is over. Edges report over the channel what
// clients saw of each move; that is charged in place of the driver's pause, whenever
// it comes. The store decides what is left, so all directories on it share one budget.
//
// With a key, the outcome of a move is signed (package receipt), also before the
// record says that the move is over; then the removal of the loser's rows and late
// reports of edges. A store that fails only delays them: they are tried again for as
// long as the process lives, and by the next one.
//
// # Campaigns
//
// A campaign is a stored plan of moves that one directory makes, whoever asked for
// it and wherever they have gone. Its record and its items say how far it is:
//
//	PLANNED --run--> RUNNING --everything has its result--> DONE
//	   |              |  ^ \--failures used up, pause--> PAUSED --resume--> RUNNING
//	   +----abort-----+--|---------abort---------------------+
//	                  v  +--resume with retry-- DONE
//	               ABORTING --nothing runs--> ABORTED
//
//	item: PENDING --begin--> RUNNING --> MOVED, ALREADY, DEFERRED, FAILED, SKIPPED
//	         ^---its cell is full yet---'      (DEFERRED and FAILED may be tried again)
//
// An item is first persisted as RUNNING with the id that its move has: campaign,
// number, attempt. Then the move is recorded under that id, which happens once; then
// it is driven, as every move is; then the item gets its result, once. Whoever goes on
// after a crash at any of these finds the step before and repeats the next. A move
// runs only from the cell that the plan names, into a cell that is open, of the
// tenant's jurisdiction, and within its quota: all are looked at when it begins, and
// what no longer fits is SKIPPED or FAILED with the reason.
//
// The driver of a campaign is a name and a beat in its row, exchanged by
// compare-and-set. A beat that stands still for TakeOver makes the campaign anybody's.
// It only keeps two directories from doing the same work: two that do move nobody
// twice. PAUSED and ABORTING let moves that run come to their end; an abort with
// rollback gives up those that are not decided. Clocks decide when moves begin
// (windows, pace), and nothing else.
//
// # Rollouts
//
// A rollout brings a new version to cells or tenants in waves; package
// directory/rollout has its states, its rule of health and its driver. This package
// gives the driver campaigns to move tenants by, specs to upgrade cells by, and the
// totals of what edges and cells report about their requests, which are kept in the
// store so that any directory can go on.
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
//
// # Deployments
//
// Where whole deployments are the cells ([Config].Deployments) a pinned directory of them
// moves nothing. In a movable one the target keeps a place for a tenant before its move
// begins; the order that opens the target's fence repoints the placement and has the target
// write its tenancy row first; the source lets the tenant go once the move is over. Each is
// repeated with the order that it belongs to, so that whoever resumes the move does it again.
package directory
