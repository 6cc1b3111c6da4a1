// SPDX-License-Identifier: Apache-2.0

// Package memory is an agent-memory service: a tenant's memories are JSON values
// under namespace and key, with versions, history, and a stream of events. It is
// an ordinary service that is built on the platform; what makes it one that runs
// in cells is in engine.go (writes through the guard) and cmd/memory (a member).
//
// # Who is authoritative
//
// The cell's database. A write is one guarded transaction: it commits only while
// the tenant's fence admits the request's epoch, together with one event in the
// outbox. A read is answered only if the fence still admits the request's epoch
// after the rows were read, so a process that does not know yet that the tenant
// left cannot give an old answer.
//
// # Versions
//
// A key's version starts at 1 and grows by one with each change, deletions
// included, for ever. memory_items has the present version of each key (a
// tombstone when deleted), memory_history every version before it.
//
//	absent -set-> 1 -set-> 2 -delete-> 3 (tombstone) -set-> 4 ...
//
// # Failures
//
// A refused fence answers STALE_ROUTE: nothing was written, and the edge sends
// the request to whoever serves the tenant now. A database that cannot be reached
// answers BACKEND_UNAVAILABLE. A commit whose outcome is unknown answers 500: the
// client reads before it repeats, or uses if_version. An event stream ends cleanly
// when the tenant moves; the client reconnects with Last-Event-ID.
//
// A row that the stores refuse because the cell does not hold the tenant answers
// TENANCY_REFUSED; see package guard/tenancy for deployments that are one cell.
//
// Run alone, without CELL_ variables, it is an ordinary service: the tenant comes
// from the X-Tenant header, or is "default".
package memory
