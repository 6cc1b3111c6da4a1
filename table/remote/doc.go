// SPDX-License-Identifier: Apache-2.0

// Package remote serves a routing table over HTTP, and uses one.
//
//	GET  /cells/v1/routes                 a page; ?after= &limit= &cell=
//	GET  /cells/v1/routes/{tenant}        one row (or ?tenant=, for the ids "." and "..")
//	POST /cells/v1/routes                 compare-and-set: {"old":n,"route":{...}}
//	GET  /cells/v1/routes?watch=1&from=n  changes, as NDJSON; &heartbeat_ms=
//
// # Who is authoritative
//
// The table behind the handler. Neither side caches; the client is a thin
// [cells.RoutingTable] and passes the same suite as the table itself.
//
// # Watching
//
// Each line of a watch is a JSON object: {"revision":n,"routes":[...]} is an
// update (without routes: a sign of life of the table behind), {"alive":true} says
// only that the connection lives, {"error":{...}} is the last line of a watch that
// broke. The client asks for a heartbeat and gives the watch up when three of them
// did not come, so a peer that is gone without a word, or a path that swallows
// packets, is noticed in seconds. A heartbeat of the connection is not passed on
// as a sign of life: only the table can say that the view is current.
//
// # Failures
//
//   - Errors travel as problem+json with a code; the client maps codes back to the
//     sentinels of package cells. An answer without a code it knows (a proxy's 404,
//     a login page) is [cells.ErrUnavailable], never [cells.ErrNotFound].
//   - The client never sends a compare-and-set twice, and follows no redirects. If
//     the answer does not arrive the outcome is unknown: read the row and compare
//     Stamp.
//   - The handler refuses what it does not understand: unknown or repeated fields,
//     bodies above 512 KiB, another version of the wire. A client that is older than
//     the server can read, and cannot write rows whose fields it would drop.
//
// # Exposure
//
// The handler authenticates nobody by itself. Mount it on a listener that does,
// and give it [WithAuthorize]; give it [ReadOnly] where nobody may decide.
package remote
