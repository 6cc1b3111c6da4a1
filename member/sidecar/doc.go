// SPDX-License-Identifier: Apache-2.0

// Package sidecar puts a service that knows nothing of cells into one: a process
// beside it that is a member of the cell (package member), admits each request at
// its gate, and passes it on to the service over HTTP/1.1 or HTTP/2 without TLS: plain
// requests, gRPC, server-sent events and WebSockets.
//
// # What the service sees
//
// Cell-Tenant, Cell-Epoch and Cell-Cell say for whom a request was admitted; whatever else
// was called Cell-* in it, in any spelling, was removed. Host, path, query and
// X-Forwarded-* are the edge's. A service that keeps state checks the epoch in its own
// transaction (see docs/guards.md) and answers with the header Cell-Fenced: true
// when its database refused and nothing was written; the sidecar turns that into the
// platform's answer, and the edge repeats the request where the tenant is now.
// All other Cell-* headers of the service's answers are removed.
//
// # Who is authoritative
//
// As in package member: the routing table for who owns a tenant, the fence in the
// cell's database for what commits. With a store configured the sidecar installs the
// guard in the service's database, carries the orders of moves to it, moves rows and
// publishes the outbox. Without one the service is taken for stateless.
//
// # States
//
//	STARTING --tables are there, guard installed--> JOINED --routes, fences, the service's health--> READY
//	READY <--the service's health fails, passes--> NOT READY
//	any --SIGTERM, the service's process ends--> RETIRING --nothing in flight--> ended
//
// # Streams
//
// Requests are waited for by a drain, streams are ended by it. A stream is what asks
// for server-sent events or another protocol, what answers with server-sent events, a
// gRPC call in which either side has sent a second message or the service goes on
// for a second behind its first, and what its path is configured to be. When the gate closes, an answer of server-sent events ends as if
// the service had ended it, a gRPC call ends with UNAVAILABLE, a WebSocket is closed
// with status 1012; the service sees its client go.
//
// # Failures
//
//   - The service cannot be reached: nothing has run, BACKEND_UNAVAILABLE, and the edge
//     tries again for a while. Its health check takes the process out of service.
//   - The connection to it breaks before there is an answer: CELL_UNREACHABLE; the
//     request may have run and is repeated by nobody.
//   - The service's process, if it was started by the sidecar, ends: so does the
//     sidecar, with an error; whoever supervises it starts both again.
//   - The sidecar dies: the process that it started is ended with it. One that was
//     started by others may go on writing for requests that it has; the fence waits
//     for their transactions and refuses later ones.
//
// # Exposure
//
// Listen takes tenants' requests: only edges need to reach it, and it wants their
// admission tokens. AdminListen has health and metrics, and no tenant's data. The
// agent's listener is package member's: mutual TLS, for the directory and other
// cells. The service itself believes the headers that it gets: it must listen where
// only its sidecar can reach it, on the loopback of the machine or the pod.
package sidecar
